"""No run goes on from NaN, or completes with it, nor with anything infinite but what is so from the start."""

from pathlib import Path

import pytest
import torch
from entrypoint import TINY, arguments, ended, record, run_command
from torch import nn

from fastlaunch_train.checks.finiteness import first_names, not_finite, trained
from fastlaunch_train.loop.checkpoint import latest_checkpoint

INF, NAN = float("inf"), float("nan")


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mask", torch.tensor([0.0, -INF]))
        self.frozen = nn.Parameter(torch.tensor([0.0, -INF]), requires_grad=False)


@pytest.mark.parametrize(
    ("dtype", "value"),
    [(torch.float16, NAN), (torch.bfloat16, INF), (torch.float32, -INF), (torch.float64, NAN)],
)
def test_what_is_not_finite_is_named_in_every_nest(value: float, dtype: torch.dtype) -> None:
    bad = torch.zeros(3, 5, dtype=dtype)
    bad[1, 4] = value
    good = torch.full((3,), torch.finfo(dtype).max, dtype=dtype)
    state = {
        "model": {"a.weight": good, "b.weight": bad, "empty": torch.empty(0), "count": torch.tensor(3)},
        "optimizer": {"state": {0: {"exp_avg": good, "step": torch.tensor(1.0)}, 1: {"exp_avg": bad}}},
        "masters": [good, (bad, None, 0.5, "text")],
        "flags": torch.tensor([True]),
    }
    names = ["model.b.weight", "optimizer.state.1.exp_avg", "masters.1.0"]
    assert not_finite(state, nn.Linear(1, 1)) == names
    assert first_names(names) == "model.b.weight and 2 more"
    assert first_names(names[:1]) == "model.b.weight"


@pytest.mark.parametrize(
    "wrap", [lambda model: model, nn.DataParallel, lambda model: nn.ModuleDict({"module": model})]
)
def test_a_mask_may_be_infinite_and_no_weight(wrap) -> None:  # type: ignore[no-untyped-def]
    model = Masked()
    assert not_finite({"model": model.state_dict()}, wrap(model)) == []
    scales = {"fc._extra_state": {"scale_fwd": torch.tensor([INF, 1.0])}}
    assert not_finite({"model": scales}, model) == []
    with torch.no_grad():
        model.linear.bias[0] = -INF
        model.mask[0] = NAN
    assert not_finite({"model": model.state_dict()}, wrap(model)) == ["model.mask", "model.linear.bias"]


def test_what_is_trained_is_looked_at_and_what_is_saved_with_it() -> None:
    model = Masked()
    model.register_buffer("scratch", torch.tensor([NAN]), persistent=False)
    wrapped = nn.ModuleDict({"module": model})
    found = trained(wrapped)
    assert found.keys() == {"linear.weight", "linear.bias", "mask"}
    assert not_finite(found, wrapped) == []
    with torch.no_grad():
        model.linear.bias[0] = INF
        model.mask[0] = NAN
    assert not_finite(trained(wrapped), wrapped) == ["linear.bias", "mask"]


each_loop = pytest.mark.parametrize(
    "loop",
    [
        "ours",
        pytest.param("lightning", marks=pytest.mark.full),
        pytest.param("transformers", marks=pytest.mark.full),
    ],
)


@pytest.mark.full
@pytest.mark.timeout(180)
@pytest.mark.parametrize("recipe", ["fp32", "fsdp2", "zero1", "zero2"])
def test_every_rank_ends_where_the_last_step_ruins_ones_share(tmp_path: Path, recipe: str) -> None:
    if recipe.startswith("zero"):
        pytest.importorskip("deepspeed")
    argv = arguments(tmp_path, "--steps", "1", workload=f"{TINY}:infinite_last_weight", recipe=recipe)
    code, output = run_command(argv, nproc=2)
    assert code != 0, output
    ends = [record(tmp_path, rank=rank).end for rank in range(2)]
    assert [end.status for end in ends if end is not None] == 2 * ["nan_loss"], output
    whole, named = "what step 1 left is not finite", " (shift)"
    # ZeRO gathers the weights after its step: each rank holds all of them.
    holds_it = (recipe != "fsdp2", True)
    assert [end.message for end in ends if end is not None] == [
        whole + (named if holds else "") for holds in holds_it
    ]


@each_loop
def test_weights_that_the_last_step_ruins_end_the_run(tmp_path: Path, loop: str) -> None:
    """Step 15's loss is finite and its gradients are not; no loss comes after it, and nothing is saved."""
    more = ("--steps", "15", "--checkpoint-every", "10", "--eval-every", "10", "--set", f"loop={loop}")
    ended(33, arguments(tmp_path, *more, workload=f"{TINY}:infinite_gradients"))
    found = record(tmp_path)
    assert found.end is not None and found.end.status == "nan_loss"
    assert (found.end.message or "").startswith("what step 15 left is not finite (0.weight and")
    assert [step.step for step in found.steps if step.loss is not None] == list(range(1, 16))
    assert found.blocks[-1].last_step == 15
    assert 15 not in {each.step for each in found.evals}, "nothing asks a model that is none"


@each_loop
def test_weights_that_a_steps_update_ruins_are_not_saved(tmp_path: Path, loop: str) -> None:
    """Step 15's loss is finite and its gradients are not; a checkpoint is due right after it."""
    more = ("--checkpoint-every", "5", "--eval-every", "5", "--set", f"loop={loop}")
    ended(33, arguments(tmp_path, *more, workload=f"{TINY}:infinite_gradients"))
    found = record(tmp_path)
    assert found.end is not None and found.end.status == "nan_loss"
    assert "step-00000010.pt is the last checkpoint" in (found.end.message or "")
    assert all(step.loss is not None for step in found.steps), "no loss tells of it"
    newest = latest_checkpoint(tmp_path / "checkpoints")
    assert newest is not None and newest.name == "step-00000010.pt"
    assert sorted(path.name for path in newest.parent.iterdir()) == ["step-00000005.pt", "step-00000010.pt"]


def test_a_checkpoint_that_is_not_finite_is_not_gone_on_from(tmp_path: Path) -> None:
    argv = arguments(tmp_path, "--steps", "20", "--checkpoint-every", "10")
    ended(0, argv)
    path = tmp_path / "checkpoints" / "step-00000020.pt"
    content = torch.load(path, weights_only=True)
    content["model"]["0.weight"][0, 0] = NAN
    torch.save(content, path)
    argv = [*arguments(tmp_path, "--steps", "30", "--checkpoint-every", "10"), "--resume"]
    assert "step-00000020.pt holds what is not finite: model.0.weight" in ended(2, argv)
    path.unlink()
    ended(0, argv)
    assert record(tmp_path, attempt=3).header["first_step"] == 11

"""Held-out data: scored at the same steps whatever happens, the best weights kept, training left alone."""

import sys
from pathlib import Path

import pytest
import torch
from entrypoint import TINY, arguments, ended, record, run_command
from torch import nn

sys.path.insert(0, str(Path(__file__).parent / "workloads"))
import tiny

from fastlaunch_train.loop.evaluation import is_better
from fastlaunch_train.models.model_state import preserve_state
from fastlaunch_train.records.records import Eval, RankRecord
from fastlaunch_train.workloads.contract import DataRequest

CPU = torch.device("cpu")
EVALUATED = f"{TINY}:evaluated"


def scored(loss: float | None, metric_value: float | None = None) -> Eval:
    return Eval(step=1, split="validation", loss=loss, num_samples=1, seconds=0.0, metric_value=metric_value)


def values(read: RankRecord) -> list[tuple[int, str, str, float | None, float | None, int]]:
    """What was evaluated, without the seconds it took."""
    return [(e.step, e.split, e.weights, e.loss, e.metric_value, e.num_samples) for e in read.evals]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RankRecord:
    """A run of 24 steps, evaluated every 7."""
    output = tmp_path_factory.mktemp("whole")
    ended(
        0,
        arguments(
            output, "--steps", "24", "--eval-every", "7", "--checkpoint-every", "5", workload=EVALUATED
        ),
    )
    return record(output)


def test_evaluations_come_at_their_steps_and_at_the_end(whole: RankRecord) -> None:
    assert [(e.step, e.split, e.weights) for e in whole.evals[:-1]] == [
        (7, "validation", "current"),
        (14, "validation", "current"),
        (21, "validation", "current"),
        (24, "validation", "current"),
        (24, "test", "current"),
    ]
    assert {e.metric for e in whole.evals} == {"accuracy"}
    assert all(e.seconds > 0 and e.loss is not None for e in whole.evals)
    assert {(e.split, e.num_samples) for e in whole.evals} == {("validation", 30), ("test", 18)}
    ends = {block.last_step for block in whole.blocks}
    assert {5, 7, 10, 14, 15, 20, 21, 24} <= ends, "a block ends at each evaluation and checkpoint"
    phases = [phase for phase in whole.phases if phase.name == "eval"]
    assert [phase.step for phase in phases] == [7, 14, 21, 24, 24, 24]
    assert (phases[0].detail or "").startswith("validation: loss ")


def test_the_weights_that_were_best_are_tested_at_the_end(whole: RankRecord, tmp_path: Path) -> None:
    validated = [e for e in whole.evals if e.split == "validation"]
    best = max(validated, key=lambda e: (e.metric_value or 0.0, -e.step))
    last = whole.evals[-1]
    assert (last.split, last.weights, last.step) == ("test", "best", best.step)

    scores = {}
    for steps in (7, 21):
        output = tmp_path / str(steps)
        argv = arguments(output, "--steps", str(steps), "--eval-every", "7", workload=f"{TINY}:best_at_first")
        ended(0, argv)
        scores[steps] = {e.weights: (e.step, e.loss) for e in record(output).evals if e.split == "test"}
    assert scores[21]["best"] == scores[7]["best"] == scores[7]["current"]
    assert scores[21]["current"] != scores[21]["best"]


def test_tokens_and_padding_are_counted(whole: RankRecord, tmp_path: Path) -> None:
    request = DataRequest(
        source="synthetic",
        batch_size=4,
        seed=0,
        rank=0,
        world_size=1,
        device=CPU,
        num_workers=0,
        first_step=1,
    )
    for step, batch in zip(whole.steps, tiny.batches(request), strict=False):
        assert step.num_tokens == 4 * tiny.NUM_FEATURES
        assert step.num_padding == int((batch[0] < 0).sum())
    assert whole.header["workload"]["sequence_length"] == tiny.NUM_FEATURES
    assert whole.header["workload"]["metric"] == "accuracy"


def test_evaluating_changes_nothing_of_the_training(whole: RankRecord, tmp_path: Path) -> None:
    ended(0, arguments(tmp_path, "--steps", "24", workload=EVALUATED))
    plain = record(tmp_path)
    assert plain.evals == ()
    assert [step.loss for step in plain.steps] == [step.loss for step in whole.steps]


def test_a_resumed_run_evaluates_at_the_same_steps_and_keeps_the_best_weights(
    whole: RankRecord, tmp_path: Path
) -> None:
    more = ("--eval-every", "7", "--checkpoint-every", "5")
    # It is stopped between its second evaluation and the third.
    ended(130, arguments(tmp_path, "--steps", "24", *more, workload=f"{TINY}:stopped_at_17"))
    ended(0, arguments(tmp_path, "--steps", "24", *more, "--resume", workload=f"{TINY}:stopped_at_17"))
    first, second = record(tmp_path), record(tmp_path, attempt=2)
    assert second.header["first_step"] == 18
    assert values(first) + values(second) == values(whole)
    assert [step.loss for step in second.steps] == [step.loss for step in whole.steps[17:]]


def test_an_evaluation_ends_soon_when_asked_to_and_is_done_by_the_next_attempt(tmp_path: Path) -> None:
    argv = arguments(
        tmp_path,
        *("--steps", "12", "--eval-every", "5", "--checkpoint-every", "100"),
        workload=f"{TINY}:stopped_in_evaluation",
    )
    ended(130, argv)
    first = record(tmp_path)
    assert first.evals == ()
    assert first.end is not None and first.end.num_steps == 5
    ended(0, [*argv, "--resume"], RESUMED="1")
    second = record(tmp_path, attempt=2)
    assert [(e.step, e.split) for e in second.evals[:3]] == [
        (5, "validation"),
        (10, "validation"),
        (12, "validation"),
    ]


def test_a_run_killed_before_its_tests_makes_up_for_them(whole: RankRecord, tmp_path: Path) -> None:
    argv = arguments(
        tmp_path,
        *("--steps", "24", "--eval-every", "7", "--checkpoint-every", "12"),
        workload=f"{TINY}:killed_in_test",
    )
    ended(-9, argv)
    ended(0, [*argv, "--resume"], RESUMED="1")
    again = record(tmp_path, attempt=2)
    assert again.steps == ()
    assert values(again) == values(whole)[-2:]
    assert again.end is not None and again.end.status == "completed"


def test_a_stop_while_the_best_weights_are_tested_saves_the_last_ones(tmp_path: Path) -> None:
    found = []
    for function in ("best_at_first", "stopped_in_the_last_test"):
        output = tmp_path / function
        more = ("--steps", "24", "--eval-every", "7", "--checkpoint-every", "100")
        argv = arguments(output, *more, workload=f"{TINY}:{function}")
        stopped = function == "stopped_in_the_last_test"
        ended(130 if stopped else 0, argv)
        evals = record(output).evals
        if stopped:
            ended(0, [*argv, "--resume"], RESUMED="1")
            assert record(output, attempt=2).steps == ()
            evals = (*evals[:-1], *record(output, attempt=2).evals)
        found.append([(e.step, e.split, e.weights, e.loss) for e in evals])
    assert found[0] == found[1]
    assert found[0][-1][0] == 7, "the best weights are others than the last"


@pytest.mark.parametrize("function", ["build", "no_held_out_batch"])
def test_a_workload_without_held_out_data_is_refused(tmp_path: Path, function: str) -> None:
    printed = ended(2, arguments(tmp_path, "--eval-every", "7", workload=f"{TINY}:{function}"))
    assert "no held-out data" in printed and "--eval-every" in printed


def test_epochs_are_turned_into_steps(tmp_path: Path) -> None:
    argv = [*arguments(tmp_path, workload=EVALUATED), "--epochs", "2"]
    at = argv.index("--steps")
    del argv[at : at + 2]
    printed = ended(0, argv)
    assert record(tmp_path).header["steps"] == 26, "50 samples in batches of 4, twice"
    printed = ended(2, [*argv, "--resume", "--workload", f"{TINY}:build"])
    assert "no end" in printed and "--steps" in printed


def test_a_higher_metric_is_better_and_else_a_lower_loss() -> None:
    assert is_better(scored(2.0, 0.9), scored(1.0, 0.8))
    assert not is_better(scored(0.5, 0.8), scored(1.0, 0.8)), "the first of equals stays"
    assert is_better(scored(0.5), scored(1.0))
    assert not is_better(scored(None, 0.9), scored(1.0, 0.1))
    assert is_better(scored(1.0, 0.1), scored(None, 0.9))


class Delayed(nn.Module):
    """Remembers maxima as Transformer Engine's modules do: beside its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.frozen = nn.Dropout().eval()
        state = type("State", (), {"amax_history": torch.zeros(2), "scale": torch.ones(1)})()
        self.fp8_meta = {"scaling_fwd": state, "recipe": "delayed"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.fp8_meta["scaling_fwd"].amax_history[0] = x.abs().max()  # type: ignore[attr-defined]
        return self.frozen(self.norm(x))  # type: ignore[no-any-return]


def test_a_forward_pass_in_between_leaves_no_trace() -> None:
    model = Delayed()
    generator = torch.get_rng_state()
    with preserve_state(model):
        model.eval().train()
        model(torch.randn(8, 4))
        assert model.fp8_meta["scaling_fwd"].amax_history[0] > 0  # type: ignore[attr-defined]
        assert model.norm.num_batches_tracked == 1
    assert model.fp8_meta["scaling_fwd"].amax_history[0] == 0  # type: ignore[attr-defined]
    assert model.norm.num_batches_tracked == 0
    assert model.norm.training and not model.frozen.training
    assert torch.equal(torch.get_rng_state(), generator)


@pytest.mark.full
def test_two_ranks_score_their_shares_of_the_same_data(tmp_path: Path) -> None:
    alone, both = tmp_path / "alone", tmp_path / "both"
    assert run_command(arguments(alone, "--eval-every", "10", workload=f"{TINY}:untrained"))[0] == 0
    code, printed = run_command(arguments(both, "--eval-every", "10", workload=f"{TINY}:untrained"), nproc=2)
    assert code == 0, printed
    expected = record(alone).evals
    for rank in range(2):
        found = record(both, rank=rank).evals
        assert [(e.step, e.split, e.num_samples) for e in found] == [
            (e.step, e.split, e.num_samples) for e in expected
        ], "five batches for two ranks: each keeps the other company"
        assert [e.loss for e in found] == pytest.approx([e.loss for e in expected], rel=1e-6)
        assert [e.metric_value for e in found] == [e.metric_value for e in expected]


@pytest.mark.full
@pytest.mark.timeout(200)
def test_each_ranks_share_of_the_best_weights_comes_back(tmp_path: Path) -> None:
    argv = arguments(
        tmp_path,
        *("--eval-every", "5", "--checkpoint-every", "7", "--set", "parallelism=fsdp2"),
        workload=f"{TINY}:compiled",
    )
    code, printed = run_command([*argv, "--steps", "14"], nproc=2)
    assert code == 0, printed
    code, printed = run_command([*argv, "--steps", "20", "--resume"], nproc=2)
    assert code == 0, printed
    first, second = record(tmp_path).evals[-1], record(tmp_path, attempt=2).evals[-1]
    assert (first.split, first.weights) == (second.split, second.weights) == ("test", "best")
    assert second.step == first.step, "none of the second attempt's is better, in this task"
    assert second.loss == first.loss

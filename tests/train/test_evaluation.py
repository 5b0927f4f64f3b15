"""Held-out data: scored at the same steps whatever happens, the best weights kept, training left alone."""

import sys
from pathlib import Path

import pytest
import torch
from data_requests import request
from entrypoint import TINY, arguments, end_of, ended, record, run_command, trained
from torch import nn

sys.path.insert(0, str(Path(__file__).parent / "workloads"))
import tiny

from fastlaunch.measure.record_files import RankRecord
from fastlaunch_train.loop.evaluation import is_better
from fastlaunch_train.models.model_state import preserve_state
from fastlaunch_train.records.records import Eval

EVALUATED = f"{TINY}:evaluated"
#: 24 steps, evaluated every 7.
EVERY_7 = ("--steps", "24", "--eval-every", "7")


def values(read: RankRecord) -> list[tuple[int, str, str, float | None, float | None, int]]:
    """What was evaluated, without the seconds it took."""
    return [(e.step, e.split, e.weights, e.loss, e.metric_value, e.num_samples) for e in read.evals]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RankRecord:
    output = tmp_path_factory.mktemp("whole")
    return trained(output, *EVERY_7, "--checkpoint-every", "5", workload=EVALUATED)


@pytest.fixture(scope="module")
def falling(tmp_path_factory: pytest.TempPathFactory) -> RankRecord:
    """A run whose first weights are the best."""
    return trained(tmp_path_factory.mktemp("falling"), *EVERY_7, workload=f"{TINY}:best_at_first")


def test_evaluations_come_at_their_steps_and_at_the_end(whole: RankRecord) -> None:
    assert [(e.step, e.split, e.weights, e.num_samples) for e in whole.evals[:-1]] == [
        (7, "validation", "current", 30),
        (14, "validation", "current", 30),
        (21, "validation", "current", 30),
        (24, "validation", "current", 30),
        (24, "test", "current", 18),
    ]
    assert {e.metric for e in whole.evals} == {"accuracy"}
    assert all(e.seconds > 0 and e.loss is not None for e in whole.evals)
    ends = {block.last_step for block in whole.blocks}
    assert {5, 7, 10, 14, 15, 20, 21, 24} <= ends, "a block ends at each evaluation and checkpoint"
    assert [phase.step for phase in whole.phases if phase.name == "eval"] == [7, 14, 21, 24, 24, 24]


def test_the_weights_that_were_best_are_tested_at_the_end(
    whole: RankRecord, falling: RankRecord, tmp_path: Path
) -> None:
    validated = [e for e in whole.evals if e.split == "validation"]
    best = max(validated, key=lambda e: (e.metric_value or 0.0, -e.step))
    assert values(whole)[-1][:3] == (best.step, "test", "best")
    short = trained(tmp_path, "--steps", "7", "--eval-every", "7", workload=f"{TINY}:best_at_first")
    current, best_of_last = falling.evals[-2:]
    assert (best_of_last.step, best_of_last.loss) == (7, short.evals[-1].loss)
    assert current.loss != best_of_last.loss


def test_tokens_and_padding_are_counted(whole: RankRecord) -> None:
    for step, batch in zip(whole.steps, tiny.batches(request()), strict=False):
        assert step.num_tokens == 4 * tiny.NUM_FEATURES
        assert step.num_padding == int((batch[0] < 0).sum())
    assert whole.header["workload"]["sequence_length"] == tiny.NUM_FEATURES
    assert whole.header["workload"]["metric"] == "accuracy"


def test_evaluating_changes_nothing_of_the_training(whole: RankRecord, tmp_path: Path) -> None:
    plain = trained(tmp_path, "--steps", "24", workload=EVALUATED)
    assert plain.evals == ()
    assert [step.loss for step in plain.steps] == [step.loss for step in whole.steps]


def test_a_resumed_run_evaluates_at_the_same_steps_and_keeps_the_best_weights(
    whole: RankRecord, tmp_path: Path
) -> None:
    # It is stopped between its second evaluation and the third.
    argv = arguments(tmp_path, *EVERY_7, "--checkpoint-every", "5", workload=f"{TINY}:stopped_at_17")
    ended(130, argv)
    ended(0, [*argv, "--resume"])
    first, second = record(tmp_path), record(tmp_path, attempt=2)
    assert second.header["first_step"] == 18
    assert values(first) + values(second) == values(whole)
    assert [step.loss for step in second.steps] == [step.loss for step in whole.steps[17:]]


def test_an_evaluation_ends_soon_when_asked_to_and_is_done_by_the_next_attempt(tmp_path: Path) -> None:
    more = ("--steps", "12", "--eval-every", "5", "--checkpoint-every", "100")
    argv = arguments(tmp_path, *more, workload=f"{TINY}:stopped_in_evaluation")
    ended(130, argv)
    assert record(tmp_path).evals == ()
    assert end_of(tmp_path).num_steps == 5
    ended(0, [*argv, "--resume"], RESUMED="1")
    second = record(tmp_path, attempt=2)
    assert [e.step for e in second.evals if e.split == "validation"] == [5, 10, 12]


def test_a_run_killed_before_its_tests_makes_up_for_them(whole: RankRecord, tmp_path: Path) -> None:
    argv = arguments(tmp_path, *EVERY_7, "--checkpoint-every", "12", workload=f"{TINY}:killed_in_test")
    ended(-9, argv)
    ended(0, [*argv, "--resume"], RESUMED="1")
    again = record(tmp_path, attempt=2)
    assert not again.steps
    assert values(again) == values(whole)[-2:]
    assert end_of(tmp_path, attempt=2).status == "completed"


def test_a_stop_while_the_best_weights_are_tested_saves_the_last_ones(
    falling: RankRecord, tmp_path: Path
) -> None:
    more = (*EVERY_7, "--checkpoint-every", "100")
    argv = arguments(tmp_path, *more, workload=f"{TINY}:stopped_in_the_last_test")
    ended(130, argv)
    ended(0, [*argv, "--resume"], RESUMED="1")
    again = record(tmp_path, attempt=2)
    assert not again.steps
    evals = (*record(tmp_path).evals[:-1], *again.evals)
    assert [(e.step, e.split, e.weights, e.loss) for e in evals] == [
        (e.step, e.split, e.weights, e.loss) for e in falling.evals
    ]


@pytest.mark.parametrize("function", ["build", "no_held_out_batch"])
def test_a_workload_without_held_out_data_is_refused(tmp_path: Path, function: str) -> None:
    printed = ended(2, arguments(tmp_path, "--eval-every", "7", workload=f"{TINY}:{function}"))
    assert "no held-out data" in printed


def test_epochs_are_turned_into_steps(tmp_path: Path) -> None:
    argv = [*arguments(tmp_path, workload=EVALUATED)[:-2], "--epochs", "2"]
    ended(0, argv)
    assert record(tmp_path).header["steps"] == 26, "50 samples in batches of 4, twice"
    assert "no epochs" in ended(2, [*argv, "--resume", "--workload", f"{TINY}:build"])


def scored(loss: float | None, metric_value: float | None = None) -> Eval:
    return Eval(step=1, split="validation", loss=loss, num_samples=1, seconds=0.0, metric_value=metric_value)


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
    """Five batches for two ranks: each keeps the other company."""
    more, workload = ("--eval-every", "10"), f"{TINY}:untrained"
    expected = trained(tmp_path / "alone", *more, workload=workload).evals
    code, printed = run_command(arguments(tmp_path / "both", *more, workload=workload), nproc=2)
    assert code == 0, printed
    for rank in range(2):
        found = record(tmp_path / "both", rank=rank).evals
        assert [(e.step, e.split, e.num_samples, e.metric_value) for e in found] == [
            (e.step, e.split, e.num_samples, e.metric_value) for e in expected
        ]
        assert [e.loss for e in found] == pytest.approx([e.loss for e in expected], rel=1e-6)


@pytest.mark.full
@pytest.mark.timeout(200)
def test_each_ranks_share_of_the_best_weights_comes_back(tmp_path: Path) -> None:
    more = ("--eval-every", "5", "--checkpoint-every", "7", "--set", "parallelism=fsdp2")
    argv = arguments(tmp_path, *more, workload=f"{TINY}:compiled")
    for steps in (["--steps", "14"], ["--steps", "20", "--resume"]):
        code, printed = run_command([*argv, *steps], nproc=2)
        assert code == 0, printed
    first, second = record(tmp_path).evals[-1], record(tmp_path, attempt=2).evals[-1]
    assert (first.split, first.weights) == (second.split, second.weights) == ("test", "best")
    assert (second.step, second.loss) == (first.step, first.loss), "the second attempt's are worse"

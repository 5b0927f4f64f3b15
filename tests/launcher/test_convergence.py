"""The convergence guard: what makes a pair, what its limits are, and how often its verdict is wrong."""

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from fake_summaries import BEFORE, PLAIN, changed, evaluated

from fastlaunch.analysis.convergence import converges, held_out, ratio_to_same_loss
from fastlaunch.measure.summary import Interval, Quality, RunSummary
from fastlaunch_train.records.records import Eval

SEEDS = range(5)
REFERENCE = [evaluated("bf16", seed, 2.0) for seed in SEEDS]


def runs(losses: Sequence[float | None], **changes: Any) -> list[RunSummary]:
    """Runs of te-fp8, one for each seed from 0 on."""
    return [evaluated("te-fp8", seed, loss, **changes) for seed, loss in enumerate(losses)]


def test_the_limits_by_hand() -> None:
    """Differences of 0.01, 0.03 and 0.05: mean 0.03, deviation 0.02; t(0.95, 2) is 2.919986."""
    found = converges(runs([2.01, 2.03, 2.05]), REFERENCE)
    assert found.end is not None and found.end.low is not None and found.end.high is not None
    half_width = 2.919986 * 0.02 / 3**0.5
    assert (found.end.mean, found.end.low, found.end.high) == pytest.approx(
        (0.03, 0.03 - half_width, 0.03 + half_width), abs=1e-7
    )
    assert (found.end.step, found.end.num_pairs) == (100, 3)
    assert found.end.reference_loss == pytest.approx(2.0)
    assert (found.reference, found.seeds) == ("bf16", (0, 1, 2))


def test_the_pairing_takes_out_what_the_seeds_share() -> None:
    """Losses differ by a fifth between seeds, the recipe by a thousandth at each."""
    reference = [evaluated("bf16", seed, 2.0 + 0.1 * seed) for seed in SEEDS]
    ours = [evaluated("te-fp8", seed, 2.002 + 0.1 * seed) for seed in SEEDS]
    found = converges(ours, reference)
    assert found.verdict == "within"
    assert found.end is not None and found.end.relative(found.end.mean) == pytest.approx(0.002 / (2.2 / 3))
    shuffled = [changed(run, seed=(run.seed or 0) * 2 % 5) for run in ours]
    assert converges(shuffled, reference).verdict == "unknown"


@pytest.mark.parametrize(
    ("losses", "verdict"),
    [
        ([2.0] * 5, "within"),
        ([2.01, 2.012, 2.008, 2.01, 2.011], "within"),  # 0.5%, surely under 1%
        ([2.021, 2.0211, 2.0209, 2.021, 2.021], "worse"),  # 1.05%
        ([2.019, 2.021, 2.02, 2.018, 2.019], "unknown"),  # surely above 0, and under 1% by its mean alone
        ([2.1, 1.9, 2.2, 2.0, 2.05], "unknown"),
        ([2.06, 2.062, 2.058], "worse"),
        ([2.5, 2.5], "unknown"),
    ],
)
def test_verdicts(losses: list[float], verdict: str) -> None:
    assert converges(runs(losses), REFERENCE).verdict == verdict


def test_what_was_learnt_begins_at_the_initial_weights() -> None:
    """By the loss of training at the first step, or an earlier evaluation that is higher."""
    ours = runs([2.029] * 5)
    (by_evaluation, by_training, unknown) = (
        converges(ours, [changed(run, evals=run.quality.evals[kept:], first_loss=first) for run in REFERENCE])
        for kept, first in ((0, 2.5), (-1, 3.0), (-1, None))
    )
    for judged, learnt, verdict in ((by_evaluation, 2 / 3, "worse"), (by_training, 1.0, "within")):
        assert judged.end is not None and judged.end.learnt is not None
        assert (judged.end.learnt.mean, judged.verdict) == (pytest.approx(learnt), verdict)
    assert unknown.verdict == "unknown" and unknown.end is not None and unknown.end.learnt is None
    assert "is not recorded" in unknown.caveats[0]


def test_the_difference_in_steps_by_hand() -> None:
    """From step 52 to 100 the reference falls from 2.3 to 2.0, by 0.00625 a step."""
    judged = converges(runs([2.01, 2.03, 2.05]), REFERENCE).end
    assert judged is not None
    assert judged.more_steps(judged.mean) == pytest.approx(0.03 / 0.00625 / 100)
    # With one evaluation by its losses of training.
    alone = [
        changed(run, evals=run.quality.evals[-1:], first_loss=3.0, loss_slope=-0.01) for run in REFERENCE
    ]
    judged = converges(runs([2.01, 2.03, 2.05]), alone).end
    assert judged is not None and judged.more_steps(judged.mean) == pytest.approx(0.03)
    flat = [changed(run, loss_slope=slope) for run, slope in zip(alone, [-1, 1, -1, 1, 0], strict=True)]
    judged = converges(runs([2.01, 2.03, 2.05]), flat).end
    assert judged is not None and judged.more_steps(judged.mean) is None


def test_a_ratio_to_the_same_loss_by_hand() -> None:
    """3% more steps, so 1.5 becomes 1.456; half a width of t(0.975, 2) = 4.302653."""
    alone = [
        changed(run, evals=run.quality.evals[-1:], first_loss=3.0, loss_slope=-0.01) for run in REFERENCE
    ]
    judged = ratio_to_same_loss(
        Interval(value=1.5, low=1.47, high=1.53), converges(runs([2.01, 2.03, 2.05]), alone)
    )
    steps = 4.302653 * 0.02 / 3**0.5 / 1.03
    assert judged is not None and judged.low is not None
    assert judged.value == pytest.approx(1.5 / 1.03)
    assert math.log(judged.value / judged.low) == pytest.approx(
        math.hypot(math.log(1.5 / 1.47), steps), rel=1e-6
    )


@pytest.mark.parametrize(
    ("last_step", "first_losses"),
    [(19, [8 / 3] * 5), (100, [2.0] * 5), (100, [1.9] * 5), (100, [2.1, 2.2, 3.0, 2.0, 3.0])],
    ids=["19 steps", "nothing learnt", "loss risen", "no sure fall"],
)
def test_a_training_may_be_too_short_to_tell(last_step: int, first_losses: list[float]) -> None:
    def ends(run: RunSummary, **changes: Any) -> RunSummary:
        return changed(run, evals=(replace(run.quality.evals[-1], step=last_step),), **changes)

    reference = [ends(run, first_loss=loss) for run, loss in zip(REFERENCE, first_losses, strict=True)]
    judged = converges([ends(run) for run in runs([2.5] * 5)], reference)
    assert (judged.verdict, judged.more_pairs) == ("too short to tell", None)
    # A loss that is no number needs no margin.
    assert converges([ends(run) for run in runs([None] * 5)], reference).verdict == "worse"


def test_checkpoints_are_nearest_to_the_quarters() -> None:
    found = converges(runs([2.0] * 5), REFERENCE)
    assert [checkpoint.step for checkpoint in found.checkpoints] == [26, 52, 73]
    assert {checkpoint.num_pairs for checkpoint in found.checkpoints} == {5}
    # Only evaluations that all runs of all pairs have: here the reference lacks that after step 52.
    without = [changed(run, evals=tuple(e for e in run.quality.evals if e.step != 52)) for run in REFERENCE]
    assert [checkpoint.step for checkpoint in converges(runs([2.0] * 5), without).checkpoints] == [26, 73]
    ends_alone = [changed(run, evals=run.quality.evals[-1:], first_loss=8 / 3) for run in REFERENCE]
    alone = converges(runs([2.0] * 5), ends_alone)
    assert (alone.checkpoints, alone.verdict) == ((), "within")


def test_worse_on_the_way_takes_a_within_back() -> None:
    found = converges(runs([2.0] * 5, on_the_way=1.04), REFERENCE)
    assert found.verdict == "unknown"
    assert found.more_pairs is None
    # On the way alone makes nothing worse, and does not excuse what is.
    assert converges(runs([2.1] * 5, on_the_way=0.9), REFERENCE).verdict == "worse"
    assert converges(runs([2.0] * 5, on_the_way=0.9), REFERENCE).verdict == "within"


@pytest.mark.parametrize(
    "changes",
    [
        {"data": "loader"},
        {"batch_size_per_gpu": 128},
        {"num_gpus": 2, "batch_size_per_gpu": 32},
        {"fingerprint": {"model": "gpt2"}},
        {"fingerprint": {"model_config": "c", "model_weights": "w"}},
        {"fingerprint": {"data": "ab"}},
        {"fingerprint": {"tokenizer": "bytes"}},
        {"fingerprint": {"arguments": "depth=3"}},
        {"sequence_length": 512},
        {"end": 200},
        {"num_samples": 500},
        {"status": "interrupted"},
    ],
)
def test_what_makes_no_pair(changes: dict[str, Any]) -> None:
    found = converges(runs([2.0] * 5, **changes), REFERENCE)
    assert (found.verdict, found.num_pairs, len(found.missing)) == ("unknown", 0, 1)


@pytest.mark.parametrize(
    ("ours", "theirs", "is_pair"), [(None, None, True), ("ab", None, False), (None, "cd", False)]
)
def test_runs_on_two_files_make_no_pair(ours: str | None, theirs: str | None, is_pair: bool) -> None:
    """Older records, which do not say which file it was, pair with each other."""

    def on(recipe: str, digest: str | None) -> list[RunSummary]:
        fingerprint = {"data": digest} if digest else {}
        return [evaluated(recipe, seed, 2.0, data="file", fingerprint=fingerprint) for seed in range(3)]

    found = converges(on("te-fp8", ours), on("bf16", theirs))
    assert (found.verdict, not found.missing) == ("within" if is_pair else "unknown", is_pair)


def test_repeats_of_a_seed_are_one_pair() -> None:
    """Five runs of one seed say nothing of another seed."""
    ours = [evaluated("te-fp8", 0, loss) for loss in (2.0, 2.1, 2.2)]
    found = converges(ours, REFERENCE)
    assert (found.verdict, found.seeds) == ("unknown", (0,))
    assert found.end is not None and found.end.mean == pytest.approx(0.1)


def test_a_reference_without_a_finite_loss_is_told() -> None:
    for lost in ({"status": "nan_loss"}, {"evals": evaluated("bf16", 2, None).quality.evals}):
        reference = [changed(run, **lost) if run.seed == 2 else run for run in REFERENCE]
        found = converges(runs([2.0] * 5), reference)
        assert (found.verdict, found.seeds) == ("within", (0, 1, 3, 4))
        assert len(found.caveats) == len(found.missing) == 1


def test_a_loss_that_is_no_number_where_the_references_is() -> None:
    found = converges(runs([2.0, None, 2.0, 2.0, 2.0]), REFERENCE)
    assert (found.verdict, found.diverged) == ("worse", (1,))
    # Against a reference that does not always train either, it says nothing.
    reference = [changed(run, status="nan_loss") if run.seed == 4 else run for run in REFERENCE]
    found = converges(runs([2.0, None, 2.0, 2.0, 2.0]), reference)
    assert (found.verdict, found.diverged) == ("unknown", (1,))
    # Where both are none, it is the reference's alone.
    assert converges(runs([2.0, 2.0, 2.0, 2.0, None]), reference).verdict == "within"
    # Two seeds are too few for either.
    assert converges(runs([None, 2.0]), REFERENCE).verdict == "unknown"
    assert converges(runs([None, None, None]), REFERENCE).verdict == "worse"


def test_an_evaluation_without_a_loss_is_not_a_divergence() -> None:
    end = Eval(
        step=100,
        split="validation",
        loss=None,
        has_loss=False,
        metric="accuracy",
        metric_value=0.5,
        num_samples=10,
        seconds=1.0,
    )
    scored = runs([2.0] * 5, evals=(end,))
    found = converges(scored, REFERENCE)
    assert (found.verdict, found.num_pairs, found.diverged) == ("unknown", 0, ())
    figures = held_out(scored)
    assert figures is not None and (figures.loss, figures.metric_value) == (None, 0.5)


def test_how_many_more_pairs() -> None:
    """1.5% and 1% of deviation: t(0.95, n - 1) / sqrt(n) must fall under 1.5, as it does at 4 pairs."""
    found = converges(runs([2.03 + difference for difference in (-0.02, 0.0, 0.02)]), REFERENCE)
    assert (found.verdict, found.more_pairs) == ("unknown", 1)
    # Just on the line nothing tells.
    wide = converges(runs([2.02 + difference for difference in (-0.2, 0.0, 0.2)]), REFERENCE)
    assert wide.more_pairs is None


def test_figures_at_the_end() -> None:
    def run(accuracy: float, test: float, best: float) -> RunSummary:
        shared: dict[str, Any] = {"step": 100, "num_samples": 10, "seconds": 1.0, "metric": "accuracy"}
        evals = (
            Eval(split="validation", loss=0.5, metric_value=accuracy, **shared),
            Eval(split="test", loss=0.6, metric_value=test, **shared),
            Eval(split="test", loss=0.4, metric_value=best, weights="best", **shared),
        )
        return evaluated("bf16", 0, 0.5, evals=evals)

    found = held_out([run(0.8, 0.7, 0.75), run(0.9, 0.8, 0.85), evaluated("bf16", 1, None, evals=())])
    assert found is not None
    assert (found.num_runs, found.loss, found.metric) == (2, 0.5, "accuracy")
    assert (found.metric_value, found.test_metric_value, found.best_test_metric_value) == pytest.approx(
        (0.85, 0.75, 0.8)
    )
    lost = held_out([*runs([2.0, None])])
    assert lost is not None and (lost.num_runs, lost.loss) == (2, None)
    assert held_out([evaluated("bf16", 0, 2.0, status="interrupted")]) is None


TRIALS = 200
#: So many of TRIALS are three deviations above 5%.
AT_MOST = TRIALS * 0.05 + 3 * (TRIALS * 0.05 * 0.95) ** 0.5


def simulated(num_pairs: int, worse_by: float, spread: float) -> Counter[str]:
    """Verdicts on a recipe whose true loss is `worse_by` (relative) above its reference's.

    Losses of a seed share a part; each run adds its own of deviation `spread`, most of it for good.
    """
    noise = random.Random(f"{num_pairs} {worse_by} {spread}")
    verdicts: Counter[str] = Counter()

    def run(recipe: str, seed: int, loss: float) -> RunSummary:
        own = loss * (1 + noise.gauss(0, 0.9 * spread))
        evals = tuple(
            Eval(
                step=step,
                split="validation",
                loss=own * more * (1 + noise.gauss(0, 0.44 * spread)),
                num_samples=1000,
                seconds=1.0,
            )
            for step, more in {**BEFORE, 100: 1.0}.items()
        )
        return replace(of_recipe[recipe], seed=seed, quality=Quality(evals=evals))

    of_recipe = {recipe: changed(PLAIN, recipe=recipe) for recipe in ("bf16", "te-fp8")}
    for _ in range(TRIALS):
        seeds = [(seed, 2.0 * (1 + noise.gauss(0, 0.03))) for seed in range(num_pairs)]
        reference = [run("bf16", seed, loss) for seed, loss in seeds]
        ours = [run("te-fp8", seed, loss * (1 + worse_by)) for seed, loss in seeds]
        verdicts[converges(ours, reference).verdict] += 1
    return verdicts


@pytest.mark.parametrize("num_pairs", [3, 5])
@pytest.mark.parametrize("spread", [0.01, 0.05])
def test_an_equal_recipe_is_rarely_called_worse(num_pairs: int, spread: float) -> None:
    """In at most 5% of cases, and the wider the spread the nearer to that."""
    assert simulated(num_pairs, 0.0, spread)["worse"] <= AT_MOST


def test_a_recipe_that_is_3_percent_worse_is_found_and_never_passed() -> None:
    found = simulated(5, 0.03, 0.01)
    assert found["worse"] >= 0.95 * TRIALS
    assert found["within"] == 0
    # Three pairs find it often enough to be allowed, and pass it no more than five do.
    assert simulated(3, 0.03, 0.01)["within"] == 0


@pytest.mark.parametrize("spread", [0.002, 0.01])
def test_a_recipe_at_the_margin_is_rarely_passed(spread: float) -> None:
    assert simulated(5, 0.01, spread)["within"] <= AT_MOST


def test_an_equal_recipe_with_little_spread_is_passed() -> None:
    """So checkpoints that may take a verdict back do not make it unreachable."""
    assert simulated(5, 0.0, 0.002)["within"] >= 0.98 * TRIALS

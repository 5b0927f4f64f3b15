"""Rows, verdicts and ratios of constructed runs, and the published experiment at two days' prices."""

import datetime
import math
import re
from dataclasses import replace
from typing import Any

import pytest
from fake_summaries import CATALOGUE, TODAY, by_recipe, changed, compared, runs
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fastlaunch.analysis.compare import MeasuredRun, Row
from fastlaunch.analysis.differences import Differences
from fastlaunch.analysis.pooling import are_comparable, pool, run_times
from fastlaunch.core.errors import UnknownName
from fastlaunch.measure.published import read_published, shipped_figures
from fastlaunch.measure.summary import Interval
from fastlaunch.report.cost import finish_json
from fastlaunch.report.data import as_json
from fastlaunch.report.table import as_overview

THEN = datetime.date(2023, 11, 15)


def published(day: datetime.date) -> dict[tuple[str | None, str], Row]:
    (path,) = (path for path in shipped_figures() if path.name == "fp8-experiment.csv")
    candidates = [MeasuredRun(run_id=str(n), summary=s) for n, s in enumerate(read_published(path))]
    return {(row.setup.instance, row.setup.recipe): row for row in compared(candidates, as_of=day).rows}


def value(quantity: Interval | None) -> float:
    assert quantity is not None
    return quantity.value


def test_a_row_is_the_geometric_mean_with_the_interval_between_runs() -> None:
    times = (0.100, 0.101, 0.099)
    (row,) = compared(runs("bf16", *times)).rows
    logs = [math.log(time) for time in times]
    mean = sum(logs) / 3
    deviation = math.sqrt(sum((log - mean) ** 2 for log in logs) / 2)
    half_width = 4.302653 * deviation / math.sqrt(3)
    step = row.speed.step_time_s
    assert row.num_runs == 3
    assert step is not None and step.low is not None and step.high is not None
    assert (step.value, step.low, step.high) == pytest.approx(
        (math.exp(mean), math.exp(mean - half_width), math.exp(mean + half_width)), rel=1e-6
    )


def test_a_cost_is_of_any_machine_of_the_type() -> None:
    def half_width(*measured: list[MeasuredRun]) -> float:
        (row,) = compared([run for each in measured for run in each], usd_per_hour=10.0).rows
        usd = row.cost.usd_per_million_samples
        assert usd is not None and usd.high is not None
        return math.log(usd.high / usd.value)

    def on(host: str, session: str) -> list[MeasuredRun]:
        alike = runs("bf16", 0.1, 0.1, host_id=host, session=session)
        return [replace(run, run_id=f"{host}-{session}-{run.run_id}") for run in alike]

    # Scatter at its floor of 0.1% tells hardly anything beside 1.7%.
    assert half_width(on("a", "s")) == pytest.approx(2.571 * 0.017, rel=0.01)
    assert half_width(on("a", "s"), on("a", "t")) == pytest.approx(2.571 * 0.017, rel=0.01)
    three = half_width(on("a", "s"), on("b", "s"), on("c", "s"))
    assert three == pytest.approx(2.365 * 0.017 * math.sqrt(5 / 7 / 3), rel=0.01)


def test_verdicts() -> None:
    candidates = [
        *runs("bf16", 0.1000, 0.1003, 0.0998, 0.1001),
        *runs("compile", 0.0801, 0.0799, 0.0800, 0.0802),
        *runs("fp32", 0.3000, 0.3010, 0.2990, 0.3000),
        *runs("tf32", 0.1001, 0.1000, 0.0999, 0.1002),
    ]
    rows = by_recipe(compared(candidates))
    assert {name: row.verdict.kind for name, row in rows.items()} == {
        "bf16": "baseline",
        "compile": "better",
        "fp32": "worse",
        "tf32": "tie",
    }
    assert rows["bf16"].verdict.speed_ratio == Interval(value=1.0, low=1.0, high=1.0)
    assert value(rows["compile"].verdict.speed_ratio) == pytest.approx(1.25, abs=0.003)
    assert rows["compile"].verdict.ratio is None


def test_unresolved_says_how_many_more_rounds() -> None:
    candidates = [*runs("bf16", 0.1, 0.1011, 0.0995), *runs("tf32", 0.0985, 0.0975, 0.0995)]
    _, row = compared(candidates).rows
    assert row.verdict.kind == "unresolved"
    assert row.verdict.more_rounds is not None and 1 <= row.verdict.more_rounds < 30
    _, row = compared([*runs("bf16", 0.1, 0.15), *runs("tf32", 0.12, 0.1)]).rows
    assert (row.verdict.kind, row.verdict.more_rounds) == ("unresolved", None)


def limits(row: Row, base: Row, level: float) -> tuple[float, float]:
    """The ratio's, of two rows whose verdicts are on speed."""
    between = Differences([*run_times(base.group, 0), *run_times(row.group, 1)]).between(1, 0)
    assert between is not None
    low, high = between.limits(level)
    return math.exp(low), math.exp(high)


def test_the_ratio_is_at_holms_level() -> None:
    base = runs("bf16", 0.1, 0.101, 0.0995)
    first, fast, middle = compared(
        [*base, *runs("compile", 0.08, 0.0808, 0.08), *runs("tf32", 0.09, 0.0909, 0.09, host_id="b")]
    ).rows
    # Of no common round, so that each is judged as if it were alone, but for the level.
    for row, level in ((fast, 0.025), (middle, 0.05)):
        ratio = row.verdict.speed_ratio
        assert ratio is not None
        assert (ratio.low, ratio.high) == pytest.approx(limits(row, first, level), rel=2e-3)


def test_one_run_has_no_interval_and_no_verdict() -> None:
    _, row = compared([*runs("bf16", 0.1, 0.1), *runs("compile", 0.05)]).rows
    assert row.verdict.kind == "no interval"
    assert row.speed.step_time_s == Interval(value=pytest.approx(0.05))
    assert row.verdict.speed_ratio == Interval(value=pytest.approx(2.0))
    _, row = compared([*runs("bf16", 0.1), *runs("compile", 0.05, 0.05)]).rows
    assert row.verdict.kind == "no interval"


def apart(time_s: float, ratio: float) -> tuple[float, ...]:
    """Three times whose logarithms have the deviation log(ratio)."""
    return time_s / ratio, time_s, time_s * ratio


def test_a_workload_is_judged_by_its_own_runs() -> None:
    language = {"workload": "gpt2-xsmall"}
    wide = [*runs("bf16", *apart(0.1, 1.3), **language), *runs("tf32", *apart(0.1, 1.3), **language)]
    narrow = [*runs("bf16", 0.1, 0.1, 0.1), *runs("compile", 0.095, 0.095, 0.095)]
    alone, together = compared(narrow).rows[-1], compared([*wide, *narrow]).rows[-1]
    assert together.verdict.speed_ratio == alone.verdict.speed_ratio
    assert together.verdict.kind == "better"


def test_a_row_whose_runs_vary_far_more_is_judged_by_its_own_and_it_is_said() -> None:
    quiet = [*runs("bf16", 0.1, 0.1002, 0.0999, 0.1001), *runs("compile", 0.09, 0.0901, 0.0902, 0.0899)]
    noisy = runs("fp32", 0.2, 0.26, 0.17, 0.31)
    rows = by_recipe(compared([*quiet, *noisy]))
    assert rows["compile"].verdict.kind == "better"
    # The standard deviation of their logarithms, less what the rounds do to all.
    varies = "its runs vary by 22% where the others' vary by 0.16%"
    assert f"{varies}: hence its wide interval" in rows["fp32"].verdict.reasons
    alone = by_recipe(compared(quiet))["compile"].verdict.speed_ratio
    assert rows["compile"].verdict.speed_ratio is not None and alone is not None
    assert rows["compile"].verdict.speed_ratio.value == pytest.approx(alone.value)


def test_runs_that_a_later_session_added_are_judged_at_a_smaller_level_and_verdicts_stand() -> None:
    def in_sessions(recipe: str, *times: tuple[float, ...]) -> list[MeasuredRun]:
        return [
            replace(run, run_id=f"{recipe}-{session}-{run.run_id}", session=f"sub-{session}")
            for session, of_session in enumerate(times)
            for run in runs(recipe, *of_session)
        ]

    # Two sessions like one another; the second is given 1.2%.
    of_base, of_row = (0.1, 0.1005, 0.0995), (0.099, 0.0991, 0.0992)
    first, row = compared([*in_sessions("bf16", *2 * [of_base]), *in_sessions("tf32", *2 * [of_row])]).rows
    ratio = row.verdict.speed_ratio
    assert ratio is not None
    assert (ratio.low, ratio.high) == pytest.approx(limits(row, first, 0.012))
    # What was settled by the first stays settled, whatever the second shows.
    settled = [*in_sessions("bf16", (0.1, 0.1001, 0.1), (0.1, 0.12, 0.1))]
    settled += in_sessions("compile", (0.08, 0.0801, 0.08), (0.12, 0.08, 0.15))
    (_, row) = compared(settled).rows
    assert row.verdict.kind == "better"
    # One submission of all the runs had no verdict.
    (_, at_once) = compared(
        [
            *runs("bf16", 0.1, 0.1001, 0.1, 0.1, 0.12, 0.1),
            *runs("compile", 0.08, 0.0801, 0.08, 0.12, 0.08, 0.15),
        ]
    ).rows
    assert at_once.verdict.kind == "unresolved"


def test_what_rounds_will_hardly_settle_calls_for_another_machine_or_longer_runs() -> None:
    noisy = [*runs("bf16", 0.1, 0.2, 0.15, 0.1), *runs("compile", 0.2, 0.1, 0.15, 0.11)]
    _, row = compared(noisy).rows
    (note,) = (note for note in row.verdict.decisive if "more rounds" in note)
    assert re.fullmatch(r"even 50 more rounds have only a [1-7]0% chance of settling this; run .*", note)


def test_another_batch_has_no_verdict() -> None:
    other = runs("bf16", 0.15, 0.15, 0.15, batch_size_per_gpu=128, samples_per_step=128.0)
    _, row = compared([*runs("bf16", 0.1, 0.1, 0.1), *other]).rows
    assert (row.verdict.kind, row.verdict.comparable_as) == ("other batch", "throughput")
    assert row.verdict.speed_ratio is not None and row.verdict.speed_ratio.value == pytest.approx(4 / 3)
    assert row.verdict.in_batch is None


def test_rows_of_another_batch_have_a_verdict_among_themselves() -> None:
    small = {"batch_size_per_gpu": 32, "samples_per_step": 32.0}
    comparison = compared(
        [
            *(*runs("bf16", 0.1, 0.1, 0.1), *runs("compile", 0.08, 0.08, 0.08), *runs("fp32", 0.2, 0.2, 0.2)),
            *(*runs("compile", 0.05, 0.05, 0.05, **small), *runs("bf16", 0.04, 0.04, 0.04, **small)),
        ]
    )
    *_, slower, base = comparison.rows
    assert slower.verdict.kind == base.verdict.kind == "other batch"
    assert slower.verdict.in_batch and base.verdict.in_batch and base.verdict.in_batch.kind == "baseline"
    # Known answers: 0.04 / 0.05 within the batch, and beside the baseline 32 / 0.05 over 64 / 0.1.
    ratio, throughput = slower.verdict.in_batch.speed_ratio, slower.verdict.speed_ratio
    assert slower.verdict.in_batch.kind == "worse" and ratio and ratio.value == pytest.approx(0.8)
    assert throughput and throughput.value == pytest.approx(1.0)


def test_runs_with_problems_are_named_and_never_used() -> None:
    failed = runs("bf16", 0.001, problems=("ended as nan_loss",))
    comparison = compared([*runs("bf16", 0.1), *failed])
    (row,) = comparison.rows
    assert (row.num_runs, len(comparison.warnings)) == (1, 1)
    assert value(row.speed.step_time_s) == pytest.approx(0.1)
    assert compared(failed).rows == ()


@pytest.mark.parametrize(
    "changes",
    [
        {"workload": "vit-tiny"},
        {"num_nodes": 2, "num_gpus": 2},
        {"num_gpus": 2},
        {"recipe": "compile"},
        {"batch_size_per_gpu": 65},
        {"data": "loader"},
        {"sequence_length": 128},
        {"fingerprint": {"device_name": "NVIDIA H200", "torch": "2.12.0"}},
        {"fingerprint": {"device_name": "NVIDIA H200", "torch": "2.13.0", "data": "ab"}},
        {"instance": "p5en.48xlarge"},
        {"kind": "published"},
        {"step_time_s": None, "total_time_s": 10.0, "num_samples": 100},
    ],
)
def test_what_does_not_pool(changes: dict[str, Any]) -> None:
    one, other = runs("bf16", 0.1, 0.1)
    differing = replace(other, summary=changed(other.summary, **changes))
    assert len(compared([one, other]).rows) == 1
    assert len(compared([one, differing]).rows) == 2


def test_samples_of_another_length_are_throughput() -> None:
    shorter = runs("compile", 0.05, 0.05, sequence_length=128, padding_fraction=0.2)
    _, row = compared([*runs("bf16", 0.1, 0.1, sequence_length=512), *shorter]).rows
    assert (row.setup.sequence_length, row.overhead.padding_fraction) == (128, 0.2)
    assert row.verdict.comparable_as == "throughput"
    assert "sequence length 128 against 512: other samples" in row.verdict.reasons


def test_another_machine_may_differ_by_itself() -> None:
    def error(host: str | None) -> float:
        new = runs("bf16", 0.05, 0.0505, instance="p5.48xlarge", device_name=None, host_id=host)
        old = runs("bf16", 0.1, 0.101, instance="p4d.24xlarge", device_name=None, host_id="a")
        _, row = compared([*old, *new]).rows
        ratio = row.verdict.ratio
        assert ratio is not None and ratio.high is not None
        assert any("another machine" in reason for reason in row.verdict.reasons)
        return math.log(ratio.high / ratio.value)

    assert error("b") == error(None) > 0.05


def test_totals_and_relative_figures() -> None:
    changes: dict[str, Any] = {
        **{"kind": "published", "step_time_s": None, "samples_per_step": None},
        **{"device_name": None, "flops_per_sample": None, "fingerprint": {}},
    }
    known = [
        *runs("eager", 0, total_time_s=100.0, num_samples=5000, **changes),
        *runs("compile", 0, total_time_s=50.0, num_samples=5000, **changes),
    ]
    base, row = compared(known).rows
    assert value(base.speed.samples_per_s) == pytest.approx(50)
    assert value(row.verdict.speed_ratio) == pytest.approx(2)
    assert row.speed.step_time_s is None

    unknown = [
        *runs("eager", 0, total_time_s=1059.0, **changes),
        *runs("compile", 0, total_time_s=497.9, **changes),
    ]
    _, row = compared(unknown).rows
    assert row.speed.samples_per_s is None
    assert value(row.verdict.speed_ratio) == pytest.approx(1059.0 / 497.9)

    relative = [
        *runs("eager", 0, metric="relative_throughput", metric_value=1.0, **changes),
        *runs("ort", 0, metric="relative_throughput", metric_value=1.37, **changes),
        *runs("other", 0, metric="test_accuracy", metric_value=0.9, **changes),
    ]
    _, row, other = compared(relative).rows
    assert value(row.verdict.speed_ratio) == pytest.approx(1.37)
    assert (other.verdict.speed_ratio, other.verdict.kind) == (None, "no interval")


def test_language_is_priced_by_the_token() -> None:
    (row,) = compared(runs("bf16", 0.1, tokens_per_step=2048.0), usd_per_hour=3.6).rows
    assert value(row.speed.tokens_per_s) == pytest.approx(20480)
    assert value(row.cost.usd_per_million_tokens) == pytest.approx(0.001 / 20480 * 1e6)
    (row,) = compared(runs("bf16", 0.1, sample_unit="tokens"), usd_per_hour=3.6).rows
    assert value(row.speed.tokens_per_s) == pytest.approx(640)


def test_time_before_the_steps_is_kept_apart() -> None:
    first, second = runs("compile", 0.1, 0.1, build_s=2.0, warmup_s=3.0)
    second = replace(second, summary=changed(second.summary, compile_s=10.0, build_s=4.0))
    (row,) = compared([first, second]).rows
    assert (row.overhead.build_s, row.overhead.compile_s, row.overhead.warmup_s) == (3.0, 10.0, 3.0)


@pytest.mark.parametrize(
    ("day", "images_per_usd", "fewer", "usd"),
    [
        (THEN, (137_176, 94_206), 31.3, (7.29, 10.62, 5.90, 7.22, 5.77)),
        (TODAY, (204_740, 168_283), 17.8, (4.88, 5.94, 3.96, 4.04, 3.23)),
    ],
)
def test_the_published_experiment(
    day: datetime.date, images_per_usd: tuple[int, int], fewer: float, usd: tuple[float, ...]
) -> None:
    found = published(day)
    old, new = found["p4d.24xlarge", "bf16"], found["p5.48xlarge", "bf16"]
    assert tuple(round(value(row.cost.samples_per_usd)) for row in (old, new)) == images_per_usd
    assert round(100 * (1 - value(new.verdict.ratio)), 1) == fewer
    assert value(new.verdict.speed_ratio) == pytest.approx(0.41 / 0.199)
    te_old, te_new = found["p4d.24xlarge", "te-article"], found["p5.48xlarge", "te-article"]
    rows = (old, new, te_old, te_new, found["p5.48xlarge", "te-article-fp8"])
    assert tuple(round(value(row.cost.usd_per_million_samples), 2) for row in rows) == usd
    peaks = [round(value(row.speed.percent_of_bf16_peak), 1) for row in rows]
    assert peaks == [38.2, 24.8, 47.2, 36.5, 45.6]
    # The article's blocks of Transformer Engine train another model; a doubled batch is no training progress.
    assert [row.verdict.kind for row in rows] == ["baseline", "no interval", *["not ranked"] * 3]
    assert [row.verdict.comparable_as for row in rows] == [*["training"] * 3, *["throughput"] * 2]
    assert all(row.verdict.ratio is not None and row.verdict.ratio.low is None for row in rows[1:])
    reasons = "; ".join(rows[-1].verdict.reasons)
    assert "derived from published percentages" in reasons and "global batch 1024 against 512" in reasons


@pytest.mark.parametrize(
    "differing", [{"service": "sagemaker"}, {"region": "us-west-2"}, {"purchase": "spot"}, {}]
)
def test_another_offer_is_another_row_and_another_seed_or_machine_is_not(differing: dict[str, Any]) -> None:
    one, other = runs("bf16", 0.1, 0.1)
    other = replace(other, summary=changed(other.summary, seed=7, host_id="host-b"), **differing)
    assert len(compared(one, other).rows) == (2 if differing else 1)


@pytest.mark.parametrize(
    ("digest", "reason"),
    [
        ("cd", "trained on other data: file cd against file ab"),
        (None, "trained on other data: file not identified against file ab"),
        ("ab", None),
    ],
)
def test_other_data_are_named(digest: str | None, reason: str | None) -> None:
    base = runs("bf16", 0.1, data="file", fingerprint={"data": "ab"})
    _, row = compared(
        base, runs("compile", 0.1, data="file", fingerprint={"data": digest} if digest else {})
    ).rows
    assert [text for text in row.verdict.reasons if "other data" in text] == ([reason] if reason else [])


@pytest.mark.parametrize(
    ("rows", "batch"),
    [
        # As many rows at each: the one of more runs, else the first.
        ({8: ("bf16", "tf32"), 16: ("bf16", "tf32")}, 8),
        ({8: ("bf16", "tf32"), 16: ("bf16", "bf16", "tf32")}, 16),
        # Else what more rows can be compared with.
        ({8: ("bf16", "bf16", "tf32"), 16: ("bf16", "compile", "tf32")}, 16),
        ({8: ("bf16",), 16: ("compile", "tf32")}, 8),
    ],
)
def test_of_several_batches_the_baseline_is_at_that_of_most_rows(
    rows: dict[int, tuple[str, ...]], batch: int
) -> None:
    candidates = [
        replace(run, run_id=f"{recipe}-{size}-{number}")
        for size, recipes in rows.items()
        for number, recipe in enumerate(recipes)
        for run in runs(recipe, 0.1, batch_size_per_gpu=size)
    ]
    for baseline in (None, "bf16"):
        found = compared(candidates, baseline=baseline).rows
        assert [row.setup.batch_size_per_gpu for row in found if row.is_baseline] == [batch]


def test_baselines() -> None:
    tiny = {"workload": "vit-tiny"}
    candidates = [
        *runs("fp32", 0.2),
        *runs("bf16", 0.1),
        *runs("compile", 0.05, **tiny),
        *runs("fp32", 0.07, **tiny),
    ]
    found = compared(candidates)
    assert found.baselines == {"vit-huge": "bf16", "vit-tiny": "compile"}
    assert [row.is_baseline for row in found.rows] == [False, True, True, False]
    assert compared(candidates, baseline="fp32").baselines == {"vit-huge": "fp32", "vit-tiny": "fp32"}
    assert compared(candidates, baseline="fp32-1").baselines["vit-huge"] == "fp32"
    with pytest.raises(UnknownName, match="bf61") as raised:
        compared(candidates, baseline="bf61")
    assert "bf16" in str(raised.value.hint)


def test_shares_of_peak_by_precision() -> None:
    def row(precision: str | None, **changes: Any) -> Row:
        (found,) = compared(runs("r", 0.1, precision=precision, **changes)).rows
        return found

    tflops = 640 * 0.763504
    bf16, fp8 = row("bf16").speed, row("fp8").speed
    assert value(bf16.percent_of_bf16_peak) == value(bf16.percent_of_peak) == pytest.approx(tflops / 9.894)
    assert value(fp8.percent_of_fp8_peak) == pytest.approx(tflops / 19.789)
    assert value(fp8.percent_of_bf16_peak) == pytest.approx(tflops / 9.894)
    assert value(row("tf32").speed.percent_of_peak) == pytest.approx(tflops / 4.947)
    assert (bf16.percent_of_fp8_peak, row(None).speed.percent_of_peak) == (None, None)
    # The device that was really used counts more than the instance's name.
    assert row("bf16", device_name="AMD EPYC", instance="p5.48xlarge").speed.percent_of_peak is None
    by_instance = row("bf16", device_name=None, instance="p4d.24xlarge").speed
    assert value(by_instance.percent_of_peak) == pytest.approx(tflops / 3.12)
    assert row("bf16", flops_per_sample=None).speed.tflops_per_gpu is None


def test_steps_of_unknown_samples_are_compared_as_steps_and_variants_do_not_pool() -> None:
    def variant(amp: str, *times_s: float) -> list[MeasuredRun]:
        unknown = {"batch_size_per_gpu": 0, "samples_per_step": None}
        return runs("script", *times_s, variant={"amp": amp}, **unknown)

    groups, unfit = pool([*variant("fp32", 0.2, 0.2), *variant("bf16", 0.1, 0.1), *runs("script", 0.1)])
    slow, fast, known = groups
    assert (unfit, [len(group.runs) for group in groups]) == ([], [2, 2, 1])
    assert are_comparable(slow, fast) and not are_comparable(slow, known)
    ratio = run_times(slow, 0)[0].log_time - run_times(fast, 1)[0].log_time
    assert ratio == pytest.approx(math.log(2))


TIMES = st.one_of(st.just(0.1), st.floats(0.09, 0.11), st.floats(5e-324, 1.7e308))
ROUNDS = st.one_of(st.none(), st.integers(1, 4))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), TIMES, st.sampled_from(["h", None]), ROUNDS, ROUNDS), min_size=1
    )
)
@example([("a", 0.1, "h", None, None), ("a", 1e-300, "h", None, None), ("b", 1e200, "h", None, None)])
def test_any_finite_positive_times_have_an_answer(
    table: list[tuple[str, float, str | None, int | None, int | None]],
) -> None:
    measured = [
        replace(
            runs(name, time_s, host_id=host, round=number, seed=number, max_rounds=most, session="s")[0],
            run_id=f"run-{at}",
        )
        for at, (name, time_s, host, number, most) in enumerate(table)
    ]
    comparison = compared(measured, usd_per_hour=55.0)
    for row in comparison.rows:
        ratios = row.verdict.ratio, row.verdict.speed_ratio
        quantities = (*vars(row.speed).values(), *vars(row.cost).values(), *ratios)
        values = [each for known in quantities if known for each in vars(known).values()]
        assert not any(each is not None and math.isnan(each) for each in values)
    assert as_json(comparison) and as_overview(comparison) and finish_json(comparison, 1000.0, CATALOGUE)

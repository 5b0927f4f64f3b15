"""Rows, verdicts and ratios of constructed runs, and the published experiment at two days' prices."""

import datetime
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_records import write_run
from fake_summaries import TODAY, by_recipe, changed, compared, runs, timed

from fastlaunch.analysis.compare import MeasuredRun, Row
from fastlaunch.analysis.statistics import t_quantile
from fastlaunch.core.errors import UnknownName
from fastlaunch.measure.published import read_published, shipped_figures
from fastlaunch.measure.summarize import summarize
from fastlaunch.measure.summary import Interval
from fastlaunch_train.records.records import read_record

THEN = datetime.date(2023, 11, 15)


def published(day: datetime.date) -> dict[tuple[str | None, str], Row]:
    (path,) = (path for path in shipped_figures() if path.name == "fp8-experiment.csv")
    candidates = [MeasuredRun(run_id=str(n), summary=s) for n, s in enumerate(read_published(path))]
    return {(row.setup.instance, row.setup.recipe): row for row in compared(candidates, as_of=day).rows}


def value(quantity: Interval | None) -> float:
    assert quantity is not None
    return quantity.value


def test_from_records_to_rates(tmp_path: Path) -> None:
    """Constant 0.1 s at batch 2 are 20 samples/s; eight ranks sum; the slowest of them sets the time."""

    def row(name: str, **changes: Any) -> Row:
        paths = write_run(tmp_path / name, batch_size=2, **changes)
        summary = summarize([read_record(path) for path in paths])
        (found,) = compared([MeasuredRun(run_id=name, summary=summary)]).rows
        return found

    assert value(row("one", step_time_s=0.1).speed.samples_per_s) == pytest.approx(20)
    assert value(row("eight", step_time_s=0.1, world_size=8).speed.samples_per_s) == pytest.approx(160)
    slow = row("slow", step_time_s=lambda rank, step: 0.2 if rank == 3 else 0.1, world_size=8)
    assert value(slow.speed.step_time_s) == pytest.approx(0.2)
    assert value(slow.speed.samples_per_s) == pytest.approx(80)
    assert value(slow.speed.tflops_per_gpu) == pytest.approx(10 * 0.763504)
    tokens = row("tokens", step_time_s=0.1, num_tokens=512)
    assert value(tokens.speed.tokens_per_s) == pytest.approx(5120)


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
    assert "by speed: no price is known" in rows["compile"].verdict.reasons


def test_unresolved_says_how_many_more_runs() -> None:
    """1.5% apart at a deviation of 1%, two runs each: three more of each, as worked out by hand elsewhere."""
    half = math.exp(0.01 / math.sqrt(2))
    candidates = [
        *runs("bf16", 0.1 * half, 0.1 / half),
        *runs("tf32", 0.1 * math.exp(-0.015) * half, 0.1 * math.exp(-0.015) / half),
    ]
    _, row = compared(candidates).rows
    assert row.verdict.kind == "unresolved"
    assert row.verdict.reasons[0] == "needs about 3 more runs, and as many of the baseline"


def test_the_ratio_is_at_holms_level() -> None:
    candidates = [
        *runs("bf16", 0.100, 0.101),
        *runs("compile", 0.080, 0.0808),
        *runs("tf32", 0.090, 0.0909),
    ]
    _, fast, middle = compared(candidates).rows
    deviation = math.log(1.01) / math.sqrt(2)
    # 3 degrees of freedom: 4.1765 at 2.5% for the most certain, 3.1824 at 5% for the other.
    for row, point in ((fast, 4.17653), (middle, 3.182446)):
        ratio = row.verdict.speed_ratio
        assert ratio is not None and ratio.high is not None
        assert math.log(ratio.high / ratio.value) == pytest.approx(point * deviation, rel=1e-5)


def test_one_run_each_assumes_one_percent() -> None:
    _, row = compared([*runs("bf16", 0.1), *runs("compile", 0.05)]).rows
    assert row.verdict.kind == "better"
    assert "a single run is assumed to vary by 1%" in row.verdict.reasons
    step = row.speed.step_time_s
    assert step is not None and step.high is not None
    error = math.hypot(0.01, 0.001 / 2.571)
    assert math.log(step.high / step.value) == pytest.approx(1.959964 * error, rel=1e-6)


def apart(time_s: float, ratio: float) -> tuple[float, ...]:
    """Three times whose logarithms have the deviation log(ratio)."""
    return time_s / ratio, time_s, time_s * ratio


def test_a_workload_is_judged_by_the_spread_of_its_own_runs() -> None:
    language = {"workload": "gpt2-xsmall"}
    wide = [*runs("bf16", *apart(0.1, 1.3), **language), *runs("tf32", *apart(0.1, 1.3), **language)]
    narrow = [*runs("bf16", 0.1, 0.1, 0.1), *runs("compile", 0.095, 0.095, 0.095)]
    alone, together = compared(narrow).rows[-1], compared([*wide, *narrow]).rows[-1]
    assert together.verdict.speed_ratio == alone.verdict.speed_ratio
    assert together.verdict.kind == "better"
    # With few repeats of its own it is judged by those of others, too.
    few = [*narrow[:2], narrow[3]]
    (_, single) = (row for row in compared([*wide, *few]).rows if row.setup.workload == "vit-huge")
    assert single.verdict.kind == "unresolved"


@pytest.mark.parametrize("noisy", [1.01, 1.2])
def test_beside_a_row_that_deviates_far_more_each_is_judged_by_its_own_runs(noisy: float) -> None:
    quiet = [*runs("bf16", *apart(0.1, 1.006)), *runs("compile", *apart(0.09, 1.006))]
    rows = compared([*quiet, *runs("fp32", *apart(0.4, noisy))]).rows
    assert [row.verdict.kind for row in rows] == ["baseline", "better", "worse"]
    deviations = [math.log(ratio) for ratio in (1.006, 1.006, noisy)]
    dof = 2
    if noisy == 1.01:
        dof, deviations = 6, [math.sqrt(sum(deviation**2 for deviation in deviations) / 3)] * 3
    for row, deviation in zip(rows, deviations, strict=True):
        step = row.speed.step_time_s
        assert step is not None and step.high is not None
        half_width = t_quantile(0.975, dof) * deviation / math.sqrt(3)
        assert math.log(step.high / step.value) == pytest.approx(half_width)


@pytest.mark.parametrize("unsettled", ["compile", "bf16"])
def test_more_runs_are_proposed_where_not_all_settle(unsettled: str) -> None:
    settled = [*runs("bf16", 0.1, 0.1), *runs("compile", 0.0995, 0.1001)]
    *_, row = compared(settled).rows
    assert row.verdict.kind == "unresolved" and row.verdict.more_runs is not None
    *_, other = compared([*settled, *runs(unsettled, 0.12, 0.13, steady=False)]).rows
    assert other.verdict.more_runs == 2 * row.verdict.more_runs
    assert any("may not settle" in reason for reason in other.verdict.reasons)
    # Too many are proposed nowhere.
    *_, hopeless = compared([*settled, *runs(unsettled, *(200 * (0.12,)), steady=False)]).rows
    assert hopeless.verdict.more_runs is None
    assert "needs more than 100 more runs, and as many of the baseline" in hopeless.verdict.reasons


def test_one_short_run_has_no_interval() -> None:
    short = runs("compile", 0.05, step_time_s=timed(0.05, within=None), num_retained_steps=40)
    _, row = compared([*runs("bf16", 0.1), *short]).rows
    assert row.verdict.kind == "no interval"
    assert row.speed.step_time_s == Interval(value=pytest.approx(0.05))
    assert row.verdict.speed_ratio == Interval(value=pytest.approx(2.0))
    assert row.verdict.reasons[0] == "one run of 40 measured steps, too few for an interval"


def test_unsteady_runs_are_left_out_or_get_no_verdict() -> None:
    mixed = [*runs("compile", 0.05, 0.0501), *runs("compile", 0.5, steady=False)]
    unsteady = runs("fp32", 0.2, 0.2, steady=False)
    rows = by_recipe(compared(runs("bf16", 0.1, 0.1001), mixed, unsteady))
    assert rows["compile"].verdict.kind == "better"
    assert (rows["compile"].num_runs, rows["compile"].num_unsteady) == (2, 1)
    assert "1 run left out: the step time did not settle" in rows["compile"].verdict.reasons
    assert rows["fp32"].verdict.kind == "not steady"
    assert rows["fp32"].speed.step_time_s == Interval(value=pytest.approx(0.2))
    assert rows["fp32"].verdict.speed_ratio == Interval(value=pytest.approx(0.5, rel=1e-3))


def test_runs_with_problems_are_named_and_never_used() -> None:
    failed = runs("bf16", 0.001, problems=("ended as nan_loss",))
    comparison = compared([*runs("bf16", 0.1), *failed])
    (row,) = comparison.rows
    assert row.num_runs == 1
    assert value(row.speed.step_time_s) == pytest.approx(0.1)
    assert comparison.warnings == ("bf16-1 (bf16) is left out: ended as nan_loss",)
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


def test_another_instance_type_adds_the_machines() -> None:
    def error(hosts: tuple[str, str]) -> float:
        new = [
            replace(run, summary=changed(run.summary, host_id=host))
            for run, host in zip(
                runs("bf16", 0.05, 0.0505, instance="p5.48xlarge", device_name=None), hosts, strict=True
            )
        ]
        old = runs("bf16", 0.1, 0.101, instance="p4d.24xlarge", device_name=None)
        _, row = compared([*old, *new]).rows
        ratio = row.verdict.ratio
        assert ratio is not None and ratio.high is not None
        assert any("1% is allowed" in reason for reason in row.verdict.reasons)
        return math.log(ratio.high / ratio.value)

    assert error(("a", "b")) < error(("a", "a"))


def test_totals_and_relative_figures() -> None:
    changes: dict[str, Any] = {
        **{"kind": "published", "steady": None, "step_time_s": None, "samples_per_step": None},
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
    assert other.verdict.reasons[0] == "no speed that compares with the baseline's is known"


def test_language_is_priced_by_the_token() -> None:
    (row,) = compared(runs("bf16", 0.1, tokens_per_step=2048.0), usd_per_hour=3.6).rows
    assert value(row.speed.tokens_per_s) == pytest.approx(20480)
    assert value(row.cost.usd_per_billion_tokens) == pytest.approx(0.001 / 20480 * 1e9)
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


def test_one_run_beside_runs_that_spread_more_is_taken_to_spread_as_they_do() -> None:
    """With the degrees of freedom of what was seen, if those are 3 or more."""
    for recipes in (("bf16", "tf32"), ("bf16",)):
        candidates = [run for recipe in recipes for run in runs(recipe, *apart(0.1, 1.05))]
        *_, row = compared([*candidates, *runs("compile", 0.05)]).rows
        deviation, dof = math.log(1.05), 2.0 * len(recipes)
        assert "a single run is assumed to vary by 4.9%" in row.verdict.reasons
        step = row.speed.step_time_s
        assert step is not None and step.high is not None
        within = 0.001 / 2.571
        # A little more of them for what is known of the run by itself.
        point = t_quantile(0.975, dof * (1 + (within / deviation) ** 2) ** 2 if dof >= 3 else math.inf)
        half_width = point * math.hypot(deviation, within)
        assert math.log(step.high / step.value) == pytest.approx(half_width, rel=1e-6)


@pytest.mark.parametrize(
    ("ratios", "is_warned"),
    [
        ((1.01, 1.02), False),
        # An F ratio of 39, which two rows of three runs exceed in one case of twenty and six rows in more.
        ((1.0101, 1.065), True),
        ((1.0101, 1.05, 1.05, 1.05, 1.05, 1.065), False),
        # No deviation is taken for less than half a percent.
        ((1.00001, 1.01), False),
    ],
)
def test_runs_that_spread_very_unequally_are_warned_of(ratios: tuple[float, ...], is_warned: bool) -> None:
    # Also rows of one recipe, at several batches.
    candidates = [
        run
        for number, ratio in enumerate(ratios, start=1)
        for run in runs("bf16", *apart(0.1, ratio), batch_size_per_gpu=8 * number)
    ]
    warnings = [text for text in compared(candidates).warnings if "deviate" in text]
    assert bool(warnings) is is_warned
    assert not is_warned or "by 1.0% to 6.3%" in warnings[0]
    # Two runs tell nothing of their deviation.
    assert not [text for text in compared(candidates[:5]).warnings if "deviate" in text]


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

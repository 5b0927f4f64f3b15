"""Rows of a script: by what they are compared, what is said of them once, and what runs them again."""

import csv
import io
import json
import re
import shlex
from dataclasses import replace
from typing import Any

import pytest
from fake_summaries import changed, compared, evaluated, runs

from fastlaunch.analysis.best import more_runs_command
from fastlaunch.analysis.compare import Comparison, MeasuredRun, Row
from fastlaunch.analysis.convergence import REFERENCE, WITHIN, WORSE
from fastlaunch.core.errors import UnknownName
from fastlaunch.jobs.job import Script, variant_label
from fastlaunch.measure.summary import RunSummary
from fastlaunch.report.data import as_csv, as_json
from fastlaunch.report.table import as_overview, as_table
from fastlaunch.report.text import answer, name_of
from fastlaunch_train.records.contents import version_of

COMMAND = ("python", "train.py", "--amp", "{amp}")
NOTHING_TOLD = {"batch_size_per_gpu": None, "samples_per_step": None}


def rows(variant: dict[str, str], *times_s: float, **changes: Any) -> list[MeasuredRun]:
    """A run for each round of a script that tells no samples, unless `changes` do."""
    script = Script(command=COMMAND, variant=tuple(variant.items())).typed
    values = {
        **{"workload": "train.py", "sample_unit": "samples", "precision": "unknown", "data": "script"},
        **{"flops_per_sample": None, "variant": variant, **NOTHING_TOLD, **changes},
    }
    of_label = runs(variant_label(variant), *times_s, **values)
    return [
        MeasuredRun(run_id=run.run_id, script=script, summary=changed(run.summary, seed=None, round=number))
        for number, run in enumerate(of_label, start=1)
    ]


def whole(summary: RunSummary) -> RunSummary:
    """The run of a script that records no steps, whose time in all is a hundred of them."""
    step = summary.timing.step_time_s
    return changed(summary, step_time_s=None, num_steps=0, total_time_s=100 * step.value if step else None)


FP32, BF16 = rows({"amp": "fp32"}, 0.1, 0.1004, 0.0997), rows({"amp": "bf16"}, 0.08, 0.0803, 0.0797)


def warned(comparison: Comparison, words: str) -> list[str]:
    return [warning for warning in comparison.warnings if words in warning]


def test_rows_of_unknown_samples_are_compared_by_steps() -> None:
    comparison = compared(FP32, BF16)
    row = comparison.rows[1]
    assert (row.setup.recipe, row.verdict.kind) == ("amp=bf16", "better")
    assert row.verdict.speed_ratio is not None
    assert row.verdict.speed_ratio.value == pytest.approx(1.25, rel=0.01)
    assert row.speed.step_time_s is not None and row.speed.samples_per_s is None
    assert len(warned(comparison, "compared by steps")) == 1
    assert answer(comparison).startswith("amp=bf16 on H200 gives 12.5 steps/s, 1.25")


def test_rows_without_steps_are_compared_by_wall_time() -> None:
    of_all = [
        MeasuredRun(run_id=run.run_id, summary=whole(run.summary), script=run.script) for run in FP32 + BF16
    ]
    comparison = compared(of_all)
    row = comparison.rows[1]
    assert row.verdict.kind == "better" and row.speed.step_time_s is None
    assert row.speed.total_time_s is not None and row.speed.total_time_s.value == pytest.approx(8, rel=0.01)
    assert len(warned(comparison, "compared by wall time")) == 1
    assert answer(comparison).startswith("amp=bf16 on H200 gives 450 runs/h, 1.25")


def test_what_only_some_rows_record_is_said_of_those_and_not_compared() -> None:
    comparison = compared(FP32, rows({"amp": "bf16"}, 0.08, 0.0803, samples_per_step=8.0))
    assert [row.verdict.kind for row in comparison.rows] == ["baseline", "no interval"]
    assert warned(comparison, "amp=fp32: compared by steps")


def test_a_known_batch_says_nothing_of_unknown_samples_nor_of_short_batches() -> None:
    partly = rows({"amp": "fp32"}, 0.1, 0.1004, batch_size_per_gpu=64)
    assert compared(partly, BF16).rows[0].speed.samples_per_s is None
    # A batch of 64, and every other of 1: half of the samples in half of the time.
    full = rows({"last": "drop"}, 0.1, 0.1004, 0.0997, batch_size_per_gpu=64, samples_per_step=64.0)
    short = rows({"last": "keep"}, 0.051, 0.0515, 0.0512, batch_size_per_gpu=64, samples_per_step=32.5)
    comparison = compared(full, short)
    drop, keep = comparison.rows
    assert drop.speed.samples_per_s is not None and keep.speed.samples_per_s is not None
    assert keep.speed.samples_per_s.value == pytest.approx(32.5 / 0.05123, rel=1e-3)
    assert keep.verdict.kind != "better"


def test_the_baseline_is_the_first_variant_or_the_named_one() -> None:
    twice = rows({"amp": "tf32", "batch": "8"}, 0.09, 0.0903, 0.0902, 0.0899)
    assert compared(FP32, BF16, twice).baselines == {"train.py": "amp=fp32"}
    for name in ("batch=8", "batch=8 amp=tf32", "batch=8,amp=tf32", "amp=tf32 batch=8"):
        assert compared(FP32, BF16, twice, baseline=name).baselines == {"train.py": "amp=tf32 batch=8"}
    with pytest.raises(UnknownName):
        compared(FP32, BF16, baseline="amp=fp16")


def test_variants_are_an_object_in_json_and_columns_in_csv() -> None:
    twice = rows({"amp": "tf32", "batch": "8"}, 0.09, 0.0903)
    comparison = compared(FP32, twice)
    variants = [row["variant"] for row in json.loads(as_json(comparison))["rows"]]
    assert variants == [{"amp": "fp32"}, {"amp": "tf32", "batch": "8"}]
    table = list(csv.DictReader(io.StringIO(as_csv(comparison))))
    assert [(row["variant_amp"], row["variant_batch"]) for row in table] == [("fp32", ""), ("tf32", "8")]
    assert "variant" not in as_csv(compared(runs("bf16", 0.1)))


@pytest.mark.parametrize(("factor", "verdict"), [(1.0, WITHIN), (1.05, WORSE)])
def test_held_out_losses_are_paired_by_their_rounds(factor: float, verdict: str) -> None:
    def told(amp: str, factor: float) -> list[RunSummary]:
        own = rows({"amp": amp}, *[0.1] * 4)
        return [
            changed(run.summary, evals=evaluated("bf16", 0, factor * (2 + number / 100)).quality.evals)
            for number, run in enumerate(own)
        ]

    comparison = compared(*told("fp32", 1.0), *told("bf16", factor))
    row = comparison.rows[1]
    assert (row.validity.convergence.verdict, row.validity.convergence.num_pairs) == (verdict, 4)
    assert row.is_barred == (verdict == WORSE)
    assert not warned(comparison, "train as well")


@pytest.mark.parametrize(
    ("baseline", "verdicts"), [("amp=bf16", {WORSE, REFERENCE}), (None, {WITHIN, REFERENCE})]
)
def test_the_named_baseline_is_what_losses_are_compared_with(
    baseline: str | None, verdicts: set[str]
) -> None:
    """The first row trains worse: a named baseline bars it, and it does not bar the baseline."""
    rounds = [
        [changed(run.summary, evals=evaluated("bf16", 0, loss).quality.evals) for run in own]
        for own, loss in ((FP32, 2.1), (BF16, 2.0))
    ]
    comparison = compared(*rounds[0], *rounds[1], baseline=baseline)
    assert {row.validity.convergence.verdict for row in comparison.rows} == verdicts
    assert [row.is_barred for row in comparison.rows] == [baseline is not None, False]


def test_an_option_called_as_one_of_ours_makes_no_other_reference() -> None:
    def told(text: str) -> list[RunSummary]:
        evals = evaluated("bf16", 0, 2.0).quality.evals
        own = rows({"amp": "a", "learning_rate": text}, 0.1, 0.1, 0.1)
        return [changed(run.summary, evals=evals) for run in own]

    row = compared(*told("1"), *told("2")).rows[1]
    assert row.validity.convergence.reference == "amp=a learning_rate=1"


def test_more_rounds_are_proposed_as_the_command_that_was_given() -> None:
    noisy = rows({"amp": "bf16"}, 0.0989, 0.0992, 0.0982)
    comparison = compared(rows({"amp": "fp32"}, 0.0991, 0.0995, 0.1005), noisy)
    number = comparison.rows[1].verdict.more_rounds
    assert number is not None
    command = more_runs_command(comparison.rows, own_region="us-east-1")
    assert command is not None
    assert shlex.split(command) == [
        *("fastlaunch", "submit", "--local", "-L", "amp=fp32,bf16", "--repeats", str(number), "--"),
        *COMMAND,
    ]


def test_more_rounds_are_of_the_best_and_its_rival_if_they_are_not_settled() -> None:
    far, near = rows({"amp": "fp32"}, 0.2, 0.2001, 0.1999), rows({"amp": "bf16"}, 0.1, 0.101, 0.0995)
    rival = rows({"amp": "fp16"}, 0.1005, 0.1002, 0.1)
    command = more_runs_command(compared(far, near, rival).rows, own_region="us-east-1")
    assert command is not None
    assert set(shlex.split(command)[4].removeprefix("amp=").split(",")) == {"bf16", "fp16"}
    of_recipes = [*runs("bf16", 0.2, 0.2001), *runs("tf32", 0.1, 0.1011), *runs("te-fp8", 0.1002, 0.1)]
    command = more_runs_command(compared(of_recipes).rows, own_region="us-east-1")
    assert command is not None and re.search(r"--recipe (tf32,te-fp8|te-fp8,tf32) ", command)


def test_a_script_that_records_no_held_out_loss_is_told_how() -> None:
    faster = compared(rows({"amp": "fp32"}, 0.2, 0.2001), rows({"amp": "bf16"}, 0.1, 0.101))
    note = "no held-out loss was recorded at the end; record it with fl.evaluate(loss=...)"
    assert note in " ".join(as_overview(faster).split()) and note in " ".join(as_table(faster).split())


def test_single_runs_and_uneven_steps_get_a_command_too() -> None:
    single = compared(rows({"amp": "fp32"}, 0.1), rows({"amp": "bf16"}, 0.09)).rows
    given = ["-L", "amp=fp32,bf16", "--repeats"]
    command = more_runs_command(single, own_region="us-east-1", submission="s1")
    assert command is not None
    assert shlex.split(command)[2:] == ["--add-to", "s1", "--local", *given, "2", "--", *COMMAND]

    # Stopped in its second round.
    command = more_runs_command(
        compared(rows({"amp": "fp32"}, 0.1, 0.1), rows({"amp": "bf16"}, 0.09)).rows, own_region="us-east-1"
    )
    assert command is not None and shlex.split(command)[3 : -len(COMMAND)] == [*given, "2", "--"]

    def open_verdict(**of_steps: Any) -> list[Row]:
        noisy = {"device_name": "AMD EPYC", **of_steps}
        return compared(
            rows({"amp": "fp32"}, 0.1, 0.15, 0.1, **noisy), rows({"amp": "bf16"}, 0.15, 0.1, 0.1, **noisy)
        ).rows

    calm, uneven = open_verdict(), open_verdict(p5_step_time_s=0.04, p95_step_time_s=0.2)
    assert (uneven[1].verdict.kind, uneven[1].verdict.more_rounds) == ("unresolved", None)
    assert more_runs_command(calm, own_region="us-east-1", submission="s1") is None
    command = more_runs_command(uneven, own_region="us-east-1", submission="s1")
    assert command is not None
    # One thread makes other runs, which are no repeats of the earlier ones.
    assert command.startswith("OMP_NUM_THREADS=1 fastlaunch submit --local ")
    assert shlex.split(command)[4:] == [*given, "6", "--", *COMMAND]


def test_runs_that_more_rounds_do_not_settle_are_proposed_longer() -> None:
    noisy = {"device_name": "AMD EPYC", "workload": "vit-tiny"}
    both = compared(runs("bf16", 0.1, 0.15, 0.1, **noisy), runs("tf32", 0.15, 0.1, 0.1, **noisy)).rows
    command = more_runs_command(both, own_region="us-east-1", submission="s1")
    assert command is not None
    assert command.endswith("--recipe bf16,tf32 --batch-size 64 --steps 800 --seed 4 --repeats 6")
    assert "--add-to" not in command


def version(run: MeasuredRun, files: dict[str, str], commit: str | None = None, day: int = 1) -> MeasuredRun:
    """The run as one of a script with these files, begun on that day."""
    setup = run.summary.setup
    environment = replace(
        run.summary.environment, files=files, commit=commit, started_at=f"2026-11-{day:02}T09:00:00+00:00"
    )
    told = {**setup.fingerprint, "version": version_of(files)} if files else dict(setup.fingerprint)
    summary = replace(run.summary, setup=replace(setup, fingerprint=told), environment=environment)
    return replace(run, run_id=f"{run.run_id}-{day}", summary=summary)


OLD, NEW = {"train.py": "1", "model.py": "1"}, {"train.py": "1", "model.py": "2"}


def test_other_contents_are_another_row_which_says_what_changed() -> None:
    before = [version(run, OLD, "a" * 40) for run in FP32]
    # A commit of the same files is no other version.
    after = [version(run, NEW, commit * 40, day=2) for run, commit in zip(FP32, "bcd", strict=True)]
    unknown = [version(run, {}, day=3) for run in FP32]
    comparison = compared(before, after, unknown)
    assert [row.num_runs for row in comparison.rows] == [3, 3, 3]
    names = {name_of(row, comparison.rows) for row in comparison.rows}
    assert names == {
        f"amp=fp32 with version {told}" for told in (version_of(OLD), version_of(NEW), "unknown")
    }
    for printed in (as_overview(comparison), as_table(comparison), as_csv(comparison), as_json(comparison)):
        assert all(str(version_of(files)) in printed for files in (OLD, NEW))
    _, edited, other = comparison.rows
    (reason,) = [reason for reason in edited.verdict.decisive if "another version" in reason]
    assert "model.py" in reason and "train.py changed" not in reason and "bbbbbbb against aaaaaaa" in reason
    assert not [reason for reason in edited.verdict.reasons if "several commits" in reason]
    assert [reason for reason in other.verdict.reasons if "is not known" in reason]


def test_versions_can_be_pooled_which_is_said() -> None:
    of_versions = [*(version(run, OLD) for run in FP32), *(version(run, NEW, day=2) for run in FP32)]
    comparison = compared(of_versions, any_version=True)
    (row,) = comparison.rows
    assert (row.num_runs, name_of(row, [row]), row.setup.version) == (6, "amp=fp32", None)
    assert [reason for reason in row.verdict.reasons if "2 versions" in reason and "model.py" in reason]
    own = [runs("fp32", 0.1, fingerprint={"data": f"own {digest}", "version": digest}) for digest in "ab"]
    assert len(compared(*own).rows) == 2
    assert len(compared(*own, any_version=True).rows) == 1


def test_the_baseline_of_what_was_edited_is_of_the_version_that_is_there_once_it_has_several_rows() -> None:
    old = [version(run, OLD) for run in [*FP32, *BF16]]
    new = [version(run, NEW, day=2) for run in [*FP32, *BF16]]
    alone = compared(old, new[:3])
    assert alone.rows[0].is_baseline
    both = compared(old, new)
    assert [row.setup.version for row in both.rows if row.is_baseline] == [version_of(NEW)]


def test_no_more_rounds_are_proposed_of_a_version_that_is_gone() -> None:
    base, near = rows({"amp": "fp32"}, 0.0991, 0.0995, 0.1005), rows({"amp": "bf16"}, 0.0989, 0.0992, 0.0982)
    noisy = [version(run, OLD) for run in [*base, *near]]
    assert more_runs_command(compared(noisy).rows, own_region="us-east-1")
    edited = compared(noisy, version(FP32[0], NEW, day=2))
    assert edited.rows[1].verdict.more_rounds
    # Only the row of the version that is there, which has one run, can have more.
    command = more_runs_command(edited.rows, own_region="us-east-1")
    assert command is not None and " -L amp=fp32 --repeats 2 " in command

"""Step records to a summary: known answers for the arithmetic, and what makes a run unfit."""

import json
import re
import shlex
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from fake_records import read_all, step_time_s, write_run
from fake_summaries import PLAIN
from hypothesis import given
from hypothesis import strategies as st

from fastlaunch.analysis.suggest import Place, submit_command
from fastlaunch.core.data import to_data
from fastlaunch.core.errors import UserError
from fastlaunch.measure.record_files import Columns, RankRecord, read_record
from fastlaunch.measure.summarize import summarize
from fastlaunch.measure.summary import AllReduce, RunSummary, StepProfile, Timing, read_summary
from fastlaunch_train.distributed.all_reduce import Bandwidth
from fastlaunch_train.recipes.recipe import RECIPE_SCHEMA
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.records.records import RECORD_SCHEMA, Block, Check, End, Eval, Phase, Profile, Step


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., RunSummary]:
    """Summary of the attempts written so far and of the one that is asked for."""

    def write(**options: Any) -> RunSummary:
        write_run(tmp_path, **options)
        return summarize(read_all(sorted(tmp_path.iterdir(), reverse=True)))

    return write


def test_constant_steps_of_a_tenth_of_a_second_at_batch_2_are_20_samples_per_second(run) -> None:
    summary = run(steps=200, step_time_s=0.1, batch_size=2)
    assert step_time_s(summary) == pytest.approx(0.1)
    assert summary.timing.samples_per_step / step_time_s(summary) == pytest.approx(20.0)
    assert (summary.num_steps, summary.timing.num_retained_steps) == (200, 171)
    assert summary.timing.warmup_s == pytest.approx(2.9)
    assert (summary.status, summary.problems, summary.warnings) == ("completed", (), ())
    # Without a loss scaler nothing is known of steps that it skipped.
    assert "skipped_fraction" not in to_data(summary)["quality"]


def test_eight_ranks_sum(run) -> None:
    summary = run(world_size=8, num_nodes=2, batch_size=64, step_time_s=0.5, num_tokens=640, host_id="h")
    assert (summary.timing.samples_per_step, summary.timing.tokens_per_step) == (8 * 64, 8 * 640)
    assert summary.timing.samples_per_step / step_time_s(summary) == pytest.approx(1024.0)
    assert (summary.setup.num_gpus, summary.setup.num_nodes, summary.setup.batch_size_per_gpu) == (8, 2, 64)
    assert summary.setup.fingerprint["num_gpus_per_node"] == "4"


def test_the_slowest_rank_sets_the_time(run) -> None:
    # Rank 1 is slower in total, though rank 0 has the slower steps of every tenth.
    summary = run(
        world_size=2, step_time_s=lambda rank, step: 0.12 if rank == 1 else 0.15 if step % 10 == 0 else 0.1
    )
    assert step_time_s(summary) == pytest.approx(0.12)
    assert summary.timing.median_step_time_s == pytest.approx(0.12)
    assert summary.timing.p95_step_time_s == pytest.approx(0.15)  # per step the greatest over ranks


def test_the_headline_is_wall_time_and_the_percentiles_are_device_time(run) -> None:
    summary = run(step_time_s=0.1, wall_ratio=1.25, data_wait_s=0.025)
    assert step_time_s(summary) == pytest.approx(0.125)
    assert summary.timing.median_step_time_s == pytest.approx(0.1)
    assert summary.timing.data_wait_fraction == pytest.approx(0.2)


def test_a_cut_inside_a_block_shares_its_wall_time_by_device_time(run) -> None:
    # One block of 15 steps, ten of 0.1 s and five of 0.2 s, in 4 s of wall time: twice the device time.
    summary = run(
        steps=75,
        steps_per_block=15,
        wall_ratio=2.0,
        step_time_s=lambda rank, step: 0.1 if step <= 10 else 0.2,
    )
    assert summary.timing.num_retained_steps == 59
    assert step_time_s(summary) == pytest.approx(0.4)
    assert summary.timing.warmup_s == pytest.approx((10 * 0.1 + 6 * 0.2) * 2)


def test_steps_without_device_time_share_their_block_equally(tmp_path: Path) -> None:
    (record,) = read_all(write_run(tmp_path, steps=30, steps_per_block=30))
    steps = Columns(Step, (replace(step, step_time_s=0.0) for step in record.steps))
    assert step_time_s(summarize([replace(record, steps=steps)])) == pytest.approx(0.1)


# --- what a run may lack ---------------------------------------------------------------------------------


def test_too_few_steps_have_no_step_time_and_say_so(run) -> None:
    summary = run(steps=19)
    assert summary.timing == Timing()
    assert summary.problems == (
        "too few steps: 19 were timed, the first 10 are warm-up, and 10 more are needed",
    )
    assert summary.quality.final_loss == pytest.approx(2 + sum(1 / step for step in range(10, 20)) / 10)


def test_absurd_times_are_refused(run) -> None:
    summary = run(steps=50, step_time_s=1.0, wall_ratio=1e307)
    assert summary.timing.step_time_s is None and "zero or absurd" in summary.problems[0]


def test_a_killed_run_is_timed_up_to_its_last_block(run) -> None:
    def slow_at_the_end(rank: int, step: int) -> float:
        return 9.0 if step > 95 else 0.1

    summary = run(steps=100, status=None, num_unsynchronised=5, step_time_s=slow_at_the_end)
    assert (summary.status, summary.ended, summary.problems) == ("killed", "ended as killed", ())
    assert (summary.num_steps, summary.timing.num_retained_steps) == (100, 77)
    assert step_time_s(summary) == pytest.approx(0.1)
    assert summary.peak_memory_gib is None


def test_a_cut_last_line_is_told(tmp_path: Path) -> None:
    (path,) = write_run(tmp_path, steps=100, status=None)
    path.write_text(path.read_text()[:-20])
    summary = summarize([read_record(path)])
    assert f"{path.name}: the last line is cut" in summary.warnings and not summary.problems


def test_a_failure_is_a_problem_even_with_enough_steps(run) -> None:
    summary = run(steps=100, status="nan_loss", message="at step 100")
    assert summary.problems == ("ended as nan_loss: at step 100",)
    assert step_time_s(summary) == pytest.approx(0.1)


def with_header(record: RankRecord, **values: Any) -> RankRecord:
    return replace(record, header={**record.header, **values})


def ended(record: RankRecord, status: str, message: str) -> RankRecord:
    end = End(status=status, message=message, num_steps=50, peak_memory_gib=None)
    return replace(record, end=end)


def without_samples(record: RankRecord) -> RankRecord:
    steps = Columns(Step, (replace(step, num_samples=0) for step in record.steps))
    return replace(record, steps=steps)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda first, *_, last: [first, last], "attempt 1: no record of rank 1 of 3"),
        (lambda *ranks, last: [*ranks, last, last], "attempt 1: two records of one rank"),
        (lambda *ranks, last: [*ranks, with_header(last, run_id="2")], "attempt 1: ranks differ in run_id"),
        (
            lambda *ranks, last: [*ranks, with_header(last, versions={"torch": "2.9"})],
            "attempt 1: ranks differ in versions",
        ),
        (
            lambda first, *ranks, last: [
                ended(first, "failed", "peer gone"),
                *ranks,
                ended(last, "out_of_memory", "x"),
            ],
            "ended as out_of_memory: x",
        ),
        (
            lambda *ranks, last: [without_samples(one) for one in (*ranks, last)],
            "the steps record no samples",
        ),
    ],
)
def test_ranks_that_do_not_make_a_run_are_told(
    tmp_path: Path, change: Callable[..., list[RankRecord]], problem: str
) -> None:
    *others, last = read_all(write_run(tmp_path, world_size=3, steps=50))
    assert summarize(change(*others, last=last)).problems == (problem,)


def test_a_scripts_ranks_may_begin_with_batches_of_different_sizes(tmp_path: Path) -> None:
    records = read_all(write_run(tmp_path, world_size=2))
    for record in records:
        record.header["script"] = {"command": [], "variant": {}}
    records[1].header["batch_size_per_gpu"] = 3
    summary = summarize(records)
    assert (summary.problems, summary.setup.batch_size_per_gpu) == ((), None)
    assert summary.timing.samples_per_step == 4


def test_samples_are_those_of_the_retained_steps_and_unknown_if_one_of_them_is(tmp_path: Path) -> None:
    records = read_all(write_run(tmp_path, steps=210, world_size=2, batch_size=4))

    def timing(samples: dict[int, int | None]) -> Timing:
        told = [
            replace(
                record,
                steps=Columns(
                    Step,
                    (
                        replace(step, num_samples=samples.get(step.step, 4))
                        if record.header["rank"]
                        else step
                        for step in record.steps
                    ),
                ),
            )
            for record in records
        ]
        return summarize(told).timing

    # 10 and a tenth of the rest are warm-up.
    assert timing({5: None, 100: 1, 200: 0}).samples_per_step == pytest.approx(8 - (3 + 4) / 180)
    unknown = timing({100: None})
    assert unknown.samples_per_step is None and unknown.step_time_s is not None


# --- attempts --------------------------------------------------------------------------------------------


def test_timing_is_of_the_longest_attempt_and_loss_of_the_last(tmp_path: Path) -> None:
    def loss(rank: int, step: int) -> float:
        return 5.0 if step <= 150 else 1.0

    write_run(tmp_path, attempt=1, steps=150, step_time_s=0.1, status=None, loss=loss, instance="p5.48xlarge")
    write_run(
        tmp_path, attempt=2, first_step=141, steps=60, step_time_s=0.3, loss=loss, instance="p4d.24xlarge"
    )
    summary = summarize(read_all(tmp_path.iterdir()))
    assert (summary.status, summary.problems) == ("completed", ())
    assert (summary.num_steps, summary.timing.num_retained_steps) == (200, 126)
    assert step_time_s(summary) == pytest.approx(0.1) and summary.setup.instance == "p5.48xlarge"
    assert summary.quality.final_loss == pytest.approx(1.0)


def test_a_later_attempt_is_timed_when_it_is_longer(tmp_path: Path) -> None:
    write_run(tmp_path, attempt=1, steps=40, step_time_s=0.1, status="interrupted", header={"steps": 200})
    phases = (Phase(name="build", seconds=1.0, step=0), Phase(name="compile", seconds=9.0, step=50))
    graphs = {"steps_per_block": 5, "num_compiles": lambda step: 1 if step <= 50 else 2}
    write_run(tmp_path, attempt=2, first_step=41, steps=160, step_time_s=0.2, phases=phases, **graphs)
    summary = summarize(read_all(tmp_path.iterdir()))
    # Steps 51 to 55, which compile, are 15 steps into the second attempt.
    assert summary.timing.num_retained_steps == 131 and step_time_s(summary) == pytest.approx(0.2)


def test_a_last_attempt_that_ended_before_its_first_step_costs_nothing(tmp_path: Path) -> None:
    write_run(tmp_path, attempt=1, steps=100, status="interrupted", header={"steps": 200})
    early = {"steps": 200, "batch_size_per_gpu": 1}  # not known yet
    write_run(tmp_path, attempt=2, steps=0, status="interrupted", header=early, phases=())
    summary = summarize(read_all(tmp_path.iterdir()))
    assert (summary.problems, summary.status) == ((), "interrupted")
    assert (summary.setup.batch_size_per_gpu, summary.timing.num_retained_steps) == (2, 81)
    assert summary.quality.final_loss is not None


def test_attempts_of_different_things_are_told(tmp_path: Path) -> None:
    write_run(tmp_path, attempt=1, steps=100)
    write_run(tmp_path, attempt=2, first_step=101, steps=100, batch_size=4)
    summary = summarize(read_all(tmp_path.iterdir()))
    assert summary.problems == ("attempt 2 differs from the first in batch_size_per_gpu",)


# --- what is taken from the header -----------------------------------------------------------------------


def test_what_ran_and_on_what_is_taken_from_the_header(run) -> None:
    summary = run(
        recipe="bf16 optimizer_impl=fused",
        instance="p5.48xlarge",
        seed=7,
        data="loader",
        started_at="2026-03-01T23:59:59+00:00",
        header={
            "warnings": ["attention fell back"],
            "image_digest": "sha256:1",
            "session": "sub-1",
            "round": 2,
        },
    )
    setup = summary.setup
    assert (setup.kind, setup.workload, setup.recipe) == ("records", "vit-huge", "bf16 optimizer_impl=fused")
    assert (setup.sample_unit, setup.flops_per_sample) == ("images", 763_504_000_000)
    assert (setup.precision, setup.data, summary.seed) == ("bf16", "loader", 7)
    assert (setup.instance, setup.device_name) == ("p5.48xlarge", "NVIDIA H200")
    assert (summary.environment.host_id, summary.environment.measured_on) == ("host-a", "2026-03-01")
    assert (summary.environment.session, summary.environment.round) == ("sub-1", 2)
    assert (summary.peak_memory_gib, summary.startup.build_s) == (12.5, 1.5)
    assert summary.warnings == ("attention fell back",)
    assert setup.fingerprint == {
        "device_name": "NVIDIA H200",
        "driver": "580.95",
        "torch": "2.13.0",
        "cuda": "13.0",
        "cudnn": "91900",
        "timm": "1.0.29",
        "attention_backend": "sdpa:flash",
        "image_digest": "sha256:1",
        "num_gpus_per_node": "1",
    }


OWN = {"optimizer": "adamw", "learning_rate": 1e-3}


@pytest.mark.parametrize(
    ("overrides", "own", "label"),
    [
        (["learning_rate=0.001", "optimizer=adamw"], OWN, "bf16"),
        (["learning_rate=0.001", "optimizer=sgd"], OWN, "bf16 optimizer=sgd"),
        (["learning_rate=0.1", "optimizer_impl=fused"], OWN, "bf16 learning_rate=0.1 optimizer_impl=fused"),
        # Older records do not say what is the workload's own, and a workload may train nothing.
        (["optimizer=adamw"], {}, "bf16 optimizer=adamw"),
        (["optimizer=adamw"], dict.fromkeys(OWN), "bf16 optimizer=adamw"),
    ],
)
def test_an_override_that_asks_for_the_workloads_own_is_none(
    run, overrides: list[str], own: dict[str, Any], label: str
) -> None:
    workload = {"name": "vit-tiny", "sample_unit": "images", "flops_per_sample": None, "num_parameters": None}
    recipe = resolve_recipe("bf16", overrides).to_record()
    summary = run(workload="vit-tiny", steps=20, header={"workload": workload | own, "recipe": recipe})
    assert summary.setup.recipe == label


@pytest.mark.parametrize(("fabrics", "slowest"), [(("efa", "efa"), "efa"), (("efa", "socket"), "socket")])
def test_the_bandwidth_between_nodes_is_over_the_slowest_network(
    tmp_path: Path, fabrics: Iterable[str], slowest: str
) -> None:
    written = Bandwidth(seconds=0.01, message_bytes=2**28, num_ranks=16, num_repeats=5)
    records = read_all(write_run(tmp_path, steps=20, world_size=2, num_nodes=2))
    phases = [
        (Phase(name="all-reduce", seconds=0.5, step=0, detail=written.detail(fabric=fabric, num_nodes=2)),)
        for fabric in fabrics
    ]
    summary = summarize([replace(record, phases=of) for record, of in zip(records, phases, strict=True)])
    bandwidth = AllReduce(bus_gb_per_s=pytest.approx(50.3316), message_bytes=2**28, fabric=slowest)
    assert summary.all_reduce == bandwidth
    # Runs on different networks are no repeats of each other.
    assert summary.setup.fingerprint["fabric"] == slowest
    (one, *_) = records
    alone = summarize([one])
    assert alone.all_reduce is None and "fabric" not in alone.setup.fingerprint


def test_final_loss_is_the_mean_over_ranks_and_ten_steps(run) -> None:
    summary = run(world_size=2, loss=lambda rank, step: (3.0 if step > 190 else 9.0) + rank)
    assert summary.quality.final_loss == pytest.approx(3.5)


def test_the_fall_of_the_loss_begins_at_the_initial_weights(run) -> None:
    quality = run(steps=200, world_size=2, loss=lambda rank, step: 7 + rank - 0.01 * step).quality
    assert quality.first_loss == pytest.approx(7.49)
    assert quality.loss_slope == pytest.approx(-0.01)


def test_the_slope_is_of_the_last_half_as_the_last_attempt_did_it(run) -> None:
    run(steps=80, status="interrupted", loss=lambda rank, step: 100.0 * step)
    summary = run(
        attempt=2, first_step=51, steps=100, loss=lambda rank, step: 0.0 if step <= 50 else 3 - 0.02 * step
    )
    assert summary.quality.first_loss == 100.0
    assert summary.quality.loss_slope == pytest.approx(-0.02)


# --- held-out data, checks, padding ----------------------------------------------------------------------


def test_padding_is_no_token_of_a_step(run) -> None:
    summary = run(world_size=2, num_tokens=512, num_padding=64)
    assert (summary.timing.tokens_per_step, summary.padding_fraction) == (2 * 448, 0.125)


@pytest.mark.parametrize(
    ("steps", "lost", "known"),
    [
        (12, None, (1.0, None, 1.0)),
        (200, 150, (1.0, None, 1.0)),
        (200, 1, (None, 0.0, 1.0)),
        (200, 195, (1.0, None, None)),
    ],
)
def test_what_is_not_known_of_the_losses(run, steps: int, lost: int | None, known: tuple[Any, ...]) -> None:
    quality = run(steps=steps, loss=lambda rank, step: None if step == lost else 1.0).quality
    assert (quality.first_loss, quality.loss_slope, quality.final_loss) == known


@pytest.mark.parametrize(("num_skipped", "num_warnings"), [(0, 0), (2, 0), (3, 1), (200, 1)])
def test_steps_that_the_loss_scaler_skipped_are_counted(run, num_skipped: int, num_warnings: int) -> None:
    summary = run(steps=200, skipped=lambda step: step <= num_skipped)
    assert summary.quality.skipped_fraction == num_skipped / 200
    assert (len(summary.warnings), summary.problems) == (num_warnings, ())
    assert read_summary(to_data(summary)) == summary


def test_a_step_that_was_done_again_counts_as_it_was_then(run) -> None:
    run(steps=100, status="interrupted", skipped=lambda step: True)
    summary = run(attempt=2, first_step=51, steps=150, skipped=lambda step: False)
    assert summary.quality.skipped_fraction == 50 / 200


def scored(step: int, loss: float | None = 1.0, *, seconds: float = 2.0, **changes: Any) -> Eval:
    told: dict[str, Any] = {"split": "validation", "num_samples": 50, **changes}
    return Eval(step=step, loss=loss, seconds=seconds, **told)


def test_evaluations_are_kept_in_order(run) -> None:
    evals = [scored(100), scored(200, 0.5), scored(200, 0.6, split="test", weights="best")]
    evals += [scored(200, 0.7, split="test")]
    summary = run(evals=evals)
    assert summary.quality.evals == (evals[0], evals[1], evals[3], evals[2])
    assert summary.quality.eval_s == 8.0
    again = run(attempt=2, steps=0, first_step=201, status="interrupted")
    assert again.quality.evals == summary.quality.evals


def test_what_was_done_again_after_a_resume_counts_once_as_it_was_then(tmp_path: Path) -> None:
    def checkpoint(step: int, seconds: float) -> Phase:
        return Phase(name="checkpoint", seconds=seconds, step=step)

    write_run(
        tmp_path,
        steps=150,
        status=None,
        evals=[scored(50, 3.0), scored(100, 2.0), scored(101, 8.0), scored(150, 9.0)],
        phases=[checkpoint(100, 4.0), checkpoint(150, 40.0)],
    )
    write_run(
        tmp_path,
        attempt=2,
        first_step=101,
        steps=100,
        evals=[scored(100, 2.5), scored(150, 1.5), scored(200, 1.0)],
        phases=[checkpoint(200, 6.0)],
    )
    summary = summarize(read_all(tmp_path.iterdir()))
    losses = {line.step: line.loss for line in summary.quality.evals}
    assert losses == {50: 3.0, 100: 2.5, 150: 1.5, 200: 1.0}
    assert (summary.checkpoints.total_s, summary.checkpoints.number) == (10.0, 2)
    assert (summary.checkpoints.last_step, summary.checkpoints.longest_s) == (200, 40.0)


def test_a_checkpoint_costs_what_the_steps_stood_still_for(tmp_path: Path) -> None:
    """The copy, and the wait for the one before; its writing takes longer, beside the steps."""

    def phase(name: str, step: int, seconds: float) -> Phase:
        return Phase(name=name, seconds=seconds, step=step)

    first = [phase("checkpoint", 50, 2.0), phase("checkpoint", 50, 1.0), phase("checkpoint-write", 50, 30.0)]
    second = [phase("checkpoint", 100, 2.0), phase("checkpoint-write", 100, 10.0)]
    write_run(tmp_path, steps=100, phases=[*first, *second])
    checkpoints = summarize(read_all(tmp_path.iterdir())).checkpoints
    assert (checkpoints.total_s, checkpoints.number, checkpoints.last_step) == (5.0, 2, 100)
    assert (checkpoints.longest_s, checkpoints.write_s) == (32.0, 20.0)


def test_a_check_that_failed_anywhere_has_failed(tmp_path: Path) -> None:
    good, bad = (
        Check(name="isolation", passed=True, value=0.1),
        Check(name="isolation", passed=False, value=0.0),
    )
    near, far = (Check(name="equivalence", passed=True, value=value) for value in (0.001, 0.002))
    evals = [scored(100, seconds=2.0)]
    first, second = read_all(write_run(tmp_path, world_size=2, checks=[near, good], evals=evals))
    second = replace(second, checks=(far, bad), evals=(scored(100, seconds=5.0),))
    quality = summarize([first, second]).quality
    # The slowest rank sets the time of an evaluation.
    assert (quality.checks, len(quality.evals), quality.eval_s) == ((far, bad), 1, 5.0)
    assert summarize([second, first]).quality.checks == (far, bad)


PARTS = {"data_s": 0.01, "forward_s": 0.04, "communication_s": 0.0, "other_s": 0.05}


def test_the_profile_of_the_last_attempt_that_has_one_counts(tmp_path: Path) -> None:
    profiles = (
        Profile(step=40, num_steps=5, step_time_s=0.1, overlapped_communication_s=0.02, **PARTS),
        Profile(step=80, num_steps=5, problem="no memory left"),
    )
    records = []
    for attempt, profile in enumerate(profiles, start=1):
        first = 40 * attempt - 39
        paths = write_run(
            tmp_path, steps=40, first_step=first, attempt=attempt, world_size=2, profile=profile
        )
        records += read_all(paths)
    summary = summarize(records)
    assert summary.profile == StepProfile(
        num_steps=5,
        step_time_s=0.1,
        parts_s={"data": 0.01, "forward": 0.04, "communication": 0.0, "other": 0.05},
        overlapped_communication_s=0.02,
    )
    assert any("no memory left" in text for text in summary.warnings)
    assert summarize(read_all(write_run(tmp_path / "without", steps=40))).profile is None


IDENTITY = {
    **dict.fromkeys(("digest", "covers", "num_samples", "generator", "generator_version", "seeded_by")),
    "tokenizer": None,
}


@pytest.mark.parametrize(
    ("identity", "told"),
    [
        ({"digest": "ab", "tokenizer": "bytes"}, {"data": "ab", "tokenizer": "bytes"}),
        ({"generator": "own cd"}, {"data": "own cd"}),
        ({"digest": "ab", "generator": "own cd"}, {"data": "ab own cd"}),
        ({"generator": "corpus", "generator_version": 2}, {"data": "corpus 2"}),
        # What older records hold, which do not say.
        ({"generator": "corpus", "generator_version": 1}, {}),
        (None, {}),
    ],
)
def test_what_data_are_is_in_the_fingerprint(run, identity: Any, told: dict[str, str]) -> None:
    summary = run(header={"data_identity": identity and {**IDENTITY, **identity}})
    fingerprint = summary.setup.fingerprint
    assert {name: fingerprint[name] for name in ("data", "tokenizer") if name in fingerprint} == told


def test_what_a_workload_states_of_its_steps_is_in_the_fingerprint(run) -> None:
    info = {"name": "./my.py:build", "sample_unit": "rows", "flops_per_sample": None, "num_parameters": None}
    stated = {"weight_decay": 0.1, "max_grad_norm": 1.0, "lr_schedule": "cosine", "warmup_steps": 10}
    found = run(header={"workload": {**info, **stated, "arguments": {"width": 8, "act": "a b"}}})
    words = {name: str(value) for name, value in stated.items()} | {"arguments": 'act="a b" width=8'}
    assert words.items() <= found.setup.fingerprint.items()
    place = Place(service="ec2", region=None, purchase="on-demand")
    command = shlex.split(submit_command([found], ["bf16"], place=place, first_seed=0, repeats=1))
    assert [after for word, after in pairwise(command) if word == "--set-workload"] == ["act=a b", "width=8"]


def test_a_workload_that_states_nothing_pools_with_older_records(run) -> None:
    default = {"weight_decay": None, "max_grad_norm": None, "lr_schedule": "constant", "warmup_steps": 0}
    info = {"name": "vit-tiny", "sample_unit": "images", "flops_per_sample": None, "num_parameters": None}
    found = run(header={"workload": {**info, **default, "arguments": {}}})
    assert not {*default, "arguments"} & found.setup.fingerprint.keys()


def test_a_model_that_an_attempt_could_not_look_at_is_no_contradiction(run) -> None:
    workload = {"name": "gpt2-xsmall", "sample_unit": "sequences", "flops_per_sample": None}

    def attempt(number: int, known: dict[str, str] | None) -> Any:
        info = {**workload, "num_parameters": None, "model_identity": known}
        return run(attempt=number, first_step=200 * number - 199, header={"workload": info})

    assert attempt(1, {"config": "ab"}).problems == ()
    assert attempt(2, None).problems == ()
    assert attempt(3, {"config": "cd"}).problems == ("attempt 3 differs from the first in workload",)


def test_ranks_and_attempts_on_other_data_are_no_run(run) -> None:
    first, other = {**IDENTITY, "digest": "ab"}, {**IDENTITY, "digest": "cd"}
    assert run(header={"data_identity": first}).problems == ()
    # An older version went on with it: what that did not say is no contradiction.
    assert run(attempt=2, first_step=201, steps=50).problems == ()
    resumed = run(attempt=3, first_step=251, steps=50, header={"data_identity": other})
    assert resumed.problems == ("attempt 3 differs from the first in data_identity",)


# --- versions of records and recipes ---------------------------------------------------------------------


def of_schema_1(record: RankRecord) -> RankRecord:
    """The record as version 1 would have written it."""
    known = ("name", "description", "precision", "blocks", "fp8_scaling", "compile_mode", "label")
    known += ("overrides", "optimizer", "optimizer_impl")
    recipe = {name: record.header["recipe"][name] for name in known} | {"schema": 1, "blocks": "timm"}
    return replace(record, header={**record.header, "schema": 1, "recipe": recipe})


def test_records_of_an_older_schema_are_read(tmp_path: Path) -> None:
    (record,) = read_all(write_run(tmp_path, num_tokens=10))
    summary = summarize([of_schema_1(record)])
    assert (summary.environment.record_schema, summary.environment.recipe_schema) == (1, 1)
    assert summary.problems == ()
    assert summary.padding_fraction is None  # it was not counted then
    newest = summarize([record]).environment
    assert (newest.record_schema, newest.recipe_schema) == (RECORD_SCHEMA, RECIPE_SCHEMA)


# --- any records, any summary ----------------------------------------------------------------------------

with tempfile.TemporaryDirectory() as folder:
    HEADER = read_record(write_run(Path(folder), steps=1)[0]).header
TIMES = st.one_of(st.floats(0.05, 0.2), st.sampled_from([0.0, 1e-12, 3.0, 1e300]))


@given(st.data())
def test_any_records_have_a_step_time_or_a_problem_and_no_time_is_lost(data: st.DataObject) -> None:
    times = data.draw(st.lists(TIMES, min_size=1, max_size=150))
    steps = Columns(
        Step,
        (
            Step(step=number, step_time_s=time_s, data_wait_s=0.1, loss=1.0, num_samples=2, num_tokens=0)
            for number, time_s in enumerate(times, start=1)
        ),
    )
    blocks: list[Block] = []
    while (first := blocks[-1].last_step + 1 if blocks else 1) <= len(steps) and data.draw(st.integers(0, 9)):
        last = data.draw(st.integers(first, min(first + 40, len(steps))))
        blocks.append(
            Block(
                first_step=first,
                last_step=last,
                wall_s=data.draw(TIMES.filter(bool)),
                num_compiles=data.draw(st.integers(0, 1)),
            )
        )
    end = data.draw(
        st.sampled_from([None, End(status="interrupted", message=None, num_steps=3, peak_memory_gib=None)])
    )
    record = RankRecord(
        path=Path("r"), header=HEADER | {"steps": 150}, phases=(), steps=steps, blocks=tuple(blocks), end=end
    )
    summary = summarize([record])
    json.dumps(to_data(summary), allow_nan=False)
    if summary.timing.step_time_s is None:
        assert summary.problems
        return
    interval = summary.timing.step_time_s
    total_s = interval.value * summary.timing.num_retained_steps + (summary.timing.warmup_s or 0.0)
    assert total_s == pytest.approx(sum(block.wall_s for block in blocks))


EVAL = {"step": 1, "split": "test", "loss": 1.0, "num_samples": 2, "seconds": 0.1}
#: A value of each type, which is no field's default.
OF_TYPE: Mapping[Any, Any] = {
    **{str: "text", int: 7, bool: True, float: 0.1},
    **{Mapping[str, str]: {"a": "b"}, Mapping[str, float]: {"a": 0.1}},
}


def value_of(kind: Any) -> Any:
    """A value of a field's type with nothing in it left out."""
    if is_dataclass(kind):
        return kind(**{name: value_of(of) for name, of in get_type_hints(kind).items()})
    if get_origin(kind) is tuple:
        return (value_of(get_args(kind)[0]),) * 2
    return value_of(get_args(kind)[0]) if type(None) in get_args(kind) else OF_TYPE[kind]


def fields_of(value: Any) -> Any:
    """All fields at whatever depth, those too that are not compared."""
    return (
        {of.name: fields_of(getattr(value, of.name)) for of in fields(value)}
        if is_dataclass(value)
        else value
    )


@pytest.mark.parametrize("summary", [PLAIN, value_of(RunSummary)], ids=["few fields", "all fields"])
def test_a_summary_comes_back_from_json(summary: RunSummary) -> None:
    data = to_data(summary)
    assert fields_of(read_summary(json.loads(json.dumps(data)))) == fields_of(summary)
    assert None not in data.values() and [] not in data.values() and {} not in data.values()


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"colour": "red"}, "$.colour"),
        ({"quality": {"evals": [{**EVAL, "step": "1"}]}}, "$.quality.evals[0].step"),
        ({"quality": {"evals": [{**EVAL, "colour": "red"}]}}, "$.quality.evals[0].colour"),
        ({"timing": {"step_time_s": 0.1}}, "$.timing.step_time_s"),
        ({"setup": {}}, "$.setup"),
        ({"num_steps": True}, "$.num_steps"),
        ({"peak_memory_gib": 10**400}, "$.peak_memory_gib"),
    ],
)
def test_other_json_is_refused_with_its_place(change: dict[str, Any], place: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"`{place}`")) as error:
        read_summary(to_data(PLAIN) | change)
    assert str(error.value).startswith("run summary: ")


@pytest.mark.parametrize("data", [None, [], "text", {"status": "completed"}])
def test_what_is_no_mapping_of_its_fields_is_no_summary(data: Any) -> None:
    with pytest.raises(UserError):
        read_summary(data)

"""Plans that end as soon as all is settled: which runs are made, here, on EC2 and on SageMaker."""

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cloud_world import World, job, opened_world, training_job
from fake_cloud import Clock
from fake_training import FakeTrainingAws
from sagemaker_builders import training_site
from test_submission import JOB, OTHER, InstantBackend, launcher

from fastlaunch.backends.sagemaker.sagemaker import SageMakerBackend
from fastlaunch.core.errors import Throttled, UserError
from fastlaunch.core.plan import RunState
from fastlaunch.jobs.build import interleaved
from fastlaunch.jobs.job import Job
from fastlaunch.jobs.options import Options
from fastlaunch.ledger.ledger import Ledger, Run
from fastlaunch.lifecycle.display import PlainLines
from fastlaunch.lifecycle.launcher import Submission
from fastlaunch.lifecycle.rounds import RowVerdict
from fastlaunch.lifecycle.world import ERROR_LOG
from fastlaunch_train.recipes.recipes import resolve_recipe

COMPILE = replace(JOB, recipe=resolve_recipe("compile"))
MOST = 6


def planned(*specs: Job) -> tuple[Job, ...]:
    return interleaved(specs, Options(until_resolved=True, max_rounds=MOST))


def settled_after(rounds: Mapping[str, int]) -> Any:
    """Verdicts by which each recipe but bf16, the baseline, is settled after so many rounds."""

    def verdicts(runs: Sequence[Run]) -> dict[str, RowVerdict]:
        num_rounds = max((run.spec or {})["round"] for run in runs)
        return {
            run.id: RowVerdict(kind="baseline", is_baseline=True)
            if run.recipe == "bf16"
            else RowVerdict(kind="better")
            if num_rounds >= rounds.get(run.recipe, MOST + 1)
            else RowVerdict(kind="unresolved", is_open=True)
            for run in runs
            if run.state is RunState.COMPLETED
        }

    return verdicts


def made(runs: Sequence[Run]) -> dict[str, int]:
    """How many runs of each recipe completed."""
    done = [run.recipe for run in runs if run.state is RunState.COMPLETED]
    return {recipe: done.count(recipe) for recipe in dict.fromkeys(run.recipe for run in runs)}


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ({"fp32": 3, "compile": 3}, {"bf16": 3, "fp32": 3, "compile": 3}),
        ({"fp32": 1, "compile": 5}, {"bf16": 5, "fp32": 3, "compile": 5}),
        ({"fp32": 4}, {"bf16": MOST, "fp32": 4, "compile": MOST}),
    ],
    ids=["all at the first look", "one early", "one never"],
)
def test_a_row_ends_when_it_is_settled_and_the_baseline_with_the_last(
    tmp_path: Path, rounds: dict[str, int], expected: dict[str, int]
) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        backend = InstantBackend(home=tmp_path / "runs", ledger=ledger)
        jobs = planned(JOB, OTHER, COMPILE)
        submission = Submission(jobs_at=lambda here: jobs, verdicts=settled_after(rounds))
        carried_out = launcher(backend)
        reports: list[str] = []
        runs = replace(carried_out, report=reports.append).submit(submission, command="fastlaunch submit")
    num_looks = sum(line.startswith("after round") for line in reports)
    assert made(runs) == expected
    rest = [run for run in runs if run.state is not RunState.COMPLETED]
    assert all(run.is_unneeded for run in rest)
    # A look after each round from the third on, up to the last that was run.
    assert num_looks == max(expected.values()) - 2


def test_the_first_round_tells_once_how_long_all_of_them_may_take(tmp_path: Path) -> None:
    clock = Clock()
    with Ledger(tmp_path / "ledger.sqlite", clock=clock.now) as ledger:
        backend = InstantBackend(home=tmp_path / "runs", ledger=ledger)
        execute = backend.execute

        def execute_in_20_s(plan: Any) -> Mapping[str, Any]:
            clock.sleep(20)
            return execute(plan)

        backend.execute = execute_in_20_s  # type: ignore[method-assign]
        jobs = planned(JOB, OTHER, COMPILE)
        submission = Submission(jobs_at=lambda here: jobs, verdicts=settled_after({}))
        reports: list[tuple[int, str]] = []
        carried_out = replace(
            launcher(backend), report=lambda line: reports.append((len(backend.calls), line))
        )
        carried_out.submit(submission, command="fastlaunch submit")
    ((num_calls, line),) = [(number, line) for number, line in reports if "6 min" in line]
    assert num_calls == 3 and "60 s" in line


def test_a_batch_size_ends_when_its_own_rows_are_settled(tmp_path: Path) -> None:
    large = [replace(each, batch_size=16) for each in (JOB, OTHER)]

    def verdicts(runs: Sequence[Run]) -> dict[str, RowVerdict]:
        settled = settled_after({"fp32": 3})(runs)
        batches = {run.id: (run.spec or {})["batch_size"] for run in runs}
        later = settled_after({})(runs)
        return {
            id: replace(verdict if batches[id] == 16 else later[id], batch=(batches[id], None))
            for id, verdict in settled.items()
        }

    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        backend = InstantBackend(home=tmp_path / "runs", ledger=ledger)
        jobs = planned(JOB, OTHER, *large)
        submission = Submission(jobs_at=lambda here: jobs, verdicts=verdicts)
        runs = launcher(backend).submit(submission, command="fastlaunch submit")
    at = {
        size: [run for run in runs if (run.spec or {})["batch_size"] == size] for size in (16, JOB.batch_size)
    }
    assert made(at[16]) == {"bf16": 3, "fp32": 3}
    assert made(at[JOB.batch_size]) == {"bf16": MOST, "fp32": MOST}


def test_a_recipe_that_fails_holds_no_look_up(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        backend = InstantBackend(home=tmp_path / "runs", ledger=ledger)
        execute = backend.execute

        def fail_compiled(plan: Any) -> Mapping[str, Any]:
            failed = {"status": "failed", "message": "no"}
            backend.how = failed if plan.request["recipe"] == "compile" else {}
            return execute(plan)

        backend.execute = fail_compiled  # type: ignore[method-assign]
        jobs = planned(JOB, OTHER, COMPILE)
        submission = Submission(jobs_at=lambda here: jobs, verdicts=settled_after({"fp32": 3}))
        runs = launcher(backend).submit(submission, command="fastlaunch submit")
    assert made(runs) == {"bf16": 3, "fp32": 3, "compile": 0}


def test_nothing_is_run_that_has_nothing_left_to_be_compared_with(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        backend = InstantBackend(home=tmp_path / "runs", ledger=ledger)
        execute = backend.execute

        def fail_fp32(plan: Any) -> Mapping[str, Any]:
            backend.how = {"status": "failed"} if plan.request["recipe"] == "fp32" else {}
            return execute(plan)

        backend.execute = fail_fp32  # type: ignore[method-assign]
        jobs = planned(JOB, OTHER)
        submission = Submission(jobs_at=lambda here: jobs, verdicts=settled_after({}))
        reports: list[str] = []
        runs = replace(launcher(backend), report=reports.append).submit(submission, command="submit")
    assert made(runs) == {"bf16": 1, "fp32": 0}
    assert sum("nothing is left to compare" in line for line in reports) == 1


def test_ec2_leaves_out_what_is_not_needed(world: World) -> None:
    jobs = planned(job(), job("te-fp8"))
    world.aws.node = lambda node: node.train(how=lambda run_id: recorded(world, run_id))
    runs = world.submit(jobs=jobs, verdicts=settled_after({"te-fp8": 3}))
    # A look takes as long as what was uploaded does to come here: a run may be made meanwhile.
    assert made(runs) == {"bf16": 3, "te-fp8": 3}
    assert all(run.is_unneeded for run in runs[6:])
    num_made = sum(key.endswith("log.txt.000000000000") for _, key in world.aws.objects) - 1
    assert 6 <= num_made <= 8 < len(runs)
    assert world.attempt(runs[0]).state is RunState.COMPLETED
    assert world.reported("after round 3 of at most 6: te-fp8 better")


def test_a_bucket_that_takes_nothing_for_a_moment_loses_no_verdict(world: World) -> None:
    jobs = planned(job(), job("te-fp8"))

    def train(node: Any) -> None:
        node.train(how=lambda run_id: recorded(world, run_id))
        world.aws.refuse("put_object", Throttled("slow down"))

    world.aws.node = train
    runs = world.submit(jobs=jobs, verdicts=settled_after({"te-fp8": 3}))
    assert made(runs) == {"bf16": 3, "te-fp8": 3}
    assert world.reported("slow down; trying again")


def test_a_training_job_is_stopped_when_all_is_settled(tmp_path: Path) -> None:
    site = training_site()
    with opened_world(tmp_path, FakeTrainingAws, backend_type=SageMakerBackend, site=site) as world:
        jobs = planned(training_job(), training_job("te-fp8"), training_job("te-bf16"))
        world.aws.job = lambda node: node.train(how=lambda run_id: recorded(world, run_id))
        runs = world.submit(jobs=jobs, verdicts=settled_after({"te-fp8": 3, "te-bf16": 4}))
        assert world.aws.running() == []
        attempt = world.attempt(runs[0])
    # Its containers cannot be told to leave out a row.
    assert made(runs) == {"bf16": 4, "te-fp8": 4, "te-bf16": 4}
    assert all(run.is_unneeded for run in runs[12:])
    assert attempt.reason == "stopped by fastlaunch: all rows are settled"


def recorded(world: World, run_id: str) -> dict[str, Any]:
    """What the records of a run say that its job asked for."""
    spec = world.ledger.get(run_id).spec or {}
    return {"recipe": spec["recipe"]["label"], "seed": spec["seed"]}


class BrokenScreen(io.StringIO):
    """What no display can write to."""

    def write(self, text: str) -> int:
        raise ValueError("no such column")


def overflow(runs: Sequence[Run]) -> dict[str, RowVerdict]:
    raise OverflowError(34, "Numerical result out of range")


def refuse(runs: Sequence[Run]) -> dict[str, RowVerdict]:
    raise UserError("prices.yaml:3: not a price")


def settle_and_fail(runs: Sequence[Run]) -> dict[str, RowVerdict]:
    """Verdicts that settle te-fp8, and one that cannot be shown."""
    unshowable: Any = "better"
    return {
        run.id: RowVerdict(kind=run.recipe, is_baseline=True)
        if run.recipe == "bf16"
        else RowVerdict(kind="better", ratio=unshowable)
        for run in runs
    }


@pytest.mark.parametrize("advice", [overflow, refuse, settle_and_fail])
def test_a_verdict_that_fails_ends_no_machine_and_leaves_nothing_out(
    world: World, advice: Callable[[Sequence[Run]], Any]
) -> None:
    world.aws.node = lambda node: node.train(how=lambda run_id: recorded(world, run_id))
    runs = world.submit(jobs=planned(job(), job("te-fp8")), verdicts=advice)
    assert made(runs) == {"bf16": 6, "te-fp8": 6}
    # Three looks failed alike.
    assert sum(line.startswith("warning: ") for line in world.reports) == 1
    # What the user can mend needs no traceback.
    assert (world.home / ERROR_LOG).exists() is (advice is not refuse)


def test_a_verdict_that_fails_ends_no_training_job(tmp_path: Path) -> None:
    site = training_site()
    with opened_world(tmp_path, FakeTrainingAws, backend_type=SageMakerBackend, site=site) as world:
        world.aws.job = lambda node: node.train(how=lambda run_id: recorded(world, run_id))
        runs = world.submit(jobs=planned(training_job(), training_job("te-fp8")), verdicts=overflow)
    assert made(runs) == {"bf16": 6, "te-fp8": 6}


def test_a_display_that_fails_ends_no_machine(world: World) -> None:
    world.shown = BrokenScreen()
    world.aws.node = lambda node: node.train(how=lambda run_id: recorded(world, run_id))
    runs = world.submit(jobs=planned(job(), job("te-fp8")))
    assert made(runs) == {"bf16": 6, "te-fp8": 6}
    assert sum(line.startswith("warning: ") for line in world.reports) == 1


def test_an_interruption_within_advice_is_one(world: World) -> None:
    def interrupt(runs: Sequence[Run]) -> dict[str, RowVerdict]:
        raise KeyboardInterrupt

    world.aws.node = lambda node: node.train(how=lambda run_id: recorded(world, run_id))
    with pytest.raises(KeyboardInterrupt):
        world.submit(jobs=planned(job(), job("te-fp8")), verdicts=interrupt)
    assert world.aws.live() == []


def test_advice_that_fails_ends_no_run_here(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        backend = InstantBackend(home=tmp_path / "runs", ledger=ledger)
        jobs = planned(JOB, OTHER)
        submission = Submission(jobs_at=lambda here: jobs, verdicts=overflow)
        display = PlainLines(stream=BrokenScreen(), clock=lambda: 0.0)
        runs = replace(launcher(backend), display=display).submit(submission, command="fastlaunch submit")
    assert made(runs) == {"bf16": MOST, "fp32": MOST}

"""`fastlaunch resume`: what can go on, from where, for how long and how much; and the run that goes on."""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from typing import Any, Self

import pytest
from cloud_world import WEST, A, B, World, job
from fake_cloud import REST, START, FakeNode
from fake_summaries import PLAIN, changed

from fastlaunch.aws.types import Identity
from fastlaunch.backends.local import LocalBackend, LocalSettings
from fastlaunch.cli.main import run as run_command
from fastlaunch.core.data import to_data
from fastlaunch.core.errors import NoCapacity, UserError
from fastlaunch.core.plan import Ending, RunState
from fastlaunch.jobs.job import Script
from fastlaunch.jobs.machine import Machine
from fastlaunch.jobs.scripts import script_spec
from fastlaunch.ledger.ledger import Ledger, Run
from fastlaunch.lifecycle.display import PlainLines
from fastlaunch.lifecycle.finish import finish_attempt
from fastlaunch.lifecycle.launcher import Submission
from fastlaunch.lifecycle.resume import Resumable, idle_end, jobs_of, left_runs, resumable, slow_checkpoint
from fastlaunch.lifecycle.sight import look
from fastlaunch.lifecycle.world import World as RealWorld


def save(world: World, run_id: str, *names: str) -> None:
    """Store these files with the run's checkpoints."""
    for name in names:
        world.aws.objects["acme-training", f"fastlaunch/runs/{run_id}/checkpoints/{name}"] = b"weights"


def interrupted(world: World, *, saved: tuple[str, ...] = ("step-00000010.pt", "step-00000020.pt")) -> Run:
    """A run, in the ledger, that its node's watchdog stopped after 30 of its 120 minutes."""
    run = world.add()
    attempt = world.attempt(run)
    world.ledger.set_sites(run.submission_id, list(map(to_data, (A, B, WEST))))
    world.ledger.set_machine(attempt.id, zone="us-east-1a", launched_at=START)
    world.ledger.end_attempt(attempt.id, RunState.INTERRUPTED, billed_seconds=1800, lived_s=1800)
    world.ledger.set_state(run.id, RunState.INTERRUPTED)
    save(world, run.id, *saved)
    return world.ledger.get(run.id)


def plan_of(world: World, run: Run) -> Resumable:
    return resumable(run, backends=world.backends, ledger=world.ledger)


def type_in(world: World, *arguments: str) -> int:
    """Exit code of `fastlaunch ARGUMENTS`."""
    local = LocalBackend(LocalSettings(home=world.home, working_directory=world.home))
    context = RealWorld(
        settings=world.settings,
        find_machine=lambda: Machine(devices=(), num_cores=2, modules=frozenset()),
        backends={"local": local, **world.backends},
        argv=arguments,
        sleep=world.clock.sleep,
        connect=lambda: world.aws,
        now=world.clock.now,
    )
    return run_command(list(arguments), obj=context)


def test_a_run_goes_on_from_its_checkpoint(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    def stop(node: FakeNode) -> None:
        node.interrupt(600, "watchdog")
        world.clock.at(600, node.turn_off)
        save(world, node.run_ids()[0], "step-00000020.pt")

    world.aws.node = stop
    (run,) = world.submit(A, B, WEST, jobs=(job(checkpoint_every=10),))
    assert run.state is RunState.INTERRUPTED
    world.aws.node = lambda node: node.train(how=lambda run_id: REST)
    capsys.readouterr()
    assert type_in(world, "resume", run.id, "--yes", "--output", "json") == 0
    captured = capsys.readouterr()
    # 10 minutes were used: 110 are left, and the margin of 10 is billed too.
    assert "from step-00000020.pt, with 110 minutes left; at most $110.08 of instance time" in captured.err
    assert json.loads(captured.out)["runs"][0]["state"] == "completed"
    after = world.ledger.get(run.id)
    assert after.summary is not None and after.summary.num_steps == 40
    _, two = world.ledger.attempts_of(run.id)
    assert (two.token, two.max_minutes) == (f"{run.id}-a2", 110)
    # The attempts of the same request differ in what they must and in nothing else.
    first, second = (request for _, request in world.aws.requests)
    assert first["ImageId"] == second["ImageId"] and first["SubnetId"] == second["SubnetId"]
    states = [str(event.state) for event in world.ledger.history(run.id)]
    assert states == ["planned", "running", "interrupted", "planned", "running", "completed"]


def test_detached_it_returns_when_a_machine_was_started(world: World) -> None:
    run = interrupted(world)
    world.aws.instances.clear()
    assert type_in(world, "resume", run.id, "--yes", "--detach") == 0
    assert world.ledger.get(run.id).state is RunState.RUNNING
    assert len(world.aws.live()) == 1


def test_what_it_may_cost_is_asked_and_bounded(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    run = interrupted(world)
    assert type_in(world, "resume", run.id) == 2
    assert "add --yes" in capsys.readouterr().err
    assert type_in(world, "resume", run.id, "--yes", "--max-cost", "50") == 2
    assert "of $50.00" in capsys.readouterr().err
    world.max_cost = 60.0
    assert type_in(world, "resume", run.id, "--yes") == 2
    assert "of $60.00" in capsys.readouterr().err
    assert world.ledger.get(run.id).state is RunState.INTERRUPTED
    assert len(world.aws.requests) == 1


def forget_attempts(world: World) -> None:
    with world.ledger.transaction():
        world.ledger._file.write("UPDATE attempts SET handle = NULL")


def leave_half_a_checkpoint(world: World) -> None:
    world.aws.objects.clear()
    save(world, world.ledger.select()[0].id, "step-00000030.partial")


def use_up(world: World) -> None:
    with world.ledger.transaction():
        world.ledger._file.write("UPDATE attempts SET lived_s = 6600")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda world: world.aws.objects.clear(), "no checkpoint"),
        (leave_half_a_checkpoint, "no checkpoint"),
        (use_up, "10 are left"),
        (forget_attempts, "never had a machine"),
    ],
)
def test_what_cannot_go_on_is_explained(world: World, change: Callable[[World], None], why: str) -> None:
    run = interrupted(world)
    change(world)
    with pytest.raises(UserError, match=why):
        plan_of(world, run)


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"state": RunState.COMPLETED}, "is completed"), ({"backend": "local"}, "was imported")],
)
def test_only_unfinished_runs_on_aws_go_on(world: World, changes: dict[str, str], why: str) -> None:
    with pytest.raises(UserError, match=why):
        plan_of(world, replace(interrupted(world), **changes))  # type: ignore[arg-type]


def test_a_script_that_saved_nothing_begins_anew_where_spot_was_taken(world: World) -> None:
    run = interrupted(world, saved=())
    script = script_spec(Script(command=("python", "train.py")), backend="ec2", terms=job().terms)
    run = replace(run, spec=script.to_json())
    with pytest.raises(UserError, match="no checkpoint"):
        plan_of(world, run)
    with world.ledger.transaction():
        world.ledger._file.write("UPDATE attempts SET ending = 'reclaimed'")
    assert plan_of(world, run).origin == "the beginning"


def test_only_places_with_its_checkpoints_are_tried(world: World) -> None:
    run = interrupted(world)
    world.clock.moment += timedelta(hours=5)
    plan = plan_of(world, run)
    assert [each.zone for each in plan.placements] == ["us-east-1a", "us-east-1b"]
    assert jobs_of([run])(B)[run.id] == replace(job(), image=B.image, region="us-east-1")
    assert (plan.checkpoint, plan.minutes_left) == ("step-00000020.pt", 90)


def test_a_run_of_a_submission_that_is_followed_is_not_waited_for(world: World) -> None:
    run = interrupted(world)
    with world.followed(run), pytest.raises(UserError, match="another fastlaunch follows"):
        plan_of(world, run)


# Spot that nobody follows


def taken(world: World, *, saved: bool = True, **changes: Any) -> list[Run]:
    """Two detached runs whose machine EC2 took after 10 of their minutes."""

    def node_does(node: FakeNode) -> None:
        if len(world.aws.instances) > 1:
            node.train(how=lambda run_id: REST if run_id == node.run_ids()[0] else {"recipe": "fp32"})
            return
        node.interrupt(600, "spot")
        world.clock.at(620, node.take_back)
        if saved:
            save(world, node.run_ids()[0], "step-00000020.pt")

    world.aws.node = node_does
    spot = job(purchase="spot", checkpoint_every=10)
    options: Any = {"detach": True, **changes}
    runs = world.submit(A, B, jobs=(spot, replace(spot, recipe=job("fp32").recipe)), **options)
    world.clock.sleep(700)
    return runs


def states_of(world: World, runs: list[Run]) -> list[str]:
    return [str(world.ledger.get(run.id).state) for run in runs]


def test_spot_that_nobody_follows_goes_on_at_the_next_look(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = taken(world)
    assert type_in(world, "status") == 0
    told = capsys.readouterr().err
    assert "going on from step-00000020.pt, with 109 minutes left of what was submitted" in told
    assert states_of(world, runs) == ["running", "running"]
    # One machine for all that is left, in the minutes that are left, with a timer of its own.
    two = world.ledger.attempts_of(runs[0].id)[-1]
    assert (two.run_ids, two.max_minutes) == (tuple(run.id for run in runs), 109)
    assert two.schedule is not None and two.schedule["state"] == "created"
    assert type_in(world, "status") == 0
    assert len(world.aws.requests) == 2


def keep_looking(world: World) -> None:
    """Type `status` every minute, until nothing is under way or waits to go on; for hours at most."""
    for _ in range(400):
        assert type_in(world, "status") == 0
        waiting = world.ledger.goes_on()
        if not waiting and not world.ledger.select(["state=planned", "state=running"]):
            return
        world.clock.sleep(60)


def watch(world: World) -> None:
    assert type_in(world, "watch") == 0


@pytest.mark.parametrize("num_refused", [0, 4])
@pytest.mark.parametrize("follow", [keep_looking, watch])
def test_looks_bring_it_home_and_wait_while_there_is_no_capacity(
    world: World, follow: Callable[[World], None], num_refused: int
) -> None:
    runs = taken(world)
    world.aws.answers = [NoCapacity("none")] * num_refused
    follow(world)
    assert states_of(world, runs) == ["completed", "completed"]
    assert len(world.aws.requests) == 2 + num_refused


def test_watch_keeps_looking_and_brings_it_home(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    runs = taken(world)
    world.clock.sleep(3 * 3600)  # longer ago than what ended is shown
    assert type_in(world, "watch", "--output", "json") == 0
    assert states_of(world, runs) == ["completed", "completed"]
    states = [json.loads(line)["state"] for line in capsys.readouterr().out.splitlines()]
    assert (states[0], states[-1]) == ("running", "completed")
    assert len(world.aws.requests) == 2


def test_ctrl_c_ends_a_watch_and_no_machine(world: World) -> None:
    runs = taken(world)

    def interrupt() -> None:
        raise KeyboardInterrupt

    world.clock.at(90, interrupt)
    assert type_in(world, "watch") == 130
    assert states_of(world, runs) == ["running", "running"]
    assert len(world.aws.live()) == 1


def test_without_capacity_it_waits_and_does_not_ask_each_minute(world: World) -> None:
    runs = taken(world)
    world.aws.answers = [NoCapacity("none")] * 2
    assert type_in(world, "status") == 0
    assert states_of(world, runs) == ["interrupted", "interrupted"]
    asked = len(world.aws.requests)
    keep_looking(world)
    assert states_of(world, runs) == ["completed", "completed"]
    assert len(world.aws.requests) == asked + 1


def cancel_it(world: World, run: Run) -> None:
    assert type_in(world, "cancel", run.id) == 0


def log_in_elsewhere(world: World, run: Run) -> None:
    world.reconcile()
    world.aws.caller = Identity(account="999999999999", arn="arn:aws:iam::999999999999:user/ada")


@pytest.mark.parametrize("change", [cancel_it, log_in_elsewhere])
def test_what_the_user_gave_up_or_cannot_pay_for_stays_as_it_is(
    world: World, change: Callable[[World, Run], None]
) -> None:
    runs = taken(world)
    change(world, runs[0])
    keep_looking(world)
    assert states_of(world, runs) == ["interrupted", "interrupted"]
    assert len(world.aws.requests) == 1


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"max_minutes": 20}, "too few"), ({"saved": False}, "no checkpoint"), ({"detach": False}, "")],
)
def test_without_minutes_or_a_checkpoint_it_ends(
    world: World, changes: dict[str, Any], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "detach" in changes:
        world.aws.answers = [None, NoCapacity("none"), NoCapacity("none")]
        with pytest.raises(NoCapacity):
            taken(world, **changes)
    else:
        taken(world, **changes)
    asked = len(world.aws.requests)
    keep_looking(world)
    assert why in capsys.readouterr().err
    assert len(world.aws.requests) == asked


def test_of_two_commands_one_goes_on(world: World) -> None:
    taken(world)
    world.reconcile()
    (chosen,) = left_runs(world.ledger)
    world.launcher().go_on()
    with pytest.raises(UserError, match="still has a machine"):
        world.launcher()._go_on(chosen)
    assert len(world.aws.requests) == 2


def test_what_was_decided_before_the_lock_is_looked_up_again(world: World) -> None:
    runs = taken(world)
    world.reconcile()

    class Waiting(PlainLines):
        def __enter__(self) -> Self:
            world.ledger.set_goes_on([run.id for run in runs], None)
            return super().__enter__()

    display = Waiting(stream=world.shown, clock=lambda: world.clock.now().timestamp())
    assert not replace(world.launcher(), display=display).go_on()
    assert len(world.aws.requests) == 1


def look_before_it_is_noted(world: World) -> None:
    """Let somebody type `status` elsewhere just before the ledger at hand first begins a transaction."""
    transaction = world.ledger.transaction

    def look_first() -> AbstractContextManager[None]:
        world.ledger.transaction = transaction  # type: ignore[method-assign]
        assert type_in(world, "status") == 0
        return transaction()

    world.ledger.transaction = look_first  # type: ignore[method-assign]


def test_an_end_that_was_decided_before_another_command_resumed_changes_nothing(world: World) -> None:
    runs = taken(world)
    attempt = world.attempt(runs[0])
    (aws_status,) = look(world.ledger, world.backend, [attempt])
    look_before_it_is_noted(world)
    result = finish_attempt(attempt, aws_status, backend=world.backend, ledger=world.ledger, go_on=True)
    assert (result.left, states_of(world, runs)) == ((), ["running", "running"])
    assert len(world.aws.live()) == 1


@pytest.mark.parametrize("by_another", [True, False])
def test_killed_before_a_machine_was_asked_for_it_goes_on_at_the_next_look(
    world: World, by_another: bool
) -> None:
    runs = taken(world)
    world.reconcile()
    for run in runs:
        assert world.ledger.reopen(run.id, "resumed")
    if by_another:
        # What nobody held before another command resumed it is not settled.
        look_before_it_is_noted(world)
        world.reconcile()
    else:
        assert type_in(world, "status") == 0
    assert states_of(world, runs) == ["running", "running"]
    assert len(world.aws.live()) == 1


def test_a_run_that_was_resumed_by_hand_is_the_users(world: World) -> None:
    runs = taken(world)
    world.reconcile()
    assert type_in(world, "resume", runs[0].id, "--yes", "--detach") == 0
    assert type_in(world, "status") == 0
    assert states_of(world, runs) == ["running", "interrupted"]
    assert len(world.aws.requests) == 2


def test_a_submission_that_goes_on_says_what_it_waits_for(world: World) -> None:
    world.aws.hidden_s = 100
    run = world.add(noted=False)
    world.launcher().complete(run.submission_id, Submission(jobs_at=lambda _: (job(),)))
    told = [line for line in world.reports if world.attempt(run).token in line]
    # Once, not with each look.
    assert len(told) == 1 and f"fastlaunch cancel {run.id}" in told[0]
    assert world.attempt(run).handle is not None


def test_it_may_be_stopped_while_it_waits_for_what_may_have_started(world: World) -> None:
    world.aws.hidden_s = 600
    run = world.add(noted=False)
    world.ledger.set_sites(run.submission_id, [to_data(A)])
    world.clock.at(50, lambda: setattr(world.stop, "by", "Ctrl-C"))
    world.launcher().complete(run.submission_id, Submission(jobs_at=lambda _: (job(),)))
    # Nothing is known of it yet, and `status` settles it.
    assert world.attempt(run).ended_at is None and len(world.aws.live()) == 1
    world.clock.sleep(600)
    world.reconcile()
    assert world.ledger.get(run.id).state is RunState.COMPLETED and len(world.aws.requests) == 1


# Whether checkpoints are quick enough for spot, by what earlier runs measured


@pytest.fixture
def measured(world: World) -> Ledger:
    summaries = [
        changed(PLAIN, longest_s=12.0),
        changed(PLAIN, longest_s=72.4),
        changed(PLAIN, recipe="te-fp8", longest_s=60.0),
        changed(PLAIN, workload="vit-tiny", longest_s=None),
    ]
    submission = world.ledger.add_submission("fastlaunch submit")
    world.ledger.add_imported([(summary, None) for summary in summaries], submission_id=submission)
    return world.ledger


@pytest.mark.parametrize(("backend", "why"), [("ec2", "two minutes"), ("sagemaker", "promises no time")])
def test_the_longest_checkpoint_of_the_same_training_is_reported(
    measured: Ledger, backend: str, why: str
) -> None:
    warning = slow_checkpoint(measured, [job(purchase="spot")], backend=backend)
    assert warning is not None
    assert "bf16 on vit-huge took 72 s" in warning and why in warning


@pytest.mark.parametrize(
    "changes",
    [{"purchase": "on-demand"}, {"recipe": "te-fp8"}, {"recipe": "fp32"}, {"workload": "vit-tiny"}],
    ids=["on demand", "not above a minute", "never measured", "no checkpoint measured"],
)
def test_otherwise_there_is_no_warning(measured: Ledger, changes: dict[str, str]) -> None:
    spot = job(**{"purchase": "spot", **changes})
    assert slow_checkpoint(measured, [spot], backend="ec2") is None


# Whether an earlier run hung, by what its machine said of its GPUs


@pytest.mark.parametrize(
    ("uses", "changes", "text"),
    [
        ("93%\n" * 30 + "0%\n" * 30, {}, "did nothing in its last 60 min"),
        ("93%\n" * 30 + "0%\n" * 30, {"idle_timeout_s": 600.0}, None),
        ("93%\n" * 30 + "0%\n" * 30, {"recipe": "te-fp8"}, None),
        ("0%\n" * 30 + "93%\n" * 30, {}, None),
        ("93%\n" * 58 + "0%\n" * 2, {}, None),
        ("", {}, None),
    ],
)
def test_a_run_that_hung_before_is_named(
    world: World, uses: str, changes: dict[str, Any], text: str | None
) -> None:
    run = world.add()
    attempt = world.attempt(run)
    world.ledger.end_attempt(attempt.id, RunState.INTERRUPTED, billed_seconds=7200, lived_s=7200)
    world.ledger.set_state(run.id, RunState.INTERRUPTED, ending=Ending.TIME_LIMIT)
    folder = world.home / "runs" / run.id
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "gpu-use-a1.txt").write_text(uses)
    warning = idle_end(world.ledger, [job(**changes)], world.home)
    assert (text is None and warning is None) or (text is not None and warning and text in warning)

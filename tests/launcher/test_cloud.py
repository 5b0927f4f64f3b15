"""A submission on EC2 from its rows to its end: where it is tried, what is noted, how it ends."""

import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from ec2_builders import job, site
from fake_cloud import BOOT_S, Clock, FakeAws, FakeNode

from fastlaunch.attempt_cost import attempt_cost
from fastlaunch.backends import RunState
from fastlaunch.backends.ec2 import Ec2Backend
from fastlaunch.backends.ec2_site import Site
from fastlaunch.cloud import CloudLauncher, CloudSubmission
from fastlaunch.errors import (
    BadConfiguration,
    CloudRefused,
    NoCapacity,
    NotAuthorised,
    QuotaExceeded,
    Throttled,
    Unreachable,
    UserError,
)
from fastlaunch.follow import PlainLines
from fastlaunch.job import JobSpec
from fastlaunch.runs import Ledger, Run
from fastlaunch.settings import Settings
from fastlaunch.stop_request import StopRequest
from fastlaunch.submission import reconcile

A = site(zone="us-east-1a", subnet="subnet-a")
B = site(zone="us-east-1b", subnet="subnet-b")
WEST = site(region="us-west-2", zone="us-west-2a", subnet="subnet-w", bucket="acme-west")
P5EN = site("p5en.48xlarge", zone="us-east-1a", subnet="subnet-a")


@dataclass
class World:
    """A launcher with everything that it acts on; `told`: the lines for the user."""

    home: Path
    clock: Clock
    aws: FakeAws
    ledger: Ledger
    stop: StopRequest
    told: list[str]
    shown: io.StringIO
    discount: float = 0.0

    def launcher(self) -> CloudLauncher:
        return CloudLauncher(
            aws=self.aws,
            ledger=self.ledger,
            home=self.home,
            settings=Settings(home=self.home, discount=self.discount),
            display=PlainLines(stream=self.shown, clock=lambda: self.clock.now().timestamp()),
            stop=self.stop,
            sleep=self.clock.sleep,
            now=self.clock.now,
            tell=self.told.append,
        )

    def submit(
        self,
        *sites: Site,
        jobs: tuple[JobSpec, ...] = (job(),),
        max_minutes: int = 120,
        detach: bool = False,
    ) -> list[Run]:
        def jobs_at(at: Site) -> tuple[JobSpec, ...]:
            placed = {"instance": at.instance.name, "region": at.region}
            return tuple(replace(one, **placed, max_minutes=max_minutes) for one in jobs)

        submission = CloudSubmission(
            sites=sites or (A,), jobs_at=jobs_at, max_minutes=max_minutes, detach=detach
        )
        return self.launcher().submit(submission, command="fastlaunch submit")

    def runs(self) -> list[Run]:
        return self.ledger.select()

    def tokens(self) -> list[tuple[str, str]]:
        return [(region, request["ClientToken"]) for region, request in self.aws.requests]


@pytest.fixture
def world(tmp_path: Path) -> World:
    clock = Clock()
    return World(
        home=tmp_path,
        clock=clock,
        aws=FakeAws(clock),
        ledger=Ledger(tmp_path / "ledger.sqlite", clock=clock.now),
        stop=StopRequest(),
        told=[],
        shown=io.StringIO(),
    )


def test_a_plain_run(world: World) -> None:
    (run,) = world.submit()
    assert (run.state, run.reason, run.instance) == (RunState.COMPLETED, None, "p5.48xlarge")
    assert run.summary is not None and run.summary.num_gpus == 8
    assert run.price is not None and run.price.usd_per_hour == A.usd_per_hour
    assert run.price.purchase == "on-demand"
    (attempt,) = world.ledger.attempts_of(run.id)
    assert (attempt.state, attempt.zone, attempt.billing) == (RunState.COMPLETED, "us-east-1a", "times")
    # One run: booted after 60 s, done at 120, told and turned off at 180.
    assert attempt.billed_seconds == BOOT_S + 120
    cost = attempt_cost(attempt, world.clock.now())
    assert cost.is_final and cost.usd == pytest.approx(180 / 3600 * A.usd_per_hour)
    assert world.aws.live() == []
    assert (world.home / "runs" / run.id / "log.txt").read_text() == "training on i-0001\n"
    assert (world.home / "runs" / run.id / "node-a1.log").read_text() == "pulling the image\n"
    shown = world.shown.getvalue()
    assert "p5.48xlarge in us-east-1: pending" in shown
    assert "i-0001 in us-east-1a: booting" in shown
    assert "step 200/200" in shown and shown.rstrip().endswith("bf16: completed")


def test_rows_and_plan_are_there_before_anything_is_asked_for(world: World) -> None:
    seen: list[Any] = []

    def look(node: FakeNode) -> None:
        with Ledger(world.ledger.path) as other:
            for run in other.select():
                (attempt,) = other.attempts_of(run.id)
                plan = other.plan_of(attempt.id)
                seen.append((run.state, attempt.state, attempt.handle, plan and plan.request))
        node.train()

    world.aws.node = look
    world.submit(jobs=(job(), job("fp32")))
    request = world.aws.requests[0][1]
    assert seen == [(RunState.PLANNED, RunState.PLANNED, None, request)] * 2
    # What is sent is what the plan says, byte by byte.
    assert request["ClientToken"] == f"{world.runs()[0].id}-a1"


def test_several_runs_on_one_machine(world: World) -> None:
    def some(node: FakeNode) -> None:
        first, second, third = node.run_ids()
        how: Mapping[str, Mapping[str, Any]] = {
            first: {},
            second: {"recipe": "fp32", "status": "out_of_memory", "message": "CUDA out of memory"},
            third: {},
        }
        node.train(states={second: "failed"}, how=how.__getitem__)

    world.aws.node = some
    jobs = (job(), job("fp32"), job(seed=1))
    first, second, third = world.submit(jobs=jobs)
    assert first.state is RunState.COMPLETED
    assert (second.state, second.reason) == (
        RunState.FAILED,
        "out of memory on rank 0: CUDA out of memory",
    )
    # Its record says seed 0: what is measured is not what was asked for.
    assert (third.state, third.reason) == (
        RunState.FAILED,
        "the record contradicts the request: seed 0 for 1",
    )
    assert len(world.aws.requests) == 1
    (attempt,) = world.ledger.attempts_of(third.id)
    assert (attempt.state, len(attempt.run_ids)) == (RunState.FAILED, 3)
    assert "[2/3] fp32: failed" in world.shown.getvalue()


# Places


def test_no_capacity_leads_to_the_next_zone_region_and_type(world: World) -> None:
    world.aws.answers = [NoCapacity("none in a"), NoCapacity("none in b"), NoCapacity("none in the west")]
    (run,) = world.submit(A, B, WEST, P5EN)
    assert world.tokens() == [
        ("us-east-1", f"{run.id}-a1"),
        ("us-east-1", f"{run.id}-a2"),
        ("us-west-2", f"{run.id}-a3"),
        ("us-east-1", f"{run.id}-a4"),
    ]
    assert [request.get("SubnetId") for _, request in world.aws.requests] == [
        "subnet-a",
        "subnet-b",
        "subnet-w",
        "subnet-a",
    ]
    assert (run.state, run.instance) == (RunState.COMPLETED, "p5en.48xlarge")
    assert run.spec is not None and run.spec["instance"] == "p5en.48xlarge"
    assert run.price is not None and run.price.instance == "p5en.48xlarge"
    refused = world.ledger.attempts_of(run.id)[:3]
    assert [(one.state, one.reason, one.billed_seconds) for one in refused] == [
        (RunState.FAILED, "none in a", None),
        (RunState.FAILED, "none in b", None),
        (RunState.FAILED, "none in the west", None),
    ]
    assert attempt_cost(refused[0], world.clock.now()).usd == 0


def test_no_capacity_anywhere(world: World) -> None:
    world.aws.answers = [NoCapacity("none in a"), NoCapacity("none in b")]
    with pytest.raises(NoCapacity, match=r"none of 2 places took it: .*us-east-1a: none in a; .*none in b"):
        world.submit(A, B)
    (run,) = world.runs()
    assert run.state is RunState.FAILED and "none in b" in (run.reason or "")
    assert world.ledger.unfinished_attempts("ec2") == []


def test_a_quota_is_not_asked_in_another_zone(world: World) -> None:
    world.aws.answers = [QuotaExceeded("no vCPUs")]
    (run,) = world.submit(A, B, P5EN, WEST)
    assert [region for region, _ in world.tokens()] == ["us-east-1", "us-west-2"]
    assert run.state is RunState.COMPLETED


def test_a_smaller_machine_may_fit_the_quota(world: World) -> None:
    small = site("p5.4xlarge", zone="us-east-1b", subnet="subnet-b")
    world.aws.answers = [QuotaExceeded("no vCPUs")]
    world.aws.node = lambda node: node.train(how=lambda run_id: {"world_size": 8})
    world.submit(A, small)
    assert [request["InstanceType"] for _, request in world.aws.requests] == ["p5.48xlarge", "p5.4xlarge"]


@pytest.mark.parametrize("error", [NotAuthorised("denied"), BadConfiguration("no such profile")])
def test_what_no_place_can_mend_ends_it(world: World, error: CloudRefused) -> None:
    world.aws.answers = [error]
    with pytest.raises(type(error), match=error.message):
        world.submit(A, B)
    assert len(world.aws.requests) == 1
    assert (world.runs()[0].state, world.runs()[0].reason) == (RunState.FAILED, error.message)


def test_a_place_with_a_wrong_subnet_of_its_own_is_passed_over(world: World) -> None:
    world.aws.answers = [BadConfiguration("InvalidSubnetID.NotFound: subnet-a does not exist")]
    (run,) = world.submit(A, B)
    assert run.state is RunState.COMPLETED
    assert any("us-east-1a" in line and "subnet-a does not exist" in line for line in world.told)


def test_too_many_requests_are_waited_out_with_the_same_request(world: World) -> None:
    world.aws.answers = [Throttled("slow down"), Throttled("slow down")]
    (run,) = world.submit(A, B)
    assert world.tokens() == [("us-east-1", f"{run.id}-a1")] * 3
    assert run.state is RunState.COMPLETED


def test_too_many_requests_for_ever_are_told(world: World) -> None:
    world.aws.answers = [Throttled("slow down")] * 200
    with pytest.raises(Throttled):
        world.submit(A, B)
    assert len(world.aws.requests) < 30
    assert world.runs()[0].state is RunState.FAILED
    assert world.aws.instances == {}


# No answer


def test_a_request_without_an_answer_is_sent_again_as_it_was(world: World) -> None:
    world.aws.answers = ["lost", "lost"]
    (run,) = world.submit(A, B)
    sent = [request for _, request in world.aws.requests]
    assert len(sent) == 3 and sent[0] == sent[1] == sent[2]
    assert len(world.aws.instances) == 1
    assert (run.state, run.reason) == (RunState.COMPLETED, None)
    assert world.ledger.attempts_of(run.id)[0].reason is None


def test_what_stays_unknown_is_told_and_nothing_else_is_tried(world: World) -> None:
    world.aws.answers = [Unreachable("no answer")] * 200
    with pytest.raises(Unreachable) as raised:
        world.submit(A, B)
    (run,) = world.runs()
    message, hint = raised.value.message, raised.value.hint or ""
    assert "one p5.48xlarge may be running in us-east-1" in message
    assert f"client token {run.id}-a1" in message and "within 120 min" in message
    assert f"fastlaunch cancel {run.id}" in hint and "fastlaunch reap --region us-east-1" in hint
    assert {token for _, token in world.tokens()} == {f"{run.id}-a1"}
    assert len(world.tokens()) < 30
    assert run.state is RunState.RUNNING and "is not known" in (run.reason or "")
    (attempt,) = world.ledger.unfinished_attempts("ec2")
    assert attempt.handle is None and "is not known" in (attempt.reason or "")


def test_an_unanswered_request_that_is_found_by_its_token_is_followed(world: World) -> None:
    world.aws.answers = ["lost", *[Unreachable("no answer")] * 200]
    (run,) = world.submit(A, B)
    assert run.state is RunState.COMPLETED
    assert len(world.aws.instances) == 1


@pytest.mark.parametrize("error", [NoCapacity("none"), NotAuthorised("expired")])
def test_a_refusal_after_silence_is_believed_only_if_nothing_is_found(
    world: World, error: CloudRefused
) -> None:
    world.aws.answers = ["lost", error]
    (run,) = world.submit(A, B)
    assert run.state is RunState.COMPLETED and len(world.aws.instances) == 1


def test_expired_credentials_after_silence_leave_it_unknown(world: World) -> None:
    world.aws.answers = [Unreachable("no answer"), NotAuthorised("expired")]
    with pytest.raises(Unreachable, match="may be running"):
        world.submit(A, B)
    assert len(world.aws.requests) == 2


def test_a_token_whose_machine_has_ended_is_not_tried_elsewhere(world: World) -> None:
    def end_unheard(node: FakeNode) -> None:
        # The first answer was lost below; the repeated request finds the machine ended.
        node.turn_off()
        error = BadConfiguration("AWS refused it: IdempotentInstanceTerminated")
        error.code = "IdempotentInstanceTerminated"
        raise error

    world.aws.node = end_unheard
    (run,) = world.submit(A, B)
    assert len(world.aws.requests) == 1
    assert run.state is RunState.LOST
    (attempt,) = world.ledger.attempts_of(run.id)
    assert attempt.handle is not None and attempt.billed_seconds == 60.0


# Following


def test_a_machine_that_never_boots_is_ended_and_its_console_kept(world: World) -> None:
    world.aws.node = lambda node: None
    (run,) = world.submit()
    assert run.state is RunState.FAILED
    console = world.home / "runs" / run.id / "console-a1.log"
    assert console.read_text() == "Kernel panic - not syncing"
    assert run.reason == (f"its node did not boot within 12 minutes; what it printed is in {console}")
    assert world.aws.live() == []
    assert world.ledger.attempts_of(run.id)[0].billed_seconds == pytest.approx(20 + 12 * 60, abs=45)


def test_a_machine_that_outlives_its_time_is_ended(world: World) -> None:
    world.aws.node = lambda node: node.train(upto=0)
    (run,) = world.submit(max_minutes=30)
    assert run.state is RunState.FAILED and "10 minutes after its time" in (run.reason or "")
    assert world.aws.live() == []
    assert 40 * 60 <= (world.ledger.attempts_of(run.id)[0].lived_s or 0) <= 41 * 60


def test_a_machine_that_lingers_after_its_last_word_is_ended(world: World) -> None:
    def linger(node: FakeNode) -> None:
        node.train(upto=1)
        world.clock.at(200, lambda: node.say_last("completed", {node.run_ids()[0]: "completed"}))

    world.aws.node = linger
    (run,) = world.submit()
    assert (run.state, run.reason) == (RunState.COMPLETED, None)
    (attempt,) = world.ledger.attempts_of(run.id)
    assert attempt.state is RunState.COMPLETED
    assert 200 + 240 <= (attempt.lived_s or 0) <= 200 + 300
    assert world.aws.live() == []


def test_a_machine_that_shuts_down_for_long_is_not_waited_for(world: World) -> None:
    world.aws.shutdown_s = 1200
    (run,) = world.submit()
    assert run.state is RunState.COMPLETED
    assert world.clock.now() < Clock().now() + timedelta(minutes=6)
    # The attempt ends when the machine has.
    assert [one.run_ids for one in world.ledger.unfinished_attempts("ec2")] == [(run.id,)]
    world.clock.sleep(1200)
    backend = Ec2Backend(aws=world.aws, home=world.home, sleep=world.clock.sleep, now=world.clock.now)
    reconcile(world.ledger, {"ec2": backend})
    (attempt,) = world.ledger.attempts_of(run.id)
    assert (attempt.state, attempt.billed_seconds) == (RunState.COMPLETED, 180.0)


def test_a_machine_that_ec2_does_not_show_yet_is_waited_for(world: World) -> None:
    world.aws.hidden_s = 90
    (run,) = world.submit()
    assert run.state is RunState.COMPLETED


def test_silence_and_haste_while_following_are_waited_out(world: World) -> None:
    world.aws.refuse("describe_instances", Throttled("slow down"), Unreachable("no answer"))
    world.aws.refuse("list_objects", Unreachable("no answer"), Throttled("slow down"))
    (run,) = world.submit()
    assert run.state is RunState.COMPLETED
    assert any("no answer; trying again" in line for line in world.told)


def test_credentials_that_expire_while_following_leave_the_machine_alone(world: World) -> None:
    def expire(node: FakeNode) -> None:
        node.train()
        world.clock.at(90, lambda: world.aws.refuse("describe_instances", NotAuthorised("expired", "log in")))

    world.aws.node = expire
    with pytest.raises(NotAuthorised, match="cannot be followed any more, and goes on: expired") as raised:
        world.submit()
    hint = raised.value.hint or ""
    assert hint.startswith("log in; it turns itself off within 120 min") and "fastlaunch cancel" in hint
    assert world.aws.live() == ["i-0001"]
    assert world.runs()[0].state is RunState.RUNNING


def test_why_ec2_ended_it_is_told(world: World) -> None:
    def fail(node: FakeNode) -> None:
        reason = "Client.InternalError: Client error on launch"
        world.clock.at(5, lambda: world.aws.end(node.instance_id, reason, "Server.InternalError"))

    world.aws.node = fail
    (run,) = world.submit()
    assert run.state is RunState.FAILED and "could not use its volume" in (run.reason or "")


def test_a_node_that_could_not_start_a_run_says_why(world: World) -> None:
    def fail(node: FakeNode) -> None:
        world.clock.at(BOOT_S, node.boot)
        states = dict.fromkeys(node.run_ids(), "not-started")
        world.clock.at(
            100, lambda: node.say_last("configuration", states, reason="the image cannot be pulled")
        )
        world.clock.at(101, node.turn_off)

    world.aws.node = fail
    runs = world.submit(jobs=(job(), job("fp32")))
    assert [(run.state, run.reason) for run in runs] == [
        (RunState.FAILED, "the image cannot be pulled"),
        (RunState.FAILED, "the image cannot be pulled"),
    ]


def test_a_run_that_fails_before_its_record_is_told_by_its_log(world: World) -> None:
    def fail(node: FakeNode) -> None:
        (run_id,) = node.run_ids()
        world.clock.at(BOOT_S, node.boot)
        log = f"node-0/{run_id}/log.txt.000000000000"
        world.clock.at(90, lambda: node.put(log, b"Traceback\n  File\nImportError: no timm\n"))
        world.clock.at(100, lambda: node.say_last("failed", {run_id: "failed"}))
        world.clock.at(101, node.turn_off)

    world.aws.node = fail
    (run,) = world.submit()
    assert (run.state, run.reason) == (
        RunState.FAILED,
        "it ended before its first record (exit code 1): ImportError: no timm",
    )


def test_following_asks_seldom(world: World) -> None:
    world.aws.node = lambda node: node.train(seconds_per_run=1200)
    world.submit()
    minutes = (world.clock.now() - Clock().now()).total_seconds() / 60
    assert minutes > 40
    # Every 10 s for the machine, every 20 s for what it uploads; and never again for what is here.
    assert world.aws.calls["describe_instances"] <= 6 * minutes + 3
    assert world.aws.calls["list_objects"] <= 3 * minutes + 3
    assert world.aws.calls["get_object"] <= len(world.aws.objects)


# Stopping


def test_ctrl_c_lets_the_node_write_its_end(world: World) -> None:
    def interrupt(node: FakeNode) -> None:
        node.train(
            upto=1, how=lambda run_id: {"steps": 80, "header": {"steps": 200}, "status": "interrupted"}
        )
        world.clock.at(150, lambda: setattr(world.stop, "by", "Ctrl-C"))

    world.aws.node = interrupt
    (run,) = world.submit()
    assert (run.state, run.reason) == (RunState.INTERRUPTED, "stopped by Ctrl-C")
    assert run.summary is not None and run.summary.num_steps == 80
    assert any(key.endswith("/abort") for _, key in world.aws.objects)
    assert world.aws.calls["terminate"] == 0
    assert world.ledger.attempts_of(run.id)[0].state is RunState.INTERRUPTED
    assert any("stopping instance i-0001" in line for line in world.told)


def test_a_node_that_does_not_stop_is_ended(world: World) -> None:
    def interrupt(node: FakeNode) -> None:
        node.stops = False
        node.train(upto=1)
        world.clock.at(150, lambda: setattr(world.stop, "by", "Ctrl-C"))

    world.aws.node = interrupt
    (run,) = world.submit(jobs=(job(), job("fp32")))[:1]
    assert run.state is RunState.COMPLETED
    other = world.runs()[1]
    assert (other.state, other.reason) == (RunState.CANCELLED, "stopped by Ctrl-C before it started")
    assert world.aws.live() == [] and world.aws.calls["terminate"] >= 1
    lived_s = world.ledger.attempts_of(run.id)[0].lived_s or 0
    assert 150 + 240 <= lived_s <= 150 + 270


def test_ctrl_c_during_provisioning_ends_what_was_started(world: World) -> None:
    world.aws.node = lambda node: setattr(world.stop, "by", "Ctrl-C")
    (run,) = world.submit()
    assert (run.state, run.reason) == (RunState.CANCELLED, "stopped by Ctrl-C before it started")
    assert world.aws.live() == []
    # It had not booted: there was nothing to wait for.
    assert (world.ledger.attempts_of(run.id)[0].lived_s or 0) < 60


def test_ctrl_c_between_two_places_starts_nothing_more(world: World) -> None:
    world.aws.answers = [NoCapacity("none")]
    launcher = world.launcher()
    tell = lambda line: setattr(world.stop, "by", "SIGTERM")  # noqa: E731
    submission = CloudSubmission(sites=(A, B), jobs_at=lambda at: (job(),), max_minutes=120)
    (run,) = replace(launcher, tell=tell).submit(submission, command="x")
    assert len(world.aws.requests) == 1
    assert (run.state, run.reason) == (RunState.CANCELLED, "stopped by SIGTERM")


def test_a_second_ctrl_c_ends_the_machine_at_once(world: World) -> None:
    def twice() -> None:
        world.stop.by = "Ctrl-C"
        world.clock.at(15, interrupt)

    def interrupt() -> None:
        raise KeyboardInterrupt

    def hang(node: FakeNode) -> None:
        node.stops = False
        node.train(upto=0)
        world.clock.at(100, twice)

    world.aws.node = hang
    with pytest.raises(KeyboardInterrupt):
        world.submit()
    assert world.aws.live() == []
    assert any("is terminated" in line for line in world.told)
    assert world.ledger.unfinished_attempts("ec2")[0].reason == "stopped by Ctrl-C"


def test_a_second_ctrl_c_during_the_request_says_what_may_be_running(world: World) -> None:
    def interrupt(node: FakeNode) -> None:
        world.stop.by = "Ctrl-C"
        raise KeyboardInterrupt

    world.aws.node = interrupt
    with pytest.raises(KeyboardInterrupt):
        world.submit()
    (run,) = world.runs()
    assert any("may be running in us-east-1" in line and f"{run.id}-a1" in line for line in world.told)
    assert run.state is RunState.RUNNING
    assert world.ledger.unfinished_attempts("ec2")[0].handle is None


def test_a_machine_that_cannot_be_ended_is_told_with_the_command(world: World) -> None:
    def interrupt(node: FakeNode) -> None:
        def fail() -> None:
            world.aws.refuse("describe_instances", *[NotAuthorised("expired")] * 50)
            raise RuntimeError("a bug")

        node.train()
        world.clock.at(90, fail)

    world.aws.node = interrupt
    with pytest.raises(RuntimeError, match="a bug"):
        world.submit()
    (line,) = [line for line in world.told if "may still be running" in line]
    assert f"fastlaunch cancel {world.runs()[0].id}" in line and "within 120 min" in line


# Detached


def test_detached_it_returns_when_a_machine_was_started(world: World) -> None:
    (run,) = world.submit(detach=True)
    assert run.state is RunState.RUNNING
    (line,) = world.told
    assert "only its own timer" in line and "within 120 min" in line
    assert f"fastlaunch logs -f {run.id}" in line and f"fastlaunch cancel {run.id}" in line
    assert world.clock.now() == Clock().now()
    assert world.aws.live() == ["i-0001"]


# Spot


def spot(**changes: Any) -> JobSpec:
    return job(purchase="spot", checkpoint_every=20, **changes)


def taken_once(world: World, *, after_s: float, steps: int = 80) -> Callable[[FakeNode], None]:
    def node_does(node: FakeNode) -> None:
        if len(world.aws.instances) > 1:
            node.train(how=lambda run_id: {"steps": 200 - steps, "first_step": steps + 1})
            return
        node.train(
            upto=1, how=lambda run_id: {"steps": steps, "header": {"steps": 200}, "status": "interrupted"}
        )
        states = dict.fromkeys(node.run_ids(), "interrupted")
        world.clock.at(after_s - 60, lambda: node.say_last("interrupted", states, reason="spot"))
        world.clock.at(after_s, node.take_back)

    return node_does


def test_a_spot_interruption_is_gone_on_from(world: World) -> None:
    world.aws.node = taken_once(world, after_s=50 * 60)
    (run,) = world.submit(A, B, jobs=(spot(),))
    assert (run.state, run.reason) == (RunState.COMPLETED, None)
    assert run.summary is not None and run.summary.num_steps == 200
    one, two = world.ledger.attempts_of(run.id)
    assert (one.state, one.reason) == (RunState.INTERRUPTED, "EC2 took the spot instance back")
    assert (one.billing, one.billed_seconds, one.lived_s) == ("free", 0.0, 3000.0)
    assert attempt_cost(one, world.clock.now()).usd == 0
    # Candidates from the start, and only the minutes that remain.
    assert (two.token, two.max_minutes) == (f"{run.id}-a2", 70)
    assert [request["SubnetId"] for _, request in world.aws.requests] == ["subnet-a", "subnet-a"]
    assert run.price is not None and (run.price.purchase, run.price.usd_per_hour) == ("spot", 17.0)
    assert two.usd_per_hour == 17.0
    states = [event.state for event in world.ledger.history(run.id)]
    assert states == ["planned", "running", "completed"]
    log = (world.home / "runs" / run.id / "log.txt").read_text()
    assert log == "training on i-0001\ntraining on i-0002\n"


def test_after_its_first_hour_an_interrupted_machine_is_billed(world: World) -> None:
    world.aws.node = taken_once(world, after_s=61 * 60)
    (run,) = world.submit(jobs=(spot(),))
    one = world.ledger.attempts_of(run.id)[0]
    assert (one.billing, one.billed_seconds) == ("times", 3660.0)
    assert attempt_cost(one, world.clock.now()).usd == pytest.approx(17.0 * 3660 / 3600)


def test_too_little_time_left_is_not_gone_on_with(world: World) -> None:
    world.aws.node = taken_once(world, after_s=50 * 60)
    (run,) = world.submit(jobs=(spot(),), max_minutes=60)
    assert run.state is RunState.INTERRUPTED
    assert run.reason == "EC2 took its machine, and 10 minutes are too few"
    assert len(world.aws.instances) == 1


def test_what_is_completed_is_not_done_again(world: World) -> None:
    def node_does(node: FakeNode) -> None:
        if len(world.aws.instances) > 1:
            node.train(how=lambda run_id: {"recipe": "fp32"})
            return
        first, second = node.run_ids()
        node.train(upto=1)
        states = {first: "completed", second: "not-started"}
        world.clock.at(300, lambda: node.say_last("interrupted", states, reason="spot"))
        world.clock.at(400, node.take_back)

    world.aws.node = node_does
    first, second = world.submit(jobs=(spot(), replace(spot(), recipe=job("fp32").recipe)))
    assert [first.state, second.state] == [RunState.COMPLETED, RunState.COMPLETED]
    assert [token for _, token in world.tokens()] == [f"{first.id}-a1", f"{second.id}-a2"]
    assert len(world.ledger.attempts_of(first.id)) == 1


def test_no_capacity_for_going_on_leaves_it_interrupted(world: World) -> None:
    def node_does(node: FakeNode) -> None:
        taken_once(world, after_s=600)(node)
        world.aws.answers = [NoCapacity("none")]

    world.aws.node = node_does
    with pytest.raises(NoCapacity):
        world.submit(jobs=(spot(),))
    (run,) = world.runs()
    assert (run.state, run.reason) == (RunState.INTERRUPTED, "none")


def test_once_begun_it_goes_on_only_with_its_own_type_and_bucket(world: World) -> None:
    def node_does(node: FakeNode) -> None:
        taken_once(world, after_s=600)(node)
        world.aws.answers = [NoCapacity("none")] * 10

    world.aws.node = node_does
    with pytest.raises(NoCapacity):
        world.submit(A, B, WEST, P5EN, jobs=(spot(),))
    kinds = [(region, request["InstanceType"]) for region, request in world.aws.requests[1:]]
    assert kinds == [("us-east-1", "p5.48xlarge")] * 2


def test_spot_without_a_price_has_none(world: World) -> None:
    world.aws.spot_usd = None
    (run,) = world.submit(jobs=(spot(),))
    assert run.price is None
    assert attempt_cost(world.ledger.attempts_of(run.id)[0], world.clock.now()).usd is None


def test_a_discount_is_taken_off_the_list_price(world: World) -> None:
    world.discount = 0.25
    (run,) = world.submit()
    assert run.price is not None and run.price.usd_per_hour == A.usd_per_hour
    assert world.ledger.attempts_of(run.id)[0].usd_per_hour == pytest.approx(0.75 * A.usd_per_hour)


# Rows


def test_what_cannot_be_planned_leaves_no_attempt(world: World) -> None:
    with pytest.raises(UserError, match="several nodes"):
        world.submit(jobs=(job(num_nodes=2, num_gpus=16),))
    (run,) = world.runs()
    assert run.state is RunState.CANCELLED and "several nodes" in (run.reason or "")
    assert world.ledger.attempts_of(run.id) == []

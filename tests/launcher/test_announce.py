"""What the SNS topic of the config file is told: a line when an attempt starts, ends, or is over its time."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from attempt_builders import attempt_with
from cloud_commands import aws
from cloud_world import World, job, opened_world
from fake_cloud import BOOT_S, REST, FakeNode

from fastlaunch.core.errors import NotAuthorised
from fastlaunch.core.plan import RunState
from fastlaunch.lifecycle.announce import Announcer
from fastlaunch.lifecycle.finish import AttemptResult

if TYPE_CHECKING:
    from moto_server import MotoServer

TOPIC = "arn:aws:sns:us-east-1:123456789012:fastlaunch"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    with opened_world(tmp_path, sns_topic=TOPIC) as world:
        yield world


def told(world: World) -> list[str]:
    """What the topic was told, without the run that it begins with."""
    assert {topic for topic, _ in world.aws.messages} <= {TOPIC}
    assert all(message.startswith("fastlaunch: run ") for _, message in world.aws.messages)
    return [message.split(": ", 2)[2] for _, message in world.aws.messages]


def test_a_followed_run_starts_and_ends_once(world: World) -> None:
    (run,) = world.submit()
    start, end = told(world)
    assert start == "attempt 1 started on p5.48xlarge"
    assert end.startswith("attempt 1 ended: completed; $")
    assert world.aws.messages[0][1].startswith(f"fastlaunch: run {run.id}: ")
    world.reconcile()
    assert len(told(world)) == 2


def test_a_machine_that_takes_long_to_shut_down_has_ended_once(world: World) -> None:
    world.aws.shutdown_s = 1200
    (run,) = world.submit()
    assert run.state is RunState.COMPLETED and world.attempt(run).ended_at is None
    assert len(told(world)) == 2
    world.clock.sleep(1300)
    world.reconcile()
    assert world.attempt(run).ended_at is not None
    assert len(told(world)) == 2


def test_what_replaces_a_machine_says_so(world: World) -> None:
    def node_does(node: FakeNode) -> None:
        if len(world.aws.instances) > 1:
            node.train(how=lambda run_id: REST)
            return
        node.interrupt(1140, "spot")
        world.clock.at(1200, node.take_back)

    world.aws.node = node_does
    world.submit(jobs=(job(purchase="spot", checkpoint_every=20),))
    first, taken, second, end = told(world)
    assert first == "attempt 1 started on p5.48xlarge"
    assert taken.startswith("attempt 1 ended: interrupted (EC2 took the spot instance back); $0.00")
    assert second.startswith("attempt 2 started on p5.48xlarge, and replaces attempt 1")
    assert end.startswith("attempt 2 ended: completed; $")


def test_without_a_topic_nothing_is_sent(world: World) -> None:
    world.sns_topic = None
    world.submit()
    assert world.aws.messages == []


def test_a_topic_that_takes_nothing_hinders_nothing(world: World) -> None:
    world.aws.refuse("publish", NotAuthorised("sns:Publish is not allowed"))
    (run,) = world.submit()
    assert run.state is RunState.COMPLETED
    assert sum(TOPIC in line for line in world.reports) == 1
    # A topic that was refused once only keeps waiting.
    assert world.aws.calls["publish"] == 1


def test_the_next_look_says_the_end_of_what_nobody_followed(world: World) -> None:
    (run,) = world.submit(detach=True)
    assert told(world) == ["attempt 1 started on p5.48xlarge"]
    world.clock.sleep(1200)
    for _ in range(2):
        world.reconcile()
    assert world.state(run)[0] is RunState.COMPLETED
    assert len(told(world)) == 2 and told(world)[1].startswith("attempt 1 ended: completed; $")


@pytest.mark.parametrize(("said", "num_lines"), [(True, 1), (False, 2), ("yes", 2)])
def test_what_the_machine_has_told_itself_is_not_said_again(
    world: World, said: object, num_lines: int
) -> None:
    def node_does(node: FakeNode) -> None:
        last = {"token": node.token, "outcome": "configuration", "reason": "docker", "announced": said}
        world.clock.at(BOOT_S, node.boot)
        world.clock.at(100, lambda: node.put("node-0/status.json", json.dumps(last).encode()))
        world.clock.at(101, node.turn_off)

    world.aws.node = node_does
    (run,) = world.submit(detach=True)
    world.clock.sleep(1200)
    world.reconcile()
    assert world.state(run)[0] is RunState.FAILED
    assert len(told(world)) == num_lines


def test_over_its_time_is_said_once(world: World) -> None:
    world.aws.node = FakeNode.boot
    (run,) = world.submit(detach=True, max_minutes=60)
    for minutes in (69, 2, 30):
        world.clock.sleep(minutes * 60)
        world.reconcile()
        assert len(told(world)) == (1 if minutes == 69 else 2)
    assert told(world)[1].startswith("attempt 1 is over its time since 20")
    assert world.state(run)[0] is RunState.RUNNING


def test_a_follower_says_that_it_is_over_its_time_before_it_ends_it(world: World) -> None:
    world.aws.node = FakeNode.boot
    world.submit(max_minutes=60)
    _, over, end = told(world)
    assert over.startswith("attempt 1 is over its time since 20")
    assert end.startswith("attempt 1 ended: failed (it had not ended 10 minutes after its time); $")


def test_what_was_cancelled_ended(world: World) -> None:
    world.aws.node = lambda node: node.train(upto=0)
    (run,) = world.submit(detach=True)
    world.clock.sleep(300)
    world.cancel(run)
    assert told(world)[1].startswith("attempt 1 ended: interrupted (stopped by fastlaunch cancel); $")
    world.reconcile()
    assert len(told(world)) == 2


def test_a_machine_that_nobody_noted_started_when_it_is_found(world: World) -> None:
    world.add(noted=False)
    world.clock.sleep(60)
    for _ in range(2):
        world.reconcile()
    assert told(world) == ["attempt 1 started on p5.48xlarge"]


def test_a_message_is_one_line_without_control_characters(world: World) -> None:
    announcer = Announcer(ledger=world.ledger, settings=world.settings, warn=world.report)
    result = AttemptResult(state=RunState.FAILED, reason="a\nb \x1b[31mred " + "x" * 1000, is_news=True)
    announcer.ended(world.backend, attempt_with(), result)
    ((_, message),) = world.aws.messages
    assert message.isprintable() and "\n" not in message and len(message) == 500


def test_sns_takes_the_message(aws_server: "MotoServer") -> None:
    from moto_server import backend
    from server_client import server_client

    topic = server_client(aws_server, "sns", "us-west-2").create_topic(Name="fastlaunch")["TopicArn"]
    aws().publish(topic, "fastlaunch: run x: attempt 1 started")
    ((_, message, *_),) = backend("sns", "us-west-2").topics[topic].sent_notifications
    assert message == "fastlaunch: run x: attempt 1 started"

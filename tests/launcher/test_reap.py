"""Which instances have to go, by their tags and launch times, and by what a ledger knows of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from fastlaunch.aws import Instance
from fastlaunch.errors import NotAuthorised
from fastlaunch.reap import Finding, KnownAttempt, find, judge, terminate

LAUNCHED = datetime(2026, 11, 21, 9, 0, tzinfo=UTC)
RUN = "20261121-090000-abcd"
TAGS = {"fastlaunch:run": RUN, "fastlaunch:attempt": "2", "fastlaunch:max-minutes": "60"}

RUNNING = KnownAttempt(id=1, has_ended=False, is_followed=False)
FOLLOWED = KnownAttempt(id=1, has_ended=False, is_followed=True)
ENDED = KnownAttempt(id=1, has_ended=True, is_followed=False)


def instance(*, state: str = "running", region: str = "us-east-1", **tags: str | None) -> Instance:
    given = {**TAGS, **tags}
    return Instance(
        id="i-0001",
        region=region,
        zone=f"{region}a",
        instance_type="p5.48xlarge",
        state=state,
        is_spot=False,
        launch_time=LAUNCHED,
        token=f"{RUN}-a2",
        tags={name: value for name, value in given.items() if value is not None},
    )


def judged(minutes: float, known: KnownAttempt | None = None, found: Instance | None = None) -> Finding:
    return judge(found or instance(), known, now=LAUNCHED + timedelta(minutes=minutes))


@pytest.mark.parametrize("known", [None, RUNNING, FOLLOWED, ENDED])
def test_over_its_time_goes_whatever_a_ledger_says(known: KnownAttempt | None) -> None:
    found = judged(70.1, known)
    assert found.must_go
    assert found.why == "over its time: 60 minutes, and 10 more, ended at 2026-11-21 10:10 UTC"


@pytest.mark.parametrize(
    ("known", "must_go", "why"),
    [
        (None, False, "of another ledger; within its time until 2026-11-21 10:10 UTC"),
        (FOLLOWED, False, "followed by its launcher; within its time until 2026-11-21 10:10 UTC"),
        (
            RUNNING,
            False,
            "nobody follows it, but its own timer stops it; within its time until 2026-11-21 10:10 UTC",
        ),
        (ENDED, True, "its attempt has ended, and it still runs"),
        (replace(ENDED, is_followed=True), False, "followed by its launcher; within its time until "),
    ],
)
def test_within_its_time_only_what_has_ended_goes(
    known: KnownAttempt | None, must_go: bool, why: str
) -> None:
    found = judged(69.9, known)
    assert found.must_go is must_go
    assert found.why.startswith(why)
    assert found.warning is None


@pytest.mark.parametrize("text", [None, "", "soon", "-5", "0", "60.5", "1e3", "٣٠", "99999999999999"])
def test_without_a_readable_limit_two_hours_are_assumed_and_told(text: str | None) -> None:
    odd = instance(**{"fastlaunch:max-minutes": text})
    assert not judged(129, RUNNING, odd).must_go
    found = judged(131, RUNNING, odd)
    assert found.must_go
    assert found.warning is not None and "120 minutes are assumed" in found.warning


def test_without_a_readable_limit_the_ledger_is_believed() -> None:
    known = replace(RUNNING, max_minutes=30)
    odd = instance(**{"fastlaunch:max-minutes": None})
    assert judged(41, known, odd).must_go
    assert "the ledger says 30 minutes" in (judged(41, known, odd).warning or "")
    # The tag is what the node was started with; the ledger does not stretch it.
    assert judged(71, replace(RUNNING, max_minutes=600)).must_go


class FakeEc2:
    """Instances by region; `refusing` are regions and instance ids that answer with an error."""

    def __init__(self, instances: Sequence[Instance], refusing: Sequence[str] = ()) -> None:
        self.instances = instances
        self.refusing = refusing
        self.terminated: list[str] = []

    def describe_instances(
        self, region: str, *, tags: Mapping[str, Sequence[str]] | None = None
    ) -> list[Instance]:
        assert tags == {"fastlaunch:run": ()}
        if region in self.refusing:
            raise NotAuthorised(f"{region} is closed")
        return [one for one in self.instances if one.region == region]

    def terminate(self, region: str, ids: Sequence[str]) -> None:
        if set(ids) & set(self.refusing):
            raise NotAuthorised("no right to terminate")
        self.terminated += ids


def test_only_live_instances_are_found_the_oldest_first() -> None:
    states = ("pending", "running", "stopping", "stopped", "shutting-down", "terminated")
    instances = [
        replace(instance(state=state), id=f"i-{state}", launch_time=LAUNCHED - timedelta(minutes=n))
        for n, state in enumerate(states)
    ]
    found, refused = find(FakeEc2(instances), ["us-east-1"])
    assert [one.id for one in found] == ["i-stopped", "i-stopping", "i-running", "i-pending"]
    assert refused == []


def test_a_region_that_refuses_does_not_stop_the_others() -> None:
    here, there = instance(), instance(region="eu-west-1")
    ec2 = FakeEc2([here, there], refusing=["us-east-1"])
    found, refused = find(ec2, ["us-east-1", "eu-west-1"])
    assert found == [there]
    assert [(one.region, str(one.error)) for one in refused] == [("us-east-1", "us-east-1 is closed")]


def test_an_instance_that_cannot_be_terminated_does_not_stop_the_others() -> None:
    findings = [
        judge(replace(instance(), id=name), None, now=LAUNCHED + timedelta(hours=9))
        for name in ("i-1", "i-2", "i-3")
    ]
    ec2 = FakeEc2([], refusing=["i-2"])
    refused = terminate(ec2, findings)
    assert ec2.terminated == ["i-1", "i-3"]
    assert [one.instance_id for one in refused] == ["i-2"]

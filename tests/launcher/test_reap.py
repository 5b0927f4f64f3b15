"""What has to go: by tags and launch times, by what a ledger knows, and schedules by whose machines live."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fastlaunch.aws.account import Schedule
from fastlaunch.aws.client import Aws
from fastlaunch.aws.sagemaker import TrainingJob
from fastlaunch.aws.types import Identity, Instance
from fastlaunch.backends.sagemaker.plan import MAX_PENDING_S, SPOT_WAIT_S
from fastlaunch.core.errors import NotAuthorised, UserError
from fastlaunch.core.ownership import JOB_WAIT_MINUTES
from fastlaunch.lifecycle.orphans import (
    LINGER,
    NOT_OURS,
    KnownAttempt,
    Orphan,
    end_now,
    judge_instance,
    judge_job,
    judge_schedule,
    owner_of,
    take_inventory,
)

LAUNCHED = datetime(2026, 11, 21, 9, 0, tzinfo=UTC)
RUN = "20261121-090000-abcd"
TAGS = {
    "fastlaunch:run": RUN,
    "fastlaunch:attempt": "2",
    "fastlaunch:max-minutes": "60",
    "fastlaunch:output": f"s3://acme/fastlaunch/runs/{RUN}/attempt-2",
}

RUNNING = KnownAttempt(id=1, over_since=None, is_followed=False)
FOLLOWED = KnownAttempt(id=1, over_since=None, is_followed=True)
LOST = KnownAttempt(id=1, over_since=None, is_followed=False, is_lost=True)
ENDED = KnownAttempt(id=1, over_since=LAUNCHED, is_followed=False)


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


def judged(minutes: float, known: KnownAttempt | None = None, found: Instance | None = None) -> Orphan:
    return judge_instance(found or instance(), known, now=LAUNCHED + timedelta(minutes=minutes))


@pytest.mark.parametrize("known", [None, RUNNING, FOLLOWED, ENDED])
def test_over_its_time_goes_whatever_a_ledger_says(known: KnownAttempt | None) -> None:
    found = judged(70.1, known)
    assert found.must_go
    assert found.why == "over its time: 60 minutes, and 10 more, ended at 2026-11-21 10:10 UTC"


@pytest.mark.parametrize(
    ("known", "must_go", "why"),
    [
        (None, False, "of another ledger"),
        (FOLLOWED, False, "followed by its launcher"),
        (RUNNING, False, "nobody follows it, but its own timer stops it"),
        (LOST, False, "it counted as lost, and is taken back"),
        (ENDED, True, "it ended at 2026-11-21 09:00 UTC by the ledger or its own word, and still runs"),
        (replace(ENDED, is_followed=True), False, "followed by its launcher"),
    ],
)
def test_within_its_time_only_what_has_ended_goes(
    known: KnownAttempt | None, must_go: bool, why: str
) -> None:
    orphan = judged(69.9, known)
    assert orphan.must_go is must_go
    assert orphan.why.startswith(why)


def test_what_said_its_last_word_has_ten_minutes_to_go() -> None:
    minutes = LINGER.total_seconds() / 60
    assert not judged(minutes, ENDED).must_go
    assert judged(minutes + 0.1, ENDED).must_go


#: What a stranger's machine, or one of a hand that copied tags, may carry.
LOOK_ALIKES: tuple[dict[str, str | None], ...] = (
    {"fastlaunch:run": "web-frontend"},
    {"fastlaunch:attempt": None},
    {"fastlaunch:attempt": "02"},
    {"fastlaunch:output": None},
    {"fastlaunch:output": "yes"},
    *({"fastlaunch:max-minutes": text} for text in (None, "soon", "0", "٣٠", "99999999999999")),
)


@pytest.mark.parametrize("tags", LOOK_ALIKES)
def test_what_lacks_one_of_our_tags_is_listed_and_never_goes(tags: dict[str, str | None]) -> None:
    day = LAUNCHED + timedelta(days=1)
    for known in (None, ENDED):
        orphan = judge_instance(instance(**tags), known, now=day)
        assert (orphan.must_go, orphan.why, orphan.ends_at) == (False, NOT_OURS, None)
        training = judge_job(job(**tags), known, now=day)
        for each in (orphan, training):
            assert not each.must_go and not end_now(each).must_go


@pytest.mark.parametrize("token", [None, "", "terraform-2026", f"{RUN}-a1", f"{RUN}-a2x"])
def test_tags_alone_end_nothing(token: str | None) -> None:
    day = LAUNCHED + timedelta(days=1)
    assert not judge_instance(replace(instance(), token=token), ENDED, now=day).must_go
    assert not judge_job(replace(job(), name=token or "x"), ENDED, now=day).must_go


def job(status: str = "InProgress", *, minutes_waiting: float | None = 5, **tags: str | None) -> TrainingJob:
    """minutes_waiting: for machines, since LAUNCHED; None while it still waits."""
    given = {**TAGS, **tags}
    return TrainingJob(
        name=f"{RUN}-a2",
        arn=f"arn:aws:sagemaker:us-east-1:123456789012:training-job/{RUN}-a2",
        region="us-east-1",
        status=status,
        secondary_status="Training",
        created_at=LAUNCHED,
        started_at=None if minutes_waiting is None else LAUNCHED + timedelta(minutes=minutes_waiting),
        instance_type="ml.p5.48xlarge",
        num_instances=2,
        tags={name: value for name, value in given.items() if value is not None},
    )


def test_a_job_that_sagemaker_did_not_end_in_its_time_goes() -> None:
    within = judge_job(job(), RUNNING, now=LAUNCHED + timedelta(minutes=129))
    assert not within.must_go
    assert "SageMaker stops it" in within.why
    over = judge_job(job(), FOLLOWED, now=LAUNCHED + timedelta(minutes=131))
    assert over.must_go and over.why.startswith("over its time")
    # However long it waited: SageMaker's limits of waiting and running are within ours.
    assert max(SPOT_WAIT_S, MAX_PENDING_S) <= JOB_WAIT_MINUTES * 60


def test_a_job_whose_attempt_has_ended_goes_unless_it_is_being_stopped() -> None:
    now = LAUNCHED + timedelta(minutes=11)
    assert judge_job(job(), ENDED, now=now).must_go
    assert not judge_job(job(), None, now=now).must_go
    stopping = judge_job(job("Stopping"), ENDED, now=now + timedelta(days=1))
    assert (stopping.must_go, stopping.why) == (False, "it is being stopped")


def test_the_time_of_a_job_in_a_training_plan_begins_with_its_machines() -> None:
    weeks = LAUNCHED + timedelta(weeks=3)
    waiting = replace(job(minutes_waiting=None), training_plan="arn:x", secondary_status="Pending")
    judged = judge_job(waiting, RUNNING, now=weeks)
    assert not judged.must_go and "waits in the queue of its training plan" in judged.why
    assert judge_job(waiting, ENDED, now=weeks).must_go
    begun = replace(waiting, started_at=weeks)
    assert not judge_job(begun, RUNNING, now=weeks + timedelta(minutes=129)).must_go
    assert judge_job(begun, RUNNING, now=weeks + timedelta(minutes=131)).must_go


def test_a_schedule_goes_once_its_machine_is_gone() -> None:
    made = LAUNCHED + timedelta(minutes=1)
    schedule = Schedule(name=f"fastlaunch-{RUN}-a2-1", region="us-east-1", created_at=made)
    later = made + timedelta(minutes=16)
    gone = judge_schedule(schedule, live_tokens=[f"{RUN}-a1"], now=later)
    assert (gone.must_go, gone.why) == (True, "its machine is gone")
    assert not judge_schedule(schedule, live_tokens=[f"{RUN}-a2"], now=later).must_go
    # What was started a moment ago may not be seen, and what may not be looked at may live.
    assert not judge_schedule(schedule, live_tokens=[], now=made + timedelta(minutes=14)).must_go
    assert not judge_schedule(schedule, live_tokens=[], is_known=False, now=later).must_go
    # Unless this command has just ended them all.
    assert judge_schedule(schedule, live_tokens=[], is_ended=True, now=made).must_go
    assert not judge_schedule(schedule, live_tokens=[], is_known=False, is_ended=True, now=made).must_go
    for name in ("fastlaunch-nightly", f"fastlaunch-{RUN}", f"fastlaunch-{RUN}-a2-old"):
        assert not judge_schedule(replace(schedule, name=name), live_tokens=[], now=later).must_go


def test_a_schedule_that_starts_an_attempt_stays_while_it_is_wanted() -> None:
    name = f"fastlaunch-{RUN}-a2-start"
    schedule = Schedule(name=name, region="us-east-1", created_at=LAUNCHED)
    later = LAUNCHED + timedelta(days=3)
    for name in (schedule.name, f"{schedule.name}-1"):
        waiting = judge_schedule(replace(schedule, name=name), live_tokens=[], now=later)
        assert (waiting.must_go, waiting.is_ours) == (False, True) and "later" in waiting.why
    assert judge_schedule(schedule, live_tokens=[], is_over=True, now=later).must_go


def test_what_its_user_wants_to_end_goes_within_its_time() -> None:
    now = LAUNCHED + timedelta(minutes=1)
    for known in (None, FOLLOWED, RUNNING, LOST):
        assert end_now(judge_instance(instance(), known, now=now)).must_go
        assert end_now(judge_job(job(), known, now=now)).must_go
    assert not end_now(judge_job(job("Stopping"), None, now=now)).must_go


def test_a_machine_says_whose_it_is() -> None:
    now = LAUNCHED
    assert judge_instance(instance(Owner="ada"), None, now=now).owner == "ada"
    assert judge_job(job(Owner="ada"), None, now=now).owner == "ada"
    assert judge_instance(instance(), None, now=now).owner is None


def test_an_owner_that_fits_several_people_is_nobodys_own() -> None:
    session = "arn:aws:sts::123456789012:assumed-role/Dev/"
    assert owner_of(Identity(account="123456789012", arn=f"{session}ada@example.com")) == "ada@example.com"
    with pytest.raises(UserError, match="Dev"):
        owner_of(Identity(account="123456789012", arn=f"{session}botocore-session-1763900000"))


class Unfiltered(Aws):
    """Answers with everything in the region, whatever was asked for; about training jobs it refuses."""

    def describe_instances(self, region: str, **filters: Any) -> list[Instance]:
        return [
            instance(),
            instance(state="terminated"),
            instance(**{"fastlaunch:run": None, "Name": "mine"}),
        ]

    def paginate(self, service: str, region: str, action: str, **parameters: Any) -> Iterator[Any]:
        if action != "ListSchedules":
            raise NotAuthorised(f"{action} is not allowed")
        named = [("fastlaunch-one", "default"), ("backup", "default"), ("fastlaunch-two", "own")]
        yield {
            "Schedules": [
                {"Name": name, "GroupName": group, "CreationDate": LAUNCHED} for name, group in named
            ]
        }


def test_what_is_not_fastlaunchs_is_not_found_even_if_aws_lists_it() -> None:
    found = take_inventory(Unfiltered(), ["us-east-1"])
    assert [one.tags for one in found.instances] == [TAGS]
    assert [one.name for one in found.schedules] == ["fastlaunch-one"]
    assert [one.kind for one in found.refused] == ["job"]

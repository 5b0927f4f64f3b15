"""Look at what AWS shows of attempts, and decide when absence counts. Seen is seen.

A started machine is gone only by a definite end: AWS shows the end, or AWS shows nothing and the bucket has a
final report or an old spot notice. Otherwise absence counts once it was observed three times, five minutes
apart, the last time an hour past the limit, by the account that started the machine. Until then it is unknown
whether the machine is alive.

A look also notes the hourly price of a machine that has started: the list price before, the billed price
afterwards. EC2 has a separate spot price. SageMaker bills spot as fewer seconds at the on-demand price, so
before the end its price is always the on-demand one.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta

from fastlaunch.aws.client import Aws
from fastlaunch.aws.types import Identity
from fastlaunch.backends import s3_sync
from fastlaunch.backends.node_report import time_of
from fastlaunch.backends.protocol import FORGOTTEN_AFTER, AttemptStatus, CloudBackend
from fastlaunch.catalog.prices import Price
from fastlaunch.core.errors import BadConfiguration, CloudRefused, NotAuthorised
from fastlaunch.core.ownership import MARGIN_MINUTES
from fastlaunch.core.units import utc_day
from fastlaunch.ledger.ledger import Ledger
from fastlaunch.ledger.rows import Attempt
from fastlaunch_train.node.protocol import SPOT

_NUM_ABSENCES = 3
_BETWEEN_ABSENCES = timedelta(minutes=5)
_PAST_LIMIT = timedelta(hours=1)
_OLD_NOTICE = timedelta(minutes=10)
#: How long a job may wait in a queue of AWS Batch before its absence counts: Batch shows every job for a week
#: after its end.
_QUEUE_WAIT = timedelta(days=8)
#: The same for a training plan, which begins at most eight weeks after it is bought.
_PLAN_WAIT = timedelta(weeks=9)


def check_account(attempt: Attempt, identity: Identity) -> None:
    """Raise NotAuthorised if the attempt is in another account than `identity`."""
    if not is_of(attempt, identity):
        raise NotAuthorised(
            f"{attempt.token} runs in account {_named(attempt.account, attempt.partition)}, and you are "
            f"logged in to {_named(identity.account, identity.partition)}",
            f"give the profile of account {attempt.account}: --profile NAME, or AWS_PROFILE",
        )


def is_of(attempt: Attempt, identity: Identity) -> bool:
    """Return whether the attempt is in the account."""
    return (attempt.account, attempt.partition) == (identity.account, identity.partition)


def look(ledger: Ledger, backend: CloudBackend, attempts: Sequence[Attempt]) -> list[AttemptStatus]:
    """Return AWS's status of open attempts with handles, and note what it shows and what it does not.

    `has_ended` is also set for absent machines that are gone. Raises subclasses of CloudRefused, such as
    NotAuthorised for an attempt in another account.
    """
    if not attempts:
        return []
    identity = backend.aws.identity()
    for attempt in attempts:
        check_account(attempt, identity)
    statuses = backend.describe([attempt.handle for attempt in attempts if attempt.handle])
    seen = [
        (ledger.attempt(attempt.id), _judged(ledger, backend, attempt, status))
        for attempt, status in zip(attempts, statuses, strict=True)
    ]
    note_machines(ledger, backend, seen)
    return [status for _, status in seen]


def alarm(attempt: Attempt, now: datetime) -> str | None:
    """Return what is wrong with an open attempt that may cost money; None if nothing is known.

    An attempt over its time is over its ceiling too, which is computed for that time.
    """
    if _costs_since(attempt) is None:
        return None
    problems = []
    if since := over_since(attempt, now):
        problems.append(f"over its time and its ceiling since {since:%Y-%m-%d %H:%M} UTC")
    if attempt.absences:
        since = datetime.fromisoformat(attempt.absences[0])
        problems.append(f"AWS has not shown it since {since:%Y-%m-%d %H:%M} UTC: whether it lives is unknown")
    return "; ".join(problems) or None


def over_since(attempt: Attempt, now: datetime) -> datetime | None:
    """Return since when an open attempt that may cost money is over its time; None if it is not."""
    launched_at = _costs_since(attempt)
    if launched_at and attempt.handle:
        # Each start of a job in a queue has the whole time limit, which does not pass while it waits.
        launched_at = attempt.handle.get("restarted_at", launched_at)
    ends_at = _ends_at(attempt, launched_at) if launched_at else None
    return ends_at if ends_at and now > ends_at else None


def _costs_since(attempt: Attempt) -> str | None:
    """Return since when an open attempt may cost money; None if it does not, or has no limit."""
    if attempt.ended_at is not None or attempt.handle is None or attempt.max_minutes is None:
        return None
    # A job that waits for machines has no launched_at yet, and costs nothing.
    return attempt.launched_at or (attempt.handle["launched_at"] if attempt.backend == "ec2" else None)


def _judged(ledger: Ledger, backend: CloudBackend, attempt: Attempt, status: AttemptStatus) -> AttemptStatus:
    if not status.num_unseen:
        if attempt.absences:
            ledger.set_absences(attempt.id, ())
        return status
    now, handle = backend.now(), attempt.handle
    assert handle is not None
    # A younger machine need not be seen yet.
    if status.is_live or now - datetime.fromisoformat(handle["launched_at"]) <= FORGOTTEN_AFTER:
        return status
    wait_limit = _QUEUE_WAIT if handle.get("service_job") else backend.wait_limit
    if handle.get("training_plan"):
        wait_limit = _PLAN_WAIT
    ends_at = _ends_at(attempt, attempt.launched_at or handle["launched_at"]) + wait_limit
    is_past = counts_absence(ledger, attempt, ends_at, now)
    return replace(status, has_ended=is_past or _has_said_its_last_word(attempt, backend))


def counts_absence(ledger: Ledger, attempt: Attempt, ends_at: datetime, now: datetime) -> bool:
    """Note that AWS shows nothing now; return whether it has not for so long that nothing lives.

    ends_at: when the time of its machines is over.
    """
    absences = _with_absence(ledger.attempt(attempt.id).absences, now)
    ledger.set_absences(attempt.id, absences)
    return len(absences) >= _NUM_ABSENCES and datetime.fromisoformat(absences[-1]) > ends_at + _PAST_LIMIT


def _with_absence(absences: Sequence[str], now: datetime) -> tuple[str, ...]:
    """Return the looks that count, with `now` if the last one is long enough ago."""
    if absences and now - datetime.fromisoformat(absences[-1]) < _BETWEEN_ABSENCES:
        return tuple(absences)
    return (*absences, now.astimezone(UTC).isoformat(timespec="seconds"))[-_NUM_ABSENCES:]


def _ends_at(attempt: Attempt, launched_at: str) -> datetime:
    """Return when the time of machines started at `launched_at` is over, margin included."""
    minutes = (attempt.max_minutes or 0) + MARGIN_MINUTES
    return datetime.fromisoformat(launched_at) + timedelta(minutes=minutes)


def _has_said_its_last_word(attempt: Attempt, backend: CloudBackend) -> bool:
    """Return whether all nodes sent a final report, or a spot notice is more than ten minutes old."""
    assert attempt.handle is not None
    try:
        synced = backend.sync(attempt.handle)
    except BadConfiguration:
        # The bucket is gone, so no more files will come.
        synced = s3_sync.kept(backend.home, attempt.token, attempt.num_nodes)
    notices = [
        time_of(status, "billed_until") for status in synced.statuses.values() if status.get("reason") == SPOT
    ]
    is_taken = any(at and backend.now() - at > _OLD_NOTICE for at in notices)
    return synced.status is not None or is_taken


def _named(account: str | None, partition: str | None) -> str:
    return f"{account}" if partition == "aws" else f"{account} ({partition})"


def managed_spot_price(listed: Price, aws_status: AttemptStatus) -> Price | None:
    """Return the hourly price of managed spot: the list price times billed over trained seconds.

    listed: the on-demand price, at which SageMaker bills seconds. None if SageMaker does not report the
    seconds, or gave no discount.
    """
    if not aws_status.is_spot or not aws_status.billable_s or not aws_status.training_s:
        return None
    if (listed.service, listed.purchase) != ("sagemaker", "on-demand"):
        return None
    if aws_status.billable_s >= aws_status.training_s:
        return None
    share = aws_status.billable_s / aws_status.training_s
    return replace(
        listed,
        purchase="spot",
        usd_per_hour=listed.usd_per_hour * share,
        source=f"{share:.1%} of {listed.usd_per_hour:g} ({listed.source}), by sagemaker:DescribeTrainingJob",
    )


def note_machines(
    ledger: Ledger, backend: CloudBackend, seen: Sequence[tuple[Attempt, AttemptStatus]]
) -> None:
    """Store zone, start and price of machines when they are first seen started.

    Also store what runs on SageMaker wait for, while they wait. seen: attempts as in the ledger, with their
    status at AWS, which is asked for a spot price once per type and zone.
    """
    for attempt, aws_status in seen:
        if attempt.backend == "sagemaker":
            _explain_wait(ledger, attempt, aws_status)
            _note_starts(ledger, attempt, aws_status)
    new = [(attempt, status) for attempt, status in seen if not attempt.launched_at and status.launched_at]
    if not new:
        return
    today = utc_day(backend.now())
    offers = {offer for attempt, status in new if (offer := _spot_offer(attempt, status))}
    prices = {offer: _spot_price(backend.aws, *offer, today=today) for offer in offers}
    with ledger.transaction():
        for attempt, status in new:
            assert status.launched_at is not None
            offer = _spot_offer(attempt, status)
            price = prices[offer] if offer else None
            if price is not None:
                for run_id in ledger.existing(attempt.run_ids):
                    ledger.set_price(run_id, price)
            ledger.set_machine(
                attempt.id,
                zone=status.zone,
                launched_at=status.launched_at,
                usd_per_hour=price.usd_per_hour if price else None,
            )


def _explain_wait(ledger: Ledger, attempt: Attempt, aws_status: AttemptStatus) -> None:
    """Note what the attempt's runs wait for, such as `waiting for capacity`, while they wait."""
    if not aws_status.is_live:
        return
    reason = None if aws_status.is_up else aws_status.detail
    changed = [run_id for run_id in ledger.existing(attempt.run_ids) if ledger.get(run_id).reason != reason]
    if changed:
        with ledger.transaction():
            for run_id in changed:
                ledger.explain(run_id, reason)


def _note_starts(ledger: Ledger, attempt: Attempt, aws_status: AttemptStatus) -> None:
    """Store the training jobs that a queue has started for the attempt."""
    handle, started = attempt.handle or {}, list(aws_status.started_jobs)
    if not started:
        return
    restarted_at = aws_status.restarted_at and aws_status.restarted_at.astimezone(UTC).isoformat()
    seen = {"training_jobs": started, "restarted_at": restarted_at, "earlier_s": aws_status.earlier_s}
    if any(handle.get(name) != value for name, value in seen.items()):
        ledger.set_handle(attempt.id, {**handle, **seen})


def _spot_offer(attempt: Attempt, aws_status: AttemptStatus) -> tuple[str, str, str | None] | None:
    """Return region, type and zone of a spot machine of EC2; None for any other machine."""
    if attempt.backend != "ec2" or not aws_status.is_spot or attempt.region is None:
        return None
    return (attempt.region, aws_status.instance_type, aws_status.zone) if aws_status.instance_type else None


def _spot_price(aws: Aws, region: str, instance: str, zone: str | None, *, today: date) -> Price | None:
    """Return the newest EC2 spot price of the type in the zone; None if AWS reports none."""
    quote = None
    with suppress(CloudRefused):
        quote = aws.spot_price_usd(region, instance, zone)
    if quote is None:
        return None
    usd_per_hour, origin = quote
    return Price(
        instance=instance,
        service="ec2",
        region=region,
        purchase="spot",
        usd_per_hour=usd_per_hour,
        as_of=today,
        source=f"ec2:DescribeSpotPriceHistory, {origin}",
    )

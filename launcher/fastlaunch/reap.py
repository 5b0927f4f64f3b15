"""Finds instances that nobody stops any more, by their tags alone, and says which of them have to go.

The last of the ways to stop paying: it needs no ledger. Where there is one, it tells more, and never that an
instance which has had its time may go on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Protocol

from fastlaunch.aws import Instance
from fastlaunch.cloud_finish import STOPPED_BY
from fastlaunch.cost_ceiling import MARGIN_MINUTES
from fastlaunch.errors import CloudRefused
from fastlaunch.submission import launcher_lives

if TYPE_CHECKING:
    from fastlaunch.runs import Ledger

RUN_TAG = "fastlaunch:run"
ATTEMPT_TAG = "fastlaunch:attempt"
MAX_MINUTES_TAG = "fastlaunch:max-minutes"
#: Assumed where neither tag nor ledger tells a limit: what `submit` takes without --max-hours.
ASSUMED_MAX_MINUTES = 120
#: More is no limit that anyone gave; a capacity block lasts half a year at most.
_MOST_MINUTES = 366 * 24 * 60


class Ec2(Protocol):
    """The two calls that reaping takes; see `fastlaunch.aws.Aws`."""

    def describe_instances(
        self, region: str, *, tags: Mapping[str, Sequence[str]] | None = None
    ) -> list[Instance]: ...
    def terminate(self, region: str, ids: Sequence[str]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class KnownAttempt:
    """What a ledger says of the attempt that an instance carries out.

    id: of the attempt. has_ended: the attempt, or all its runs. is_followed: its launcher lives. max_minutes:
    of the attempt. usd_per_hour: at which it was started.
    """

    id: int
    has_ended: bool
    is_followed: bool
    max_minutes: int | None = None
    usd_per_hour: float | None = None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A live instance, whether it `must_go`, and why, in words. warning: what is odd about it.

    ends_at: when it will have had its time, its margin included. known: None for an instance of another
    ledger. hours: since it was launched.
    """

    instance: Instance
    must_go: bool
    why: str
    ends_at: datetime
    hours: float
    known: KnownAttempt | None = None
    warning: str | None = None

    @property
    def run_id(self) -> str:
        """Of the first run that the instance does."""
        return self.instance.tags[RUN_TAG]


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """What AWS refused: to look at a region, or (instance_id) to terminate an instance there."""

    region: str
    error: CloudRefused
    instance_id: str | None = None


def find(ec2: Ec2, regions: Sequence[str]) -> tuple[list[Instance], list[Refusal]]:
    """Every live instance that carries the run tag, the oldest first, and the regions that refused."""
    found: list[Instance] = []
    refused = []
    for region in regions:
        try:
            found += ec2.describe_instances(region, tags={RUN_TAG: ()})
        except CloudRefused as error:
            refused.append(Refusal(region=region, error=error))
    live = [instance for instance in found if instance.is_live and RUN_TAG in instance.tags]
    return sorted(live, key=lambda instance: (instance.launch_time, instance.id)), refused


def judge(instance: Instance, known: KnownAttempt | None, *, now: datetime) -> Finding:
    """Whether the instance must go: it is over its time, or the attempt that it carries out has ended.

    known: of the ledger at hand, None if the attempt is not in it.
    """
    minutes, warning = _limit(instance, known)
    ends_at = instance.launch_time + timedelta(minutes=minutes + MARGIN_MINUTES)
    must_go = True
    if now > ends_at:
        why = f"over its time: {minutes} minutes, and {MARGIN_MINUTES} more, ended at {_clock_time(ends_at)}"
    elif known and known.has_ended and not known.is_followed:
        why = "its attempt has ended, and it still runs"
    else:
        must_go = False
        if known is None:
            who = "of another ledger"
        elif known.is_followed:
            who = "followed by its launcher"
        else:
            who = "nobody follows it, but its own timer stops it"
        why = f"{who}; within its time until {_clock_time(ends_at)}"
    return Finding(
        instance=instance,
        must_go=must_go,
        why=why,
        ends_at=ends_at,
        hours=max(0.0, (now - instance.launch_time).total_seconds() / 3600),
        known=known,
        warning=warning,
    )


def terminate(ec2: Ec2, findings: Sequence[Finding]) -> list[Refusal]:
    """Terminate every instance of `findings`; those that AWS refused to terminate are returned.

    One request for each, so that a right that is lacking for one keeps none of the others alive.
    """
    refused = []
    for finding in findings:
        region, instance_id = finding.instance.region, finding.instance.id
        try:
            ec2.terminate(region, [instance_id])
        except CloudRefused as error:
            refused.append(Refusal(region=region, error=error, instance_id=instance_id))
    return refused


def note_ends(ledger: "Ledger", findings: Sequence[Finding]) -> None:
    """Note in the ledger why the instances of `findings`, which were told to terminate, end."""
    for finding in findings:
        if finding.known:
            ledger.explain_attempt(finding.known.id, f"{STOPPED_BY}fastlaunch reap, {finding.why}")


def known_attempts(ledger: "Ledger", instances: Sequence[Instance]) -> dict[str, KnownAttempt]:
    """What the ledger says of the attempts that the instances carry out, by instance id.

    An attempt is known by the token of its request, or by the tags that hold the token's parts.
    """
    tokens = {instance.id: _tokens(instance) for instance in instances}
    attempts = ledger.attempts_by_token([token for of_one in tokens.values() for token in of_one])
    known = {}
    for instance_id, of_one in tokens.items():
        attempt = next((attempts[token] for token in of_one if token in attempts), None)
        if attempt is not None:
            runs = ledger.select(attempt.run_ids)
            known[instance_id] = KnownAttempt(
                id=attempt.id,
                has_ended=attempt.ended_at is not None or all(run.state.is_final for run in runs),
                is_followed=any(launcher_lives(ledger, run) for run in runs),
                max_minutes=attempt.max_minutes,
                usd_per_hour=attempt.usd_per_hour,
            )
    return known


def _tokens(instance: Instance) -> list[str]:
    tagged = f"{instance.tags[RUN_TAG]}-a{instance.tags.get(ATTEMPT_TAG)}"
    return [instance.token, tagged] if instance.token else [tagged]


def _limit(instance: Instance, known: KnownAttempt | None) -> tuple[int, str | None]:
    """Minutes that the instance may run, and what to say if the tag does not tell."""
    text = instance.tags.get(MAX_MINUTES_TAG)
    if text is not None and text.isascii() and text.isdecimal() and 1 <= int(text) <= _MOST_MINUTES:
        return int(text), None
    told = "without a time limit in its tags" if text is None else f"its time limit is no number: {text!r}"
    if known and known.max_minutes:
        return known.max_minutes, f"{told}; the ledger says {known.max_minutes} minutes"
    return ASSUMED_MAX_MINUTES, f"{told}; {ASSUMED_MAX_MINUTES} minutes are assumed"


def _clock_time(moment: datetime) -> str:
    return f"{moment:%Y-%m-%d %H:%M} UTC"

"""What lies between a launcher and AWS in a trial: the faulty proxy, which can also strike at a moment.

It also plays the views of AWS that show nothing: an old one, and that of another account.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import moto_gaps
from faulty_proxy import Fault, FaultyProxy
from sent_request import SentRequest

#: The requests that start machines.
LAUNCHES = ("RunInstances", "CreateTrainingJob", "SubmitServiceJob")
#: Signs the requests of somebody who is logged in to another account, which can read the bucket too.
STRANGER_KEY = "AKIASTRANGER"
_STRANGER = (
    "<GetCallerIdentityResult><Arn>arn:aws:iam::999999999999:user/other</Arn><UserId>AIDAOTHER</UserId>"
    "<Account>999999999999</Account></GetCallerIdentityResult>"
)


@dataclass(frozen=True, kw_only=True)
class Faults:
    """How often what goes wrong, each a probability for every request.

    refused, throttled: answered with an error, not passed on. unsent: lost on the way there. lost: carried
    out, with the answer lost; lost_launches: the same of what starts machines. no_capacity: of RunInstances,
    unless its token has an instance. hidden: in how many answers what is new is missing. expires_at: the
    request from which on the credentials have expired; None for never. timers: what happens to every
    CreateSchedule. denied: actions for which the right is lacking. first_launch: what happens to the first
    request that starts machines. stale: the first look, from 1, in which EC2 and SageMaker show nothing,
    whatever lives, and the first one in which they show all again.
    """

    refused: float = 0.0
    throttled: float = 0.0
    unsent: float = 0.0
    lost: float = 0.0
    lost_launches: float = 0.0
    no_capacity: float = 0.0
    hidden: int = 0
    expires_at: int | None = None
    timers: Fault | None = None
    denied: tuple[str, ...] = ()
    first_launch: Fault | None = None
    stale: tuple[int, int] = (0, 0)


@dataclass(frozen=True, kw_only=True)
class Moment:
    """A moment of the network: the n-th request from 1, of one action or of all; before it or after it."""

    n: int
    action: str | None = None
    after: bool = False


class Network(FaultyProxy):
    """A started proxy, troubled by `Faults`, that can call someone at a `Moment`."""

    def __init__(self, server_url: str) -> None:
        super().__init__(server_url)
        self.faults = Faults()
        #: EC2 and SageMaker show nothing until this is taken back.
        self.is_stale = False
        self.num_stale = 0
        self._num_looks = 0
        self._counts: dict[str | None, int] = {}
        self._at: tuple[Moment, int, Callable[[], None]] | None = None
        self._had: set[str] = set()

    def trouble(self, faults: Faults, random: Random) -> None:
        """From now on these faults, drawn from `random`, with nothing counted yet."""
        self.calm()
        self.log.clear()
        self.faults, self._random, self._counts = faults, random, {}
        self._num_looks = self.num_stale = 0
        others = {
            Fault.INTERNAL_ERROR: faults.refused,
            Fault.THROTTLE: faults.throttled,
            Fault.LOSE_REQUEST: faults.unsent,
        }
        self.at_random({**others, Fault.LOSE_ANSWER: faults.lost})
        launches = {fault: rate * (1 - faults.lost_launches) for fault, rate in others.items()}
        self.at_random({Fault.LOSE_ANSWER: faults.lost_launches, **launches}, actions=LAUNCHES)
        if faults.first_launch is not None:
            for action in LAUNCHES:
                self.script(action, faults.first_launch)
        if faults.timers is not None:
            self.at_random({faults.timers: 1.0}, actions=("CreateSchedule",))
        self.hide_describes = faults.hidden

    def calm(self) -> None:
        """Pass everything on from now on."""
        super().calm()
        self.faults, self._at, self.is_stale = Faults(), None, False

    def at(self, moment: Moment | None, call: Callable[[], None] = lambda: None) -> None:
        """Call once at a moment, before the request is passed on or before its answer is; None for never.

        Counted from now on.
        """
        with self._lock:
            self._at = (moment, self._counts.get(moment.action, 0) + moment.n, call) if moment else None

    def answer(self, request: SentRequest, body: bytes, target: str) -> Any:
        """Status, headers and body for the client, None to hang up."""
        with self._lock:
            for name in (None, request.action):
                self._counts[name] = self._counts.get(name, 0) + 1
            number = self._counts[None]
            drawn = self._random.random()
        self._come(request.action, after=False)
        if f"Credential={STRANGER_KEY}/" in request.headers.get("authorization", ""):
            return _answer_of_another_account(request) or super().answer(request, body, target)
        if self.faults.expires_at is not None and number >= self.faults.expires_at:
            return moto_gaps.error(request, "RequestExpired", "Request has expired.", 400)
        if request.action in self.faults.denied:
            denied = f"User is not authorized to perform {request.action}"
            return moto_gaps.error(request, "AccessDeniedException", denied, 403)
        token = request.parameters.get("ClientToken")
        if request.action == "RunInstances" and drawn < self.faults.no_capacity and token not in self._had:
            return moto_gaps.error(request, "InsufficientInstanceCapacity", "There is not enough.", 500)
        told = super().answer(request, body, target)
        if request.action == "RunInstances" and self.log[-1].fault in (Fault.NONE, Fault.LOSE_ANSWER):
            self._had.add(str(token))
        self._come(request.action, after=True)
        return self._staled(request) or told

    def _staled(self, request: SentRequest) -> Any:
        """The answer in which nothing is, where the view is old; None otherwise."""
        if (empty := _empty(request)) is None:
            return None
        with self._lock:
            self._num_looks += 1
            first, end = self.faults.stale
            if not self.is_stale and not first <= self._num_looks < end:
                return None
            self.num_stale += 1
            return empty

    def _come(self, action: str, *, after: bool) -> None:
        with self._lock:
            if self._at is None:
                return
            moment, number, call = self._at
            if moment.after is not after or moment.action not in (None, action):
                return
            if self._counts[moment.action] != number:
                return
            self._at = None
        call()


def _empty(request: SentRequest) -> Any:
    """The answer to a look at machines or jobs where there are none; None for all else."""
    if request.action == "DescribeInstances":
        return moto_gaps.xml(request.action, "<reservationSet/>")
    if request.action == "DescribeTrainingJob":
        return moto_gaps.error(request, "ValidationException", "Requested resource not found.", 400)
    if request.action == "DescribeServiceJob":
        return moto_gaps.error(request, "ClientException", "Job does not exist.", 400)
    if request.action == "ListServiceJobs":
        return _json({"jobSummaryList": []})
    if request.action == "ListTrainingJobs":
        return _json({"TrainingJobSummaries": []})
    return None


def _answer_of_another_account(request: SentRequest) -> Any:
    """The answer of an account in which nothing is; None where it is the bucket's."""
    if request.service == "s3":
        return None
    if request.action == "GetCallerIdentity":
        return moto_gaps.xml(request.action, _STRANGER)
    if request.action == "ListSchedules":
        return _json({"Schedules": []})
    if (empty := _empty(request)) is not None:
        return empty
    if request.action == "DescribeJobQueues":
        return _json({"jobQueues": []})
    code = {
        **{"ec2": "InvalidInstanceID.NotFound", "sagemaker": "ValidationException"},
        "batch": "ClientException",
    }
    return moto_gaps.error(
        request, code.get(request.service, "ResourceNotFoundException"), "There is none.", 400
    )


def _json(data: dict[str, Any]) -> Any:
    return 200, [("Content-Type", "application/x-amz-json-1.1")], json.dumps(data).encode()

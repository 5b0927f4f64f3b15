"""Types that all rooms share: `Plan`, the request as data; `RunState` and `Ending`; `CodeBundle`."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

#: The field of a request to AWS Batch that holds the request to SageMaker, as JSON.
PAYLOAD = "serviceRequestPayload"


class Ending(StrEnum):
    """The cause of an end, if the state alone does not show it."""

    #: Stopped by Ctrl-C, `fastlaunch reap` or AWS's console, or because all rows were settled.
    STOPPED = "stopped"
    #: Stopped by `fastlaunch cancel`, which a later stop does not replace.
    CANCELLED = "cancelled"
    #: AWS took a spot machine back.
    RECLAIMED = "reclaimed"
    #: A GPU of one of its machines is faulty.
    FAULTY_GPU = "faulty-gpu"
    #: One of several machines on EC2 ended without a word, and the others with it.
    NODE_LOST = "node-lost"
    #: AWS had no capacity for it.
    NO_CAPACITY = "no-capacity"
    TIME_LIMIT = "time-limit"
    #: Its launcher ended before a machine was started.
    NEVER_STARTED = "never-started"
    #: The run's row was settled without it.
    NOT_NEEDED = "not-needed"
    #: An earlier run of the same recipe failed.
    EARLIER_FAILED = "earlier-failed"

    @property
    def can_go_on(self) -> bool:
        """Whether another machine may continue the run."""
        return self is Ending.RECLAIMED or self.is_replaced

    @property
    def is_replaced(self) -> bool:
        """Whether another machine may continue the run as often as `--max-replacements` says."""
        return self in (Ending.FAULTY_GPU, Ending.NODE_LOST)


class RunState(StrEnum):
    """Where a run stands. The states from `COMPLETED` on are final."""

    PLANNED = "planned"
    RUNNING = "running"
    COMPLETED = "completed"
    INTERRUPTED = "interrupted"
    FAILED = "failed"
    CANCELLED = "cancelled"
    LOST = "lost"

    @property
    def is_final(self) -> bool:
        return self not in (RunState.PLANNED, RunState.RUNNING)


@dataclass(frozen=True, kw_only=True)
class PlanObject:
    """A small object that the machines fetch."""

    bucket: str
    key: str
    #: The digest of its bytes, in hex.
    sha256: str
    #: None for the node agent, which every launcher has.
    text: str | None

    @property
    def uri(self) -> str:
        """`s3://bucket/key`."""
        return f"s3://{self.bucket}/{self.key}"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The exact request that starts a job, as data: `execute` sends `request` and adds nothing.

    placeholders: names of values that are unknown offline and appear in `request` as `<name>`.
    max_cost_usd: the most this plan can cost; None where nothing is billed.
    region: where the request goes; None for this machine.
    sunk_usd: costs that were paid before, such as a capacity block's fee; None without.
    objects: files that the machines fetch, stored before the request is sent.
    """

    backend: str
    operation: str
    request: Mapping[str, Any]
    placeholders: tuple[str, ...] = ()
    max_cost_usd: float | None = None
    usd_per_hour: float | None = None
    price_as_of: str | None = None
    region: str | None = None
    sunk_usd: float | None = None
    objects: tuple[PlanObject, ...] = ()

    @property
    def payload(self) -> Mapping[str, Any]:
        """The request that starts machines: what a queue is to send, else `request` itself."""
        text = self.request.get(PAYLOAD)
        return json.loads(text) if text else self.request

    @property
    def is_queued(self) -> bool:
        """Whether the request puts the job into a queue, which starts it later."""
        return PAYLOAD in self.request


@dataclass(frozen=True, kw_only=True)
class CodeBundle:
    """The training code as an object in the run bucket."""

    # The whole key, with the prefix.
    key: str
    # The digest of the object's bytes, in hex.
    sha256: str
    # The commit of the checkout that it was made from; None if unknown.
    commit: str | None = None

    @classmethod
    def under(cls, prefix: str, *, sha256: str, commit: str | None) -> "CodeBundle":
        """Return the bundle at its place under a bucket's prefix, where it is stored once for all runs."""
        return cls(key=code_key(prefix, f"{sha256}.tar.gz"), sha256=sha256, commit=commit)


def code_key(prefix: str, name: str) -> str:
    """Return the key of an object that jobs may fetch and cannot change."""
    return "/".join(filter(None, (prefix, "code", name)))


def placeholders_in(
    request: Mapping[str, Any], run_list: PlanObject, names: Iterable[str]
) -> tuple[str, ...]:
    """Return the placeholder names, without brackets, that appear in the request or the list of runs."""
    text = json.dumps([request, run_list.text])
    is_unknown = run_list.sha256.startswith("<")
    unknown = {name for name in names if f"<{name}>" in text}
    return tuple(sorted({*unknown, *([run_list.sha256[1:-1]] if is_unknown else [])}))

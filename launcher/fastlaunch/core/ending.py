"""What ended a run or an attempt. Code decides by `Ending`; the reason beside it is for people."""

from enum import StrEnum


class Ending(StrEnum):
    """The cause of an end, where the state alone does not tell it."""

    #: Stopped by Ctrl-C, `fastlaunch reap` or AWS's console, or because all rows were settled.
    STOPPED = "stopped"
    #: Stopped by `fastlaunch cancel`, which a later stop does not replace.
    CANCELLED = "cancelled"
    #: AWS took a spot machine back.
    RECLAIMED = "reclaimed"
    #: A GPU of one of its machines is faulty.
    FAULTY_GPU = "faulty-gpu"
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
        return self in (Ending.RECLAIMED, Ending.FAULTY_GPU)

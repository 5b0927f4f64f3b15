"""What a run or an attempt ended by. The reason beside it is for people: nothing decides by a sentence."""

from enum import StrEnum


class Ending(StrEnum):
    """What ended a run or an attempt, where its state does not say so."""

    #: Somebody: by Ctrl-C, `fastlaunch reap`, AWS's console, or as all rows were settled.
    STOPPED = "stopped"
    #: `fastlaunch cancel`, which outlasts whoever stops it too.
    CANCELLED = "cancelled"
    #: AWS took a spot machine back.
    RECLAIMED = "reclaimed"
    #: A GPU of one of its machines is faulty.
    FAULTY_GPU = "faulty-gpu"
    #: AWS had no machine for it.
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
        """Whether another machine may do the rest."""
        return self in (Ending.RECLAIMED, Ending.FAULTY_GPU)

"""How an attempt on AWS and what ends it are told to the user."""

from typing import TYPE_CHECKING

from fastlaunch.backends.protocol import CloudBackend

if TYPE_CHECKING:
    from fastlaunch.run_attempts import Attempt


def machine_of(attempt: "Attempt", backend: CloudBackend) -> str:
    """`instance i-0ab in us-east-1`, `training job 20261121-... in us-east-1`."""
    assert attempt.handle is not None
    return backend.told(attempt.handle)


def ends_by_itself(attempt: "Attempt", backend: CloudBackend) -> str:
    """What ends the machines, and when, if nobody does: a clause with the limit."""
    if backend.boot_limit is None:
        return f"{backend.service} ends it {attempt.max_minutes} min after it began to train"
    machines = "it turns itself" if attempt.num_nodes == 1 else "they turn themselves"
    return f"{machines} off within {attempt.max_minutes} min"


def how_to_stop(attempt: "Attempt", backend: CloudBackend) -> str:
    """What protects the user's money without a launcher, and how to stop the machines."""
    return (
        f"{ends_by_itself(attempt, backend)}; to stop it: fastlaunch cancel {attempt.run_ids[0]}   "
        f"(or: fastlaunch reap --region {attempt.region})"
    )


def told_to_end(backend: CloudBackend) -> str:
    """What became of machines that were not to save anything more: `is terminated`."""
    return "is stopping" if backend.boot_limit is None else "is terminated"


def once_more(backend: CloudBackend) -> str:
    """What a second signal does to machines that are stopping."""
    if backend.boot_limit is None:
        return f"once more leaves that to {backend.service}, which ends it within minutes"
    return "once more ends it at once, saving nothing"

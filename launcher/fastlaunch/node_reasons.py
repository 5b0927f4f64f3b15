"""What a node's one word for what it could not do means, and what to do about it. Pure.

A node's program has little room: it says `image pull`, and this says the rest.
"""

import re

_AGAIN = "submit it again for another machine"
_LOG = "what it printed: fastlaunch logs RUN"
_WORDS = {
    "fabric": "the nodes did not use EFA, and over TCP they would wait for each other: see that the security "
    "group lets all traffic from and to itself through, and the image holds EFA's software; or give "
    "--allow-tcp",
    "peers": "not all of its nodes came up and reached the bucket: see that their subnet has a way to S3, or "
    f"{_AGAIN}",
    "rank 0": f"its first node did not say where it is: see that its subnet has a way to S3, or {_AGAIN}",
    "block": "less than 45 minutes are left of the capacity block, in which nothing is begun",
    "driver": f"nvidia-smi does not show all of its GPUs: {_AGAIN}",
    "fabric manager": f"the fabric manager of its GPUs did not start: {_AGAIN}",
    "docker": f"docker does not run on its machine; {_LOG}",
    "image pull": f"its image could not be pulled: see that the machine's role may; {_LOG}",
    "code": f"the code could not be brought from the bucket: see that the machine's role may; {_LOG}",
    "disk full": "the disk of its machine was full: save fewer or smaller checkpoints, or take a type with "
    "local NVMe",
}
_CONTAINER = re.compile(r"container: exit code (\d+)")
_CHECKPOINT = re.compile(r"checkpoint of (\S+)")


def in_words(reason: str) -> str:
    """The node's reason as the user is told; one that is not known here is told as it is."""
    if container := _CONTAINER.fullmatch(reason):
        return f"its container could not run its program (exit code {container[1]}); {_LOG}"
    if checkpoint := _CHECKPOINT.fullmatch(reason):
        return f"the checkpoint of run {checkpoint[1]} could not be brought from the bucket; {_LOG}"
    return _WORDS.get(reason, reason)

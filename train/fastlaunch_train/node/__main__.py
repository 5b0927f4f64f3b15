"""`python agent.pyz ec2 | sagemaker ARGUMENTS...`: the program of a node, started by what boots it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fastlaunch_train.node.commands import Clock


def main(arguments: Sequence[str], clock: Clock | None = None) -> int:
    """Return the agent's exit code; see `main` of the two platforms."""
    platform, *rest = arguments
    clock = clock or Clock()
    if platform == "ec2":
        from fastlaunch_train.node import ec2

        return ec2.main(rest, clock)
    from fastlaunch_train.node import sagemaker

    return sagemaker.main(rest, clock)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

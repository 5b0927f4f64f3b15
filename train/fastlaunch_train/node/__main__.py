"""`python agent.pyz ec2 | sagemaker ARGUMENTS...`: the program that a node starts."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from fastlaunch_train.node import ec2, sagemaker
from fastlaunch_train.node.commands import Clock


def main(arguments: Sequence[str], clock: Clock | None = None) -> int:
    """Run the agent and return its exit code; see `main` in `ec2` and `sagemaker`."""
    platform, *rest = arguments
    main = ec2.main if platform == "ec2" else sagemaker.main
    return main(rest, clock or Clock())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

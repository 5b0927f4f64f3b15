"""`python3` of a simulated instance: the node agent with a clock on which time passes faster.

scaled_agent.py SCALE -I AGENT.pyz ARGUMENTS...
"""

import sys
import threading
import time
from typing import Any


def main(scale: float, agent: str, arguments: list[str]) -> int:
    sys.path.insert(0, agent)
    from fastlaunch_train.node import __main__, commands

    class ScaledClock(commands.Clock):
        def uptime_s(self) -> float:
            return round(booted_s + (super().uptime_s() - booted_s) * scale, 2)

        def wait(self, seconds: float, event: threading.Event | None = None) -> bool:
            return super().wait(seconds / scale, event)

    booted_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    clock: Any = ScaledClock()
    return __main__.main(arguments, clock)


if __name__ == "__main__":
    given_scale, _, given_agent, *rest = sys.argv[1:]
    sys.exit(main(float(given_scale), given_agent, rest))

"""What recording costs a real script: the same process records some of its steps and not the others.

    PYTHONPATH=train:launcher python tests/benchmarks/script_cost.py --segment 100 \\
        docs/examples/nanogpt.py --amp bf16 --batch 8 --steps 20000 --log-every 0 --rows 1024

The script is any that calls `fl.step`. Its steps are cut into segments, not recorded (A) and recorded (B) in
the order ABBA, so that a drift of the clocks cancels. A segment is timed between two synchronisations of the
device, and the block that a recorded one leaves open is closed within its time. Prints a step's cost: the
median over the ABBAs, as single ones meet what else the machine does, and its 95% interval by order
statistics. `--warmup` segments and the first ABBA are left out. `--times FILE` writes the seconds of every
segment as JSON.
"""

import argparse
import itertools
import json
import math
import os
import runpy
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fastlaunch_train as fl
from fastlaunch_train.script.steps import current

record_step = fl.step
#: Fewer have no such interval.
FEWEST_QUADS = 6


class Segments:
    """Takes the place of `fl.step`: passes steps on to it in every second segment, and times all."""

    def __init__(self, num_steps: int, num_warmup: int) -> None:
        self.num_steps = num_steps
        #: Whether each segment is recorded.
        self._kinds: Iterator[bool] = itertools.chain(
            itertools.repeat(False, num_warmup), itertools.cycle((False, True, True, False))
        )
        self._num_warmup = num_warmup
        self._is_recorded = next(self._kinds)
        self._done = 0
        self._began: float | None = None
        self.times_s: list[float] = []

    def step(self, num_samples: int | None = None, loss: Any = None) -> None:
        """Count a step, and record it if its segment is recorded."""
        if self._began is None:
            self._begin()
            return
        if self._is_recorded:
            record_step(num_samples, loss)
        self._done += 1
        if self._done == self.num_steps:
            if self._is_recorded:
                _recording().phase("segment")
            _synchronise()
            self.times_s.append(time.perf_counter() - self._began)
            self._is_recorded = next(self._kinds)
            self._begin()

    def quads(self) -> list[tuple[float, float]]:
        """Return of each whole ABBA but the first the seconds of a step: not recorded, recorded."""
        times = self.times_s[self._num_warmup :]
        whole = [times[at : at + 4] for at in range(4, len(times) - 3, 4)]
        return [((a + d) / (2 * self.num_steps), (b + c) / (2 * self.num_steps)) for a, b, c, d in whole]

    def _begin(self) -> None:
        if self._is_recorded:
            # Starts the clock if need be; what was not recorded is no part of the first step.
            _recording().start()
            _recording().phase("not recorded")
        self._done = 0
        _synchronise()
        self._began = time.perf_counter()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--segment", type=int, default=100, help="steps")
    parser.add_argument("--warmup", type=int, default=2, help="segments")
    parser.add_argument("--times", type=Path, metavar="FILE")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    segments = Segments(options.segment, options.warmup)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FASTLAUNCH_RECORDS"] = folder
        fl.step = segments.step
        sys.argv = [options.script, *options.arguments]
        runpy.run_path(options.script, run_name="__main__")
        _recording().finish()
    if options.times:
        options.times.write_text(json.dumps({"segment": options.segment, "times_s": segments.times_s}))
    return report(segments)


def report(segments: Segments) -> int:
    """Print the cost; return 1 if there are too few segments for an interval."""
    quads = segments.quads()
    if len(quads) < FEWEST_QUADS:
        print(f"too few steps: {FEWEST_QUADS + 1} ABBAs are the least", file=sys.stderr)
        return 1
    plain_s = statistics.median(plain for plain, _ in quads)
    costs_s = sorted(recorded - plain for plain, recorded in quads)
    cost_s = statistics.median(costs_s)
    out = num_outside(len(costs_s))
    low_s, high_s = costs_s[out], costs_s[-1 - out]
    print(f"steps: {4 * segments.num_steps * len(quads)}, in {len(quads)} ABBAs of {segments.num_steps} each")
    print(f"step time: {1e3 * plain_s:.3f} ms, on {_device()}")
    print(f"recording: {1e6 * cost_s:+.1f} us a step ({1e6 * low_s:+.1f} to {1e6 * high_s:+.1f})")
    percent = 100 / plain_s
    print(
        f"recording: {percent * cost_s:+.3f}% ({percent * low_s:+.3f}% to {percent * high_s:+.3f}%), "
        f"ratio {1 + cost_s / plain_s:.5f}"
    )
    return 0


def num_outside(number: int) -> int:
    """Return how many of so many values lie outside the median's 95% interval on either side."""
    tail, outside = 0.0, -1
    while True:
        tail += math.comb(number, outside + 1) / 2**number
        if tail > 0.025:
            return max(0, outside)
        outside += 1


def _recording() -> Any:
    recording = current()
    assert recording is not None
    return recording


def _synchronise() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _device() -> str:
    torch = sys.modules.get("torch")
    return torch.cuda.get_device_name() if torch is not None and torch.cuda.is_initialized() else "the CPU"


if __name__ == "__main__":
    sys.exit(main())

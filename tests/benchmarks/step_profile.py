"""Where a step's time goes on this machine's GPUs, by `--step-profile` of the training entrypoint.

    cd tests; python -m benchmarks.step_profile --output DIR [--num-gpus 8] [--seconds 450] [ARM...]

An ARM is WORKLOAD/RECIPE[,FIELD=VALUE...]:BATCH@STEPS. Each runs by itself, on all the GPUs, and is killed
when its time is up; those that are left have no time then. DIR/ARM.tar has what it printed and recorded, and
the profiler's trace, of the first GPU. Prints how the kernels of each share that GPU's time and, at the end,
a table: the measured step time, the profiled one and its parts, in milliseconds, and by how much their sum is
off.
"""

import argparse
import gzip
import json
import os
import re
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.measure import run_logged
from benchmarks.plan import Arm, read_arm, training_command
from fastlaunch.measure.record_files import RankRecord, RecordError, read_record
from fastlaunch_train.records.records import STEP_PARTS, Profile

ROOT = Path(__file__).resolve().parents[2]
#: The most important first.
ARMS = (
    "vit-huge/bf16:256@30",
    "gpt2-xsmall/bf16:4@300",
    "vit-huge/te-fp8:256@30",
    "vit-huge/compile:256@30",
    "gpt2-xsmall/compile:4@300",
    "vit-huge/te-bf16:256@30",
    "gpt2-xsmall/compile-reduce-overhead:4@300",
)
#: Steps at the end of a run, by whose blocks its step time is measured here.
LAST_STEPS = 15
MOST_SECONDS = 150.0
#: A larger trace is left out.
MOST_BYTES = 15 * 2**20
_TRACE, _TRACED = "trace.json.gz", "--traced"
#: What kernels do, by their names; the first that fits. nvjet is cuBLAS's.
_KINDS = {
    "attention": re.compile("sdpa|fmha|flash|flex_attention"),
    "matrix products": re.compile("nvjet|gemm|cutlass|xmma"),
    "communication": re.compile("nccl"),
    "other kernels": re.compile(""),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arms", nargs="*", default=ARMS, metavar="ARM")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--num-gpus", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=450.0)
    asked = parser.parse_args()
    deadline = time.monotonic() + asked.seconds
    asked.output.mkdir(parents=True, exist_ok=True)
    rows = [("arm", "measured", "profiled", *STEP_PARTS, "hidden comm", "sum - profiled")]
    try:
        arms = [read_arm(text) for text in asked.arms]
    except ValueError as error:
        parser.error(str(error))
    for arm in arms:
        name = re.sub(r"[/:@,=]", "-", arm.text) + (f"-x{asked.num_gpus}" if asked.num_gpus > 1 else "")
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / name
            folder.mkdir()
            began = time.monotonic()
            ended = _run(arm, asked.num_gpus, folder, min(MOST_SECONDS, deadline - began))
            print(f"{arm.text}: {ended} after {time.monotonic() - began:.0f} s", flush=True)
            rows.append((arm.text, *_cells(folder)))
            trace = folder / _TRACE
            if trace.exists():
                with gzip.open(trace) as file:
                    shares = shares_of_kernels(json.load(file)["traceEvents"])
                print(f"  {', '.join(f'{kind} {share:.1%}' for kind, share in shares.items())}")
            if trace.exists() and trace.stat().st_size > MOST_BYTES:
                print(f"  left out, {trace.stat().st_size} bytes: {_TRACE}")
                trace.unlink()
            with tarfile.open(asked.output / f"{name}.tar", "w") as archive:
                archive.add(folder, name)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def _run(arm: Arm, num_gpus: int, folder: Path, seconds: float) -> str:
    """Train an arm in its folder; return how that ended."""
    if seconds < 1:
        return "no time left"
    traced = ["-m", "benchmarks.step_profile", _TRACED, str(folder / _TRACE)]
    argv = training_command(arm, num_gpus, *traced)
    argv += ["--output", str(folder / "run"), "--step-profile"]
    path = os.pathsep.join([str(ROOT / "train"), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    log = folder / "log.txt"
    code = run_logged(argv, {**os.environ, "PYTHONPATH": path}, log, seconds)
    if code is None:
        return "killed, since its time was up"
    if code:
        return f"exit {code}\n{log.read_text(errors='replace')[-1500:]}"
    return "done"


def _traced(trace: Path, argv: list[str]) -> int:
    """Train as `argv` says, and keep the profiler's trace."""
    from fastlaunch_train.__main__ import main as train
    from fastlaunch_train.loop import profiling

    events_of = profiling.events_of

    def keep(data: Mapping[str, Any]) -> Iterator[Any]:
        if os.environ.get("RANK", "0") == "0":
            with gzip.open(trace, "wt", compresslevel=3) as file:
                json.dump(data, file)
        return events_of(data)

    profiling.events_of = keep
    return train(argv)


def shares_of_kernels(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Return what share of the kernels' time each kind of them takes, by the events of a trace."""
    took: Counter[str] = Counter()
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            took[next(kind for kind, named in _KINDS.items() if named.search(event["name"]))] += event["dur"]
    return {kind: took[kind] / took.total() for kind in _KINDS if took[kind]}


def _cells(folder: Path) -> Iterator[str]:
    """Yield what an arm's row says after its name; what its record lacks is n/a."""
    lines: tuple[Profile, ...] = ()
    measured_s = None
    try:
        record = read_record(folder / "run" / "rank-00000-attempt-1.jsonl")
        lines, measured_s = record.profiles, _measured_s(record)
    except (OSError, RecordError) as error:
        print(f"  {error}")
    line = lines[0] if lines else Profile(step=0, num_steps=0)
    if line.problem:
        print(f"  no profile: {line.problem}")
    parts = [getattr(line, f"{name}_s") for name in STEP_PARTS]
    known = [seconds for seconds in parts if seconds is not None]
    rest = None if line.step_time_s is None else sum(known) - line.step_time_s
    for seconds in (measured_s, line.step_time_s, *parts, line.overlapped_communication_s, rest):
        yield "n/a" if seconds is None else f"{1000 * seconds:.2f}"


def _measured_s(record: RankRecord) -> float | None:
    """Return the mean wall time of the last steps, by whole blocks; None without any."""
    blocks, num_steps = [], 0
    for block in reversed(record.blocks):
        blocks.append(block)
        num_steps += block.last_step - block.first_step + 1
        if num_steps >= LAST_STEPS:
            return sum(block.wall_s for block in blocks) / num_steps
    return None


if __name__ == "__main__":
    if sys.argv[1:2] == [_TRACED]:
        sys.exit(_traced(Path(sys.argv[2]), sys.argv[3:]))
    main()

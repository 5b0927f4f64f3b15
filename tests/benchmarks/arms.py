"""Measure arms on this machine, interleaved, and pack their records.

    python tests/benchmarks/arms.py --output DIR --rounds 5 vit-huge/bf16:64 vit-huge/te-fp8:256
    python tests/benchmarks/arms.py --output DIR gelu/compile,precision=fp32:8@400 gpt2-xsmall/fp32:4

Every arm is WORKLOAD/RECIPE[,FIELD=VALUE...]:BATCH[@STEPS] and runs once a round through `python -m
fastlaunch_train`, with the round as its seed, in an order that is turned round every second round (A B B A):
a slow drift of the machine falls on all arms alike. The records lie in DIR, one folder per run, and after
every run all of them go into DIR/records.tar.xz, which `fastlaunch runs import` reads: what was measured
outlasts a kill. With --seconds no run begins that would not fit any more, by the arm's last run, and before
that by the longest of all. A run that fails is said, and the others go on. What follows `--` is passed on to
every run.
"""

import argparse
import os
import re
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path

from fastlaunch_train.records import read_record

_ARM = re.compile(
    r"(?P<workload>[^/]+)/(?P<recipe>[^,:]+)(?P<sets>(,[^,]+?)*):(?P<batch>\d+)(@(?P<steps>\d+))?"
)


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What one run trains; sets: overrides of the recipe."""

    text: str
    workload: str
    recipe: str
    sets: tuple[str, ...]
    batch_size: int
    steps: int | None


def read_arm(text: str) -> Arm:
    """The arm that `text` names. Raises ArgumentTypeError."""
    match = _ARM.fullmatch(text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not WORKLOAD/RECIPE[,FIELD=VALUE...]:BATCH[@STEPS]")
    return Arm(
        text=text,
        workload=match["workload"],
        recipe=match["recipe"],
        sets=tuple(match["sets"].split(",")[1:]),
        batch_size=int(match["batch"]),
        steps=int(match["steps"]) if match["steps"] else None,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arms", nargs="+", type=read_arm, metavar="ARM")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--first-round", type=int, default=1, help="to number the rounds of a later call on")
    parser.add_argument("--steps", type=int, default=90, help="of arms that name none")
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    argv, _, passed_on = " ".join(sys.argv[1:]).partition(" -- ")
    asked = parser.parse_args(argv.split())
    asked.passed_on = passed_on.split()

    asked.output.mkdir(parents=True, exist_ok=True)
    started, took = time.monotonic(), dict[str, float]()
    for number in range(asked.first_round, asked.first_round + asked.rounds):
        for arm in asked.arms if number % 2 else reversed(asked.arms):
            expected = took.get(arm.text, max(took.values(), default=0.0))
            if time.monotonic() - started + expected > asked.seconds:
                print(f"{arm.text} round {number}: no time left", flush=True)
                continue
            began = time.monotonic()
            print(measure(asked, arm, number), flush=True)
            pack(asked.output)
            took[arm.text] = time.monotonic() - began


def measure(asked: argparse.Namespace, arm: Arm, number: int) -> str:
    """Run one arm once, with its records in a folder of its own, and return a line about it."""
    run_id = re.sub(r"[^A-Za-z0-9.]+", "-", f"{arm.text}-x{asked.nproc}-r{number}")
    output = asked.output / run_id
    prefix = [sys.executable, "-m"]
    if asked.nproc > 1:
        prefix += ["torch.distributed.run", "--standalone", f"--nproc-per-node={asked.nproc}", "-m"]
    argv = [*prefix, "fastlaunch_train", "--workload", arm.workload, "--recipe", arm.recipe]
    argv += [word for override in arm.sets for word in ("--set", override)]
    argv += ["--batch-size", str(arm.batch_size), "--steps", str(arm.steps or asked.steps)]
    argv += ["--seed", str(number), "--output", str(output), *asked.passed_on]
    began = time.monotonic()
    done = subprocess.run(
        argv, env={**os.environ, "FASTLAUNCH_RUN_ID": run_id}, capture_output=True, text=True, check=False
    )
    seconds = time.monotonic() - began
    if done.returncode:
        return f"{run_id}: exit {done.returncode}\n{done.stdout[-300:]}{done.stderr[-1500:]}"
    return f"{run_id}: {told(output / 'rank-00000-attempt-1.jsonl', asked.nproc)}, {seconds:.0f} s in all"


def pack(output: Path) -> None:
    """Put all records below `output` into its records.tar.xz, whose earlier state a kill leaves whole."""
    packed, unfinished = output / "records.tar.xz", output / "records.tar.xz.tmp"
    with tarfile.open(unfinished, "w:xz") as archive:
        for path in sorted(output.glob("*/rank-*.jsonl")):
            archive.add(path, arcname=str(path.relative_to(output)))
    unfinished.replace(packed)


def told(path: Path, num_ranks: int) -> str:
    """What a record says, in one line: speed of its last two thirds, loss, memory, checks, phases."""
    record = read_record(path)
    late = [block for block in record.blocks if block.first_step > record.header["steps"] // 3]
    step_time_s = sum(b.wall_s for b in late) / max(1, sum(b.last_step - b.first_step + 1 for b in late))
    samples_per_s = record.header["batch_size_per_gpu"] * num_ranks / step_time_s if late else 0.0
    peak = record.end.peak_memory_gib if record.end else None
    evals = [f"{e.split} {e.loss} {e.metric_value}" for e in record.evals[-2:]]
    return (
        f"{1000 * step_time_s:.2f} ms, {samples_per_s:.1f}/s, loss {record.steps[-1].loss}, {peak} GiB, "
        f"{record.header['attention_backend']}, cudnn {record.header['versions']['cudnn']}, "
        f"{[(c.name[:5], c.passed, c.value) for c in record.checks]}, {evals}, "
        f"{[(p.name, round(p.seconds, 1)) for p in record.phases]}"
    )


if __name__ == "__main__":
    main()

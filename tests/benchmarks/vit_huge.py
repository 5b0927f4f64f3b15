"""Measure arms of one workload on this machine, interleaved, and pack their records.

    python tests/benchmarks/vit_huge.py --output DIR --rounds 3 bf16:64 compile:64 te-bf16:64 te-fp8:256

Every arm is RECIPE:BATCH and runs once a round through `python -m fastlaunch_train`, in an order that is
turned round every second round (A B B A), so that a slow drift of the machine falls on all arms alike. The
records go into DIR/records.tar.xz, one folder per run, which `fastlaunch runs import` reads once unpacked.
With --seconds no new run begins when the longest run so far would not fit any more. A run that fails is
said, and the others go on.
"""

import argparse
import io
import lzma
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path

from fastlaunch_train.records import read_record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("arms", nargs="+", metavar="RECIPE:BATCH")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--workload", default="vit-huge")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--first-round", type=int, default=1, help="to number the rounds of a later call on")
    parser.add_argument("--steps", type=int, default=90)
    parser.add_argument("--nproc", type=int, default=1)
    parser.add_argument("--data", default="synthetic")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    asked = parser.parse_args()

    asked.output.mkdir(parents=True, exist_ok=True)
    started, longest = time.monotonic(), 0.0
    with tarfile.open(asked.output / "records.tar.xz", "w:xz", preset=lzma.PRESET_EXTREME) as archive:
        for number in range(asked.first_round, asked.first_round + asked.rounds):
            for arm in asked.arms if number % 2 else reversed(asked.arms):
                if time.monotonic() - started + longest > asked.seconds:
                    print(f"{arm} round {number}: no time left", flush=True)
                    continue
                began = time.monotonic()
                print(measure(asked, archive, arm, number), flush=True)
                longest = max(longest, time.monotonic() - began)


def measure(asked: argparse.Namespace, archive: tarfile.TarFile, arm: str, number: int) -> str:
    """Run one arm once, add its records to the archive, and return a line about it."""
    recipe, _, batch_size = arm.partition(":")
    run_id = f"{asked.workload}-{recipe}-{batch_size}-{asked.data}-x{asked.nproc}-r{number}".replace(":", "-")
    output = asked.output.parent / f"run-{os.getpid()}" / run_id
    prefix = [sys.executable, "-m"]
    if asked.nproc > 1:
        prefix += ["torch.distributed.run", "--standalone", f"--nproc-per-node={asked.nproc}", "-m"]
    argv = [*prefix, "fastlaunch_train", "--workload", asked.workload, "--recipe", recipe]
    argv += ["--batch-size", batch_size, "--steps", str(asked.steps), "--data", asked.data]
    began = time.monotonic()
    done = subprocess.run(
        [*argv, "--output", str(output)],
        env={**os.environ, "FASTLAUNCH_RUN_ID": run_id},
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.monotonic() - began
    for path in sorted(output.glob("rank-*.jsonl")):
        packed = lzma.compress(path.read_bytes(), preset=9 | lzma.PRESET_EXTREME)
        entry = tarfile.TarInfo(f"{run_id}/{path.name}.xz")
        entry.size = len(packed)
        archive.addfile(entry, io.BytesIO(packed))
    if done.returncode:
        return f"{run_id}: exit {done.returncode}\n{done.stdout[-500:]}{done.stderr[-2500:]}"
    record = read_record(output / "rank-00000-attempt-1.jsonl")
    late = [block for block in record.blocks if block.first_step > asked.steps // 3]
    step_time_s = sum(b.wall_s for b in late) / sum(b.last_step - b.first_step + 1 for b in late)
    images_per_s = record.header["batch_size_per_gpu"] * asked.nproc / step_time_s
    peak = record.end.peak_memory_gib if record.end else None
    return (
        f"{run_id}: {1000 * step_time_s:.1f} ms, {images_per_s:.1f}/s, loss {record.steps[-1].loss}, "
        f"{peak} GiB, "
        f"{record.header['attention_backend']}, cudnn {record.header['versions']['cudnn']}, "
        f"{[(p.name, round(p.seconds, 1)) for p in record.phases]}, {seconds:.0f} s in all"
    )


if __name__ == "__main__":
    main()

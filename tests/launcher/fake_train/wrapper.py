"""The wrapper of scripts without the rest of the training package: runs a command, then writes its record.

The command has taken 30 steps of 2 samples each, if it ends with 0. SIGTERM is passed on.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from fastlaunch_train.records.records import Block, End, RecordWriter, Step, last_attempt, record_path

NUM_STEPS = 30


def main() -> int:
    at = sys.argv.index("--")
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--nproc")
    parser.add_argument("--hang-timeout", type=float)
    args, command = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    output = args.output / "output"
    output.mkdir(exist_ok=True)
    told = {"FASTLAUNCH_RECORDS": str(args.output), "FASTLAUNCH_OUTPUT": str(output)}
    started_at = time.monotonic()
    child = subprocess.Popen(command, env={**os.environ, **told})
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: (stopped.append(number), child.terminate()))
    code = child.wait()
    attempt = int(os.environ.get("FASTLAUNCH_ATTEMPT", last_attempt(args.output) + 1))
    writer = RecordWriter(record_path(args.output, rank=0, attempt=attempt))
    writer.write_header(header(command, attempt))
    status = "interrupted" if stopped else "failed" if code else "completed"
    if status == "completed":
        step_s = (time.monotonic() - started_at) / NUM_STEPS
        for step in range(1, NUM_STEPS + 1):
            writer.add(
                Step(step=step, step_time_s=step_s, data_wait_s=0.0, loss=1.0, num_samples=2, num_tokens=0)
            )
            writer.add(Block(first_step=step, last_step=step, wall_s=step_s))
    done = NUM_STEPS if status == "completed" else 0
    message = f"exit code {code}" if status == "failed" else None
    writer.add(End(status=status, message=message, num_steps=done, peak_memory_gib=None))
    writer.flush()
    writer.close()
    return code


def header(command: list[str], attempt: int) -> dict[str, object]:
    variant = json.loads(os.environ["FASTLAUNCH_VARIANT"])
    label = " ".join(f"{name}={text}" for name, text in variant.items()) or "as is"
    return {
        "run_id": os.environ["FASTLAUNCH_RUN_ID"],
        "session": os.environ["FASTLAUNCH_SESSION"],
        "round": int(os.environ["FASTLAUNCH_ROUND"]),
        "attempt": attempt,
        "rank": 0,
        "world_size": 1,
        "num_nodes": 1,
        "started_at": "2026-11-21T10:00:00+00:00",
        "workload": {
            "name": os.environ["FASTLAUNCH_SCRIPT"],
            "sample_unit": "samples",
            "flops_per_sample": None,
            "num_parameters": None,
        },
        "recipe": {"name": "script", "label": label, "precision": "unknown"},
        "script": {"command": command, "variant": variant},
        "batch_size_per_gpu": 2,
        "steps": NUM_STEPS,
        "first_step": 1,
        "seed": 0,
        "data": "script",
        "machine": {"host_id": "here", "device_type": "cpu", "device_name": "fake CPU"},
        "versions": {"python": "3"},
        "attention_backend": None,
        "instance": None,
        "image_digest": None,
        "commit": os.environ.get("FASTLAUNCH_COMMIT"),
        "warnings": [],
    }


if __name__ == "__main__":
    sys.exit(main())

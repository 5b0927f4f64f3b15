"""The training entrypoint without torch: takes its argv, writes its records, obeys SIGTERM, ends as told.

The environment says how it behaves:

    FAKE_STEP_S       seconds a step takes (0.001)
    FAKE_STATUS       how it ends: a status of records.STATUSES; `refused` (exit 2, no record); `killed`
    FAKE_DEAF         if set, SIGTERM is ignored
"""

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.records.records import Block, End, Phase, RecordWriter, Step, last_attempt, record_path
from fastlaunch_train.workloads.registry import workload_info

#: What it makes of --epochs.
STEPS_PER_EPOCH = 30
EXIT_CODES = {"completed": 0, "interrupted": 130, "out_of_memory": 12, "nan_loss": 33, "failed": 1}
MESSAGES = {"out_of_memory": "tried to allocate 2.00 GiB", "failed": "ValueError: no such thing"}


def main() -> int:
    parser = argparse.ArgumentParser()
    for option in ("workload", "recipe", "batch-size", "output", "data"):
        parser.add_argument(f"--{option}", required=True)
    for option in ("steps", "seed", "num-workers", "checkpoint-every", "nproc"):
        parser.add_argument(f"--{option}", type=int, default=1)
    for option in ("epochs", "eval-every", "sequence-length"):
        parser.add_argument(f"--{option}", type=int)
    for option in ("model", "tokenizer"):
        parser.add_argument(f"--{option}")
    for option in ("set", "fit"):
        parser.add_argument(f"--{option}", action="append", default=[])
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    if args.epochs:
        args.steps = args.epochs * STEPS_PER_EPOCH
    status = os.environ.get("FAKE_STATUS", "completed")
    print(f"training {args.workload} with {args.recipe}", flush=True)
    if status == "refused":
        print("error: this machine cannot run that", file=sys.stderr)
        return 2

    stopped = []
    deaf = "FAKE_DEAF" in os.environ
    signal.signal(signal.SIGTERM, signal.SIG_IGN if deaf else lambda *_: stopped.append(True))
    attempt, writers = 1 + last_attempt(Path(args.output)), []
    for rank in range(args.nproc):
        writer = RecordWriter(record_path(Path(args.output), rank=rank, attempt=attempt))
        writer.write_header(header(args, rank, attempt))
        writer.add(Phase(name="build", seconds=0.1, step=0))
        writers.append(writer)

    step_s = float(os.environ.get("FAKE_STEP_S", "0.001"))
    batch_size = 8 if args.batch_size == "auto" else int(args.batch_size)
    done = 0
    for step in range(1, args.steps + 1):
        if stopped:
            status = "interrupted"
            break
        time.sleep(step_s)
        for writer in writers:
            writer.add(
                Step(
                    step=step,
                    step_time_s=step_s,
                    data_wait_s=0.0,
                    loss=2.0 + 1 / step,
                    num_samples=batch_size,
                    num_tokens=0,
                )
            )
            writer.add(Block(first_step=step, last_step=step, wall_s=step_s))
            writer.flush()
        done = step
    if status == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    for writer in writers:
        writer.add(End(status=status, message=MESSAGES.get(status), num_steps=done, peak_memory_gib=None))
        writer.flush()
        writer.close()
    print(f"ended: {status}", flush=True)
    return EXIT_CODES[status]


def header(args: argparse.Namespace, rank: int, attempt: int) -> dict[str, object]:
    info = workload_info(args.workload)
    return {
        "run_id": os.environ.get("FASTLAUNCH_RUN_ID", "none"),
        "attempt": attempt,
        "rank": rank,
        "world_size": args.nproc,
        "num_nodes": 1,
        "started_at": "2026-11-21T10:00:00+00:00",
        "workload": {
            "name": args.workload,
            "sample_unit": info.sample_unit,
            "flops_per_sample": info.flops_per_sample,
            "num_parameters": info.num_parameters,
            "model": args.model,
            "sequence_length": args.sequence_length,
        },
        "recipe": resolve_recipe(args.recipe, args.set).to_record(),
        "batch_size_per_gpu": 8 if args.batch_size == "auto" else int(args.batch_size),
        "steps": args.steps,
        "first_step": 1,
        "seed": args.seed,
        "data": args.data.partition(":")[0],
        "session": os.environ.get("FASTLAUNCH_SESSION"),
        **{
            name: int(os.environ[variable]) if variable in os.environ else None
            for name, variable in (("round", "FASTLAUNCH_ROUND"), ("max_rounds", "FASTLAUNCH_MAX_ROUNDS"))
        },
        "machine": {"host_id": "here", "device_type": "cpu", "device_name": "fake CPU", "num_devices": 0},
        "versions": {"python": "3", "torch": None},
        "attention_backend": None,
        "instance": None,
        "image_digest": None,
        "commit": os.environ.get("FASTLAUNCH_COMMIT"),
        "warnings": [],
    }


if __name__ == "__main__":
    sys.exit(main())

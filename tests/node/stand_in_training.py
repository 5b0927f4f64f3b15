"""Training without torch, for simulated instances: real records and checkpoints, in as little time as told.

The environment says how it behaves:

    FAKE_STEP_S            seconds a step takes (0.01)
    FAKE_FAIL_AT           step at which it fails, with a traceback
    FAKE_FAIL_RANK         rank that does, if not every one
    FAKE_EXIT              code with which it ends at once
    FAKE_DEAF              if set, SIGTERM is ignored
    FAKE_HANG_AT           step at which it stops doing anything
    FAKE_CHECKPOINT_BYTES  size of a checkpoint (1000)

The loss is a function of the step, so that a run that goes on from a checkpoint can be told from one that
starts again: by its first step. A failure leaves a traceback, and one of several nodes what NCCL would say.
"""

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.records.records import Block, End, Phase, RecordWriter, Step, record_path
from fastlaunch_train.workloads.registry import workload_info


def main() -> int:
    args = parse_arguments()
    settings = os.environ
    if "FAKE_EXIT" in settings:
        return int(settings["FAKE_EXIT"])
    stopped: list[bool] = []
    deaf = "FAKE_DEAF" in settings
    signal.signal(signal.SIGTERM, signal.SIG_IGN if deaf else lambda *_: stopped.append(True))

    output = Path(args.output)
    checkpoints = output / "checkpoints"
    there = sorted(checkpoints.glob("step-*.pt"))
    first = 1 + (json.loads(there[-1].read_text())["step"] if there and args.resume else 0)
    attempt = int(settings.get("FASTLAUNCH_ATTEMPT", "1"))
    rank = int(settings.get("FASTLAUNCH_NODE_RANK", "0"))
    fails = settings.get("FAKE_FAIL_RANK", str(rank)) == str(rank)
    fails_at = int(settings.get("FAKE_FAIL_AT", "0")) if fails else 0
    writer = RecordWriter(record_path(output, rank=rank, attempt=attempt))
    writer.write_header(header(args, attempt, first, rank))
    writer.add(Phase(name="build", seconds=0.1, step=0))
    if node := settings.get("FASTLAUNCH_NODE_RANK"):
        (output / f"nccl-node-{node}.txt").write_text("NCCL INFO NET/Socket\n")
    step_s = float(settings.get("FAKE_STEP_S", "0.01"))

    def save(step: int) -> None:
        checkpoints.mkdir(exist_ok=True)
        partial = checkpoints / "next.partial"
        text = json.dumps({"step": step})
        partial.write_text(text.ljust(int(settings.get("FAKE_CHECKPOINT_BYTES", "1000"))))
        partial.rename(checkpoints / f"step-{step:08d}.pt")
        for old in sorted(checkpoints.glob("step-*.pt"))[:-2]:
            old.unlink()

    status, message, done = "completed", None, first - 1
    for step in range(first, args.steps + 1):
        if step == int(settings.get("FAKE_HANG_AT", "0")):
            time.sleep(3600)
        if step == fails_at:
            status, message = "failed", "ValueError: no such thing"
            traceback = f'Traceback (most recent call last):\n  File "my.py", line 7, in f\n{message}\n'
            (output / f"traceback-rank-{rank:05d}-attempt-{attempt}.txt").write_text(traceback)
            break
        time.sleep(step_s)
        loss = 2.0 + 1 / step
        samples = {"num_samples": args.batch_size, "num_tokens": 0}
        writer.add(Step(step=step, step_time_s=step_s, data_wait_s=0, loss=loss, **samples))
        writer.add(Block(first_step=step, last_step=step, wall_s=step_s))
        writer.flush()
        print(f"step {step} of {args.steps}  loss {loss:.4f}", flush=True)
        done = step
        if rank == 0 and args.checkpoint_every and (step % args.checkpoint_every == 0 or stopped):
            save(step)
        if stopped and step < args.steps:
            status, message = "interrupted", "stopped by SIGTERM"
            break
    writer.add(End(status=status, message=message, num_steps=done, peak_memory_gib=None))
    writer.flush()
    writer.close()
    print(f"ended: {status}", flush=True)
    return {"completed": 0, "interrupted": 130, "failed": 1}[status]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for option in ("workload", "recipe", "output"):
        parser.add_argument(f"--{option}", required=True)
    parser.add_argument("--data", default="synthetic")
    for option in ("batch-size", "steps", "seed", "num-workers", "checkpoint-every"):
        parser.add_argument(f"--{option}", type=int, default=0)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def header(args: argparse.Namespace, attempt: int, first_step: int, rank: int) -> dict[str, object]:
    info = workload_info(args.workload)
    num_nodes = int(os.environ.get("FASTLAUNCH_NUM_NODES") or "1")
    return {
        "run_id": os.environ["FASTLAUNCH_RUN_ID"],
        "attempt": attempt,
        "rank": rank,
        "world_size": num_nodes,
        "num_nodes": num_nodes,
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        "workload": {
            "name": args.workload,
            "sample_unit": info.sample_unit,
            "flops_per_sample": info.flops_per_sample,
            "num_parameters": info.num_parameters,
        },
        "recipe": resolve_recipe(args.recipe, args.set).to_record(),
        "batch_size_per_gpu": args.batch_size,
        "steps": args.steps,
        "first_step": first_step,
        "seed": args.seed,
        "data": args.data.partition(":")[0],
        "machine": {"host_id": "node", "device_type": "cpu", "device_name": "fake CPU", "num_devices": 0},
        "versions": {"python": "3", "torch": None},
        "attention_backend": None,
        "instance": os.environ.get("FASTLAUNCH_INSTANCE"),
        "image_digest": os.environ.get("FASTLAUNCH_IMAGE_DIGEST"),
        "commit": os.environ.get("FASTLAUNCH_COMMIT"),
        "warnings": [],
    }


if __name__ == "__main__":
    sys.exit(main())

"""The training entrypoint without torch: takes its argv, writes records and checkpoints, obeys SIGTERM.

It stands for training on this machine, in simulated instances and in simulated training jobs. The environment
says how it behaves:

    FAKE_STEP_S            seconds a step takes (0.001)
    FAKE_STATUS            how it ends: a status of records.STATUSES; `refused` (exit 2, no record); `killed`
    FAKE_EXIT              code with which it ends at once
    FAKE_FAIL_AT           step at which it fails, with a traceback
    FAKE_FAIL_RANK         rank that does, if not every one
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
from fastlaunch_train.records.records import Block, End, Phase, RecordWriter, Step, last_attempt, record_path
from fastlaunch_train.workloads.registry import workload_info

#: What it makes of --epochs.
STEPS_PER_EPOCH = 30
EXIT_CODES = {"completed": 0, "interrupted": 130, "out_of_memory": 12, "nan_loss": 33, "failed": 1}
MESSAGES = {
    "out_of_memory": "tried to allocate 2.00 GiB",
    "failed": "ValueError: no such thing",
    "interrupted": "stopped by SIGTERM",
}


def main() -> int:
    args, settings = parse_arguments(), os.environ
    status = settings.get("FAKE_STATUS", "completed")
    print(f"training {args.workload} with {args.recipe}", flush=True)
    if status == "refused":
        print("error: this machine cannot run that", file=sys.stderr)
        return 2
    if "FAKE_EXIT" in settings:
        return int(settings["FAKE_EXIT"])
    stopped: list[bool] = []
    deaf = "FAKE_DEAF" in settings
    signal.signal(signal.SIGTERM, signal.SIG_IGN if deaf else lambda *_: stopped.append(True))

    output = Path(args.output)
    checkpoints = output / "checkpoints"
    there = sorted(checkpoints.glob("step-*.pt"))
    first = 1 + (json.loads(there[-1].read_text())["step"] if there and args.resume else 0)
    attempt = int(settings.get("FASTLAUNCH_ATTEMPT") or 1 + last_attempt(output))
    node = int(settings.get("FASTLAUNCH_NODE_RANK", "0"))
    ranks = range(node * args.nproc, (node + 1) * args.nproc)
    writers = [RecordWriter(record_path(output, rank=rank, attempt=attempt)) for rank in ranks]
    for rank, writer in zip(ranks, writers, strict=True):
        writer.write_header(header(args, rank, attempt, first))
        writer.add(Phase(name="build", seconds=0.1, step=0))
    if "FASTLAUNCH_NODE_RANK" in settings:
        (output / f"nccl-node-{node}.txt").write_text("NCCL INFO NET/Socket\n")
    step_s = float(settings.get("FAKE_STEP_S", "0.001"))
    fails = int(settings.get("FAKE_FAIL_RANK", str(node))) == node
    fails_at = int(settings.get("FAKE_FAIL_AT", "0")) if fails else 0
    done = first - 1
    for step in range(first, args.steps + 1):
        if step == int(settings.get("FAKE_HANG_AT", "0")):
            time.sleep(3600)
        if step == fails_at:
            status = "failed"
            text = f'Traceback (most recent call last):\n  File "my.py", line 7, in f\n{MESSAGES[status]}\n'
            (output / f"traceback-rank-{node:05d}-attempt-{attempt}.txt").write_text(text)
            break
        time.sleep(step_s)
        loss = 2.0 + 1 / step
        samples = {"num_samples": batch_size(args), "num_tokens": 0}
        for writer in writers:
            writer.add(Step(step=step, step_time_s=step_s, data_wait_s=0.0, loss=loss, **samples))
            writer.add(Block(first_step=step, last_step=step, wall_s=step_s))
            writer.flush()
        if args.nproc == 1:
            print(f"step {step} of {args.steps}  loss {loss:.4f}", flush=True)
        done = step
        if node == 0 and args.checkpoint_every and (step % args.checkpoint_every == 0 or stopped):
            save(checkpoints, step, int(settings.get("FAKE_CHECKPOINT_BYTES", "1000")))
        if stopped and step < args.steps:
            status = "interrupted"
            break
    if status == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    for writer in writers:
        writer.add(End(status=status, message=MESSAGES.get(status), num_steps=done, peak_memory_gib=None))
        writer.flush()
        writer.close()
    print(f"ended: {status}", flush=True)
    return EXIT_CODES[status]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for option in ("workload", "recipe", "batch-size", "output"):
        parser.add_argument(f"--{option}", required=True)
    for option in ("steps", "nproc"):
        parser.add_argument(f"--{option}", type=int, default=1)
    for option in ("seed", "num-workers", "checkpoint-every"):
        parser.add_argument(f"--{option}", type=int, default=0)
    for option in ("epochs", "eval-every", "sequence-length"):
        parser.add_argument(f"--{option}", type=int)
    for option in ("model", "tokenizer"):
        parser.add_argument(f"--{option}")
    for option in ("set", "fit"):
        parser.add_argument(f"--{option}", action="append", default=[])
    parser.add_argument("--data", default="synthetic")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    if args.epochs:
        args.steps = args.epochs * STEPS_PER_EPOCH
    return args


def batch_size(args: argparse.Namespace) -> int:
    return 8 if args.batch_size == "auto" else int(args.batch_size)


def save(checkpoints: Path, step: int, size: int) -> None:
    """Save a checkpoint, of which the newest two stay."""
    checkpoints.mkdir(exist_ok=True)
    partial = checkpoints / "next.partial"
    partial.write_text(json.dumps({"step": step}).ljust(size))
    partial.rename(checkpoints / f"step-{step:08d}.pt")
    for old in sorted(checkpoints.glob("step-*.pt"))[:-2]:
        old.unlink()


def header(args: argparse.Namespace, rank: int, attempt: int, first_step: int) -> dict[str, object]:
    info = workload_info(args.workload)
    num_nodes = int(os.environ.get("FASTLAUNCH_NUM_NODES") or "1")
    return {
        "run_id": os.environ.get("FASTLAUNCH_RUN_ID", "none"),
        "attempt": attempt,
        "rank": rank,
        "world_size": num_nodes * args.nproc,
        "num_nodes": num_nodes,
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
        "batch_size_per_gpu": batch_size(args),
        "steps": args.steps,
        "first_step": first_step,
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
        "instance": os.environ.get("FASTLAUNCH_INSTANCE"),
        "image_digest": os.environ.get("FASTLAUNCH_IMAGE_DIGEST"),
        "commit": os.environ.get("FASTLAUNCH_COMMIT"),
        "restarted_after": os.environ.get("FASTLAUNCH_RESTARTED_AFTER"),
        "warnings": [],
    }


if __name__ == "__main__":
    sys.exit(main())

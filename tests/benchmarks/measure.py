"""Make the runs of the plan on this machine's GPUs, the most important first, and pack their records.

    cd tests; python -m benchmarks.measure --output DIR vit-huge-h200 gelu-h200
    cd tests; python -m benchmarks.measure --output DIR --missing --seconds 570

Without a folder's name all of measurements.toml that is meant for this kind of GPU is made, with --missing
what train/measurements does not hold yet. A round of arms has its GPUs to itself, and their share of the
CPUs, and as many rounds run at once as there are GPUs. Each run is `python -m fastlaunch_train` in a process
of its own, with what it prints in its folder, DIR/FOLDER/RUN_ID.
After every run all records so far go into DIR/records.tar.xz, or --archive: what was measured outlasts a
kill. A run that is complete in DIR is not made again, so the same command goes on where the last one ended.
With --seconds no run begins that would not fit any more. A run that fails is said, and the others go on.

`python -m benchmarks.keep DIR` puts what was measured into train/measurements.
"""

import argparse
import os
import signal
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.plan import PLAN, PlannedRun, read_plan, training_command
from fastlaunch.measure.record_files import RecordError, read_record

MEASUREMENTS = Path(__file__).parents[2] / "train" / "measurements"
PACKED, LOG = "records.tar.xz", "log.txt"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help="of train/measurements; all without one")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--archive", type=Path, help=f"default: {PACKED} in --output")
    parser.add_argument("--plan", type=Path, default=PLAN)
    parser.add_argument("--missing", action="store_true", help="what train/measurements does not hold")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--gpus", type=int, help="default: all that torch sees, or one process without any")
    asked = parser.parse_args()

    rounds = read_plan(asked.plan)
    unknown = set(asked.folders) - {run.folder for of in rounds for run in of}
    if unknown:
        parser.error(f"{asked.plan} has no {', '.join(sorted(unknown))}")
    wanted = [of for of in rounds if not asked.folders or of[0].folder in asked.folders]
    device_name = _device_name()
    here = [of for of in wanted if is_meant_for(of[0], device_name)]
    others = {of[0].folder: of[0].device_name for of in wanted if not is_meant_for(of[0], device_name)}
    if others:
        told = ", ".join(f"{folder} ({of})" for folder, of in others.items())
        _say(f"here is {device_name}; left out, for other GPUs: {told}")
    if not here:
        parser.error(f"nothing in {asked.plan} is meant for this GPU: give another --plan, or another folder")
    have = published() if asked.missing else set[tuple[str, str]]()
    measuring = Measuring(
        output=asked.output,
        archive=asked.archive or asked.output / PACKED,
        deadline=time.monotonic() + asked.seconds,
    )
    measuring.all_of(
        [[run for run in of if (run.folder, run.run_id) not in have] for of in here],
        asked.gpus or _num_gpus(),
    )


def published(measurements: Path = MEASUREMENTS) -> set[tuple[str, str]]:
    """Folder and id of the runs whose records train/measurements holds."""
    found = set[tuple[str, str]]()
    for path in measurements.glob(f"*/{PACKED}"):
        with tarfile.open(path) as archive:
            found |= {(path.parent.name, name.split("/")[0]) for name in archive.getnames()}
    return found


def is_meant_for(run: PlannedRun, device_name: str | None) -> bool:
    """Whether `run` is to be made on GPUs of this name; None is no GPU, where any run may be tried."""
    return device_name is None or run.device_name in (None, device_name)


def is_complete(folder: Path, device_name: str | None = None) -> bool:
    """Whether the records of the run in `folder` are there to their end, of such a GPU if one is named."""
    try:
        record = read_record(folder / "rank-00000-attempt-1.jsonl")
    except (OSError, RecordError):
        return False
    if device_name not in (None, record.header["machine"]["device_name"]):
        return False
    return record.end is not None and record.end.status == "completed"


def train(run: PlannedRun, folder: Path, gpus: list[int], seconds: float) -> str:
    """Make a run on `gpus`, in `seconds` at most, and return what is to be said of it."""
    argv = training_command(run.arm, run.num_gpus, "-m", "fastlaunch_train")
    argv += ["--seed", str(run.round), "--output", str(folder), *run.arguments]
    environment = {
        **os.environ,
        "FASTLAUNCH_RUN_ID": run.run_id,
        "CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in gpus),
    }
    code = run_logged(argv, environment, folder / LOG, seconds)
    if code != 0:
        ended = "killed, since its time was up" if code is None else f"exit {code}"
        return f"{ended}\n{(folder / LOG).read_text(errors='replace')[-1500:]}"
    return told(folder / "rank-00000-attempt-1.jsonl")


def run_logged(argv: list[str], environment: dict[str, str], log: Path, seconds: float) -> int | None:
    """Return how `argv` ended, whose output goes into `log`; None if it was killed, since its time was up.

    With it go the ranks that it has started, also when this process is interrupted.
    """
    with log.open("wb") as file:
        process = subprocess.Popen(
            argv, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            return process.wait(None if seconds == float("inf") else seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@dataclass(kw_only=True)
class Measuring:
    """Runs made side by side until `deadline`, by `clock`. train: makes one in a folder, or says why not."""

    output: Path
    archive: Path
    deadline: float
    train: Callable[[PlannedRun, Path, list[int], float], str] = train
    clock: Callable[[], float] = time.monotonic
    _took: dict[str, float] = field(default_factory=dict)
    _packing: threading.Lock = field(default_factory=threading.Lock)

    def all_of(self, rounds: Iterable[list[PlannedRun]], num_gpus: int) -> None:
        """Make the rounds in their order, each once enough of the GPUs are free."""
        free, changed = list(range(num_gpus)), threading.Condition()
        cpus = sorted(os.sched_getaffinity(0))

        def make(runs: list[PlannedRun], gpus: list[int]) -> None:
            # Of this thread, whose processes inherit it: rounds take no CPUs from each other. What else
            # shares their host still shows in runs that wait for it (docs/results/records.md).
            os.sched_setaffinity(0, share_of(cpus, gpus, num_gpus))
            try:
                for run in runs:
                    self._one(run, gpus)
            finally:
                with changed:
                    free.extend(gpus)
                    changed.notify()

        with ThreadPoolExecutor(num_gpus) as pool:
            started = []
            for of in rounds:
                runs = [run for run in of if not is_complete(self._folder(run))]
                if not runs:
                    continue
                needed = runs[0].num_gpus
                if needed > num_gpus:
                    _say(f"{runs[0].folder}, round {runs[0].round}: needs {needed} GPUs, here are {num_gpus}")
                    continue
                with changed:
                    changed.wait_for(lambda needed=needed: len(free) >= needed)
                    free.sort()
                    gpus = [free.pop(0) for _ in range(needed)]
                started.append(pool.submit(make, runs, gpus))
        for one in started:
            one.result()

    def _one(self, run: PlannedRun, gpus: list[int]) -> None:
        began = self.clock()
        kind = f"{run.arm.text} x{run.num_gpus}"
        if began + self._took.get(kind, run.seconds_per_run) > self.deadline:
            _say(f"{run.run_id}: no time left")
            return
        folder = self._folder(run)
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob("rank-*"):
            stale.unlink()
        line = self.train(run, folder, gpus, self.deadline - began)
        if is_complete(folder):
            self._took[kind] = self.clock() - began
        with self._packing:
            pack(self.output, self.archive)
        _say(f"{run.run_id}: {line}, {self.clock() - began:.0f} s in all, GPU {gpus}")

    def _folder(self, run: PlannedRun) -> Path:
        return self.output / run.folder / run.run_id


def share_of(cpus: list[int], gpus: list[int], num_gpus: int) -> list[int]:
    """Of `cpus`, as large a share as `gpus` are of num_gpus, other ones for other GPUs; all if too few."""
    bounds = [index * len(cpus) // num_gpus for index in range(num_gpus + 1)]
    return [cpu for gpu in gpus for cpu in cpus[bounds[gpu] : bounds[gpu + 1]]] or cpus


def pack(output: Path, archive: Path) -> None:
    """Put all records below `output` into `archive`, whose earlier state a kill leaves whole."""
    unfinished = archive.with_name(archive.name + ".tmp")
    with tarfile.open(unfinished, "w:xz") as packed:
        for path in sorted(output.glob("*/*/rank-*.jsonl")):
            packed.add(path, arcname=str(path.relative_to(output)))
    unfinished.replace(archive)


def told(path: Path) -> str:
    """What a record says, in one line: speed of its last two thirds, loss, memory, checks, phases."""
    record = read_record(path)
    late = [block for block in record.blocks if block.first_step > record.header["steps"] // 3]
    step_time_s = sum(b.wall_s for b in late) / max(1, sum(b.last_step - b.first_step + 1 for b in late))
    batch_size = record.header["batch_size_per_gpu"] * record.header["world_size"]
    peak = record.end.peak_memory_gib if record.end else None
    evals = [f"{e.split} {e.loss} {e.metric_value}" for e in record.evals[-2:]]
    return (
        f"{1000 * step_time_s:.2f} ms, {batch_size / step_time_s if late else 0:.1f}/s, "
        f"loss {record.steps[-1].loss}, {peak} GiB, "
        f"{record.header['attention_backend']}, cudnn {record.header['versions']['cudnn']}, "
        f"{[(c.name[:5], c.passed, c.value) for c in record.checks]}, {evals}, "
        f"{[(p.name, round(p.seconds, 1)) for p in record.phases]}"
    )


def _device_name() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _num_gpus() -> int:
    import torch

    return max(1, torch.cuda.device_count())


def _say(line: str) -> None:
    # In one piece: rounds side by side would write into each other's lines.
    print(f"{line}\n", end="", flush=True)


if __name__ == "__main__":
    main()

"""What fastlaunch itself costs, against the limits that it has set itself.

    python tests/benchmarks/bench.py [help] [dry-run] [demo] [compare] [report] [recommend] [record] [script]

help     `fastlaunch --help` against `python -c "import click"`: at most 2 times
dry-run  a dry run of `fastlaunch submit` against the same: no limit
demo     `fastlaunch demo`: at most 1 s
compare  `fastlaunch compare --every-run --output json` over 10,000 stored runs: at most 2 s and 300 MB;
         also against `import click`: no limit
report   the page of 300 runs of 300 steps: at most 3 s and 2 MB
recommend  the CPU time of a recommendation among 20,000 candidates, by the shipped rows: at most 1 s; and
         the command over 320 stored runs, as a process: at most 2 s
record   recording a step, its share of the write included, against a step of 20 ms: at most 0.5%
script   the same for a step of a user's script, from `fl.steps` and `fl.step(loss=...)` to the file

Exit code 1 if a limit is missed. Times depend on the machine and what else it does: no test asserts them.
"""

import datetime
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "launcher"))

NUM_LAUNCHES = 15
IMPORT_CLICK = ("-c", "import click")
DRY_RUN = ("submit", "--instance", "p5.48xlarge", "--recipe", "te-fp8", "--dry-run")
NUM_RUNS_PER_ROW = 250
RECIPES = ("fp32", "tf32", "bf16", "fp16", "compile", "te-bf16", "te-fp8", "bf16 optimizer_impl=fused")
INSTANCES = (
    ("p4d.24xlarge", "NVIDIA A100-SXM4-40GB", 8),
    ("p4de.24xlarge", "NVIDIA A100-SXM4-80GB", 8),
    ("p5.4xlarge", "NVIDIA H100 80GB HBM3", 1),
    ("p5.48xlarge", "NVIDIA H100 80GB HBM3", 8),
    ("p5en.48xlarge", "NVIDIA H200", 8),
)
NUM_BLOCKS = 200
NUM_STEPS_PER_BLOCK = 50
STEP_TIME_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line of the table: `ratio` is measured / reference, and is to stay below any `limit`."""

    what: str
    measured: str
    reference: str
    ratio: float
    limit: float | None

    @property
    def verdict(self) -> str:
        if self.limit is None:
            return "no limit"
        return "kept" if self.ratio <= self.limit else "MISSED"


def launch_s(*arguments: str) -> float:
    """Return the wall seconds of a Python process with these arguments, without the user's own settings."""
    started = time.perf_counter()
    subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "FASTLAUNCH_CONFIG": os.devnull},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    return time.perf_counter() - started


def within(what: str, value: float, limit: float, unit: str) -> Result:
    """Compare a value with the limit that it has to keep."""
    return Result(
        what=what,
        measured=f"{value:.3g} {unit}",
        reference=f"{limit:g} {unit}",
        ratio=value / limit,
        limit=1.0,
    )


def of_a_step(what: str, per_step_s: list[float]) -> Result:
    """Compare the median cost of recording a step with a step."""
    cost_s = statistics.median(per_step_s)
    return Result(
        what=what,
        measured=f"{1e6 * cost_s:.1f} us",
        reference=f"a step of {1000 * STEP_TIME_S:.0f} ms",
        ratio=cost_s / STEP_TIME_S,
        limit=0.005,
    )


def against_click(
    what: str, times_s: list[float], clicks_s: list[float], limit: float | None = None
) -> Result:
    """Compare the medians of a command and of IMPORT_CLICK, launched in turn."""
    ours, clicks = statistics.median(times_s), statistics.median(clicks_s)
    return Result(
        what=what,
        measured=f"{1000 * ours:.0f} ms",
        reference=f"import click: {1000 * clicks:.0f} ms",
        ratio=ours / clicks,
        limit=limit,
    )


def bench_start(*arguments: str, limit: float | None = None) -> list[Result]:
    """A short command. It and its reference take turns, so that a busy machine slows both."""
    times_s, clicks_s = [], []
    for _ in range(NUM_LAUNCHES):
        clicks_s.append(launch_s(*IMPORT_CLICK))
        times_s.append(launch_s("-m", "fastlaunch", *arguments))
    return [against_click(f"fastlaunch {' '.join(arguments)}", times_s, clicks_s, limit)]


def bench_demo() -> list[Result]:
    """The demonstration, from start to end."""
    wall_s = statistics.median(launch_s("-m", "fastlaunch", "demo") for _ in range(5))
    return [within("fastlaunch demo", wall_s, 1, "s")]


def fill_ledger(home: Path, num_runs_per_row: int) -> int:
    """Store runs of 200 steps in 40 rows, as a launcher would have; returns how many."""
    from fake_records import write_run

    from fastlaunch.catalog.load import load_catalogue
    from fastlaunch.core.plan import RunState
    from fastlaunch.core.settings import Settings
    from fastlaunch.jobs.job import Job
    from fastlaunch.ledger.ledger import open_ledger
    from fastlaunch.measure.record_files import read_record
    from fastlaunch.measure.summarize import summarize
    from fastlaunch.measure.summary import Interval
    from fastlaunch_train.recipes.recipes import resolve_recipe

    noise = random.Random(0)
    catalogue, today = load_catalogue(), datetime.date.today()
    num_runs = 0
    with open_ledger(Settings(home=home)) as ledger, ledger.transaction():
        for row, (recipe, (instance, device, num_gpus)) in enumerate(product(RECIPES, INSTANCES)):
            job = Job(
                workload="vit-huge",
                recipe=resolve_recipe(*recipe.split()[:1], recipe.split()[1:]),
                batch_size=64,
                steps=200,
                num_gpus=num_gpus,
                instance=instance,
            )
            step_time_s = 0.1 + 0.005 * row
            paths = write_run(
                home / f"row-{row}",
                step_time_s=lambda rank, step, mean=step_time_s: noise.gauss(mean, 0.01 * mean),
                batch_size=64,
                world_size=num_gpus,
                recipe=recipe,
                instance=instance,
                device_name=device,
            )
            summary = summarize([read_record(path) for path in paths])
            assert summary.timing.step_time_s is not None, summary.problems
            price = catalogue.price(instance, on=today)
            submission = ledger.add_submission(f"fastlaunch submit --local --recipe '{recipe}'")
            for _ in range(num_runs_per_row):
                run_id, factor = ledger.new_run_id(), noise.gauss(1, 0.01)
                ledger.add_run(
                    submission,
                    run_id,
                    spec=job.to_json(),
                    plan={"argv": ["torchrun"] * 20},
                    workload=job.workload,
                    recipe=job.recipe.label,
                    instance=instance,
                    backend="local",
                    price=price,
                    directory=home / "runs" / run_id,
                )
                scaled = Interval(value=summary.timing.step_time_s.value * factor)
                timing = replace(summary.timing, step_time_s=scaled)
                ledger.set_summary(run_id, replace(summary, timing=timing))
                ledger.set_state(run_id, RunState.RUNNING)
                ledger.set_state(run_id, RunState.COMPLETED)
                num_runs += 1
    return num_runs


def bench_compare() -> list[Result]:
    """The comparison of every stored run, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        num_runs = fill_ledger(Path(folder), NUM_RUNS_PER_ROW)
        environment = {**os.environ, "FASTLAUNCH_HOME": folder, "FASTLAUNCH_CONFIG": os.devnull}
        times_s, clicks_s, peaks_mb, size = [], [], [], 0
        for _ in range(5):
            clicks_s.append(launch_s(*IMPORT_CLICK))
            output = Path(folder, "comparison.json")
            started = time.perf_counter()
            with output.open("wb") as file:
                process = subprocess.Popen(
                    [sys.executable, "-m", "fastlaunch", "compare", "--every-run", "--output", "json"],
                    stdout=file,
                    stderr=subprocess.DEVNULL,
                    env=environment,
                )
                _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            times_s.append(time.perf_counter() - started)
            peaks_mb.append(usage.ru_maxrss * 1024 / 1e6)
            size = output.stat().st_size
            if process.returncode:
                raise SystemExit(f"fastlaunch compare: exit code {process.returncode}")
    what = f"fastlaunch compare --every-run, {num_runs} runs"
    return [
        within(f"{what}, {size // 1000} kB of JSON", statistics.median(times_s), 2, "s"),
        against_click(what, times_s, clicks_s),
        within(f"{what}, peak memory", max(peaks_mb), 300, "MB"),
    ]


def bench_report() -> list[Result]:
    """The page of 300 runs of 300 steps in 20 rows, with predictions, in a process of its own."""
    from fake_records import write_run

    noise = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        for row, number in product(range(20), range(15)):
            instance, device, _ = INSTANCES[row % len(INSTANCES)]
            name = f"row-{row}-{number}"
            write_run(
                Path(folder, "runs", name),
                run_id=name,
                steps=300,
                step_time_s=lambda rank, step, mean=0.1 + 0.005 * row: noise.gauss(mean, 0.01 * mean),
                batch_size=64 * (1 + row // 10),
                recipe=RECIPES[row % len(RECIPES)],
                instance=instance,
                device_name=device,
                seed=number,
                header={"session": "one", "round": number + 1},
            )
        settings = {"FASTLAUNCH_HOME": f"{folder}/home", "FASTLAUNCH_CONFIG": os.devnull}
        os.environ |= settings
        launch_s("-m", "fastlaunch", "runs", "import", f"{folder}/runs")
        page = Path(folder, "report.html")
        wall_s = statistics.median(launch_s("-m", "fastlaunch", "report", "-o", str(page)) for _ in range(5))
        size_mb = page.stat().st_size / 1e6
    what = "fastlaunch report, 300 runs of 300 steps"
    return [within(what, wall_s, 3, "s"), within(f"{what}, the page", size_mb, 2, "MB")]


def bench_recommend() -> list[Result]:
    """The median of five recommendations by the shipped rows; the first loads what is loaded once."""
    import fastlaunch
    from fastlaunch.lifecycle.world import default_context

    times_s, num = [], 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"FASTLAUNCH_HOME": folder, "FASTLAUNCH_CONFIG": os.devnull}
        context = default_context()
        for _ in range(6):
            started = time.process_time()
            found = fastlaunch.recommend(
                "vit-huge",
                "100M",
                regions=("us-east-1", "us-east-2", "us-west-2"),
                max_nodes=12,
                batch_equivalent=True,
                allow_unverified=True,
                context=context,
            )
            times_s.append(time.process_time() - started)
            num = found.num_choices
    cpu_s = statistics.median(times_s[1:])
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FASTLAUNCH_HOME"] = folder
        num_runs = fill_ledger(Path(folder), 8)
        command = ("-m", "fastlaunch", "recommend", "--workload", "vit-huge", "--samples", "100M")
        wall_s = statistics.median(launch_s(*command) for _ in range(5))
    return [
        within(f"recommend among {num:,} candidates", cpu_s, 1, "s of CPU time"),
        within(f"fastlaunch recommend with {num_runs} runs", wall_s, 2, "s"),
    ]


def bench_record() -> list[Result]:
    """`add` of every step, `add` of their block and the `flush`, per step, timed directly."""
    from fake_records import write_run

    from fastlaunch.measure.record_files import read_record
    from fastlaunch_train.records.records import Block, RecordWriter, Step

    with tempfile.TemporaryDirectory() as folder:
        header = read_record(write_run(Path(folder, "fake"), steps=1)[0]).header
        writer = RecordWriter(Path(folder, "record.jsonl"))
        num_steps = NUM_BLOCKS * NUM_STEPS_PER_BLOCK
        writer.write_header(
            {k: v for k, v in header.items() if k not in ("kind", "schema")} | {"steps": num_steps}
        )
        per_step_s = []
        for first in range(1, num_steps + 1, NUM_STEPS_PER_BLOCK):
            last = first + NUM_STEPS_PER_BLOCK - 1
            started = time.perf_counter()
            for step in range(first, last + 1):
                writer.add(
                    Step(
                        step=step,
                        step_time_s=0.0200123456789,
                        data_wait_s=0.000123456789,
                        loss=2.3456789,
                        num_samples=64,
                        num_tokens=0,
                    )
                )
            writer.add(Block(first_step=first, last_step=last, wall_s=1.00123456789, reserved_gib=61.25))
            writer.flush()
            per_step_s.append((time.perf_counter() - started) / NUM_STEPS_PER_BLOCK)
        writer.close()
    return [of_a_step(f"recording a step, flushed every {NUM_STEPS_PER_BLOCK}", per_step_s)]


def bench_script() -> list[Result]:
    """A script's loop that does nothing else, with a loss on the CPU, as if a step took STEP_TIME_S."""
    import torch

    from fastlaunch_train.script.recording import Recording
    from fastlaunch_train.script.settings import ScriptSettings
    from fastlaunch_train.script.steps import RecordedSteps

    num_done = 0
    loss = torch.ones((), requires_grad=True)
    now = datetime.datetime.now(datetime.UTC).isoformat()
    with tempfile.TemporaryDirectory() as folder:
        settings = ScriptSettings(records=Path(folder), name="train.py", run_id="bench", started_at=now)
        recording = Recording(settings, clock=lambda: STEP_TIME_S * num_done)
        per_step_s = []
        for at in range(1 + NUM_BLOCKS):
            started = time.perf_counter()
            for _ in RecordedSteps(recording, range(NUM_STEPS_PER_BLOCK), 64, accumulate=1):
                num_done += 1
                recording.step(64, loss)
            if at:  # the first has the header
                per_step_s.append((time.perf_counter() - started) / NUM_STEPS_PER_BLOCK)
        recording.finish()
    return [of_a_step("recording a step of a script", per_step_s)]


BENCHMARKS: dict[str, Callable[[], list[Result]]] = {
    "help": lambda: bench_start("--help", limit=2.0),
    "dry-run": lambda: bench_start(*DRY_RUN),
    "demo": bench_demo,
    "compare": bench_compare,
    "report": bench_report,
    "recommend": bench_recommend,
    "record": bench_record,
    "script": bench_script,
}


def machine() -> str:
    """Cores and processor, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    except OSError:
        names = []
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores, {names[0] if names else platform.processor() or platform.machine()}"


def main(names: list[str]) -> int:
    """Run the named benchmarks, all if none is named; 1 if a limit is missed."""
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown:
        print(f"no benchmark {unknown[0]!r}; there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    results = [result for name in names or BENCHMARKS for result in BENCHMARKS[name]()]
    print(f"{datetime.date.today()}, {machine()}, Python {platform.python_version()}\n")
    lines = [
        (
            result.what,
            result.measured,
            result.reference,
            f"{result.ratio:.2g}",
            "" if result.limit is None else f"{result.limit:g}",
            result.verdict,
        )
        for result in results
    ]
    headers = ("", "measured", "reference", "ratio", "limit", "")
    print(tabulate(lines, headers=headers, disable_numparse=True))
    return int(any(result.verdict == "MISSED" for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

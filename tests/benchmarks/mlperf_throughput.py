"""Training throughput of a round of MLPerf Training, as rows that predictions learn from.

    python -m benchmarks.mlperf_throughput v5.1 FILE (in tests/; FILE is CSV, plain or .xz)
    python -m benchmarks.mlperf_throughput v5.0 REPOSITORY (a clone of mlcommons/training_results_v5.0)

Joins the rows of the round to the shipped ones, instead of those it made before. FILE has a row for each
system and benchmark, with the columns submitter, system, benchmark, accelerator, nodes,
accelerators_per_node, framework, logs, median_of_throughput_lines, global_batch and seconds_to_train_median.
The logs of REPOSITORY make such rows: its seconds are those from `run_start` to `run_stop` of the logs that
reached the target.

The lines of throughput count the whole system with some submitters, one accelerator with others, and are
missing with many. Systems that train one benchmark with one global batch to one accuracy take about as many
samples, so throughput times seconds is one number for them: the median of those that log a throughput. It
counts if two systems of different submitters or sizes agree on it; else the benchmark is left out. Systems of
other sizes show whether a line counts one accelerator.
"""

import argparse
import csv
import io
import json
import lzma
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from fastlaunch.analysis.anchors import COLUMNS
from fastlaunch.catalog.hardware import TRAINING_THROUGHPUT

#: Days of publication.
_DATES = {"v5.0": "2025-06-04", "v5.1": "2025-11-12"}
_LICENCE = "Apache-2.0"
_MIX = "submission (FP8/AMP mix; see code)"
#: The logs of two systems agree within this factor.
_TOLERANCE = 1.1
#: Another global batch takes as many samples within this factor.
_OTHER_BATCH = 1.7
#: A shorter training is start and evaluation for too large a part to tell the throughput by its time.
_LEAST_SECONDS = 300
#: Systems that read data more slowly than they train.
_STARVED = {("University-of-Florida", "retinanet")}
_LOG_LINE = re.compile(r":::MLLOG ({.*})")


class _Benchmark(NamedTuple):
    model: str
    params: int | None
    task: str
    precision: str
    size: int | None  # of a sequence, or the side of an image
    unit: str


_BENCHMARKS = {
    "bert": _Benchmark("BERT-large", 336_226_108, "MLPerf masked-LM pretrain", _MIX, 512, "samples/s"),
    "dlrm_dcnv2": _Benchmark("DLRM-DCNv2", None, "MLPerf recommendation", _MIX, None, "samples/s"),
    "llama2_70b_lora": _Benchmark(
        "Llama2-70B", 68_976_648_192, "causal-LM LoRA finetune", _MIX, 8192, "tokens/s"
    ),
    "llama31_405b": _Benchmark(
        "Llama3.1-405B", 405_853_388_800, "MLPerf LLM pretrain", _MIX, 8192, "tokens/s"
    ),
    "llama31_8b": _Benchmark("Llama3.1-8B", 8_030_261_248, "MLPerf LLM pretrain", _MIX, 8192, "tokens/s"),
    "retinanet": _Benchmark("RetinaNet", 37_969_539, "object detection train", "FP16", 800, "images/s"),
    "rgat": _Benchmark("R-GAT", None, "MLPerf graph node classification", _MIX, None, "samples/s"),
}

Row = Mapping[str, str]


def systems_of(repository: Path) -> Iterator[dict[str, str]]:
    """Yield a row for each system and benchmark of a round's repository, as FILE has."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(repository), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, errors="replace").stdout

    logs, descriptions = defaultdict(list), set[str]()
    for path in git("ls-tree", "-r", "--name-only", "HEAD").splitlines():
        if match := re.fullmatch(r"([^/]+)/results/([^/]+)/([^/]+)/result_\d+\.txt", path):
            logs[match.groups()].append(path)
        elif re.fullmatch(r"[^/]+/systems/[^/]+\.json", path):
            descriptions.add(path)
    for (submitter, system, benchmark), paths in sorted(logs.items()):
        if benchmark not in _BENCHMARKS or f"{submitter}/systems/{system}.json" not in descriptions:
            continue
        runs = [run for path in paths if (run := _run(git("show", f"HEAD:{path}"))) is not None]
        if not runs:
            continue
        described = json.loads(git("show", f"HEAD:{submitter}/systems/{system}.json"))
        throughputs = [run.throughput for run in runs if run.throughput]
        yield {
            "submitter": submitter,
            "system": system,
            "benchmark": benchmark,
            "accelerator": described["accelerator_model_name"],
            "nodes": str(described["number_of_nodes"]),
            "accelerators_per_node": str(described["accelerators_per_node"]),
            "framework": described["framework"],
            "logs": str(len(runs)),
            "median_of_throughput_lines": f"{median(throughputs):.7g}" if throughputs else "",
            "global_batch": f"{median(run.global_batch for run in runs):.0f}",
            "seconds_to_train_median": f"{median(run.seconds for run in runs):.1f}",
        }


class _Run(NamedTuple):
    seconds: float
    global_batch: float
    throughput: float | None  # the median of its lines


def _run(log: str) -> _Run | None:
    """Return what the log of a run says; None if it did not reach its target."""
    first: dict[str, float] = {}
    throughputs, global_batch = [], None
    for text in _LOG_LINE.findall(log):
        try:
            line = json.loads(text)
        except ValueError:
            continue
        key, value = line["key"], line["value"]
        if key == "run_start" or (key == "run_stop" and line["metadata"].get("status") == "success"):
            first.setdefault(key, line["time_ms"] / 1000)
        elif key == "global_batch_size":
            global_batch = float(value)
        elif key == "tracked_stats" and isinstance(value, dict) and "throughput" in value:
            throughputs.append(float(value["throughput"]))
    if global_batch is None or first.keys() < {"run_start", "run_stop"}:
        return None
    return _Run(
        seconds=first["run_stop"] - first["run_start"],
        global_batch=global_batch,
        throughput=median(throughputs) if throughputs else None,
    )


def rows_of(systems: Sequence[Row], version: str) -> list[dict[str, str]]:
    """Return a row for each system whose throughput is known, in the shipped columns. version: `v5.1`."""
    rows = []
    for benchmark in sorted(_BENCHMARKS):
        own = [system for system in systems if system["benchmark"] == benchmark]
        usual = _usual_samples(own)
        for global_batch in sorted({system["global_batch"] for system in own}):
            group = [system for system in own if system["global_batch"] == global_batch]
            if usual is None or (num_samples := _samples_to_train(group, usual)) is None:
                continue
            for system in sorted(group, key=lambda system: (system["submitter"], system["system"])):
                if (row := _row(system, num_samples, version)) is not None:
                    rows.append(row)
    return rows


def _products(system: Row) -> tuple[float, ...]:
    """Return throughput times seconds, if the line counts the system, and if it counts one accelerator."""
    if not system["median_of_throughput_lines"]:
        return ()
    product = float(system["median_of_throughput_lines"]) * _seconds(system)
    return product, product * _num_gpus(system)


def _usual_samples(systems: Sequence[Row]) -> float | None:
    """Return about how many samples the benchmark takes: that on which systems of most sizes agree."""

    def num_agreed(num_samples: float) -> tuple[int, int]:
        near = [
            system
            for system in systems
            if any(_is_near(product, num_samples, _OTHER_BATCH) for product in _products(system))
        ]
        return len({_num_gpus(system) for system in near}), len(near)

    return max((product for system in systems for product in _products(system)), key=num_agreed, default=None)


def _samples_to_train(group: Sequence[Row], usual: float) -> float | None:
    """Return throughput times seconds of a benchmark with one global batch; None if too few agree on it."""
    logged = [
        (system, product)
        for system in group
        for product in _products(system)
        if _is_near(product, usual, _OTHER_BATCH)
    ]
    if not logged:
        return None
    num_samples = median(product for _, product in logged)
    kinds = {
        (system["submitter"], _num_gpus(system))
        for system, product in logged
        if _is_near(product, num_samples)
    }
    return num_samples if len(kinds) > 1 else None


def _row(system: Row, num_samples: float, version: str) -> dict[str, str] | None:
    """Return the system's row; None if its time and the line of its throughput contradict each other."""
    benchmark = _BENCHMARKS[system["benchmark"]]
    by_time, num_gpus = num_samples / _seconds(system), _num_gpus(system)
    if (system["submitter"], system["benchmark"]) in _STARVED or float(system["global_batch"]) < num_gpus:
        # An accelerator with less than a sample shares it with others: one model on all of them.
        return None
    if system["median_of_throughput_lines"]:
        line = float(system["median_of_throughput_lines"])
        throughput = next((each for each in (line, line * num_gpus) if _is_near(each, by_time)), None)
        how = "throughput as logged" + (", of one accelerator" if throughput != line else "")
    else:
        throughput = by_time if _seconds(system) >= _LEAST_SECONDS else None
        how = "throughput by time to train beside that of systems that log it"
    if throughput is None:
        return None
    notes = (
        f"{system['submitter']} {system['system']}; {how}; runs={system['logs']};"
        f" median time-to-train {_seconds(system) / 60:.2f} min;"
        f" precision: the usual one of the task; framework={' '.join(system['framework'].split())}"
    )
    size = benchmark.size or ""
    if benchmark.unit == "tokens/s":
        assert benchmark.size is not None
        throughput *= benchmark.size
    values = (
        _source(version),
        f"{system['submitter']}/results/{system['system']}/{system['benchmark']}/",
        *(benchmark.model, str(benchmark.params or ""), benchmark.task, benchmark.precision),
        *(system["accelerator"], str(num_gpus), system["nodes"]),
        *(f"{float(system['global_batch']) / num_gpus:.6g}", str(size), f"{throughput:.6g}", benchmark.unit),
        *(_DATES[version], notes),
    )
    return {**dict(zip(COLUMNS, values, strict=True)), "licence": _LICENCE}


def _is_near(value: float, other: float, tolerance: float = _TOLERANCE) -> bool:
    return 1 / tolerance <= value / other <= tolerance


def _num_gpus(system: Row) -> int:
    return int(system["nodes"]) * int(system["accelerators_per_node"])


def _seconds(system: Row) -> float:
    return float(system["seconds_to_train_median"])


def _source(version: str) -> str:
    return f"mlcommons/training_results_{version}"


def joined(shipped: bytes, rows: Sequence[Row], version: str) -> bytes:
    """Return the packed file with these rows in place of the round's."""
    reader = csv.DictReader(io.StringIO(lzma.decompress(shipped).decode(), newline=""))
    kept = [row for row in reader if row["source_repo"] != _source(version)]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, reader.fieldnames or (), lineterminator="\n")
    writer.writeheader()
    writer.writerows([*kept, *rows])
    return lzma.compress(text.getvalue().encode(), preset=9 | lzma.PRESET_EXTREME)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("version", choices=_DATES)
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    path, version = options.file, options.version
    if path.is_dir():
        systems = list(systems_of(path))
    else:
        data = path.read_bytes()
        text = (lzma.decompress(data) if path.suffix == ".xz" else data).decode()
        systems = list(csv.DictReader(io.StringIO(text, newline="")))
    rows = rows_of(systems, version)
    TRAINING_THROUGHPUT.write_bytes(joined(TRAINING_THROUGHPUT.read_bytes(), rows, version))
    print(f"{len(rows)} rows of {_source(version)}")


if __name__ == "__main__":
    main()

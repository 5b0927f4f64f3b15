"""Training throughput of MLPerf Training v5.1, as rows that predictions learn from.

    python -m benchmarks.mlperf_throughput FILE (in tests/; FILE is CSV, plain or .xz)

Joins the rows that FILE makes to the shipped ones, instead of those it made before. FILE has a row for each
system and benchmark, with the columns submitter, system, benchmark, accelerator, nodes,
accelerators_per_node, framework, logs, median_of_throughput_lines, global_batch and seconds_to_train_median.

The lines of throughput count the whole system with some submitters, one accelerator with others, and are
missing with many. Systems that train one benchmark with one global batch to one accuracy take about as many
samples, so throughput times seconds is one number for them: the median of those that log a throughput. It
counts if two systems of different submitters or sizes agree on it. Without it a benchmark is left out.
"""

import argparse
import csv
import io
import lzma
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

from fastlaunch.analysis.anchors import COLUMNS
from fastlaunch.catalog.hardware import TRAINING_THROUGHPUT

_SOURCE, _DATE, _LICENCE = "mlcommons/training_results_v5.1", "2025-11-12", "Apache-2.0"
_MIX = "submission (FP8/AMP mix; see code)"
#: The logs of two systems agree within this factor.
_TOLERANCE = 1.1
#: A shorter training is start and evaluation for too large a part to tell the throughput by its time.
_LEAST_SECONDS = 300
#: Systems that read data more slowly than they train.
_STARVED = {("University-of-Florida", "retinanet")}


class _Benchmark(NamedTuple):
    model: str
    params: int | None
    task: str
    precision: str
    size: int | None  # of a sequence, or the side of an image
    unit: str


_BENCHMARKS = {
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


def rows_of(systems: Sequence[Row]) -> list[dict[str, str]]:
    """Return a row for each system whose throughput is known, in the shipped columns."""
    groups = defaultdict(list)
    for system in systems:
        if system["benchmark"] in _BENCHMARKS:
            groups[system["benchmark"], system["global_batch"]].append(system)
    return [
        row
        for _, group in sorted(groups.items())
        if (num_samples := _samples_to_train(group)) is not None
        for system in sorted(group, key=lambda system: (system["submitter"], system["system"]))
        if (row := _row(system, num_samples)) is not None
    ]


def _samples_to_train(group: Sequence[Row]) -> float | None:
    """Return throughput times seconds of a benchmark with one global batch; None if too few agree on it."""
    logged = [system for system in group if system["median_of_throughput_lines"]]
    if not logged:
        return None
    products = [float(system["median_of_throughput_lines"]) * _seconds(system) for system in logged]
    num_samples = median(products)
    agreed = [
        system for system, product in zip(logged, products, strict=True) if _is_near(product, num_samples)
    ]
    kinds = {(system["submitter"], _num_gpus(system)) for system in agreed}
    return num_samples if len(kinds) > 1 else None


def _row(system: Row, num_samples: float) -> dict[str, str] | None:
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
        _SOURCE,
        f"{system['submitter']}/results/{system['system']}/{system['benchmark']}/",
        *(benchmark.model, str(benchmark.params or ""), benchmark.task, benchmark.precision),
        *(system["accelerator"], str(num_gpus), system["nodes"]),
        *(f"{float(system['global_batch']) / num_gpus:.6g}", str(size), f"{throughput:.6g}", benchmark.unit),
        *(_DATE, notes),
    )
    return {**dict(zip(COLUMNS, values, strict=True)), "licence": _LICENCE}


def _is_near(value: float, other: float) -> bool:
    return 1 / _TOLERANCE <= value / other <= _TOLERANCE


def _num_gpus(system: Row) -> int:
    return int(system["nodes"]) * int(system["accelerators_per_node"])


def _seconds(system: Row) -> float:
    return float(system["seconds_to_train_median"])


def joined(shipped: bytes, rows: Sequence[Row]) -> bytes:
    """Return the packed file with these rows in place of v5.1's."""
    reader = csv.DictReader(io.StringIO(lzma.decompress(shipped).decode(), newline=""))
    kept = [row for row in reader if row["source_repo"] != _SOURCE]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, reader.fieldnames or (), lineterminator="\n")
    writer.writeheader()
    writer.writerows([*kept, *rows])
    return lzma.compress(text.getvalue().encode(), preset=9 | lzma.PRESET_EXTREME)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("file", type=Path)
    path = parser.parse_args().file
    data = path.read_bytes()
    text = (lzma.decompress(data) if path.suffix == ".xz" else data).decode()
    rows = rows_of(list(csv.DictReader(io.StringIO(text, newline=""))))
    TRAINING_THROUGHPUT.write_bytes(joined(TRAINING_THROUGHPUT.read_bytes(), rows))
    print(f"{len(rows)} rows of {_SOURCE}")


if __name__ == "__main__":
    main()

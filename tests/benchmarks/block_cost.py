"""What the end of a block costs a step: at each the GPU waits until the host has queued work again.

    cd tests; python -m benchmarks.block_cost vit-huge-h100 vit-huge-fused-h100
    cd tests; python -m benchmarks.block_cost --records DIR

Reads the records of folders of train/measurements, or of DIR, which holds a folder per run. A block's cost is
what its first step takes longer on the device than the median of its others, and the part of its wall time
that lies between no two events. Prints it as a share of the step time for each recipe, batch and length
of a run's blocks, over all blocks after the warm-up.
"""

import argparse
import statistics
import sys
import tarfile
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tabulate import tabulate

from benchmarks.measure import MEASUREMENTS, PACKED
from fastlaunch.measure.record_files import RankRecord, read_record
from fastlaunch_train.loop.recorder import WARMUP_STEPS


@dataclass(frozen=True)
class BlockCost:
    """One block: its steps, its wall time, and the seconds of it that its end costs."""

    num_steps: int
    wall_s: float
    cost_s: float


def block_costs(record: RankRecord) -> Iterator[BlockCost]:
    """Yield the cost of each block after the warm-up that has steps to compare the first with."""
    first_step = record.header["first_step"]
    times_s = [step.step_time_s for step in record.steps]
    for block in record.blocks:
        of_block = times_s[block.first_step - first_step : block.last_step - first_step + 1]
        if block.first_step < first_step + WARMUP_STEPS or len(of_block) < 2:
            continue
        late_s = of_block[0] - statistics.median(of_block[1:])
        yield BlockCost(len(of_block), block.wall_s, late_s + block.wall_s - sum(of_block))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help="of train/measurements")
    parser.add_argument("--records", type=Path, metavar="DIR")
    asked = parser.parse_args()
    rows: dict[tuple[str, str, int, int], list[BlockCost]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as unpacked:
        for folder in asked.folders:
            with tarfile.open(MEASUREMENTS / folder / PACKED) as archive:
                archive.extractall(Path(unpacked, folder), filter="data")
        for path in sorted((asked.records or Path(unpacked)).rglob("rank-*.jsonl")):
            record = read_record(path)
            header = record.header
            seconds = round(statistics.median_high(block.wall_s for block in record.blocks))
            key = (header["workload"]["name"], header["recipe"]["label"], header["batch_size_per_gpu"])
            rows[*key, seconds] += block_costs(record)
    if not any(rows.values()):
        print("no block after the warm-up has two steps", file=sys.stderr)
        return 1
    headers = ("workload", "recipe", "batch", "s", "blocks", "steps each", "ms/step", "ms/block", "% of it")
    print(
        tabulate(
            [_row(key, blocks) for key, blocks in sorted(rows.items()) if blocks],
            headers=headers,
            floatfmt=("", "", "", "", "", ".1f", ".2f", ".2f", ".2f"),
        )
    )
    return 0


def _row(key: tuple[str, str, int, int], blocks: list[BlockCost]) -> list[str | int | float]:
    steps, wall_s = sum(block.num_steps for block in blocks), sum(block.wall_s for block in blocks)
    cost_s = statistics.median(block.cost_s for block in blocks)
    share = 100 * cost_s * len(blocks) / wall_s
    return [*key, len(blocks), steps / len(blocks), 1e3 * wall_s / steps, 1e3 * cost_s, share]


if __name__ == "__main__":
    sys.exit(main())

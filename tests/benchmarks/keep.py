"""Put measured records into train/measurements, and summarise them anew.

    cd tests; python -m benchmarks.keep DIR

DIR is measure.py's --output, or an archive that it wrote, unpacked. Each folder of train/measurements then
holds, of the runs of the plan, those it held before and those that are complete in DIR, which replace others
of the same id; what the plan does not know goes, and what was made on another GPU than the plan's does not
come. The archives of equal records are equal byte for byte. `make tables` comes next.
"""

import argparse
import io
import json
import lzma
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import MEASUREMENTS, PACKED, is_complete
from benchmarks.plan import PLAN, read_plan


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("found", type=Path, metavar="DIR", nargs="?", help="without it only summarise")
    parser.add_argument("--plan", type=Path, default=PLAN)
    parser.add_argument("--measurements", type=Path, default=MEASUREMENTS)
    asked = parser.parse_args()
    if asked.found is not None and not asked.found.is_dir():
        parser.error(f"{asked.found} is not a folder: unpack what measure.py packed")
    planned: dict[str, dict[str, str | None]] = {}
    for run in (run for of in read_plan(asked.plan) for run in of if asked.found is not None):
        planned.setdefault(run.folder, {})[run.run_id] = run.device_name
    for folder, runs in sorted(planned.items()):
        kept = keep(asked.found / folder, asked.measurements / folder / PACKED, runs)
        if kept != Kept():
            print(f"{folder}: {kept.num_runs} of {len(runs)} runs")
            changes = (("new", kept.added), ("gone", kept.dropped), ("of another GPU", kept.foreign))
            for change, changed in changes:
                print("".join(f"  {change}: {run_id}\n" for run_id in changed), end="")
    root = MEASUREMENTS.parents[1]
    sys.path[:0] = [str(root / "launcher"), str(root / "train")]
    write_summaries(asked.measurements)


def write_summaries(folder: Path) -> None:
    """Write summaries.json for the records under `folder`, as the package ships it.

    Raises BadFile for a record that cannot be used, and for a run of the same id as another.
    """
    from fastlaunch.core.data import to_data
    from fastlaunch.lifecycle.importer import find_runs
    from fastlaunch.measure.published import SUMMARIES

    imports = find_runs([folder])
    if imports.skipped:
        raise imports.skipped[0]
    # Profiled runs show where time goes; their speeds are not compared.
    runs = {run_id: run for run_id, run in imports.runs.items() if run.summary.profile is None}
    text = json.dumps({run_id: to_data(run.summary) for run_id, run in runs.items()}, indent=1)
    (folder / SUMMARIES).write_text(text + "\n", encoding="utf-8")


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What an archive holds now, and the ids of runs that came, that went, and that are of other GPUs."""

    num_runs: int = 0
    added: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()


def keep(found: Path, archive: Path, planned: Mapping[str, str | None]) -> Kept:
    """Write `archive` anew: the runs of `planned` that it held, and those that are complete in `found`.

    planned: by run id the name of the GPU that it is meant for; None for any.
    """
    before = _unpacked(archive) if archive.exists() else {}
    complete = [path for path in sorted(found.glob("*")) if path.name in planned and is_complete(path)]
    ours = [path for path in complete if is_complete(path, planned[path.name])]
    new = {
        path.name: {file.name: file.read_bytes() for file in sorted(path.glob("rank-*.jsonl"))}
        for path in ours
    }
    after = {run_id: files for run_id, files in (before | new).items() if run_id in planned}
    if after != before and after:
        archive.parent.mkdir(parents=True, exist_ok=True)
        unfinished = archive.with_name(archive.name + ".tmp")
        unfinished.write_bytes(_packed(after))
        unfinished.replace(archive)
    return Kept(
        num_runs=len(after),
        added=tuple(run_id for run_id, files in new.items() if before.get(run_id) != files),
        dropped=tuple(sorted(before.keys() - after.keys())),
        foreign=tuple(path.name for path in complete if path not in ours),
    )


def _unpacked(archive: Path) -> dict[str, dict[str, bytes]]:
    """Content of the record files of each run, by their names."""
    runs: dict[str, dict[str, bytes]] = {}
    with tarfile.open(archive) as packed:
        for member in packed:
            file = packed.extractfile(member)
            if file is not None:
                run_id, name = member.name.split("/")
                runs.setdefault(run_id, {})[name] = file.read()
    return runs


def _packed(runs: dict[str, dict[str, bytes]]) -> bytes:
    """A .tar.xz of RUN_ID/FILE in order of their names, without owners and times."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as packed:
        for run_id, files in sorted(runs.items()):
            for name, content in sorted(files.items()):
                member = tarfile.TarInfo(f"{run_id}/{name}")
                member.size = len(content)
                packed.addfile(member, io.BytesIO(content))
    return lzma.compress(buffer.getvalue(), preset=9 | lzma.PRESET_EXTREME)


if __name__ == "__main__":
    main()

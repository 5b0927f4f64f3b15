"""The bandwidth between nodes, from what training wrote into its records to the summary of the run."""

from pathlib import Path

import pytest
from fake_records import write_run

from fastlaunch.measure.events import AllReduce, all_reduce_of
from fastlaunch.measure.summarize import summarize
from fastlaunch.measure.summary import RunSummary
from fastlaunch_train.distributed.all_reduce import Bandwidth
from fastlaunch_train.records.records import Phase, read_record

WRITTEN = Bandwidth(seconds=0.01, message_bytes=2**28, num_ranks=16, num_repeats=5)
EFA = WRITTEN.detail(fabric="efa", num_nodes=2)
TCP = WRITTEN.detail(fabric="socket", num_nodes=2)


def summary(folder: Path, *details: str | None) -> RunSummary:
    """Summary of a run of as many nodes, whose first rank each wrote a phase with that detail."""
    paths = []
    for rank, detail in enumerate(details):
        phases = [Phase(name="all-reduce", seconds=0.5, step=0, detail=detail)]
        written = write_run(
            folder / str(rank), steps=80, world_size=len(details), num_nodes=len(details), phases=phases
        )
        paths.append(written[rank])
    return summarize([read_record(path) for path in paths])


def test_what_training_writes_is_read(tmp_path: Path) -> None:
    found = summary(tmp_path, EFA, EFA)
    assert found.all_reduce == AllReduce(
        bus_gb_per_s=pytest.approx(50.3316), message_bytes=2**28, fabric="efa"
    )
    assert str(found.all_reduce) == (
        "50.3 GB/s of bus bandwidth between nodes over efa (all-reduce of 256 MiB)"
    )
    # Runs on different networks are no repeats of each other.
    assert found.setup.fingerprint["fabric"] == "efa"


def test_a_node_without_efa_is_told(tmp_path: Path) -> None:
    found = summary(tmp_path, EFA, TCP).all_reduce
    assert found is not None and found.fabric == "socket"


def test_one_node_and_older_records_have_none(tmp_path: Path) -> None:
    records = [read_record(path) for path in write_run(tmp_path, steps=40)]
    assert all_reduce_of(records) is None
    found = summarize(records)
    assert found.all_reduce is None and "fabric" not in found.setup.fingerprint
    assert "all_reduce" not in found.to_json()
    assert RunSummary.from_json(found.to_json()) == found

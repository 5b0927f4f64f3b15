"""The plan behind train/measurements: what it says, how it is carried out, and how its records are kept."""

import os
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterable
from pathlib import Path

import pytest
from fake_records import write_run

from benchmarks.keep import keep, write_summaries
from benchmarks.measure import (
    MEASUREMENTS,
    PACKED,
    Measuring,
    is_complete,
    is_meant_for,
    published,
    share_of,
    train,
)
from benchmarks.plan import PlannedRun, read_plan
from fastlaunch.core.errors import BadFile
from fastlaunch.measure.published import read_summaries
from fastlaunch.measure.record_files import read_record
from fastlaunch.measure.summarize import summarize

ARMS = """
[[runs]]
folder = "one"
arms = ["gelu/fp32:2@20", "gelu/compile,precision=fp32:2"]
rounds = [1, 2]
steps = 30
seconds_per_run = 10

[[runs]]
folder = "two"
num_gpus = 2
arms = ["gelu/bf16:2@20"]
rounds = [1]
arguments = ["--data", "synthetic"]
seconds_per_run = 10
"""


@pytest.fixture
def rounds(tmp_path: Path) -> list[list[PlannedRun]]:
    path = tmp_path / "plan.toml"
    path.write_text(ARMS)
    return [list(of) for of in read_plan(path)]


def test_a_plan_is_rounds_in_an_order_turned_round(rounds: list[list[PlannedRun]]) -> None:
    assert [[run.run_id for run in of] for of in rounds] == [
        ["gelu-fp32-2-20-x1-r1", "gelu-compile-precision-fp32-2-x1-r1"],
        ["gelu-compile-precision-fp32-2-x1-r2", "gelu-fp32-2-20-x1-r2"],
        ["gelu-bf16-2-20-x2-r1"],
    ]
    compiled = rounds[0][1].arm
    assert (compiled.recipe, compiled.overrides) == ("compile", ("precision=fp32",))
    assert (compiled.batch_size_per_gpu, compiled.steps) == (2, 30)
    assert (rounds[2][0].num_gpus, rounds[2][0].arguments) == (2, ("--data", "synthetic"))


def test_all_that_is_published_is_in_the_plan() -> None:
    planned = {(run.folder, run.run_id) for of in read_plan() for run in of}
    folders = {path.parent.name for path in MEASUREMENTS.glob(f"*/{PACKED}")}
    assert {folder for folder, _ in published()} == folders
    # A script's runs have no arms: docs/results/nanogpt.md has the command that makes them.
    assert {each for each in published() if each[0] != "nanogpt-h200"} <= planned
    # A ledger holds them all, by their ids.
    assert len({run_id for _, run_id in planned}) == len(planned)


class Machine:
    """Stands in for training: notes which runs share which GPUs, and takes `seconds` of its own clock."""

    def __init__(self, seconds: float = 10) -> None:
        self.seconds = seconds
        self.now = 0.0
        self.begun: list[tuple[str, tuple[int, ...]]] = []
        self.allowed: list[float] = []
        self.cpus: dict[tuple[int, ...], set[int]] = {}
        self._busy = set[int]()
        self._lock = threading.Lock()

    def train(self, run: PlannedRun, folder: Path, gpus: list[int], seconds: float) -> str:
        with self._lock:
            assert not self._busy & set(gpus)
            self._busy |= set(gpus)
            self.begun.append((run.run_id, tuple(gpus)))
            self.cpus[tuple(gpus)] = os.sched_getaffinity(0)
            self.allowed.append(seconds)
            self.now += self.seconds
        write_run(folder, run_id=run.run_id, steps=20)
        with self._lock:
            self._busy -= set(gpus)
        return "trained"

    def measure(
        self, output: Path, rounds: Iterable[list[PlannedRun]], num_gpus: int = 1, deadline: float = 1000
    ) -> None:
        Measuring(
            output=output,
            archive=output / PACKED,
            deadline=deadline,
            train=self.train,
            clock=lambda: self.now,
        ).all_of(rounds, num_gpus=num_gpus)


def test_rounds_are_made_in_order_with_their_gpus_to_themselves(
    tmp_path: Path, rounds: list[list[PlannedRun]]
) -> None:
    mine = os.sched_getaffinity(0)
    machine = Machine()
    machine.measure(tmp_path / "out", rounds, num_gpus=2)
    of_a_round = {run.run_id: index for index, of in enumerate(rounds) for run in of}
    assert sorted(run_id for run_id, _ in machine.begun) == sorted(of_a_round)
    for index, of in enumerate(rounds):
        begun = [(run_id, gpus) for run_id, gpus in machine.begun if of_a_round[run_id] == index]
        assert [run_id for run_id, _ in begun] == [run.run_id for run in of]
        assert len({gpus for _, gpus in begun}) == 1
    assert machine.begun[-1] == ("gelu-bf16-2-20-x2-r1", (0, 1))
    with tarfile.open(tmp_path / "out" / PACKED) as archive:
        packed = {name.rsplit("/", 1)[0] for name in archive.getnames()}
    assert packed == {f"{run.folder}/{run.run_id}" for of in rounds for run in of}
    for gpus, cpus in machine.cpus.items():
        assert cpus == set(share_of(sorted(mine), list(gpus), 2))
    assert os.sched_getaffinity(0) == mine


def test_what_is_complete_is_not_made_again(tmp_path: Path, rounds: list[list[PlannedRun]]) -> None:
    output = tmp_path / "out"
    Machine().measure(output, rounds[:1])
    (cut,) = (output / "one" / "gelu-fp32-2-20-x1-r1").glob("rank-*")
    cut.write_bytes(cut.read_bytes()[:-100])
    again = Machine()
    again.measure(output, rounds[:1])
    assert [run_id for run_id, _ in again.begun] == ["gelu-fp32-2-20-x1-r1"]
    assert is_complete(cut.parent)


def test_no_run_begins_that_would_not_fit(
    tmp_path: Path, rounds: list[list[PlannedRun]], capsys: pytest.CaptureFixture[str]
) -> None:
    machine = Machine(seconds=14)
    machine.measure(tmp_path / "out", rounds[:2], deadline=50)
    # 14 s each, though the plan says 10: after three, 42 s are gone, and the second fp32 would take 14 more.
    assert len(machine.begun) == 3
    assert machine.allowed == [50, 36, 22]
    assert "gelu-fp32-2-20-x1-r2: no time left" in capsys.readouterr().out


def test_what_is_kept_is_what_the_plan_knows_and_what_is_complete(tmp_path: Path) -> None:
    found, archive = tmp_path / "found", tmp_path / "kept" / PACKED
    write_run(found / "a", run_id="a", steps=20)
    write_run(found / "b", run_id="b", steps=20)
    write_run(found / "unknown", run_id="unknown", steps=20)
    assert keep(found, archive, dict.fromkeys(("a", "b", "never"))).added == ("a", "b")
    first = archive.read_bytes()

    shutil.rmtree(found / "b")
    write_run(found / "b", run_id="b", steps=30)
    (cut,) = (found / "a").glob("rank-*")
    cut.write_bytes(cut.read_bytes()[:-100])
    kept = keep(found, archive, dict.fromkeys("ab"))
    assert (kept.num_runs, kept.added, kept.dropped) == (2, ("b",), ())

    kept = keep(tmp_path / "nothing", archive, {"b": None})
    assert (kept.num_runs, kept.added, kept.dropped) == (1, (), ("a",))
    with tarfile.open(archive) as packed:
        (member,) = packed.getmembers()
        file = packed.extractfile(member)
        assert file is not None and member.name == "b/rank-00000-attempt-1.jsonl"
        assert file.read() == (found / member.name).read_bytes()

    again = tmp_path / "again" / PACKED
    for run_id in ("b", "a"):
        write_run(tmp_path / "other" / run_id, run_id=run_id, steps=20)
    keep(tmp_path / "other", again, dict.fromkeys("ab"))
    assert again.read_bytes() == first


def test_a_folder_is_of_one_kind_of_gpu(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    own = 'folder = "two"\ndevice_name = "NVIDIA H100 80GB HBM3"\nsuffix = "h100"'
    plan.write_text('device_name = "NVIDIA H200"\n' + ARMS.replace('folder = "two"', own))
    one, *_, two = (of[0] for of in read_plan(plan))
    assert (one.run_id, two.run_id) == ("gelu-fp32-2-20-x1-r1", "gelu-bf16-2-20-x2-r1-h100")
    meant = {
        name: [is_meant_for(run, name) for run in (one, two)] for name in ("NVIDIA H200", two.device_name)
    }
    assert meant == {"NVIDIA H200": [True, False], "NVIDIA H100 80GB HBM3": [False, True]}
    # Without a GPU the plan can be tried; what comes of it is not kept.
    assert is_meant_for(one, None)
    plan.write_text(ARMS)
    assert is_meant_for(read_plan(plan)[0][0], "NVIDIA H100 80GB HBM3")

    found, archive = tmp_path / "found", tmp_path / "kept" / PACKED
    write_run(found / "a", run_id="a", steps=20, device_name="NVIDIA H200")
    write_run(found / "b", run_id="b", steps=20, device_name="NVIDIA H100 80GB HBM3")
    kept = keep(found, archive, dict.fromkeys("ab", "NVIDIA H200"))
    assert (kept.num_runs, kept.added, kept.foreign) == (1, ("a",), ("b",))
    with tarfile.open(archive) as packed:
        assert packed.getnames() == ["a/rank-00000-attempt-1.jsonl"]


def test_a_run_is_killed_when_its_time_is_up(tmp_path: Path, rounds: list[list[PlannedRun]]) -> None:
    assert "killed" in train(rounds[0][0], tmp_path, [0], seconds=0.2)
    assert not is_complete(tmp_path)


@pytest.mark.full
def test_a_planned_run_trains_and_is_kept(tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(
        '[[runs]]\nfolder = "tiny"\narms = ["vit-tiny/fp32:4", "vit-tiny/bf16,optimizer=adafactor:4@12"]\n'
        'rounds = [2]\nsteps = 20\narguments = ["--data", "loader"]\nseconds_per_run = 10\n'
    )
    root = MEASUREMENTS.parents[1]
    paths = os.pathsep.join(str(root / part) for part in ("train", "tests", "launcher"))

    def benchmark(name: str, *arguments: object) -> str:
        return subprocess.run(
            [sys.executable, "-m", f"benchmarks.{name}", "--plan", str(plan), *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert benchmark("measure", "--output", tmp_path, "--gpus", 2).count("s in all") == 2
    (path,) = (tmp_path / "tiny" / "vit-tiny-bf16-optimizer-adafactor-4-12-x1-r2").glob("rank-*")
    header = read_record(path).header
    assert (header["seed"], header["steps"], header["data"]) == (2, 12, "loader")
    assert (header["batch_size_per_gpu"], header["recipe"]["optimizer"]) == (4, "adafactor")

    kept = benchmark("keep", tmp_path, "--measurements", tmp_path / "measurements")
    assert "tiny: 2 of 2 runs" in kept


def test_the_summaries_that_ship_are_those_of_the_records(tmp_path: Path) -> None:
    expected = []
    for recipe, step_time_s in (("bf16", 0.14), ("te-fp8", 0.09)):
        paths = write_run(tmp_path / recipe, run_id=recipe, recipe=recipe, step_time_s=step_time_s)
        expected.append(summarize([read_record(path) for path in paths]))
    write_summaries(tmp_path)
    assert list(read_summaries(tmp_path / "summaries.json").values()) == expected


def test_two_runs_of_one_id_are_not_shipped(tmp_path: Path) -> None:
    for name, step_time_s in (("x1", 0.14), ("x2", 0.09)):
        write_run(tmp_path / name, run_id="20261121-090312-k3f9", step_time_s=step_time_s)
    with pytest.raises(BadFile):
        write_summaries(tmp_path)
    assert not (tmp_path / "summaries.json").exists()

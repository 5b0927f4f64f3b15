"""The command that runs a script and completes its records, whatever the script does."""

import os
import shutil
import signal
import tarfile
import time
from pathlib import Path

import pytest
from scripts import record, run, start

from fastlaunch.measure.record_files import read_record
from fastlaunch.measure.summarize import summarize
from fastlaunch_train.recipes.recipe import RecipeError
from fastlaunch_train.records.records import Device
from fastlaunch_train.script.__main__ import main, script_name, under_torchrun, with_folders
from fastlaunch_train.script.checkpoints import Note, Packer, restore, steps_done, write_note
from fastlaunch_train.script.devices import parse_sample

NVIDIA_SMI = """#!/bin/sh
case "$*" in
*name*) echo "NVIDIA H200, 143771, 580.65.06, 700.00, 1980"; exit;;
esac
while :; do echo "0, 87, 20480, 512.5"; echo "1, [N/A], 10240, 500.0"; sleep 0.1; done
"""


def test_a_script_that_records_nothing_gets_a_record_of_its_time(tmp_path: Path) -> None:
    body = """
    import os, time
    open(os.path.join(os.environ["FASTLAUNCH_OUTPUT"], "model.bin"), "w").close()
    time.sleep(0.3)
    print(os.getcwd())
    """
    assert run(tmp_path, body, FASTLAUNCH_RUN_ID="r1") == (0, f"{tmp_path}\n")
    assert [path.name for path in (tmp_path / "run" / "output").iterdir()] == ["model.bin"]
    found = record(tmp_path)
    assert (found.header["run_id"], found.header["workload"]["name"]) == ("r1", "train.py")
    assert [phase.name for phase in found.phases] == ["script"]
    assert found.end is not None and found.end.status == "completed"
    summary = summarize([found])
    assert summary.problems == ()
    assert summary.figures.total_time_s is not None and summary.figures.total_time_s >= 0.3
    assert summary.timing.step_time_s is None


def test_gpus_are_sampled_from_outside_and_a_script_without_steps_does_not_hang(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(NVIDIA_SMI)
    tool.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    assert run(tmp_path, "import time; time.sleep(0.5)", "--hang-timeout", "0.1", PATH=path) == (0, "")
    found = record(tmp_path)
    machine = found.header["machine"]
    assert (machine["device_type"], machine["device_name"]) == ("cuda", "NVIDIA H200")
    assert (machine["power_limit_w"], machine["max_clock_mhz"]) == (700.0, 1980.0)
    assert {(line.gpu, line.utilization, line.memory_gib) for line in found.devices} == {
        (0, 0.87, 20.0),
        (1, None, 10.0),
    }
    summary = summarize([found])
    assert (summary.timing.utilization, summary.peak_memory_gib) == (pytest.approx(0.87), 20.0)


def test_a_line_of_nvidia_smi_is_a_sample_or_nothing() -> None:
    sample = parse_sample("3, 5, 1024, [N/A]\n", 1.23)
    assert sample == Device(at_s=1.2, gpu=3, utilization=0.05, memory_gib=1.0, power_w=None)
    assert parse_sample("No devices were found\n", 0.0) is None


STEPS = "import fastlaunch_train as fl, os, sys, time\nfor x in fl.steps(range(30)): pass\n"


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("raise ValueError('no such data')", 1, "exit code 1"),
        (f"{STEPS}sys.exit(5)", 5, "exit code 5"),
        (f"{STEPS}raise ValueError('no such data')", 1, "ValueError: no such data"),
        (f"{STEPS}raise MemoryError", 1, "MemoryError: MemoryError"),
        (f"{STEPS}os._exit(7)", 7, "exit code 7"),
        (f"{STEPS}os.kill(os.getpid(), 11)", 139, "killed by SIGSEGV"),
        ("import fastlaunch_train as fl, os\nfl.step()\nos._exit(9)", 9, "exit code 9"),
    ],
)
def test_a_script_that_dies_has_its_exit_code_and_its_traceback(
    tmp_path: Path, body: str, code: int, message: str
) -> None:
    ended, output = run(tmp_path, body)
    assert ended == code
    assert ("Traceback" in output) == ("raise" in body)
    end = record(tmp_path).end
    assert end is not None and end.message == message
    assert end.status == ("out_of_memory" if "MemoryError" in body else "failed")
    assert end.num_steps == len(record(tmp_path).steps)
    assert summarize([record(tmp_path)]).problems != ()


def test_a_script_that_stops_to_make_steps_is_ended(tmp_path: Path) -> None:
    code, output = run(
        tmp_path, f"{STEPS}time.sleep(60)", "--hang-timeout", "0.3", FASTLAUNCH_STOP_GRACE_S="0.2"
    )
    assert code == 124
    end = record(tmp_path).end
    assert end is not None and (end.status, end.message) == ("failed", "no step for 0.3 s")
    assert "--hang-timeout" in output


@pytest.mark.slow
def test_a_process_that_the_script_leaves_behind_is_ended(tmp_path: Path) -> None:
    body = """
    import os, subprocess, sys
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    print(left.pid)
    """
    code, output = run(tmp_path, body)
    assert code == 0
    deadline = time.monotonic() + 10
    while _is_alive(int(output.split()[0])):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_what_the_script_prints_and_writes_is_left_as_it_is(tmp_path: Path) -> None:
    body = """
    import os, sys
    with open(os.path.join(os.environ["FASTLAUNCH_OUTPUT"], "large"), "wb") as file:
        file.truncate(8 * 2**30)
    sys.stdout.buffer.write(bytes(range(256)) * 4)
    """
    code, printed = run(tmp_path, body)
    assert (code, printed) == (0, "".join(map(chr, range(256))).replace("\r", "\n") * 4)
    assert (tmp_path / "run" / "output" / "large").stat().st_size == 8 * 2**30
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        "output",
        "rank-00000-attempt-1.jsonl",
    ]


def test_a_script_that_knows_no_fastlaunch_is_stopped_by_the_signal(tmp_path: Path) -> None:
    process = start(tmp_path, "print('ready')\nimport time\ntime.sleep(60)")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 130
    end = record(tmp_path).end
    assert end is not None and (end.status, end.message) == ("interrupted", "stopped by SIGTERM")


@pytest.mark.slow
def test_a_script_that_ignores_a_signal_is_killed(tmp_path: Path) -> None:
    body = """
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready")
    time.sleep(60)
    """
    # On top of the grace the ranks and torchrun have five seconds each.
    process = start(tmp_path, body, FASTLAUNCH_STOP_GRACE_S="0.1")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 130


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python train.py --lr 1", "train.py"),
        ("/usr/bin/python3.11 -u src/train.py", "train.py"),
        ("python -m timm.train data", "timm.train"),
        ("accelerate launch train.py", "accelerate"),
        ("./train.sh", "train.sh"),
    ],
)
def test_a_command_is_called_by_its_script(command: str, name: str) -> None:
    assert script_name(command.split()) == name


@pytest.mark.parametrize(
    ("word", "becomes"),
    [
        ("$FASTLAUNCH_OUTPUT", "/a b"),
        ("--output=$FASTLAUNCH_OUTPUT/model", "--output=/a b/model"),
        ("$FASTLAUNCH_OTHER", "$FASTLAUNCH_OTHER"),
        ("$FASTLAUNCH_OUTPUTS", "$FASTLAUNCH_OUTPUTS"),
        ('cd / && echo "$FASTLAUNCH_OUTPUT"', 'cd / && echo "$FASTLAUNCH_OUTPUT"'),
        ("$HOME", "$HOME"),
    ],
)
def test_a_word_may_name_a_folder_of_ours(word: str, becomes: str) -> None:
    environment = {"FASTLAUNCH_OUTPUT": "/a b", "HOME": "/root"}
    assert with_folders(["python", word], environment) == ["python", becomes]


def test_torchrun_starts_python_scripts_alone() -> None:
    launcher = ["-m", "fastlaunch_train.process.torchrun", "--nproc-per-node=2"]
    assert under_torchrun(["python", "-u", "train.py", "-x"], "2") == [
        "python",
        "-u",
        *launcher,
        "train.py",
        "-x",
    ]
    assert under_torchrun(["python", "-m", "a.b"], "2") == ["python", *launcher, "-m", "a.b"]
    for command in (["bash", "x.sh"], ["python"], ["python", "-c", "1"], ["python", "-m"]):
        with pytest.raises(RecipeError):
            under_torchrun(command, "gpu")


@pytest.mark.parametrize("arguments", [("--nproc", "0"), ("--nproc", "all"), ("--hang-timeout", "-1")])
def test_a_bad_request_is_refused(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--output", str(tmp_path / "run"), *arguments, "--", "true"])
    assert not (tmp_path / "run").exists()


def _is_alive(pid: int) -> bool:
    try:
        # Not a zombie, for which nobody may wait here.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


#: Trains to a sum, is hit once, and goes on from what it saved.
SAVES = """
import os, pathlib, signal, sys, time
import fastlaunch_train as fl
from fastlaunch_train.script import recording
recording.CHECKPOINT_EVERY_S = 0.0
kept = pathlib.Path(os.environ["FASTLAUNCH_OUTPUT"], "state")
first, total = map(int, kept.read_text().split()) if kept.exists() else (1, 0)
for step in fl.steps(range(first, 101), num_samples=1):
    time.sleep(0.005)
    total += step
    if step == 60 and first == 1:
        os.kill({hit})
    if fl.checkpoint_due():
        kept.write_text("half")
        time.sleep(0.05 if first == 1 else 0)
        kept.write_text(f"{step + 1} {total}")
    if fl.stop_requested():
        sys.exit()
(kept.parent / "result").write_text(str(total))
"""


@pytest.mark.parametrize(
    "hit, ends_with", [("os.getppid(), signal.SIGTERM", 130), ("os.getpid(), signal.SIGKILL", 137)]
)
def test_another_machine_goes_on_with_what_a_script_saved(tmp_path: Path, hit: str, ends_with: int) -> None:
    body = SAVES.replace("{hit}", hit)
    code, output = run(tmp_path, body, "--checkpoints")
    assert code == ends_with, output
    (packed,) = (tmp_path / "run" / "checkpoints").iterdir()
    other = tmp_path / "other"
    (other / "run" / "checkpoints").mkdir(parents=True)
    shutil.copy(packed, other / "run" / "checkpoints")
    code, output = run(other, body, "--checkpoints", "--resume", FASTLAUNCH_ATTEMPT="2")
    assert code == 0, output
    assert (other / "run" / "output" / "result").read_text() == str(sum(range(1, 101)))
    one, two = record(tmp_path), read_record(other / "run" / "rank-00000-attempt-2.jsonl")
    assert two.header["first_step"] == int(packed.stem[5:]) + 1 > 1
    # What the signal had it save counts too.
    assert ends_with == 137 or two.header["first_step"] == one.steps[-1].step + 1
    assert "restore" in [phase.name for phase in two.phases]
    summary = summarize([one, two])
    assert (summary.num_steps, summary.status, summary.problems) == (100, "completed", ())


def test_what_is_packed_is_what_all_ranks_have_saved(tmp_path: Path) -> None:
    packer = Packer(tmp_path, print)
    weights = tmp_path / "output" / "weights"
    weights.parent.mkdir()

    def packed(text: str, *noted: Note) -> dict[str, bytes]:
        weights.write_text(text)
        for rank, note in enumerate(noted):
            write_note(tmp_path, rank, note)
        packer.look()
        found = {}
        for path in (tmp_path / "checkpoints").glob("*"):
            with tarfile.open(path) as archive:
                file = archive.extractfile("output/weights")
                found[path.name] = file.read() if file else b""
        return found

    assert packed("begun") == {}
    assert packed("half", Note(step=0, is_saving=True), Note(step=0)) == {}
    first = {"step-00000010.tar": b"ten"}
    assert packed("ten", Note(step=10), Note(step=10)) == first
    assert packed("half", *[Note(step=10, is_saving=True)] * 2) == first
    assert packed("half", Note(step=10), Note(step=20)) == first
    assert packed("half", Note(step=10, is_saving=True), Note(step=20)) == first
    packer.pack()
    second = {"step-00000020.tar": b"twenty"}
    assert packed("twenty", Note(step=20), Note(step=20)) == second
    packer.pack()  # it has not changed
    assert packed("twenty", Note(step=20), Note(step=20)) == second
    weights.write_text("later")
    packer.pack()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000021.tar"]
    shutil.rmtree(tmp_path / "output")
    assert restore(tmp_path) is not None
    assert (weights.read_text(), steps_done(tmp_path)) == ("later", 20)

"""What a user's script calls, in scripts without torch: steps, samples, losses, evaluations, ends."""

import dataclasses
import subprocess
import sys
from collections import UserDict, namedtuple
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from scripts import environment, record, run, script, start

from fastlaunch.core.data import to_data
from fastlaunch.measure.record_files import read_record
from fastlaunch.measure.summarize import summarize
from fastlaunch.measure.summary import read_summary
from fastlaunch_train.loop.counting import SampleCounter
from fastlaunch_train.script.recording import Recording
from fastlaunch_train.script.settings import read_settings

LOADER = """
    import os, signal, sys, time
    import fastlaunch_train as fl

    class Loader(list):
        batch_size = 4

    loader = Loader([number] * 4 for number in range(30))
"""


def test_outside_of_fastlaunch_nothing_is_written_and_torch_is_not_imported(tmp_path: Path) -> None:
    body = f"""{LOADER}
    assert fl.steps(loader) is loader
    fl.step(loss=float("nan"))
    fl.evaluate(loss=1.0, accuracy=0.5)
    assert not fl.checkpoint_due() and not fl.stop_requested()
    assert "torch" not in sys.modules and "numpy" not in sys.modules
    """
    path = script(tmp_path, body)
    subprocess.run([sys.executable, str(path)], cwd=tmp_path, env=environment(), check=True)
    assert list(tmp_path.iterdir()) == [path]


def test_a_loop_over_steps_is_recorded(tmp_path: Path) -> None:
    body = f"""{LOADER}
    print(len(fl.steps(loader)))
    for batch in fl.steps(loader):
        time.sleep(0.002)
    assert "torch" not in sys.modules
    """
    code, output = run(tmp_path, body, FASTLAUNCH_VARIANT='{"amp": "bf16", "lr": 1e-3}')
    assert (code, output) == (0, "30\n")
    found = record(tmp_path)
    header = found.header
    assert header["workload"]["name"] == "train.py"
    assert header["recipe"] == {"name": "script", "label": "amp=bf16 lr=1e-3", "precision": "unknown"}
    assert header["script"]["variant"] == {"amp": "bf16", "lr": "1e-3"}
    assert header["files"].keys() == {"train.py"}
    assert header["script"]["command"][1:] == [str(tmp_path / "train.py"), "--lr", "1e-3"]
    assert (header["batch_size_per_gpu"], header["steps"], header["seed"]) == (4, None, None)
    assert [step.num_samples for step in found.steps] == [4] * 30
    assert all(step.step_time_s >= 0.002 > step.data_wait_s and step.loss is None for step in found.steps)
    assert [block.last_step for block in found.blocks][:2] == [1, 10]
    assert found.end and (found.end.status, found.end.num_steps) == ("completed", 30)
    summary = summarize([found])
    assert summary.problems == ()
    assert (summary.setup.recipe, summary.setup.variant) == (
        "amp=bf16 lr=1e-3",
        {"amp": "bf16", "lr": "1e-3"},
    )
    assert summary.timing.samples_per_step == 4


@pytest.mark.parametrize(
    ("call", "samples", "num_steps"),
    [
        ("fl.steps(iter(range(30)), 3)", 3, 30),
        ("fl.steps(loader, accumulate=3)", 12, 10),
        ("fl.steps(loader, num_samples=5, accumulate=5)", 25, 6),
    ],
)
def test_samples_are_the_arguments_or_those_of_the_batches(
    tmp_path: Path, call: str, samples: int, num_steps: int
) -> None:
    assert run(tmp_path, f"{LOADER}\n    for batch in {call}: pass")[0] == 0
    found = record(tmp_path)
    assert [step.num_samples for step in found.steps] == [samples] * num_steps
    assert found.header["batch_size_per_gpu"] == samples


def test_a_short_batch_counts_as_it_came_and_the_row_keeps_the_loaders_size(tmp_path: Path) -> None:
    body = f"""{LOADER}
    loader[2:] = [["a", "b"], object()]
    for epoch in range(3):
        for batch in fl.steps(loader, accumulate=2 if epoch else 1):
            if epoch == 2 and batch is loader[1]:
                fl.step(num_samples=7)
    """
    assert run(tmp_path, body)[0] == 0
    found = record(tmp_path)
    # A step with a batch that nobody can count is not known as a whole.
    assert [step.num_samples for step in found.steps] == [4, 4, 2, None, 8, None, 7, None]
    assert found.header["batch_size_per_gpu"] == 4


@dataclasses.dataclass
class Pair:
    name: str
    x: Any


Fields = namedtuple("Fields", "step x")
IMAGES = (torch.zeros(3, 8, 8), torch.zeros(3, 9, 9))
PACKED = torch.nn.utils.rnn.pack_sequence([torch.zeros(7, 2), torch.zeros(5, 2)])


def ragged() -> torch.Tensor:
    """Return a batch of two. The first nested tensor imports the compiler, which takes seconds."""
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("batch", "nominal", "samples"),
    [
        (torch.zeros(5, 2), 8, 5),
        ([torch.zeros(5, 2), torch.zeros(9)], None, 5),
        ({"weight": torch.tensor(1.0), "x": numpy.zeros((5, 2))}, None, 5),
        (UserDict(input_ids=torch.zeros(5, 2)), None, 5),  # as a BatchEncoding
        ((0, Pair("a", {"x": [torch.zeros(5)]})), None, 5),
        (Fields(1, torch.zeros(5)), None, 5),
        (ragged, None, 2),
        (torch.zeros(0, 2), 8, 0),
        (["a", "b"], 8, 2),
        ({"text": ["a", "b", "c"], "more": []}, None, 3),
        ([("a", "b", "c"), ("d", "e", "f")], None, 3),
        ([[1, 2, 3], [4]], None, 2),
        ([{"text": "a"}, {"text": "b"}], None, 2),
        (range(7), 8, 7),
        # Images that no `collate_fn` stacked: three channels are not three samples.
        ([torch.zeros(3, 8, 8), torch.zeros(3, 9, 8)] * 5, 64, None),
        ([torch.zeros(3, 8, 8)] * 5, None, None),
        ((0, [torch.zeros(3, 8, 8)] * 5), None, None),  # as of enumerate
        ([(torch.zeros(3, 8, 8), 1), (torch.zeros(3, 9, 8), 0)], None, None),
        ([{"image": torch.zeros(3, 8, 8)}] * 5, None, None),
        ([(torch.zeros(5), torch.zeros(1))] * 4, 8, None),
        (((torch.zeros(5),), (torch.zeros(1),)), None, None),
        ((IMAGES, ({}, {})), None, None),
        ([torch.zeros(3, 4)] * 3, 3, None),
        ([torch.zeros(3), torch.zeros(4)] * 4, None, 8),
        ([{"ids": torch.zeros(3)}, {"ids": torch.zeros(4)}] * 4, 64, 8),
        ([torch.zeros(5, 2), torch.zeros(5, 2)], 5, 5),
        ((torch.zeros(5, 2), torch.zeros(5, 2)), None, 5),
        # The first tensor has no row for each sample.
        ({"epoch": torch.tensor([1]), "x": torch.zeros(8, 2)}, 8, 8),
        (PACKED, 64, 2),
        (PACKED, None, 2),
        (torch.zeros(20, 8), 8, None),
        ((torch.zeros(6, 8), torch.zeros(7, 8)), 8, None),
        ((torch.zeros(6, 8), torch.zeros(7, 8)), None, None),
        ((IMAGES, ({}, {})), 2, 2),
        (list(IMAGES), 2, 2),
        (torch.tensor(1.0), 8, None),
        (("a", "b"), 8, None),
        ("text", 4, None),
        (object(), 8, None),
        (7, 8, None),
    ],
)
def test_the_samples_of_a_batch(batch: object, nominal: int | None, samples: int | None) -> None:
    assert SampleCounter(nominal).count(ragged() if batch is ragged else batch) == samples


@pytest.mark.parametrize(
    ("batches", "nominal", "samples"),
    [
        ([(IMAGES, ({}, {})), (IMAGES[:1], ({},))], 2, [2, 1]),
        ([[torch.zeros(3, 4)] * 3, [torch.zeros(3, 4)]], 3, [None, None]),
        ([[torch.zeros(3, 4)] * 4, [torch.zeros(3, 4)]], 4, [4, 1]),
        ([[torch.zeros(3, 4)] * 4, [torch.zeros(3, 4)]], None, [None, None]),
        ([[torch.zeros(3), torch.zeros(4)], [torch.zeros(5)]], None, [2, 1]),
        ([[torch.zeros(size) for size in sizes] for sizes in ((3, 4, 9), (4, 9))], 3, [3, 2]),
        ([{"epoch": torch.zeros(1), "x": torch.zeros(size)} for size in (8, 5)], 8, [8, 5]),
        ([torch.zeros(size, 2) for size in (8, 20)], 8, [8, None]),
    ],
)
def test_the_last_batch_is_counted_as_the_others_were(
    batches: list[object], nominal: int | None, samples: list[int | None]
) -> None:
    counter = SampleCounter(nominal)
    assert [counter.count(batch) for batch in batches] == samples


@pytest.mark.parametrize(
    ("number", "samples"),
    [
        ("numpy.int64(7)", 7),
        ("torch.tensor(7)", 7),
        ("torch.tensor([7.0])", 7),
        ("0", 0),
        ("2.5", "TypeError: num_samples is 2.5, not a whole number"),
        ("torch.tensor([7, 7])", "TypeError: num_samples is tensor([7, 7]), not a whole number"),
        ("'x'", "TypeError: num_samples is 'x', not a whole number"),
        ("-1", "ValueError: num_samples is -1, but must be at least 0"),
    ],
)
def test_samples_are_whole_numbers_of_any_type(tmp_path: Path, number: str, samples: int | str) -> None:
    settings = read_settings({"FASTLAUNCH_RECORDS": str(tmp_path)}, script="train.py", command=[])
    assert settings is not None
    recording = Recording(settings)
    given = eval(number, {"torch": torch, "numpy": numpy})
    if isinstance(samples, str):
        with pytest.raises((TypeError, ValueError)) as error:
            recording.step(given)
        assert f"{error.type.__name__}: {error.value}" == samples
    else:
        for _ in range(3):
            recording.step(given)
    recording.finish()
    found = read_record(tmp_path / "rank-00000-attempt-1.jsonl")
    assert [step.num_samples for step in found.steps] == ([] if isinstance(samples, str) else [samples] * 2)
    assert found.header["batch_size_per_gpu"] == (samples if samples == 7 else None)


def test_what_is_between_two_loops_is_no_steps_and_their_last_may_be_short(tmp_path: Path) -> None:
    body = f"""{LOADER}
    for epoch in range(2):
        for batch in fl.steps(loader, accumulate=8):
            pass
        time.sleep(0.2)
    """
    assert run(tmp_path, body)[0] == 0
    found = record(tmp_path)
    assert [step.num_samples for step in found.steps] == [32, 32, 32, 24] * 2
    assert max(step.step_time_s for step in found.steps) < 0.2
    assert [(phase.step, phase.seconds > 0.2) for phase in found.phases if phase.name == "between loops"] == [
        (4, True)
    ]


def test_a_batch_at_which_the_loop_is_left_makes_no_step(tmp_path: Path) -> None:
    body = f"""{LOADER}
    for epoch in range(2):
        for number, batch in enumerate(fl.steps(loader)):
            if number == 15:
                break
        time.sleep(0.2)
        fl.evaluate(loss=1.0)
    """
    assert run(tmp_path, body)[0] == 0
    found = record(tmp_path)
    assert [step.num_samples for step in found.steps] == [4] * 30
    assert [line.step for line in found.evals] == [15, 30]
    assert max(step.step_time_s for step in found.steps) < 0.2


def test_a_loop_of_one_step_may_be_within_a_loop_of_steps(tmp_path: Path) -> None:
    body = f"""{LOADER}
    for number in range(20):
        for batch in fl.steps(loader[:2], num_samples=4, accumulate=2):
            pass
        time.sleep(0.01)
    """
    assert run(tmp_path, body)[0] == 0
    found = record(tmp_path)
    assert [step.num_samples for step in found.steps] == [8] * 20
    assert min(step.step_time_s for step in found.steps[1:]) > 0.01


def test_a_run_of_unknown_samples_is_fit_and_has_a_step_time(tmp_path: Path) -> None:
    run(tmp_path, f"{LOADER}\n    for batch in fl.steps(range(30)): time.sleep(0.001)")
    found = record(tmp_path)
    assert [step.num_samples for step in found.steps] == [None] * 30
    assert found.header["batch_size_per_gpu"] is None
    summary = summarize([found])
    assert summary.problems == ()
    assert summary.timing.samples_per_step is None and summary.timing.step_time_s is not None
    assert read_summary(to_data(summary)) == summary


def test_the_first_step_starts_the_clock_and_a_loss_may_be_told(tmp_path: Path) -> None:
    body = f"""{LOADER}
    time.sleep(0.3)
    for number in range(21):
        fl.step(num_samples=2, loss=number / 10)
    """
    assert run(tmp_path, body)[0] == 0
    found = record(tmp_path)
    assert [step.loss for step in found.steps] == [number / 10 for number in range(1, 21)]
    assert sum(block.wall_s for block in found.blocks) < 0.3
    assert found.header["batch_size_per_gpu"] == 2


def test_a_step_in_the_loop_ends_it_once_and_an_evaluation_after_it_is_not_in_its_time(
    tmp_path: Path,
) -> None:
    body = f"""{LOADER}
    for number, batch in enumerate(fl.steps(loader, accumulate=2)):
        if number % 2:
            fl.step(loss=1.0)
        if number % 20 == 19:
            time.sleep(0.2)
            fl.evaluate(loss=0.5, accuracy=0.75, num_samples=100)
    fl.evaluate(f1=0.5, split="test")
    """
    assert run(tmp_path, body)[0] == 0
    found = record(tmp_path)
    assert [(step.loss, step.num_samples) for step in found.steps] == [(1.0, 8)] * 15
    first, second = found.evals
    assert (first.step, first.loss, first.metric, first.metric_value) == (10, 0.5, "accuracy", 0.75)
    assert first.num_samples == 100
    assert first.seconds > 0.2 > sum(block.wall_s for block in found.blocks)
    assert (second.step, second.split, second.metric, second.loss) == (15, "test", "f1", None)
    assert (first.has_loss, second.has_loss) == (None, False)


def test_an_evaluation_within_a_step_takes_no_time_of_its_own(tmp_path: Path) -> None:
    body = f"""{LOADER}
    fl.evaluate(loss=3.0)
    for number, batch in enumerate(fl.steps(loader)):
        if number == 4:
            time.sleep(0.05)
            fl.evaluate(loss=2.0)
    """
    assert run(tmp_path, body)[0] == 0
    found = record(tmp_path)
    assert [(line.step, line.seconds) for line in found.evals] == [(0, 0.0), (4, 0.0)]
    assert found.steps[4].step_time_s > 0.05


def test_the_wait_for_data_is_the_loaders(tmp_path: Path) -> None:
    body = f"""{LOADER}
    def slow():
        for number in range(5):
            time.sleep(0.02)
            yield number
    for batch in fl.steps(slow()):
        time.sleep(0.01)
    """
    assert run(tmp_path, body)[0] == 0
    assert all(0.02 <= step.data_wait_s < step.step_time_s - 0.009 for step in record(tmp_path).steps)


@pytest.mark.slow
def test_steps_that_become_slower_do_not_make_a_block_longer(tmp_path: Path) -> None:
    body = f"""{LOADER}
    for number in range(24):
        fl.step()
        time.sleep(0.001 if number < 12 else 0.5)
    """
    assert run(tmp_path, body)[0] == 0
    assert max(block.wall_s for block in record(tmp_path).blocks) < 4


def test_a_loss_that_is_not_finite_ends_the_script(tmp_path: Path) -> None:
    body = f"""{LOADER}
    for number in range(1000):
        fl.step(loss=float("nan") if number == 5 else 1.0)
        time.sleep(0.001)
    """
    code, output = run(tmp_path, body)
    assert code == 33
    end = record(tmp_path).end
    assert end is not None and end.status == "nan_loss"
    assert end.message is not None and end.message in output
    assert [step.loss for step in record(tmp_path).steps][:6] == [1.0, 1.0, 1.0, 1.0, None, 1.0]


@pytest.mark.parametrize("loop", ["range(8)", "fl.steps(range(8))"])
def test_a_loss_that_is_not_finite_in_the_last_block_is_the_runs_end(tmp_path: Path, loop: str) -> None:
    body = f"""{LOADER}
    for number in {loop}:
        fl.step(loss=float("nan") if number == 7 else 1.0)
    """
    assert run(tmp_path, body)[0] == 0
    end = record(tmp_path).end
    assert end is not None and end.status == "nan_loss"
    assert end.message is not None and end.message.startswith("the loss was not finite between steps")


STOPPED = {
    "unprepared": """
    while True:
        fl.step(); time.sleep(0.01)
    """,
    "asks": """
    while not fl.stop_requested():
        fl.step(); time.sleep(0.01)
    print("saved")
    """,
    "saves": """
    for batch in fl.steps(iter(int, 1)):
        time.sleep(0.01)
        if fl.checkpoint_due():
            time.sleep(0.05)
            print("saved")
    """,
}


@pytest.mark.parametrize(
    ("kind", "number"), [("unprepared", 15), ("unprepared", 2), ("asks", 15), ("saves", 15)]
)
def test_a_signal_ends_a_script_between_two_steps(tmp_path: Path, kind: str, number: int) -> None:
    process = start(tmp_path, f"{LOADER}\n    fl.step(); print('ready')\n{STOPPED[kind]}")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(number)
    output = process.communicate(timeout=30)[0]
    assert process.returncode == 130, output
    assert ("saved" in output) == (kind != "unprepared")
    found = record(tmp_path)
    name = {15: "SIGTERM", 2: "SIGINT"}[number]
    assert found.end and (found.end.status, found.end.message) == ("interrupted", f"stopped by {name}")
    assert [phase.name for phase in found.phases][:-1] == (["checkpoint"] if kind == "saves" else [])


def test_a_forked_child_leaves_the_record_and_the_signals_alone(tmp_path: Path) -> None:
    body = f"""{LOADER}
    for batch in fl.steps(loader):
        if batch[0] == 5:
            child = os.fork()
            if child == 0:
                fl.step(loss=7.0)
                time.sleep(60)
            time.sleep(0.1)
            os.kill(child, signal.SIGTERM)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    print(fl.stop_requested())
    """
    assert run(tmp_path, body) == (0, "-15\nFalse\n")
    found = record(tmp_path)
    assert len(found.steps) == 30 and all(step.loss is None for step in found.steps)


def test_a_job_of_ones_own_records_into_the_output_and_again_as_another_attempt(tmp_path: Path) -> None:
    path = script(tmp_path, f"{LOADER}\n    for batch in fl.steps(loader): pass\n    sys.exit(3)")
    for _ in range(2):
        subprocess.run(
            [sys.executable, str(path)], env=environment(FASTLAUNCH_OUTPUT=str(tmp_path / "out")), check=False
        )
    first, second = sorted((tmp_path / "out").iterdir())
    assert read_record(first).header["run_id"] == "out"
    assert (read_record(first).header["attempt"], read_record(second).header["attempt"]) == (1, 2)


def test_a_record_of_ones_own_job_names_the_script_and_what_it_imported(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    folder = tmp_path / "a"
    (folder / "lib").mkdir(parents=True)
    (folder / "lib" / "net.py").touch()
    (folder / "unused.py").touch()
    path = script(folder, f"    import lib.net, json\n{LOADER}\n    for batch in fl.steps(loader): pass")
    output = str(tmp_path / "out")
    subprocess.run(
        [sys.executable, path.name], cwd=folder, env=environment(FASTLAUNCH_OUTPUT=output), check=True
    )
    (only,) = (tmp_path / "out").iterdir()
    header = read_record(only).header
    assert header["workload"]["name"] == "a/train.py"
    assert {*header["files"]} == {"a/train.py", "a/lib/net.py"}


@pytest.mark.parametrize(
    "call", ["fl.steps(loader, accumulate=0)", "fl.evaluate(accuracy=1, f1=1)", "fl.evaluate()"]
)
def test_a_senseless_call_is_an_error_everywhere(tmp_path: Path, call: str) -> None:
    path = script(tmp_path, f"{LOADER}\n    {call}")
    done = subprocess.run(
        [sys.executable, str(path)], env=environment(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith(("ValueError: ", "TypeError: "))


def test_a_second_script_of_a_command_is_not_recorded_and_the_run_warns_of_it(tmp_path: Path) -> None:
    body = f"""{LOADER}
    import subprocess
    for batch in fl.steps(loader):
        pass
    if "second.py" not in sys.argv[0]:
        open("second.py", "w").write(open(sys.argv[0]).read())
        subprocess.run([sys.executable, "second.py"])
    """
    code, output = run(tmp_path, body)
    assert code == 0 and "this process is not recorded" in output
    summary = summarize([record(tmp_path)])
    assert summary.problems == ()
    assert len(summary.uncounted) == 1 and "1 process of second.py" in summary.uncounted[0]
    assert [path for path in (tmp_path / "run").iterdir() if path.is_file()] == [record(tmp_path).path]


def test_a_record_that_cannot_be_written_does_not_stop_the_script(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = script(tmp_path, f"{LOADER}\n    for batch in fl.steps(loader): pass\n    print('done')")
    done = subprocess.run(
        [sys.executable, str(path)],
        env=environment(FASTLAUNCH_OUTPUT=str(tmp_path / "file")),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "done\n")
    assert "not recorded" in done.stderr


def test_a_disk_that_is_full_ends_the_recording_and_not_the_script(tmp_path: Path) -> None:
    body = f"""{LOADER}
    import resource
    for number in range(2500):
        fl.step()
        if number == 20:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2500, 2500))
    """
    code, output = run(tmp_path, body)
    assert code == 0 and "recorded no further" in output
    found = record(tmp_path)
    assert found.steps and found.steps[-1].step == found.blocks[-1].last_step < 2499

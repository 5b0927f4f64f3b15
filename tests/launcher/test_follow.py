"""Following a record as it grows, and showing it."""

import io
import itertools
import json
import math
import os
import pty
import re
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from attempt_builders import attempt_with
from fake_records import write_run

from fastlaunch.aws.client import Aws
from fastlaunch.aws.types import StoredObject
from fastlaunch.core.errors import Unreachable
from fastlaunch.core.settings import Settings
from fastlaunch.core.terminal import plain_output, report_line
from fastlaunch.lifecycle.display import PlainLines, Progress, ProgressBar, RecordTail, describe, make_display
from fastlaunch.lifecycle.follow import fetch_output
from fastlaunch.lifecycle.world import World
from fastlaunch_train.records.records import BUILD_CHECKS, BUILD_MODEL, BUILD_STEPS

HALF = Progress(step=50, num_steps=100, sample_unit="images", samples_per_s=20.0, loss=2.5, seconds_left=5.0)


def test_tail_reads_only_what_was_added_and_whole_lines(tmp_path: Path) -> None:
    tail = RecordTail(tmp_path / "run")
    assert tail.read() is None
    (path,) = write_run(tmp_path / "whole", steps=30, step_time_s=0.1, batch_size=2)
    lines = path.read_bytes().splitlines(keepends=True)
    growing = tmp_path / "run" / path.name
    growing.parent.mkdir()
    growing.write_bytes(lines[0][:20])
    assert tail.read() is None
    with growing.open("ab") as file:
        file.write(lines[0][20:])
        file.flush()
        assert tail.read() == Progress(step=0, num_steps=30, sample_unit="images")
        is_block = [json.loads(line)["kind"] == "block" for line in lines]
        after_two_blocks = [number for number, block in enumerate(is_block) if block][1] + 1
        file.write(b"".join(lines[1:after_two_blocks]) + lines[after_two_blocks][:5])
        file.flush()
        # Known answer: constant 0.1 s steps at batch 2 are 20 samples/s; ten steps of 0.1 s are left.
        progress = tail.read()
        assert progress is not None
        assert (progress.step, progress.num_steps, progress.loss) == (20, 30, 2.0 + 1 / 20)
        assert progress.samples_per_s is not None and abs(progress.samples_per_s - 20) < 1e-9
        assert progress.seconds_left is not None and abs(progress.seconds_left - 1) < 1e-9
        assert tail.read() == progress
        file.write(lines[after_two_blocks][5:])
    now = tail.read()
    assert now is not None and now.step == 21


def test_tail_survives_a_damaged_line(tmp_path: Path) -> None:
    (path,) = write_run(tmp_path, steps=3)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(
        b"".join([*lines[:2], b"\xff{broken\n", b'{"kind":"step"}\n', b" " * 2**21 + b"\n", *lines[2:]])
    )
    progress = RecordTail(tmp_path).read()
    assert progress is not None and progress.step == 3


@pytest.mark.parametrize("kind", ["header", "phase", "step", "block"])
def test_whatever_a_job_records_is_passed_over_or_shown(tmp_path: Path, kind: str) -> None:
    (path,) = write_run(tmp_path, steps=20)
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    values: list[object] = [None, "x", "\ud800", [], {}, -1, 0, 10**400, 1e308, 5e-324, math.inf, math.nan]
    keys = next(line for line in lines if line["kind"] == kind).keys()
    for key, value in itertools.product(keys, values):
        changed = [{**line, key: value} if line["kind"] == kind else line for line in lines]
        path.write_bytes(b"".join(json.dumps(line).encode() + b"\n" for line in [*changed, value]))
        progress = RecordTail(tmp_path).read()
        assert progress is None or describe(progress)


@pytest.mark.parametrize(("recipe", "last"), [("compile", "compiling"), ("bf16", "warming up")])
def test_what_a_run_does_before_its_steps_follows_from_what_it_has_done(
    tmp_path: Path, recipe: str, last: str
) -> None:
    (path,) = write_run(tmp_path, recipe=recipe, steps=1)
    header = json.loads(path.read_bytes().splitlines()[0])
    for detail, now in ((BUILD_MODEL, "converting"), (BUILD_CHECKS, "preparing"), (BUILD_STEPS, last)):
        phase = {"kind": "phase", "name": "build", "seconds": 5.12, "step": 0, "detail": detail}
        path.write_text(f"{json.dumps(header)}\n{json.dumps(phase)}\n")
        progress = RecordTail(tmp_path).read()
        assert progress is not None
        assert re.fullmatch(rf"before the first step \({now}.*; build took 5.1 s\)", describe(progress))
    phase |= {"name": "fetch", "detail": "1 of 4 files, 4.6 of 15.0 GiB"}
    path.write_text(f"{json.dumps(header)}\n{json.dumps(phase)}\n")
    progress = RecordTail(tmp_path).read()
    assert progress is not None
    assert describe(progress) == "before the first step (fetching weights, 1 of 4 files, 4.6 of 15.0 GiB)"


def test_tail_goes_on_in_a_newer_record(tmp_path: Path) -> None:
    tail = RecordTail(tmp_path)
    for attempt, steps in ((9, 30), (10, 3)):
        write_run(tmp_path, steps=steps, attempt=attempt)
        progress = tail.read()
        assert progress is not None and progress.step == steps


def test_progress_in_words() -> None:
    assert describe(HALF) == "step 50/100, 20.0 images/s, loss 2.500, 5 s left"
    assert describe(replace(HALF, seconds_left=3700.0)).endswith("1:01:40 left")
    assert describe(replace(HALF, seconds_left=95.0)).endswith("1:35 left")
    assert (
        describe(replace(HALF, loss=None, seconds_left=None)) == "step 50/100, 20.0 images/s, loss not finite"
    )
    assert describe(Progress(step=0, num_steps=9)) == "before the first step"
    assert (
        describe(Progress(step=0, num_steps=9, phase="build 1.5 s")) == "before the first step (build 1.5 s)"
    )


def test_what_a_script_does_not_tell_is_left_out() -> None:
    bare = Progress(step=50, num_steps=None, steps_per_s=12.0, has_loss=False)
    assert describe(bare) == "step 50, 12.0 steps/s"
    display, stream, now = plain()
    display.start("as is", None)
    for second in range(12):
        now[0] = float(second)
        display.show(replace(bare, step=50 + second))
    assert [int(found) for found in re.findall(r"step (\d+),", stream.getvalue())] == [50, 55, 60]


def plain() -> tuple[PlainLines, io.StringIO, list[float]]:
    now = [0.0]
    stream = io.StringIO()
    return PlainLines(stream=stream, clock=lambda: now[0]), stream, now


def test_plain_lines_come_every_five_seconds_if_there_is_news() -> None:
    display, stream, now = plain()
    display.start("bf16", 10_000)
    for second in range(60):
        now[0] = float(second)
        display.show(replace(HALF, step=1 + min(second, 20), num_steps=10_000))
    steps = [int(found) for found in re.findall(r"step (\d+)/", stream.getvalue())]
    assert steps == [1, 6, 11, 16, 21]


def on_terminal(label: str, progress: Progress, outcome: str, line: str = "") -> bytes:
    """What a terminal gets of a run, with a line for the user meanwhile."""
    leader, follower = pty.openpty()
    with open(follower, "w", closefd=False) as terminal:
        display = make_display(plain_output(terminal), lambda: 0.0)
        assert isinstance(display, ProgressBar)
        with display:
            display.start(label, 100)
            display.show(progress)
            display._bar.refresh()
            report_line(line)
            display.finish(outcome)
    os.close(follower)
    shown = b""
    # What was written comes through in parts; after the last one Linux says EIO, others nothing.
    with suppress(OSError):
        while part := os.read(leader, 100_000):
            shown += part
    os.close(leader)
    return shown


def test_terminal_gets_a_bar_and_everything_else_plain_lines() -> None:
    shown = on_terminal("[1/2] bf16", HALF, "completed")
    assert b"[1/2] bf16" in shown and b"completed" in shown
    # The bar is drawn anew in its place.
    assert b"\x1b[" in shown
    assert isinstance(make_display(io.StringIO(), lambda: 0.0), PlainLines)


@pytest.mark.parametrize(("outcome", "colour"), [("completed", b"32"), ("failed", b"31")])
def test_a_bar_has_a_clock_and_colours_the_end_unless_told_not_to(
    monkeypatch: pytest.MonkeyPatch, outcome: str, colour: bytes
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    shown = on_terminal("bf16", Progress(step=0, num_steps=100, phase="booting"), outcome)
    assert b"0:00:0" in shown and b"\x1b[" + colour + b"mbf16: " in shown
    monkeypatch.setenv("NO_COLOR", "1")
    assert b"\x1b[" + colour + b"m" not in on_terminal("bf16", HALF, outcome)


def test_what_a_run_says_does_not_steer_the_terminal_of_its_bar() -> None:
    title, reset = "\x1b]0;mine\x07", "\x1bc"
    said = Progress(step=0, num_steps=100, phase=f"node{title}{reset}")
    link = "\x1b]8;;http://evil\x1b\\"
    shown = on_terminal(f"bf16{reset}", said, f"failed{title}{link}", line=f"line{link}{reset}")
    assert b"\x1b]" not in shown and b"\x1bc" not in shown and b"\x07" not in shown
    assert rb"bf16\x1bc" in shown and rb"node\x1b]0;mine\x07\x1bc" in shown
    assert rb"failed\x1b]0;mine\x07" in shown and b"line^[]8;;http" in shown


def test_a_run_of_epochs_starts_without_a_number_of_steps() -> None:
    display, stream, _ = plain()
    display.start("bf16", None)
    display.show(Progress(step=0, num_steps=0, phase="booting"))
    display.show(HALF)
    assert stream.getvalue().splitlines() == [
        "bf16: started",
        "bf16: before the first step (booting)",
        "bf16: step 50/100, 20.0 images/s, loss 2.500, 5 s left",
    ]
    with ProgressBar(io.StringIO()) as bar:
        bar.start("bf16", None)
        (task,) = bar._bar.tasks
        assert task.total is None
        bar.show(HALF)
        assert (task.completed, task.total) == (50, 100)


def test_what_is_waited_for_before_a_run_is_one_line() -> None:
    display, stream, _ = plain()
    display.wait("waiting here until cr-1 begins")
    display.finish("it has begun")
    assert stream.getvalue().splitlines() == [
        "waiting here until cr-1 begins",
        "waiting here until cr-1 begins: it has begun",
    ]
    with ProgressBar(io.StringIO()) as bar:
        bar.wait("waiting here until cr-1 begins")
        (task,) = bar._bar.tasks
        assert (task.description, task.total) == ("waiting here until cr-1 begins", None)
        bar.finish("it has begun")
        assert not bar._bar.tasks


def test_a_region_that_does_not_answer_is_asked_once(tmp_path: Path) -> None:
    asked: list[str] = []

    class Silent(Aws):
        def list_objects(self, region: str, bucket: str, prefix: str, **_: object) -> list[StoredObject]:
            asked.append(region)
            raise Unreachable(f"no answer in {region}")

    attempts = [
        attempt_with(token=f"20261121-090000-abc{number}-a1", region=region, output="s3://acme/runs/x")
        for number, region in enumerate(["us-east-1", "us-east-1", "us-west-2", "us-east-1"])
    ]
    world = World(settings=Settings(home=tmp_path), backends={}, connect=Silent)
    refused = fetch_output(world, attempts)
    assert asked == ["us-east-1", "us-west-2"] and len(refused) == 4

"""The node agent's pure parts, and its programs' limits. Whole nodes are in tests/node."""

import ast
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from moto_server import ACCOUNT, MotoServer
from server_client import server_client

import fastlaunch_train
from fastlaunch.backends.node_agent import agent_archive
from fastlaunch_train.node.agent import Ending, Machine
from fastlaunch_train.node.aws_cli import AwsCli
from fastlaunch_train.node.commands import Clock, Commands, Log, Stop
from fastlaunch_train.node.ec2 import block_left_s
from fastlaunch_train.node.gpus import Gpus
from fastlaunch_train.node.peers import answers, next_in_ring, reason_of
from fastlaunch_train.node.protocol import (
    BadRunList,
    NodeProgram,
    NodeRun,
    Outcome,
    RunEnd,
    outcome_of,
    program_from_json,
    stop_lead_s,
)
from fastlaunch_train.node.training import ContainerTraining, Training
from fastlaunch_train.node.uploads import Store, Uploads

NODE = Path(fastlaunch_train.__file__).parent / "node"


@pytest.mark.parametrize("path", sorted(NODE.glob("*.py")), ids=lambda path: path.name)
def test_it_is_python_3_9_and_the_standard_library(path: Path) -> None:
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    named = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    named += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    others = {name for name in named if name.partition(".")[0] not in sys.stdlib_module_names}
    assert all(name.startswith("fastlaunch_train.node") for name in others)
    # dataclass(kw_only) and zip(strict) are of 3.10.
    keywords = {word.arg for node in ast.walk(tree) if isinstance(node, ast.Call) for word in node.keywords}
    assert not keywords & {"kw_only", "slots", "strict"}


def test_the_archive_runs_isolated_and_is_the_same_twice(tmp_path: Path) -> None:
    agent = tmp_path / "agent.pyz"
    agent.write_bytes(agent_archive())
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(agent), "sagemaker", "run_train.sh", "no-such-list"],
        env={"FASTLAUNCH_SYSTEM_ROOT": str(tmp_path)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "error: resourceconfig.json is missing\n")
    agent_archive.cache_clear()
    assert agent_archive() == agent.read_bytes()


def test_a_program_is_read_as_it_was_written() -> None:
    runs = (NodeRun("a-1", ("--x", "a\n 'b' # c")), NodeRun("a-2", (), {"A": " = "}))
    program = NodeProgram(
        token="a-1-a1", attempt=1, runs=runs, environment={"B": "ä"}, secrets={"C": "arn:c"}, num_nodes=2
    )
    assert program_from_json(program.to_json()) == program
    with pytest.raises(BadRunList, match="names none, or one twice"):
        program_from_json(NodeProgram(token="a", attempt=1, runs=(runs[0], runs[0])).to_json())


DONE, FAILED, LEFT = RunEnd("a", "completed", 0), RunEnd("b", "failed", 3), RunEnd("c")
FAULTY = Outcome("hardware", "GPU 3: a row remap is pending")


@pytest.mark.parametrize(
    ("ends", "how", "expected"),
    [
        ([DONE], {"stop": "spot"}, Outcome("completed")),
        ([DONE, LEFT], {"skipped": ["c"]}, Outcome("completed")),
        ([DONE, LEFT], {"stop": "spot", "problem": FAULTY}, Outcome("interrupted", "spot")),
        ([FAILED, LEFT], {"problem": FAULTY}, FAULTY),
        # What the fault was too late for is done.
        ([DONE], {"problem": FAULTY}, Outcome("completed")),
        ([DONE, FAILED], {}, Outcome("failed", "run b: exit code 3")),
        ([DONE, RunEnd("d", "interrupted", 143)], {}, Outcome("interrupted", "peer")),
    ],
)
def test_what_the_ends_come_to(ends: list[RunEnd], how: dict[str, str], expected: Outcome) -> None:
    assert outcome_of(ends, **how) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(("max_minutes", "lead_s"), [(1, 15), (23, 345), (24, 360), (10_000, 360)])
def test_training_is_stopped_six_minutes_before_the_end_or_a_quarter_of_the_time(
    max_minutes: int, lead_s: int
) -> None:
    assert stop_lead_s(max_minutes) == lead_s


@pytest.mark.parametrize(("hour", "left_s"), [(8, 9900), (11, -900)])
def test_a_block_stops_training_45_minutes_before_its_end(hour: int, left_s: int) -> None:
    now = datetime(2026, 11, 22, hour, tzinfo=UTC)
    assert block_left_s("2026-11-22T11:30:00+00:00", now) == left_s


@pytest.mark.parametrize(
    ("abort", "reason"),
    [("stop\n", "stop"), ("", "stop"), ("spot (ip-10-0-0-6)", "peer"), ("failed driver", "peer")],
)
def test_what_an_abort_says_tells_why_to_stop(abort: str, reason: str) -> None:
    assert reason_of(abort) == reason


def test_every_node_listens_to_another_one_and_all_are_listened_to() -> None:
    addresses = ["10.0.0.5", "10.0.0.12", "10.0.1.19"]
    assert {next_in_ring(addresses, own) for own in addresses} == set(addresses)
    assert all(next_in_ring(addresses, own) != own for own in addresses)


def test_a_machine_answers_with_an_open_port_or_a_closed_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert answers("127.0.0.1", port)
    assert answers("127.0.0.1", port)
    assert not answers("192.0.2.1.invalid", port)


def test_no_program_outlives_its_limit_nor_a_stop() -> None:
    began = time.monotonic()
    assert Commands().run("sleep", "60", limit_s=0.2).code == 124
    cut = threading.Event()
    threading.Timer(0.2, cut.set).start()
    assert Commands(cut=cut).run("bash", "-c", "sleep 60", limit_s=60).code == 124
    assert not Clock().attempts(3, 60, lambda: False, cut=cut)
    assert Commands().run("no-such-program", limit_s=1).code == 127
    assert Commands().run("cat", limit_s=10, stdin="a\n").stdout == "a\n"
    assert time.monotonic() - began < 30


def test_the_first_reason_to_stop_counts() -> None:
    stop = Stop()
    assert stop.ask("spot") and not stop.ask("stop") and stop.reason == "spot"
    assert stop.fail(Outcome("configuration", "driver")) and not stop.is_faulty
    assert not stop.fail(FAULTY) and stop.problem == Outcome("configuration", "driver")


class Bucket(Store):
    """Segments lie below `root`; what else happens while they are sent, `on_flush` does."""

    on_flush: Callable[[], object] = print

    def flush(self) -> bool:
        self.on_flush()
        return True

    def end_of(self, name: str) -> int:
        return 0


@pytest.mark.parametrize("grows", [False, True])
def test_the_last_upload_ends_though_a_training_goes_on(grows: bool, tmp_path: Path) -> None:
    record = tmp_path / "out/one/rank-00000-attempt-1.jsonl"
    record.parent.mkdir(parents=True)
    record.write_text("0\n" * 1000)
    bucket = Bucket(tmp_path / "bucket", tmp_path / "staging")
    if grows:
        bucket.on_flush = lambda: record.write_text(record.read_text() + "more\n")
    uploads = Uploads(
        bucket, "node-0", work=tmp_path, log=tmp_path / "log.txt", every_s=1, say=print, clock=Clock()
    )
    assert uploads.last(60)
    arrived = b"".join(path.read_bytes() for path in sorted(bucket.root.glob("node-0/one/*")))
    assert record.read_bytes().startswith(arrived) and len(arrived) >= 2000


def test_a_secret_is_read_by_the_machines_aws_cli(
    aws_server: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    if shutil.which("aws") is None:
        pytest.skip("there is no awscli: install the extra `test`")
    value = ' a\t"täken"\nof two lines\n'
    secrets, parameters = (server_client(aws_server, name, "eu-west-1") for name in ("secretsmanager", "ssm"))
    text = secrets.create_secret(Name="hub", SecretString=value)["ARN"]
    binary = secrets.create_secret(Name="key", SecretBinary=b"\0")["ARN"]
    parameters.put_parameter(Name="/team/hub", Value=value, Type="SecureString")
    parameter = f"arn:aws:ssm:eu-west-1:{ACCOUNT}:parameter/team/hub"
    # The region is the secret's own.
    cli = AwsCli("us-east-1")
    assert cli.secret(text) == value
    assert cli.secret(parameter) == value
    assert cli.secret(binary) is cli.secret(f"{text}-other") is None


def test_a_containers_secrets_are_in_no_list_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    docker = tmp_path / "docker"
    docker.write_text(
        f'#!/bin/bash\nprintf "%s\\n" "$@" >{tmp_path}/argv; printf "%s" "$HUB" >{tmp_path}/hub\n'
    )
    docker.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    training = ContainerTraining(
        ["-e", "A=b"], "image", ["run"], log=tmp_path / "log.txt", secrets={"HUB": "s3cr3t\n"}
    )
    assert Clock().attempts(100, 0.1, lambda: training.exit_code() is not None)
    training.close()
    argv = (tmp_path / "argv").read_text().split()
    assert argv[-6:] == ["-e", "A=b", "-e", "HUB", "image", "run"]
    assert (tmp_path / "hub").read_text() == "s3cr3t\n"


class Deaf(Training):
    """A training that ends when it is killed."""

    def __init__(self) -> None:
        self.code: int | None = None
        self.heard: list[str] = []

    def exit_code(self) -> int | None:
        return self.code

    def ask(self, grace_s: float) -> None:
        self.heard.append(f"ask {grace_s:g}")

    def kill(self) -> None:
        self.heard.append("kill")
        self.code = 137

    def close(self) -> None:
        self.heard.append("close")


class Alone(Machine):
    """A machine whose first training has to end at once; starting the second one is a bug."""

    def __init__(self, program: NodeProgram) -> None:
        super().__init__(
            program, work=Path("/nowhere"), gpus=Gpus(0), stop=Stop(), clock=Clock(), log=Log(str)
        )
        self.training = Deaf()
        self.outcome: Outcome | None = None

    def prepare(self) -> bool:
        return True

    def start(self, number: int, run: NodeRun) -> Training | None:
        if number == 2:
            raise ZeroDivisionError
        return self.training

    def cause(self, run: NodeRun) -> str:
        return ""

    def ending(self, number: int) -> Ending | None:
        return Ending(kill_after_s=0.3, grace_s=0.1)

    def conclude(self, number: int, run: NodeRun, code: int, *, is_killed: bool) -> None:
        assert not is_killed, "it was asked to end"
        self.note_end(number, "interrupted", code)

    def finish(self, outcome: Outcome) -> int:
        self.outcome = outcome
        return 7


def test_whatever_happens_the_last_word_is_said() -> None:
    machine = Alone(NodeProgram(token="a-1", attempt=1, runs=(NodeRun("a", ()), NodeRun("b", ()))))
    assert machine.work() == 7
    assert machine.training.heard == ["ask 0.1", "kill", "close"]
    assert machine.outcome is not None and machine.outcome.name == "failed"
    assert "ZeroDivisionError" in str(machine.outcome.reason)
    assert [(end.run_id, end.state) for end in machine.ends] == [("a", "interrupted"), ("b", "not-started")]

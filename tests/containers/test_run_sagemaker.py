"""The program of a training job's container: a tree stands for /opt, a script for training."""

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from fake_nvidia_smi import report
from first_process import DEAF_PYTHON, own_processes, send_to_first, wait_until_up
from moto_server import ACCOUNT, MotoServer
from server_client import server_client

from fastlaunch.backends.node_agent import agent_archive, agent_sha256
from fastlaunch_train.node.protocol import NodeProgram, NodeRun, agent_name, run_list_name

ROOT = Path(__file__).parents[2]
TOKEN = "20261121-090312-aaaa-a1"
FIRST, SECOND = "20261121-090312-aaaa", "20261121-090312-bbbb"
#: Training in bash: does what its first argument after `--output DIR [--resume]` says, the folder as `$out`.
TRAINING = """#!/bin/bash
echo "training $FASTLAUNCH_RUN_ID: $*"
out=$2
shift 2
[ "$1" != --resume ] || shift
eval "$1"
"""


VALUE = "s3cr3t täken"
PENDING = {0: {"remapped_row_pending": "Yes"}}


@dataclass(frozen=True)
class Gpus:
    """report: file of what nvidia-smi says. path: where programs are looked for."""

    report: Path
    path: str


@dataclass
class Container:
    """A container's /opt, and its program's process. start: of a job with these runs' arguments."""

    root: Path
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    hashes: dict[str, str] = field(default_factory=dict)

    @property
    def shelf(self) -> Path:
        return self.root / "opt/ml/checkpoints"

    @property
    def node(self) -> Path:
        return self.shelf / TOKEN / "node-0"

    @property
    def failure(self) -> str:
        path = self.root / "opt/ml/output/failure"
        return path.read_text() if path.exists() else ""

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.node / "status.json").read_text())
        return found

    def start(
        self,
        *arguments: str,
        attempt: int = 1,
        num_gpus: int = 0,
        secrets: Mapping[str, str] | None = None,
        **environment: str,
    ) -> subprocess.Popen[str]:
        runs = tuple(
            NodeRun(run_id, (text, "--steps", "5"))
            for run_id, text in zip((FIRST, SECOND), arguments, strict=False)
        )
        program = NodeProgram(
            token=TOKEN, attempt=attempt, runs=runs, num_gpus=num_gpus, secrets=secrets or {}
        )
        self.list_runs(program.to_json())
        config = {"current_host": "algo-1", "hosts": ["algo-1"], "current_instance_type": "ml.g5.xlarge"}
        self.write("resourceconfig.json", json.dumps(config))
        return self.enter(**environment)

    def list_runs(self, text: str) -> None:
        """Bring the agent and this list of runs, as SageMaker does with what the request names."""
        for channel, name, data in (
            ("agent", agent_name(agent_sha256()), agent_archive()),
            ("runs", run_list_name(hashlib.sha256(text.encode()).hexdigest()), text.encode()),
        ):
            path = self.root / "opt/ml/input/data" / channel / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        self.hashes = {
            "FASTLAUNCH_AGENT_SHA256": agent_sha256(),
            "FASTLAUNCH_RUNS_SHA256": hashlib.sha256(text.encode()).hexdigest(),
        }

    def write(self, name: str, text: str) -> None:
        path = self.root / "opt/ml/input/config" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def enter(self, *before: str, **environment: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*before, "/bin/bash", str(self.root / "code/run_sagemaker.sh")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "FASTLAUNCH_SYSTEM_ROOT": str(self.root),
                **self.hashes,
                "FASTLAUNCH_SHIP_EVERY_S": "0.1",
                **environment,
            },
        )
        self.processes.append(process)
        return process

    def run(self, *arguments: str, **job: Any) -> tuple[int, str]:
        """The exit code and what is printed, of a job as `start` starts it."""
        return self.end(self.start(*arguments, **job))

    def end(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        out, _ = process.communicate(timeout=60)
        return process.returncode, out

    def wait_for(self, pattern: str) -> Path:
        end = time.monotonic() + 60
        while not (found := sorted(self.shelf.glob(pattern))):
            assert time.monotonic() < end, sorted(self.shelf.rglob("*"))
            time.sleep(0.02)
        return found[0]

    def files(self) -> dict[str, str]:
        """What lies there in segments, joined; each has to begin where the one before it ends."""
        found: dict[str, str] = {}
        for path in sorted(self.shelf.rglob("*")):
            match = re.fullmatch(r"(.+)\.(\d{12})", str(path.relative_to(self.shelf)))
            if match:
                before = found.setdefault(match[1], "")
                assert len(before.encode()) == int(match[2])
                found[match[1]] = before + path.read_text()
        return found

    def states(self) -> list[tuple[str, int | None]]:
        return [(run["state"], run["exit_code"]) for run in self.status["runs"]]

    def another(self, root: Path) -> "Container":
        """Another container of the same job: it has what SageMaker brought back from S3."""
        other = furnished(root)
        shutil.copytree(self.shelf, other.shelf)
        return other


def furnished(root: Path) -> Container:
    code = root / "code"
    code.mkdir(parents=True)
    shutil.copy(ROOT / "containers/run_sagemaker.sh", code)
    (code / "run_train.sh").write_text(TRAINING)
    return Container(root=root)


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    container = furnished(tmp_path / "1")
    yield container
    for process in container.processes:
        process.kill()
        process.wait()


RECORD = "rank-00000-attempt-${FASTLAUNCH_ATTEMPT}.jsonl"


def test_runs_are_done_in_order_and_all_that_they_write_is_left_in_segments(container: Container) -> None:
    code, out = container.run(
        f'env >$out/{RECORD}; echo "{"x" * 40}"; echo 2 >$out/nccl-node-0.txt', "true", FASTLAUNCH_NPROC="3"
    )
    assert code == 0, out
    begins = f"training {FIRST}:"
    assert begins in out and out.index(begins) < out.index(f"training {SECOND}")
    boot = json.loads((container.shelf / TOKEN / "boot.json").read_text())
    assert boot == {
        **{"schema": 1, "token": TOKEN, "node": 0, "instance_id": None, "host": "algo-1"},
        **{"instance_type": "g5.xlarge", "zone": None, "lifecycle": None},
        **{"booted_at": boot["booted_at"], "began_at": boot["began_at"]},
    }
    status = container.status
    assert (status["outcome"], status["reason"], status["node"]) == ("completed", None, 0)
    assert container.states() == [("completed", 0), ("completed", 0)]
    first = status["runs"][0]
    assert list(first) == ["run_id", "state", "exit_code", "started_s", "ended_s"]
    assert 0 <= first["started_s"] <= first["ended_s"] <= status["uptime_s"]
    files = container.files()
    environment = set(files[f"{TOKEN}/node-0/{FIRST}/rank-00000-attempt-1.jsonl"].splitlines())
    given = (f"RUN_ID={FIRST}", "ATTEMPT=1", "INSTANCE=g5.xlarge", "NPROC=3")
    assert {f"FASTLAUNCH_{entry}" for entry in given} < environment
    assert files[f"{TOKEN}/node-0/{FIRST}/nccl-node-0.txt"] == "2\n"
    log = files[f"{TOKEN}/node-0/{FIRST}/log.txt"]
    assert "x" * 40 in log and "--resume" not in log and str(container.shelf) not in log
    assert "completed" in files[f"{TOKEN}/node-0/log.txt"]
    assert not container.failure


def test_a_run_that_fails_does_not_stop_the_next_one_and_its_cause_is_told_first(
    container: Container,
) -> None:
    traceback = "traceback-rank-00000-attempt-1.txt"
    code, _ = container.run(
        f'printf "Traceback:\\n  File x\\nValueError: no such thing\\n" >$out/{traceback}; exit 1', "true"
    )
    assert code == 1
    assert container.failure.startswith(f"ValueError: no such thing (run {FIRST} on algo-1, exit code 1)\n")
    status = container.status
    assert (status["outcome"], status["reason"]) == ("failed", f"run {FIRST}: exit code 1")
    assert container.states() == [("failed", 1), ("completed", 0)]
    assert "File x" in container.files()[f"{TOKEN}/node-0/{FIRST}/{traceback}"]


def test_what_would_end_every_run_ends_the_job(container: Container) -> None:
    code, _ = container.run("exit 78", "true")
    assert code == 2
    assert (container.status["outcome"], container.status["reason"]) == ("configuration", "fabric")
    assert container.states() == [("failed", 78), ("not-started", None)]
    assert container.failure


def test_a_containers_first_process_is_not_deaf_before_its_python_listens(
    container: Container, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin" / "python"
    python.write_text(DEAF_PYTHON)
    python.chmod(0o755)
    container.list_runs(NodeProgram(token=TOKEN, attempt=1, runs=(NodeRun(FIRST, ()),)).to_json())
    process = container.enter(*own_processes(), PATH=f"{python.parent}:{os.environ['PATH']}")
    wait_until_up(process)
    send_to_first(process, signal.SIGTERM)
    assert container.end(process) == (143, "")


@pytest.mark.slow
def test_a_training_that_does_not_hear_is_killed_with_all_that_it_started(
    container: Container, tmp_path: Path
) -> None:
    deaf = f'trap "" TERM; setsid sleep 300 & echo $! >{tmp_path}/pid; echo up; while :; do sleep 300; done'
    process = container.start(deaf, FASTLAUNCH_STOP_GRACE_S="0.1")
    container.wait_for(f"{TOKEN}/node-0/{FIRST}/log.txt.*")
    process.send_signal(signal.SIGTERM)
    assert container.end(process)[0] == 143
    assert container.states() == [("interrupted", 137)]
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}").exists()


@pytest.fixture
def gpus(tmp_path: Path) -> Gpus:
    """Programs of a container that has a GPU."""
    (tmp_path / "bin").mkdir()
    for name, text in (("nvidia-smi", f"cat {tmp_path}/gpus.xml"), ("dmesg", "exit 1")):
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return Gpus(
        report=tmp_path / "gpus.xml",
        path=f"{tmp_path}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
    )


def test_a_faulty_gpu_ends_the_job_before_its_first_run(container: Container, gpus: Gpus) -> None:
    gpus.report.write_text(report(8, PENDING))
    assert container.run("true", "true", num_gpus=8, PATH=gpus.path)[0] == 3
    status = container.status
    assert (status["outcome"], status["reason"]) == ("hardware", "GPU 0: a row remap is pending")
    assert container.states() == [("not-started", None)] * 2
    assert container.failure == "GPU 0: a row remap is pending\n"


def test_a_gpu_that_breaks_during_a_run_makes_it_no_failure(container: Container, gpus: Gpus) -> None:
    gpus.report.write_text(report(8))
    broken = gpus.report.with_name("broken.xml")
    broken.write_text(report(8, PENDING))
    breaks = f"mv {broken} {gpus.report}; exit 1"
    code, out = container.run(breaks, "true", num_gpus=8, PATH=gpus.path)
    assert (code, container.status["outcome"]) == (3, "hardware"), out
    assert container.states() == [("interrupted", 1), ("not-started", None)]


def without_cli(folder: Path) -> str:
    """A PATH with a Python that has boto3, and without the AWS CLI."""
    for name in ("bash", "cut", "dirname", "mkdir", "sha256sum"):
        (folder / name).symlink_to(shutil.which(name) or name)
    (folder / "python").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    (folder / "python").chmod(0o755)
    return str(folder)


def with_cli(folder: Path) -> str:
    """A PATH with an AWS CLI that knows the secret."""
    (folder / "aws").write_text(f"#!/bin/bash\necho '{json.dumps(VALUE)}'\n")
    (folder / "aws").chmod(0o755)
    return f"{folder}:{without_cli(folder)}"


def reading(path: str, server: MotoServer, arn: str) -> dict[str, Any]:
    """A container that may read the secret, with the role's credentials."""
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    credentials = {"AWS_ENDPOINT_URL": server.url, **dict.fromkeys(names, "role")}
    return {"PATH": path, "secrets": {"HUB": arn}, **credentials}


@pytest.mark.parametrize("path", [with_cli, without_cli])
def test_a_secret_reaches_training_and_nothing_else(
    path: Callable[[Path], str], container: Container, tmp_path: Path, aws_server: MotoServer
) -> None:
    client = server_client(aws_server, "secretsmanager", "eu-west-1")
    arn = client.create_secret(Name="hub", SecretString=VALUE)["ARN"]
    (tmp_path / "bin").mkdir()
    digest = hashlib.sha256(VALUE.encode()).hexdigest()
    code, out = container.run(
        f'[ "$(printf %s "$HUB" | sha256sum | cut -d" " -f1)" = {digest} ]',
        **reading(path(tmp_path / "bin"), aws_server, arn),
    )
    assert code == 0, out
    left = [path.read_bytes() for path in container.root.rglob("*") if path.is_file()]
    assert VALUE not in out and not any(VALUE.encode() in data for data in left)


@pytest.mark.slow
def test_a_secret_that_cannot_be_read_ends_the_job(
    container: Container, tmp_path: Path, aws_server: MotoServer
) -> None:
    arn = f"arn:aws:secretsmanager:eu-west-1:{ACCOUNT}:secret:none-x1y2z3"
    (tmp_path / "bin").mkdir()
    code, out = container.run("true", **reading(without_cli(tmp_path / "bin"), aws_server, arn))
    assert code == 2, out
    assert (container.status["outcome"], container.status["reason"]) == ("configuration", "secret")
    assert container.states() == [("not-started", None)]
    assert container.failure == "secret\n"


def test_what_was_completed_before_the_fault_counts(container: Container, gpus: Gpus) -> None:
    gpus.report.write_text(report(8))
    gpus.report.with_name("broken.xml").write_text(report(8, PENDING))
    breaks = f"mv {gpus.report.with_name('broken.xml')} {gpus.report}"
    assert container.run(breaks, num_gpus=8, PATH=gpus.path)[0] == 0
    assert (container.status["outcome"], container.states()) == ("completed", [("completed", 0)])
    assert container.status["gpu_notes"] == ["GPU 0: a row remap is pending"]


def test_a_run_whose_gpus_slow_down_under_load_ends_the_job(container: Container, gpus: Gpus) -> None:
    gpus.report.write_text(report(1))
    assert container.run("exit 79", "true", num_gpus=1, PATH=gpus.path)[0] == 3
    assert (container.status["outcome"], container.status["reason"]) == ("hardware", "slowdown")
    assert container.states() == [("interrupted", 79), ("not-started", None)]


def test_a_run_that_fails_on_sound_gpus_is_a_failure(container: Container, gpus: Gpus) -> None:
    gpus.report.write_text(report(1))
    assert container.run("exit 1", "true", num_gpus=1, PATH=gpus.path)[0] == 1
    assert container.states() == [("failed", 1), ("completed", 0)]


def test_a_later_container_of_the_job_goes_on_and_truncates_nothing(
    container: Container, tmp_path: Path
) -> None:
    last = r"echo 4 >\$out/checkpoints/step-00000004.pt; exit 130"
    first = f'mkdir $out/checkpoints; echo a >$out/{RECORD}; trap "{last}" TERM; '
    first += "echo 3 >$out/checkpoints/step-00000003.pt"
    process = container.start("true", f"{first}; sleep 60 & wait")
    container.wait_for(f"{SECOND}/checkpoints/step-00000003.pt")
    process.send_signal(signal.SIGTERM)
    assert container.end(process)[0] == 143
    assert (container.status["outcome"], container.status["reason"]) == ("interrupted", "stop")
    assert container.states() == [("completed", 0), ("interrupted", 130)]
    assert (container.shelf / SECOND / "checkpoints/step-00000004.pt").read_text() == "4\n"
    assert not container.failure
    before = container.files()
    # As SageMaker's own marks beside what it copied.
    (container.shelf / SECOND / "checkpoints/step-00000099.pt.sagemaker-uploaded").touch()
    (container.shelf / TOKEN / f"node-0/{SECOND}/log.txt.000000009999.sagemaker-uploaded").touch()

    again = container.another(tmp_path / "2")
    code, out = again.run("false", f'echo b >$out/{RECORD}; echo "from $(ls $out/checkpoints)"; echo "$@"')
    assert code == 0, out
    assert again.states() == [("completed", 0), ("completed", 0)]
    after = again.files()
    assert all(after[name].startswith(text) for name, text in before.items())
    assert f"training {FIRST}" not in out
    assert "from step-00000004.pt" in out and re.search(r"--output \S+ --resume ", out, re.MULTILINE)
    assert after[f"{TOKEN}/node-0/{SECOND}/rank-00000-attempt-1.jsonl"] == "a\n"
    assert after[f"{TOKEN}/node-0/{SECOND}/rank-00000-attempt-2.jsonl"] == "b\n"
    assert before[f"{TOKEN}/node-0/{SECOND}/log.txt"] != after[f"{TOKEN}/node-0/{SECOND}/log.txt"]
    boots = [json.loads((one.shelf / TOKEN / "boot.json").read_text()) for one in (container, again)]
    assert boots[0]["began_at"] == boots[1]["began_at"]
    assert boots[0]["booted_at"] <= boots[1]["booted_at"] <= again.status["billed_until"]


def test_only_the_newest_checkpoints_stay_on_the_disk(container: Container) -> None:
    old = container.shelf / FIRST / "checkpoints"
    old.mkdir(parents=True)
    for step in (1, 2, 3):
        (old / f"step-0000000{step}.pt").write_text(str(step))
    save = "echo $n >$out/checkpoints/part; mv $out/checkpoints/part $out/checkpoints/step-0000000$n.pt"
    kept = f"echo kept $(ls {old})"
    look = f"echo began $(ls {old}); sleep 0.5; ls $out/checkpoints"
    taken = f"until [ -e {old}/step-0000000$n.pt ]; do sleep 0.05; done"
    pruned = f"while [ -e {old}/step-00000004.pt ]; do sleep 0.05; done"
    code, out = container.run(f"{look}; for n in 4 5 6; do {save}; {taken}; done; {pruned}; {kept}")
    assert code == 0
    assert [path.name for path in sorted(old.iterdir())] == ["step-00000006.pt"]
    # The one to go on from stays where training reads it; the one before the newest may not be copied yet.
    lines = out.splitlines()
    assert "began step-00000003.pt" in lines
    assert "step-00000003.pt" in lines and "kept step-00000005.pt step-00000006.pt" in lines


RUNS = f'"runs":[{{"run_id":"{FIRST}","arguments":[]}}]'


@pytest.mark.parametrize(
    ("runs", "hosts", "cause"),
    [
        ("{", ["algo-1"], "list of runs cannot be read"),
        ("{" + RUNS.replace(FIRST, "../x") + ',"schema":1,"token":"a","attempt":1}', ["algo-1"], "no run id"),
        ("{" + RUNS + f',"schema":1,"token":"{TOKEN}","attempt":1}}', ["algo-2"], "which of which hosts"),
    ],
)
def test_a_damaged_request_is_a_clear_failure(
    runs: str, hosts: list[str], cause: str, container: Container
) -> None:
    container.list_runs(runs)
    container.write("resourceconfig.json", json.dumps({"hosts": hosts, "current_host": "algo-1"}))
    code, out = container.end(container.enter())
    assert code == 2
    assert cause in container.failure and cause in out and "Traceback" not in out


@pytest.mark.parametrize("what", ["agent", "runs"])
def test_what_is_not_what_was_asked_for_is_not_run(what: str, container: Container) -> None:
    container.list_runs(NodeProgram(token=TOKEN, attempt=1, runs=(NodeRun(FIRST, ()),)).to_json())
    (path,) = (container.root / "opt/ml/input/data" / what).iterdir()
    path.write_bytes(path.read_bytes() + b" ")
    code, _ = container.end(container.enter())
    assert code == 2
    assert container.failure.endswith("is not what was asked for\n") and what in container.failure


def test_code_that_is_not_whole_is_a_clear_failure(container: Container) -> None:
    (container.root / "code/run_train.sh").unlink()
    code, _ = container.run("true")
    assert code == 2
    assert container.failure.endswith("run_train.sh is missing\n")


def test_an_image_without_python_is_a_clear_failure(container: Container, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    for tool in ("bash", "dirname", "mkdir", "sha256sum"):
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / "bin" / tool).symlink_to(found)
    code, _ = container.run("true", PATH=str(tmp_path / "bin"))
    assert code == 127
    assert container.failure == "no Python from 3.9 in this image\n"

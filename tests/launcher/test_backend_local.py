"""The local backend, with the training entrypoint played by fake_train/entrypoint.py."""

import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_train.processes import wait_until

from fastlaunch.backends.local import LocalBackend, LocalSettings
from fastlaunch.core import locks
from fastlaunch.core.data import to_data
from fastlaunch.core.errors import UserError
from fastlaunch.core.log_file import LOG
from fastlaunch.core.plan import Plan, RunState
from fastlaunch.jobs.job import Inputs, Job
from fastlaunch.jobs.machine import Machine, visible_devices
from fastlaunch_train.recipes.recipes import resolve_recipe

FAKE = Path(__file__).parent / "fake_train" / "entrypoint.py"
GOLDEN = Path(__file__).parents[1] / "plans"
JOB = Job(workload="vit-tiny", recipe=resolve_recipe("bf16"), batch_size=8, steps=20, num_gpus=1)


@pytest.fixture
def backend(tmp_path: Path) -> LocalBackend:
    return LocalBackend(
        LocalSettings(
            home=tmp_path,
            working_directory=tmp_path,
            launch=(sys.executable, str(FAKE), "--nproc", "{nproc}"),
            pythonpath=os.pathsep.join(path for path in sys.path if path),
            stop_wait_s=30,
        )
    )


def started_by(backend: LocalBackend, code: str) -> LocalBackend:
    """The backend with this Python program as what starts the entrypoint."""
    launch = (sys.executable, "-W", "ignore", "-c", code, str(FAKE))
    return LocalBackend(replace(backend.settings, launch=launch))


def hanging(backend: LocalBackend, **environment: str) -> tuple[Plan, Any]:
    """Plan and handle of a job that does not end by itself, once it has recorded a step."""
    plan = behave(backend.plan({"r1": replace(JOB, steps=100_000)}), FAKE_STEP_S="0.01", **environment)
    handle = backend.execute(plan)
    wait_until(lambda: recorded_steps(handle) > 0)
    return plan, handle


def behave(plan: Plan, **environment: str) -> Plan:
    """`plan` with more environment: how the fake entrypoint is told what to do."""
    return replace(plan, request={**plan.request, "env": {**plan.request["env"], **environment}})


def finish(backend: LocalBackend, handle: Any) -> RunState:
    wait_until(lambda: backend.state(handle) is not RunState.RUNNING)
    return backend.state(handle)


def recorded_steps(handle: Any) -> int:
    paths = list(Path(handle["directory"]).glob("rank-00000-*.jsonl"))
    return sum(path.read_text().count('"kind":"step"') for path in paths)


@pytest.mark.parametrize(
    ("name", "job"),
    [
        ("local-bf16", JOB),
        (
            "local-many-options",
            Job(
                workload="timm:vit_base_patch16_224",
                recipe=resolve_recipe("compile", ["compile_mode=max-autotune", "optimizer_impl=fused"]),
                batch_size=None,
                steps=1000,
                num_gpus=4,
                seed=7,
                inputs=Inputs(data="folder:./images", num_workers=3),
                checkpoint_every=100,
            ),
        ),
        (
            "local-language",
            Job(
                workload="gpt2-xsmall",
                recipe=resolve_recipe("transformers", ["precision=fp32"]),
                batch_size=4,
                steps=None,
                epochs=5,
                num_gpus=1,
                eval_every=100,
                inputs=Inputs(
                    data="file:./corpus.txt",
                    model="./japanese-gpt2-xsmall",
                    tokenizer="rinna/japanese-gpt2-xsmall",
                    sequence_length=512,
                ),
            ),
        ),
    ],
)
def test_plan_is_the_golden_one(name: str, job: Job) -> None:
    settings = LocalSettings(
        home=Path("/home/user/.local/share/fastlaunch"),
        working_directory=Path("/home/user/project"),
        launch=("python", *LocalSettings.launch[1:]),
        pythonpath="/home/user/checkout/train",
        num_cores=8,
        commit="0123456789abcdef0123456789abcdef01234567",
    )
    plan = json.loads(json.dumps(to_data(LocalBackend(settings).plan({"<run-id>": job}))))
    assert plan == json.loads((GOLDEN / f"{name}.json").read_text())


def test_completed_job_leaves_a_record_of_every_rank_and_a_log(backend: LocalBackend) -> None:
    handle = backend.execute(backend.plan({"r1": replace(JOB, num_gpus=2)}))
    assert finish(backend, handle) is RunState.COMPLETED
    names = [path.name for path in backend.collect(handle)]
    assert names == ["rank-00000-attempt-1.jsonl", "rank-00001-attempt-1.jsonl"]
    directory = Path(handle["directory"])
    assert "training vit-tiny with bf16" in (directory / LOG).read_text()
    # All of it is the user's alone.
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}
    assert json.loads(json.dumps(handle)) == handle


@pytest.mark.parametrize("status", ["out_of_memory", "failed", "killed"])
def test_a_job_that_failed_is_failed(backend: LocalBackend, status: str) -> None:
    handle = backend.execute(behave(backend.plan({"r1": JOB}), FAKE_STATUS=status))
    assert finish(backend, handle) is RunState.FAILED
    if status == "killed":
        # Only who started it knows its exit code.
        assert LocalBackend(backend.settings).state(handle) is RunState.LOST


def test_another_process_finds_the_job_and_stops_it(backend: LocalBackend) -> None:
    plan, handle = hanging(backend)
    assert locks.is_held(Path(handle["directory"]) / "lock")
    other = LocalBackend(backend.settings)
    assert other.find(plan) == handle and other.find(backend.plan({"r2": JOB})) is None
    assert other.state(handle) is RunState.RUNNING
    other.stop(handle)
    assert other.state(handle) is RunState.INTERRUPTED
    other.stop(handle)
    assert finish(backend, handle) is RunState.INTERRUPTED and other.find(plan) == handle


def test_what_a_job_leaves_behind_does_not_keep_it_running(backend: LocalBackend) -> None:
    code = (
        "import runpy, subprocess, sys; "
        "print(subprocess.Popen(['sleep', '1000'], start_new_session=True).pid, flush=True); "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    backend = started_by(backend, code)
    handle = backend.execute(backend.plan({"r1": JOB}))
    try:
        assert finish(backend, handle) is RunState.COMPLETED
        backend.stop(handle)
    finally:
        left = int((Path(handle["directory"]) / LOG).read_text().split()[0])
        os.kill(left, signal.SIGKILL)


def test_deaf_job_is_killed(backend: LocalBackend) -> None:
    backend = LocalBackend(replace(backend.settings, stop_wait_s=0.2))
    _, handle = hanging(backend, FAKE_DEAF="1")
    backend.stop(handle)
    assert backend.state(handle) is RunState.FAILED


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_process_that_outlives_its_leader_still_runs_and_can_be_stopped(backend: LocalBackend) -> None:
    # As a rank does whose torchrun was killed: a session of its own, and none of the leader's descriptors.
    leader = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, *sys.argv[1:]], "
        "start_new_session=True); time.sleep(1000)"
    )
    backend = started_by(backend, leader)
    _, handle = hanging(backend)
    os.kill(handle["pid"], signal.SIGKILL)
    wait_until(lambda: not locks.is_held(Path(handle["directory"]) / "lock"))
    assert backend.state(handle) is RunState.RUNNING
    backend.stop(handle)
    assert backend.state(handle) is RunState.INTERRUPTED


def test_home_that_cannot_be_written_is_an_error_before_anything_starts(
    backend: LocalBackend, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    blocked = LocalBackend(replace(backend.settings, home=tmp_path / "file"))
    with pytest.raises(UserError, match="cannot be written"):
        blocked.execute(blocked.plan({"r1": JOB}))


def test_lock_is_released_by_any_end_of_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert not locks.is_held(path)
    code = "import sys, time; from pathlib import Path; from fastlaunch.core import locks; "
    code += "locks.take(Path(sys.argv[1])); print('held', flush=True); time.sleep(1000)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], env=environment, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        assert locks.is_held(path) and locks.is_held(path)
        holder.kill()
    assert not locks.is_held(path)


def test_who_looks_at_a_lock_is_not_taken_for_its_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("w") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        assert not locks.is_held(path)
        fcntl.flock(looking, fcntl.LOCK_EX)
        assert locks.is_held(path)


LISTING = "0, GPU-aaaa-1, NVIDIA H200\n1, GPU-bbbb-2, NVIDIA H200\n2, GPU-cccc-3, NVIDIA L4\n"


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, ("NVIDIA H200", "NVIDIA H200", "NVIDIA L4")),
        ("2,0", ("NVIDIA L4", "NVIDIA H200")),
        ("GPU-cccc", ("NVIDIA L4",)),
        ("", ()),
        ("-1", ()),
        ("0,7,1", ("NVIDIA H200",)),
    ],
)
def test_devices_are_those_that_cuda_would_show(visible: str | None, names: tuple[str, ...]) -> None:
    assert visible_devices(LISTING, visible) == names
    assert visible_devices("NVIDIA-SMI has failed because it couldn't communicate\n", visible) == ()


def test_machine_is_described_and_says_what_training_lacks() -> None:
    machine = Machine(devices=("NVIDIA L4", "NVIDIA L4"), num_cores=2, modules=frozenset({"torch"}))
    assert machine.description == "2 x NVIDIA L4"
    assert machine.missing(["fastlaunch_train.workloads.vit"]) == ("timm",)
    assert machine.missing(["fastlaunch_train.workloads.causal_lm"]) == ("transformers",)
    assert machine.missing(["fastlaunch_train.workloads.gelu", "./my.py:build"]) == ()
    assert Machine(devices=(), num_cores=1, modules=frozenset()).description == "CPU with 1 core"

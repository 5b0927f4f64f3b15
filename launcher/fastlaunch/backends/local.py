"""The local backend: a plan is one command line, run on this machine in a session of its own."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastlaunch.core import locks
from fastlaunch.core.errors import UserError
from fastlaunch.core.home import make_folder, private, writing
from fastlaunch.core.log_file import LOG
from fastlaunch.core.plan import Plan, RunState
from fastlaunch.jobs.job import Job, entrypoint_arguments, run_environment
from fastlaunch.measure.outcome import outcome_of, read_records

_LOCK = "lock"
#: A killed process goes at once, unless a driver holds it in the kernel.
_KILL_WAIT_S = 10.0
_DIRECTORY_VARIABLE = "FASTLAUNCH_RUN_DIRECTORY"


@dataclass(frozen=True, kw_only=True)
class LocalSettings:
    """What a local plan depends on besides the job."""

    home: Path
    #: Where the entrypoint starts, so that `./my.py:build` and `folder:PATH` mean what they mean here.
    working_directory: Path
    #: What starts the entrypoint, with `{nproc}` for the number of ranks.
    launch: tuple[str, ...] = (
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node={nproc}"),
        *("-m", "fastlaunch_train"),
    )
    #: The entrypoint's PYTHONPATH; None to leave it alone.
    pythonpath: str | None = None
    #: Shared between the ranks as threads; None to leave the number of threads alone.
    num_cores: int | None = None
    #: The training code's; None if it is not known.
    commit: str | None = None
    #: Between asking a job to stop and killing it. torchrun gives its ranks 30 s.
    stop_wait_s: float = 45.0


class LocalBackend:
    """Runs plans on this machine. A job lives as long as the lock in its run directory is held."""

    name = "local"

    def __init__(self, settings: LocalSettings) -> None:
        self.settings = settings
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def plan(self, jobs: Mapping[str, Job], *, attempt: int = 1) -> Plan:
        """Return the command line of the one job, its additions to the environment, and where it writes."""
        ((run_id, job),) = jobs.items()
        directory = str(self.settings.home / "runs" / run_id)
        if job.script:
            wrapper = (sys.executable, "-m", "fastlaunch_train.script")
            argv = [*wrapper, "--output", directory, *job.script.words]
        else:
            argv = [part.replace("{nproc}", str(job.num_gpus)) for part in self.settings.launch]
            argv += [*entrypoint_arguments(job), "--output", directory]
        # Unbuffered, so that `logs -f` shows what is printed when it is printed.
        env = {"FASTLAUNCH_RUN_ID": run_id, _DIRECTORY_VARIABLE: directory, "PYTHONUNBUFFERED": "1"}
        env |= run_environment(job)
        # It is the commit of what trains, and not of a script.
        if self.settings.commit and not job.script:
            env["FASTLAUNCH_COMMIT"] = self.settings.commit
        if self.settings.num_cores and not (job.script and job.script.nproc is None):
            env["OMP_NUM_THREADS"] = str(max(1, self.settings.num_cores // job.num_gpus))
        if self.settings.pythonpath:
            env["PYTHONPATH"] = self.settings.pythonpath
        request = {
            "argv": argv,
            "env": env,
            "directory": directory,
            "working_directory": str(self.settings.working_directory),
        }
        placeholders = (run_id[1:-1],) if run_id.startswith("<") else ()
        return Plan(backend=self.name, operation="exec", request=request, placeholders=placeholders)

    def execute(self, plan: Plan) -> Mapping[str, Any]:
        """Start the plan's command line, in this process's environment with the plan's on top."""
        request = plan.request
        directory = Path(request["directory"])
        with writing(directory):
            make_folder(directory)
            lock = locks.take(directory / _LOCK)
            try:
                with open(directory / LOG, "ab", opener=private) as log:
                    child = subprocess.Popen(
                        request["argv"],
                        env={**os.environ, **request["env"]},
                        cwd=request["working_directory"],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        # In a session of its own: Ctrl-C reaches only the launcher, which stops the job.
                        start_new_session=True,
                        pass_fds=(lock,),
                    )
                # Another process finds the job by this, if the launcher dies before it notes the handle.
                os.ftruncate(lock, 0)
                os.write(lock, f"{child.pid}\n".encode())
            except FileNotFoundError as error:
                raise UserError(f"cannot start {request['argv'][0]}: {error.strerror}") from None
            finally:
                os.close(lock)
        self._children[str(directory)] = child
        return {"directory": str(directory), "pid": child.pid}

    def find(self, plan: Plan) -> Mapping[str, Any] | None:
        """Return the handle of the plan's job if it was started, though nobody noted it."""
        handle = {"directory": plan.request["directory"]}
        if not (Path(handle["directory"]) / _LOCK).exists():
            return None
        return {**handle, "pid": _pid(handle)}

    def state(self, handle: Mapping[str, Any]) -> RunState:
        """Return RUNNING while its lock is held or a process of it lives; else what the record files say."""
        child = self._children.get(handle["directory"])
        exit_code = child.poll() if child else None
        if self._alive(handle):
            return RunState.RUNNING
        if child and exit_code is None:
            exit_code = child.wait()
        return outcome_of(read_records(self.collect(handle))[0], exit_code=exit_code).state

    def collect(self, handle: Mapping[str, Any]) -> tuple[Path, ...]:
        return tuple(sorted(Path(handle["directory"]).glob("rank-*.jsonl")))

    def stop(self, handle: Mapping[str, Any]) -> None:
        """Ask the job to stop, wait for it to write its end, and kill it if it does not."""
        deadline = time.monotonic() + self.settings.stop_wait_s
        signalled: set[int] = set()
        while self._alive(handle) and time.monotonic() < deadline:
            # Repeatedly: the job may not have started yet, or its leader may leave ranks behind.
            leaders = self._leaders(handle) - signalled
            _signal(leaders, signal.SIGTERM)
            signalled |= leaders
            time.sleep(0.05)
        self.kill(handle)

    def kill(self, handle: Mapping[str, Any]) -> None:
        """End every process of the job at once."""
        deadline = time.monotonic() + _KILL_WAIT_S
        while self._alive(handle) and time.monotonic() < deadline:
            _signal({*self._leaders(handle), *_processes_of(handle)}, signal.SIGKILL)
            time.sleep(0.02)
        if child := self._children.get(handle["directory"]):
            child.wait()

    def _alive(self, handle: Mapping[str, Any]) -> bool:
        if locks.is_held(Path(handle["directory"]) / _LOCK):
            return True
        # torchrun gives its ranks sessions of their own and no descriptors: they can outlive it and the lock.
        # After every rank's end line, what still lives is something that the job left behind.
        ended = outcome_of(read_records(self.collect(handle))[0]).state is not RunState.LOST
        return not ended and bool(_processes_of(handle))

    def _leaders(self, handle: Mapping[str, Any]) -> set[int]:
        """Return the process to signal: the one that was started, or what it left behind."""
        if locks.is_held(Path(handle["directory"]) / _LOCK):
            pid = handle.get("pid") or _pid(handle)
            return {pid} if pid else set()
        return _processes_of(handle)


def _processes_of(handle: Mapping[str, Any]) -> set[int]:
    """Return the ids of the processes whose environment names the run's directory; none without /proc."""
    variable = f"{_DIRECTORY_VARIABLE}={handle['directory']}".encode()
    pids = set()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            variables = environ.read_bytes().split(b"\0")
        except OSError:
            continue
        if variable in variables and int(environ.parent.name) != os.getpid():
            pids.add(int(environ.parent.name))
    return pids


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        try:
            if number == signal.SIGKILL and os.getpgid(pid) == pid:
                os.killpg(pid, number)
            else:
                os.kill(pid, number)
        except ProcessLookupError:
            continue


def _pid(handle: Mapping[str, Any]) -> int | None:
    try:
        return int((Path(handle["directory"]) / _LOCK).read_text())
    except (OSError, ValueError):
        return None

"""A machine on EC2: it trains in Docker containers, reaches S3 through the AWS CLI, and turns itself off.

The agent never ends without turning the machine off. State that must survive a full disk is in memory, below
/run.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
import traceback
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path

from fastlaunch_train.node.agent import Ending, Machine, code_of_machine, problem_after
from fastlaunch_train.node.aws_cli import AwsCli, StagedStore
from fastlaunch_train.node.commands import SIGNALS, Clock, Commands, Log, Stop, stop_on_signals
from fastlaunch_train.node.gpus import Gpus
from fastlaunch_train.node.outputs import NotRegular, hold
from fastlaunch_train.node.peers import PORT, Peers
from fastlaunch_train.node.protocol import (
    BLOCK,
    CHECKPOINT,
    COMPLETED,
    CONFIGURATION,
    FAILED,
    HARDWARE,
    INPUTS,
    INTERRUPTED,
    LOG,
    SPOT,
    WATCHDOG,
    Identity,
    NodeProgram,
    NodeRun,
    Outcome,
    attempt_uri,
    checkpoint_key,
    last_attempt,
    missing_files,
    newest_checkpoint,
    program_from_json,
    skip_name,
    status,
    status_name,
    stop_lead_s,
)
from fastlaunch_train.node.training import ContainerTraining, Training
from fastlaunch_train.node.uploads import Uploads, checkpoints
from fastlaunch_train.node.verdicts import cause_of

STATE, WORK = Path("/run/fastlaunch"), Path("/var/lib/fastlaunch")
INSTANCE_STORE = Path("/opt/dlami/nvme")
_IMDS = "http://169.254.169.254/latest"
_UPLOAD_EVERY_S = 30
#: Time limit, in seconds, to move a checkpoint or an image: tens of gigabytes.
_LARGE_S = 1800.0
#: Space to leave on the disk beside the inputs, for what the runs write.
_SPARE_BYTES = 2 * 10**9
#: The image with the runs' requirements, on this machine alone.
_PREPARED = "fastlaunch-prepared"
_DOCKER_S = 60.0
#: Seconds that a container has to stop, and that one has whose peer can train no more.
_GRACE_S, _HASTY_GRACE_S = 100.0, 5.0
#: Seconds until docker has killed a container whose time is over.
_MARGIN_S = 30.0
#: Seconds for the last lines of the log, once all else is sent or given up.
_LAST_LINES_S = 30.0
#: Seconds before a capacity block's end at which training has to stop: EC2 ends its machines from half an
#: hour before on, and the checkpoint has 15 minutes.
_BLOCK_LEAD_S = 2700


class Ec2(Machine):
    """The machine that this program runs on.

    rank: among the attempt's nodes. address: where they reach it. boot_s: when the machine's program began,
    in seconds since boot.
    """

    def __init__(
        self, program: NodeProgram, *, rank: int, address: str, boot_s: float, stop: Stop, clock: Clock
    ) -> None:
        gpus = Gpus(program.num_gpus, has_nvswitch=program.has_nvswitch)
        super().__init__(program, work=WORK, gpus=gpus, stop=stop, clock=clock, log=Log(clock.uptime_s))
        self._rank = rank
        self._boot_s = boot_s
        booted = json.loads((STATE / "boot.json").read_text())
        self._identity = Identity(
            token=program.token,
            node=rank,
            instance_id=booted["instance_id"],
            instance_type=booted["instance_type"],
            zone=booted["zone"],
        )
        #: The first is cut short once the agent has to stop; the second does what has to be done in any case.
        self._work_cli = AwsCli(program.region, cut=stop.event)
        self._cli = AwsCli(program.region)
        self._upload_cli = AwsCli(program.region, is_nice=True)
        self._commands = Commands(cut=stop.event)
        self._uploads = Uploads(
            StagedStore(self._upload_cli, program.output, STATE / "stage"),
            f"node-{rank}",
            work=WORK,
            log=STATE / LOG,
            every_s=_UPLOAD_EVERY_S,
            say=self.say,
            clock=clock,
            gpu_use=gpus.use,
        )
        self._peers = Peers(
            program,
            self._cli,
            rank=rank,
            address=address,
            state=STATE,
            stop=stop,
            clock=clock,
            say=self.say,
            fail=self.fail,
        )
        self._has_restarted_fabric_manager = False
        self._pulled_s: float | None = None
        #: The image that containers start from.
        self._image = program.image
        #: Files of checkpoints that are held or in S3.
        self._known: set[str] = set()
        #: The first file of the last checkpoint with shards whose sending this node has begun, and when.
        self._begun: dict[str, tuple[str, float]] = {}
        self._has_all_ended = threading.Event()
        self._sender: threading.Thread | None = None
        self._asked_s = 0.0
        #: Whether the training under way has ended by itself, and not since a peer's had failed.
        self._is_blamed = True
        #: EC2's notice that it takes the machine; empty until there is one.
        self._notice = ""

    def ask(self, reason: str) -> None:
        """Ask all nodes to stop."""
        self._peers.alarm(reason)
        if self.stop.ask(reason):
            self._asked_s = self.uptime_s()
            self.say(f"stopping: {reason}")

    def fail(self, problem: str, name: str = CONFIGURATION) -> None:
        """Report that neither this node nor the others can do anything more."""
        super().fail(problem, name)
        self._peers.alarm(f"failed {name} {problem}")

    # Getting ready

    def prepare(self) -> bool:
        program = self.program
        self._uploads.start()
        self._begin_to_watch()
        if program.has_instance_store and not self._use_instance_store():
            self.say("no instance store: using the root volume")
        for folder in ("code/user", "out", "log"):
            (WORK / folder).mkdir(parents=True, exist_ok=True)
        if program.needs_efa and not list(Path("/dev/infiniband").glob("uverbs*")):
            self.fail("fabric")
        if self.stop.event.is_set() or (program.num_gpus and not self._are_gpus_up()):
            return False
        self._systemctl("start", "containerd.service", "docker.service", limit_s=300)
        steps: tuple[tuple[bool, str, int, float, Callable[[], bool]], ...] = (
            (True, "docker", 24, 5, self._has_docker),
            (bool(program.secrets), "secret", 5, 10, lambda: self.read_secrets(self._work_cli)),
            (program.code_uri is not None, "code", 5, 10, self._fetch_code),
            (True, "image pull", 5, 20, self._pull),
        )
        for is_needed, problem, number, pause_s, step in steps:
            if is_needed and not self._try(number, pause_s, step, problem):
                return False
        if not (self._install() and all(self._fetch_input(*source) for source in program.inputs.items())):
            return False
        self._pulled_s = self.uptime_s()
        return self._try(20, 15, self._peers.find_master, "rank 0")

    def _begin_to_watch(self) -> None:
        """Watch for everything that may end this node, and send checkpoints."""
        program = self.program
        up_s = self.uptime_s() - self._boot_s
        self._after(program.max_minutes * 60 - stop_lead_s(program.max_minutes) - up_s, WATCHDOG)
        if program.block_ends_at:
            self._heed_block(program.block_ends_at)
        self._peers.begin()
        pause_s = 10 if self._peers.is_alone else 5
        self._every(pause_s, "abort", lambda: bool(self._peers.look() and self.stop.reason))
        if program.is_spot:
            self._every(5, SPOT, self._look_for_notice)
        self._every(2, "held", self._hold_checkpoints)
        self._sender = self._every(5, "checkpoints", self._send_checkpoints)

    def _heed_block(self, ends_at: str) -> None:
        # The clock is right by now: S3 takes nothing from one that is a quarter of an hour wrong.
        left_s = block_left_s(ends_at, datetime.now(timezone.utc))
        if left_s <= 0:
            self.fail(BLOCK)
            return
        self._after(left_s, BLOCK)
        minutes = left_s // 60 + 15
        if minutes < self.program.max_minutes:
            Commands().run("shutdown", "-P", f"+{minutes}", limit_s=60)

    def _after(self, seconds: float, reason: str) -> None:
        def wait() -> None:
            self.clock.wait(max(0.0, seconds))
            self.ask(reason)

        threading.Thread(target=wait, name=reason, daemon=True).start()

    def _every(self, seconds: float, name: str, look: Callable[[], bool]) -> threading.Thread:
        return self.clock.every(seconds, look, name=name, say=self.say)

    def _try(self, number: int, pause_s: float, step: Callable[[], bool], problem: str) -> bool:
        """Try a step up to `number` times; return whether it succeeded and the agent goes on."""
        cut = self.stop.event
        is_done = self.clock.attempts(number, pause_s, step, cut=cut)
        if not is_done and not cut.is_set():
            self.fail(problem)
        return bool(is_done) and not cut.is_set()

    def _look_for_notice(self) -> bool:
        notice = metadata("spot/instance-action")
        if notice is None:
            return False
        self.say(notice)
        self._notice = notice
        self.ask(SPOT)
        return True

    def _use_instance_store(self) -> bool:
        """Put docker's images and the files of the runs on the instance's local disks, if these come up."""
        if not self.clock.attempts(36, 5, lambda: os.path.ismount(INSTANCE_STORE), cut=self.stop.event):
            return False
        self._systemctl("stop", "docker.socket", "docker.service", "containerd.service", limit_s=300)
        for name in ("docker", "containerd", "fastlaunch"):
            source, target = INSTANCE_STORE / name, WORK.parent / name
            source.mkdir(exist_ok=True)
            target.mkdir(parents=True, exist_ok=True)
            if not self._commands.run("mount", "--bind", str(source), str(target), limit_s=60).is_ok:
                return False
        return True

    def _systemctl(self, *arguments: str, limit_s: float = 60) -> bool:
        return self._commands.run("systemctl", *arguments, limit_s=limit_s).is_ok

    def _are_gpus_up(self) -> bool:
        """Return whether all GPUs come up and are sound, and begin to watch them."""
        program, gpus, cut = self.program, self.gpus, self.stop.event
        if program.has_nvswitch and not self.clock.attempts(60, 5, self._has_fabric_manager, cut=cut):
            if not cut.is_set():
                self.fail("fabric manager", HARDWARE)
            return False
        # Driver and links may come up a while after the machine.
        self.clock.attempts(12, 10, lambda: gpus.has_driver() and gpus.fault() is None, cut=cut)
        if cut.is_set():
            return False
        if not gpus.has_driver():
            self.fail("driver")
            return False
        if not self.has_sound_gpus():
            return False
        self._every(10, "kernel log", self._look_at_kernel_log)
        return True

    def _has_fabric_manager(self) -> bool:
        unit = "nvidia-fabricmanager"
        if self._systemctl("is-active", "--quiet", unit):
            return True
        # It gives up if it starts before the GPUs' links are up, and does not restart by itself.
        if not self._has_restarted_fabric_manager and self._systemctl("is-failed", "--quiet", unit):
            self._has_restarted_fabric_manager = True
            self.say(f"{unit} has failed: restarted once")
            self._systemctl("reset-failed", unit)
            self._systemctl("restart", unit, limit_s=120)
        return False

    def _look_at_kernel_log(self) -> bool:
        # The log is read all the time, because a training may wait long for a GPU that is gone.
        fault = self.gpus.kernel_fault()
        if fault:
            self.fail(fault, HARDWARE)
        return bool(fault)

    def _has_docker(self) -> bool:
        return self._commands.run("docker", "info", limit_s=_DOCKER_S, is_quiet=True).is_ok

    def _fetch_code(self) -> bool:
        file = WORK / "code.tar.gz"
        is_here = self._work_cli.copy(self.program.code_uri, file, limit_s=_DOCKER_S)
        return is_here and self.unpack(file, self.program.code_sha256, WORK / "code")

    def _pull(self) -> bool:
        host = self.program.image.partition("/")[0]
        # A private ECR registry needs a login; any other registry is taken to be open.
        if ".dkr.ecr." in host or ".dkr.ecr-fips." in host:
            region = self.program.image_region
            password = self._work_cli.call("ecr", "get-login-password", region=region, limit_s=60)
            login = ("docker", "login", "--username", "AWS", "--password-stdin", host)
            if not (password.is_ok and self._commands.run(*login, limit_s=60, stdin=password.stdout).is_ok):
                return False
        return self._commands.run("docker", "pull", "-q", self.program.image, limit_s=_LARGE_S).is_ok

    def _install(self) -> bool:
        """Install the runs' requirements with pip, once, into an image that all containers start from."""
        program, file, folder = self.program, WORK / "requirements.tar.gz", WORK / "requirements"
        if program.requirements_uri is None:
            return True

        def fetch() -> bool:
            is_here = self._work_cli.copy(program.requirements_uri, file, limit_s=_LARGE_S)
            return is_here and self.unpack(file, program.requirements_sha256, folder)

        began_s = self.uptime_s()
        if not self._try(5, 10, fetch, "requirements"):
            return False
        options = ["--name", _PREPARED, "--log-driver", "none", "--entrypoint", "/bin/bash", "-w", "/"]
        options += ["-v", f"{WORK}/code:/fastlaunch:ro"] if program.code_uri else []
        options += ["-v", f"{folder}:/requirements:ro"]
        # A variable may name pip's index.
        options += [word for item in program.environment.items() for word in ("-e", "=".join(item))]
        options += [word for name in self.secrets for word in ("-e", name)]
        command = ["/fastlaunch/run_train.sh", "--install", "/requirements"]
        run = ["docker", "run", *options, program.image, *command]
        done = self._commands.run(*run, limit_s=_LARGE_S, environment=self.secrets)
        if not self.has_installed(done):
            return False
        if not self._commands.run("docker", "commit", _PREPARED, _PREPARED, limit_s=_LARGE_S).is_ok:
            if not self.stop.event.is_set():
                self.fail("docker")
            return False
        self._image = _PREPARED
        self.phase("requirements", began_s, file.stat().st_size)
        return True

    def _fetch_input(self, name: str, uri: str) -> bool:
        """Download the object, or all under a URI that ends with a slash; fail if that is impossible."""
        began_s, folder, cut = self.uptime_s(), WORK / "inputs" / name, self.stop.event
        folder.mkdir(parents=True, exist_ok=True)
        if not uri.endswith("/"):
            # The role may read it, and not list where it lies.
            file = folder / uri.rpartition("/")[2]
            is_here = self._try(
                *(5, 10, lambda: self._work_cli.copy(uri, file, limit_s=_LARGE_S)),
                f"input {name}: {uri} cannot be read",
            )
            if is_here:
                self.phase(f"input {name}", began_s, file.stat().st_size)
            return is_here
        free = shutil.disk_usage(folder).free
        num_bytes: int | None = None

        def look() -> bool:
            nonlocal num_bytes
            num_bytes = self._work_cli.num_bytes(uri)
            return num_bytes is not None

        problem = ""
        if not self.clock.attempts(5, 10, look, cut=cut):
            problem = f"{uri} cannot be listed"
        elif not num_bytes:
            problem = f"nothing lies under {uri}"
        elif num_bytes + _SPARE_BYTES > free:
            problem = f"{num_bytes / 1e9:,.1f} GB lie under {uri}, and the disk has {free / 1e9:,.1f} GB free"
        elif not self.clock.attempts(5, 10, lambda: self._work_cli.sync(uri, folder), cut=cut):
            problem = f"{uri} cannot be read"
        if problem:
            if not cut.is_set():
                self.fail(f"input {name}: {problem}")
            return False
        self.phase(f"input {name}", began_s, num_bytes)
        return True

    # Runs

    def start(self, number: int, run: NodeRun) -> Training | None:
        for folder in ("out", "log"):
            (WORK / folder / run.run_id).mkdir(parents=True, exist_ok=True)
        (WORK / "hub").mkdir(exist_ok=True)
        # The launcher may have settled the run meanwhile. If S3 does not answer, it has not.
        skip, asks = skip_name(run.run_id), self._rank == 0 and not self.num_restarts
        skipped = self._work_cli.names(f"{self.program.output}/{skip}") if asks else None
        is_skipped = run.run_id in (skipped or ())
        is_later = self.program.attempt > 1
        # What rank 0 has saved, the other nodes have yet to get.
        if not is_skipped and (not self._peers.is_alone if self.num_restarts else is_later):
            what = f"checkpoint of {run.run_id}"
            if not self._try(5, 10, lambda: self._resume(run.run_id), what):
                return None
        step = self._step(number) if self.num_restarts else str(number)
        is_skipped = self._peers.meet(step, is_skipped=is_skipped) is True
        if not self.goes_on():
            return None
        if is_skipped:
            self.say(f"run {run.run_id}: skipped")
            self.skipped.append(run.run_id)
            return None
        self.say(f"run {run.run_id}")
        if run.is_script:
            self._uploads.script_starts(run.run_id)
            # Its checkpoint holds all of it, as it was when it was saved.
            shutil.rmtree(self.output_of(run) / "output", ignore_errors=True)
        resume = ["--resume"] if is_later or self.num_restarts else []
        command = ["/fastlaunch/run_train.sh", "--output", "/out", *resume, *run.arguments]
        return ContainerTraining(
            self._options(number, run),
            self._image,
            command,
            log=WORK / "log" / run.run_id / LOG,
            secrets=self.secrets,
        )

    def _resume(self, run_id: str) -> bool:
        """Download the newest checkpoint of an earlier start; return True also if there is none."""
        if not self.num_restarts and not self._count_attempts(run_id):
            return False
        uri = f"{self.program.runs_uri}/{run_id}/checkpoints"
        names = self._work_cli.names(f"{uri}/")
        if names is None:
            return False
        saved = newest_checkpoint(names)
        folder = WORK / "out" / run_id / "checkpoints"
        folder.mkdir(parents=True, exist_ok=True)
        for name in saved:
            self._known.add(f"{run_id}/{name}")
            if (folder / name).exists():
                continue
            if not self._work_cli.copy(f"{uri}/{name}", folder / ".part", limit_s=_LARGE_S):
                return False
            (folder / ".part").replace(folder / name)
        if saved:
            self.say(f"going on from {saved[0]}")
        return True

    def _count_attempts(self, run_id: str) -> bool:
        """Give the run's records a number after those of earlier attempts, which may have begun it again."""
        program = self.program
        for attempt in range(1, program.attempt):
            uri = attempt_uri(program.runs_uri, program.runs[0].run_id, attempt)
            names = self._work_cli.names(f"{uri}/node-0/{run_id}/rank-")
            if names is None:
                return False
            self.attempt = max(self.attempt, 1 + last_attempt(names))
        return True

    def _step(self, number: int) -> str:
        """Return the name, among nodes, of the start of run `number` that is under way."""
        return f"{number}.{self.num_restarts}"

    def _options(self, number: int, run: NodeRun) -> list[str]:
        """Return the options of `docker run`."""
        program, options = self.program, ["--log-driver", "none", "--entrypoint", "/bin/bash"]
        options += ["--gpus", "all"] if program.num_gpus else []
        options += ["--ipc", "host", "--ulimit", "memlock=-1", "--ulimit", "stack=67108864"]
        options += ["--stop-timeout", "100", "-w", "/fastlaunch/user"]
        options += ["-v", f"{WORK}/code:/fastlaunch:ro"] if program.code_uri else []
        options += ["-v", f"{WORK}/out/{run.run_id}:/out"]
        for name in program.inputs:
            options += ["-v", f"{WORK}/inputs/{name}:{INPUTS}/{name}:ro"]
        # What one run fetched from Hugging Face's hub, those after it need not.
        options += ["-v", f"{WORK}/hub:/fastlaunch-hub"]
        environment = {
            "FASTLAUNCH_HUB": "/fastlaunch-hub",
            "FASTLAUNCH_RUN_ID": run.run_id,
            "FASTLAUNCH_TOKEN": program.token,
            **program.environment,
            **run.environment,
            "FASTLAUNCH_ATTEMPT": str(self.attempt),
        }
        if self.num_restarts:
            environment["FASTLAUNCH_RESTARTED_AFTER"] = self.restarted_after
        if not self._peers.is_alone:
            options += ["--network", "host"]
            devices = sorted(Path("/dev/infiniband").glob("*"))
            options += [word for path in devices if path.is_char_device() for word in ("--device", str(path))]
            environment |= {
                "FASTLAUNCH_NODE_RANK": str(self._rank),
                "FASTLAUNCH_MASTER_ADDR": self._peers.master,
                # Each start has its own port, because the one before may leave its port occupied.
                "FASTLAUNCH_MASTER_PORT": str(PORT + number + self.num_restarts * len(program.runs)),
            }
        return [*options, *(word for item in environment.items() for word in ("-e", "=".join(item)))]

    def ending(self, number: int) -> Ending | None:
        if self.stop.reason:
            grace_s = _GRACE_S
            if self.stop.reason == WATCHDOG:
                grace_s = min(grace_s, stop_lead_s(self.program.max_minutes) // 2)
            if self._peers.is_hasty:
                grace_s = _HASTY_GRACE_S
        elif self._peers.failed & {str(number), self._step(number)}:
            grace_s = _HASTY_GRACE_S
        elif self.stop.is_faulty:
            # It may still be able to save a checkpoint.
            grace_s = _GRACE_S
        else:
            return None
        return Ending(kill_after_s=grace_s + _MARGIN_S, grace_s=grace_s)

    def begins_again(self, number: int, run: NodeRun, code: int, saved: int) -> bool:
        peers, step = self._peers, self._step(number)
        if peers.is_alone:
            return super().begins_again(number, run, code, saved)
        # A peer's failure may have ended it.
        self.clock.attempts(3, 1, peers.look)
        self._is_blamed = not peers.failed & {str(number), step}
        if self.stop.event.is_set() or str(number) in peers.failed:
            return False
        begins = not self._is_blamed or self.may_go_on(run, code)
        if begins and self._is_blamed:
            peers.tell_failed(step)
        if begins and self._rank == 0:
            # All nodes go on from what S3 has.
            begins = self.saved_step(run) > saved and self._has_sent_checkpoint(run)
        if not begins:
            if not self.stop.event.is_set():
                peers.tell_failed(str(number))
            return False
        return self._rank == 0 or peers.is_begun_again(number, f"{number}.{self.num_restarts + 1}")

    def _has_sent_checkpoint(self, run: NodeRun) -> bool:
        """Wait until S3 has the newest checkpoint, with the files of all nodes; return whether it has."""
        folder = self.output_of(run) / "checkpoints"
        uri = f"{self.program.runs_uri}/{run.run_id}/checkpoints/"
        first = max(filter(CHECKPOINT.fullmatch, (path.name for path in folder.glob("step-*"))), default=None)

        def is_sent() -> bool:
            return newest_checkpoint(self._work_cli.names(uri) or ())[:1] == [first]

        return first is not None and bool(self.clock.attempts(120, 5, is_sent, cut=self.stop.event))

    def cause(self, run: NodeRun) -> str:
        return cause_of(self.output_of(run), WORK / "log" / run.run_id / LOG, self.attempt)

    def conclude(self, number: int, run: NodeRun, code: int, *, is_killed: bool) -> None:
        if self.stop.reason is None:
            self.has_sound_gpus(code_of_machine(run, code))
        is_ended = self.stop.reason or self.stop.is_faulty or not self._is_blamed
        state = COMPLETED if code == 0 else INTERRUPTED if is_ended else FAILED
        self.note_end(number, state, code)
        if state == FAILED:
            self._peers.tell_failed(str(number))
            problem = problem_after(code_of_machine(run, code), work=WORK)
            if problem is None and not self._has_docker() and self.goes_on():
                problem = "docker"
            if problem:
                self.fail(problem)
        if run.is_script:
            self._uploads.script_ended(run.run_id)
        # The checkpoint holds the same, and goes first in the two minutes that EC2 leaves.
        if state == COMPLETED or self.stop.reason != SPOT:
            self._uploads.output_folders(run.run_id, self.program.attempt)

    def leave(self) -> None:
        self._peers.part()

    def _hold_checkpoints(self) -> bool:
        """Keep what training may remove before it is sent; return whether nothing more will come."""
        has_all_ended = self._has_all_ended.is_set()
        for folder in sorted((WORK / "out").glob("*/checkpoints")):
            held = WORK / "held" / folder.parent.name
            held.mkdir(parents=True, exist_ok=True)
            files = checkpoints(folder, self._uploads.leave_out_file)
            for path in (path for paths in files.values() for path in paths):
                if (name := f"{held.name}/{path.name}") not in self._known:
                    with suppress(FileNotFoundError, FileExistsError, NotRegular):
                        hold(path, held / path.name, below=WORK)
                        self._known.add(name)
        return has_all_ended

    def _send_checkpoints(self) -> bool:
        """Send what is not in S3 yet, one checkpoint at a time; return whether nothing more will come."""
        has_all_ended = self._has_all_ended.is_set()
        ended = {end.run_id for end in self.ends if end.ended_s is not None}
        is_waiting = False
        self._hold_checkpoints()
        for held in sorted((WORK / "held").glob("*")):
            for path in self._due(held, has_ended=held.name in ended):
                key = f"{held.name}/checkpoints/{path.name}"
                if not self._upload_cli.copy(path, f"{self.program.runs_uri}/{key}", limit_s=_LARGE_S):
                    is_waiting = True
                    break
                path.unlink()
                self.say(f"sent {key}")
            else:
                if held.name in ended:
                    shutil.rmtree(WORK / "out" / held.name / "checkpoints", ignore_errors=True)
        return has_all_ended and not is_waiting

    def _due(self, held: Path, *, has_ended: bool) -> list[Path]:
        """Return the files of a run to send now, and remove those of older checkpoints.

        They are the newest one's. But nodes have to send their shards of the same one, however often training
        saves: the node of rank 0 decides by sending the first file, and no other one's before all have sent
        their shards.
        """
        here, (begun, begun_s) = checkpoints(held), self._begun.get(held.name, ("", 0.0))
        firsts = [key for key, paths in here.items() if CHECKPOINT.fullmatch(paths[0].name)]
        is_sharded = any(attempt for _, attempt in here)
        keys = firsts[-1:]
        if here and is_sharded and not has_ended:
            names = self._upload_cli.names(f"{self.program.runs_uri}/{held.name}/checkpoints/")
            if names is None:
                return []
            first_keys = {checkpoint_key(name) for name in names if CHECKPOINT.fullmatch(name)}
            is_begun = begun in names and self.uptime_s() - begun_s < _LARGE_S
            if not firsts or (is_begun and checkpoint_key(begun) in here):
                keys = [key for key in here if key in first_keys][-1:]
            elif is_begun and missing_files(begun, names):
                keys = []
        elif not firsts:
            keys = [*reversed(here)]
        if keys and keys == firsts[-1:]:
            self._begun[held.name] = (here[keys[0]][0].name, self.uptime_s())
        for key in here if keys else ():
            for path in here[key] if key < keys[-1] else ():
                path.unlink()
        return [path for key in keys for path in here[key]]

    # The end

    def finish(self, outcome: Outcome) -> int:
        self._has_all_ended.set()
        self.say(f"{outcome.name} {outcome.reason or ''}")
        self._peers.alarm(f"failed {outcome.name}")
        is_taken = self.stop.reason == SPOT
        wait_s = 900.0
        if is_taken:
            # Everything has to be sent before EC2 takes the machine, 120 s after the notice.
            wait_s = max(_LAST_LINES_S, 100 + self._asked_s - self.uptime_s())
        elif self.stop.reason == BLOCK:
            wait_s = 600
        elif self.stop.reason == WATCHDOG:
            wait_s = stop_lead_s(self.program.max_minutes) // 4
        sender = self._sender
        began_s = self.uptime_s()
        if self._uploads.last(wait_s) and sender:
            if is_taken:
                wait_s -= self.uptime_s() - began_s
            self.clock.attempts(int(wait_s), 1, lambda: not sender.is_alive())
        billed_until = _time_of(self._notice) if is_taken else None
        self._say_last(outcome, billed_until=billed_until)
        if is_taken:
            # A machine that EC2 takes in its first hour is free; one that turns itself off is not.
            self.say("waiting for EC2")
            self.clock.wait(900)
        return 0

    def _say_last(self, outcome: Outcome, *, billed_until: str | None) -> None:
        last = status(
            self._identity,
            outcome,
            self.ends,
            uptime_s=self.uptime_s(),
            boot_s=self._boot_s,
            pull_s=self._pulled_s,
            phases=self.phases,
            billed_until=billed_until,
            gpu_notes=self.gpus.notes,
            left_out=self._uploads.left_out,
        )
        path = STATE / "status.json"
        path.write_text(json.dumps(last) + "\n")
        self._uploads.last(_LAST_LINES_S)
        uri = f"{self.program.output}/{status_name(self._rank)}"
        self.clock.attempts(5, 10, lambda: self._cli.copy(path, uri))


def main(arguments: Sequence[str], clock: Clock) -> int:
    """Do the runs of the list, and turn the machine off, whatever happens.

    arguments: the file of the list, this node's rank and address, and when its program began, in seconds
    since boot.
    """
    try:
        file, rank, address, boot_s = arguments
        stop = Stop()
        stop_on_signals(stop, "shutdown", clock)
        program = program_from_json(Path(file).read_text())
        machine = Ec2(program, rank=int(rank), address=address, boot_s=float(boot_s), stop=stop, clock=clock)
        return machine.work()
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        power_off(clock)


def power_off(clock: Clock) -> None:
    """Turn the machine off.

    A regular shutdown may wait half an hour for a service that does not end, such as docker or a package
    upgrade, so a forced one follows it.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    Log(clock.uptime_s)("turning off")
    commands = Commands()
    while not (
        commands.run("shutdown", "-P", "now", limit_s=60).is_ok
        or commands.run("systemctl", "poweroff", "--force", limit_s=60).is_ok
    ):
        clock.wait(5)
    clock.wait(240)
    commands.run("systemctl", "poweroff", "-ff", limit_s=60)


def metadata(name: str) -> str | None:
    """Return the metadata service's value of `name`; None if it has none."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with suppress(OSError, ValueError):
        token_ttl = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
        ask = urllib.request.Request(f"{_IMDS}/api/token", method="PUT", headers=token_ttl)
        with opener.open(ask, timeout=5) as answer:
            token = answer.read().decode()
        get = urllib.request.Request(f"{_IMDS}/meta-data/{name}", headers={"X-aws-ec2-metadata-token": token})
        with opener.open(get, timeout=5) as answer:
            return str(answer.read().decode())
    return None


def block_left_s(ends_at: str, now: datetime) -> int:
    """Return seconds until training has to stop in a capacity block that ends at `ends_at` (ISO 8601)."""
    return int((datetime.fromisoformat(ends_at) - now).total_seconds()) - _BLOCK_LEAD_S


def _time_of(notice: str) -> str | None:
    """Return when EC2 takes the machine, according to its notice; None if that names no time."""
    with suppress(ValueError, AttributeError):
        return str(json.loads(notice).get("time") or "") or None
    return None

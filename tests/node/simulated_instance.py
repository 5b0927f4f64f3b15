"""An EC2 instance without EC2: it runs the user data that the service holds, unmodified, to its shutdown.

The instance has namespaces of its own for network, mounts, processes and boot time. Its root is this
machine's, with all that is written kept in memory; `shutdown`, `systemctl`, `sysctl`, `sleep`, `docker` and
`nvidia-smi` are stand-ins, `aws` is awscli v1, and the metadata service listens at its usual address. When
the machine turns off, the moto server is told so.
"""

import base64
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fake_nvidia_smi import DMESG, NVIDIA_SMI, report
from instance_network import MetadataService, Switch, Wire, listen_inside
from moto_server import MotoServer
from server_client import server_client

import fastlaunch_train

HERE = Path(__file__).parent
#: Trains in place of the container: what it reads in the environment is said there.
STAND_IN = HERE.parent / "launcher" / "fake_train" / "entrypoint.py"
SCALED_AGENT = HERE / "scaled_agent.py"
AWS_CLI = Path(sys.executable).parent / "aws"
_ENDPOINT = ("10.254.0.1", 8000)
#: Where a container reaches what stands for the web.
WEB = ("10.254.0.1", 8080)
_METADATA = ("169.254.169.254", 80)
_PROGRAMS = ("unshare", "nsenter", "chroot", "ip", "mount", "flock", "curl")
_BOOT_S = 21.5

_SLEEP = """#!/bin/bash
# Seconds of the instance, given in {scale} times fewer of ours.
exec /usr/bin/sleep "$(awk "BEGIN {{ print $1 / {scale} }}")"
"""
_PYTHON = """#!/bin/bash
[ "$1" = -I ] || exec {python} -IS "$@"
exec {python} -IS {agent} {scale} "$@"
"""
_OFF = "echo now >/sim/off.new && mv /sim/off.new /sim/off"
_SHUTDOWN = """#!/bin/bash
# shutdown -P now | +MINUTES
case $2 in
  now) {now} ;;
  +*)
    (sleep "$((${{2#+}} * 60))" && echo timer >/sim/off.new && mv /sim/off.new /sim/off) \\
      </dev/null >/dev/null 2>&1 &
    ;;
esac
"""
_POWEROFF = f"#!/bin/bash\n{_OFF}\n"
_SYSTEMCTL = """#!/bin/bash
# Remembers which services run; docker does at first.
echo "$*" >>/sim/systemctl.log
mkdir -p /run/fake-systemd
command=$1
shift
[ "$command" != poweroff ] || exec poweroff
for unit in "$@"; do
  [[ $unit != -* ]] || continue
  case $command in
    start) touch "/run/fake-systemd/$unit" ;;
    stop) rm -f "/run/fake-systemd/$unit" ;;
    is-active) [ -e "/sim/$unit.active" ] || exit 3 ;;
    is-failed) [ -e "/sim/$unit.failed" ] || exit 1 ;;
    restart) mv "/sim/$unit.failed" "/sim/$unit.active" ;;
  esac
done
exit 0
"""

_REAL_DOCKER = """#!/bin/bash
# The node's folders are its instance store's, which the daemon sees elsewhere.
arguments=("${{@//\\/var\\/lib\\/fastlaunch\\//{store}/fastlaunch/}}")
[ "$1" != run ] || arguments=(run {options} "${{arguments[@]:1}}")
# Raising this limit needs a capability that root of a container has not.
if ! (ulimit -l unlimited) 2>/dev/null; then
  for at in "${{!arguments[@]}}"; do
    [ "${{arguments[at]}}" != memlock=-1 ] || unset "arguments[at-1]" "arguments[at]"
  done
fi
DOCKER_HOST=unix:///sim/docker.sock exec {client} "${{arguments[@]}}"
"""


@dataclass(frozen=True, kw_only=True)
class RealDocker:
    """A daemon of this machine in place of the stand-in; the instance then needs an instance store.

    socket: on the file system of the instance's folder. client: the program. options: of every `docker run`
    besides those that the node gives.
    """

    socket: Path
    client: str
    options: tuple[str, ...] = ()


def cannot_simulate() -> str | None:
    """Why this machine cannot run simulated instances, None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a simulated instance needs root on Linux: it makes namespaces and mounts"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"a simulated instance needs {', '.join(missing)}"
    if not AWS_CLI.exists():
        return "a simulated instance needs awscli: install the extra `test`"
    tried = subprocess.run(
        ["unshare", "--mount", "--net", "--pid", "--fork", "--time", "true"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return f"this machine makes no namespaces: {tried.stderr.strip()}" if tried.returncode else None


class SimulatedInstance:
    """The instance `instance_id` of `moto`, off until `start`.

    folder: an empty one of its own. scale: seconds of the instance (of sleep and shutdown) in one of ours.
    training: `real` runs the container's command, `fake` the stand-in instead. num_gpus: that its driver
    shows. gpus: what nvidia-smi says of them, if they are not sound. missing_images: cannot be pulled.
    fabric_manager: whether it comes up, `late` if it has to be restarted. broken_runtime: docker can start no
    container. connected: whether it reaches AWS at first. store_mib: size of its instance store, 0 for none.
    shutdown_ends: whether its services let an orderly shutdown come to an end. switch: what it reaches other
    instances by. has_aws_cli: whether its image brings one. web: a server that its containers reach as WEB.
    """

    def __init__(
        self,
        moto: MotoServer,
        instance_id: str,
        *,
        folder: Path,
        scale: float = 20.0,
        training: str = "fake",
        num_gpus: int = 1,
        gpus: str | None = None,
        store_mib: int = 4096,
        missing_images: tuple[str, ...] = (),
        fabric_manager: bool | str = True,
        broken_runtime: bool = False,
        connected: bool = True,
        shutdown_ends: bool = True,
        docker: RealDocker | None = None,
        switch: Switch | None = None,
        has_aws_cli: bool = True,
        web: tuple[str, int] | None = None,
    ) -> None:
        self._moto = moto
        self.instance_id = instance_id
        self._instance = moto.instance(instance_id)
        self.region: str = self._instance.ec2_backend.region_name
        self._folder = folder
        self._scale = scale
        self._endpoint = urlsplit(moto.url)
        self._store_mib = store_mib
        self._connected = connected
        self._shutdown_ends = shutdown_ends
        self._fabric_manager = fabric_manager
        self._num_gpus = num_gpus
        self._gpus = report(num_gpus) if gpus is None else gpus
        self._docker = docker
        self._switch = switch
        self._has_aws_cli = has_aws_cli
        self._web = web
        self._settings = {
            "container_scale": scale if training == "fake" else 1.0,
            "missing_images": list(missing_images),
            "broken_runtime": broken_runtime,
            "reaches_web": web is not None,
            "stand_in": str(STAND_IN) if training == "fake" else None,
            "stand_in_path": str(Path(fastlaunch_train.__file__).parents[1]),
            "python": sys.executable,
            "python_folder": str(Path(sys.executable).parent),
        }
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._why = ""

    # What happens to it

    def start(self) -> "SimulatedInstance":
        """Boot; returns at once."""
        sim = self._furnish()
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
        namespaces = ["--mount", "--net", "--pid", "--fork", "--kill-child"]
        boot_time = ["--time", "--boottime", str(int(_BOOT_S - uptime_s))]
        enter = ["bash", str(HERE / "enter_instance.sh"), str(sim), str(self._store_mib)]
        with (sim / "enter.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["unshare", *namespaces, *boot_time, *enter],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._wait_until(lambda: (sim / "ready").exists() or self._process.poll() is not None, 30)
        assert self._process.poll() is None, (sim / "enter.log").read_text()
        metadata, wire, web = listen_inside(self._process.pid, [_METADATA, _ENDPOINT, WEB])
        spot = self._instance.lifecycle == "spot"
        address = self._switch.attach(self._process.pid) if self._switch else "10.254.0.1"
        self.metadata = MetadataService(
            metadata,
            {
                "instance-id": self.instance_id,
                "instance-type": self._instance.instance_type,
                "placement/availability-zone": self._instance.placement.zone,
                "instance-life-cycle": "spot" if spot else "on-demand",
                "ami-launch-index": str(self._instance.ami_launch_index),
                "local-ipv4": address,
            },
        )
        assert self._endpoint.hostname is not None and self._endpoint.port is not None
        self._wire = Wire(wire, (self._endpoint.hostname, self._endpoint.port))
        self._web_wire = Wire(web, self._web or WEB)
        if not self._connected:
            self._wire.cut()
        self._moto.set_instance(self.instance_id, state="running")
        self._moto.when_terminated.append(self._terminated)
        (sim / "go").touch()
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def spot_notice(self) -> None:
        """EC2 says that it will take the machine in two minutes."""
        soon = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 120))
        notice = {"action": "terminate", "time": soon}
        self.metadata.values["spot/instance-action"] = json.dumps(notice)

    def take(self) -> None:
        """EC2 takes the spot instance."""
        self._end("taken", "Server.SpotInstanceTermination: Spot instance termination")

    def gpus_show(self, percent: int) -> None:
        """Let nvidia-smi say that each GPU is so busy."""
        (self._folder / "sim" / "gpu-use").write_text(f"{percent}\n")

    def kernel_says(self, line: str) -> None:
        """Add a line to what `dmesg` prints."""
        with (self._folder / "sim" / "dmesg").open("a") as log:
            log.write(line)

    def kill_container(self) -> None:
        """Its container's processes are killed, as by the kernel where memory runs out."""
        inside = self._folder / "sim" / "disk" / "root"
        enter = ["nsenter", "-t", str(self._inside()), "--mount", "--net", "--pid"]
        docker = ["/sim/bin/docker", "kill", "fastlaunch"]
        subprocess.run([*enter, "chroot", str(inside), *docker], check=True, stdout=subprocess.DEVNULL)

    def kill_rank(self, rank: int) -> None:
        """A rank of its training is killed, and neither torchrun nor what the rank has started."""
        for process in _descendants(self._process.pid):
            with suppress(OSError):
                if f"RANK={rank}".encode() in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
                    os.kill(process, signal.SIGKILL)
                    return
        raise AssertionError(f"no rank {rank} runs; its console:\n{self.console}")

    def kill_agent(self) -> None:
        """The node agent is killed, and can do nothing more."""
        for process in _descendants(self._process.pid):
            with suppress(OSError):
                if SCALED_AGENT.name.encode() in Path(f"/proc/{process}/cmdline").read_bytes():
                    os.kill(process, signal.SIGKILL)
                    return
        raise AssertionError(f"no agent runs; its console:\n{self.console}")

    def cut_network(self) -> None:
        """Nothing reaches AWS any more; the metadata service is on the machine and still answers."""
        self._wire.cut()

    def mend_network(self) -> None:
        self._wire.mend()

    def close(self) -> None:
        """Pull the plug, if it runs, and tell nobody."""
        self._end("unplugged", None)

    # What can be seen of it

    @property
    def is_on(self) -> bool:
        return not self._ended.is_set()

    @property
    def disk(self) -> Path:
        """Its root folder, while it is on: reading there takes no part in what happens."""
        return Path(f"/proc/{self._inside()}/root{self._folder / 'sim' / 'disk' / 'root'}")

    @property
    def console(self) -> str:
        """What it wrote to its console."""
        path = self._folder / "sim" / "console.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def docker_calls(self) -> list[list[str]]:
        """Arguments of every call of docker."""
        path = self._folder / "sim" / "docker.log"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def records(self) -> dict[str, str]:
        """SHA-256 of every record as its container left it, by run id and name."""
        path = self._folder / "sim" / "records"
        lines = path.read_text().splitlines() if path.exists() else []
        return {line.split()[1]: line.split()[0] for line in lines}

    def num_record_lines(self, run_id: str) -> int:
        """Of all records that the run has written so far."""
        folder = self.disk / "var/lib/fastlaunch/out" / run_id
        return sum(len(path.read_bytes().splitlines()) for path in folder.glob("rank-*.jsonl"))

    def wait(self, timeout_s: float = 180.0) -> str:
        """Why it is off: `shutdown`, `timer` (its `shutdown +N`), `taken`, `terminated` or `unplugged`."""
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"still on after {timeout_s:g} s; its console:\n{self.console}")
        return self._why

    # Inside

    def _inside(self) -> int:
        """Its first process."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text()
        return int(children.split()[0])

    def _furnish(self) -> Path:
        sim = self._folder / "sim"
        (sim / "bin").mkdir(parents=True)
        (sim / "disk").mkdir()
        docker = f'#!/bin/bash\nexec {sys.executable} -IS {HERE / "fake_docker.py"} "$@"\n'
        if self._docker is not None:
            (sim / "nvme").mkdir()
            (sim / "docker.sock").hardlink_to(self._docker.socket)
            options = shlex.join(self._docker.options)
            docker = _REAL_DOCKER.format(store=sim / "nvme", options=options, client=self._docker.client)
        programs = {
            "sleep": _SLEEP.format(scale=self._scale),
            "shutdown": _SHUTDOWN.format(now=_OFF if self._shutdown_ends else ":"),
            "sysctl": "#!/bin/bash\n",
            "dmesg": DMESG,
            "systemctl": _SYSTEMCTL,
            "docker": docker,
            "aws": f'#!/bin/bash\nexec {AWS_CLI} "$@"\n',
            "python3": _PYTHON.format(python=sys.executable, agent=SCALED_AGENT, scale=self._scale),
            **dict.fromkeys(("poweroff", "reboot", "halt"), _POWEROFF),
        }
        if self._num_gpus:
            programs["nvidia-smi"] = NVIDIA_SMI.format(last_gpu=self._num_gpus - 1)
            (sim / "gpus.xml").write_text(self._gpus)
        if not self._has_aws_cli:
            del programs["aws"]
        for name, text in programs.items():
            (sim / "bin" / name).write_text(text)
            (sim / "bin" / name).chmod(0o755)
        (sim / "user-data").write_text(self._user_data())
        (sim / "user-data").chmod(0o755)
        (sim / "settings.json").write_text(json.dumps(self._settings))
        if self._fabric_manager:
            how = "failed" if self._fabric_manager == "late" else "active"
            (sim / f"nvidia-fabricmanager.{how}").touch()
        environment = {
            "PATH": "/sim/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "AWS_ENDPOINT_URL": f"http://{_ENDPOINT[0]}:{_ENDPOINT[1]}",
            "AWS_ACCESS_KEY_ID": "node",
            "AWS_SECRET_ACCESS_KEY": "node",
        }
        lines = [f"{name}={value}\n" for name, value in environment.items()]
        (sim / "environment").write_text("".join(lines))
        return sim

    def _user_data(self) -> str:
        """What the service holds of it."""
        ec2 = server_client(self._moto, "ec2", self.region)
        held: Any = ec2.describe_instance_attribute(InstanceId=self.instance_id, Attribute="userData")
        return base64.b64decode(held["UserData"]["Value"]).decode()

    def _watch(self) -> None:
        off = self._folder / "sim" / "off"
        while not self._ended.wait(0.03):
            if off.exists():
                how = off.read_text().strip()
                self._end(
                    "shutdown" if how == "now" else how,
                    "Client.InstanceInitiatedShutdown: Instance initiated shutdown",
                )

    def _terminated(self, region: str, instance_id: str) -> None:
        if instance_id == self.instance_id:
            self._end("terminated", None)

    def _end(self, why: str, state_reason: str | None) -> None:
        with self._lock:
            if self._ended.is_set() or not hasattr(self, "_process"):
                return
            self._process.kill()
            self._process.wait()
            self.metadata.close()
            self._wire.close()
            self._web_wire.close()
            if state_reason is not None:
                behaviour = self._instance.instance_initiated_shutdown_behavior or "stop"
                ends = why == "taken" or behaviour == "terminate"
                self._moto.set_instance(
                    self.instance_id,
                    state="terminated" if ends else "stopped",
                    state_reason=state_reason,
                )
            self._moto.console[self.instance_id] = self.console
            with suppress(ValueError):
                self._moto.when_terminated.remove(self._terminated)
            self._why = why
            self._ended.set()

    def _wait_until(self, holds: Any, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        while not holds():
            if time.monotonic() > end:
                raise TimeoutError
            time.sleep(0.01)


def _descendants(process: int) -> list[int]:
    """Ids of the processes that it started, and that those started."""
    with suppress(OSError):
        children = Path(f"/proc/{process}/task/{process}/children").read_text().split()
        return [one for child in map(int, children) for one in (child, *_descendants(child))]
    return []

"""One host of a simulated training job: a container with SageMaker's folders, and their way to S3."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fake_nvidia_smi import DMESG, NVIDIA_SMI, report
from simulated_instance import SCALED_AGENT, STAND_IN

import fastlaunch_train

HERE = Path(__file__).parent
#: SageMaker leaves such a file beside what it has copied.
_MARK = ".sagemaker-uploaded"

_FAKE_PYTHON = """#!/bin/bash
# The image's Python: the node's program has a clock of its own, and torchrun is the stand-in for training.
[ "$1" != -I ] || exec {python} -IS {agent} {scale} "$@"
[ "$2" = fastlaunch_train.process.torchrun ] || exec {python} "$@"
for word in "$@"; do
  [[ $word != --node-rank=* ]] || export FASTLAUNCH_NODE_RANK=${{word#*=}}
  [[ $word != --nnodes=* ]] || export FASTLAUNCH_NUM_NODES=${{word#*=}}
done
while [ "$1" != fastlaunch_train ]; do shift; done
shift
exec env FAKE_STEP_S="${{FAKE_STEP_S:-0.01}}" PYTHONPATH={path} {python} {stand_in} "$@"
"""


@dataclass(frozen=True, kw_only=True)
class Container:
    """What SageMaker starts on every host. environment: of the job. channels: bytes by file, by channel.

    layer: what the image has at /fastlaunch, as tar.gz.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    channels: Mapping[str, Mapping[str, bytes]]
    instance_type: str
    hosts: Sequence[str]
    layer: bytes | None = None


@dataclass(kw_only=True)
class Bucket:
    """Where checkpoints of all hosts go, and come from. written: every version of every key."""

    s3: Any
    name: str
    prefix: str
    written: dict[str, list[bytes]] = field(default_factory=dict)

    def restore(self, folder: Path) -> None:
        """Bring all that lies under the prefix."""
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=self.prefix + "/")
        for entry in (entry for page in pages for entry in page.get("Contents", ())):
            path = folder / entry["Key"].removeprefix(self.prefix + "/")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(self.s3.get_object(Bucket=self.name, Key=entry["Key"])["Body"].read())

    def put(self, name: str, data: bytes) -> None:
        self.written.setdefault(name, []).append(data)
        self.s3.put_object(Bucket=self.name, Key=f"{self.prefix}/{name}", Body=data)


class TrainingHost:
    """Host number `rank` of a job. network: id of a process in the job's network.

    training: `real` runs the container's command to its end, `fake` a stand-in instead of torchrun. scale:
    seconds of the node's program in one of ours, for `fake`.
    """

    def __init__(
        self,
        rank: int,
        container: Container,
        *,
        folder: Path,
        bucket: Bucket,
        network: int,
        training: str,
        volume_mib: int,
        mounts: str,
        scale: float,
    ) -> None:
        self.name = container.hosts[rank]
        self._sim = folder
        self._bucket = bucket
        self._copied: dict[str, tuple[int, int, int]] = {}
        self._furnish(container, training, scale)
        join = ["nsenter", f"--net=/proc/{network}/ns/net"]
        namespaces = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child"]
        enter = ["bash", str(HERE / "enter_training_host.sh"), str(folder), str(volume_mib), mounts]
        with (folder / "enter.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*join, *namespaces, *enter],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        end = time.monotonic() + 30
        while not (folder / "unshare").exists():
            assert self._process.poll() is None and time.monotonic() < end, (folder / "enter.log").read_text()
            time.sleep(0.01)
        for path in self._checkpoints.rglob("*"):
            if path.is_file():
                self._copied[str(path.relative_to(self._checkpoints))] = _version(path)

    @property
    def console(self) -> str:
        """What the container printed."""
        return (self._sim / "console.log").read_text(errors="replace")

    @property
    def exit_code(self) -> int | None:
        """Of the container; None while it runs."""
        path = self._sim / "exit"
        return int(path.read_text()) if path.exists() else None

    @property
    def failure(self) -> str:
        """What the container left for SageMaker to show."""
        path = self.disk / "opt/ml/output/failure"
        return path.read_text() if path.exists() else ""

    @property
    def disk(self) -> Path:
        """The container's root folder, until `close`."""
        (first,) = _children(self._process.pid)
        return Path(f"/proc/{first}/root{self._sim}/disk/root")

    def gpus_show(self, percent: int) -> None:
        """Let nvidia-smi say that each GPU is so busy."""
        (self._sim / "gpu-use").write_text(f"{percent}\n")

    def signal(self, number: signal.Signals) -> None:
        """To the container's first process."""
        (first,) = _children(self._process.pid)
        for inner in _children(first):
            for process in _children(inner):
                with suppress(ProcessLookupError):
                    os.kill(process, number)

    def copy(self) -> None:
        """Copy to S3 what is new, or has changed, below /opt/ml/checkpoints; what is removed stays there."""
        for path in sorted(self._checkpoints.rglob("*")):
            name = str(path.relative_to(self._checkpoints))
            with suppress(FileNotFoundError):
                if name.endswith(_MARK) or not path.is_file() or self._copied.get(name) == _version(path):
                    continue
                version = _version(path)
                self._bucket.put(name, path.read_bytes())
                self._copied[name] = version
                with suppress(OSError):
                    path.with_name(path.name + _MARK).touch()

    def close(self) -> None:
        """Take the machine away."""
        self._process.kill()
        self._process.wait()

    @property
    def _checkpoints(self) -> Path:
        return self.disk / "opt/ml/checkpoints"

    def _furnish(self, container: Container, training: str, scale: float) -> None:
        sim = self._sim
        for folder in ("bin", "disk", "ml/checkpoints", "ml/input/config"):
            (sim / folder).mkdir(parents=True)
        self._bucket.restore(sim / "ml/checkpoints")
        if container.layer is not None:
            (sim / "image.tar.gz").write_bytes(container.layer)
        resources = {
            "current_host": self.name,
            "current_instance_type": container.instance_type,
            "current_group_name": "homogeneousCluster",
            "hosts": list(container.hosts),
            "network_interface_name": "lo",
        }
        config = sim / "ml/input/config"
        (config / "resourceconfig.json").write_text(json.dumps(resources))
        for channel, files in container.channels.items():
            place = sim / "ml/input/data" / channel
            place.mkdir(parents=True)
            for name, data in files.items():
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                (place / name).write_bytes(data)
        (sim / "name").write_text(self.name)
        hosts = [f"127.0.0.{at} {name}\n" for at, name in enumerate(container.hosts, 1)]
        (sim / "hosts").write_text("".join(["127.0.0.1 localhost\n", *hosts]))
        python = shlex.quote(sys.executable)
        if training == "fake":
            path = Path(fastlaunch_train.__file__).parents[1]
            text = _FAKE_PYTHON.format(
                python=python, path=path, stand_in=STAND_IN, agent=SCALED_AGENT, scale=scale
            )
            (sim / "bin/python").write_text(text)
            (sim / "bin/python").chmod(0o755)
        for name, text in (("nvidia-smi", NVIDIA_SMI.format(last_gpu=0)), ("dmesg", DMESG)):
            (sim / "bin" / name).write_text(text)
            (sim / "bin" / name).chmod(0o755)
        (sim / "gpus.xml").write_text(report())
        folders = f"/sim/bin:{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
        environment = {"PATH": folders, "HOME": "/root", **container.environment}
        lines = [f"{name}={value}" for name, value in environment.items()]
        (sim / "environment").write_bytes(b"".join(f"{line}\0".encode() for line in lines))
        (sim / "command").write_bytes(b"".join(f"{word}\0".encode() for word in container.command))


def _children(process: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{process}/task/{process}/children").read_text().split()]
    except OSError:
        return []


def _version(path: Path) -> tuple[int, int, int]:
    told = path.stat()
    return told.st_size, told.st_mtime_ns, told.st_ino

"""Rehearse a SageMaker training job: carry out its real request in containers on this machine.

`RehearsalBackend` starts this module as a program, by the SageMaker SDK's local mode:

    python -m fastlaunch.lifecycle.rehearsal HOME CODE REQUEST RUNS

REQUEST is the request as JSON, RUNS the list of runs, CODE the code bundle ("" if the image holds the code).
The containers' output is copied to HOME/runs while they run, as for a real job. The exit code is 0 if every
run completed.

The SDK starts the containers with docker compose: one per host, with the request's own entrypoint, arguments
and environment, and SageMaker's folders under /opt/ml. It has no checkpoint folder, so a part of
/opt/ml/output takes its place, and docker compose would expand a `$` in an argument.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from types import FrameType
from typing import Any, BinaryIO

from fastlaunch.aws.types import StoredObject
from fastlaunch.backends import s3_sync
from fastlaunch.backends.local import LocalBackend, LocalSettings
from fastlaunch.backends.node_agent import agent_archive
from fastlaunch.backends.sagemaker.plan import plan_sagemaker
from fastlaunch.backends.site import Site
from fastlaunch.catalog.container_images import find_base_image, public_uri
from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.core.errors import EXIT_JOB_FAILED, UserError
from fastlaunch.core.home import writing
from fastlaunch.core.ownership import parse_token
from fastlaunch.core.plan import CodeBundle, Plan
from fastlaunch.jobs.build import Jobs
from fastlaunch.jobs.code_bundle import make_bundle, wheel_folder
from fastlaunch.jobs.job import Job
from fastlaunch.lifecycle.world import World, local_settings
from fastlaunch_train.node.protocol import agent_name, run_list_name
from fastlaunch_train.recipes.requirements import INSTALL_EXTRA

#: SageMaker's local mode's names for this machine, without and with GPUs.
LOCAL_TYPES = {False: "local_cpu", True: "local_gpu"}
#: Checkpoint folder in the containers, which the SDK mounts from this machine and keeps.
CHECKPOINTS = "/opt/ml/output/data/checkpoints"
#: docker compose gives a stopping container ten seconds.
STOP_GRACE_S = 7
_SYNC_INTERVAL_S = 2.0
_OUTPUT = "s3://rehearsal"
_PRINTED = re.compile(r"/node-\d+/[^/]+/log\.txt\.\d+$")
#: The containers' network; the SDK's resourceconfig.json names one that exists only in SageMaker.
_INTERFACE = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
#: Placeholder for SageMaker's machine in the request; this machine takes its place.
_HERE = InstanceType(
    name="local",
    accelerator="none",
    num_accelerators=1,
    vcpus=1,
    memory_gib=1,
    network_gbps=1,
    num_network_cards=1,
    num_efa_interfaces=0,
    local_nvme_gb=0,
    purchase_options=(),
    source="this machine",
)


class RehearsalBackend(LocalBackend):
    """A local backend whose jobs are training jobs in containers."""

    def __init__(
        self, settings: LocalSettings, *, site: Site, code: Path | None, max_minutes: int, has_gpus: bool
    ) -> None:
        """code: the bundle, under the name in the request; None if the image holds the code."""
        super().__init__(settings)
        self._site = site
        self._code = code
        self._max_minutes = max_minutes
        self._machine = LOCAL_TYPES[has_gpus]

    def plan(self, jobs: Mapping[str, Job], *, attempt: int = 1) -> Plan:
        """Return the command line that carries out SageMaker's request, except for the machine type."""
        here = super().plan(jobs, attempt=attempt)
        planned = plan_sagemaker(jobs, attempt=attempt, site=self._site, max_minutes=self._max_minutes)
        nodes = next(iter(jobs.values())).num_nodes
        resources = {"InstanceType": self._machine, "InstanceCount": nodes}
        job = json.dumps({**planned.request, "ResourceConfig": resources})
        (run_list,) = (payload.text for payload in planned.objects if payload.text is not None)
        program = [sys.executable, "-m", "fastlaunch.lifecycle.rehearsal"]
        argv = [*program, str(self.settings.home), str(self._code or ""), job, run_list]
        return replace(here, request={**here.request, "argv": argv})


def rehearsal_backend(world: World, jobs: Jobs) -> RehearsalBackend:
    """Return the backend that rehearses the jobs.

    If the image has no training code, make the code bundle and keep it with the runs. Raises UserError where
    the SageMaker SDK or docker is missing.
    """
    options = jobs.options
    if find_spec("sagemaker") is None or find_spec("sagemaker.train") is None:
        raise UserError(
            "a rehearsal in containers needs the SageMaker SDK, which is not installed",
            f"{INSTALL_EXTRA.format('sagemaker')} (about 1 GB)",
        )
    if which("docker") is None:
        raise UserError("a rehearsal in containers needs docker with compose", "install docker")
    image, code, stored = options.image, None, None
    if image is None:
        image, code, stored = _image_and_code(world, jobs)
    site = Site(
        instance=_HERE,
        region=world.settings.region,
        backend="sagemaker",
        role="<role>",
        bucket="rehearsal",
        prefix="",
        image=image,
        code=stored,
        volume_gib=1,
    )
    return RehearsalBackend(
        local_settings(world.settings.home, world.machine, os.environ),
        site=site,
        code=code,
        max_minutes=options.max_minutes,
        has_gpus=bool(world.machine.devices),
    )


def _image_and_code(world: World, jobs: Jobs) -> tuple[str, Path, CodeBundle]:
    """Return AWS's image in the public gallery, and the code bundle of a job as a local file."""
    base = find_base_image(jobs.options.base_image, flavour="ec2", today=world.today)
    bundle = make_bundle(
        base, user_file=jobs.user_file, commit=world.commit, wheels=wheel_folder(world.settings)
    )
    path = world.settings.home.absolute() / "code" / bundle.sha256 / f"{bundle.sha256}.tar.gz"
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bundle.data)
    return public_uri(base), path, CodeBundle.under("", sha256=bundle.sha256, commit=bundle.commit)


@dataclass(frozen=True, kw_only=True)
class FolderStore:
    """The folders of all hosts, in the form of a bucket for `s3_sync`; equal names are one file."""

    root: Path

    def list_objects(self, region: str, bucket: str, prefix: str, **_: object) -> list[StoredObject]:
        """Return what lies under the prefix; files that are being removed may be missing."""
        objects: dict[str, StoredObject] = {}
        for folder in self._folders():
            for path in sorted((folder / prefix).rglob("*")):
                key = str(path.relative_to(folder))
                # The runs' output is in this job's log already, through docker compose. A link may
                # lead out of the container's folder.
                if path.is_file() and not path.is_symlink() and not _PRINTED.search(key):
                    objects[key] = StoredObject(key=key, size=path.stat().st_size)
        return list(objects.values())

    def download(self, region: str, bucket: str, key: str, file: BinaryIO, *, max_bytes: int) -> bool:
        """Copy the first `max_bytes` of a file; return False if it is not there."""
        for folder in self._folders():
            try:
                with (folder / key).open("rb") as source:
                    file.write(source.read(max_bytes))
                return True
            except FileNotFoundError:
                continue
        return False

    def _folders(self) -> list[Path]:
        # The SDK moves all files into `artifacts` at the end.
        return [
            *self.root.glob("algo-*/output/data/checkpoints"),
            self.root / "artifacts/output/data/checkpoints",
        ]


def main(arguments: Sequence[str]) -> int:
    """Carry out the rehearsal; return its exit code. Raises UserError without the SDK or docker."""
    home, code, text, run_list = arguments
    request = json.loads(text)
    token = request["TrainingJobName"]
    # Beside the run's files; docker compose names the containers after this folder.
    root = s3_sync.run_folder(Path(home), parse_token(token)[0]) / f"fastlaunch-{token}"
    root.mkdir(parents=True)
    ended = threading.Event()
    thread = threading.Thread(target=_bring_home, args=(root, Path(home), token, ended))
    channels = {"code": Path(code).parent} if code else {}
    environment = request["Environment"]
    for channel, name, data in (
        ("agent", agent_name(environment["FASTLAUNCH_AGENT_SHA256"]), agent_archive()),
        ("runs", run_list_name(environment["FASTLAUNCH_RUNS_SHA256"]), run_list.encode()),
    ):
        channels[channel] = root / "channels" / channel
        channels[channel].mkdir(parents=True)
        (channels[channel] / name).write_bytes(data)
    job = _container(request, root, channels)
    signal.signal(signal.SIGTERM, _stop)
    thread.start()
    try:
        job.train(wait=True)
    except RuntimeError as error:
        # The failure message of the first failed host says more.
        causes = (path.read_text().strip() for path in sorted(root.glob("algo-*/output/failure")))
        sys.stderr.write(f"{next(causes, '') or error}\n")
    finally:
        ended.set()
        thread.join()
        # The SDK leaves the containers and their network behind.
        compose = [*job._get_compose_cmd_prefix(), "--file", str(root / "docker-compose.yaml")]
        subprocess.run([*compose, "down"], check=False, capture_output=True, timeout=60)
    status = _sync(root, Path(home), token).status or {}
    return 0 if status.get("outcome") == "completed" else EXIT_JOB_FAILED


def _stop(number: int, frame: FrameType | None) -> None:
    """Pass the signal on to docker compose, which stops the containers: the SDK does not."""
    signal.signal(number, signal.SIG_IGN)
    os.killpg(0, number)


def _bring_home(root: Path, home: Path, token: str, ended: threading.Event) -> None:
    while not ended.wait(_SYNC_INTERVAL_S):
        _sync(root, home, token)


def _sync(root: Path, home: Path, token: str) -> s3_sync.SyncResult:
    return s3_sync.sync(FolderStore(root=root), home, region="", output=f"{_OUTPUT}/{token}", token=token)


def _container(request: Mapping[str, Any], root: Path, folders: Mapping[str, Path]) -> Any:
    """Return the SDK's local job for the request. Raises UserError if the SDK is not installed."""
    try:
        from sagemaker.core.shapes import Channel, DataSource, FileSystemDataSource
        from sagemaker.train.local.local_container import _LocalContainer
    except ImportError as error:
        raise UserError(
            f"a rehearsal in containers needs the SageMaker SDK: {error}", INSTALL_EXTRA.format("sagemaker")
        ) from None
    channels = []
    for name, folder in folders.items():
        source = FileSystemDataSource.model_construct(directory_path=str(folder), file_system_type="EFS")
        data = DataSource(file_system_data_source=source)
        channels.append(Channel(channel_name=name, data_source=data, input_mode="File"))
    algorithm, resources = request["AlgorithmSpecification"], request["ResourceConfig"]
    return _LocalContainer(
        training_job_name=request["TrainingJobName"],
        instance_type=resources["InstanceType"],
        instance_count=resources["InstanceCount"],
        image=algorithm["TrainingImage"],
        container_root=str(root),
        input_data_config=channels,
        environment={
            **request["Environment"],
            "FASTLAUNCH_CHECKPOINT_FOLDER": CHECKPOINTS,
            "FASTLAUNCH_STOP_GRACE_S": str(STOP_GRACE_S),
            "FASTLAUNCH_SHIP_EVERY_S": str(_SYNC_INTERVAL_S),
            "FASTLAUNCH_INSTANCE": "",
            **(_INTERFACE if resources["InstanceCount"] > 1 else {}),
        },
        hyper_parameters={},
        container_entrypoint=[part.replace("$", "$$") for part in algorithm["ContainerEntrypoint"]],
        container_arguments=[part.replace("$", "$$") for part in algorithm["ContainerArguments"]],
    )


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"error: {error}")

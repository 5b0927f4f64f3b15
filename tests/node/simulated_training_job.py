"""A SageMaker training job without SageMaker: it carries out the request that the service was sent.

Each host is a container in namespaces of its own, with SageMaker's files and folders; all share a network.
While a job runs, what its hosts leave in /opt/ml/checkpoints is copied to the bucket of its CheckpointConfig,
whatever it is and whatever it changes into; whoever is started again finds all of it there. The job's status
is kept where DescribeTrainingJob is answered from.
"""

import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from instance_network import Wire, listen_inside
from moto_server import MotoServer
from node_scene import code_bundle
from server_client import server_client
from training_host import Bucket, Container, TrainingHost

#: Between SIGTERM and SIGKILL.
_GRACE_S = 120.0
_COPY_EVERY_S = 0.3
#: Seconds that hosts have to end by themselves after one has failed.
_PEERS_END_S = 60.0


class SimulatedTrainingJob:
    """The job `name` of `moto`, which has not got machines until `start`.

    folder: an empty one of its own. training: `real` or `fake`. volume_mib: size of every host's volume.
    mounts: whether /opt/ml is one mount (`whole`) or each of its folders is (`each`). scale: seconds of the
    node's program in one of ours, if training is fake. environment: besides the request's. web: a server that
    its containers reach, besides AWS, as this machine does.
    """

    def __init__(
        self,
        moto: MotoServer,
        name: str,
        *,
        folder: Path,
        training: str = "fake",
        volume_mib: int = 4096,
        mounts: str = "each",
        scale: float = 1.0,
        environment: Mapping[str, str] | None = None,
        web: tuple[str, int] | None = None,
    ) -> None:
        self._moto = moto
        aws = urlsplit(moto.url)
        assert aws.hostname is not None and aws.port is not None
        self._reached = [(aws.hostname, aws.port), *([web] if web else [])]
        self.name = name
        self._folder = folder
        self._host_options: dict[str, Any] = {
            "training": training,
            "volume_mib": volume_mib,
            "mounts": mounts,
            "scale": scale,
        }
        self._environment = {"FASTLAUNCH_SHIP_EVERY_S": "0.5", **(environment or {})}
        self._job = moto.training_jobs.job(name)
        self._request = self._job.request
        checkpoints = self._request["CheckpointConfig"]
        assert checkpoints["LocalPath"] == "/opt/ml/checkpoints"
        #: Where SageMaker copies what the hosts leave, and what this job's nodes leave there.
        self.uri: str = checkpoints["S3Uri"]
        self.output = f"{self.uri}/{self._request['Environment']['FASTLAUNCH_TOKEN']}"
        bucket, _, prefix = self.uri.removeprefix("s3://").partition("/")
        self.bucket = Bucket(s3=server_client(moto, "s3", self._job.region), name=bucket, prefix=prefix)
        self.hosts: list[TrainingHost] = []
        #: Consoles of the hosts of every start.
        self.consoles: list[list[str]] = []
        self._asked: str | None = None
        self._ended = threading.Event()
        self._problem: BaseException | None = None
        self._thread = threading.Thread(target=self._live, daemon=True)
        moto.training_jobs.when_stopping.append(self._stopping)

    # What happens to it

    def start(self) -> "SimulatedTrainingJob":
        """Get machines; returns at once."""
        self._network = subprocess.Popen(
            ["unshare", "--net", "bash", "-c", "ip link set lo up && echo up && exec sleep infinity"],
            stdout=subprocess.PIPE,
        )
        assert self._network.stdout is not None and self._network.stdout.readline() == b"up\n"
        listening = listen_inside(self._network.pid, self._reached)
        self._wires = [Wire(inside, server) for inside, server in zip(listening, self._reached, strict=True)]
        self._thread.start()
        return self

    def interrupt(self) -> None:
        """Take the spot machines back, with notice, and go on with others."""
        self._asked = "interrupt"

    def lose(self) -> None:
        """Take the machines back without any notice, and go on with others."""
        self._asked = "lose"

    def fail(self) -> None:
        """Lose the machines by a fault of SageMaker's own, which ends the job."""
        self._asked = "fail"

    def kill_host(self, rank: int) -> None:
        """End one host's container at once, as when it runs out of memory."""
        self.hosts[rank].signal(signal.SIGKILL)

    def wait(self, timeout_s: float = 240.0) -> str:
        """Its status when it has ended: Completed, Failed or Stopped."""
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"still {self._job.secondary} after {timeout_s:g} s:\n{self.console}")
        if self._problem:
            raise self._problem
        return self._job.status

    def close(self) -> None:
        """Take everything away, and tell nobody."""
        self._asked = "close"
        if self._thread.ident is not None:
            self._thread.join(timeout=30)
            for wire in self._wires:
                wire.close()
            self._network.kill()
            self._network.wait()
            assert self._network.stdout is not None
            self._network.stdout.close()
        with suppress(ValueError):
            self._moto.training_jobs.when_stopping.remove(self._stopping)

    # What can be seen of it

    @property
    def failure_reason(self) -> str:
        return self._job.failure_reason or ""

    @property
    def console(self) -> str:
        """What all hosts printed so far, at every start."""
        return "\n".join(text for consoles in [*self.consoles, self._consoles()] for text in consoles)

    def rewritten(self) -> list[str]:
        """Names of segments that were copied twice, with other bytes."""
        return [
            name
            for name, versions in self.bucket.written.items()
            if name.rpartition(".")[2].isdigit() and len(set(versions)) > 1
        ]

    # Inside

    def _live(self) -> None:
        try:
            number = 1
            while self._once(number):
                number += 1
        except BaseException as error:
            self._problem = error
        finally:
            for host in self.hosts:
                host.close()
            self._ended.set()

    def _once(self, number: int) -> bool:
        """Start the containers and see them end; whether they are to be started again."""
        jobs = self._moto.training_jobs
        jobs.move(self.name, "Pending", "Downloading")
        container = self._container()
        self.hosts = []
        for rank, name in enumerate(container.hosts):
            folder = self._folder / f"{number}-{name}"
            folder.mkdir()
            network = self._network.pid
            options = {**self._host_options, "bucket": self.bucket, "network": network}
            self.hosts.append(TrainingHost(rank, container, folder=folder, **options))
        jobs.move(self.name, "Training")
        why = self._watch()
        if why == "close":
            return False
        for host in self.hosts:
            host.copy()
        self.consoles.append(self._consoles())
        codes = [host.exit_code for host in self.hosts]
        failures = [(host.failure, host.exit_code) for host in self.hosts if host.exit_code]
        for host in self.hosts:
            host.close()
        self.hosts = []
        if why in ("interrupt", "lose"):
            jobs.move(self.name, "Interrupted", "Restarting")
            self._asked = None
            # The machines of the next start are not there within the same second.
            time.sleep(1.1)
            return True
        if why == "stop":
            jobs.end(self.name, "Stopped")
        elif why == "fail":
            jobs.end(self.name, "Failed", reason="InternalServerError: We encountered an internal error.")
        elif all(code == 0 for code in codes):
            jobs.end(self.name, "Completed")
        else:
            text, code = max(failures, key=lambda failure: bool(failure[0]))
            jobs.end(self.name, "Failed", reason=f"AlgorithmError: {text.strip()}, exit code: {code}")
        return False

    def _watch(self) -> str | None:
        """Copy until all hosts have ended; why SageMaker ended them, None if they did so themselves."""
        why: str | None = None
        kill_at = copied_at = None
        while any(host.exit_code is None for host in self.hosts):
            now = time.monotonic()
            if self._asked == "close":
                return "close"
            if self._asked and why is None:
                why = self._asked
                number = signal.SIGKILL if why in ("lose", "fail") else signal.SIGTERM
                kill_at = now + _GRACE_S
                for host in self.hosts:
                    host.signal(number)
            if kill_at is None and any(host.exit_code for host in self.hosts):
                kill_at = now + _PEERS_END_S
            if kill_at is not None and now > kill_at:
                for host in self.hosts:
                    host.signal(signal.SIGKILL)
            if copied_at is None or now > copied_at + _COPY_EVERY_S:
                for host in self.hosts:
                    host.copy()
                copied_at = now
            time.sleep(0.05)
        return why

    def _container(self) -> Container:
        request = self._request
        algorithm, resources = request["AlgorithmSpecification"], request["ResourceConfig"]
        # The credentials of the job's role.
        role = {
            "AWS_ACCESS_KEY_ID": "job",
            "AWS_SECRET_ACCESS_KEY": "job",
            "AWS_ENDPOINT_URL": self._moto.url,
        }
        environment = {"TRAINING_JOB_NAME": self.name, **role, **request["Environment"], **self._environment}
        command: Sequence[str] = [*algorithm["ContainerEntrypoint"], *algorithm["ContainerArguments"]]
        channels = {one["ChannelName"]: self._files(one) for one in request.get("InputDataConfig", ())}
        return Container(
            command=command,
            # Without the code as a channel, `fastlaunch build` has made the image.
            layer=None if "code" in channels else code_bundle()[0],
            environment=environment,
            channels=channels,
            instance_type=resources["InstanceType"],
            hosts=[f"algo-{number}" for number in range(1, resources["InstanceCount"] + 1)],
        )

    def _files(self, channel: Mapping[str, Any]) -> dict[str, bytes]:
        """What SageMaker brings of a channel: all objects whose keys begin so, by their last names."""
        uri = channel["DataSource"]["S3DataSource"]["S3Uri"]
        bucket, _, prefix = uri.removeprefix("s3://").partition("/")
        s3 = self.bucket.s3
        keys = [one["Key"] for one in s3.list_objects_v2(Bucket=bucket, Prefix=prefix).get("Contents", ())]
        folder = prefix.rpartition("/")[0]
        return {
            key.removeprefix(f"{folder}/"): s3.get_object(Bucket=bucket, Key=key)["Body"].read()
            for key in keys
        }

    def _stopping(self, region: str, name: str) -> None:
        if name == self.name:
            self._asked = "stop"

    def _consoles(self) -> list[str]:
        return [f"--- {host.name}\n{host.console}" for host in self.hosts]

"""What a test of a node starts from and looks at: an account with a bucket, instances, what they upload."""

import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

from instance_network import Switch
from moto_server import MotoServer
from server_client import server_client
from simulated_instance import SimulatedInstance

from fastlaunch.backends.ec2.plan import Bootstrap, render_user_data
from fastlaunch.backends.node_agent import agent_archive, agent_object, agent_sha256, run_list_object
from fastlaunch.core.plan import PlanObject
from fastlaunch.core.settings import DEFAULT_AMI_PARAMETER
from fastlaunch.jobs.code_bundle import code_files, pack
from fastlaunch.measure.record_files import RankRecord, read_record
from fastlaunch_train.node.protocol import NodeProgram, NodeRun, attempt_uri

REGION = "us-east-1"
BUCKET = f"runs-{REGION}"
RUNS = f"s3://{BUCKET}/fastlaunch/runs"
FIRST, SECOND = "20261121-090312-aaaa", "20261121-090312-bbbb"
IMAGE = f"763104351884.dkr.ecr.{REGION}.amazonaws.com/pytorch@sha256:{'b' * 64}"
#: Threads of several processes that wait for each other by spinning take minutes on a busy machine.
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def node_run(
    run_id: str = FIRST,
    *,
    workload: str = "vit-tiny",
    recipe: str = "fp32",
    steps: int = 5,
    checkpoint_every: int = 0,
    data: str = "synthetic",
    **environment: str,
) -> NodeRun:
    """A run that trains on a CPU for a moment. environment: such as the stand-in's FAKE_*."""
    arguments = (
        *("--workload", workload, "--recipe", recipe, "--batch-size", "4", "--steps", str(steps)),
        *("--seed", "0", "--data", data, "--checkpoint-every", str(checkpoint_every)),
    )
    return NodeRun(run_id=run_id, arguments=arguments, environment=environment)


def node_program(*runs: NodeRun, attempt: int = 1, **changes: Any) -> NodeProgram:
    """What a small on-demand machine does: `runs`, in at most an hour."""
    first = runs[0].run_id
    _, sha256 = code_bundle()
    num_nodes = changes.get("num_nodes", 1)
    nodes = {"FASTLAUNCH_NUM_NODES": str(num_nodes), "FASTLAUNCH_FABRIC": "any"} if num_nodes > 1 else {}
    program = NodeProgram(
        token=f"{first}-a{attempt}",
        attempt=attempt,
        region=REGION,
        output=attempt_uri(RUNS, first, attempt),
        runs_uri=RUNS,
        code_uri=f"s3://{BUCKET}/fastlaunch/code/{sha256}.tar.gz",
        code_sha256=sha256,
        image=IMAGE,
        image_region=REGION,
        max_minutes=60,
        num_gpus=1,
        has_instance_store=True,
        runs=runs,
        environment={
            "FASTLAUNCH_ATTEMPT": str(attempt),
            "FASTLAUNCH_INSTANCE": "g5.xlarge",
            "FASTLAUNCH_IMAGE_DIGEST": IMAGE.partition("@")[2],
            "FASTLAUNCH_NPROC": "1",
            "FASTLAUNCH_STOP_GRACE_S": "90",
            **nodes,
        },
    )
    return replace(program, **changes)


@cache
def code_bundle() -> tuple[bytes, str]:
    """The entrypoint and the training package as a node unpacks them, and their SHA-256."""
    data = pack(code_files())
    return data, hashlib.sha256(data).hexdigest()


class Attempt(Protocol):
    """A node's program, or a training job."""

    @property
    def output(self) -> str: ...


@dataclass(kw_only=True)
class Account:
    """An account with a bucket that holds the code. started: machines, which `close` switches off."""

    moto: MotoServer
    folder: Path
    started: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        data, sha256 = code_bundle()
        self.put(f"s3://{BUCKET}/fastlaunch/code/{sha256}.tar.gz", data)

    def close(self) -> None:
        for machine in self.started:
            machine.close()

    def client(self, service: str) -> Any:
        return server_client(self.moto, service, REGION)

    @cached_property
    def s3(self) -> Any:
        return self.client("s3")

    def put(self, uri: str, body: bytes) -> None:
        bucket, _, key = uri.removeprefix("s3://").partition("/")
        self.s3.put_object(Bucket=bucket, Key=key, Body=body)

    def objects(self, uri: str) -> dict[str, bytes]:
        """What lies under the uri, by the rest of its key."""
        prefix = uri.removeprefix(f"s3://{BUCKET}/").rstrip("/") + "/"
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
        return {
            key.removeprefix(prefix): self.s3.get_object(Bucket=BUCKET, Key=key)["Body"].read()
            for key in keys
        }

    def keys(self, uri: str) -> list[str]:
        return sorted(self.objects(uri))

    def wait_for(self, uri: str, timeout_s: float = 240.0) -> None:
        """Until there is an object whose key begins so."""
        end = time.monotonic() + timeout_s
        prefix = uri.removeprefix(f"s3://{BUCKET}/")
        while self.s3.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["KeyCount"] == 0:
            if time.monotonic() > end:
                consoles = "\n".join(machine.console for machine in self.started)
                raise TimeoutError(f"no {uri} after {timeout_s:g} s; consoles:\n{consoles}")
            time.sleep(0.05)

    def status(self, attempt: Attempt, node: int = 0) -> dict[str, Any]:
        """What the node said last."""
        status: dict[str, Any] = json.loads(self.objects(attempt.output)[f"node-{node}/status.json"])
        return status

    def joined(self, attempt: Attempt) -> dict[str, bytes]:
        """Files of the nodes by their names. Every segment starts where the one before it ends."""
        files: dict[str, bytes] = {}
        objects = self.objects(attempt.output)
        for key in sorted(objects):
            if match := re.fullmatch(r"(node-\d+/.+)\.(\d{12})", key):
                name, offset = match[1], int(match[2])
                files.setdefault(name, b"")
                assert len(files[name]) == offset, f"{key} does not follow on {len(files[name])} bytes"
                assert objects[key], f"{key} is empty"
                files[name] += objects[key]
        return files

    def record(self, attempt: Attempt, run_id: str = FIRST, *, rank: int = 0, number: int = 1) -> RankRecord:
        """The record of the node's only rank, as it arrived. number: of the attempt that wrote it."""
        name = f"rank-{rank:05d}-attempt-{number}.jsonl"
        path = self.folder / name
        path.write_bytes(self.joined(attempt)[f"node-{rank}/{run_id}/{name}"])
        return read_record(path)


def outcome(status: Mapping[str, Any]) -> tuple[str, str | None]:
    return status["outcome"], status["reason"]


def ends(status: Mapping[str, Any]) -> list[tuple[str, int | None]]:
    """State and exit code of each run."""
    return [(run["state"], run["exit_code"]) for run in status["runs"]]


def states(status: Mapping[str, Any]) -> list[str]:
    return [state for state, _ in ends(status)]


def steps(record: RankRecord) -> list[int]:
    return [step.step for step in record.steps]


def losses(*records: RankRecord) -> dict[int, float | None]:
    return {step.step: step.loss for record in records for step in record.steps}


@dataclass(kw_only=True)
class Scene(Account):
    """Instances of EC2's."""

    def launch(self, program: NodeProgram, **instance: Any) -> SimulatedInstance:
        """Start an instance with this program, as RunInstances does, and boot it."""
        (instance_id,) = self.run_instances(program)
        return self.boot(instance_id, **instance)

    def launch_nodes(
        self, program: NodeProgram, *, switch: Switch, boots: Sequence[int] | None = None, **instance: Any
    ) -> list[SimulatedInstance]:
        """Start all nodes of the program in one request, and boot them, or those of the ranks `boots`."""
        ids = self.run_instances(program)
        ranks = range(program.num_nodes) if boots is None else boots
        return [self.boot(ids[rank], switch=switch, **instance) for rank in ranks]

    def run_instances(self, program: NodeProgram) -> list[str]:
        """Ids of the instances that RunInstances started with this program, by rank."""
        market = {"InstanceMarketOptions": {"MarketType": "spot"}} if program.is_spot else {}
        ami = self.client("ssm").get_parameter(Name=DEFAULT_AMI_PARAMETER)["Parameter"]["Value"]
        made = self.client("ec2").run_instances(
            ImageId=ami,
            InstanceType="g5.xlarge",
            MinCount=program.num_nodes,
            MaxCount=program.num_nodes,
            ClientToken=program.token,
            InstanceInitiatedShutdownBehavior="terminate",
            UserData=self._user_data(program),
            **market,
        )
        instances = sorted(made["Instances"], key=lambda instance: int(instance["AmiLaunchIndex"]))
        return [str(instance["InstanceId"]) for instance in instances]

    def fetched(self, program: NodeProgram) -> tuple[PlanObject, PlanObject]:
        """What the program's nodes fetch: the agent and the list of runs."""
        agent = agent_object(BUCKET, "fastlaunch", agent_sha256())
        return agent, run_list_object(program, program.output, ())

    def _user_data(self, program: NodeProgram) -> str:
        """The bootstrap of the program's nodes, with what it fetches stored."""
        agent, runs = self.fetched(program)
        self.put(agent.uri, agent_archive())
        self.put(runs.uri, str(runs.text).encode())
        bootstrap = Bootstrap(
            token=program.token,
            region=REGION,
            max_minutes=program.max_minutes,
            output=program.output,
            agent=agent.uri,
            agent_sha256=agent.sha256,
            run_list=runs.uri,
            run_list_sha256=runs.sha256,
        )
        return render_user_data(bootstrap)

    def boot(self, instance_id: str, **instance: Any) -> SimulatedInstance:
        """Boot an instance that is there."""
        folder = self.folder / instance_id
        folder.mkdir()
        simulated = SimulatedInstance(self.moto, instance_id, folder=folder, **instance)
        self.started.append(simulated)
        return simulated.start()

"""What a test of a node starts from and looks at: a bucket, code, an instance with a program, its uploads."""

import hashlib
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from instance_network import Switch
from moto_server import MotoServer
from server_client import server_client
from simulated_instance import SimulatedInstance

from fastlaunch.backends.ec2.user_data import Bootstrap, render_user_data
from fastlaunch.backends.node_agent import agent_archive, agent_object, agent_sha256, run_list_object
from fastlaunch.core.plan import PlanObject
from fastlaunch.images.code_bundle import code_files, pack
from fastlaunch_train.node.protocol import NodeProgram, NodeRun

REGION = "us-east-1"
BUCKET = f"runs-{REGION}"
RUNS = f"s3://{BUCKET}/fastlaunch/runs"
FIRST, SECOND = "20261121-090312-aaaa", "20261121-090312-bbbb"
IMAGE = f"763104351884.dkr.ecr.{REGION}.amazonaws.com/pytorch@sha256:{'b' * 64}"


def arguments(
    *, recipe: str = "fp32", steps: int = 5, checkpoint_every: int = 0, data: str = "synthetic"
) -> tuple[str, ...]:
    """What trains vit-tiny on a CPU for a moment."""
    return (
        *("--workload", "vit-tiny", "--recipe", recipe, "--batch-size", "4", "--steps", str(steps)),
        *("--seed", "0", "--data", data, "--checkpoint-every", str(checkpoint_every)),
    )


def node_run(
    run_id: str = FIRST, *, environment: Mapping[str, str] | None = None, **training: Any
) -> NodeRun:
    return NodeRun(
        run_id=run_id,
        arguments=arguments(**training),
        environment={"FASTLAUNCH_RUN_ID": run_id, **(environment or {})},
    )


def node_program(*runs: NodeRun, attempt: int = 1, **changes: Any) -> NodeProgram:
    """What a small spot or on-demand machine does: `runs`, in at most an hour."""
    first = runs[0].run_id
    code = code_bundle()
    program = NodeProgram(
        token=f"{first}-a{attempt}",
        attempt=attempt,
        region=REGION,
        output=f"{RUNS}/{first}/attempt-{attempt}",
        runs_uri=RUNS,
        code_uri=f"s3://{BUCKET}/fastlaunch/code/{code.sha256}.tar.gz",
        code_sha256=code.sha256,
        image=IMAGE,
        image_region=REGION,
        max_minutes=60,
        num_gpus=1,
        has_instance_store=True,
        has_nvswitch=False,
        is_spot=False,
        runs=runs,
        environment={
            "FASTLAUNCH_ATTEMPT": str(attempt),
            "FASTLAUNCH_INSTANCE": "g5.xlarge",
            "FASTLAUNCH_IMAGE_DIGEST": IMAGE.partition("@")[2],
            "FASTLAUNCH_NPROC": "1",
            "FASTLAUNCH_STOP_GRACE_S": "90",
        },
    )
    return replace(program, **changes)


@dataclass(frozen=True, kw_only=True)
class Code:
    data: bytes
    sha256: str


@cache
def code_bundle() -> Code:
    """The entrypoint and the training package as a node unpacks them; the wheels are this environment's."""
    data = pack(code_files())
    return Code(data=data, sha256=hashlib.sha256(data).hexdigest())


@dataclass(kw_only=True)
class Scene:
    """An account with a bucket. Instances that a test starts in it are switched off after the test."""

    moto: MotoServer
    folder: Path
    started: list[SimulatedInstance] = field(default_factory=list)

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
        code = code_bundle()
        if program.code_uri == f"s3://{BUCKET}/fastlaunch/code/{code.sha256}.tar.gz":
            self.s3.put_object(Bucket=BUCKET, Key=f"fastlaunch/code/{code.sha256}.tar.gz", Body=code.data)
        market = {"InstanceMarketOptions": {"MarketType": "spot"}} if program.is_spot else {}
        ami = self.client("ssm").get_parameter(Name=_ami_parameter())["Parameter"]["Value"]
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
        found = sorted(made["Instances"], key=lambda one: int(one["AmiLaunchIndex"]))
        return [str(one["InstanceId"]) for one in found]

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

    def client(self, service: str) -> Any:
        return server_client(self.moto, service, REGION)

    @cached_property
    def s3(self) -> Any:
        return self.client("s3")

    def objects(self, uri: str) -> dict[str, bytes]:
        """What lies under the uri, by the rest of its key."""
        prefix = uri.removeprefix(f"s3://{BUCKET}/").rstrip("/") + "/"
        s3 = self.s3
        pages = s3.get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        keys = [entry["Key"] for page in pages for entry in page.get("Contents", ())]
        return {
            key.removeprefix(prefix): s3.get_object(Bucket=BUCKET, Key=key)["Body"].read() for key in keys
        }

    def keys(self, uri: str) -> list[str]:
        return sorted(self.objects(uri))

    def put(self, uri: str, body: bytes) -> None:
        bucket, _, key = uri.removeprefix("s3://").partition("/")
        self.s3.put_object(Bucket=bucket, Key=key, Body=body)

    def status(self, program: NodeProgram, node: int = 0) -> dict[str, Any]:
        """What the node said last."""
        status: dict[str, Any] = json.loads(self.objects(program.output)[f"node-{node}/status.json"])
        return status

    def joined(self, program: NodeProgram) -> dict[str, bytes]:
        """Files of the node by their names, each put together from segments that must fit."""
        return joined_segments(self.objects(program.output))

    def wait_for(self, uri: str, timeout_s: float = 180.0) -> None:
        """Until there is an object whose key begins so."""
        end = time.monotonic() + timeout_s
        bucket, _, key = uri.removeprefix("s3://").partition("/")
        while self.s3.list_objects_v2(Bucket=bucket, Prefix=key)["KeyCount"] == 0:
            if time.monotonic() > end:
                consoles = "\n".join(instance.console for instance in self.started)
                raise TimeoutError(f"no {uri} after {timeout_s:g} s; consoles:\n{consoles}")
            time.sleep(0.05)

    def bring_home(self, program: NodeProgram, folder: Path) -> dict[str, list[Path]]:
        """Record files by run id, written below `folder`."""
        found: dict[str, list[Path]] = {}
        for name, data in self.joined(program).items():
            run_id, _, file = name.partition("/")[2].partition("/")
            if file.startswith("rank-"):
                path = folder / run_id / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
                found.setdefault(run_id, []).append(path)
        return found


def joined_segments(objects: Mapping[str, bytes]) -> dict[str, bytes]:
    """Files put together from their segments. Every segment starts where the one before it ends."""
    files: dict[str, bytes] = {}
    for key in sorted(objects):
        if match := re.fullmatch(r"(node-\d+/.+)\.(\d{12})", key):
            name, offset = match[1], int(match[2])
            files.setdefault(name, b"")
            assert len(files[name]) == offset, f"{key} does not follow on {len(files[name])} bytes"
            assert objects[key], f"{key} is empty"
            files[name] += objects[key]
    return files


def _ami_parameter() -> str:
    from fastlaunch.core.settings import DEFAULT_AMI_PARAMETER

    return DEFAULT_AMI_PARAMETER

"""Machines on the tests' AWS: what each does is played by `FakeNode`, through real requests to moto.

Time passes as in `fake_cloud`, from now on: moto stamps what it starts and ends with the real time.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import Any

from fake_cloud import Clock, FakeNode
from moto_server import MotoServer, backend

from fastlaunch.aws.client import Aws

REGION = "us-east-1"


#: Its session reads botocore's tables of endpoints once.
_MAKER = Aws()


@cache
def _connect(service: str, region: str) -> Any:
    """boto3's client, made once: it takes long, and all tests of a process have the same server."""
    return _MAKER._connect_with_boto3(service, region)


class Objects(Mapping[tuple[str, str], bytes]):
    """The objects in S3, by bucket and key."""

    def __init__(self, aws: Aws) -> None:
        self._aws = aws

    def __setitem__(self, where: tuple[str, str], body: bytes) -> None:
        self._aws.put_object(REGION, *where, body)

    def __getitem__(self, where: tuple[str, str]) -> bytes:
        # Not asked of the server: it may be about to answer the launch that this node reads its runs for.
        bucket, key = where
        body: bytes = backend("s3", "aws").buckets[bucket].keys[key].value
        return body

    def __iter__(self) -> Iterator[tuple[str, str]]:
        for bucket in backend("s3", "aws").buckets.values():
            yield from ((bucket.name, key) for key in list(bucket.keys))

    def __len__(self) -> int:
        raise NotImplementedError


@dataclass
class Instances:
    """What a node sees of its machine: whether it lives."""

    server: MotoServer

    def __getitem__(self, instance_id: str) -> Any:
        @dataclass
        class Seen:
            is_live: bool

        return Seen(self.server.instance(instance_id).state in ("pending", "running"))


@dataclass
class MotoCloud:
    """`aws`: what the launcher uses. node: what a machine does, called when it was started."""

    server: MotoServer
    clock: Clock = field(default_factory=lambda: Clock(moment=datetime.now(UTC)))
    node: Callable[[FakeNode], None] = lambda node: node.train()

    def __post_init__(self) -> None:
        self.aws = Aws(sleep=self.clock.sleep, now=self.clock.now, connect=_connect)
        self.settings = self.server.set_up_region(REGION)
        self.objects = Objects(self.aws)
        self.instances = Instances(self.server)
        self.server.when_launched.append(self._launched)

    def end(self, instance_id: str, reason: str, transition: str) -> None:
        """End a machine, as FakeAws.end."""
        if not self.instances[instance_id].is_live:
            return
        told = f"{transition} ({self.clock.now():%Y-%m-%d %H:%M:%S} GMT)"
        self.server.set_instance(instance_id, state="terminated", state_reason=reason, transition_reason=told)

    def _launched(self, region: str, instance_id: str) -> None:
        instance = self.server.instance(instance_id)
        tags = [{"Key": tag["key"], "Value": tag["value"]} for tag in instance.get_tags()]
        request = {
            "ClientToken": next(tag["Value"] for tag in tags if tag["Key"] == "fastlaunch:run")
            + "-a"
            + next(tag["Value"] for tag in tags if tag["Key"] == "fastlaunch:attempt"),
            "TagSpecifications": [{"ResourceType": "instance", "Tags": tags}],
            "MinCount": sum(one.get_tags() == instance.get_tags() for one in self.server.instances()),
        }
        rank = int(instance.ami_launch_index)
        self.node(FakeNode(aws=self, instance_id=instance_id, request=request, rank=rank))

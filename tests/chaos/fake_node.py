"""Machines of a trial: what each does after it was launched is drawn from the trial's seed.

A node writes straight into the server's S3, since the network between launcher and AWS is what is at fault.
"""

import json
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from lives import Lives
from moto_server import MotoServer, backend

#: What a node may do: its runs, to their end; fail; be taken back by EC2; boot and hang; end without a word;
#: never boot.
FATES = {"completes": 6, "fails": 2, "is-taken": 2, "hangs": 2, "vanishes": 1, "never-boots": 2}
_SPOT = "Server.SpotInstanceTermination: Spot instance termination"
_SHUTDOWN = "Client.InstanceInitiatedShutdown: Instance initiated shutdown"


def nodes(server: MotoServer, rng: random.Random, fates: Sequence[str] = ()) -> Lives:
    """The machines that a server launches. fates: instead of those that are drawn, by turns."""

    def live(region: str, instance_id: str, fate: str, wait: Callable[[], bool]) -> None:
        # An instance that the launcher terminates ends its node in the middle of whatever it does.
        with suppress(_Ended):
            _Node(server=server, region=region, id=instance_id, wait=wait).live(fate)

    return Lives(drawn=FATES, live=live, rng=rng, fates=fates)


class _Ended(Exception):
    pass


@dataclass(frozen=True, kw_only=True)
class _Node:
    """One machine's. wait: takes a while; returns whether time stands still."""

    server: MotoServer
    region: str
    id: str
    wait: Callable[[], bool]

    def live(self, fate: str) -> None:
        if fate == "never-boots":
            return
        rank = self.server.instance(self.id).ami_launch_index
        booted = "boot.json" if rank == 0 else f"node-{rank}/boot.json"
        self._put(booted, json.dumps({**self._who(), "booted_at": _now()}).encode())
        self._put(f"node-{rank}/log.txt.000000000000", b"pulling\n")
        if fate == "hangs":
            return
        states = []
        for run_id in self._run_ids():
            interrupted = fate == "is-taken" or self._asked_to_stop()
            state = {"fails": "failed"}.get(fate, "interrupted" if interrupted else "completed")
            self._put(f"node-{rank}/{run_id}/log.txt.000000000000", b"training\n")
            states.append({"run_id": run_id, "state": state, "exit_code": 0, "started_s": 1, "ended_s": 2})
        if fate != "vanishes":
            outcome = {"fails": "failed", "is-taken": "interrupted"}.get(fate, "completed")
            reason = "spot" if fate == "is-taken" else None
            if outcome == "completed" and (asked := self._asked_to_stop()):
                outcome, reason = "interrupted", "stop" if asked.startswith("stop") else "peer"
            elif outcome != "completed":
                # The others cannot train without it.
                self._put("abort", f"node {rank} ended: {outcome}".encode())
            status = {
                **self._who(),
                "node": rank,
                "outcome": outcome,
                "reason": reason,
                "boot_s": 1.0,
                "pull_s": 1.0,
                "uptime_s": 3.0,
                "billed_until": _now(),
                "runs": states,
            }
            self._put(f"node-{rank}/status.json", json.dumps(status).encode())
        self._pause()
        told = datetime.now(UTC)
        self.server.set_instance(
            self.id,
            state="terminated",
            state_reason=_SPOT if fate == "is-taken" else _SHUTDOWN,
            transition_reason=f"User initiated ({told:%Y-%m-%d %H:%M:%S} GMT)",
        )

    def _who(self) -> dict[str, Any]:
        tags = self._tags()
        instance = self.server.instance(self.id)
        return {
            "schema": 1,
            "token": f"{tags['fastlaunch:run']}-a{tags['fastlaunch:attempt']}",
            "instance_id": self.id,
            "instance_type": instance.instance_type,
            "zone": f"{self.region}a",
            "lifecycle": "spot" if instance.lifecycle == "spot" else "on-demand",
        }

    def _tags(self) -> dict[str, str]:
        return {tag["key"]: tag["value"] for tag in self.server.instance(self.id).get_tags()}

    def _run_ids(self) -> list[str]:
        """The runs to do, as the stored list names them."""
        bucket, prefix = self._output()
        keys = backend("s3", "aws").buckets[bucket].keys
        (text,) = [keys[key].value for key in list(keys) if key.startswith(f"{prefix}/runs-")]
        return [run["run_id"] for run in json.loads(text)["runs"]]

    def _asked_to_stop(self) -> str:
        """Why, by whoever asked all nodes to; empty if nobody has."""
        bucket, prefix = self._output()
        found = backend("s3", "aws").buckets[bucket].keys.get(f"{prefix}/abort")
        return found.value.decode() if found else ""

    def _put(self, name: str, body: bytes) -> None:
        self._pause()
        bucket, prefix = self._output()
        backend("s3", "aws").put_object(bucket, f"{prefix}/{name}", body)

    def _output(self) -> tuple[str, str]:
        bucket, _, prefix = self._tags()["fastlaunch:output"].removeprefix("s3://").partition("/")
        return bucket, prefix

    def _pause(self) -> None:
        """Take a while; raises _Ended if the machine was terminated meanwhile, or time stands still."""
        if self.wait() or self.server.instance(self.id).state not in ("pending", "running"):
            raise _Ended


def _now() -> str:
    return datetime.now(UTC).isoformat()

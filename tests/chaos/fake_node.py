"""Machines of a trial: what each does after it was launched is drawn from the trial's seed.

A node writes straight into the server's S3, since the network between launcher and AWS is what is at fault.
"""

import json
import random
import re
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from moto_server import MotoServer, backend

#: What a node may do: its runs, to their end; fail; be taken back by EC2; boot and hang; end without a word;
#: never boot.
FATES = ("completes", "fails", "is-taken", "hangs", "vanishes", "never-boots")
_WEIGHTS = (6, 2, 2, 2, 1, 2)
_BETWEEN_S = 0.02
_SPOT = "Server.SpotInstanceTermination: Spot instance termination"
_SHUTDOWN = "Client.InstanceInitiatedShutdown: Instance initiated shutdown"


@dataclass(kw_only=True)
class Nodes:
    """The machines that a server launches, each living its life in a thread until `freeze`.

    fates: instead of those that are drawn, by turns.
    """

    server: MotoServer
    rng: random.Random
    fates: Sequence[str] = ()
    lived: dict[str, str] = field(default_factory=dict)
    _frozen: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def launch(self, region: str, instance_id: str) -> None:
        """Let the instance live; called by the server when it has made it."""
        (drawn,) = self.rng.choices(FATES, _WEIGHTS)
        fate = self.fates[len(self.lived) % len(self.fates)] if self.fates else drawn
        self.lived[instance_id] = fate
        pace_s = _BETWEEN_S * self.rng.random()
        thread = threading.Thread(target=self._live, args=(region, instance_id, fate, pace_s), daemon=True)
        self._threads.append(thread)
        thread.start()

    def freeze(self) -> None:
        """From here on no node does anything, as if every watchdog were broken."""
        self._frozen.set()
        for thread in self._threads:
            thread.join()

    def _live(self, region: str, instance_id: str, fate: str, pace_s: float) -> None:
        # An instance that the launcher terminates ends its node in the middle of whatever it does.
        with suppress(_Ended):
            _Node(nodes=self, region=region, id=instance_id, pace_s=pace_s).live(fate)


class _Ended(Exception):
    pass


@dataclass(kw_only=True)
class _Node:
    nodes: Nodes
    region: str
    id: str
    pace_s: float

    def live(self, fate: str) -> None:
        if fate == "never-boots":
            return
        rank = self.nodes.server.instance(self.id).ami_launch_index
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
        self.nodes.server.set_instance(
            self.id,
            state="terminated",
            state_reason=_SPOT if fate == "is-taken" else _SHUTDOWN,
            transition_reason=f"User initiated ({told:%Y-%m-%d %H:%M:%S} GMT)",
        )

    def _who(self) -> dict[str, Any]:
        tags = self._tags()
        instance = self.nodes.server.instance(self.id)
        return {
            "schema": 1,
            "token": f"{tags['fastlaunch:run']}-a{tags['fastlaunch:attempt']}",
            "instance_id": self.id,
            "instance_type": instance.instance_type,
            "zone": f"{self.region}a",
            "lifecycle": "spot" if instance.lifecycle == "spot" else "on-demand",
        }

    def _tags(self) -> dict[str, str]:
        return {tag["key"]: tag["value"] for tag in self.nodes.server.instance(self.id).get_tags()}

    def _run_ids(self) -> list[str]:
        """The runs to do, as the user data names them."""
        text = self.nodes.server.user_data(self.id)
        found = re.findall(r"FASTLAUNCH_RUN_ID[=: '\"]+([0-9]{8}-[0-9]{6}-[a-z0-9]+)", text)
        return list(dict.fromkeys([self._tags()["fastlaunch:run"], *found]))

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
        stopped = self.nodes._frozen.wait(self.pace_s)
        if stopped or self.nodes.server.instance(self.id).state not in ("pending", "running"):
            raise _Ended


def _now() -> str:
    return datetime.now(UTC).isoformat()

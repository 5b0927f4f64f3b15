"""Machines of a trial: what each does after it was launched is drawn from the trial's seed."""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from lives import Lives, Output
from moto_server import MotoServer

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
        self._put(
            "boot.json" if rank == 0 else f"node-{rank}/boot.json", {**self._who(), "booted_at": _now()}
        )
        self._put(f"node-{rank}/log.txt.000000000000", b"pulling\n")
        if fate == "hangs":
            return
        states = []
        for run_id in self._output.run_ids():
            interrupted = fate == "is-taken" or self._output.get("abort")
            state = {"fails": "failed"}.get(fate, "interrupted" if interrupted else "completed")
            self._put(f"node-{rank}/{run_id}/log.txt.000000000000", b"training\n")
            states.append({"run_id": run_id, "state": state, "exit_code": 0, "started_s": 1, "ended_s": 2})
        if fate != "vanishes":
            outcome = {"fails": "failed", "is-taken": "interrupted"}.get(fate, "completed")
            reason = "spot" if fate == "is-taken" else None
            if outcome == "completed" and (asked := self._output.get("abort")):
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
            self._put(f"node-{rank}/status.json", status)
        self._pause()
        told = datetime.now(UTC)
        self.server.set_instance(
            self.id,
            state="terminated",
            state_reason=_SPOT if fate == "is-taken" else _SHUTDOWN,
            transition_reason=f"User initiated ({told:%Y-%m-%d %H:%M:%S} GMT)",
        )

    def _who(self) -> dict[str, Any]:
        instance = self.server.instance(self.id)
        return {
            "instance_id": self.id,
            "instance_type": instance.instance_type,
            "zone": f"{self.region}a",
            "lifecycle": "spot" if instance.lifecycle == "spot" else "on-demand",
        }

    @property
    def _output(self) -> Output:
        tags = {tag["key"]: tag["value"] for tag in self.server.instance(self.id).get_tags()}
        return Output(tags=tags)

    def _put(self, name: str, content: Mapping[str, Any] | bytes) -> None:
        self._pause()
        self._output.put(name, content)

    def _pause(self) -> None:
        """Take a while; raises _Ended if the machine was terminated meanwhile, or time stands still."""
        if self.wait() or self.server.instance(self.id).state not in ("pending", "running"):
            raise _Ended


def _now() -> str:
    return datetime.now(UTC).isoformat()

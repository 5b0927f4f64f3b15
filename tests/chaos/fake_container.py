"""Training jobs of a trial: what SageMaker and each job's container do is drawn from the trial's seed."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from lives import Lives, Output
from moto_server import MotoServer
from moto_training_jobs import Job

#: What may become of a job: its runs are done, also after its machines were taken back and it was restarted;
#: they fail; its container hangs, or ends without a word; its time is up; there is no capacity, at once or,
#: of spot, for too long; it waits for ever.
FATES = {
    **{"completes": 5, "restarts": 3, "fails": 2, "hangs": 3, "vanishes": 1, "runs-out": 1},
    **{"no-capacity": 2, "waits-too-long": 1, "waits": 1},
}


def containers(server: MotoServer, rng: random.Random, fates: Sequence[str] = ()) -> Lives:
    """The jobs that a server takes. fates: instead of those that are drawn, by turns."""

    def live(region: str, name: str, fate: str, wait: Callable[[], bool]) -> None:
        _Life(server=server, name=name, wait=wait).live(fate)

    return Lives(drawn=FATES, live=live, rng=rng, fates=fates)


@dataclass(frozen=True, kw_only=True)
class _Life:
    """One job's. wait: takes a while; returns whether time stands still."""

    server: MotoServer
    name: str
    wait: Callable[[], bool]

    def live(self, fate: str) -> None:
        jobs = self.server.training_jobs
        if not self._goes_on():
            return
        jobs.move(self.name, "Pending")
        if fate == "waits" or not self._goes_on():
            return
        if fate == "no-capacity":
            reason = "CapacityError: Unable to provision requested ML compute capacity."
            jobs.end(self.name, "Failed", reason=reason)
            return
        if fate == "waits-too-long" and self._job.request.get("EnableManagedSpotTraining"):
            jobs.end(self.name, "Stopped", secondary="MaxWaitTimeExceeded")
            return
        jobs.move(self.name, "Downloading", "Training")
        if self._goes_on():
            self._output.put("boot.json", {"booted_at": datetime.now(UTC).isoformat()})
            self._train(fate)

    def _train(self, fate: str) -> None:
        jobs = self.server.training_jobs
        if fate == "restarts":
            # The same job goes on, in the same folder.
            for words in (("Interrupted",), ("Restarting", "Downloading", "Training")):
                if not self._goes_on():
                    return
                jobs.move(self.name, *words)
        if not self._goes_on():
            self._say_that_it_was_stopped()
            return
        if fate == "hangs":
            return
        state = {"fails": "failed", "runs-out": "interrupted"}.get(fate, "completed")
        if fate != "vanishes":
            self._output.put("node-0/status.json", self._last_word(state))
        if not self._goes_on():
            return
        if fate == "runs-out":
            jobs.end(self.name, "Stopped", secondary="MaxRuntimeExceeded")
        elif fate == "fails":
            jobs.end(self.name, "Failed", reason="AlgorithmError: Execute user script Error")
        else:
            jobs.end(self.name)

    def _goes_on(self) -> bool:
        """Whether nobody stopped the job meanwhile, after a while."""
        return not self.wait() and self._job.status == "InProgress"

    def _say_that_it_was_stopped(self) -> None:
        if self._job.status in ("Stopping", "Stopped"):
            self._output.put("node-0/status.json", {**self._last_word("interrupted"), "reason": "stop"})

    @property
    def _job(self) -> Job:
        return self.server.training_jobs.job(self.name)

    def _last_word(self, state: str) -> dict[str, Any]:
        reason = {"failed": "a run failed", "interrupted": "watchdog"}.get(state)
        runs = [
            {"run_id": run_id, "state": state, "exit_code": int(state == "failed")}
            for run_id in self._output.run_ids()
        ]
        report = {"node": 0, "outcome": state, "reason": reason, "runs": runs, "uptime_s": 3.0}
        return {**report, "billed_until": datetime.now(UTC).isoformat()}

    @property
    def _output(self) -> Output:
        return Output(tags=self._job.tags)

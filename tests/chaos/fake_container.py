"""Training jobs of a trial: what SageMaker and each job's container do is drawn from the trial's seed."""

import json
import random
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from moto_server import MotoServer, backend
from moto_training_jobs import Job

#: What may become of a job: its runs are done, or fail; there is no capacity; its container hangs, or ends
#: without a word; it waits for ever.
FATES = ("completes", "fails", "no-capacity", "hangs", "vanishes", "waits")
_WEIGHTS = (6, 2, 3, 2, 1, 1)
_BETWEEN_S = 0.02


@dataclass(kw_only=True)
class Containers:
    """The jobs that a server takes, each living its life in a thread until `freeze`."""

    server: MotoServer
    rng: random.Random
    lived: dict[str, str] = field(default_factory=dict)
    _frozen: threading.Event = field(default_factory=threading.Event)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self, region: str, name: str) -> None:
        """Let the job live; called by the server when it has made it."""
        (fate,) = self.rng.choices(FATES, _WEIGHTS)
        self.lived[name] = fate
        pace_s = _BETWEEN_S * self.rng.random()
        thread = threading.Thread(target=self._live, args=(name, fate, pace_s), daemon=True)
        self._threads.append(thread)
        thread.start()

    def freeze(self) -> None:
        """From here on no job does anything, and SageMaker ends none by itself."""
        self._frozen.set()
        for thread in self._threads:
            thread.join()

    def _live(self, name: str, fate: str, pace_s: float) -> None:
        jobs = self.server.training_jobs

        def goes_on() -> bool:
            """Whether it has not been stopped meanwhile, after a while."""
            return not self._frozen.wait(pace_s) and jobs.job(name).status == "InProgress"

        if fate == "waits" or not goes_on():
            return
        if fate == "no-capacity":
            jobs.end(
                name, "Failed", reason="CapacityError: Unable to provision requested ML compute capacity."
            )
            return
        jobs.move(name, "Downloading", "Training")
        if not goes_on():
            return
        _put(jobs.job(name), "boot.json", {"booted_at": datetime.now(UTC).isoformat()})
        if fate == "hangs" or not goes_on():
            return
        if fate != "vanishes":
            _put(jobs.job(name), "node-0/status.json", _last_word(jobs.job(name), fails=fate == "fails"))
        if goes_on():
            jobs.end(name, "Failed" if fate == "fails" else "Completed", reason="AlgorithmError: x")


def _last_word(job: Job, *, fails: bool) -> dict[str, Any]:
    run_ids = [text.split()[0] for name, text in sorted(job.request["HyperParameters"].items())]
    state = "failed" if fails else "completed"
    runs = [{"run_id": run_id, "state": state, "exit_code": int(fails)} for run_id in run_ids]
    said = {"outcome": state, "reason": "it failed" if fails else None, "runs": runs, "uptime_s": 3.0}
    return {**said, "billed_until": datetime.now(UTC).isoformat()}


def _put(job: Job, name: str, said: dict[str, Any]) -> None:
    """Let SageMaker copy to S3 what the container wrote."""
    bucket, _, prefix = job.tags["fastlaunch:output"].removeprefix("s3://").partition("/")
    body = json.dumps({"schema": 1, "token": job.name, "node": 0, **said}).encode()
    backend("s3", "aws").put_object(bucket, f"{prefix}/{name}", body)

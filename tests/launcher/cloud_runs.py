"""Runs on the AWS of a test as `submit` leaves them: rows, instances, and what their nodes uploaded."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import ec2_builders
from attempt_builders import add_attempt
from cloud_commands import aws
from fake_records import write_run

from fastlaunch.backends.ec2.plan import plan_ec2
from fastlaunch.backends.site import Site
from fastlaunch.core.plan import RunState
from fastlaunch.ledger.ledger import Ledger

if TYPE_CHECKING:
    from moto_server import MotoServer

BUCKET = "acme"


@dataclass(frozen=True, kw_only=True)
class CloudRun:
    """An attempt under way: its id, token and runs, its machine's id, and the key prefix of its output."""

    attempt_id: int
    token: str
    run_ids: tuple[str, ...]
    instance_id: str
    prefix: str
    server: "MotoServer"

    def upload(self, name: str, body: bytes) -> None:
        """Store an object of the attempt's output, as its node does."""
        aws().put_object("us-east-1", BUCKET, f"{self.prefix}/{name}", body)

    def say(self, name: str, **values: Any) -> None:
        """Upload what the node says: `boot.json` or `node-0/status.json`."""
        self.upload(name, json.dumps({"schema": 1, "token": self.token, **values}).encode())

    def record(self, run_id: str, **values: Any) -> None:
        """Upload a record of every rank of a run."""
        with TemporaryDirectory() as folder:
            write_run(Path(folder), run_id=run_id, **{"world_size": 8, "batch_size": 64, **values})
            for path in Path(folder).iterdir():
                self.upload(f"node-0/{run_id}/{path.name}.000000000000", path.read_bytes())

    def end(self, *, outcome: str = "completed", **values: Any) -> None:
        """Let the node say its last word, and end the machine."""
        runs = [
            {"run_id": run_id, "state": "completed", "exit_code": 0, "started_s": 100.0, "ended_s": 400.0}
            for run_id in self.run_ids
        ]
        said = {"outcome": outcome, "reason": None, "boot_s": 40.0, "pull_s": 60.0, "uptime_s": 500.0}
        self.say("node-0/status.json", **{**said, "runs": runs, **values})
        self.server.set_instance(
            self.instance_id,
            state="terminated",
            transition_reason=f"User initiated ({datetime.now(UTC):%Y-%m-%d %H:%M:%S} GMT)",
        )


def start_run(
    ledger: Ledger, server: "MotoServer", *, recipes: Sequence[str] = ("bf16",), minutes_ago: float = 10.0
) -> CloudRun:
    """An attempt that does a run of each recipe on one p5.48xlarge in us-east-1, launched so long ago."""
    site = set_up(server)
    attempt_id, token, run_ids = add_rows(ledger, site, recipes)
    plan = ledger.plan_of(attempt_id)
    assert plan is not None
    (instance,) = aws().run_instances("us-east-1", plan.request)
    launched_at = datetime.now(UTC) - timedelta(minutes=minutes_ago)
    server.set_instance(instance.id, state="running", launch_time=launched_at)
    note_start(ledger, attempt_id, instance.id, launched_at)
    return CloudRun(
        attempt_id=attempt_id,
        token=token,
        run_ids=run_ids,
        instance_id=instance.id,
        prefix=f"fastlaunch/runs/{run_ids[0]}/attempt-1",
        server=server,
    )


def set_up(server: "MotoServer") -> Site:
    """A p5.48xlarge in us-east-1, with all that it needs there."""
    import moto_gaps
    from moto_server import backend

    if BUCKET not in backend("s3", "aws").buckets:
        server.set_up_region("us-east-1", bucket=BUCKET)
    return ec2_builders.site(
        bucket=BUCKET, ami=moto_gaps.machine_image_id("us-east-1"), subnets=(), zone=None, security_groups=()
    )


def add_rows(
    ledger: Ledger, site: Site, recipes: Sequence[str] = ("bf16",)
) -> tuple[int, str, tuple[str, ...]]:
    """Id and token of a new attempt at a run of each recipe, and the runs."""
    attempt = add_attempt(
        ledger,
        *(ec2_builders.job(recipe, steps=20) for recipe in recipes),
        plan=lambda jobs, n: plan_ec2(
            jobs, attempt=n, site=site, max_minutes=60, render=ec2_builders.bootstrap_as_text
        ),
        max_minutes=60,
        usd_per_hour=60.0,
    )
    return attempt.id, attempt.token, attempt.run_ids


def note_start(ledger: Ledger, attempt_id: int, instance_id: str, launched_at: datetime) -> None:
    """Note in the ledger that the attempt got this machine."""
    attempt = ledger.attempt(attempt_id)
    handle = {
        "region": "us-east-1",
        "instance_id": instance_id,
        "instance_ids": [instance_id],
        "token": attempt.token,
        "output": attempt.output,
        "launched_at": launched_at.isoformat(),
    }
    with ledger.transaction():
        ledger.set_handle(attempt_id, handle)
        ledger.set_machine(attempt_id, zone="us-east-1a", launched_at=launched_at)
        for run_id in attempt.run_ids:
            ledger.set_state(run_id, RunState.RUNNING)

"""What commands take with ten thousand runs of fifty people in one folder and ledger.

    python tests/benchmarks/scale.py [--runs 10000] [--people 50] [--machines 20] [--home FOLDER]

Makes an AWS on this machine (moto) with a shared folder, to which everybody else has pushed their runs, and
with machines under way; and a ledger with as many runs of the user's own, on EC2. Then prints what each
command, a process of its own, takes: seconds, those of a CPU, and requests; to stderr also which, as they
come. With --home it keeps the ledger there. Times depend on the machine and what else it does: no test
asserts them.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, BinaryIO

import yaml
from tabulate import tabulate

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS / name) for name in ("launcher", "aws")]

from ec2_builders import AGENT, bootstrap_as_text, job, site  # noqa: E402
from fake_records import write_run  # noqa: E402
from moto_server import ACCOUNT, MotoServer, backend  # noqa: E402

from fastlaunch.aws.types import StoredObject  # noqa: E402
from fastlaunch.backends.ec2.plan import plan_ec2  # noqa: E402
from fastlaunch.core.plan import RunState  # noqa: E402
from fastlaunch.core.settings import Settings  # noqa: E402
from fastlaunch.ledger.ledger import Ledger, Run, open_ledger  # noqa: E402
from fastlaunch.lifecycle.importer import find_runs  # noqa: E402
from fastlaunch.lifecycle.sharing import SharedFolder, push  # noqa: E402
from fastlaunch.measure.summary import Interval, RunSummary  # noqa: E402

REGION, BUCKET = "us-east-1", "acme-training"
RECIPES = ("fp32", "tf32", "bf16", "fp16", "compile", "te-bf16", "te-fp8")
NUM_STEPS, NUM_SEGMENTS = 40, 50
#: After so long `watch` is stopped.
WATCH_S = 25.0
COMMANDS = (
    ("runs", "pull"),
    ("runs", "pull"),
    ("runs", "list"),
    ("runs", "list", "owner=person-7"),
    ("compare",),
    ("compare", "--every-run"),
    ("report", "--output", "-"),
    ("status",),
    ("watch", "--interval", "5"),
    ("reap", "--dry-run"),
)


class Bucket:
    """The shared folder, written without requests."""

    def put_object(self, region: str, bucket: str, key: str, body: bytes, *, only_new: bool = False) -> bool:
        backend("s3", "aws").put_object(bucket, key, body)
        return True

    def list_objects(self, region: str, bucket: str, prefix: str, **_: object) -> list[StoredObject]:
        return []

    def download(self, region: str, bucket: str, key: str, file: BinaryIO, *, max_bytes: int) -> bool:
        return False


def add_runs(ledger: Ledger, summaries: dict[str, RunSummary], number: int, *, prefix: str) -> None:
    """Add runs that have ended on EC2, each with its attempt."""
    noise, folder, here = random.Random(prefix), ledger.path.parent / "runs", site()
    for at in range(number):
        if at % 20 == 0:
            submission = ledger.add_submission("fastlaunch submit --instance p5.48xlarge")
        recipe = RECIPES[at // 4 % len(RECIPES)]
        done, run_id = job(recipe, seed=at), ledger.new_run_id()
        ledger.add_run(
            submission,
            run_id,
            spec=done.to_json(),
            plan=None,
            workload=done.workload,
            recipe=recipe,
            instance=done.instance,
            backend="ec2",
            price=here.price,
            directory=folder / run_id,
        )
        attempt, token = add_attempt(ledger, run_id, prefix=prefix)
        launched_at = datetime.now(UTC) - timedelta(days=2)
        ledger.set_handle(attempt, handle_of(run_id, token, prefix, f"i-{at:017x}", launched_at))
        ledger.set_machine(attempt, zone="us-east-1a", launched_at=launched_at)
        summary = summaries[recipe]
        assert summary.timing.step_time_s is not None
        time_s = Interval(value=summary.timing.step_time_s.value * noise.gauss(1, 0.01))
        ledger.set_summary(run_id, replace(summary, timing=replace(summary.timing, step_time_s=time_s)))
        ledger.set_state(run_id, RunState.RUNNING)
        ledger.set_state(run_id, RunState.COMPLETED)
        ledger.end_attempt(attempt, RunState.COMPLETED, billed_seconds=600.0, billing="node", lived_s=600.0)


def add_attempt(ledger: Ledger, run_id: str, *, prefix: str) -> tuple[int, str]:
    where = site(bucket=BUCKET, prefix=prefix)
    return ledger.add_attempt(
        [run_id],
        max_minutes=120,
        usd_per_hour=55.04,
        account=ACCOUNT,
        partition="aws",
        make_plan=lambda n: plan_ec2(
            {run_id: job()}, attempt=n, site=where, max_minutes=120, render=bootstrap_as_text, agent=AGENT
        ),
    )


def handle_of(run_id: str, token: str, prefix: str, instance: str, launched_at: datetime) -> dict[str, Any]:
    return {
        "region": REGION,
        "instance_id": instance,
        "instance_ids": [instance],
        "num_nodes": 1,
        "token": token,
        "output": f"s3://{BUCKET}/{prefix}/runs/{run_id}/attempt-1",
        "launched_at": launched_at.isoformat(),
    }


def start_machine(server: MotoServer, run_id: str, *, owner: str, prefix: str) -> str:
    """Return the id of an instance with the tags of a run."""
    from cloud_commands import aws
    from moto_gaps import machine_image_id

    tags = {
        "fastlaunch:run": run_id,
        "fastlaunch:attempt": "1",
        "fastlaunch:max-minutes": "120",
        "fastlaunch:output": f"s3://{BUCKET}/{prefix}/runs/{run_id}/attempt-1",
        "Name": f"fastlaunch {run_id}",
        "Owner": owner,
    }
    listed = [{"Key": key, "Value": value} for key, value in tags.items()]
    (instance,) = aws().run_instances(
        REGION,
        {
            "ImageId": machine_image_id(REGION),
            "InstanceType": "p5.48xlarge",
            "MinCount": 1,
            "MaxCount": 1,
            "ClientToken": f"{run_id}-a1",
            "TagSpecifications": [{"ResourceType": "instance", "Tags": listed}],
        },
    )
    server.set_instance(instance.id, state="running")
    return instance.id


def start_run(server: MotoServer, ledger: Ledger, folder: Path, *, prefix: str) -> None:
    """Add a run under way, which has uploaded a part of its records."""
    run_id, under_way = ledger.new_run_id(), job(steps=100_000)
    ledger.add_run(
        ledger.add_submission("fastlaunch submit --instance p5.48xlarge --detach"),
        run_id,
        spec=under_way.to_json(),
        plan=None,
        workload=under_way.workload,
        recipe=under_way.recipe.label,
        instance=under_way.instance,
        backend="ec2",
        price=site().price,
        directory=ledger.path.parent / "runs" / run_id,
    )
    attempt, token = add_attempt(ledger, run_id, prefix=prefix)
    instance = start_machine(server, run_id, owner="me", prefix=prefix)
    now = datetime.now(UTC)
    ledger.set_handle(attempt, handle_of(run_id, token, prefix, instance, now))
    ledger.set_machine(attempt, zone="us-east-1a", launched_at=now)
    ledger.set_state(run_id, RunState.RUNNING)
    store, output = backend("s3", "aws"), f"{prefix}/runs/{run_id}/attempt-1"
    boot = {"token": token, "zone": "us-east-1a", "booted_at": now.isoformat()}
    store.put_object(BUCKET, f"{output}/boot.json", json.dumps(boot).encode())
    paths = write_run(folder / run_id, steps=1000, run_id=run_id, world_size=8, status=None)
    for path in paths:
        body = path.read_bytes()
        size = len(body) // NUM_SEGMENTS + 1
        for start in range(0, len(body), size):
            key = f"{output}/node-0/{run_id}/{path.name}.{start:012d}"
            store.put_object(BUCKET, key, body[start : start + size])


def run(server: MotoServer, command: Sequence[str], environment: dict[str, str]) -> list[Any]:
    """Return a row: the command, its seconds, those of a CPU, its requests."""
    before, started, cpu_s = server.counts(), time.perf_counter(), _cpu_s()
    line = [sys.executable, "-m", "fastlaunch", *command]
    try:
        done = subprocess.run(
            line,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=WATCH_S if command[0] == "watch" else None,
        )
        seconds = f"{time.perf_counter() - started:.1f}"
        if done.returncode not in (0, 1):
            raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
    except subprocess.TimeoutExpired:
        seconds = f"stopped after {WATCH_S:.0f}"
    sent = Counter(server.counts())
    sent.subtract(before)
    requests = ", ".join(f"{action} {number}" for action, number in sent.most_common() if number)
    cpu = f"{_cpu_s() - cpu_s:.1f}"
    return [f"fastlaunch {' '.join(command)}", seconds, cpu, sum(sent.values()), requests]


def _cpu_s() -> float:
    """Return the CPU time of all commands so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--people", type=int, default=50)
    parser.add_argument("--machines", type=int, default=20)
    parser.add_argument("--home", type=Path)
    options = parser.parse_args(arguments)
    os.environ |= {"AWS_ACCESS_KEY_ID": "AKIAEXAMPLE", "AWS_SECRET_ACCESS_KEY": "secret"}
    os.environ["AWS_DEFAULT_REGION"] = REGION
    server = MotoServer()
    os.environ["AWS_ENDPOINT_URL"] = server.url
    region = server.set_up_region(REGION, bucket=BUCKET)
    with tempfile.TemporaryDirectory() as temporary:
        folder, home = Path(temporary), options.home or Path(temporary, "home")
        home.mkdir(exist_ok=True)
        summaries = {}
        for recipe in RECIPES:
            write_run(folder / recipe, steps=200, recipe=recipe, instance="p5.48xlarge", world_size=8)
            (summaries[recipe],) = (one.summary for one in find_runs([folder / recipe]).runs.values())
        share_runs(folder, options)
        with open_ledger(Settings(home=home)) as ledger, ledger.transaction():
            for _ in range(options.machines):
                start_run(server, ledger, folder, prefix="fastlaunch")
            add_runs(ledger, summaries, options.runs, prefix="fastlaunch")
        for number in range(options.people * 2):
            start_machine(server, f"20261121-09{number:04d}-abcd", owner=f"person-{number}", prefix="x")
        config = folder / "config.yaml"
        written = {
            "bucket": region.bucket,
            "instance_profile": region.instance_profile,
            "security_groups": list(region.security_groups),
            "scheduler_role": region.scheduler_role,
            "subnets": dict(region.subnets),
        }
        config.write_text(yaml.safe_dump({"region": REGION, "aws": {REGION: written}}))
        environment = {**os.environ, "FASTLAUNCH_HOME": str(home), "FASTLAUNCH_CONFIG": str(config)}
        rows = []
        for command in COMMANDS:
            rows.append(run(server, command, environment))
            print(tabulate(rows[-1:], tablefmt="plain"), file=sys.stderr)
    headers = ["command", "s", "CPU s", "requests"]
    print(tabulate([row[: len(headers)] for row in rows], headers=headers, tablefmt="github"))
    server.close()


def share_runs(folder: Path, options: argparse.Namespace) -> None:
    """Push the runs of everybody else, each from a ledger of its own."""
    shared = SharedFolder(store=Bucket(), region=REGION, bucket=BUCKET, prefix="fastlaunch/shared/")
    for person in range(1, options.people):
        home = folder / f"person-{person}"
        home.mkdir()
        with open_ledger(Settings(home=home)) as ledger, ledger.transaction():
            chosen = []
            for number in range(options.runs // options.people):
                if number % 20 == 0:
                    submission = ledger.add_submission("fastlaunch submit")
                chosen.append(shared_run(ledger, home, submission, number))
            push(chosen, shared, owner=f"person-{person}", account=lambda _: ACCOUNT, with_words=True)


def shared_run(ledger: Ledger, home: Path, submission: str, number: int) -> Run:
    run_id, recipe = ledger.new_run_id(), RECIPES[number // 4 % len(RECIPES)]
    made = job(recipe, seed=number, steps=NUM_STEPS, num_gpus=1)
    write_run(
        home / "runs" / run_id,
        steps=NUM_STEPS,
        batch_size=64,
        run_id=run_id,
        recipe=recipe,
        instance="p5.48xlarge",
        seed=number,
    )
    ledger.add_run(
        submission,
        run_id,
        spec=made.to_json(),
        plan=None,
        workload=made.workload,
        recipe=recipe,
        instance=made.instance,
        backend="local",
        directory=home / "runs" / run_id,
    )
    ledger.set_state(run_id, RunState.RUNNING)
    ledger.set_summary(run_id, find_runs([home / "runs" / run_id]).runs[run_id].summary)
    ledger.set_state(run_id, RunState.COMPLETED)
    return ledger.get(run_id)


if __name__ == "__main__":
    main()

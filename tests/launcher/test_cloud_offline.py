"""Commands with runs on AWS in the ledger, where AWS cannot be reached or need not be asked."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from ec2_builders import job, site

from fastlaunch.aws.client import Aws
from fastlaunch.backends.ec2.ec2 import Ec2Backend
from fastlaunch.core.plan import RunState
from fastlaunch.ledger.ledger import LEDGER_NAME, Ledger

_TELLS_MODULES = (
    "import sys; from fastlaunch.cli.main import run; code = run(sys.argv[1:]);"
    " print('boto3' if 'boto3' in sys.modules else 'no boto3', file=sys.stderr); sys.exit(code)"
)


@pytest.fixture
def run_id(isolated: Path) -> str:
    """A run whose attempt was noted and not followed."""
    isolated.mkdir()
    with Ledger(isolated / LEDGER_NAME) as ledger:
        run_id = ledger.new_run_id()
        ledger.add_run(
            ledger.add_submission("fastlaunch submit"),
            run_id,
            spec=job().to_json(),
            plan=None,
            workload="vit-huge",
            recipe="bf16",
            instance="p5.48xlarge",
            backend="ec2",
        )
        backend = Ec2Backend(aws=Aws(), home=isolated).at(site(), 120)
        attempt, _ = ledger.add_attempt(
            [run_id], max_minutes=120, make_plan=lambda n: backend.plan({run_id: job()}, attempt=n)
        )
        ledger.set_handle(
            attempt,
            {
                "region": "us-east-1",
                "instance_id": "i-0123456789abcdef0",
                "token": f"{run_id}-a1",
                "output": f"s3://acme-training/fastlaunch/runs/{run_id}/attempt-1",
                "launched_at": "2026-11-21T09:00:00+00:00",
            },
        )
        ledger.set_state(run_id, RunState.RUNNING)
    return run_id


def type_in(
    *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _TELLS_MODULES, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **(environment or {})},
        timeout=60,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("status",),
        ("runs", "list"),
        ("compare", "--all"),
    ],
)
def test_without_credentials_rows_stay_as_they_are(run_id: str, arguments: tuple[str, ...]) -> None:
    done = type_in(*arguments)
    assert "warning: 1 attempts in us-east-1 are shown as they were" in done.stderr
    assert "Traceback" not in done.stderr
    if arguments[0] != "compare":
        assert done.returncode == 0 and "running" in done.stdout and run_id in done.stdout


@pytest.mark.slow
def test_boto3_is_imported_only_while_something_is_under_way(run_id: str, isolated: Path) -> None:
    assert type_in("runs", "list").stderr.rstrip().endswith("\nboto3")
    with Ledger(isolated / LEDGER_NAME) as ledger:
        for attempt in ledger.unfinished_attempts("ec2"):
            ledger.end_attempt(attempt.id, RunState.COMPLETED)
        ledger.set_state(run_id, RunState.COMPLETED)
    done = type_in("runs", "list")
    assert done.returncode == 0 and "completed" in done.stdout
    assert done.stderr.rstrip().endswith("no boto3")

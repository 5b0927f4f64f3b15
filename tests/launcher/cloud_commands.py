"""The command line over the AWS of a test: `cloud("status")`, and one set of clients for all tests."""

import os
import pty
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml
from fake_train.launcher import app_context

from fastlaunch.aws.client import Aws
from fastlaunch.backends.ec2.ec2 import Ec2Backend
from fastlaunch.backends.protocol import Backend
from fastlaunch.backends.sagemaker.sagemaker import SageMakerBackend
from fastlaunch.cli.main import run
from fastlaunch.core.settings import RegionSettings


@cache
def aws() -> Aws:
    """Clients of the test session's server, made once: making them takes longer than most tests."""
    return Aws(sleep=lambda _: None)


def cloud(
    *argv: str,
    sleep: Callable[[float], None] = lambda _: None,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ask: Callable[[str], bool] | None = None,
) -> int:
    """Exit code of `fastlaunch ARGV` in this process, with AWS's backends beside the local one."""
    context = app_context(*argv)
    home = context.settings.home
    # Every command is a process of its own, and asks anew who is logged in.
    aws()._identity = None
    backends = {
        **context.backends,
        "ec2": Ec2Backend(aws=aws(), home=home, sleep=sleep, now=now),
        "sagemaker": cast(Backend, SageMakerBackend(aws=aws(), home=home, sleep=sleep, now=now)),
    }
    return run(list(argv), replace(context, backends=backends, connect=aws, sleep=sleep, now=now, ask=ask))


def configure(isolated: Path, region: RegionSettings | None = None, **changes: Any) -> None:
    """Write the config file of us-east-1: what the region has, in two zones, and the changes."""
    written: dict[str, Any] = {}
    if region is not None:
        written = {
            "bucket": region.bucket,
            "instance_profile": region.instance_profile,
            "security_groups": list(region.security_groups),
            "scheduler_role": region.scheduler_role,
            "subnets": dict(list(region.subnets.items())[:2]),
        }
    settings = {"region": "us-east-1", "aws": {"us-east-1": written | changes}}
    (isolated.parent / "config.yaml").write_text(yaml.safe_dump(settings))


def on_terminal(*argv: str, answers: Sequence[str]) -> tuple[int, str]:
    """Exit code and stderr of `fastlaunch ARGV` in a process whose terminal is typed these answers."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "fastlaunch", *argv],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdin=theirs,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.write(ours, "".join(f"{answer}\n" for answer in answers).encode())
        _, err = process.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    return process.returncode, err

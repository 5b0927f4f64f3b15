"""What a command acts on: settings, this machine, the backends, the clock. Tests pass their own to click."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from site import getsitepackages, getusersitepackages
from typing import TYPE_CHECKING, Any

import click

from fastlaunch.aws.ec2 import Aws
from fastlaunch.backends import Backend
from fastlaunch.backends.ec2.ec2 import Ec2Backend
from fastlaunch.backends.local import LocalBackend, LocalSettings
from fastlaunch.backends.protocol import CloudBackend
from fastlaunch.backends.sagemaker.sagemaker import SageMakerBackend
from fastlaunch.core.paths import training_package
from fastlaunch.core.settings import Settings, load_settings
from fastlaunch.jobs.machine import Machine, this_machine

if TYPE_CHECKING:
    from fastlaunch.ledger.ledger import Ledger

#: Of connecting to AWS and of its answer, where the answer is a look at what is under way.
_SHORT_TIMEOUTS_S = (3.0, 20.0)


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """argv: the command line as typed. backends: by name. monotonic_s, sleep: for following a job.

    aws: asked only by what concerns AWS. now: with its time zone. commit: of the training code, None if that
    is not known.
    """

    settings: Settings
    machine: Machine
    backends: Mapping[str, Backend]
    argv: tuple[str, ...] = ()
    commit: str | None = None
    monotonic_s: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    aws: Aws = field(default_factory=Aws)
    now: Callable[[], datetime] = lambda: datetime.now(UTC)

    @property
    def cloud_backends(self) -> dict[str, CloudBackend]:
        """Every backend whose plans cost money, by name, with this command's AWS and clock.

        They are for what has to happen, such as starting and ending machines; `backends` look.
        """
        home = self.settings.home.absolute()
        return {
            name: make(aws=self.aws, home=home, sleep=self.sleep, now=self.now)
            for name, make in CLOUD.items()
        }


def surroundings() -> Surroundings:
    """The current command's surroundings: those it was given, else looked up."""
    found = click.get_current_context().find_object(Surroundings)
    if found is not None:
        return found
    settings = load_settings()
    machine = this_machine()
    return Surroundings(
        settings=settings,
        machine=machine,
        backends=make_backends(settings, machine),
        argv=tuple(sys.argv[1:]),
        commit=_commit(training_package()),
    )


def reconcile_here(ledger: "Ledger") -> None:
    """End the runs whose launcher was killed, so that none is shown as running that is not."""
    from fastlaunch.submission import concerns_cloud, reconcile

    unfinished = ledger.fetch_comparable(["state=planned", "state=running"])
    if not unfinished and not concerns_cloud(ledger):
        return
    around = surroundings()
    reconcile(ledger, around.backends, settings=around.settings)


def make_backends(settings: Settings, machine: Machine) -> dict[str, Backend]:
    """Every backend, ready to use, by name."""
    return {name: make(settings, machine) for name, make in BACKENDS.items()}


def _local(settings: Settings, machine: Machine) -> Backend:
    return LocalBackend(local_settings(settings.home, machine, os.environ))


def _looking(name: str) -> Callable[[Settings, Machine], Backend]:
    def make(settings: Settings, machine: Machine) -> Backend:
        # It serves looking at what is under way, which must not keep anyone waiting where there is no
        # network; what has to happen, such as ending a machine, it asks for again by itself.
        aws = Aws(attempts=2, timeouts_s=_SHORT_TIMEOUTS_S)
        backend: Backend = CLOUD[name](aws=aws, home=settings.home.absolute())
        return backend

    return make


#: The backends whose plans cost money.
CLOUD: Mapping[str, Callable[..., Any]] = {"ec2": Ec2Backend, "sagemaker": SageMakerBackend}
#: What `--backend` may name, and what makes it.
BACKENDS: Mapping[str, Callable[[Settings, Machine], Backend]] = {
    "local": _local,
    **{name: _looking(name) for name in CLOUD},
}


def local_settings(home: Path, machine: Machine, environ: Mapping[str, str]) -> LocalSettings:
    """Settings of the local backend on `machine`, from the environment and the installed training package."""
    package = training_package()
    return LocalSettings(
        home=home.absolute(),
        working_directory=Path.cwd(),
        pythonpath=_pythonpath(package.parent, environ),
        # On a GPU the threads matter less than torchrun's own choice of them; and the user's word counts.
        num_cores=None if machine.devices or "OMP_NUM_THREADS" in environ else machine.num_cores,
        commit=_commit(package),
    )


def _pythonpath(folder: Path, environ: Mapping[str, str]) -> str | None:
    inherited = environ.get("PYTHONPATH", "").split(os.pathsep)
    # Site packages are found anyway, and must not come before the standard library.
    if str(folder) in (*inherited, *getsitepackages(), getusersitepackages()):
        return None
    return os.pathsep.join([str(folder), *filter(None, inherited)])


@cache
def _commit(package: Path) -> str | None:
    """Commit of the checkout that tracks the training package, `-dirty` if it was changed since."""
    if not _git(package, "ls-files", "--error-unmatch", "records.py"):
        return None
    return _git(package, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        told = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return told.stdout.strip() or None if told.returncode == 0 else None

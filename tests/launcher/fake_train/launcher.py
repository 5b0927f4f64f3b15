"""The launcher's command line over the fake entrypoint: `surroundings` for a test, `main` for a process."""

import os
import sys
from dataclasses import replace
from pathlib import Path

from fastlaunch.backends.local import LocalBackend, LocalSettings
from fastlaunch.cli import run
from fastlaunch.cli.context import Surroundings
from fastlaunch.core.settings import load_settings
from fastlaunch.jobs.machine import Machine

ENTRYPOINT = Path(__file__).parent / "entrypoint.py"
CPU = Machine(devices=(), num_cores=2, modules=frozenset({"torch", "timm"}))


def surroundings(*argv: str, machine: Machine = CPU, **local: object) -> Surroundings:
    """Surroundings whose local backend starts the fake entrypoint."""
    settings = load_settings()
    backend = LocalSettings(
        home=settings.home,
        working_directory=Path.cwd(),
        launch=(sys.executable, str(ENTRYPOINT), "--nproc", "{nproc}"),
        pythonpath=os.pathsep.join(path for path in sys.path if path),
    )
    backend = replace(backend, **local)  # type: ignore[arg-type]
    return Surroundings(
        settings=settings, machine=machine, backends={"local": LocalBackend(backend)}, argv=argv
    )


def fastlaunch(*argv: str, machine: Machine = CPU) -> int:
    """Exit code of `fastlaunch ARGV` in this process."""
    return run(list(argv), surroundings(*argv, machine=machine))


if __name__ == "__main__":
    sys.exit(fastlaunch(*sys.argv[1:]))

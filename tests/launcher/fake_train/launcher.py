"""The launcher's command line over the fake entrypoint: `app_context` for a test, `main` for a process."""

import os
import sys
from pathlib import Path

from fastlaunch.backends.local import LocalBackend, LocalSettings
from fastlaunch.cli.main import run
from fastlaunch.core.settings import load_settings
from fastlaunch.jobs.machine import Machine
from fastlaunch.lifecycle.world import World

ENTRYPOINT = Path(__file__).parent / "entrypoint.py"
CPU = Machine(devices=(), num_cores=2, modules=frozenset({"torch", "timm"}))


def app_context(*argv: str, machine: Machine = CPU) -> World:
    """Return a context whose local backend starts the fake entrypoint."""
    settings = load_settings()
    backend = LocalSettings(
        home=settings.home,
        working_directory=Path.cwd(),
        launch=(sys.executable, str(ENTRYPOINT), "--nproc", "{nproc}"),
        pythonpath=os.pathsep.join(path for path in sys.path if path),
    )
    return World(
        settings=settings, find_machine=lambda: machine, backends={"local": LocalBackend(backend)}, argv=argv
    )


def fastlaunch(*argv: str, machine: Machine = CPU) -> int:
    """Exit code of `fastlaunch ARGV` in this process."""
    return run(list(argv), app_context(*argv, machine=machine))


if __name__ == "__main__":
    sys.exit(fastlaunch(*sys.argv[1:]))

"""What every test of a node, or of a training job's container, starts from: an AWS of its own, a scene."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from moto_server import MotoServer
from node_scene import REGION, Scene
from training_scene import TrainingScene


@pytest.fixture(scope="module")
def server() -> Iterator[MotoServer]:
    """One for all tests of a file; each begins with it empty."""
    server = MotoServer()
    yield server
    server.close()


@pytest.fixture
def scene(server: MotoServer, tmp_path: Path) -> Iterator[Scene]:
    """Instances of EC2's, turned off at the end."""
    server.reset()
    server.set_up_region(REGION)
    scene = Scene(moto=server, folder=tmp_path)
    yield scene
    for instance in scene.started:
        instance.close()


@pytest.fixture
def jobs(server: MotoServer, tmp_path: Path) -> Iterator[TrainingScene]:
    """Training jobs, ended at the end."""
    server.reset()
    server.set_up_region(REGION)
    scene = TrainingScene(moto=server, folder=tmp_path)
    yield scene
    for job in scene.started:
        job.close()

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


#: Of each kind of machine one scenario is slow; all others are in the full tier.
SMOKE = {
    "test_two_runs_are_done_and_uploaded_before_the_machine_turns_itself_off",
    "test_spot_taken_at_a_random_moment_loses_nothing_and_goes_on_from_its_checkpoint[1]",
    "test_node_that_reaches_nothing_turns_itself_off",
    "test_a_machine_without_what_it_needs_turns_itself_off[agent]",
    "test_a_machine_asks_for_nothing_that_its_role_may_not",
    "test_two_nodes_do_two_runs_together",
    "test_run_that_spot_interrupts_goes_on_where_it_was",
    "test_two_runs_are_done_and_all_that_they_left_arrives[each]",
    "test_a_host_that_fails_does_not_let_the_others_wait",
    "test_two_recipes_come_home",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent and item.name not in SMOKE:
            item.add_marker("full")

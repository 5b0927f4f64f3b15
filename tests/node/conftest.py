"""What every test of a node, or of a training job's container, starts from: an AWS of its own, a scene."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from instance_network import Switch
from moto_server import MotoServer
from node_scene import REGION, Scene
from simulated_instance import cannot_simulate
from training_scene import TrainingScene


@pytest.fixture(scope="module")
def server() -> Iterator[MotoServer]:
    """One for all tests of a file; each begins with it empty."""
    server = MotoServer()
    yield server
    server.close()


@pytest.fixture
def empty_server(server: MotoServer) -> MotoServer:
    server.reset()
    server.set_up_region(REGION)
    return server


@pytest.fixture
def scene(empty_server: MotoServer, tmp_path: Path) -> Iterator[Scene]:
    """Instances of EC2's, turned off at the end."""
    scene = Scene(moto=empty_server, folder=tmp_path)
    yield scene
    scene.close()


@pytest.fixture
def jobs(empty_server: MotoServer, tmp_path: Path) -> Iterator[TrainingScene]:
    """Training jobs, ended at the end."""
    scene = TrainingScene(moto=empty_server, folder=tmp_path)
    yield scene
    scene.close()


@pytest.fixture
def switch() -> Iterator[Switch]:
    switch = Switch()
    yield switch
    switch.close()


#: Of each kind of machine one scenario is slow; all others are in the full tier.
SMOKE = {
    "test_two_runs_are_done_and_uploaded_before_the_machine_turns_itself_off",
    "test_spot_taken_at_a_random_moment_loses_nothing_and_goes_on_from_its_checkpoint[1]",
    "test_node_that_reaches_nothing_turns_itself_off",
    "test_a_machine_without_what_it_needs_turns_itself_off[agent]",
    "test_a_machine_asks_for_nothing_that_its_role_may_not",
    "test_two_nodes_do_two_runs_together",
    "test_real_training_that_spot_interrupts_goes_on_where_it_was",
    "test_two_runs_are_done_and_all_that_they_left_arrives[each]",
    "test_a_host_that_fails_does_not_let_the_others_wait",
    "test_two_recipes_come_home",
    "test_a_script_comes_home_with_what_it_left",
    "test_a_script_that_spot_interrupts_goes_on_with_what_it_saved",
    "test_an_example_comes_home[nanogpt]",
    "test_an_example_comes_home_from_a_training_job[run_clm]",
    "test_a_sweep_of_two_types_comes_home",
    "test_the_first_hour_of_an_account",
}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = cannot_simulate()
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker("slow" if item.name in SMOKE else "full")
            item.add_marker(pytest.mark.timeout(900))
            if reason is not None:
                item.add_marker(pytest.mark.skip(reason=reason))

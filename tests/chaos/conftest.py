"""What all trials of a process share: a server, a network before it, and a process to fork commands from."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_launcher import Zygote
from moto_server import MotoServer
from network import Network
from trial import Trial

#: About one trial in ten is slow, at least one of each test; all others are in the full tier.
ONE_IN = 16


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent == Path(__file__).parent:
            # Each parameter has its turn.
            place = sum(item.callspec.indices.values())
            item.add_marker("full" if place % ONE_IN else "slow")


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    with Zygote() as started:
        yield started


@pytest.fixture(scope="session")
def network(shared_aws_server: MotoServer) -> Iterator[Network]:
    started = Network(shared_aws_server.url)
    yield started
    started.close()


@pytest.fixture
def trial(
    tmp_path: Path,
    shared_aws_server: MotoServer,
    network: Network,
    zygote: Zygote,
    request: pytest.FixtureRequest,
) -> Trial:
    """Of the test's `kind` and `seed`, where it has such; a machine's, and the first seed's, otherwise."""
    given = getattr(request.node, "callspec", None)
    asked = given.params if given else {}
    return Trial(
        seed=asked.get("seed", 0),
        kind=asked.get("kind", "machine"),
        folder=tmp_path,
        server=shared_aws_server,
        network=network,
        zygote=zygote,
    )

"""The AWS of a test: `aws_server`, named by the environment that commands and node programs inherit."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from faulty_proxy import FaultyProxy
    from moto_server import MotoServer
    from stubbed_aws import StubbedAws

    from fastlaunch.aws.client import Aws


@pytest.fixture(scope="session")
def shared_aws_server() -> Iterator["MotoServer"]:
    """One server for all tests of a process; ask for `aws_server`, which is empty."""
    from moto_server import MotoServer

    server = MotoServer()
    yield server
    server.close()


@pytest.fixture
def aws_server(shared_aws_server: "MotoServer", monkeypatch: pytest.MonkeyPatch) -> "MotoServer":
    """An empty account, reached through AWS_ENDPOINT_URL with credentials that are there."""
    shared_aws_server.reset()
    monkeypatch.setenv("AWS_ENDPOINT_URL", shared_aws_server.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAEXAMPLE")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return shared_aws_server


@pytest.fixture
def faulty_proxy(aws_server: "MotoServer", monkeypatch: pytest.MonkeyPatch) -> Iterator["FaultyProxy"]:
    """A proxy before `aws_server`, through which everybody's requests go now; faultless at first."""
    from faulty_proxy import FaultyProxy

    proxy = FaultyProxy(aws_server.url)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    yield proxy
    proxy.close()


@pytest.fixture(scope="session")
def shared_aws() -> "tuple[Aws, list[float]]":
    """One `Aws` for all tests, since making clients takes most of their time; and where its pauses go."""
    from fastlaunch.aws.client import Aws

    pauses_s: list[float] = []
    return Aws(attempts=3, sleep=pauses_s.append, timeouts_s=(5, 20)), pauses_s


@pytest.fixture
def aws(shared_aws: "tuple[Aws, list[float]]", aws_server: "MotoServer") -> "Aws":
    """What calls `aws_server`: three attempts, with pauses that take no time. Not through `faulty_proxy`."""
    return shared_aws[0]


@pytest.fixture
def aws_pauses_s(shared_aws: "tuple[Aws, list[float]]") -> list[float]:
    """How long `aws` would have slept in this test, s."""
    shared_aws[1].clear()
    return shared_aws[1]


@pytest.fixture
def stubbed_aws() -> Iterator["StubbedAws"]:
    """An AWS that answers what the test gives it, and has to be asked for all of it."""
    from stubbed_aws import StubbedAws

    stubbed = StubbedAws()
    yield stubbed
    stubbed.close()

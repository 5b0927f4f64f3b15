"""The AWS of a test: `aws_server`, named by the environment that commands and node programs inherit."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from moto_server import MotoServer


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

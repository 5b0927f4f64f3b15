"""An `Aws` whose every answer is made beforehand; both it and what is asked are held to botocore's model."""

from typing import Any

import boto3
from botocore.config import Config
from botocore.stub import Stubber

from fastlaunch.aws.client import Aws

#: By service: making one takes longer than a test.
_CLIENTS: dict[str, Any] = {}


class StubbedAws:
    """`aws` is what is tested: two attempts, whose pause goes to `slept_s`."""

    def __init__(self) -> None:
        self.slept_s: list[float] = []
        self.aws = Aws(
            connect=lambda service, region: self.stub(service).client, sleep=self.slept_s.append, attempts=2
        )
        self._stubs: dict[str, Any] = {}

    def stub(self, service: str) -> Any:
        """The stub of a service, to give responses to."""
        if service not in _CLIENTS:
            _CLIENTS[service] = boto3.client(
                {"servicequotas": "service-quotas"}.get(service, service),
                region_name="us-east-1",
                aws_access_key_id="id",
                aws_secret_access_key="secret",
                config=Config(retries={"total_max_attempts": 1}),
            )
        if service not in self._stubs:
            self._stubs[service] = Stubber(_CLIENTS[service])
            self._stubs[service].activate()
        return self._stubs[service]

    def error(
        self, service: str, method: str, code: str, message: str = "told so", status: int = 400
    ) -> None:
        """Answer the next call of `method` with an error."""
        self.stub(service).add_client_error(method, code, message, http_status_code=status)

    def close(self) -> None:
        """Check that all was asked for, and let the clients go."""
        for stub in self._stubs.values():
            stub.deactivate()
        for stub in self._stubs.values():
            stub.assert_no_pending_responses()

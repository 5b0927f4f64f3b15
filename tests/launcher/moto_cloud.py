"""boto3's clients of the tests' AWS, made once for all tests of a process."""

from functools import cache
from typing import Any

from fastlaunch.aws.client import Aws

#: Its session reads botocore's tables of endpoints once.
_MAKER = Aws()


@cache
def _connect(service: str, region: str) -> Any:
    """boto3's client: making one takes long, and all tests of a process have the same server."""
    return _MAKER._connect_with_boto3(service, region)

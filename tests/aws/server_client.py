"""boto3's client of the tests' AWS, for who plays a part there, with credentials of its own."""

from typing import Any

from moto_server import MotoServer


def server_client(server: MotoServer, service: str, region: str) -> Any:
    """A client of a service of `server`, whatever the environment says."""
    import boto3

    return boto3.client(
        service,
        region_name=region,
        endpoint_url=server.url,
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )

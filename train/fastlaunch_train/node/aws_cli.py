"""S3 and secrets through the AWS CLI of the machine's image, 1.17 or newer; every call has a time limit.

An image for SageMaker may have boto3 only, which then reads the secrets.
"""

from __future__ import annotations

import json
import shutil
import sys
import threading
from pathlib import Path

from fastlaunch_train.node.commands import Commands, Done
from fastlaunch_train.node.uploads import Store

#: Time limits, in seconds, of a call that moves next to nothing and of one that moves segments.
_SHORT_S, _LONG_S = 20.0, 120.0
#: Time limit, in seconds, of a listing of millions of objects.
_LIST_S = 1200.0
#: Prints the value of a secret or parameter, as the CLI does.
_SECRET_BY_BOTO3 = """
import boto3, json, sys
service, region, arn = sys.argv[1:]
client = boto3.client(service, region_name=region)
if service == "ssm":
    value = client.get_parameter(Name=arn, WithDecryption=True)["Parameter"]["Value"]
else:
    value = client.get_secret_value(SecretId=arn).get("SecretString")
print(json.dumps(value))
"""


class AwsCli:
    """The AWS CLI in a region. cut: see `Commands`."""

    def __init__(self, region: str, *, cut: threading.Event | None = None, is_nice: bool = False) -> None:
        self._region = region
        self._commands = Commands(cut=cut, is_nice=is_nice)

    def call(
        self, *arguments: str, limit_s: float = _SHORT_S, region: str = "", is_quiet: bool = False
    ) -> Done:
        """Run `aws` with these arguments."""
        command = ["aws", "--region", region or self._region, "--cli-connect-timeout", "10", *arguments]
        return self._commands.run(*command, limit_s=limit_s, is_quiet=is_quiet)

    def copy(self, source: object, target: object, *options: str, limit_s: float = _SHORT_S) -> bool:
        """Copy a file or object; return whether it arrived."""
        arguments = ("s3", "cp", "--only-show-errors", *options, str(source), str(target))
        return self.call(*arguments, limit_s=limit_s).is_ok

    def read(self, uri: str) -> str | None:
        """Return the text of an object; None if it cannot be read."""
        done = self.call("s3", "cp", "--only-show-errors", uri, "-", is_quiet=True)
        return done.stdout if done.is_ok else None

    def secret(self, arn: str) -> str | None:
        """Return the value of a secret or parameter; None if it cannot be read. No value is ever logged."""
        service, region = arn.split(":")[2:4]
        what = ["secretsmanager", "get-secret-value", "--query", "SecretString", "--secret-id", arn]
        if service == "ssm":
            what = ["ssm", "get-parameter", "--with-decryption", "--query", "Parameter.Value", "--name", arn]
        if shutil.which("aws"):
            done = self.call(*what, "--output", "json", region=region)
        else:
            program = [sys.executable, "-I", "-c", _SECRET_BY_BOTO3, service, region, arn]
            done = self._commands.run(*program, limit_s=_SHORT_S)
        try:
            value = json.loads(done.stdout) if done.is_ok else None
        except ValueError:
            return None
        # An environment variable cannot hold the character 0.
        return value if isinstance(value, str) and "\0" not in value else None

    def names(self, uri: str) -> list[str] | None:
        """Return the last part of every key that begins with `uri`; None if they cannot be listed."""
        bucket, _, prefix = uri[len("s3://") :].partition("/")
        where = ("--bucket", bucket, "--prefix", prefix, "--query", "Contents[].Key", "--output", "json")
        done = self.call("s3api", "list-objects-v2", *where)
        try:
            keys = json.loads(done.stdout or "null") if done.is_ok else None
        except ValueError:
            return None
        return [str(key).rpartition("/")[2] for key in keys or ()] if done.is_ok else None

    def num_bytes(self, uri: str) -> int | None:
        """Return the size, in bytes, of all objects under the URI; None if it cannot be listed."""
        bucket, _, prefix = uri[len("s3://") :].partition("/")
        query = ("--query", "sum(Contents[].Size || `[]`)", "--output", "json")
        where = ("--bucket", bucket, "--prefix", prefix, *query)
        done = self.call("s3api", "list-objects-v2", *where, limit_s=_LIST_S)
        try:
            return int(json.loads(done.stdout)) if done.is_ok else None
        except (ValueError, TypeError):
            return None

    def sync(self, uri: str, folder: Path) -> bool:
        """Download all objects under the URI that the folder lacks; return whether they are there.

        There is no time limit.
        """
        return self.call("s3", "sync", "--only-show-errors", uri, str(folder), limit_s=float("inf")).is_ok


class StagedStore(Store):
    """A store below `uri`: segments wait in the in-memory folder `stage` until they arrive."""

    def __init__(self, cli: AwsCli, uri: str, stage: Path) -> None:
        # Files are staged beside the folder, not in it, so that half a segment is never sent.
        super().__init__(stage, stage.with_name(f"{stage.name}.part"))
        self._cli = cli
        self._uri = uri

    def flush(self) -> bool:
        if not any(path.is_file() for path in self.root.rglob("*")):
            return True
        if not self._cli.copy(self.root, self._uri, "--recursive", limit_s=_LONG_S):
            return False
        shutil.rmtree(self.root)
        self.root.mkdir()
        return True

    def end_of(self, name: str) -> int:
        return 0

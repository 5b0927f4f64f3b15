"""What the nodes of an attempt fetch: the node agent and the list of runs, objects named by their hashes."""

import hashlib
import zipfile
from collections.abc import Iterable
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING

from fastlaunch.core.errors import Throttled, Unreachable
from fastlaunch.core.paths import training_package
from fastlaunch.core.plan import Plan, PlanObject
from fastlaunch_train.node.protocol import NodeProgram, agent_name, run_list_name

if TYPE_CHECKING:
    from fastlaunch.aws.client import Aws

_MAIN = "import sys\nfrom fastlaunch_train.node.__main__ import main\nsys.exit(main(sys.argv[1:]))\n"
#: The first time that a zip file can name.
_MTIME = (1980, 1, 1, 0, 0, 0)


@cache
def agent_archive() -> bytes:
    """Return the installed agent as a zipapp; the same files make the same bytes."""
    package = training_package()
    files = {"__main__.py": _MAIN.encode(), f"{package.name}/__init__.py": b""}
    for path in sorted((package / "node").glob("*.py")):
        files[f"{package.name}/node/{path.name}"] = path.read_bytes()
    content = BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, data in files.items():
            entry = zipfile.ZipInfo(name, _MTIME)
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
    return content.getvalue()


@cache
def agent_sha256() -> str:
    """Return the SHA-256 of the agent, in hex."""
    return hashlib.sha256(agent_archive()).hexdigest()


def agent_object(bucket: str, prefix: str, sha256: str) -> PlanObject:
    """Return where the agent lies in a bucket, once for all runs."""
    key = "/".join(filter(None, (prefix, "code", agent_name(sha256))))
    return PlanObject(bucket=bucket, key=key, sha256=sha256, text=None)


def run_list_object(program: NodeProgram, output: str, placeholders: Iterable[str]) -> PlanObject:
    """Return the list of runs below the attempt's output.

    placeholders: names of what is not known; where one stands in the list, its hash is not known either.
    """
    text = program.to_json()
    is_known = not any(f"<{name}>" in text for name in placeholders)
    sha256 = hashlib.sha256(text.encode()).hexdigest() if is_known else "<runs-sha256>"
    bucket, _, prefix = output.removeprefix("s3://").partition("/")
    return PlanObject(bucket=bucket, key=f"{prefix}/{run_list_name(sha256)}", sha256=sha256, text=text)


def store_objects(aws: "Aws", plan: Plan) -> None:
    """Store what the plan's machines fetch, where it is not there yet.

    Raises CloudRefused's kinds; not Unreachable, which would say that machines may have been started.
    """
    assert plan.region is not None
    for one in plan.objects:
        data = agent_archive() if one.text is None else one.text.encode()
        try:
            aws.put_object(plan.region, one.bucket, one.key, data, only_new=True)
        except Unreachable as error:
            raise Throttled(error.message, error.hint) from None

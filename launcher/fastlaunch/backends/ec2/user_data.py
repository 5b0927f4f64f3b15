"""User data: the bootstrap of a node, which fetches and starts the node agent. Pure."""

import shlex
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Template


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """What a node is told by its user data; the rest stands in the list of runs."""

    token: str
    region: str
    #: After which the machine turns itself off, whatever happens.
    max_minutes: int
    #: Where the attempt writes: `s3://...`.
    output: str
    #: URI and SHA-256 of the node agent, and of the list of runs.
    agent: str
    agent_sha256: str
    run_list: str
    run_list_sha256: str


def render_user_data(bootstrap: Bootstrap) -> str:
    """Return the shell script that does what `bootstrap` says."""
    return _template().render(**vars(bootstrap))


@cache
def _template() -> "Template":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("fastlaunch.backends.ec2")
    environment = Environment(loader=loader, undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["quote"] = shlex.quote
    return environment.get_template("bootstrap.sh.j2")

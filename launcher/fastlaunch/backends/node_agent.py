"""`Attempt`: what the plans of both services share; and the objects that nodes fetch.

The node agent and the list of runs are objects named by their hashes.
"""

import hashlib
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from io import BytesIO
from typing import TYPE_CHECKING, Any

from fastlaunch.backends.site import Site
from fastlaunch.catalog.prices import max_cost_usd
from fastlaunch.core.errors import Throttled, Unreachable
from fastlaunch.core.ownership import ATTEMPT_TAG, MAX_MINUTES_TAG, OUTPUT_TAG, RUN_TAG, make_token
from fastlaunch.core.paths import training_package
from fastlaunch.core.plan import Plan, PlanObject, placeholders_in
from fastlaunch.jobs.job import Job, node_arguments, run_environment
from fastlaunch_train.node.protocol import NodeProgram, NodeRun, agent_name, input_environment, run_list_name

if TYPE_CHECKING:
    from fastlaunch.aws.client import Aws

_MAIN = "import sys\nfrom fastlaunch_train.node.__main__ import main\nsys.exit(main(sys.argv[1:]))\n"
#: The earliest time that a zip file can hold.
_MTIME = (1980, 1, 1, 0, 0, 0)
#: How long a rank may take to end after SIGTERM. A container gets 100 s on EC2, 120 s on SageMaker.
_STOP_GRACE_S = 90


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """An attempt at runs on a site, in the terms that both services share.

    All its jobs share instance type, number of nodes and purchase option.
    """

    #: By run id, in their order.
    jobs: Mapping[str, Job]
    #: From 1.
    number: int
    site: Site
    #: What this attempt may take.
    max_minutes: int
    #: URI of what it writes.
    output: str
    #: SHA-256 of the node agent, if not that of this package.
    agent_sha256: str | None = None
    #: Id of the run under which earlier attempts wrote.
    root: str | None = None

    @property
    def first(self) -> str:
        """The id of the first run."""
        return next(iter(self.jobs))

    @property
    def job(self) -> Job:
        """The first job, which stands for all where they are alike."""
        return self.jobs[self.first]

    @property
    def token(self) -> str:
        """What AWS knows its request by."""
        return make_token(self.first, self.number)

    @property
    def agent(self) -> PlanObject:
        return agent_object(self.site.bucket, self.site.prefix, self.agent_sha256 or agent_sha256())

    @property
    def _unknown(self) -> set[str]:
        """Names of what is not known yet, without the brackets."""
        run_ids = [*self.jobs, self.root or ""]
        return {*self.site.placeholders, *(run_id[1:-1] for run_id in run_ids if run_id.startswith("<"))}

    def environment(self) -> dict[str, str]:
        """Return what every container finds in its environment."""
        job, site = self.job, self.site
        environment = {
            "FASTLAUNCH_ATTEMPT": str(self.number),
            "FASTLAUNCH_IMAGE_DIGEST": site.image.rpartition("@")[2],
            "FASTLAUNCH_NPROC": str(job.num_gpus // job.num_nodes),
            "FASTLAUNCH_STOP_GRACE_S": str(_STOP_GRACE_S),
        }
        if job.num_nodes > 1:
            environment["FASTLAUNCH_FABRIC"] = "any" if job.allow_tcp else "efa"
            if not job.allow_tcp:
                floor = site.instance.all_reduce_floor_gb_per_s
                environment["FASTLAUNCH_ALL_REDUCE_FLOOR_GB_PER_S"] = f"{floor:g}"
        if site.code and site.code.commit:
            environment["FASTLAUNCH_COMMIT"] = site.code.commit
        return environment

    def run_list(self, *, environment: Mapping[str, str], **of_service: Any) -> PlanObject:
        """Return the list of what the nodes are to do. of_service: further fields of `NodeProgram`."""
        site, runs = self.site, []
        for run_id, job in self.jobs.items():
            # The node itself tells every container its run's id.
            variables = run_environment(job)
            if job.num_gpus != self.job.num_gpus:
                variables["FASTLAUNCH_NPROC"] = str(job.num_gpus // job.num_nodes)
            runs.append(NodeRun(run_id=run_id, arguments=node_arguments(job), environment=variables))
        program = NodeProgram(
            token=self.token,
            attempt=self.number,
            runs=tuple(runs),
            num_gpus=site.instance.num_accelerators,
            idle_timeout_s=self.job.terms.idle_timeout_s,
            has_nvswitch=site.instance.has_nvswitch,
            environment={**site.variables, **input_environment(site.inputs), **environment},
            secrets=site.secrets,
            inputs=site.inputs,
            requirements_sha256=site.requirements.sha256 if site.requirements else None,
            **of_service,
        )
        return run_list_object(program, self.output, self._unknown)

    def tags(self, **others: str) -> list[dict[str, str]]:
        """Return the tags of what it starts: others and the user's, then ours."""
        tags = {
            **others,
            **self.site.tags,
            RUN_TAG: self.first,
            ATTEMPT_TAG: str(self.number),
            MAX_MINUTES_TAG: str(self.max_minutes),
            OUTPUT_TAG: self.output,
        }
        return [{"Key": key, "Value": value} for key, value in tags.items()]

    def plan(self, operation: str, request: Mapping[str, Any], run_list: PlanObject) -> Plan:
        """Return the plan that sends `request`, with the most that it costs.

        In a capacity block that is no more than was paid for the block.
        """
        site = self.site
        block = site.block if self.job.terms.purchase == "capacity-block" else None
        fee_usd = block.fee_usd if block else None
        return Plan(
            backend=site.backend,
            operation=operation,
            request=request,
            placeholders=placeholders_in(request, run_list, self._unknown),
            max_cost_usd=site.num_starts
            * max_cost_usd(
                num_nodes=self.job.num_nodes,
                max_minutes=self.max_minutes,
                usd_per_hour=site.usd_per_hour,
                volume_usd_per_hour=site.volume_usd_per_hour,
                fee_usd=fee_usd,
            ),
            usd_per_hour=site.usd_per_hour,
            price_as_of=site.price.as_of.isoformat() if site.price else None,
            region=site.region,
            sunk_usd=fee_usd,
            objects=(self.agent, run_list),
        )


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
    """Return where the agent lies in a bucket, one object for all runs."""
    key = "/".join(filter(None, (prefix, "code", agent_name(sha256))))
    return PlanObject(bucket=bucket, key=key, sha256=sha256, text=None)


def run_list_object(program: NodeProgram, output: str, placeholders: Iterable[str]) -> PlanObject:
    """Return the list of runs, an object below the attempt's output.

    placeholders: names of what is not known. A list with a placeholder in it has no known hash.
    """
    text = program.to_json()
    is_known = not any(f"<{name}>" in text for name in placeholders)
    sha256 = hashlib.sha256(text.encode()).hexdigest() if is_known else "<runs-sha256>"
    bucket, _, prefix = output.removeprefix("s3://").partition("/")
    return PlanObject(bucket=bucket, key=f"{prefix}/{run_list_name(sha256)}", sha256=sha256, text=text)


def store_objects(aws: "Aws", plan: Plan) -> None:
    """Store the objects that the plan's machines fetch, unless they are stored already.

    Raises a kind of CloudRefused, but never Unreachable: that would mean that machines may have started.
    """
    assert plan.region is not None
    for stored in plan.objects:
        data = agent_archive() if stored.text is None else stored.text.encode()
        try:
            aws.put_object(plan.region, stored.bucket, stored.key, data, only_new=True)
        except Unreachable as error:
            raise Throttled(error.message, error.hint) from None

"""A plan for AWS, for people: what it does in words, and the request as YAML, its user data readable."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import yaml

from fastlaunch.backends.placements import Ec2Placement
from fastlaunch.core.plan import Plan
from fastlaunch.core.units import by_reason
from fastlaunch.jobs.spec import JobSpec
from fastlaunch.placement.cost_ceiling import NOT_COUNTED, CostCeiling, block_of, type_name

if TYPE_CHECKING:
    from fastlaunch.backends.placements import Placement

#: Placeholders of what AWS cannot be asked for, and the options that give it.
_TO_BE_GIVEN = {
    "bucket": "--bucket",
    "instance-profile": "--instance-profile",
    "role": "--role",
    "subnet-id": "--subnet",
    "security-group-id": "--security-group",
}


def plan_text(
    plan: Plan,
    jobs: Sequence[JobSpec],
    *,
    sites: "Sequence[Placement]",
    skipped: Sequence[tuple[str, str]],
    ceiling: CostCeiling,
) -> str:
    """Return the plan at the first of `sites`, the others, what is not known yet, and what it may cost."""
    site, *others = sites
    lines = [in_words(jobs, site), "", f"{plan.operation} in {plan.region}:"]
    lines += _as_yaml(plan.request)
    for item in plan.objects:
        if item.text is not None:
            lines += ["", "What its machines do, in the list of runs that they fetch:"]
            lines += _as_yaml(json.loads(item.text))
    lines.append("")
    if others:
        lines += ["Without capacity there, in this order:", *(f"  {other.name}" for other in others)]
    if skipped:
        lines += ["Left out:", *(f"  {reason}" for reason in by_reason(skipped))]
    lines += _placeholders(plan)
    lines += [f"Planned, not started: {ceiling}.", NOT_COUNTED]
    return "\n".join(lines)


def _placeholders(plan: Plan) -> list[str]:
    missing = [f"<{name}>" for name in plan.placeholders if name in _TO_BE_GIVEN]
    run_ids = [name for name in plan.placeholders if name.startswith("run-id")]
    looked_up = [f"<{name}>" for name in plan.placeholders if name not in (*_TO_BE_GIVEN, *run_ids)]
    looked_up.append("<run-id>" if len(run_ids) == 1 else f"<run-id> to <run-id-{len(run_ids)}>")
    options = [_TO_BE_GIVEN[name] for name in plan.placeholders if name in _TO_BE_GIVEN]
    lines = []
    if missing:
        lines.append(
            f"To be given: {', '.join(missing)}, by {' and '.join(options)} "
            f"or under `aws.{plan.region}` in the config file"
        )
    lines.append(f"Known when it is submitted: {', '.join(looked_up)}")
    return lines


class _Dumper(yaml.SafeDumper):
    """Writes every object in full, lists indented, and a text of several lines as it stands."""

    def ignore_aliases(self, data: object) -> bool:
        return True

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def _as_yaml(value: Mapping[str, Any]) -> list[str]:
    """Return indented lines of YAML."""
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, width=math.inf, allow_unicode=True)
    return [f"  {line}".rstrip() for line in text.removesuffix("\n").split("\n")]


def in_words(jobs: Sequence[JobSpec], site: "Placement") -> str:
    """`te-fp8, 3 times: vit-huge at batch 64 for 200 steps, on one p5.48xlarge (8 x H100) in us-east-1a`"""
    # The recipes that share all else; in an experiment not all do.
    shared: dict[str, list[str]] = {}
    for job, times in Counter(job.without_seed for job in jobs).items():
        named = f"{job.recipe.label}, {times} times" if times > 1 else job.recipe.label
        shared.setdefault(_what(job, jobs), []).append(named)
    trained = ",\n".join(f"{'; '.join(recipes)}: {what}" for what, recipes in shared.items())
    after = ", one run after another" if len(jobs) > 1 else ""
    job = jobs[0]
    return f"{trained}{after}, on {_machines(job, site)} {_where(job, site)}, {_bought(job, site)}."


def _what(job: JobSpec, jobs: Sequence[JobSpec]) -> str:
    """`vit-huge at batch 64 for 200 steps`."""
    batch = "the largest batch that fits" if job.batch_size is None else f"batch {job.batch_size}"
    # Only where not all have as many.
    ranks = f" on {job.num_gpus} GPUs" if len({other.num_gpus for other in jobs}) > 1 else ""
    model = f" of {job.inputs.model}" if job.inputs.model else ""
    return f"{job.workload}{model} at {batch}{ranks} for {job.length}"


def _machines(job: JobSpec, site: "Placement") -> str:
    """`2 x p5.48xlarge (8 x H100 each)`, `one ml.p5.48xlarge (8 x H100)`."""
    instance = site.instance
    count = "one" if job.num_nodes == 1 else f"{job.num_nodes} x"
    each = " each" if job.num_nodes > 1 else ""
    named = f"{count} {type_name(site)} ({instance.num_accelerators} x {instance.accelerator}{each})"
    return f"{named}{' joined by EFA or TCP,' if job.allow_tcp else ''}"


def _where(job: JobSpec, site: "Placement") -> str:
    if site.backend == "sagemaker":
        return f"of SageMaker in {site.region}"
    if site.zone:
        return f"in {site.zone}{', in no placement group' if _stand_anywhere(job, site) else ''}"
    if job.terms.purchase == "capacity-block":
        return f"in {site.region}, in the block's zone"
    # A subnet is named, though not yet known, where there has to be one.
    if isinstance(site, Ec2Placement) and site.subnet:
        return f"in {site.region}, in a subnet of yours"
    return f"in {site.region}, in a zone of EC2's choice"


def _stand_anywhere(job: JobSpec, site: "Placement") -> bool:
    """Return whether neither a placement group nor a capacity block keeps the nodes close together."""
    if job.num_nodes == 1 or not isinstance(site, Ec2Placement):
        return False
    return site.block is None and site.placement_group is None


def _bought(job: JobSpec, site: "Placement") -> str:
    """`on-demand`, `capacity block cr-0a1b`, `training plan NAME`."""
    block = block_of(site)
    if job.terms.training_plan:
        return f"training plan {job.terms.training_plan.rpartition('/')[2]}"
    return job.terms.purchase if block is None else f"capacity block {block.reservation}"

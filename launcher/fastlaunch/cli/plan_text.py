"""A plan for AWS, for people: what it does, costs and lacks in words; on request all of it as YAML."""

import json
import math
import shlex
import shutil
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import yaml

from fastlaunch.backends.placements import Ec2Placement
from fastlaunch.core.conventions import FIRST_LOOK
from fastlaunch.core.errors import UserError
from fastlaunch.core.plan import Plan
from fastlaunch.core.units import by_reason, counted, in_ms, size_text
from fastlaunch.images.working_directory import IGNORE_FILE, WorkingDirectory, shown
from fastlaunch.jobs.options import CloudOptions
from fastlaunch.jobs.spec import JobSpec
from fastlaunch.placement.config_checks import setup_command
from fastlaunch.placement.cost_ceiling import NOT_COUNTED, CostCeiling, block_of, hours_text, type_name

if TYPE_CHECKING:
    from fastlaunch.backends.placements import Placement
    from fastlaunch.runs.expected import Expected

_USER_DATA = "UserData"
#: Longer lines are hard to read.
_WIDEST = 100
#: Placeholders of what AWS cannot be asked for, and the options that give it.
_TO_BE_GIVEN = {
    "bucket": "--bucket",
    "instance-profile": "--instance-profile",
    "role": "--role",
    "subnet-id": "--subnet",
    "security-group-id": "--security-group",
}
#: The column of the texts, beside their names.
_INDENT = 9
#: Of lists that may be long so many entries are shown.
_MOST = 4


def plan_text(
    plan: Plan,
    jobs: Sequence[JobSpec],
    *,
    sites: "Sequence[Placement]",
    skipped: Sequence[tuple[str, str]],
    ceiling: CostCeiling,
    expected: "Expected | str",
    cloud: CloudOptions,
    lacks_scheduler: bool,
    travels: Sequence[str] = (),
) -> str:
    """Return what would be done at the first of `sites`, what it costs, what ends it and what is missing.

    travels: sentences on what of the working directory does.
    lacks_scheduler: whether the config file names no role for the timer in the account, which is to be made.
    """
    site, *others = sites
    where = [f"left out: {reason}" for reason in by_reason(skipped)[:_MOST]]
    if others:
        where.insert(0, f"without capacity there: {_some([other.name for other in others], ', then ')}")
        if len({other.instance.name for other in sites}) > 1:
            where.insert(1, "the next type is tried only where there is no capacity: `sweep` trains on each")
    width = min(_WIDEST, shutil.get_terminal_size(fallback=(80, 1)).columns)
    lines = [
        *_topic("plan", [in_words(_as_followed(jobs, cloud), site)], width),
        *_topic("where", where, width),
        *_topic("travels", travels, width),
        *_topic("cost", [f"{ceiling}.", _expected(expected, jobs), NOT_COUNTED], width),
        *_topic("ends", [_ends(site, cloud, lacks_scheduler=lacks_scheduler)], width),
        *_missing(plan, site, width, lacks_scheduler=lacks_scheduler),
        *_topic("request", [_request(plan)], width),
    ]
    most = "at most " if _as_followed(jobs, cloud)[0].max_rounds else ""
    return "\n".join([*lines, "", f"Planned, not started: {most}{counted(len(jobs), 'run')}."])


def _as_followed(jobs: Sequence[JobSpec], cloud: CloudOptions) -> Sequence[JobSpec]:
    """Return the jobs as they are run: where nobody looks, all rounds are."""
    return [replace(job, max_rounds=None) for job in jobs] if cloud.detach else jobs


def _topic(name: str, texts: Sequence[str], width: int) -> list[str]:
    """Return the texts, wrapped and indented; the name stands before the first."""
    lines = [line for text in texts for line in _wrapped(text, width)]
    return [f"{name:<{_INDENT}}{lines[0].lstrip()}", *lines[1:]] if lines else []


def _wrapped(text: str, width: int, more: int = 0) -> list[str]:
    """Return lines in the column of the texts; all but the first are indented by `more`."""
    return textwrap.wrap(
        text,
        width,
        initial_indent=" " * _INDENT,
        subsequent_indent=" " * (_INDENT + more),
        break_long_words=False,
        break_on_hyphens=False,
    )


def _some(names: Sequence[str], separator: str) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return separator.join(names[:_MOST]) + more


def _expected(expected: "Expected | str", jobs: Sequence[JobSpec]) -> str:
    if isinstance(expected, str):
        return f"expected: not known, {expected}."
    rates = {"spot": ", at the most that spot may cost", "capacity-block": " of the block's fee"}
    rate = rates.get(jobs[0].terms.purchase, "")
    runs = f" in {'all ' if jobs[0].max_rounds else ''}{len(jobs)} runs" if len(jobs) > 1 else ""
    start = "; starting the machine, which was not measured, comes on top"
    if expected.start_s is not None:
        start = f", after {_duration(expected.start_s)} in which the machine starts"
    times = _some([f"{in_ms(time_s)} for {name}, {which}" for name, time_s, which in expected.steps], "; ")
    return (
        f"expected: about ${expected.usd:,.2f}{rate}, for {_duration(expected.training_s)} of building, "
        f"compiling and training{runs}{start}. Step times: {times}."
    )


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.3g} min" if seconds < 5400 else f"{seconds / 3600:,.3g} h"


def _ends(site: "Placement", cloud: CloudOptions, *, lacks_scheduler: bool) -> str:
    hours = hours_text(cloud.max_minutes)
    if site.backend == "sagemaker":
        return f"with its last run, or by SageMaker {hours} after it began to train."
    timers = [f"its own timer after {hours}"]
    if cloud.account_timer:
        timers.append(f"a timer in the account{' (missing, see below)' if lacks_scheduler else ''}")
    return f"with its last run. What hangs is ended by {', '.join(timers)}, and `fastlaunch reap`."


def travels_text(directory: WorkingDirectory) -> list[str]:
    """Return sentences on what travels with a script, by what rule, and how to see all of it."""
    files, largest = directory.files, directory.largest[:_MOST]
    rules = {"git": "what git tracks here", IGNORE_FILE: f"what {IGNORE_FILE} leaves"}
    what = rules.get(directory.rule or "", f"all that is here, as neither git nor a {IGNORE_FILE} says less")
    named = ", ".join(f"{shown(file.path)} ({size_text(file.num_bytes)})" for file in largest)
    only = "largest: " if len(files) > _MOST else ""
    lines = [f"{counted(len(files), 'file')}, {size_text(directory.num_bytes)}: {what}; {only}{named}."]
    if directory.untracked:
        behind = _some([shown(path) for path in directory.untracked], ", ")
        lines.append(f"Stays behind, as git does not track it: {behind}.")
    return [*lines, "`--dry-run --show files` lists all."]


def to_be_given(plan: Plan) -> list[str]:
    """Return the names of what the config file or an option has to say before the plan can start."""
    return [name for name in plan.placeholders if name in _TO_BE_GIVEN]


def _missing(plan: Plan, site: "Placement", width: int, *, lacks_scheduler: bool) -> list[str]:
    """Return what has to be named, how, and the commands that make it."""
    rows = [f"{name:<18} {_TO_BE_GIVEN[name]}" for name in to_be_given(plan)]
    rows += [f"{'scheduler-role':<18} or --no-account-timer"] * lacks_scheduler
    if not rows:
        return _topic("missing", ["nothing: the config file and the options name all."], width)
    lines = [f"{'' if number else 'missing':<{_INDENT}}{row}" for number, row in enumerate(rows)]
    lines += _wrapped(f"or as entries under `aws: {site.region}:` in the config file. To make them:", width)
    for command in setup_command(site.region).split(" && "):
        *parts, last = _wrapped(command, 78, more=2)
        lines += [*(f"{part} \\" for part in parts), last]
    return lines


def _request(plan: Plan) -> str:
    user_data = ", and `--show user-data` its script" if _USER_DATA in plan.request else ""
    return f"{plan.operation} in {plan.region}: `--show request` prints all of it{user_data}."


def request_text(plan: Plan) -> str:
    """Return the whole request as YAML, and the list of runs that its machines fetch."""
    lines = [f"{plan.operation} in {plan.region}:", *_as_yaml(plan.request)]
    for item in plan.objects:
        if item.text is not None:
            lines += ["", "What its machines do, in the list of runs that they fetch:"]
            lines += _as_yaml(json.loads(item.text))
    run_ids = [name for name in plan.placeholders if name.startswith("run-id")]
    unknown = [f"<{name}>" for name in plan.placeholders if name not in run_ids]
    unknown.append("<run-id>" if len(run_ids) == 1 else f"<run-id> to <run-id-{len(run_ids)}>")
    return "\n".join([*lines, "", f"# Known when it is submitted: {', '.join(unknown)}"])


def user_data_text(plan: Plan) -> str:
    """Return the script that the machine runs when it boots. Raises UserError if it has none."""
    if _USER_DATA not in plan.request:
        raise UserError("a training job of SageMaker has no user data", "give --show request")
    return str(plan.request[_USER_DATA])


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
        number = f"at most {times}" if job.max_rounds else str(times)
        named = f"{job.label}, {number} times" if times > 1 else job.label
        shared.setdefault(_what(job, jobs), []).append(named)
    trained = ",\n".join(f"{'; '.join(recipes)}: {what}" for what, recipes in shared.items())
    after = ", one run after another" if len(jobs) > 1 else ""
    job = jobs[0]
    if job.max_rounds:
        row = "variant" if job.script else "recipe"
        after += f", each {row} until its verdict is settled (looked at from round {FIRST_LOOK} on)"
    return f"{trained}{after}, on {_machines(job, site)} {_where(job, site)}, {_bought(job, site)}."


def _what(job: JobSpec, jobs: Sequence[JobSpec]) -> str:
    """`vit-huge at batch 64 for 200 steps`, `python train.py --amp {amp}`."""
    if job.script:
        torchrun = f" ({job.script.nproc} ranks a node)" if job.script.nproc else ""
        return shlex.join(job.script.command) + torchrun
    fitting = "the largest batch that fits" + (" all recipes" if job.fit else "")
    batch = fitting if job.batch_size is None else f"batch {job.batch_size}"
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

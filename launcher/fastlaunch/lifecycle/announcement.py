"""A submission for AWS in words: before it starts, and as a dry run prints it; its request as YAML."""

import json
import math
import re
import shlex
import shutil
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from fastlaunch.analysis.account import WORDS
from fastlaunch.backends.site import Site
from fastlaunch.core.errors import UserError
from fastlaunch.core.ownership import FIRST_LOOK
from fastlaunch.core.plan import PAYLOAD, Plan
from fastlaunch.core.terminal import as_warning
from fastlaunch.core.units import by_reason, counted, duration_text, in_ms, size_text
from fastlaunch.jobs.data_sources import DataFile
from fastlaunch.jobs.job import Job
from fastlaunch.jobs.option_rules import LOCAL_DATA, given_inputs
from fastlaunch.jobs.options import Options
from fastlaunch.jobs.requirements import read_requirements
from fastlaunch.jobs.working_directory import IGNORE_FILE, WorkingDirectory, shown
from fastlaunch.placement.capacity_block import STOP_MINUTES, TERMINATION_MINUTES
from fastlaunch.placement.cost_ceiling import NOT_COUNTED, CostCeiling, hours_text
from fastlaunch.placement.lookup import setup_command
from fastlaunch.placement.resolve import Placement
from fastlaunch_train.node.protocol import input_environment

if TYPE_CHECKING:
    from fastlaunch.analysis.cost import Expected
    from fastlaunch.ledger.ledger import Ledger
    from fastlaunch.measure.summary import Interval

#: The most entries to show of a long list.
_MOST = 4
#: The column of the sentences, beside the names of their topics.
_INDENT = 9
#: Longer lines are hard to read.
_WIDEST = 100
#: Names of files that are probably sent by mistake.
_PRIVATE = re.compile(r"\.env(\..*)?|\.netrc|id_(rsa|ed25519|ecdsa)|.*\.(pem|key)|credentials")
_USER_DATA = "UserData"
#: Placeholders that AWS cannot fill, and the options that do.
_TO_BE_GIVEN = {
    "bucket": "--bucket",
    "instance-profile": "--instance-profile",
    "role": "--role",
    "subnet-id": "--subnet",
    "security-group-id": "--security-group",
}


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """A planned submission, for which nothing was started, written or asked."""

    #: On this machine a plan per run; on AWS the request at the first site.
    plans: tuple[Plan, ...] = field(repr=False)
    jobs: tuple[Job, ...] = field(repr=False)
    #: The sites on AWS where it may run; without sites on this machine.
    placement: Placement = field(repr=False)
    #: The expected time and cost, from similar runs, or a sentence on why they are unknown.
    expected: "Expected | str" = field(repr=False, default="")
    #: A warning about the oldest price, if it is old.
    old_prices: str | None = None
    #: Whether the config file names no role for the timer in the account.
    lacks_scheduler: bool = False
    #: The most that a submission may cost, by the option or the config file; None without either.
    budget_usd: float | None = None

    @property
    def ceiling(self) -> CostCeiling | None:
        """The most that it may cost; None on this machine."""
        return self.placement.ceiling if self.placement.sites else None


def announcement(placement: Placement, ledger: "Ledger", expected: "Expected | str") -> str:
    """Return what will be done, warnings about it, and finally its cost."""
    from fastlaunch.lifecycle.resume import idle_end, slow_checkpoint

    options, site = placement.options, placement.sites[0]
    topics = _topics_of(placement, expected)
    cost = topics.pop("cost")
    notes = [*placement.changes, *warnings_of(placement)]
    if slow := slow_checkpoint(ledger, placement.jobs_at(), backend=site.backend):
        notes.append(as_warning(slow))
    if idle := idle_end(ledger, placement.jobs_at(), ledger.path.parent):
        notes.append(as_warning(idle))
    if options.detach and options.until_resolved:
        notes.append("--until-resolved needs a launcher that follows: with --detach all rounds run")
    if options.detach and site.backend == "ec2" and options.purchase == "spot":
        notes.append(
            "if EC2 takes its machine, the next `fastlaunch status` starts another, within this ceiling"
        )
    return "\n".join([*_layout(topics), *notes, *_layout({"cost": cost})])


def plan_text(dry_run: DryRun) -> str:
    """Return what would be done at the first site, what it costs, what ends it and what is missing."""
    (plan,), placement = dry_run.plans, dry_run.placement
    topics = _topics_of(
        placement, dry_run.expected, old_prices=dry_run.old_prices, lacks_scheduler=dry_run.lacks_scheduler
    )
    user_data = ", and `--show user-data` its script" if _USER_DATA in plan.request else ""
    request = f"{plan.operation} in {plan.region}: `--show request` prints all of it{user_data}."
    missing = _missing(plan, placement.sites[0], lacks_scheduler=dry_run.lacks_scheduler)
    most = "at most " if _followed_jobs(placement)[0].max_rounds else ""
    planned = f"Planned, not started: {most}{counted(len(dry_run.jobs), 'run')}."
    return "\n".join([*_layout(topics), *missing, *_layout({"request": [request]}), "", planned])


def to_be_given(plan: Plan) -> list[str]:
    """Return the names of settings or options that are needed before the plan can start."""
    return [name for name in plan.placeholders if name in _TO_BE_GIVEN]


def _missing(plan: Plan, site: Site, *, lacks_scheduler: bool) -> list[str]:
    """Return which names are missing, how to give them, and the commands that create them."""
    rows = [f"{name:<18} {_TO_BE_GIVEN[name]}" for name in to_be_given(plan)]
    rows += [f"{'scheduler-role':<18} or --no-account-timer"] * lacks_scheduler
    if not rows:
        return _layout({"missing": ["nothing: the config file and the options name all."]})
    lines = [f"{'' if number else 'missing':<{_INDENT}}{row}" for number, row in enumerate(rows)]
    lines += _wrapped(f"or as entries under `aws: {site.region}:` in the config file. To make them:")
    return [*lines, *_wrapped(setup_command(site.region))]


def _topics_of(
    placement: Placement,
    expected: "Expected | str",
    *,
    old_prices: str | None = None,
    lacks_scheduler: bool = False,
) -> dict[str, list[str]]:
    """Return what a submission does, where, with what, what it costs and what ends it: sentences by topic."""
    options, jobs = placement.options, _followed_jobs(placement)
    site, *others = placement.sites
    where = [f"left out: {reason}" for reason in by_reason(placement.skipped)]
    if others and site.queue:
        where.insert(0, f"waiting in the queue for {site.name} alone: `sweep` trains on each type")
    elif others:
        where.insert(0, f"without capacity there: {_some([other.name for other in others], ', then ')}")
        if len({other.instance.name for other in placement.sites}) > 1:
            where.insert(1, "the next type is tried only where there is no capacity: `sweep` trains on each")
    travels = travels_text(placement.directory) if placement.directory else []
    wheels = placement.wheels
    cost = _expected_text(expected, jobs, max_minutes=options.max_minutes)
    ends = [_ends(site, options, lacks_scheduler=lacks_scheduler)]
    if site.block:
        ends.append(_ends_in_block(options))
    if options.detach:
        ends.append("--detach: nobody will follow it.")
    if jobs[0].script and jobs[0].terms.purchase == "spot":
        ends.append(
            "If AWS takes its machine, another goes on with what the script saved in $FASTLAUNCH_OUTPUT when "
            "fl.checkpoint_due() or fl.stop_requested() said so, and finds there; else it starts anew."
        )
    return {
        "plan": [_in_words(jobs, site)],
        "where": where,
        "travels": [
            *travels,
            *_data_text(placement.jobs.data_file, site),
            *_needs_text(options, num_bytes=len(wheels.data) if wheels else None),
        ],
        "cost": [f"{placement.ceiling}.", *([f"{old_prices}."] if old_prices else []), cost, NOT_COUNTED],
        "ends": ends,
    }


def _followed_jobs(placement: Placement) -> Sequence[Job]:
    """Return the jobs that are run: all rounds where nobody looks in between."""
    jobs = placement.jobs_at()
    return [replace(job, max_rounds=None) for job in jobs] if placement.options.detach else jobs


def _layout(topics: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the sentences, wrapped and indented; a topic's name stands before its first."""
    lines = []
    for name, texts in topics.items():
        column = [line for text in texts for line in _wrapped(text)]
        lines += [f"{name:<{_INDENT}}{column[0].lstrip()}", *column[1:]] if column else []
    return lines


def _wrapped(text: str) -> list[str]:
    """Return lines in the column of the sentences."""
    return textwrap.wrap(
        text,
        min(_WIDEST, shutil.get_terminal_size(fallback=(80, 1)).columns),
        initial_indent=" " * _INDENT,
        subsequent_indent=" " * _INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _ends(site: Site, options: Options, *, lacks_scheduler: bool) -> str:
    hours = hours_text(options.max_minutes)
    if site.backend == "sagemaker":
        return f"with its last run, or by SageMaker {hours} after it began to train."
    timers = [f"its own timer after {hours}"]
    if options.account_timer:
        timers.append(f"a timer in the account{' (missing, see below)' if lacks_scheduler else ''}")
    return f"with its last run. A hung machine is stopped by {', '.join(timers)}, or `fastlaunch reap`."


def _ends_in_block(options: Options) -> str:
    """Return what the block itself ends, and how a job begins that is earlier than its block."""
    before = "the command waits, and starts it then."
    if options.detach:
        before = (
            "a schedule in the account sends this request at its first minute. The timer in the account is "
            "made by the first command that looks after that."
        )
    return (
        f"Training stops {STOP_MINUTES} min before the block ends, and EC2 ends the machines from "
        f"{TERMINATION_MINUTES} min before. If the block has not begun yet, {before}"
    )


def warnings_of(placement: Placement) -> list[str]:
    """Return the warnings of the checks; a warning for several places appears once."""
    warnings = dict.fromkeys(
        (check.message, check.hint) for check in placement.checks if check.result == "warning"
    )
    return [as_warning(f"{message}\n  {hint}" if hint else message) for message, hint in warnings]


def _in_words(jobs: Sequence[Job], site: Site) -> str:
    """`te-fp8, 3 times: vit-huge at batch 64 for 200 steps, on one p5.48xlarge (8 x H100) in us-east-1a`"""
    # Group the recipes that share everything else; in an experiment not all do.
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


def _what(job: Job, jobs: Sequence[Job]) -> str:
    """`vit-huge at batch 64 for 200 steps`, `python train.py --amp {amp}`."""
    if job.script:
        torchrun = f" ({job.script.nproc} ranks a node)" if job.script.nproc else ""
        return shlex.join(job.script.command) + torchrun
    fitting = "the largest batch that fits" + (" all recipes" if job.fit else "")
    batch = fitting if job.batch_size is None else f"batch {job.batch_size}"
    # Only if the jobs differ in it.
    ranks = f" on {job.num_gpus} GPUs" if len({other.num_gpus for other in jobs}) > 1 else ""
    model = f" of {job.inputs.model}" if job.inputs.model else ""
    return f"{job.workload}{model} at {batch}{ranks} for {job.length}"


def _machines(job: Job, site: Site) -> str:
    """`2 x p5.48xlarge (8 x H100 each)`, `one ml.p5.48xlarge (8 x H100)`."""
    instance = site.instance
    count = "one" if job.num_nodes == 1 else f"{job.num_nodes} x"
    per_node = " each" if job.num_nodes > 1 else ""
    named = f"{count} {site.type_name} ({instance.num_accelerators} x {instance.accelerator}{per_node})"
    return f"{named}{' joined by EFA or TCP,' if job.allow_tcp else ''}"


def _where(job: Job, site: Site) -> str:
    if site.backend == "sagemaker":
        return f"of SageMaker in {site.region}"
    if site.zone:
        is_close = job.num_nodes == 1 or site.block or site.placement_group
        return f"in {site.zone}{'' if is_close else ', in no placement group'}"
    if job.terms.purchase == "capacity-block":
        return f"in {site.region}, in the block's zone"
    # Mention the subnet where one is needed, although it is not known yet.
    if site.backend == "ec2" and site.subnet:
        return f"in {site.region}, in a subnet of yours"
    return f"in {site.region}, in a zone of EC2's choice"


def _bought(job: Job, site: Site) -> str:
    """`on-demand`, `capacity block cr-0a1b`, `training plan NAME`."""
    block = site.block
    queued = f", through queue {site.queue.name}" if site.queue else ""
    if job.terms.training_plan:
        return f"training plan {job.terms.training_plan.rpartition('/')[2]}{queued}"
    if queued:
        return f"{job.terms.purchase}{queued}"
    return job.terms.purchase if block is None else f"capacity block {block.reservation}"


def travels_text(directory: WorkingDirectory) -> list[str]:
    """Return sentences on which files travel with a script, by which rule, and how to list all."""
    files, largest = directory.files, directory.largest[:_MOST]
    rules = {"git": "what git tracks here", IGNORE_FILE: f"what {IGNORE_FILE} leaves"}
    what = rules.get(directory.rule or "", f"all that is here, as neither git nor a {IGNORE_FILE} says less")
    named = ", ".join(f"{shown(file.path)} ({size_text(file.num_bytes)})" for file in largest)
    only = "largest: " if len(files) > _MOST else ""
    lines = [f"{counted(len(files), 'file')}, {size_text(directory.num_bytes)}: {what}; {only}{named}."]
    if directory.untracked:
        behind = _some([shown(path) for path in directory.untracked], ", ")
        lines.append(f"Not sent, as git does not track it: {behind}.")
    if private := [file.path for file in files if _PRIVATE.fullmatch(PurePath(file.path).name)]:
        lines.append(f"Look: {_some([shown(path) for path in private], ', ')} may hold secrets.")
    return [*lines, "`--dry-run --show files` lists all."]


def _data_text(data: DataFile | None, site: Site) -> list[str]:
    """Return a sentence on the file of data that is uploaded."""
    if data is None:
        return []
    size, uri = size_text(data.num_bytes), site.inputs[LOCAL_DATA]
    return [f"{shown(str(data.path))} ({size}): uploaded to {uri} once, fetched before the clock starts."]


def _needs_text(options: Options, *, num_bytes: int | None = None) -> list[str]:
    """Return sentences on what jobs need besides their code. num_bytes: size of the resolved wheels."""
    lines = []
    if options.requirements:
        names = _some(read_requirements(Path(options.requirements)).names, ", ")
        how = "resolved here into wheels before anything starts, which pip installs there without an index"
        if num_bytes is not None:
            how = f"wheels of {size_text(num_bytes)}, which pip installs there without an index"
        if options.requirements_from_index:
            how = "pip installs it there, from its index"
        lines.append(f"{options.requirements} ({names}): {how}.")
    inputs = given_inputs(options)
    for (name, uri), variable in zip(inputs.items(), input_environment(inputs), strict=True):
        lines.append(f"Input {name}, ${variable}: {uri}, fetched before the clock starts.")
    return lines


def _expected_text(expected: "Expected | str", jobs: Sequence[Job], *, max_minutes: int) -> str:
    """Return `expected: probably $12.30 (11.9 to 12.8) in 2.2 h (...)` and what it assumes, or why not.

    max_minutes: the time limit at which unfinished work is stopped.
    """
    from fastlaunch.report.cost import hours_text
    from fastlaunch.report.text import number

    if isinstance(expected, str):
        return f"expected: not known, {expected}."
    rates = {"spot": ", at the most that spot may cost", "capacity-block": " of the block's fee"}
    rate = rates.get(jobs[0].terms.purchase, "")
    runs = f" for {'all ' if jobs[0].max_rounds else ''}{len(jobs)} runs" if len(jobs) > 1 else ""
    times = _some(
        [
            f"{in_ms(job.step_time_s)} for {job.name}, {job.rate.evidence_text}: {job.rate.source}"
            for job in expected.jobs
        ],
        "; ",
    )
    too_long = ""
    if expected.hours.value * 60 > max_minutes:
        too_long = " That is longer than --max-hours: it would be stopped before its end."
    usd = f"${number(expected.usd.value)}{range_in_brackets(expected.usd, number)}{rate}"
    hours = f"{hours_text(expected.hours.value)}{range_in_brackets(expected.hours, hours_text)}"
    parts = [f"{duration_text(s)} of {WORDS.get(part, part)}" for part, s in expected.assumed_s.items()]
    guess = f" This assumes {', '.join(parts)}, which no range includes." if parts else ""
    if (size := expected.bytes_per_token) and size.low:
        guess += (
            f" Epochs are counted at {size.value:g} bytes of text a token ({size.range_text('{:g}'.format)})."
        )
    return (
        f"expected: probably {usd} in {hours}{runs}, from boot to the end.{guess}{too_long}"
        f" Step times: {times}."
    )


def range_in_brackets(quantity: "Interval", format_value: Callable[[float], str]) -> str:
    text = quantity.range_text(format_value)
    return f" ({text})" if text else ""


def expected_json(expected: "Expected | str") -> dict[str, Any]:
    """Return the expected cost as plain data."""
    from fastlaunch.report.cost import rate_to_json

    if isinstance(expected, str):
        return {"usd": None, "unknown": expected}
    return {
        "usd": vars(expected.usd),
        "hours": vars(expected.hours),
        "assumed_s": dict(expected.assumed_s),
        "bytes_per_token": expected.bytes_per_token and vars(expected.bytes_per_token),
        "jobs": [
            {"job": job.name, "runs": job.num_runs, "step_time_s": job.step_time_s, **rate_to_json(job.rate)}
            for job in expected.jobs
        ],
    }


def _some(names: Sequence[str], separator: str) -> str:
    more = f" and {len(names) - _MOST} more" if len(names) > _MOST else ""
    return separator.join(names[:_MOST]) + more


def request_text(plan: Plan) -> str:
    """Return the whole request as YAML, and the list of runs that its machines fetch."""
    # The payload of a queue's request is sent as JSON, which nobody can read.
    request = {**plan.request, PAYLOAD: plan.payload} if plan.is_queued else plan.request
    lines = [f"{plan.operation} in {plan.region}:", *as_yaml(request)]
    for item in plan.objects:
        if item.text is not None:
            lines += ["", "What its machines do, in the list of runs that they fetch:"]
            lines += as_yaml(json.loads(item.text))
    run_ids = [name for name in plan.placeholders if name.startswith("run-id")]
    unknown = [f"<{name}>" for name in plan.placeholders if name not in run_ids]
    unknown.append("<run-id>" if len(run_ids) == 1 else f"<run-id> to <run-id-{len(run_ids)}>")
    return "\n".join([*lines, "", f"# Known when it is submitted: {', '.join(unknown)}"])


def user_data_text(plan: Plan) -> str:
    """Return the script that the machine runs when it boots. Raises UserError if it has none."""
    if _USER_DATA not in plan.request:
        raise UserError("a training job of SageMaker has no user data", "give --show request")
    return str(plan.request[_USER_DATA])


def as_yaml(value: Mapping[str, Any], indent: str = "  ") -> list[str]:
    """Return lines of YAML, with every object in full and texts of several lines as blocks."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: object) -> bool:
            return True

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
            super().increase_indent(flow, False)

    def represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)

    Dumper.add_representer(str, represent_text)
    text = yaml.dump(value, Dumper=Dumper, sort_keys=False, width=math.inf, allow_unicode=True)
    return [f"{indent}{line}".rstrip() for line in text.removesuffix("\n").split("\n")]

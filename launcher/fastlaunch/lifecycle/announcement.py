"""A submission for AWS in words: before it starts, and as a dry run prints it."""

import re
import shlex
import shutil
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from fastlaunch.backends.site import Site
from fastlaunch.core.ownership import FIRST_LOOK
from fastlaunch.core.terminal import as_warning
from fastlaunch.core.units import by_reason, counted, in_ms, size_text
from fastlaunch.jobs.job import Job
from fastlaunch.jobs.option_rules import given_inputs
from fastlaunch.jobs.options import Options
from fastlaunch.jobs.requirements import read_requirements
from fastlaunch.jobs.working_directory import IGNORE_FILE, WorkingDirectory, shown
from fastlaunch.placement.cost_ceiling import NOT_COUNTED, hours_text
from fastlaunch_train.node.protocol import input_environment

if TYPE_CHECKING:
    from fastlaunch.analysis.cost import Expected
    from fastlaunch.ledger.ledger import Ledger
    from fastlaunch.measure.summary import Interval
    from fastlaunch.placement.resolve import Placement

#: The most entries to show of a long list.
MOST = 4
#: The column of the sentences, beside the names of their topics.
INDENT = 9
#: Longer lines are hard to read.
_WIDEST = 100
#: Names of files that are probably sent by mistake.
_PRIVATE = re.compile(r"\.env(\..*)?|\.netrc|id_(rsa|ed25519|ecdsa)|.*\.(pem|key)|credentials")


def announcement(placement: "Placement", ledger: "Ledger", expected: "Expected | str") -> str:
    """Return what will be done, warnings about it, and finally its cost."""
    from fastlaunch.lifecycle.resume import slow_checkpoint

    options, site = placement.options, placement.sites[0]
    topics = topics_of(placement, expected)
    cost = topics.pop("cost")
    notes = [*placement.changes, *warnings_of(placement)]
    if slow := slow_checkpoint(ledger, placement.jobs_at(), backend=site.backend):
        notes.append(as_warning(slow))
    if options.detach and options.until_resolved:
        notes.append("--until-resolved looks while it follows: with --detach all rounds are run")
    if options.detach and site.backend == "ec2" and options.purchase == "spot":
        notes.append(
            "if EC2 takes its machine, the next `fastlaunch status` starts another, within this ceiling"
        )
    return "\n".join([*layout(topics), *notes, *layout({"cost": cost})])


def topics_of(
    placement: "Placement",
    expected: "Expected | str",
    *,
    old_prices: str | None = None,
    lacks_scheduler: bool = False,
) -> dict[str, list[str]]:
    """Return what a submission does, where, with what, what it costs and what ends it: sentences by topic."""
    options, jobs = placement.options, followed_jobs(placement)
    site, *others = placement.sites
    where = [f"left out: {reason}" for reason in by_reason(placement.skipped)]
    if others:
        where.insert(0, f"without capacity there: {some([other.name for other in others], ', then ')}")
        if len({other.instance.name for other in placement.sites}) > 1:
            where.insert(1, "the next type is tried only where there is no capacity: `sweep` trains on each")
    travels = travels_text(placement.directory) if placement.directory else []
    wheels = placement.wheels
    cost = expected_text(expected, jobs, max_minutes=options.max_minutes)
    ends = [_ends(site, options, lacks_scheduler=lacks_scheduler)]
    if options.detach:
        ends.append("--detach: nobody will follow it.")
    return {
        "plan": [in_words(jobs, site)],
        "where": where,
        "travels": [*travels, *needs_text(options, num_bytes=len(wheels.data) if wheels else None)],
        "cost": [f"{placement.ceiling}.", *([f"{old_prices}."] if old_prices else []), cost, NOT_COUNTED],
        "ends": [*ends, *spot_text(jobs)],
    }


def followed_jobs(placement: "Placement") -> Sequence[Job]:
    """Return the jobs that are run: all rounds where nobody looks in between."""
    jobs = placement.jobs_at()
    return [replace(job, max_rounds=None) for job in jobs] if placement.options.detach else jobs


def layout(topics: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the sentences, wrapped and indented; a topic's name stands before its first."""
    lines = []
    for name, texts in topics.items():
        column = [line for text in texts for line in wrapped(text)]
        lines += [f"{name:<{INDENT}}{column[0].lstrip()}", *column[1:]] if column else []
    return lines


def wrapped(text: str) -> list[str]:
    """Return lines in the column of the sentences."""
    return textwrap.wrap(
        text,
        min(_WIDEST, shutil.get_terminal_size(fallback=(80, 1)).columns),
        initial_indent=" " * INDENT,
        subsequent_indent=" " * INDENT,
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
    return f"with its last run. What hangs is ended by {', '.join(timers)}, and `fastlaunch reap`."


def warnings_of(placement: "Placement") -> list[str]:
    """Return the warnings of the checks; a warning for several places appears once."""
    warnings = dict.fromkeys(
        (check.message, check.hint) for check in placement.checks if check.result == "warning"
    )
    return [as_warning(f"{message}\n  {hint}" if hint else message) for message, hint in warnings]


def in_words(jobs: Sequence[Job], site: Site) -> str:
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
    if job.terms.training_plan:
        return f"training plan {job.terms.training_plan.rpartition('/')[2]}"
    return job.terms.purchase if block is None else f"capacity block {block.reservation}"


def travels_text(directory: WorkingDirectory) -> list[str]:
    """Return sentences on which files travel with a script, by which rule, and how to list all."""
    files, largest = directory.files, directory.largest[:MOST]
    rules = {"git": "what git tracks here", IGNORE_FILE: f"what {IGNORE_FILE} leaves"}
    what = rules.get(directory.rule or "", f"all that is here, as neither git nor a {IGNORE_FILE} says less")
    named = ", ".join(f"{shown(file.path)} ({size_text(file.num_bytes)})" for file in largest)
    only = "largest: " if len(files) > MOST else ""
    lines = [f"{counted(len(files), 'file')}, {size_text(directory.num_bytes)}: {what}; {only}{named}."]
    if directory.untracked:
        behind = some([shown(path) for path in directory.untracked], ", ")
        lines.append(f"Stays behind, as git does not track it: {behind}.")
    if private := [file.path for file in files if _PRIVATE.fullmatch(PurePath(file.path).name)]:
        lines.append(f"Look: {some([shown(path) for path in private], ', ')} may hold secrets.")
    return [*lines, "`--dry-run --show files` lists all."]


def needs_text(options: Options, *, num_bytes: int | None = None) -> list[str]:
    """Return sentences on what jobs need besides their code. num_bytes: size of the resolved wheels."""
    lines = []
    if options.requirements:
        names = some(read_requirements(Path(options.requirements)).names, ", ")
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


def spot_text(jobs: Sequence[Job]) -> list[str]:
    """Return what a script on spot must do to be resumable; empty for other jobs."""
    if jobs[0].script is None or jobs[0].terms.purchase != "spot":
        return []
    return [
        "If AWS takes its machine, another goes on with what the script saved in $FASTLAUNCH_OUTPUT when "
        "fl.checkpoint_due() or fl.stop_requested() said so, and finds there; else it starts anew."
    ]


def expected_text(expected: "Expected | str", jobs: Sequence[Job], *, max_minutes: int) -> str:
    """Return `expected: probably $12.30 (11.9 to 12.8) in 2.2 h (...)`, or why that is unknown.

    max_minutes: the time limit at which unfinished work is stopped.
    """
    from fastlaunch.report.text import dollars, number

    if isinstance(expected, str):
        return f"expected: not known, {expected}."
    rates = {"spot": ", at the most that spot may cost", "capacity-block": " of the block's fee"}
    rate = rates.get(jobs[0].terms.purchase, "")
    runs = f" for {'all ' if jobs[0].max_rounds else ''}{len(jobs)} runs" if len(jobs) > 1 else ""
    times = some(
        [
            f"{in_ms(job.step_time_s)} for {job.name}, {job.rate.evidence_text}: {job.rate.source}"
            for job in expected.jobs
        ],
        "; ",
    )
    too_long = ""
    if expected.hours.value * 60 > max_minutes:
        too_long = " That is longer than --max-hours: it would be stopped before its end."
    usd = f"${dollars(expected.usd.value)}{range_in_brackets(expected.usd, dollars)}{rate}"
    hours = f"{number(expected.hours.value)} h{range_in_brackets(expected.hours, number)}"
    return f"expected: probably {usd} in {hours}{runs}, from boot to the end.{too_long} Step times: {times}."


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
        "jobs": [
            {
                "job": job.name,
                "runs": job.num_runs,
                "step_time_s": job.step_time_s,
                **rate_to_json(job.rate),
            }
            for job in expected.jobs
        ],
    }


def some(names: Sequence[str], separator: str) -> str:
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return separator.join(names[:MOST]) + more

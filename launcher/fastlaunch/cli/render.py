"""What commands print: tables, JSON and CSV of any rows; runs with an answer; what `reap` did."""

import csv
import io
import json
import re
import shutil
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

import click

from fastlaunch.cli.options import next_command
from fastlaunch.core.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_JOB_FAILED
from fastlaunch.core.log_file import LOG, telling_lines
from fastlaunch.core.plan import RunState
from fastlaunch.jobs.spec import JobSpec, names_apart
from fastlaunch.measure.summary import Interval, RunSummary

if TYPE_CHECKING:
    from fastlaunch.ledger.ledger import Run
    from fastlaunch.runs.reap import Kind, Orphan, Refusal

#: By kind: what one is called, and what is said of one that was ended.
KIND_WORDS: Mapping["Kind", tuple[str, str]] = {
    "instance": ("instance", "terminated"),
    "job": ("training job", "stopped"),
    "pool": ("warm pool", "ended"),
    "schedule": ("schedule", "deleted"),
}
_KIND_TO_DO: Mapping["Kind", str] = {
    "instance": "to terminate",
    "job": "to stop",
    "pool": "to end",
    "schedule": "to delete",
}
_MACHINE_HEADERS = {"run": "run", "type": "type", "zone": "zone", "hours": "hours", "cost": "cost"}

_NUM_LOG_LINES = 20
_FAILED = (RunState.FAILED, RunState.LOST)

RUN_HEADERS: Mapping[str, str] = {
    "run": "run",
    "recipe": "recipe",
    "state": "state",
    "step_time": "step time",
    "samples_per_s": "samples/s",
    "note": "",
}

_GAP = "  "
_MIN_WIDTH = 100
#: What a column of words is not made narrower than.
_LEAST_WORDS = 30
#: A number, with a unit or without.
_NUMBER = re.compile(r"-?[0-9][0-9.,]*(e[+-]?[0-9]+)?( ?[a-zA-Z%]{1,3})?")


def print_rows(
    rows: Sequence[Mapping[str, Any]], *, output: str, headers: Mapping[str, str] | None = None
) -> None:
    """Print rows of equal keys on stdout. output: `table`, `json` (a list of objects) or `csv`.

    headers: key -> heading; the table has only these columns, JSON and CSV have every key. None is an empty
    cell, and null in JSON.
    """
    if output == "json":
        click.echo(json.dumps(rows, indent=2, default=str))
    elif output == "csv":
        click.echo(_csv(rows), nl=False)
    else:
        click.echo(table(rows, headers or {key: key for key in (rows[0] if rows else {})}))


def fitted(
    rows: Sequence[Mapping[str, Any]],
    headers: Mapping[str, str],
    shrinkable: Sequence[str] = ("recipe", "workload", "instance"),
) -> list[dict[str, Any]]:
    """Return the rows with the widest `shrinkable` columns cut (…) until the table fits.

    It may be as wide as the terminal, and 100 characters elsewhere.
    """
    allowed = max(_MIN_WIDTH, shutil.get_terminal_size(fallback=(_MIN_WIDTH, 1)).columns)
    widths = _widths(rows, headers)
    while sum(widths.values()) + len(_GAP) * (len(headers) - 1) > allowed:
        # The heading is not cut.
        keys = [key for key in shrinkable if widths.get(key, 0) > len(headers.get(key, ""))]
        if not keys:
            break
        widths[max(keys, key=lambda key: widths[key])] -= 1
    return [
        {**row, **{key: _cut(row[key], widths[key]) for key in shrinkable if key in widths}} for row in rows
    ]


def table(
    rows: Sequence[Mapping[str, Any]], headers: Mapping[str, str], *, terminal: int | None = None
) -> str:
    """Return a plain table with a row per line; columns of numbers are right-aligned.

    If it is wider than the terminal, the last column's words wrap. terminal: its width, 0 without one; looked
    up if None.
    """
    widths = _widths(rows, headers)
    right = {key: _is_numeric([row[key] for row in rows]) for key in headers}
    lines = [dict(headers), *({key: _text(row[key]) for key in headers} for row in rows)]
    *_, last = headers
    if terminal is None:
        terminal = shutil.get_terminal_size(fallback=(0, 1)).columns
    before = sum(widths[key] + len(_GAP) for key in headers if key != last)
    if before + _LEAST_WORDS <= terminal < before + widths[last] and not right[last]:
        widths[last] = terminal - before
    return "\n".join(
        _GAP.join(
            cell.rjust(widths[key]) if right[key] else cell.ljust(widths[key]) for key, cell in line.items()
        ).rstrip()
        for whole in lines
        for line in _wrapped(whole, last, widths[last])
    )


def _wrapped(line: Mapping[str, str], last: str, width: int) -> Iterator[dict[str, str]]:
    """Yield the line, and below it others for what the cell `last` has no room for."""
    first, others = line[last], list[str]()
    if len(first) > width:
        first, *others = textwrap.wrap(first, width, break_on_hyphens=False)
    yield {**line, last: first}
    yield from ({**dict.fromkeys(line, ""), last: other} for other in others)


def _widths(rows: Sequence[Mapping[str, Any]], headers: Mapping[str, str]) -> dict[str, int]:
    return {
        key: max(len(heading), *(len(_text(row[key])) for row in rows), 0) for key, heading in headers.items()
    }


def _is_numeric(values: Sequence[object]) -> bool:
    known = [_text(value) for value in values if value is not None]
    return bool(known) and all(_NUMBER.fullmatch(text) for text in known)


def _cut(value: str | None, width: int) -> str | None:
    return value if value is None or len(value) <= width else f"{value[: width - 1]}…"


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return "" if value is None else str(value)


def _csv(rows: Sequence[Mapping[str, Any]]) -> str:
    text = io.StringIO()
    if rows:
        writer = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return text.getvalue()


def run_row(run: "Run", *, note: str | None = None) -> dict[str, Any]:
    """A run as a run_row under RUN_HEADERS. note: what to say of it; by default why it is as it is."""
    summary = run.summary
    step_time = summary.timing.step_time_s if summary else None
    return {
        "run": run.id,
        "recipe": run.recipe,
        "state": str(run.state),
        "step_time": duration(step_time.value) if step_time else None,
        "samples_per_s": _rounded(_rate(summary)) if summary and step_time else None,
        "note": note or run.reason or (_shortcoming(summary) if summary else None),
    }


def run_json(run: "Run") -> dict[str, Any]:
    """Return a run as plain data for programs."""
    return {
        "id": run.id,
        "submission": run.submission_id,
        "state": str(run.state),
        "reason": run.reason,
        "workload": run.workload,
        "recipe": run.recipe,
        "directory": str(run.directory) if run.directory else None,
        "summary": run.summary.to_json() if run.summary else None,
    }


def runs_sentence(runs: Sequence["Run"]) -> str:
    """Return what the runs say in a sentence: the step time of a recipe, or which recipe is the fastest.

    The fastest is a recipe whose slowest run beats the others' fastest; `compare` judges by more than that.
    Runs of another workload, batch size or number of ranks get a line of their own.
    """
    alike: dict[tuple[str, int, int], dict[str, list[RunSummary]]] = {}
    num_measured = 0
    for run in runs:
        # A run that was stopped half-way was measured up to there.
        stood = run.state in (RunState.COMPLETED, RunState.INTERRUPTED)
        if stood and run.summary and run.summary.timing.step_time_s and not _shortcoming(run.summary):
            what = (
                run.summary.setup.workload,
                run.summary.setup.batch_size_per_gpu,
                run.summary.setup.num_gpus,
            )
            alike.setdefault(what, {}).setdefault(run.recipe, []).append(run.summary)
            num_measured += 1
    if not alike:
        return f"No step time: {_why_not(runs)}."
    missing = len(runs) - num_measured
    note = f"; {missing} of {len(runs)} runs gave no step time" if missing else ""
    *others, last = (_fastest(measured) for measured in alike.values())
    return "\n".join([*(f"{sentence}." for sentence in others), f"{last}{note}."])


def _fastest(measured: Mapping[str, Sequence[RunSummary]]) -> str:
    """Return the sentence, without its full stop, on runs by recipe that are alike in all else."""
    ranked = sorted(measured.items(), key=lambda item: _over_runs(item[1]).value)
    (recipe, summaries), *slower = ranked
    first, setup = summaries[0], summaries[0].setup
    times = _over_runs(summaries)
    interval = f" ({_between(times.low, times.high)})" if times.low and times.high else ""
    apart = all(_is_below(times, _over_runs(of)) for _, of in slower)
    leads = f"{recipe} is the fastest" if slower and apart else recipe
    num_runs = f" over {len(summaries)} runs" if len(summaries) > 1 else ""
    rest = "".join(f", {name} {duration(_over_runs(of).value)}" for name, of in slower)
    return (
        f"{leads} on {setup.workload}, batch {setup.batch_size_per_gpu}: {duration(times.value)} per step"
        f"{interval}, {_rounded(_rate(first, times.value))} {setup.sample_unit}/s{num_runs}"
        + (f";{rest[1:]} per step" if rest else "")
        + (_why_not_apart([_over_runs(of) for of in measured.values()]) if rest and not apart else "")
    )


def duration(seconds: float) -> str:
    """Format three digits with a unit: `12.3 ms`, `1.25 s`."""
    milliseconds = seconds * 1000
    return f"{_rounded(milliseconds)} ms" if milliseconds < 999.5 else f"{_rounded(seconds)} s"


def _over_runs(summaries: Sequence[RunSummary]) -> Interval:
    """Return the geometric mean of the runs' step times, as `compare` does, with the smallest and largest.

    For a single run, return its own interval.
    """
    times = [summary.timing.step_time_s for summary in summaries if summary.timing.step_time_s]
    if len(times) == 1:
        return times[0]
    values = [time.value for time in times]
    return Interval(value=geometric_mean(values), low=min(values), high=max(values))


def _is_below(lower: Interval, upper: Interval) -> bool:
    return lower.high is not None and upper.low is not None and lower.high < upper.low


def _why_not_apart(times: Sequence[Interval]) -> str:
    if any(time.low is None or time.high is None for time in times):
        return ", from too few steps to tell how far apart"
    return ", too close to tell apart"


def _shortcoming(summary: RunSummary) -> str | None:
    """Return why the run's step time must not be used; None if it may."""
    if summary.problems:
        return summary.problems[0]
    return "its step time did not settle" if summary.timing.steady is False else None


def _between(low: float, high: float) -> str:
    (low_text, low_unit), (high_text, high_unit) = duration(low).split(), duration(high).split()
    return f"{low_text} to {high_text}" if low_unit == high_unit else f"{duration(low)} to {duration(high)}"


def _rate(summary: RunSummary, step_time_s: float | None = None) -> float:
    """Return samples per second of all ranks, at the run's own step time unless another is given."""
    assert summary.timing.step_time_s is not None
    per_step = summary.timing.samples_per_step or summary.setup.batch_size_per_gpu * summary.setup.num_gpus
    return per_step / (step_time_s or summary.timing.step_time_s.value)


def _why_not(runs: Sequence["Run"]) -> str:
    for run in runs:
        if run.reason:
            return run.reason
    for run in runs:
        if run.summary and (shortcoming := _shortcoming(run.summary)):
            return shortcoming
    return "no run has ended" if runs else "there are no runs"


def _rounded(value: float) -> str:
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


def print_runs(runs: "Sequence[Run]", *, output: str) -> None:
    """Rows and runs_sentence on stdout; the end of a failed run's log and the next command on stderr."""
    if output == "json":
        click.echo(
            json.dumps({"submission": runs[0].submission_id, "runs": [run_json(r) for r in runs]}, indent=2)
        )
    else:
        rows = [{**run_row(run), "recipe": name} for run, name in zip(runs, _names(runs), strict=True)]
        click.echo(f"{table(rows, RUN_HEADERS)}\n\n{runs_sentence(runs)}")
    failed = next((run for run in runs if run.state in _FAILED and run.directory), None)
    if failed is not None and failed.directory is not None:
        lines = telling_lines(failed.directory, num_lines=_NUM_LOG_LINES)
        click.echo("\n".join([f"the end of {failed.directory / LOG}:", *lines]), err=True)
    next_command(_next(runs, failed))


def _names(runs: "Sequence[Run]") -> list[str]:
    """Return the runs' recipes, with what sets apart the runs that share one."""
    specs = [JobSpec.from_json(run.spec) for run in runs if run.spec]
    return names_apart(specs) if len(specs) == len(runs) else [run.recipe for run in runs]


def _next(runs: "Sequence[Run]", failed: "Run | None") -> str:
    for run in runs:
        if not run.state.is_final:
            return f"fastlaunch logs -f {run.id}"
    if any(run.summary and run.summary.timing.step_time_s for run in runs):
        return "fastlaunch compare"
    shown = failed or runs[0]
    has_log = shown.directory is not None and (shown.directory / LOG).is_file()
    return f"fastlaunch logs {shown.id}" if has_log else f"fastlaunch runs show {shown.id}"


def exit_code_of(runs: "Sequence[Run]", *, stopped: bool) -> int:
    """Return done if every run completed or goes on by itself, interrupted if the user stopped it."""
    if stopped:
        return EXIT_INTERRUPTED
    good = all(run.state is RunState.COMPLETED or not run.state.is_final for run in runs)
    return EXIT_DONE if good else EXIT_JOB_FAILED


@dataclass(frozen=True, kw_only=True)
class ReapReport:
    """What `fastlaunch reap` found and did."""

    #: Where it looked.
    regions: Sequence[str]
    orphans: Sequence["Orphan"]
    refused: Sequence["Refusal"]
    #: Runs that turned out to have ended.
    ended_runs: Sequence[Mapping[str, str | None]]
    #: USD per hour of one machine, by its id.
    prices: Mapping[str, float]
    dry_run: bool

    def rows(self, kind: "Kind") -> list[dict[str, Any]]:
        """Return a row for each orphan of a kind, oldest first."""
        refusals = {refusal.id: str(refusal.error) for refusal in self.refused if refusal.kind == kind}
        return [self._row(each, refusals.get(each.id)) for each in self.orphans if each.kind == kind]

    def _row(self, orphan: "Orphan", refusal: str | None) -> dict[str, Any]:
        done = "left"
        if orphan.must_go:
            done = _KIND_TO_DO[orphan.kind] if self.dry_run else KIND_WORDS[orphan.kind][1]
        if refusal:
            done = "refused"
        row: dict[str, Any] = {orphan.kind: orphan.id}
        if orphan.kind == "schedule":
            row |= {"region": orphan.region, "created_at": orphan.began_at.isoformat()}
        else:
            rate = self.prices.get(orphan.id)
            cost_usd = round(orphan.hours * orphan.num_machines * rate, 2) if rate is not None else None
            row |= {
                "run": orphan.run_id,
                "region": orphan.region,
                "type": orphan.instance_type,
                "num_machines": orphan.num_machines,
                "zone": orphan.zone,
                "is_spot": orphan.is_spot,
                "state": orphan.state,
                "launched_at": orphan.began_at.isoformat(),
                "ends_at": orphan.ends_at.isoformat() if orphan.ends_at else None,
                "hours": round(orphan.hours, 3),
                "cost_usd": cost_usd,
            }
        return {**row, "done": done, "why": refusal or orphan.why, "warning": orphan.warning}

    def unlisted(self, kind: "Kind") -> list[str]:
        """Return the regions in which AWS refused to list a kind."""
        return [each.region for each in self.refused if each.kind == kind and each.id is None]


def print_reap_json(report: ReapReport) -> None:
    """Print the report as one JSON object."""
    unlisted = [
        {"region": refusal.region, "what": f"{KIND_WORDS[refusal.kind][0]}s", "reason": str(refusal.error)}
        for refusal in report.refused
        if refusal.id is None
    ]
    data = {
        "dry_run": report.dry_run,
        "regions": list(report.regions),
        **{f"{kind}s": report.rows(kind) for kind in KIND_WORDS},
        "refused_regions": unlisted,
        "ended_runs": list(report.ended_runs),
    }
    click.echo(json.dumps(data, indent=2))


def print_reap(report: ReapReport) -> None:
    """Print a table and a sentence for each kind that was found."""
    for kind, (word, _) in KIND_WORDS.items():
        if rows := report.rows(kind):
            columns = {"region": "region"} if kind == "schedule" else _MACHINE_HEADERS
            headers = {kind: word, **columns, "done": "", "why": "why"}
            click.echo(table([_reap_cells(row) for row in rows], headers) + "\n")
    for refusal in report.refused:
        subject = refusal.id or f"{KIND_WORDS[refusal.kind][0]}s"
        click.echo(f"error: {subject} in {refusal.region}: {refusal.error.message}", err=True)
        if refusal.error.hint:
            click.echo(f"  {refusal.error.hint}", err=True)
    for run in report.ended_runs:
        click.echo(f"run {run['run']} is {run['state']}" + (f": {run['reason']}" if run["reason"] else ""))
    # Kinds other than instances are mentioned only where there are any, or may be.
    kinds = {"instance", *(each.kind for each in report.orphans), *(each.kind for each in report.refused)}
    for kind in KIND_WORDS:
        if kind in kinds:
            click.echo(_reap_sentence(report, kind))
    next_command("fastlaunch status")


def _reap_cells(row: Mapping[str, Any]) -> dict[str, Any]:
    cells = {**row, "why": f"{row['why']} ({row['warning']})" if row["warning"] else row["why"]}
    if "cost_usd" in row:
        count = f"{row['num_machines']} x " if row["num_machines"] > 1 else ""
        cells |= {
            "type": f"{count}{row['type'] or 'n/a'}",
            "zone": row["zone"] or row["region"],
            "hours": f"{row['hours']:.1f}",
            "cost": f"${row['cost_usd']:,.2f}" if row["cost_usd"] is not None else "n/a",
        }
    return cells


def _reap_sentence(report: ReapReport, kind: "Kind") -> str:
    word, ended = KIND_WORDS[kind]
    rows, unlisted = report.rows(kind), report.unlisted(kind)
    regions = [region for region in report.regions if region not in unlisted]
    where = f"{len(regions)} regions" if len(regions) > 3 else ", ".join(regions)
    article = "an" if word[0] in "aeiou" else "a"
    if not regions:
        return f"No region could be looked at: whether {article} {word} of fastlaunch lives is not known."
    if not rows:
        return f"No {word} of fastlaunch lives in {where}."
    counts = Counter(row["done"] for row in rows)
    parts = [
        f"{counts[done]} {done}" for done in (ended, _KIND_TO_DO[kind], "refused", "left") if counts[done]
    ]
    sentence = f"{len(rows)} {word}{'s' if len(rows) > 1 else ''} in {where}: {', '.join(parts)}"
    if kind == "schedule":
        return f"{sentence}."
    costs = [row["cost_usd"] for row in rows if row["done"] in (ended, _KIND_TO_DO[kind])]
    known = sum(cost or 0 for cost in costs)
    sentence += f"; what went cost about ${known:,.2f}" if known else ""
    num_unknown = costs.count(None)
    return f"{sentence} (of {num_unknown} the price is not known)." if num_unknown else f"{sentence}."

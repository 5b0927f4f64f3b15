"""What `fastlaunch reap` did, as tables or JSON: instances, jobs, pools and schedules, each by itself."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import click

from fastlaunch.cli.listing import table
from fastlaunch.cli.options import next_command
from fastlaunch.runs.reap import Finding, Kind, Refusal

#: By kind: what one is called, and what is said of one that was ended.
WORDS: Mapping[Kind, tuple[str, str]] = {
    "instance": ("instance", "terminated"),
    "job": ("training job", "stopped"),
    "pool": ("warm pool", "ended"),
    "schedule": ("schedule", "deleted"),
}
_TO_DO: Mapping[Kind, str] = {
    "instance": "to terminate",
    "job": "to stop",
    "pool": "to end",
    "schedule": "to delete",
}
_MACHINES = {"run": "run", "type": "type", "zone": "zone", "hours": "hours", "cost": "cost"}
_REST = {"done": "", "why": "why"}


@dataclass(frozen=True, kw_only=True)
class Report:
    """regions: that were looked at. prices: USD per hour of one machine, by id. healed: runs that ended."""

    regions: Sequence[str]
    findings: Sequence[Finding]
    refused: Sequence[Refusal]
    healed: Sequence[Mapping[str, str | None]]
    prices: Mapping[str, float]
    dry_run: bool

    def rows(self, kind: Kind) -> list[dict[str, Any]]:
        """What was found of a kind, one row each, the oldest first."""
        kept = {one.id: str(one.error) for one in self.refused if one.kind == kind and one.id}
        return [self._row(one, kept.get(one.id)) for one in self.findings if one.kind == kind]

    def _row(self, one: Finding, refusal: str | None) -> dict[str, Any]:
        done = "left"
        if one.must_go:
            done = _TO_DO[one.kind] if self.dry_run else WORDS[one.kind][1]
        if refusal:
            done = "refused"
        row: dict[str, Any] = {one.kind: one.id, "run": one.run_id, "region": one.region}
        if one.kind == "schedule":
            row = {one.kind: one.id, "region": one.region, "created_at": one.began_at.isoformat()}
        else:
            rate = self.prices.get(one.id)
            cost_usd = round(one.hours * one.num_machines * rate, 2) if rate is not None else None
            row |= {
                "type": one.instance_type,
                "num_machines": one.num_machines,
                "zone": one.zone,
                "is_spot": one.is_spot,
                "state": one.state,
                "launched_at": one.began_at.isoformat(),
                "ends_at": one.ends_at.isoformat() if one.ends_at else None,
                "hours": round(one.hours, 3),
                "cost_usd": cost_usd,
            }
        return {**row, "done": done, "why": refusal or one.why, "warning": one.warning}


def tell_json(report: Report) -> None:
    """Print the report as one JSON object."""
    closed = [
        {"region": one.region, "what": f"{WORDS[one.kind][0]}s", "reason": str(one.error)}
        for one in report.refused
        if one.id is None
    ]
    told = {
        "dry_run": report.dry_run,
        "regions": list(report.regions),
        "instances": report.rows("instance"),
        "jobs": report.rows("job"),
        "pools": report.rows("pool"),
        "schedules": report.rows("schedule"),
        "refused_regions": closed,
        "ended_runs": list(report.healed),
    }
    click.echo(json.dumps(told, indent=2))


def tell(report: Report) -> None:
    """Print the report as a table for each kind that was found, and a sentence for each."""
    for kind, (word, _) in WORDS.items():
        if rows := report.rows(kind):
            machines = {} if kind == "schedule" else _MACHINES
            columns = {kind: word, **machines, **({"region": "region"} if not machines else {}), **_REST}
            click.echo(table([_shown(row) for row in rows], columns) + "\n")
    for one in report.refused:
        where = f"{one.id} in {one.region}" if one.id else f"{WORDS[one.kind][0]}s in {one.region}"
        click.echo(f"error: {where}: {one.error.message}", err=True)
        if one.error.hint:
            click.echo(f"  {one.error.hint}", err=True)
    for run in report.healed:
        click.echo(f"run {run['run']} is {run['state']}" + (f": {run['reason']}" if run["reason"] else ""))
    for kind in WORDS:
        # Of all but instances something is said only where there are any, or may be.
        kinds = {"instance", *(one.kind for one in report.findings), *(one.kind for one in report.refused)}
        if kind in kinds:
            click.echo(_sentence(report, kind))
    next_command("fastlaunch status")


def _shown(row: Mapping[str, Any]) -> dict[str, Any]:
    shown = {**row, "why": f"{row['why']} ({row['warning']})" if row["warning"] else row["why"]}
    if "cost_usd" in row:
        many = f"{row['num_machines']} x " if row["num_machines"] > 1 else ""
        shown |= {
            "type": f"{many}{row['type'] or 'n/a'}",
            "zone": row["zone"] or row["region"],
            "hours": f"{row['hours']:.1f}",
            "cost": f"${row['cost_usd']:,.2f}" if row["cost_usd"] is not None else "n/a",
        }
    return shown


def _sentence(report: Report, kind: Kind) -> str:
    word, ended = WORDS[kind]
    rows = report.rows(kind)
    closed = {one.region for one in report.refused if one.kind == kind and one.id is None}
    where = [region for region in report.regions if region not in closed]
    places = f"{len(where)} regions" if len(where) > 3 else ", ".join(where)
    article = "an" if word[0] in "aeiou" else "a"
    if not where:
        return f"No region could be looked at: whether {article} {word} of fastlaunch lives is not known."
    if not rows:
        return f"No {word} of fastlaunch lives in {places}."
    parts = [
        f"{sum(row['done'] == done for row in rows)} {done}"
        for done in (ended, _TO_DO[kind], "refused", "left")
        if any(row["done"] == done for row in rows)
    ]
    told = f"{len(rows)} {word}{'s' if len(rows) > 1 else ''} in {places}: {', '.join(parts)}"
    if kind == "schedule":
        return f"{told}."
    going = [row for row in rows if row["done"] in (ended, _TO_DO[kind])]
    cost = sum(row["cost_usd"] or 0 for row in going)
    unknown = sum(row["cost_usd"] is None for row in going)
    told += f"; what went cost about ${cost:,.2f}" if cost else ""
    return f"{told} (of {unknown} the price is not known)." if unknown else f"{told}."

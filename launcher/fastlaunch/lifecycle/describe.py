"""A run for people and programs: as a row, as a sentence, and in full."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from fastlaunch.backends import s3_sync
from fastlaunch.backends.protocol import CLOUD_BACKENDS, CloudBackend
from fastlaunch.catalog.prices import max_cost_usd
from fastlaunch.core.data import to_data
from fastlaunch.core.plan import RunState
from fastlaunch.core.terminal import printable
from fastlaunch.core.units import in_ms, rounded
from fastlaunch.ledger.attempt_cost import attempt_cost, cost_text
from fastlaunch.ledger.ledger import IMPORT, Ledger, Run
from fastlaunch.ledger.rows import Attempt
from fastlaunch.lifecycle.collect import last_word, missing_of, occupancy
from fastlaunch.measure.summary import StepProfile, Timing
from fastlaunch_train.records.records import STEP_PARTS, Check, Eval

_INDENT = "  "
#: Fields of an attempt that its nodes report.
_OF_NODES = ("lifecycle", "booted_at", "outcome", "boot_s", "pull_s", "phases")


def run_to_dict(run: Run) -> dict[str, Any]:
    """Return the run as a flat row, with which every machine-readable output of runs begins.

    `step_time_s` is None where nothing was measured that counts, `final_loss` where no loss was recorded.
    """
    summary = run.summary
    return {
        "id": run.id,
        "created_at": run.created_at,
        "submission": run.submission_id,
        "backend": run.backend,
        "owner": run.owner,
        "account": run.account,
        "workload": run.workload,
        "recipe": run.recipe,
        "instance": run.instance,
        "state": str(run.state),
        "ending": run.ending,
        "reason": run.reason,
        "step_time_s": summary.step_time_s if summary else None,
        "final_loss": summary.quality.final_loss if summary else None,
        "directory": str(run.directory) if run.directory else None,
        "model": str(folder) if (folder := model_folder(run)) else None,
    }


def model_folder(run: Run) -> Path | None:
    """Return where the model lies that the run trained; None if it left none, or it is not here."""
    if run.directory is None or run.backend == IMPORT or run.state is not RunState.COMPLETED:
        return None
    # An attempt that was lost at its end may have left a part; the last one left the whole.
    folders = [folder for folder in run.directory.glob("model*") if folder.is_dir()]
    return max(folders, key=lambda folder: folder.stat().st_mtime, default=None)


def measured_to_dict(run: Run) -> dict[str, Any]:
    """Return the run with its whole summary."""
    return {**run_to_dict(run), "summary": to_data(run.summary) if run.summary else None}


def attempt_to_dict(run: Run, attempt: Attempt, *, home: Path, now: datetime) -> dict[str, Any]:
    """Return an attempt as plain data, with its nodes' reports and its cost.

    `cost_usd` is for all machines and all runs, `sunk_usd` was paid before for their block; `billed_seconds`,
    `own_seconds` and `shared_seconds` are those of one machine.
    """
    kept = s3_sync.kept(home, attempt.token, attempt.num_nodes)
    node = {**(kept.boot or {}), **(last_word(attempt, home) or {})}
    shared = occupancy(run, attempt, home)
    cost = attempt_cost(attempt, now) if attempt.backend in CLOUD_BACKENDS else None
    handle = attempt.handle or {}
    return {
        **attempt.to_json(),
        **{name: node.get(name) for name in _OF_NODES},
        "instance_id": handle.get("instance_id"),
        "instance_ids": handle.get("instance_ids") or list(filter(None, [handle.get("instance_id")])),
        "job_name": handle.get("job_name"),
        "look": None if attempt.ended_at else "unknown" if attempt.absences else "seen",
        "cost_usd": cost and cost.usd,
        "sunk_usd": cost and cost.sunk_usd,
        "cost": cost and cost_text(cost, run.spec),
        "own_seconds": shared.own_s,
        "shared_seconds": shared.shared_s,
    }


def all_to_dict(ledger: Ledger, run: Run, *, home: Path, now: datetime) -> dict[str, Any]:
    """Return everything that the ledger knows of the run as plain data. run: read in full."""
    attempts = ledger.attempts_of(run.id)
    return {
        **measured_to_dict(run),
        "command": ledger.command_of(run.submission_id),
        "history": [
            {"at": event.at, "state": str(event.state), "reason": event.reason}
            for event in ledger.history(run.id)
        ],
        "attempts": [attempt_to_dict(run, attempt, home=home, now=now) for attempt in attempts],
        "missing": missing_of(run, attempts, home) if run.backend in CLOUD_BACKENDS else [],
        "price": run.price.to_json() if run.price else None,
        "spec": run.spec,
        "plan": run.plan,
    }


def measured(run: Run) -> str | None:
    """Return the run's measurements in a sentence; None without any that count."""
    summary = run.summary
    if summary is None or not summary.is_measured:
        return None
    step, total_s = summary.timing.step_time_s, summary.figures.total_time_s
    if step is None:
        # A script without steps.
        return None if total_s is None or summary.setup.kind != "records" else f"{rounded(total_s)} s in all"
    limits = step.range_text(in_ms)
    if limits is None:
        facts = [f"{in_ms(step.value)} per step, without an interval"]
    else:
        within = f"{limits} within the run"
        steps = f"{summary.timing.num_retained_steps} of {summary.num_steps} steps"
        facts = [f"{in_ms(step.value)} per step ({within}, {steps})"]
    if summary.all_reduce:
        facts.append(str(summary.all_reduce))
    if summary.padding_fraction:
        facts.append(f"{summary.padding_fraction:.1%} of the tokens are padding")
    if summary.kernels:
        facts.append(f"a forward pass ran {summary.kernels}")
    if summary.quality.evals:
        facts.append(f"at the end {_scored(summary.quality.evals[-1])}")
    if failed := [check.name for check in summary.quality.checks if not check.passed]:
        facts.append(f"it does NOT pass the check of {', '.join(failed)}")
    return "; ".join(facts)


def _scored(line: Eval) -> str:
    """`accuracy 0.913 and loss 0.241 on validation data, best weights`."""
    scores = [] if line.metric_value is None else [f"{line.metric} {line.metric_value:.4g}"]
    if line.has_loss is not False:
        scores.append("loss not finite" if line.loss is None else f"loss {line.loss:.4g}")
    return f"{' and '.join(scores) or 'no score'} on {line.split} data, {line.weights} weights"


def _evaluated(line: Eval) -> str:
    return f"step {line.step}  {_scored(line)}  ({line.num_samples} samples in {line.seconds:.1f} s)"


def _checked(check: Check) -> str:
    value = "" if check.value is None else f" {check.value:.3g}"
    limit = "" if check.limit is None else f", at most {check.limit:.3g}"
    detail = f" ({check.detail})" if check.detail else ""
    return f"{'passed' if check.passed else 'FAILED'}  {check.name}{value}{limit}{detail}"


def _profiled(profile: StepProfile | None, timing: Timing) -> Iterator[str]:
    """Yield a table of the parts of a step's time, and how much slower the profiled step was."""
    if profile is None:
        return
    for name in STEP_PARTS:
        seconds = profile.parts_s.get(name)
        if seconds is not None:
            yield f"{name:<20} {in_ms(seconds):>10} {seconds / profile.step_time_s:>7.1%}"
    if hidden_s := profile.overlapped_communication_s:
        yield f"{'hidden communication':<20} {in_ms(hidden_s):>10}  beside the computation above"
    usual = timing.step_time_s
    ratio = f"{profile.step_time_s / usual.value:.3g} times" if usual else ""
    slower = f", {ratio} the run's {in_ms(usual.value)}" if usual else ""
    yield f"{'step with profiler':<20} {in_ms(profile.step_time_s):>10}{slower}; of {profile.num_steps} steps"


def for_people(run: Run, data: Mapping[str, Any]) -> dict[str, Any]:
    """Return `all_to_dict` with evaluations, checks and profile in words, each figure once."""
    summary = run.summary
    data = {name: value for name, value in data.items() if name not in ("step_time_s", "final_loss")}
    if summary is None:
        return data
    shown = dict(data["summary"])
    if summary.profile:
        shown["profile"] = list(_profiled(summary.profile, summary.timing))
    if quality := shown.get("quality"):
        words = {
            "evals": list(map(_evaluated, summary.quality.evals)),
            "checks": list(map(_checked, summary.quality.checks)),
        }
        shown["quality"] = quality | words
    return {**data, "summary": shown}


def as_lines(data: Mapping[str, Any], depth: int = 0) -> Iterator[str]:
    """Yield `data` as indented `name  value` lines for people, without empty values."""
    shown = {name: value for name, value in data.items() if value is not None and value not in ({}, [])}
    width = max((len(name) for name, value in shown.items() if not _is_nested(value)), default=0)
    for name, value in shown.items():
        if isinstance(value, Mapping):
            yield f"{_INDENT * depth}{name}"
            yield from as_lines(value, depth + 1)
        elif name == "argv":
            yield f"{_INDENT * depth}{name}"
            yield f"{_INDENT * (depth + 1)}{printable(shlex.join(value))}"
        elif _is_nested(value):
            yield f"{_INDENT * depth}{name}"
            for number, item in enumerate(value, start=1):
                if isinstance(item, Mapping) and any(map(_is_nested, item.values())):
                    yield f"{_INDENT * (depth + 1)}{number}"
                    yield from as_lines(item, depth + 2)
                else:
                    yield f"{_INDENT * (depth + 1)}{_on_one_line(item)}"
        else:
            is_count = isinstance(value, int) and name.startswith(("num_", "flops_"))
            text = f"{value:,}" if is_count else _plain(value)
            yield f"{_INDENT * depth}{name:<{width}}  {text}"


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,.6g}" if isinstance(value, float) else printable(str(value))


def _is_nested(value: object) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, Sequence) and not isinstance(value, str))


def _on_one_line(item: object) -> str:
    if not isinstance(item, Mapping):
        return ", ".join(map(_plain, item)) if isinstance(item, list | tuple) else _plain(item)
    return "  ".join(
        _plain(value) if name in ("at", "state", "reason") else f"{name} {_plain(value)}"
        for name, value in item.items()
        if value is not None
    )


def machines_of(attempt: Attempt) -> str:
    """`p5.48xlarge`, `2 x p5.48xlarge`."""
    return f"{attempt.num_nodes} x {attempt.instance}" if attempt.num_nodes > 1 else str(attempt.instance)


def machine_of(attempt: Attempt, backend: CloudBackend) -> str:
    """`instance i-0ab in us-east-1`, `training job 20261121-... in us-east-1`."""
    assert attempt.handle is not None
    return backend.resource_name(attempt.handle)


def ends_by_itself(attempt: Attempt, backend: CloudBackend) -> str:
    """Return a clause on what ends the machines, and when, if nobody stops them."""
    if backend.boot_limit is None:
        return f"{backend.service} ends it {attempt.max_minutes} min after it began to train"
    machines = "it turns itself" if attempt.num_nodes == 1 else "they turn themselves"
    return f"{machines} off within {attempt.max_minutes} min"


def how_to_stop(attempt: Attempt, backend: CloudBackend) -> str:
    """Return what protects the user's money without a launcher, and how to stop the machines."""
    return (
        f"{ends_by_itself(attempt, backend)}; to stop it: fastlaunch cancel {attempt.run_ids[0]}   "
        f"(or: fastlaunch reap --region {attempt.region})"
    )


def once_more(backend: CloudBackend) -> str:
    """Return what a second signal does to machines that are stopping."""
    if backend.boot_limit is None:
        return f"once more leaves that to {backend.service}, which ends it within minutes"
    return "once more ends it at once, saving nothing"


def ceiling_usd(attempts: Sequence[Attempt]) -> float | None:
    """Return the most that the attempts can cost together in USD; None if a price or limit is unknown.

    An attempt under way counts with the ceiling of its plan.
    """
    total = 0.0
    for attempt in attempts:
        if attempt.ended_at is not None:
            if not attempt.billing.billed_s:
                continue
            if attempt.billing.usd_per_hour is None:
                return None
            total += attempt.num_nodes * attempt.billing.billed_s / 3600 * attempt.billing.usd_per_hour
        elif attempt.max_cost_usd is not None:
            total += attempt.max_cost_usd
        elif attempt.billing.usd_per_hour is None or attempt.max_minutes is None:
            return None
        else:
            total += max_cost_usd(
                num_nodes=attempt.num_nodes,
                max_minutes=attempt.max_minutes,
                usd_per_hour=attempt.billing.usd_per_hour,
            )
    return total

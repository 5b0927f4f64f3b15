"""A run for people and programs: as a row of a listing, and with everything that is known of it."""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fastlaunch.ledger.ledger import Ledger, Run
from fastlaunch_train.records.records import Check, Eval

_INDENT = "  "


def run_as_row(run: Run) -> dict[str, Any]:
    """The run as one flat row. step_time_s: its mean, None if it was not measured."""
    summary = run.summary
    return {
        "id": run.id,
        "created_at": run.created_at,
        "submission": run.submission_id,
        "backend": run.backend,
        "workload": run.workload,
        "recipe": run.recipe,
        "instance": run.instance,
        "state": str(run.state),
        "reason": run.reason,
        "step_time_s": summary.step_time_s.value if summary and summary.step_time_s else None,
        "final_loss": summary.final_loss if summary else None,
        "directory": str(run.directory) if run.directory else None,
    }


def run_as_json(ledger: Ledger, run: Run) -> dict[str, Any]:
    """Everything that the ledger knows of the run, as plain data. `run` is not a brief one."""
    return {
        "id": run.id,
        "submission": run.submission_id,
        "command": ledger.command_of(run.submission_id),
        "created_at": run.created_at,
        "backend": run.backend,
        "state": str(run.state),
        "reason": run.reason,
        "workload": run.workload,
        "recipe": run.recipe,
        "instance": run.instance,
        "directory": str(run.directory) if run.directory else None,
        "history": [
            {"at": event.at, "state": str(event.state), "reason": event.reason}
            for event in ledger.history(run.id)
        ],
        "attempts": [
            {**vars(attempt), "state": str(attempt.state), "run_ids": list(attempt.run_ids)}
            for attempt in ledger.attempts_of(run.id)
        ],
        "price": run.price.to_json() if run.price else None,
        "spec": run.spec,
        "plan": run.plan,
        "summary": run.summary.to_json() if run.summary else None,
    }


def measured(run: Run) -> str | None:
    """What the run measured, in a sentence; None if that is nothing."""
    summary = run.summary
    if summary is None or summary.step_time_s is None:
        return None
    step = summary.step_time_s
    further = [summary.all_reduce.told] if summary.all_reduce else []
    if summary.padding_fraction:
        further.append(f"{summary.padding_fraction:.1%} of the tokens are padding")
    further += [f"a forward pass ran {summary.kernels}"] if summary.kernels else []
    further += [f"at the end {_scored(summary.evals[-1])}"] if summary.evals else []
    failed = [check.name for check in summary.checks if not check.passed]
    further += [f"it does NOT pass the check of {', '.join(failed)}"] if failed else []
    if step.low is None or step.high is None:
        return "; ".join([f"{step.value:.4g} s per step, without an interval", *further])
    within = f"{step.low:.4g} to {step.high:.4g} within the run"
    steps = f"{summary.num_retained_steps} of {summary.num_steps} steps"
    return "; ".join([f"{step.value:.4g} s per step ({within}, {steps})", *further])


def _scored(line: Eval) -> str:
    """`accuracy 0.913 and loss 0.241 on validation data, best weights`."""
    loss = "loss not finite" if line.loss is None else f"loss {line.loss:.4g}"
    metric = "" if line.metric_value is None else f"{line.metric} {line.metric_value:.4g} and "
    return f"{metric}{loss} on {line.split} data, {line.weights} weights"


def _evaluated(line: Eval) -> str:
    return f"step {line.step}  {_scored(line)}  ({line.num_samples} samples in {line.seconds:.1f} s)"


def _checked(check: Check) -> str:
    found = "" if check.value is None else f" {check.value:.3g}"
    limit = "" if check.limit is None else f", at most {check.limit:.3g}"
    detail = f" ({check.detail})" if check.detail else ""
    return f"{'passed' if check.passed else 'FAILED'}  {check.name}{found}{limit}{detail}"


def for_people(run: Run, data: Mapping[str, Any]) -> dict[str, Any]:
    """`run_as_json`, with evaluations and checks in words."""
    summary = run.summary
    if summary is None:
        return dict(data)
    words = {"evals": list(map(_evaluated, summary.evals)), "checks": list(map(_checked, summary.checks))}
    return {**data, "summary": {**data["summary"], **{name: text for name, text in words.items() if text}}}


def as_lines(data: Mapping[str, Any], depth: int = 0) -> Iterator[str]:
    """`data` as indented `name  value` lines, as people read it; what is None or empty is left out."""
    shown = {name: value for name, value in data.items() if value is not None and value not in ({}, [])}
    width = max((len(name) for name, value in shown.items() if not _is_nested(value)), default=0)
    for name, value in shown.items():
        if isinstance(value, Mapping):
            yield f"{_INDENT * depth}{name}"
            yield from as_lines(value, depth + 1)
        elif name == "argv":
            yield f"{_INDENT * depth}{name}"
            yield f"{_INDENT * (depth + 1)}{shlex.join(value)}"
        elif _is_nested(value):
            yield f"{_INDENT * depth}{name}"
            for item in value:
                text = _on_one_line(item) if isinstance(item, Mapping) else str(item)
                yield f"{_INDENT * (depth + 1)}{text}"
        else:
            yield f"{_INDENT * depth}{name:<{width}}  {_plain(value)}"


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _is_nested(value: object) -> bool:
    return isinstance(value, Mapping) or (isinstance(value, Sequence) and not isinstance(value, str))


def _on_one_line(item: Mapping[str, Any]) -> str:
    return "  ".join(
        str(value) if name in ("at", "state") else f"{name}={value}"
        for name, value in item.items()
        if value is not None
    )

"""What starting a machine took: its boot, and fetching code and image, by the nodes' last word."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlaunch.backends import s3_sync
from fastlaunch.backends.node_report import merged

if TYPE_CHECKING:
    from fastlaunch.measure.summarize import RunSummary
    from fastlaunch.run_attempts import Attempt


def with_start(summary: "RunSummary", attempts: "Sequence[Attempt]", home: Path) -> "RunSummary":
    """`summary` with boot_s and pull_s of the newest of the run's attempts whose nodes told them.

    All of it, also where several runs shared the machine: a job that has one to itself waits as long.
    """
    for attempt in reversed(attempts):
        kept = s3_sync.kept(home, attempt.token, attempt.num_nodes)
        status = kept.status or merged(kept.statuses, attempt.num_nodes, partial=True) or {}
        boot_s, pulled_s = _seconds(status, "boot_s"), _seconds(status, "pull_s")
        if boot_s is None:
            continue
        # Both count from the machine's start, and the script that fetches begins at boot_s.
        took_s = pulled_s - boot_s if pulled_s is not None and pulled_s >= boot_s else None
        return replace(summary, boot_s=boot_s, pull_s=took_s)
    return summary


def _seconds(status: Mapping[str, Any], name: str) -> float | None:
    value = status.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if math.isfinite(value) and value >= 0 else None

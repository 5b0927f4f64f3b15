"""What is known of spot: by a trace of capacity, or by one's own runs.

Never by Spot Advisor: its share of instances that were interrupted in a month says nothing of the hours that
they ran, and a bucket such as `>20%` has no upper end.
"""

import io
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from fastlaunch.api.context import AppContext, default_context
from fastlaunch.core.ending import Ending
from fastlaunch.core.paths import read_text

if TYPE_CHECKING:
    from fastlaunch.analysis.spot import SpotMarket
    from fastlaunch.ledger.rows import Attempt

#: A job that gets its machines in another zone meanwhile has them at once.
_AT_ONCE = timedelta(minutes=5)


def spot_market(
    instance: str,
    *,
    region: str | None = None,
    trace: Path | str | None = None,
    context: AppContext | None = None,
) -> "SpotMarket":
    """Return how often spot of this type is lost and can be had, on EC2.

    region: of one's own runs, the user's by default. trace: a CSV file, as `read_trace` reads it; one's own
    runs in the ledger without it. Raises UserError if there is none, and BadFile for a file that is no trace.
    """
    from fastlaunch.analysis.spot import read_trace
    from fastlaunch.ledger.ledger import open_ledger

    context = context or default_context()
    if trace is not None:
        return read_trace(io.StringIO(read_text(Path(trace)), newline=""), source=str(trace))
    where = region or context.own_region()
    with open_ledger(context.settings, clock=context.now) as ledger:
        return _of_attempts(ledger.spot_attempts(instance, where), f"your runs on {instance} in {where}")


def _of_attempts(attempts: Sequence["Attempt"], source: str) -> "SpotMarket":
    """Return what attempts say, the oldest first."""
    from fastlaunch.analysis.spot import HOUR_S, market_of_runs

    asked: dict[str, Attempt] = {}  # by run, the attempt with which its job first asked for machines
    at_once: set[int] = set()
    for attempt in attempts:
        lacks = attempt.ending is Ending.NO_CAPACITY
        if not attempt.handle and not lacks:
            continue
        first = next((asked[run_id] for run_id in attempt.run_ids if run_id in asked), attempt)
        asked |= dict.fromkeys(attempt.run_ids, first)
        waited = datetime.fromisoformat(attempt.started_at) - datetime.fromisoformat(first.started_at)
        if not lacks and waited <= _AT_ONCE:
            at_once.add(first.id)
    return market_of_runs(
        instance_hours=sum((each.billing.lived_s or 0.0) * each.num_nodes for each in attempts) / HOUR_S,
        num_losses=sum(each.ending is Ending.RECLAIMED for each in attempts),
        num_asked=len({first.id for first in asked.values()}),
        num_granted=len(at_once),
        source=source,
    )

"""What is known of spot: by a trace of capacity, or by one's own runs.

Never by Spot Advisor: its share of instances that were interrupted in a month says nothing of the hours that
they ran, and a bucket such as `>20%` has no upper end.
"""

import io
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from fastlaunch.api.context import AppContext
from fastlaunch.core.ending import Ending
from fastlaunch.core.errors import UserError
from fastlaunch.core.home import LEDGER_NAME
from fastlaunch.core.paths import read_text

if TYPE_CHECKING:
    from fastlaunch.analysis.cost import Assumptions
    from fastlaunch.analysis.spot import SpotMarket
    from fastlaunch.ledger.rows import Attempt

#: A job that gets its machines in another zone meanwhile has them at once.
_AT_ONCE = timedelta(minutes=5)


def spot_market(
    instance: str,
    region: str,
    assumptions: "Assumptions",
    *,
    trace: Path | str | None = None,
    context: AppContext,
) -> "SpotMarket | None":
    """Return how often spot of this type is lost and can be had; None without a ledger that could say.

    It is as a trace (a CSV file, see `read_trace`) says, or as assumed, or as seen by one's own runs in the
    region. Raises UserError if both of the first say it or the ledger's runs do not, and BadFile for a file
    that is no trace.
    """
    from fastlaunch.analysis.cost import HOW_TO_GIVE_LOSSES
    from fastlaunch.analysis.spot import market_of_rates, read_trace
    from fastlaunch.ledger.ledger import open_ledger

    given = assumptions.given & {"spot_losses_per_hour", "spot_available"}
    if trace is not None and given:
        raise UserError(
            f"--spot-trace and --assume {min(given)} both say how spot is had", "give one of them"
        )
    if trace is not None:
        return read_trace(io.StringIO(read_text(Path(trace)), newline=""), source=str(trace))
    if (losses := assumptions.spot_losses_per_hour) is not None:
        return market_of_rates(losses, assumptions.spot_available, source="--assume")
    if not (context.settings.home / LEDGER_NAME).exists():
        return None
    with open_ledger(context.settings, clock=context.now) as ledger:
        attempts = ledger.spot_attempts(instance, region)
    try:
        return _of_attempts(attempts, f"your runs on {instance} in {region}")
    except UserError as error:
        raise UserError(error.message, HOW_TO_GIVE_LOSSES) from None


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

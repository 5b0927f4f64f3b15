"""What SageMaker's warm pools cost after their jobs: it tells for how long one was kept when it is gone."""

from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from fastlaunch.aws import Aws
from fastlaunch.aws_training_jobs import training_job

if TYPE_CHECKING:
    from fastlaunch.run_attempts import Attempt
    from fastlaunch.runs import Ledger

#: Until its end shows.
_MARGIN = timedelta(minutes=5)


def note_pools(ledger: "Ledger", aws: Aws, attempts: "Iterable[Attempt]", now: datetime) -> None:
    """Add to what attempts were billed for how long their warm pools were kept, where that is known by now.

    Of a pool that may still be there, or of which SageMaker says nothing, the most that it can cost is told
    (`attempt_cost`). Asks nothing where no pool is left to be told. Raises CloudRefused's kinds.
    """
    for attempt in attempts:
        if not attempt.idle_minutes or attempt.ended_at is None or attempt.region is None:
            continue
        kept_until = datetime.fromisoformat(attempt.ended_at) + timedelta(minutes=attempt.idle_minutes)
        if now < kept_until + _MARGIN:
            continue
        job = training_job(aws, attempt.region, attempt.token)
        if job is not None and job.pool_billable_s is not None:
            ledger.add_pool(attempt.id, job.pool_billable_s)

"""What SageMaker's warm pools cost after their jobs: it tells for how long one was kept when it is gone."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fastlaunch.aws.ec2 import Aws
from fastlaunch.aws.sagemaker import training_job

if TYPE_CHECKING:
    from fastlaunch.ledger.ledger import Ledger
    from fastlaunch.run_attempts import Attempt


def note_pools(ledger: "Ledger", aws: Aws, attempts: "Iterable[Attempt]") -> None:
    """Add to what attempts were billed for how long their warm pools were kept, where that is known by now.

    Of a pool that is still there, or of which SageMaker says nothing, the most that it can cost is told
    (`attempt_cost`). Asks nothing where no pool is left to be told. Raises CloudRefused's kinds.
    """
    for attempt in attempts:
        # A job that got no machines kept none.
        if not attempt.idle_minutes or not attempt.billed_seconds or attempt.ended_at is None:
            continue
        assert attempt.region is not None
        job = training_job(aws, attempt.region, attempt.token)
        if job is not None and not job.keeps_pool and job.pool_billable_s is not None:
            ledger.add_pool(attempt.id, job.pool_billable_s)

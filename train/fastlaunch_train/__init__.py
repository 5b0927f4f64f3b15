"""The training half of fastlaunch: it runs on the machine that trains, and knows nothing of AWS.

Exports what a workload of your own needs: `Workload`, `DataRequest`, `Score`, `BatchCount`, `Batch`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastlaunch_train.workloads.contract import Batch as Batch
    from fastlaunch_train.workloads.contract import BatchCount as BatchCount
    from fastlaunch_train.workloads.contract import DataRequest as DataRequest
    from fastlaunch_train.workloads.contract import Score as Score
    from fastlaunch_train.workloads.contract import Workload as Workload

__version__ = "0.1.0"
__all__ = ["Batch", "BatchCount", "DataRequest", "Score", "Workload"]


def __getattr__(name: str) -> Any:
    # The contract imports torch, which the launcher does without.
    if name in __all__:
        from fastlaunch_train.workloads import contract

        return getattr(contract, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

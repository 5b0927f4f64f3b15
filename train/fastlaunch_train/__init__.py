"""The training half of fastlaunch: it runs on the machine that trains, and knows nothing of AWS.

It exports what a user's workload needs: `Workload`, `DataRequest`, `Score`, `BatchCount`, `Batch`; and what
a user's script calls: `steps` or `step`, `evaluate`, `checkpoint_due`, `stop_requested`, and the
callbacks `transformers_callback` and `lightning_callback`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastlaunch_train.script.callbacks import lightning_callback as lightning_callback
    from fastlaunch_train.script.callbacks import transformers_callback as transformers_callback
    from fastlaunch_train.script.steps import checkpoint_due as checkpoint_due
    from fastlaunch_train.script.steps import evaluate as evaluate
    from fastlaunch_train.script.steps import step as step
    from fastlaunch_train.script.steps import steps as steps
    from fastlaunch_train.script.steps import stop_requested as stop_requested
    from fastlaunch_train.workloads.contract import Batch as Batch
    from fastlaunch_train.workloads.contract import BatchCount as BatchCount
    from fastlaunch_train.workloads.contract import DataRequest as DataRequest
    from fastlaunch_train.workloads.contract import Score as Score
    from fastlaunch_train.workloads.contract import Workload as Workload

__version__ = "0.1.0"
#: Modules to import late, since the contract imports torch, which the launcher and some scripts do not need.
_MODULES = {
    "workloads.contract": ("Batch", "BatchCount", "DataRequest", "Score", "Workload"),
    "script.callbacks": ("lightning_callback", "transformers_callback"),
    "script.steps": ("checkpoint_due", "evaluate", "step", "steps", "stop_requested"),
}
__all__ = [name for names in _MODULES.values() for name in names]


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            value = getattr(importlib.import_module(f"{__name__}.{module}"), name)
            globals()[name] = value  # the next look-up costs nothing
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

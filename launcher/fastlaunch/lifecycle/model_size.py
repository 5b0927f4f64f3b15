"""The size of a model that no table knows: counted once by the training package, then kept in the home.

Models with shipped measurements have shipped sizes, so that a prediction from them is the same everywhere.
"""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

from fastlaunch.analysis.memory import FINE_TUNING, ModelSize
from fastlaunch.core.activity import activity
from fastlaunch.core.data import read
from fastlaunch.core.errors import UserError
from fastlaunch.core.home import replace_file
from fastlaunch.core.paths import shipped, training_package
from fastlaunch.lifecycle.world import World, pythonpath_of
from fastlaunch_train.workloads.registry import WorkloadError, workload_info

_FILE, _SHIPPED = "model-sizes.json", "model_sizes.json"
#: Importing torch and a library of models takes about 10 s, and asking a hub that does not answer longer.
_LIMIT_S = 120


def model_size(context: World, workload: str, *, counts: bool) -> ModelSize | None:
    """Return the size of a model that timm or Transformers builds; None for other workloads.

    The user's own code does not run for an estimate. counts: count it if it is not known, which takes
    seconds. Raises UserError if it cannot be counted: without torch or the library, or for an unknown model.
    """
    try:
        info = workload_info(workload)
    except WorkloadError:
        return None
    if info.num_parameters is not None or not workload.startswith(("timm:", "hf-clm:", *FINE_TUNING)):
        return None
    shipped_path = shipped("measurements") / _SHIPPED
    if size := _read(shipped_path).get(workload):
        return read(ModelSize, size, f"{shipped_path}: {workload}")
    path = context.settings.home / _FILE
    known = _read(path)
    if workload not in known:
        if not counts:
            return None
        with activity(f"counting the parameters of {workload}"):
            known[workload] = counted_size(workload)
        # If it cannot be kept, it is counted again next time.
        with contextlib.suppress(OSError):
            replace_file(path, json.dumps(known, indent=1).encode())
    return read(ModelSize, known[workload], f"{path}: {workload}")


def counted_size(workload: str) -> object:
    """Return the size as the training package counts it. Raises UserError if it cannot."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    if pythonpath := pythonpath_of(training_package().parent, os.environ):
        environment["PYTHONPATH"] = pythonpath
    argv = [sys.executable, "-m", "fastlaunch_train.workloads.size", workload]
    try:
        done = subprocess.run(
            argv, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"the size of {workload} is unknown: {error}") from None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UserError(f"the size of {workload} is unknown: {why}")
    return json.loads(done.stdout.splitlines()[-1])


def _read(path: Path) -> dict[str, object]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}

"""Print the size of a model, counted without weights: python -m fastlaunch_train.workloads.size WORKLOAD"""

import json
import sys

from fastlaunch_train.models.flops import build_on_meta
from fastlaunch_train.workloads.contract import load_workload
from fastlaunch_train.workloads.registry import WorkloadError


def main(name: str) -> int:
    """Print the parameters, FLOPs and tokens of a sample as JSON; FLOPs and tokens are null if unknown."""
    try:
        workload = load_workload(name)
    except WorkloadError as error:
        sys.stderr.write(f"{error.message}{f'; {error.hint}' if error.hint else ''}\n")
        return 2
    model = build_on_meta(workload.build_model)
    size = {
        "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
        "flops_per_sample": workload.flops_per_sample,
        "tokens_per_sample": workload.tokens_per_sample or None,
    }
    sys.stdout.write(f"{json.dumps(size)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""What one rank on the CPU asks of a workload's data."""

import torch

from fastlaunch_train.workloads.contract import DataRequest

CPU = torch.device("cpu")


def request(source: str = "synthetic", **changes: int) -> DataRequest:
    """Batches of four from `source` for the only rank, from the first step on; `changes` are of numbers."""
    values = {"batch_size": 4, "seed": 0, "rank": 0, "world_size": 1, "num_workers": 0, "first_step": 1}
    return DataRequest(source=source, device=CPU, **(values | changes))

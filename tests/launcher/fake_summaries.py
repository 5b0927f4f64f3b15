"""A summary of a run that was never made, for tests to change."""

from fastlaunch.metrics import Interval, RunSummary

PLAIN = RunSummary(
    kind="records",
    workload="vit-huge",
    sample_unit="images",
    flops_per_sample=763_504_000_000,
    recipe="bf16",
    precision="bf16",
    data="synthetic",
    batch_size_per_gpu=64,
    num_nodes=1,
    num_gpus=1,
    seed=0,
    status="completed",
    instance=None,
    device_name="NVIDIA H200",
    host_id="host-a",
    measured_on="2026-11-01",
    source=None,
    steady=True,
    step_time_s=Interval(value=0.1, low=0.0999, high=0.1001),
    num_steps=200,
    num_retained_steps=190,
    samples_per_step=64.0,
    fingerprint={"device_name": "NVIDIA H200", "torch": "2.13.0"},
)

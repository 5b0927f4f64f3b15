"""Every way to train on one GPU and on two: losses and weights of plain fp64 torch, also after a resume.

On two, gradients and shards travel through NCCL.
"""

import dataclasses
import gc
import importlib.util
from pathlib import Path

import pytest
import torch
import toy
from running_here import runnable

from fastlaunch_train.checks.clocks import check_clocks_under_load
from fastlaunch_train.distributed import fsdp
from fastlaunch_train.distributed.parallel import Process, stop_process
from fastlaunch_train.loop import batch_size as batch_size_search
from fastlaunch_train.loop.batch_size import auto_batch_size
from fastlaunch_train.loop.train import train_step
from fastlaunch_train.models.conversion import convert_model
from fastlaunch_train.models.precision import setup_precision
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.steppers.stepping import build_native, build_stepper
from fastlaunch_train.workloads.contract import load_workload

pytestmark = pytest.mark.filterwarnings("ignore")

DEVICE = torch.device("cuda", 0)
ALONE = Process(rank=0, local_rank=0, world_size=1, num_nodes=1, device=DEVICE)
STEPS = 6
#: Against plain fp64 on the CPU, of losses and weights; None where the optimizer is another.
TORCH_ARMS: dict[str, float | None] = {
    "fp32": 1e-5,
    "fp32,grad_accumulation=2": 1e-5,
    "fp32,activation_checkpointing=block": 1e-5,
    "fp32,deterministic=true,set_to_none=false": 1e-5,
    "fp32,wire_dtype=bf16": 5e-3,
    "fp16": 2e-3,
    "bf16": 1e-2,
    "bf16,parameter_dtype=bf16": 5e-2,
    "bf16,parameter_dtype=bf16-master": 2e-2,
    "bf16,optimizer=adamw,optimizer_impl=fused,learning_rate=0.01": None,
    "fp32,optimizer=adafactor,learning_rate=0.01": None,
    "fp16,optimizer_impl=fused,pretraining": 2e-3,
    "fsdp2,precision=fp32": 1e-5,
    "fsdp2,precision=fp16,pretraining": 2e-3,
    "fsdp2,precision=fp32,grad_accumulation=4,activation_checkpointing=block": 1e-5,
    "fsdp2,precision=fp16": 2e-3,
    "fsdp2": 1e-2,
    "fsdp2,wire_dtype=bf16": 1e-2,
    "fsdp2,parameter_dtype=bf16-master,optimizer_impl=foreach": 2e-2,
    "fsdp2,optimizer=adamw,optimizer_impl=fused,learning_rate=0.01": None,
    "fsdp2,optimizer=adafactor,learning_rate=0.01": None,
}
COMPILED_ARMS: dict[str, float | None] = {
    "compile,precision=fp32": 1e-5,
    "compile-model,precision=fp32": 1e-5,
    "compile,precision=fp32,compile_scope=wrapped": 1e-5,
    "compile,grad_accumulation=2,activation_checkpointing=block": 1e-2,
    "compile-reduce-overhead,grad_accumulation=2": 1e-2,
    "compile-reduce-overhead,pretraining": 1e-2,
    "fsdp2,precision=fp32,compile_mode=default": 1e-5,
    "fsdp2,compile_mode=default,compile_scope=wrapped": 1e-2,
}
DEEPSPEED_ARMS: dict[str, float | None] = {
    "zero1,precision=fp32": 1e-5,
    "zero2,precision=fp32,grad_accumulation=2": 1e-5,
    "zero1": 1e-2,
    "zero2,wire_dtype=bf16": 1e-2,
    "zero1,parameter_dtype=bf16-master": 2e-2,
    "zero2,parameter_dtype=bf16-master,optimizer=adamw,optimizer_impl=fused,learning_rate=0.01": None,
    # Its first scale, 2 ** 16, is too large for none of the toy's gradients.
    "zero2,precision=fp16": 2e-2,
    "zero2,precision=fp16,pretraining": 2e-2,
}


def world(num_gpus: int) -> int:
    if torch.cuda.device_count() < num_gpus:
        pytest.skip(f"needs {num_gpus} GPUs")
    return num_gpus


def hold(tmp_path: Path, arms: dict[str, float | None], num_gpus: int) -> None:
    """Train each arm, and again with a stop after half of the steps."""
    found = toy.run_ranks(tmp_path / "whole", list(arms), steps=STEPS, world_size=num_gpus, gpus=True)
    apart = {
        arm: toy.distance(found[arm], *toy.reference(steps=STEPS, workload=toy.workload_of(arm)))
        for arm, tolerance in arms.items()
        if tolerance is not None
    }
    assert not {arm: distance for arm, distance in apart.items() if not distance < (arms[arm] or 0)}
    for arm in arms:
        kept, changed, back = found[arm]["scores"]
        assert kept == pytest.approx(back, rel=1e-6), arm
        assert kept != pytest.approx(changed, rel=1e-6), arm
    resumed = toy.run_ranks(
        tmp_path / "resumed", list(arms), steps=STEPS, resume_after=3, world_size=num_gpus, gpus=True
    )
    # Not to the bit: NCCL and atomic additions may add in another order.
    for arm in arms:
        assert toy.distance(resumed[arm], found[arm]["losses"], found[arm]["weights"]) < 1e-5, arm


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_torch(tmp_path: Path, num_gpus: int) -> None:
    hold(tmp_path, TORCH_ARMS, world(num_gpus))


@pytest.mark.parametrize("num_gpus", [1, 2])
def test_compiled(tmp_path: Path, num_gpus: int) -> None:
    hold(tmp_path, COMPILED_ARMS, world(num_gpus))


@pytest.mark.parametrize("num_gpus", [1, 2])
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
def test_deepspeed(tmp_path: Path, num_gpus: int) -> None:
    hold(tmp_path, DEEPSPEED_ARMS, world(num_gpus))


@pytest.mark.parametrize("label", ["fp32 optimizer=adamw", "fsdp2 precision=fp32 optimizer=adamw"])
def test_a_checkpoint_holds_the_moment_of_its_save_while_steps_go_on(tmp_path: Path, label: str) -> None:
    stepper, batches = toy.build(toy.recipe_of(label), ALONE)
    train_step(stepper, next(batches))
    before = stepper.weights()
    saving = toy.checkpointing(tmp_path, stepper, process=ALONE)
    saving.save(1)
    for _ in range(20):
        train_step(stepper, next(batches))
    saving.finish()
    again, _ = toy.build(toy.recipe_of(label), ALONE, seed=99)
    assert toy.checkpointing(tmp_path, again, process=ALONE).resume(last_step=1) == 1
    after = again.weights()
    assert all(torch.equal(fsdp.local_shard(after[name]), fsdp.local_shard(before[name])) for name in before)
    stop_process()


def losses_and_peak(recipe_name: str, overrides: list[str], *, batch_size: int) -> tuple[list[float], int]:
    """Losses of five steps of vit-tiny, and the memory that they added at most, in bytes."""
    recipe = runnable(" ".join([recipe_name, *overrides]))
    workload = load_workload("vit-tiny")
    gc.collect()
    before = torch.cuda.memory_allocated(DEVICE)
    model = build_native(workload, 0, ALONE)
    convert_model(model, workload, recipe)
    stepper = build_stepper(workload, recipe, setup_precision(recipe, DEVICE), ALONE, model)
    request = dataclasses.replace(toy.request(ALONE), batch_size=batch_size)
    batches = workload.batches(request)
    losses = [float(train_step(stepper, next(batches)))]
    torch.cuda.reset_peak_memory_stats(DEVICE)
    losses += [float(train_step(stepper, next(batches))) for _ in range(4)]
    return losses, torch.cuda.max_memory_allocated(DEVICE) - before


@pytest.mark.parametrize(
    ("recipe", "tolerance"), [("fp32", 1e-5), ("bf16", 1e-3), ("te-bf16", 1e-3), ("te-fp8", 1e-2)]
)
def test_blocks_computed_again_train_alike_in_less_memory(recipe: str, tolerance: float) -> None:
    plain, plain_bytes = losses_and_peak(recipe, [], batch_size=256)
    again, again_bytes = losses_and_peak(recipe, ["activation_checkpointing=block"], batch_size=256)
    assert again == pytest.approx(plain, rel=tolerance)
    assert again_bytes < 0.8 * plain_bytes


@pytest.mark.parametrize(
    ("recipe", "overrides"), [("fsdp2", []), ("bf16", ["grad_accumulation=4"]), ("fp16", [])]
)
def test_the_largest_batch_is_found_and_fits(
    recipe: str, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = resolve_recipe(recipe, overrides)
    # 3 GiB of the GPU's memory, so that the search ends soon, and leaves the rest to others.
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    monkeypatch.setattr(batch_size_search, "MEMORY_SHARE", 3 * 2**30 / total)
    found = auto_batch_size(load_workload("vit-tiny"), [chosen], ALONE, seed=0, default=8)
    assert 64 <= found < batch_size_search.MAX_BATCH_SIZE
    assert found % (8 * chosen.grad_accumulation) == 0


def test_the_load_before_the_steps_tells_of_the_clocks_and_leaves_nothing_behind() -> None:
    # The first product takes cuBLAS's workspace, which stays, and which training takes as well.
    ones = torch.ones(8192, 8192, device=DEVICE).half()
    torch.mm(ones, ones)
    del ones
    allocated, reserved = torch.cuda.memory_allocated(DEVICE), torch.cuda.memory_reserved(DEVICE)
    assert "=" in check_clocks_under_load(ALONE)
    assert torch.cuda.memory_allocated(DEVICE) <= allocated
    # A handle of cuBLAS keeps its workspace.
    assert torch.cuda.memory_reserved(DEVICE) <= reserved + 2**26

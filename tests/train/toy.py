"""A workload of a few hundred weights, and what a stepper makes of it, in one process or several."""

import dataclasses
import math
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastlaunch_train.distributed import fsdp
from fastlaunch_train.distributed.parallel import (
    Process,
    barrier,
    broadcast_object,
    start_process,
    stop_process,
)
from fastlaunch_train.loop.checkpoint import Checkpointing, Identity
from fastlaunch_train.loop.evaluation import Evaluations
from fastlaunch_train.loop.train import train_step
from fastlaunch_train.loop.training import PhaseClock
from fastlaunch_train.models.precision import setup_precision
from fastlaunch_train.recipes.recipe import Recipe
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.steppers.stepper import Stepper
from fastlaunch_train.steppers.stepping import build_stepper
from fastlaunch_train.workloads.contract import Batch, DataRequest, Workload

TRAIN = Path(__file__).resolve().parents[2] / "train"
CPU = torch.device("cpu")
ALONE = Process(rank=0, local_rank=0, world_size=1, num_nodes=1, device=CPU)
WIDTH = 16
CLASSES = 5


class Lines(list[Any]):
    """A record that is not written."""

    add = list.append

    def flush(self) -> None:
        pass


def recipe_of(label: str) -> Recipe:
    """The recipe of `NAME FIELD=VALUE ...`."""
    name, *overrides = label.split()
    return resolve_recipe(name, overrides)


class Block(nn.Module):
    """A residual block with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return y


class Toy(nn.Module):
    """Three blocks between two linear layers. Two ranks cannot share one weight evenly, for its length, and
    one not at all: its first dimension is 1, as that of a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, WIDTH)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) + self.token[0]
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.head(x)
        return y


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean cross entropy."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def batches(request: DataRequest) -> Iterator[Batch]:
    """The rank's share of endless batches on the device."""
    step = request.first_step
    while True:
        inputs, labels = global_batch(step, request.batch_size * request.world_size)
        mine = slice(request.rank * request.batch_size, (request.rank + 1) * request.batch_size)
        yield inputs[mine].to(request.device), labels[mine].to(request.device)
        step += 1


def global_batch(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of all ranks' samples of a step."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(size, 6, generator=generator)
    return inputs, torch.randint(CLASSES, (size,), generator=generator)


TOY = Workload(
    name="toy",
    sample_unit="samples",
    build_model=Toy,
    batches=batches,
    loss=loss,
    blocks=lambda model: model.blocks,  # type: ignore[arg-type, return-value]
    learning_rate=0.1,
)


def workload() -> Workload:
    """The toy as the entrypoint asks for it."""
    return TOY


#: What a step of pretraining has, all of it active in a few steps.
PRETRAINING = dataclasses.replace(
    TOY, weight_decay=0.5, max_grad_norm=0.3, lr_schedule="cosine", warmup_steps=2
)
BATCH_SIZE = 8


def build(
    recipe: Recipe, process: Process, seed: int = 0, workload: Workload = TOY
) -> tuple[Stepper, Iterator[Batch]]:
    """A stepper of `recipe` on a new model, and this rank's batches from the first step."""
    torch.manual_seed(seed)
    model = workload.build_model().to(process.device).train()
    stepper = build_stepper(workload, recipe, setup_precision(recipe, process.device), process, model)
    return stepper, workload.batches(request(process))


def request(process: Process, first_step: int = 1) -> DataRequest:
    return DataRequest(
        source="synthetic",
        batch_size=BATCH_SIZE // process.world_size,
        seed=0,
        rank=process.rank,
        world_size=process.world_size,
        device=process.device,
        num_workers=0,
        first_step=first_step,
    )


def with_optimizer(name: str, rate: float) -> Workload:
    return dataclasses.replace(TOY, optimizer=name, learning_rate=rate)


def reference(
    *, steps: int, dtype: torch.dtype = torch.float64, workload: Workload = TOY
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights by plain torch on the global batch, without anything of a recipe.

    Clipping, decay and the cosine are written out.
    """
    torch.manual_seed(0)
    model = workload.build_model().to(dtype)
    rate = workload.learning_rate
    optimizer: torch.optim.Optimizer
    weights = list(model.parameters())
    if workload.optimizer == "sgd":
        optimizer = torch.optim.SGD(weights, lr=rate, momentum=workload.momentum)
    else:
        optimizer = torch.optim.AdamW(weights, lr=rate)
    losses = []
    for step in range(1, steps + 1):
        inputs, labels = global_batch(step, BATCH_SIZE)
        optimizer.zero_grad()
        value = loss(model, (inputs.to(dtype), labels))
        value.backward()  # type: ignore[no-untyped-call]
        grads = [weight.grad for weight in weights if weight.grad is not None]
        if workload.max_grad_norm is not None:
            norm = float(torch.cat([grad.flatten() for grad in grads]).norm())
            for grad in grads:
                grad.mul_(min(1.0, workload.max_grad_norm / norm))
        if workload.weight_decay is not None:
            for weight, grad in zip(weights, grads, strict=True):
                grad.add_(workload.weight_decay * weight.detach() * (weight.dim() >= 2))
        if workload.lr_schedule == "cosine":
            warmup = workload.warmup_steps
            share = (step - 1 - warmup) / (steps - warmup)
            whole = rate * step / (warmup + 1)
            falling = rate * (1 + math.cos(math.pi * share)) / 2
            optimizer.param_groups[0]["lr"] = whole if step <= warmup else falling
        optimizer.step()
        losses.append(float(value.detach()))
    return losses, {name: weight.detach().float() for name, weight in model.named_parameters()}


def train(
    recipe: Recipe, process: Process, *, steps: int, workload: Workload = TOY, resume_after: int = 0
) -> dict[str, Any]:
    """Losses of this rank, what `state` gives at the end, and how far `load_weights` brings weights back.

    resume_after: after that many steps a second stepper, of other weights, takes over by the state.
    """
    stepper, data = build(recipe, process, workload=workload)
    if recipe.compile_mode != "none":
        stepper.compile_ahead(next(workload.batches(request(process))))
    losses = []
    for step in range(1, steps + 1):
        if workload.has_schedule:
            stepper.scale_learning_rate(workload.learning_rate_factor(step, steps))
        losses.append(float(train_step(stepper, next(data))))
        if step == resume_after:
            stepper = passed_on(stepper, build(recipe, process, seed=99, workload=workload)[0], process, step)
    probe = next(workload.batches(request(process)))
    said = score(stepper, probe, recipe, process)
    kept = stepper.weights()
    train_step(stepper, probe)
    changed = score(stepper, probe, recipe, process)
    stepper.load_weights(kept)
    return {
        "losses": losses,
        "weights": whole_weights(stepper),
        "scores": [said, changed, score(stepper, probe, recipe, process)],
        "model_class": type(stepper.model).__name__,
    }


def score(stepper: Stepper, batch: Batch, recipe: Recipe, process: Process) -> float:
    """The loss of `batch` in evaluation."""
    stepper.model.eval()
    with torch.no_grad(), setup_precision(recipe, process.device).autocast():
        value = float(loss(stepper.model, batch))
    stepper.model.train()
    return value


def whole_weights(stepper: Stepper) -> dict[str, torch.Tensor]:
    """The weights of a stepper on every rank; those of DeepSpeed on rank 0 alone."""
    whole = fsdp.whole(stepper.state().get("model", {}), keep=True)
    return {
        name: value.detach().float().cpu().clone()
        for name, value in whole.items()
        if isinstance(value, torch.Tensor)
    }


def passed_on(stepper: Stepper, to: Stepper, process: Process, step: int) -> Stepper:
    """Return `to`, which has resumed from a checkpoint of `stepper`."""
    with tempfile.TemporaryDirectory() as folder:
        shared = Path(broadcast_object(process, folder))
        saving = checkpointing(shared, stepper, process=process)
        saving.save(step)
        saving.finish()
        assert checkpointing(shared, to, process=process).resume(last_step=step) == step
        barrier(process)
    return to


def checkpointing(
    directory: Path,
    stepper: Stepper,
    evaluations: Evaluations | None = None,
    *,
    process: Process = ALONE,
    **identity: Any,
) -> Checkpointing:
    """What saves the checkpoints of a run, in which nothing else is recorded."""
    same = {"workload": "toy", "recipe": stepper.recipe.label, "data": "loader", "seed": 1}
    ranks = {"batch_size": BATCH_SIZE // process.world_size, "world_size": process.world_size}
    return Checkpointing(
        directory=directory,
        identity=Identity(**{**same, **ranks, **identity}),
        process=process,
        stepper=stepper,
        evaluations=evaluations,
        phase=PhaseClock(Lines(), process.device),  # type: ignore[arg-type]
        attempt=1,
    )


def run_ranks(
    out: Path, arms: list[str], *, steps: int, resume_after: int = 0, world_size: int = 2, gpus: bool = False
) -> dict[str, dict[str, Any]]:
    """What `train` finds for each arm, in that many processes that train as one.

    arms: `RECIPE[,FIELD=VALUE...][,pretraining]`. Losses are the ranks' mean, the rest is rank 0's.
    """
    out.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parent), str(TRAIN), os.environ.get("PYTHONPATH", "")]
        ),
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        # Torch reads it at a process's first product: the arm that needs it may come after others.
        **({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if gpus else {"CUDA_VISIBLE_DEVICES": ""}),
    }
    command = [sys.executable, __file__, str(out), str(steps), str(resume_after), *arms]
    ranks = [
        subprocess.Popen(
            command,
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        said = [rank.communicate(timeout=600)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode == 0 for rank in ranks), "\n".join(said)
    found = [torch.load(out / f"rank{rank}.pt", weights_only=True) for rank in range(world_size)]
    for arm in arms:
        losses = zip(*(one[arm]["losses"] for one in found), strict=True)
        found[0][arm]["losses"] = [sum(values) / world_size for values in losses]
    results: dict[str, dict[str, Any]] = found[0]
    return results


def run_ranks_and_resume(
    folder: Path, arms: Mapping[str, float | None], *, model_class: str, steps: int
) -> dict[str, dict[str, Any]]:
    """What two ranks find for each arm: plain torch's training in fp64, and the same bits after a resume.

    arms: with the largest distance from the plain training; None where the optimizer is another.
    """
    found = run_ranks(folder / "whole", list(arms), steps=steps)
    for arm, tolerance in arms.items():
        losses, weights = reference(steps=steps, workload=workload_of(arm))
        assert found[arm]["model_class"] == model_class
        assert tolerance is None or distance(found[arm], losses, weights) < tolerance, arm
        kept, changed, back = found[arm]["scores"]
        assert kept == back != changed, arm
    resumed = run_ranks(folder / "resumed", list(arms), steps=steps, resume_after=steps // 2)
    for arm in arms:
        assert resumed[arm]["losses"] == found[arm]["losses"], arm
        for name, weight in found[arm]["weights"].items():
            assert torch.equal(resumed[arm]["weights"][name], weight), (arm, name)
    return found


def distance(found: dict[str, Any], losses: list[float], weights: dict[str, torch.Tensor]) -> float:
    """The largest difference between what `train` found and these losses and weights."""
    assert found["weights"].keys() == weights.keys()
    apart: list[float] = [abs(one - other) for one, other in zip(found["losses"], losses, strict=True)]
    apart += [float((found["weights"][name] - weight).abs().max()) for name, weight in weights.items()]
    return max(apart)


def workload_of(arm: str) -> Workload:
    return PRETRAINING if arm.endswith(",pretraining") else TOY


def main() -> None:
    """As a rank: `toy.py OUT STEPS RESUME_AFTER RECIPE[,FIELD=VALUE...][,pretraining] ...`."""
    out, steps, resume_after = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    process = start_process()
    results = {}
    for arm in sys.argv[4:]:
        name, *overrides = arm.removesuffix(",pretraining").split(",")
        recipe, workload = resolve_recipe(name, overrides), workload_of(arm)
        results[arm] = train(recipe, process, steps=steps, workload=workload, resume_after=resume_after)
        torch.use_deterministic_algorithms(False)
        if recipe.compile_mode != "none":
            # Torch runs a function eagerly that it has compiled for several arms before.
            torch.compiler.reset()
    torch.save(results, out / f"rank{process.rank}.pt")
    stop_process()


if __name__ == "__main__":
    main()

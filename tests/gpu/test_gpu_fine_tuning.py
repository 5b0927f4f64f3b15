"""Fine-tuning on a GPU: documents apart by FlexAttention, Liger's kernels, and weights in FP8 and 4 bits."""

from typing import Any

import pytest
import torch
from running_here import runnable
from torch import nn

from fastlaunch_train.checks.equivalence import relative_error
from fastlaunch_train.data.documents import pack
from fastlaunch_train.distributed.parallel import Process
from fastlaunch_train.models.conversion import convert_model
from fastlaunch_train.models.precision import setup_precision
from fastlaunch_train.models.prepare import prepare_model
from fastlaunch_train.recipes.recipe import Recipe
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.steppers.stepping import build_native
from fastlaunch_train.workloads.contract import Batch, ModelOptions, Workload, load_workload

# torch's compiler, torchao and PEFT give warnings of no concern here.
pytestmark = pytest.mark.filterwarnings("ignore")

GPU = torch.device("cuda")
ALONE = Process(rank=0, local_rank=0, world_size=1, num_nodes=1, device=GPU)
LENGTH = 512


def built(recipe: Recipe) -> tuple[Workload, nn.Module]:
    workload = load_workload("hf-lora:llama-tiny", ModelOptions(sequence_length=LENGTH))
    model = build_native(workload, 0, ALONE)
    convert_model(model, workload, recipe)
    return workload, model


def packed() -> Batch:
    torch.manual_seed(1)
    texts = [torch.randint(1, 256, (size,), dtype=torch.int32) for size in (200, 180, 132)]
    sequences = pack([(text, text) for text in texts], LENGTH, 0)
    assert sequences.labels is not None and sequences.positions is not None
    whole = {"tokens": sequences.tokens, "labels": sequences.labels, "positions": sequences.positions}
    return {name: value.long().to(GPU) for name, value in whole.items()}


@pytest.mark.parametrize("label", ["bf16", "compile"])
def test_flex_attention_keeps_documents_apart(label: str) -> None:
    recipe = resolve_recipe(label)
    workload, model = built(recipe)
    model = prepare_model(workload, recipe, model)
    batch = packed()

    def hidden(part: Batch) -> torch.Tensor:
        with torch.no_grad(), setup_precision(recipe, GPU).autocast():
            outputs: Any = model(part["tokens"], None, part["positions"])
        logits: torch.Tensor = outputs[0]
        return logits.float()

    together = hidden(batch)
    # The first document with another second: its own outputs stay, and those of the others move by nothing.
    changed = {name: value.clone() for name, value in batch.items()}
    changed["tokens"][0, 200:380] = (changed["tokens"][0, 200:380] + 7) % 256
    other = hidden(changed)
    assert relative_error(other[0, :200], together[0, :200]) < 1e-3
    assert relative_error(other[0, 380:], together[0, 380:]) < 1e-3
    assert relative_error(other[0, 200:380], together[0, 200:380]) > 0.1


def test_flex_attention_computes_what_a_mask_does() -> None:
    recipe = resolve_recipe("fp32")
    workload, model = built(recipe)
    batch = packed()
    with torch.no_grad():
        on_gpu = float(workload.loss(model, batch))
        on_cpu = float(workload.loss(model.cpu(), {name: value.cpu() for name, value in batch.items()}))
    assert on_gpu == pytest.approx(on_cpu, rel=2e-3)


@pytest.mark.parametrize("label", ["liger compile_mode=none", "liger", "fp8-frozen", "nf4"])
def test_losses_and_gradients_are_those_of_bf16(label: str) -> None:
    recipe = runnable(label)
    limit = 0.3 if label in ("fp8-frozen", "nf4") else 0.05
    found = []
    for each in (resolve_recipe("bf16"), recipe):
        workload, model = built(each)
        model = prepare_model(workload, each, model)
        with setup_precision(each, GPU).autocast():
            loss = workload.loss(model, packed())
        loss.backward()
        gradients = [value.grad.flatten() for value in model.parameters() if value.grad is not None]
        found.append((float(loss.detach()), torch.cat(gradients)))
    (expected, right), (loss_value, gradient) = found
    assert loss_value == pytest.approx(expected, rel=limit / 10)
    assert relative_error(gradient, right) < limit

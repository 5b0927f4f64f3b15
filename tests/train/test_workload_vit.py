"""The image workloads: their size, their arithmetic, and that they learn."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from data_requests import request
from torch import nn

from fastlaunch_train.models.flops import build_on_meta, step_flops, training_flops_per_sample
from fastlaunch_train.workloads.contract import Workload, load_workload
from fastlaunch_train.workloads.registry import WORKLOADS, WorkloadError

TRAIN = Path(__file__).resolve().parents[2] / "train"


@pytest.fixture(scope="module")
def tiny() -> Workload:
    return load_workload("vit-tiny")


@pytest.fixture(scope="module")
def huge() -> Workload:
    return load_workload("vit-huge")


def test_vit_huge_has_the_published_number_of_parameters(huge: Workload) -> None:
    model = build_on_meta(huge.build_model)
    assert sum(p.numel() for p in model.parameters()) == 632_199_400 == WORKLOADS["vit-huge"].num_parameters
    assert huge.blocks is not None
    assert len(huge.blocks(model)) == 32
    assert (huge.optimizer, huge.learning_rate, huge.momentum) == ("sgd", 1e-3, 0.9)


@pytest.mark.full
def test_vit_huges_stated_flops_are_those_that_torch_counts(huge: Workload) -> None:
    counted = training_flops_per_sample(huge.build_model, (3, 224, 224))
    assert huge.flops_per_sample == pytest.approx(counted, rel=1e-4)


class Attention(nn.Module):
    """Four heads of 8 over 32 tokens, with what a passage changes: statistics, and numbers drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).view(-1, 32, 3, 4, 8).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        z: torch.Tensor = self.drop(self.norm(y.transpose(1, 2).reshape(-1, 32, 32)))
        return z


def test_flops_of_a_model_as_it_stands_count_attention_and_leave_no_trace() -> None:
    model = Attention()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    generator, x = torch.get_rng_state(), torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(0))
    counted = step_flops(model, lambda model: model(x).sum())
    # The projection has no gradient of its input to find; attention has two products, and four backward.
    assert counted == 2 * (2 * 2 * 32 * 32 * 96 + 6 * 2 * 32 * 32 * 32)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters()) and model.training


def test_a_model_that_cannot_be_counted_has_no_flops() -> None:
    def fail(model: nn.Module) -> torch.Tensor:
        raise ValueError("of the user's own")

    assert step_flops(nn.Linear(2, 2), fail) is None
    assert step_flops(nn.Linear(2, 2), lambda model: model.bias.sum()) is None, "no products"


def test_flops_of_one_linear_layer() -> None:
    def build() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 5))

    # Forward and weight gradient, a multiply-add being two; the input needs no gradient.
    assert training_flops_per_sample(build, (3, 2, 2)) == 2 * (2 * 12 * 5)


def test_scores_of_what_is_held_out_leave_out_what_fills_up_a_batch(tiny: Workload) -> None:
    assert tiny.held_out is not None
    assert tiny.score is not None
    assert tiny.metric == "accuracy"
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 32 * 32, 10))
    with torch.no_grad():
        found = list(tiny.held_out(request(batch_size=600), "validation"))
        scores = [tiny.score(model, batch) for batch in found]
        images, labels = (torch.cat(parts)[:1024] for parts in zip(*found, strict=True))
        logits = model(images)
    assert len(found) == 2
    assert sum(float(score.weight) for score in scores) == 1024
    assert [int(score.num_samples) for score in scores if score.num_samples is not None] == [600, 424]
    loss = sum(float(score.loss_sum) for score in scores) / 1024
    assert loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-4)
    right = sum(int(score.metric_sum) for score in scores if score.metric_sum is not None)
    assert right == int((logits.argmax(1) == labels).sum())


@pytest.mark.full
def test_vit_tiny_learns_within_200_steps(tiny: Workload) -> None:
    assert tiny.optimizer == "adamw"
    torch.manual_seed(0)
    model = tiny.build_model().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=tiny.learning_rate)
    losses = []
    for _, batch in zip(range(200), tiny.batches(request()), strict=False):
        optimizer.zero_grad()
        loss = tiny.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[:10]) / 10 > 0.8 * math.log(10)
    assert sum(losses[-50:]) / 50 < 0.6 * math.log(10)


def test_a_timm_model_brings_its_input_size_and_classes() -> None:
    workload = load_workload("timm:vit_tiny_patch16_224.augreg_in21k")
    images, labels = next(workload.batches(request(batch_size=2)))
    model = workload.build_model()
    assert images.shape == (2, 3, 224, 224)
    assert model(images).shape == (2, 21843)
    assert labels.max() < 21843
    assert workload.blocks is not None
    assert len(workload.blocks(model)) == 12
    assert workload.flops_per_sample is not None
    # 2 operations x 3 passes x (5.5 million weights in products) x 197 tokens, and the attention.
    assert 6.0e9 < workload.flops_per_sample < 8.0e9


def test_a_timm_model_without_transformer_blocks() -> None:
    workload = load_workload("timm:resnet18")
    assert workload.blocks is None
    # 1.8 billion multiply-adds forward, published.
    assert workload.flops_per_sample == pytest.approx(3 * 2 * 1.8e9, rel=0.05)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("timm:vit_bas_patch16_224", "timm:vit_base_patch16_224"),
        ("timm:vit_base_patch16_224.nothing", "augreg"),
        ("timm:zzzzzzzzzzzzzzzz", "list_models"),
    ],
)
def test_an_unknown_timm_model_is_answered_with_what_there_is(name: str, hint: str) -> None:
    with pytest.raises(WorkloadError) as caught:
        load_workload(name)
    assert name in caught.value.message
    assert hint in (caught.value.hint or "")


@pytest.mark.skipif(torch.version.cuda is not None, reason="only a CPU torch needs it")
@pytest.mark.full
def test_a_cpu_torch_can_import_torchvision_twice_prepared() -> None:
    code = (
        "from fastlaunch_train.data.cpu_torchvision import prepare_torchvision as p; p(); p(); "
        "import timm, torchvision.transforms; p()"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, env={"PYTHONPATH": str(TRAIN)})


@pytest.mark.slow
def test_what_torch_2_6_cannot_import_below_meta_is_there_before() -> None:
    script = (
        "import sys, torch; from fastlaunch_train.models.flops import build_on_meta; found = []\n"
        "def build():\n"
        "    found.append('torch._dynamo' in sys.modules)\n"
        "    return torch.nn.Linear(2, 2)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
        "build_on_meta(build); print(*found)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"

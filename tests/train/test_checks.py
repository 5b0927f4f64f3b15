"""The checks before training: what is equivalent passes, and a model that mixes its samples does not."""

import contextlib
import dataclasses
import math
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from equivalence import images, vit
from torch import nn
from toy import ALONE, CPU, TOY

from fastlaunch_train.checks.equivalence import (
    EQUIVALENCE_LIMITS,
    LARGEST_LIMIT,
    MOST_TIMES,
    NUM_GRADIENT_PASSES,
    STILL_LIMITS,
    Reference,
    compute_reference,
    equivalence_limit,
    relative_error,
    run_checks,
)
from fastlaunch_train.checks.gradients import MOST_VALUES, gradient_errors, gradients_of
from fastlaunch_train.data.batches import take
from fastlaunch_train.loop.batch_size import probe_request
from fastlaunch_train.models.conversion import convert_model
from fastlaunch_train.models.fp8_fused import reference
from fastlaunch_train.models.precision import Precision, setup_precision
from fastlaunch_train.recipes.recipes import RECIPES, resolve_recipe
from fastlaunch_train.records.records import Check
from fastlaunch_train.workloads.contract import Batch, Workload, load_workload

NAMES = ["equivalence", "isolation", "permutation", "gradients", "gradients-by-tensor"]


@pytest.fixture(scope="module")
def workload() -> Workload:
    return load_workload("vit-tiny")


@pytest.fixture(scope="module")
def probe(workload: Workload) -> Batch:
    return next(workload.batches(probe_request(ALONE, seed=0, batch_size=8)))


def checked(
    workload: Workload,
    probe: Batch,
    label: str,
    change: Callable[[nn.Module], object] = lambda model: None,
    arithmetic: Precision | None = None,
) -> list[Check]:
    name, *overrides = label.split()
    recipe = resolve_recipe(name, overrides)
    torch.manual_seed(0)
    model = workload.build_model().train()
    before = compute_reference(workload, recipe, model, probe)
    if recipe.blocks != "te":  # without Transformer Engine the native blocks stand in for its own
        convert_model(model, workload, recipe)
    change(model)
    precision = arithmetic or setup_precision(recipe, CPU)
    checks = run_checks(workload, recipe, precision, model, probe, before)
    print(label, *checks, sep="\n  ")
    return checks


@pytest.mark.parametrize("label", ["fp32", "bf16", "fp16"])
def test_a_recipe_that_computes_the_same_passes(workload: Workload, probe: Batch, label: str) -> None:
    checks = checked(workload, probe, label)
    assert [check.name for check in checks] == NAMES
    assert all(check.passed for check in checks)
    assert all(check.value is not None and check.limit is not None for check in checks)
    if label != "fp32":  # it was really computed in lower precision
        assert checks[0].value and checks[0].value > 1e-5


def test_outputs_that_do_not_depend_on_the_sample_fail_all_three(workload: Workload, probe: Batch) -> None:
    """As the article's blocks: their class token never sees its image."""
    blind = embedded_through(torch.zeros_like)
    equivalence, isolation, permutation, *_ = checked(workload, probe, "bf16", blind)
    assert not (equivalence.passed or isolation.passed or permutation.passed)
    assert "did not change" in (isolation.detail or "")
    assert "did not move" in (permutation.detail or "")


class Mixing(nn.Module):
    """Adds to each image a little of the one before it in the batch, and of those before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.05 * x.cumsum(0)


def embedded_through(module: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[nn.Module], None]:
    """A change of a ViT: `module` after its patch embedding."""

    def change(model: Any) -> None:
        model.patch_embed.register_forward_hook(lambda _, given, embedded: module(embedded))

    return change


def test_a_model_that_mixes_its_samples_fails(workload: Workload, probe: Batch) -> None:
    _, isolation, permutation, *_ = checked(workload, probe, "bf16", embedded_through(Mixing()))
    assert not isolation.passed and isolation.detail is None
    assert not permutation.passed and permutation.detail is None


def test_another_epsilon_is_within_bf16_and_not_within_fp32(workload: Workload, probe: Batch) -> None:
    def another(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.eps = 1e-5

    assert checked(workload, probe, "bf16", another)[0].passed
    assert not checked(workload, probe, "fp32", another)[0].passed


def test_what_is_scaled_by_the_batchs_maximum_keeps_samples_apart(workload: Workload, probe: Batch) -> None:
    class Scaled(nn.Module):
        """Rounds to 1/64 of the batch's largest value, as FP8 with one scale a tensor does."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            step = x.abs().max() / 64
            return (x / step).round() * step

    equivalence, isolation, permutation, *_ = checked(workload, probe, "fp32", embedded_through(Scaled()))
    assert not equivalence.passed  # of fp32
    assert isolation.passed and permutation.passed


def test_scales_are_found_before_they_are_judged(workload: Workload, probe: Batch) -> None:
    """Delayed scaling computes its first pass with scales of 1, and learns where gradients are."""
    passes: list[bool] = []

    class Delayed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            passes.append(torch.is_grad_enabled())
            return x if len(passes) > 2 else x * 0

    plain = setup_precision(RECIPES["bf16"], CPU)
    checks = checked(workload, probe, "te-fp8", embedded_through(Delayed()), plain)
    assert all(check.passed for check in checks)
    of_gradients = NUM_GRADIENT_PASSES + 1
    assert all(passes[:2]) and not any(passes[2:-of_gradients]) and all(passes[-of_gradients:])


def test_a_missing_block_does_not_hide_in_the_error_of_fp8(probe: Batch) -> None:
    """The last of many changes less than FP8 may."""
    deep = load_workload("vit-tiny")
    build = deep.build_model

    def build_with_a_weak_end() -> nn.Module:
        model: Any = build()
        for parameter in model.blocks[-1].parameters():
            parameter.data *= 0.6
        return model  # type: ignore[no-any-return]

    deep = dataclasses.replace(deep, build_model=build_with_a_weak_end)
    plain = setup_precision(RECIPES["bf16"], CPU)

    def lose(model: Any) -> None:
        model.blocks[-1] = nn.Identity()

    whole = {check.name: check.passed for check in checked(deep, probe, "te-fp8", arithmetic=plain)}
    assert whole == dict.fromkeys([*NAMES, "without-fp8"], True)
    lost = {check.name: check.passed for check in checked(deep, probe, "te-fp8", lose, plain)}
    assert lost == whole | dict.fromkeys(["without-fp8", "gradients", "gradients-by-tensor"], False)


def test_nothing_is_left_behind(workload: Workload, probe: Batch) -> None:
    model = nn.Sequential(workload.build_model(), nn.BatchNorm1d(10), nn.Dropout(0.5)).train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random_state = torch.get_rng_state()
    before = compute_reference(workload, RECIPES["bf16"], model, probe)
    run_checks(workload, RECIPES["bf16"], setup_precision(RECIPES["bf16"], CPU), model, probe, before)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


class Halved(torch.autograd.Function):
    """Forward nothing is changed; backward a half is lost."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 0.5 * gradient


def in_the_mlp(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    """A change of a ViT: the first block's activations go through `function`."""

    def change(model: Any) -> None:
        model.blocks[0].mlp.act.register_forward_hook(lambda module, given, activated: function(activated))

    return change


@pytest.mark.parametrize("label", ["fp32", "bf16", "fp16"])
def test_a_wrong_backward_pass_fails_while_all_that_looks_forward_passes(
    workload: Workload, probe: Batch, label: str
) -> None:
    halved = {check.name: check for check in checked(workload, probe, label, in_the_mlp(Halved.apply))}
    assert [check.passed for check in halved.values()] == [True, True, True, False, False]
    assert halved["gradients-by-tensor"].value == pytest.approx(0.5, rel=0.05)
    assert "blocks.0.mlp.fc1" in (halved["gradients-by-tensor"].detail or "")


def test_a_gradient_that_does_not_come_fails(workload: Workload, probe: Batch) -> None:
    def freeze(model: Any) -> None:
        model.blocks[1].mlp.fc2.weight.requires_grad_(False)

    *_, of_all, of_one = checked(workload, probe, "bf16", freeze)
    assert of_one.value == 1.0 and not of_one.passed
    assert of_all.value is not None and 0.1 < of_all.value < 1


@pytest.mark.parametrize("label", ["bf16-fused", "fp8-fused"])
def test_fused_blocks_that_halve_gelus_gradient_fail(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = {"img_size": 16, "patch_size": 8, "embed_dim": 256, "depth": 2, "num_heads": 4, "num_classes": 10}
    wide = vit(shape)
    batch = images(shape, 16, CPU)
    assert all(check.passed for check in checked(wide, batch, label))
    right = reference.gelu_backward
    monkeypatch.setattr(reference, "gelu_backward", lambda gradient, *rest: right(0.5 * gradient, *rest))
    failed = [check for check in checked(wide, batch, label) if not check.passed]
    assert [check.name for check in failed] == ["gradients", "gradients-by-tensor"]
    assert failed[0].value == pytest.approx(0.5, rel=0.1)


def test_a_loss_that_is_for_training_alone_is_no_failure(workload: Workload, probe: Batch) -> None:
    def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
        assert model.training
        return workload.loss(model, batch)

    checks = checked(dataclasses.replace(workload, loss=loss), probe, "bf16")
    assert [(check.name, check.passed) for check in checks] == [(name, True) for name in NAMES[:3]]


def test_small_gradients_are_judged_with_the_rest_and_large_ones_by_a_part() -> None:
    exact = {"large": torch.tensor([3.0, 4.0]), "other": torch.tensor([12.0]), "bias": torch.tensor([1e-3])}
    errors = gradient_errors({"large": torch.tensor([3.0, 3.0]), "other": exact["other"]}, exact)
    assert errors.total == pytest.approx(1 / 13, rel=1e-5)
    assert errors.by_tensor == {"large": pytest.approx(0.2), "other": 0.0}

    model = nn.Linear(2**9, 2**9, bias=False)
    squares = dataclasses.replace(TOY, loss=lambda model, batch: model(batch).square().sum())
    x = torch.randn(4, 2**9, generator=torch.Generator().manual_seed(0))
    (some,) = (gradients_of(squares, model, x, contextlib.nullcontext) or {}).values()
    squares.loss(model, x).backward()  # type: ignore[no-untyped-call]
    assert model.weight.grad is not None and some.numel() <= 1.5 * MOST_VALUES < model.weight.grad.numel()
    assert float(some.norm()) == pytest.approx(float(model.weight.grad.norm()), rel=0.05)


class Faraway(nn.Module):
    """Adds much of what the first sample of the batch has in the place of the others."""

    def __init__(self, head: nn.Module, part: float) -> None:
        super().__init__()
        self.head = head
        self.part = part

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(x)
        return scores + 1000 * self.part * torch.arange(len(x))[:, None] * scores.cumsum(0)


@pytest.mark.parametrize("part", [0.0, 0.5])
def test_outputs_that_hardly_depend_on_their_samples_are_not_asked_to(
    workload: Workload, probe: Batch, part: float
) -> None:
    """As of an untrained CaiT, whose class token begins to see the image as it is trained."""
    near = dataclasses.replace(workload, outputs=lambda model, batch: 1 + 1e-3 * model(batch[0]))
    mix = checked(near, probe, "bf16", lambda model: setattr(model, "head", Faraway(model.head, part)))
    assert [check.passed for check in mix[:3]] == [part == 0] * 3
    assert all(check.detail is None for check in mix[:3])


def test_the_limit_grows_with_the_native_models_own_error_and_not_without_end() -> None:
    assert equivalence_limit("bf16", 0.0) == equivalence_limit("bf16", 0.01) == EQUIVALENCE_LIMITS["bf16"]
    assert equivalence_limit("bf16", 0.04) == pytest.approx(4 * EQUIVALENCE_LIMITS["bf16"])
    assert equivalence_limit("fp8", 0.015) == pytest.approx(1.5 * EQUIVALENCE_LIMITS["fp8"])
    assert equivalence_limit("fp8", 3.0) == LARGEST_LIMIT
    assert equivalence_limit("fp16", math.nan) == EQUIVALENCE_LIMITS["fp16"]
    assert equivalence_limit("fp32", 3.0) == EQUIVALENCE_LIMITS["fp32"]


def test_the_native_models_error_is_that_of_the_recipes_precision(workload: Workload, probe: Batch) -> None:
    torch.manual_seed(0)
    model = workload.build_model()
    seen: list[str] = []
    model.blocks[0].attn.qkv.register_forward_pre_hook(
        lambda *_: seen.append(torch.get_float32_matmul_precision())
    )
    before = torch.get_float32_matmul_precision()
    names = ("fp32", "tf32", "fp16", "bf16", "te-fp8")
    found = {name: compute_reference(workload, RECIPES[name], model, probe).rounding for name in names}
    # Outputs, then gradients; each in fp32, and below it in the recipe's precision too.
    assert seen == [*["highest"] * 2, *["highest", "highest", "high", "high"], *["highest"] * 12]
    assert torch.get_float32_matmul_precision() == before
    assert found["fp32"] == 0 < found["fp16"] < 2e-3 < found["bf16"] == found["te-fp8"] < 1e-2


def test_what_rounding_makes_much_of_need_not_be_as_still(workload: Workload, probe: Batch) -> None:
    """Of outputs near 0 the last bit, which sums in another order flip, is large beside the rest."""
    model, recipe = workload.build_model(), RECIPES["bf16"]
    exact = compute_reference(workload, recipe, model, probe)
    precision = setup_precision(recipe, CPU)
    for rounding, times in ((0.0, 1), (0.05, 5), (7.0, MOST_TIMES)):
        given = dataclasses.replace(exact, rounding=rounding)
        _, *still, _, _ = run_checks(workload, recipe, precision, model, probe, given)
        assert [check.limit for check in still] == pytest.approx([times * STILL_LIMITS["bf16"]] * 2)


def test_without_outputs_there_is_nothing_to_check(workload: Workload, probe: Batch) -> None:
    mute = dataclasses.replace(workload, outputs=None)
    assert compute_reference(mute, RECIPES["bf16"], workload.build_model(), probe) == Reference(outputs=None)
    assert checked(mute, probe, "bf16") == []


def test_two_samples_cannot_show_isolation(workload: Workload, probe: Batch) -> None:
    assert [check.name for check in checked(workload, take(probe, [0, 1]), "bf16")] == [NAMES[0], *NAMES[3:]]
    assert [check.name for check in checked(workload, take(probe, [0, 1, 2]), "bf16")] == NAMES


def test_a_model_of_other_outputs_fails(workload: Workload, probe: Batch) -> None:
    checks = checked(workload, probe, "bf16", lambda model: setattr(model, "head", nn.Linear(64, 7)))
    assert not checks[0].passed and "shape (8, 7), not (8, 10)" in (checks[0].detail or "")


def test_what_is_not_finite_fails_and_can_be_written(workload: Workload, probe: Batch) -> None:
    checks = checked(workload, probe, "bf16", lambda model: model.head.weight.data.fill_(math.nan))
    assert [(check.passed, check.value) for check in checks] == [(False, None)] * 5


def test_relative_errors() -> None:
    exact = torch.tensor([3.0, 4.0])
    assert relative_error(torch.tensor([3.0, 4.5]), exact) == pytest.approx(0.1)
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(exact, torch.zeros(2)) == math.inf


def test_samples_are_taken_of_any_nest() -> None:
    Pair = namedtuple("Pair", "first second")
    rows = torch.arange(3)
    batch: Any = {"a": rows, "b": [rows, (rows.unsqueeze(1), "text")], "c": Pair(rows, torch.tensor(7.0))}
    taken = take(batch, [2, 0])
    assert taken["a"].tolist() == taken["b"][0].tolist() == taken["c"].first.tolist() == [2, 0]
    assert taken["b"][1][0].tolist() == [[2], [0]]
    assert taken["b"][1][1] == "text" and taken["c"].second == 7.0
    assert type(taken["c"]) is Pair


@pytest.mark.slow
@pytest.mark.parametrize("seed", [5, 7])
def test_untrained_classifiers_of_two_classes_pass_whatever_their_seed(seed: int) -> None:
    """By seed 5 both outputs are near 0, and roundings large beside them; by 7 two reviews are alike."""
    workload, recipe = load_workload("distilbert-tiny"), RECIPES["bf16"]
    torch.manual_seed(seed)
    model = workload.build_model().train()
    batch = next(workload.batches(probe_request(ALONE, seed=seed, batch_size=16)))
    before = compute_reference(workload, recipe, model, batch)
    checks = run_checks(workload, recipe, setup_precision(recipe, CPU), model, batch, before)
    assert all(check.passed for check in checks), checks

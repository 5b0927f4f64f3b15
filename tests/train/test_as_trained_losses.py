"""The check of the model as trained, of workloads that users may write: what they draw, mask and write to."""

import dataclasses
from typing import Any

import numpy
import pytest
import torch
import toy
from test_as_trained import ALONE, first_step
from torch import nn

from fastlaunch_train.checks.compiled_model import CompiledModelCheck, _judged, _Limits
from fastlaunch_train.models.precision import setup_precision
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.records.records import Check
from fastlaunch_train.workloads.contract import Batch


def drawn_by_numpy(model: nn.Module, batch: Batch) -> torch.Tensor:
    share = float(numpy.random.beta(0.8, 0.8))
    return toy.loss(model, (share * batch[0] + (1 - share) * batch[0].flip(0), batch[1]))


def of_some_samples(model: nn.Module, batch: Batch) -> torch.Tensor:
    kept = int(torch.randint(1, 9, ()))
    return toy.loss(model, (batch[0][:kept], batch[1][:kept]))


def by_its_parts(model: nn.Module, batch: Batch) -> torch.Tensor:
    parts: Any = model
    assert [*parts] == [parts[0], parts[1]] and len(parts) == 2
    return nn.functional.cross_entropy(parts[1](parts[0](batch[0])), batch[1])


def in_place(model: nn.Module, batch: Batch) -> torch.Tensor:
    batch[0].sub_(batch[0].mean()).mul_(2)
    return toy.loss(model, batch)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": drawn_by_numpy},
        {"loss": of_some_samples},
        {"loss": in_place},
        {
            "loss": by_its_parts,
            "build_model": lambda: nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 5)),
            "blocks": None,
        },
        {
            "loss": lambda model, batch: toy.loss(model, batch[:2]),
            "batches": lambda request: ((*batch, None) for batch in toy.batches(request)),
        },
    ],
)
def test_what_a_users_loss_may_do_is_no_error(changes: dict[str, Any]) -> None:
    for seed in range(3):
        check = first_step("fp32", dataclasses.replace(toy.TOY, **changes), seed=seed)
        assert check is not None and check.passed


def test_the_batch_is_left_for_the_first_step() -> None:
    recipe = resolve_recipe("fp32")
    precision = setup_precision(recipe, ALONE.device)
    batch = next(toy.batches(toy.request(ALONE)))
    before = batch[0].clone()
    CompiledModelCheck(
        dataclasses.replace(toy.TOY, loss=in_place), recipe, precision, toy.Toy(), batch, rounding=0.0
    )
    assert torch.equal(batch[0], before)


def test_of_data_in_one_place_no_more_than_the_batch_is_copied() -> None:
    sizes: list[int] = []

    def measured(model: nn.Module, batch: Batch) -> torch.Tensor:
        sizes.extend(tensor.untyped_storage().nbytes() // tensor.nbytes for tensor in batch)
        return toy.loss(model, batch)

    recipe = resolve_recipe("fp32")
    precision = setup_precision(recipe, ALONE.device)
    whole = next(toy.batches(dataclasses.replace(toy.request(ALONE), batch_size=80)))
    part = tuple(tensor[8:16] for tensor in whole)
    CompiledModelCheck(
        dataclasses.replace(toy.TOY, loss=measured), recipe, precision, toy.Toy(), part, rounding=0.0
    )
    assert sizes == [1, 1]


class Drawn(toy.Toy):
    """Its last class has a logit of its own."""

    def __init__(self, last: float) -> None:
        super().__init__()
        self.last = torch.tensor([0.0] * (toy.CLASSES - 1) + [last])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.1) + self.last


def of_classes_with_a_logit(model: nn.Module, batch: Batch) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0])[:, :-1], batch[1].clamp(max=toy.CLASSES - 2))


def test_what_is_masked_by_all_is_no_difference() -> None:
    masked = dataclasses.replace(
        toy.TOY, build_model=lambda: Drawn(-float("inf")), loss=of_classes_with_a_logit
    )
    check = first_step("fp32", masked)
    assert check is not None and check.passed
    check = first_step("fp32", masked, change=lambda stepper: setattr(stepper.model, "last", torch.zeros(5)))
    assert check is not None and not check.passed


def test_what_was_not_finite_before_can_be_written() -> None:
    check = first_step("fp32", dataclasses.replace(toy.TOY, build_model=lambda: Drawn(float("nan"))))
    assert check == Check(name="as-trained", passed=False, detail="not a finite number")


def test_few_outputs_are_seldom_taken_for_others_by_what_was_drawn() -> None:
    """Each of so many is a run that would be barred from the ranks."""
    limits = _Limits(sample=1e-4, along=1e-4)
    drawn = 1 + torch.randn(3000, 17, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    passes = [(each[0], each[1:]) for each in drawn]
    assert sum(not _judged(found, draws, limits).passed for found, draws in passes) <= 1

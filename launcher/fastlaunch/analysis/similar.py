"""Which measured row says most of a training that nobody has run, and what that training is by it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fastlaunch.analysis.anchors import Anchor
from fastlaunch.analysis.compare import Row, rate_on_type
from fastlaunch.analysis.configurations import (
    NODE_EFFICIENCY,
    Query,
    RecipeFacts,
    anchor_of,
    facts_of,
    largest_part,
    name_of,
    near_anchors,
    precision_of,
    predict,
    subject_of,
)
from fastlaunch.analysis.cost import accelerator_of
from fastlaunch.analysis.cost_to_train import Assumptions, Training
from fastlaunch.analysis.finish import account_of_row
from fastlaunch.analysis.pooling import BARE_STEP, samples_per_step
from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.core.errors import UserError
from fastlaunch.core.units import counted
from fastlaunch.measure.memory import USABLE_MEMORY
from fastlaunch.measure.summary import Interval
from fastlaunch_train.recipes.recipes import RECIPES


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A training that is to be estimated. `is_measured_by` says which rows can tell something of it."""

    recipe: str | None  # a label, or a variant of a script; None for any
    instance: InstanceType
    num_nodes: int
    batch_size: int | None  # per GPU; None for the one that is measured

    @property
    def num_gpus(self) -> int:
        return self.instance.num_accelerators * self.num_nodes

    def has_recipe_of(self, row: Row) -> bool:
        """Return whether the row has a speed, of this recipe, on whatever GPU."""
        return rate_on_type(row.group) is not None and (
            self.recipe is None or row.setup.is_named(self.recipe)
        )

    def is_measured_by(self, row: Row, catalogue: Catalogue) -> bool:
        """Return whether the row has a speed, of this recipe, on the GPU of this instance type."""
        accelerator = accelerator_of(row.setup, catalogue)
        on_it = accelerator is not None and accelerator.name == self.instance.accelerator
        return on_it and self.has_recipe_of(row)

    def distance(self, row: Row) -> tuple[bool, float, float, bool, int]:
        """Return how far the row is from it, to be compared: GPUs, batch, instance type, kind, repeats."""
        batch = row.setup.batch_size_per_gpu
        by_batch = abs(math.log(batch / self.batch_size)) if batch and self.batch_size else 0.0
        return (
            row.setup.num_nodes != self.num_nodes,
            abs(math.log(row.setup.num_gpus / self.num_gpus)),
            by_batch,
            row.setup.instance != self.instance.name,
            -row.num_runs,
        )


def unit_of(row: Row) -> str:
    """Return what `samples` counts: images, sequences, or steps of a script that does not say."""
    return "steps" if row.group.measure == BARE_STEP else row.setup.sample_unit


def training_like(
    row: Row, wanted: Wanted, *, samples: Interval, source: str, assumptions: Assumptions
) -> Training:
    """Return the training by the row; on another number of GPUs its speed is scaled, which is assumed.

    source: where the row is from, in words.
    """
    rate = rate_on_type(row.group)
    assert rate is not None
    factor = wanted.num_gpus / row.setup.num_gpus
    recipe = RECIPES.get(row.setup.recipe.split(" ")[0])
    speed_source = source
    if factor != 1:
        # How well it scales has no interval, so neither has the speed.
        kept = assumptions.scaling
        if "scaling" not in assumptions.given:
            kept = NODE_EFFICIENCY ** math.log2(wanted.num_nodes / row.setup.num_nodes)
        rate = Interval(value=rate.value * factor * kept)
        how = f"{kept:.3g} times linear" if kept != 1 else "linear"
        speed_source += f", {how} from {counted(row.setup.num_gpus, 'GPU')} to {wanted.num_gpus}"
    return Training(
        samples=samples,
        samples_per_s=rate,
        evidence="measured" if factor == 1 else "assumed",
        source=speed_source,
        num_nodes=wanted.num_nodes,
        account=account_of_row(row),
        account_source=source,
        samples_per_step=samples_per_step(row.group) * factor,
        compiles=recipe is None or recipe.compiles,
    )


def predicted_like(
    row: Row,
    rows: Sequence[Row],
    wanted: Wanted,
    *,
    batch_size: int | None,
    samples: Interval,
    published: Sequence[Anchor],
    catalogue: Catalogue,
    node_scaling: float | None = None,
) -> Training:
    """Return the training on GPUs, or a number of them, on which nobody measured it, as `recommend` does.

    row: the most similar one, whose recipe it is. rows: all of the workload, on whatever GPU. published:
    other runs to predict from, as `analysis.predict` reads them. node_scaling: see `Scope`. The interval
    holds one run in 90%, and the speed is such that its time is the expected one. Raises UserError with the
    reason where it cannot be predicted.
    """
    setup = row.setup
    subject = subject_of(setup.workload, rows, setup, catalogue)
    anchors = [anchor for each in rows if (anchor := anchor_of(each, subject, catalogue))]
    query = Query(
        instance=wanted.instance,
        num_nodes=wanted.num_nodes,
        facts=RecipeFacts(recipe=setup.recipe, precision=precision_of(setup)),
        recipe=setup.recipe,
        batch_size_per_gpu=batch_size or 0,
        micro_batch=batch_size or 0,
        gpu=name_of(catalogue.accelerators[wanted.instance.accelerator]),
    )
    (found,) = predict(
        [query], subject, [*anchors, *near_anchors(published, subject)], node_scaling=node_scaling
    )
    if isinstance(found, str):
        raise UserError(
            f"nobody measured {setup.recipe} on {wanted.num_gpus} x {wanted.instance.accelerator}, and it"
            f" cannot be predicted: {found}",
            "take another recipe, or an instance type that can be predicted or was measured",
        )
    num_own = sum(anchor.config.model == subject.model_of(setup.recipe).lower() for anchor in anchors)
    others = f", {len(anchors) - num_own} of other recipes" if len(anchors) > num_own else ""
    by = f"class {found.evidence}, by {counted(num_own, 'row')} of it on other machines{others}"
    recipe = RECIPES.get(setup.recipe.split(" ")[0])
    return Training(
        samples=samples,
        samples_per_s=found.speed,
        evidence="predicted",
        source="; ".join([by, *filter(None, [found.assumption])]),
        num_nodes=wanted.num_nodes,
        samples_per_step=float((batch_size or 1) * wanted.num_gpus),
        compiles=recipe is None or recipe.compiles,
    )


def check_memory(
    row: Row, rows: Sequence[Row], wanted: Wanted, *, batch_size: int, catalogue: Catalogue
) -> str | None:
    """Return in words that it is not known whether a batch fits in the GPU's memory; None if it does.

    row, rows: as for `predicted_like`. batch_size: per GPU. Raises UserError for one that does not fit, by
    the peaks of the recipe's rows.
    """
    accelerator, recipe = catalogue.accelerators[wanted.instance.accelerator], row.setup.recipe
    own = [each for each in rows if each.setup.recipe == recipe]
    if any(
        wanted.is_measured_by(each, catalogue) and (each.setup.batch_size_per_gpu or 0) >= batch_size
        for each in own
    ):
        return None
    subject = subject_of(row.setup.workload, rows, row.setup, catalogue)
    facts = next((each for each in facts_of(own, subject, catalogue) if each.recipe == recipe), None)
    has_peak = any(each.overhead.peak_memory_gib is not None for each in own)
    if facts is None or facts.gib_per_sample is None or not has_peak:
        return f"whether a batch of {batch_size} per GPU fits in its memory is not known"
    is_script = subject.info is None
    part = largest_part(batch_size, facts, accelerator, is_script=is_script)
    if part == batch_size:
        return None
    room_gib = USABLE_MEMORY * accelerator.memory_gib
    most = int((room_gib - facts.fixed_gib) / facts.gib_per_sample)
    if most < 1:
        hint = "take an instance type whose GPUs have more memory"
    elif is_script:
        hint = f"give --batch-size {most} or less"
    else:
        parts = f"`fastlaunch recommend` predicts it with grad_accumulation={batch_size // part}"
        hint = f"give --batch-size {most} or less; {parts}"
    raise UserError(
        f"a batch of {batch_size} per GPU does not fit in the memory of {accelerator.name}: it takes about"
        f" {facts.fixed_gib + batch_size * facts.gib_per_sample:,.0f} GiB, and {room_gib:.3g} can be used",
        hint,
    )


def differences(row: Row, wanted: Wanted) -> list[str]:
    """Return in words how the row is unlike what is wanted."""
    setup, found = row.setup, []
    if setup.num_nodes != wanted.num_nodes:
        found.append(
            f"measured on {counted(setup.num_nodes, 'node')}: what the network between"
            f" {counted(wanted.num_nodes, 'node')} takes is not known"
        )
    if wanted.batch_size and setup.batch_size_per_gpu and setup.batch_size_per_gpu != wanted.batch_size:
        found.append(f"measured at batch {setup.batch_size_per_gpu} per GPU, not {wanted.batch_size}")
    if row.is_barred:
        found.append(f"its recipe is not ranked by compare: {row.validity.failures[0]}")
    return found

"""How a workload could be trained: the configurations that a recommendation chooses from, each with its rate.

They are those of the rows on an instance type, and every recipe that was measured anywhere on every instance
type whose memory holds it.
"""

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fastlaunch.analysis.compare import Comparison, Row
from fastlaunch.analysis.convergence import at_end
from fastlaunch.analysis.pooling import STEP, data_of, samples_per_step
from fastlaunch.analysis.pricing import accelerator_of
from fastlaunch.analysis.rate import (
    Finder,
    Query,
    Rate,
    Subject,
    gpu_of,
    micro_batch,
    precision_of,
    whole,
)
from fastlaunch.analysis.statistics import mean_of
from fastlaunch.analysis.target import LOSS, MIN_SEEDS, Target, usd_to_target
from fastlaunch.catalog.hardware import Accelerator, InstanceType
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.core.errors import UserError
from fastlaunch.measure.memory import USABLE_MEMORY, memory_line, peaks_by_batch
from fastlaunch.measure.summary import RunSummary, Setup
from fastlaunch_train.recipes.recipes import in_parts, recipe_of
from fastlaunch_train.recipes.requirements import Capabilities, missing_part, parse_version
from fastlaunch_train.recipes.rules import batch_multiple, batch_problem


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A way to train a workload, and its speed."""

    instance: str
    num_nodes: int
    recipe: str
    batch_size_per_gpu: int
    num_gpus: int  # over all nodes
    rate: Rate
    # For as much training as the reference's samples give, such as 1.2 times as many.
    samples_factor: float = 1.0
    assumption: str | None = None  # of that factor

    @property
    def global_batch(self) -> int:
        return self.batch_size_per_gpu * self.num_gpus

    @property
    def samples_per_step(self) -> float:
        """Return samples of a step of all ranks: as its runs counted them, else the global batch."""
        row = self.rate.row
        if row is not None and row.group.measure == STEP and row.setup.recipe == self.recipe:
            return samples_per_step(row.group)
        return float(self.global_batch)


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """What is not among the configurations, and why."""

    instance: str | None  # None for all of them
    recipe: str | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Which configurations the user wants."""

    max_nodes: int = 1
    excluded_recipes: frozenset[str] = frozenset()
    batch_equivalent: bool = False
    allow_unverified: bool = False
    measured_only: bool = False  # no predictions


def samples_to_train_as(reference: Row, comparison: Comparison) -> dict[int, float]:
    """Return how many times the reference's samples rows take to the loss that all its runs reached.

    By `id` of the row; only rows on the same data of which three seeds or more were tried and all got there.
    """
    ends = [loss for run in reference.group.summaries if (loss := _end_loss(run)) is not None]
    if not ends:
        return {}
    results = usd_to_target(comparison, Target(metric=LOSS, value=max(ends)))
    samples = {
        id(result.row): mean * samples_per_step(result.row.group)
        for result in results
        if result.num_reached == result.num_seeds >= MIN_SEEDS
        and (mean := mean_of([float(run.step) for run in result.runs if run.step is not None]))
        and result.row.group.measure == STEP
        and data_of(result.row.group.first) == data_of(reference.group.first)
    }
    own = samples.get(id(reference))
    return {row: number / own for row, number in samples.items()} if own else {}


def _end_loss(run: RunSummary) -> float | None:
    end = at_end(run)
    return end.loss if end else None


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A configuration whose rate is asked for."""

    query: Query
    samples_factor: float = 1.0
    assumption: str | None = None


def configurations(
    finder: Finder,
    subject: Subject,
    rows: Sequence[Row],
    candidates: Sequence[Row],
    reference: Setup | None,
    scope: Scope,
    left_out: list[LeftOut],
    samples_factors: Mapping[int, float],
    instances: Sequence[InstanceType],
    catalogue: Catalogue,
) -> list[Configuration]:
    """Return the ways to train, each with its rate; `left_out` gets what cannot be, or is not wanted.

    rows: all of the workload. candidates: those that are configurations as they are. reference: of the row
    that others have to train like. samples_factors: of rows of other batches, from `samples_to_train_as`.
    """
    known: dict[tuple[object, ...], _Candidate] = {}
    if reference is not None:
        for candidate in _measured(candidates, reference, scope, left_out, samples_factors, catalogue):
            known[_key(candidate.query)] = candidate
    # What cannot be predicted anyway needs no reason.
    reasons = [] if scope.measured_only else left_out
    facts = facts_of(rows, subject, catalogue)
    for query in _queries(subject, facts, instances, catalogue, scope, reasons):
        known.setdefault(_key(query), _Candidate(query=query))
    found = []
    answers = finder.rates([each.query for each in known.values()], predicts=not scope.measured_only)
    for candidate, rate in zip(known.values(), answers, strict=True):
        query = candidate.query
        name = query.instance.name
        if isinstance(rate, str):
            reasons.append(LeftOut(instance=name, recipe=whole(query.recipe)[0], reason=rate))
            continue
        if rate.published is not None:
            figure = rate.published
            reason = (
                f"published at {figure.samples_per_s.value:.4g}/s by {figure.source}: newer runs predict it"
            )
            left_out.append(LeftOut(instance=name, recipe=query.recipe, reason=reason))
        assert query.batch_size_per_gpu is not None
        found.append(
            Configuration(
                instance=name,
                num_nodes=query.num_nodes,
                recipe=query.recipe,
                batch_size_per_gpu=query.batch_size_per_gpu,
                num_gpus=query.num_gpus,
                rate=rate,
                samples_factor=candidate.samples_factor,
                assumption=candidate.assumption,
            )
        )
    return found


def _key(query: Query) -> tuple[object, ...]:
    """Return what two configurations share that are one."""
    return query.instance.name, query.num_nodes, query.recipe, query.batch_size_per_gpu


def _measured(
    rows: Sequence[Row],
    reference: Setup,
    scope: Scope,
    left_out: list[LeftOut],
    samples_factors: Mapping[int, float],
    catalogue: Catalogue,
) -> Iterator[_Candidate]:
    """Yield the workload's rows on an instance type; `left_out` gets the others."""
    for row in rows:
        setup, factor, assumption = row.setup, 1.0, None
        if setup.instance is None:
            continue
        if setup.global_batch != reference.global_batch and not scope.batch_equivalent:
            factor = samples_factors.get(id(row), 0.0)
            assumption = (
                f"global batch {setup.global_batch} takes {factor:.2f} times the samples, as measured"
            )

        def leave(reason: str, setup: Setup = setup) -> None:
            left_out.append(LeftOut(instance=setup.instance, recipe=setup.recipe, reason=reason))

        instance = catalogue.instances.get(setup.instance)
        if _is_excluded(setup.recipe, scope):
            leave("--exclude-recipe")
        elif row.speed.samples_per_s is None or setup.batch_size_per_gpu is None:
            leave("its runs give no samples per second")
        elif row.is_barred:
            leave(f"{row.validity.failures[0]} (--allow-unverified)")
        elif setup.sequence_length != reference.sequence_length:
            leave(f"samples of {setup.sequence_length} tokens, not {reference.sequence_length}")
        elif not factor:
            leave(
                f"global batch {setup.global_batch}, not {reference.global_batch} as {reference.recipe}: a"
                " sample may train less, and no record says how much (--batch-equivalent)"
            )
        elif instance is None or setup.num_gpus != instance.num_accelerators * setup.num_nodes:
            leave(f"ran on {setup.num_gpus} GPUs, which is no whole machine")
        else:
            query = Query(
                instance=instance,
                num_nodes=setup.num_nodes,
                recipe=setup.recipe,
                batch_size_per_gpu=setup.batch_size_per_gpu,
                precision=precision_of(setup),
                sequence_length=setup.sequence_length,
            )
            yield _Candidate(query=query, samples_factor=factor, assumption=assumption)


def _is_excluded(recipe: str, scope: Scope) -> bool:
    return bool(scope.excluded_recipes & {recipe, recipe.split(" ")[0]})


@dataclass(frozen=True, kw_only=True)
class RecipeFacts:
    """What a workload's rows say of a recipe, wherever they ran."""

    recipe: str
    precision: str
    batches: tuple[int, ...] = ()  # per GPU
    # Memory of a GPU: what is there anyhow, and what each sample of a micro-batch adds; None if not known.
    fixed_gib: float = 0.0
    gib_per_sample: float | None = None
    failure: str | None = None  # a guard that its rows failed


def facts_of(rows: Sequence[Row], subject: Subject, catalogue: Catalogue) -> list[RecipeFacts]:
    """Return what is known of each recipe that the workload was measured with; of none, plain bf16."""
    by_recipe: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.speed.samples_per_s is not None and gpu_of(row.setup, catalogue) is not None:
            by_recipe[whole(row.setup.recipe)[0]].append(row)
    if not by_recipe:
        batches = (subject.info.batch_size,) if subject.info else ()
        return [RecipeFacts(recipe="bf16", precision="bf16", batches=batches)]
    facts = []
    for recipe, of_recipe in by_recipe.items():
        fixed, per_sample = _memory_of(of_recipe, subject.params, catalogue)
        facts.append(
            RecipeFacts(
                recipe=recipe,
                precision=precision_of(of_recipe[0].setup),
                batches=tuple(sorted({b for row in of_recipe if (b := row.setup.batch_size_per_gpu)})),
                fixed_gib=fixed,
                gib_per_sample=per_sample,
                failure=next((row.validity.failures[0] for row in of_recipe if row.is_barred), None),
            )
        )
    return facts


def _memory_of(
    rows: Sequence[Row], num_parameters: float | None, catalogue: Catalogue
) -> tuple[float, float | None]:
    """Return GiB that are there anyhow, and GiB per sample, by the rows' peaks; see `memory_line`.

    Without a record of the peak, the GPU's whole memory stands for it.
    """
    micro = [(micro_batch(row.setup.recipe, row.setup.batch_size_per_gpu), row) for row in rows]
    peaks = peaks_by_batch((batch, row.overhead.peak_memory_gib) for batch, row in micro)
    if not peaks:
        for batch, row in micro:
            accelerator = accelerator_of(row.setup, catalogue)
            if batch and accelerator:
                peaks[batch] = accelerator.memory_gib
    return memory_line(peaks, num_parameters) if peaks else (0.0, None)


def _queries(
    subject: Subject,
    facts: Sequence[RecipeFacts],
    instances: Sequence[InstanceType],
    catalogue: Catalogue,
    scope: Scope,
    left_out: list[LeftOut],
) -> Iterator[Query]:
    usable = []
    for each in facts:
        if _is_excluded(each.recipe, scope):
            left_out.append(LeftOut(instance=None, recipe=each.recipe, reason="--exclude-recipe"))
        elif each.failure is not None:
            reason = f"{each.failure} (--allow-unverified)"
            left_out.append(LeftOut(instance=None, recipe=each.recipe, reason=reason))
        else:
            usable.append(each)
    for instance in instances:
        accelerator = catalogue.accelerators[instance.accelerator]

        def leave(recipe: str | None, reason: str, name: str = instance.name) -> None:
            left_out.append(LeftOut(instance=name, recipe=recipe, reason=reason))

        if accelerator.compute_capability is None:
            leave(None, f"{accelerator.name} is no NVIDIA GPU")
            continue
        most_nodes = scope.max_nodes
        if most_nodes > 1 and not instance.num_efa_interfaces:
            leave(None, "several nodes need EFA, which it does not have")
            most_nodes = 1
        for each in usable:
            if lacking := _lacking(each.recipe, accelerator):
                leave(each.recipe, lacking)
                continue
            for num_nodes in range(1, most_nodes + 1):
                num_gpus = num_nodes * instance.num_accelerators
                for batch in _batches(subject, each, num_gpus, scope):
                    part = largest_part(batch, each, accelerator, is_script=subject.info is None)
                    if not part:
                        need_gib = each.fixed_gib + (each.gib_per_sample or 0.0)
                        leave(
                            each.recipe,
                            f"does not fit in memory: {need_gib:.3g} GiB for one sample, of"
                            f" {USABLE_MEMORY * accelerator.memory_gib:.3g} that can be used",
                        )
                        continue
                    recipe = _in_parts(each.recipe, batch // part)
                    if recipe is None:
                        leave(each.recipe, f"a batch of {batch} per GPU does not fit in memory, nor in parts")
                        continue
                    yield Query(
                        instance=instance,
                        num_nodes=num_nodes,
                        recipe=recipe,
                        batch_size_per_gpu=batch,
                        precision=each.precision,
                        sequence_length=subject.sequence_length,
                    )


@functools.cache
def _lacking_at(label: str, capability: str, gpu: str) -> str | None:
    recipe = recipe_of(label)
    if recipe is None:
        return None  # a script's variant: the predictor knows which formats a GPU has
    return missing_part(recipe, Capabilities(compute_capability=parse_version(capability), gpu=gpu))


def _lacking(recipe: str, accelerator: Accelerator) -> str | None:
    return _lacking_at(recipe, accelerator.compute_capability or "", accelerator.name)


def _batches(subject: Subject, facts: RecipeFacts, num_gpus: int, scope: Scope) -> list[int]:
    """Return the batches per GPU to consider: that of the reference's global batch, and others if asked."""
    if subject.info is None:
        return [
            batch
            for batch in facts.batches
            if scope.batch_equivalent or batch * num_gpus == subject.global_batch
        ]
    batches = [] if subject.global_batch % num_gpus else [subject.global_batch // num_gpus]
    return sorted({*batches, *(facts.batches if scope.batch_equivalent else ())})


def largest_part(batch: int, facts: RecipeFacts, accelerator: Accelerator, *, is_script: bool) -> int:
    """Return the largest part of a rank's batch that fits in memory; 0 if not one sample does."""
    if facts.gib_per_sample is None:
        return batch
    room_gib = USABLE_MEMORY * accelerator.memory_gib - facts.fixed_gib
    most = int(room_gib / facts.gib_per_sample)
    if is_script:
        return batch if most >= batch else 0
    return next((part for part in range(min(most, batch), 0, -1) if batch % part == 0), 0)


@functools.cache
def _in_parts(label: str, num_parts: int) -> str | None:
    """Return the recipe's label with so many micro-batches; None for one that cannot have them."""
    if num_parts == 1:
        return label
    recipe = recipe_of(label)
    divided = recipe and in_parts(recipe, num_parts)
    return divided.label if divided else None


def check_memory(query: Query, rows: Sequence[Row], subject: Subject, catalogue: Catalogue) -> str | None:
    """Return in words that it is not known whether a batch fits in the GPU's memory; None if it does.

    rows: of the workload. Raises UserError for a batch that does not fit, by the peaks of the recipe's rows.
    """
    batch_size, (recipe, num_parts) = query.batch_size_per_gpu, whole(query.recipe)
    if batch_size is None:
        return None
    part = batch_size // num_parts
    accelerator = catalogue.accelerators[query.instance.accelerator]
    alike = [row for row in rows if whole(row.setup.recipe)[0] == recipe]
    if any(
        accelerator_of(row.setup, catalogue) == accelerator
        and (micro_batch(row.setup.recipe, row.setup.batch_size_per_gpu) or 0) >= part
        for row in alike
    ):
        return None
    facts = next((each for each in facts_of(alike, subject, catalogue) if each.recipe == recipe), None)
    has_peak = any(row.overhead.peak_memory_gib is not None for row in alike)
    if facts is None or facts.gib_per_sample is None or not has_peak:
        return f"whether a batch of {batch_size} per GPU fits in its memory is not known"
    is_script = subject.info is None
    largest = largest_part(part, facts, accelerator, is_script=is_script)
    if largest == part:
        return None
    room_gib = USABLE_MEMORY * accelerator.memory_gib
    fits = _fitting_batch(query.recipe, num_parts * int((room_gib - facts.fixed_gib) / facts.gib_per_sample))
    if fits is None:
        hint = "take an instance type whose GPUs have more memory"
    elif is_script:
        hint = f"give --batch-size {fits} or less"
    else:
        parts = f"`fastlaunch recommend` predicts it with grad_accumulation={batch_size // largest}"
        hint = f"give --batch-size {fits} or less; {parts}"
    raise UserError(
        f"a batch of {batch_size} per GPU does not fit in the memory of {accelerator.name}: it takes about"
        f" {facts.fixed_gib + part * facts.gib_per_sample:,.0f} GiB, and {room_gib:.3g} can be used",
        hint,
    )


def _fitting_batch(label: str, most: int) -> int | None:
    """Return the largest batch up to `most` that the recipe takes, better one that suits it; None if none."""
    recipe = recipe_of(label)
    parts = recipe.grad_accumulation if recipe else 1
    sizes = [most // each * each for each in ((parts * batch_multiple(recipe), parts) if recipe else (1,))]
    return next((size for size in sizes if size > 0 and not (recipe and batch_problem(recipe, size))), None)

"""The configurations that a recommendation chooses from, each with its rate.

They are the measured rows on an instance type, and every measured recipe on every instance type whose memory
holds it.
"""

import functools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fastlaunch.analysis.compare import Comparison, Row
from fastlaunch.analysis.convergence import at_end
from fastlaunch.analysis.memory import USABLE_MEMORY, Memory, memory_line, peaks_by_batch, what_lacks
from fastlaunch.analysis.pooling import STEP, data_of, samples_per_step
from fastlaunch.analysis.pricing import accelerator_of
from fastlaunch.analysis.rate import (
    Finder,
    Query,
    Rate,
    Subject,
    gpu_of,
    in_one_part,
    label_of,
    precision_of,
    undivided_of,
)
from fastlaunch.analysis.target import LOSS, Target, to_target
from fastlaunch.catalog.hardware import Accelerator, InstanceType
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.core.errors import UserError
from fastlaunch.measure.summary import Setup
from fastlaunch_train.recipes.recipe import Recipe
from fastlaunch_train.recipes.recipes import RECIPES, in_parts
from fastlaunch_train.recipes.rules import batch_multiple, batch_problem


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A way to train a workload, and its speed."""

    query: Query
    rate: Rate
    # Samples for the same training, relative to the reference, such as 1.2 times as many.
    samples_factor: float = 1.0
    assumption: str | None = None  # behind that factor

    @property
    def instance(self) -> str:
        return self.query.instance.name

    @property
    def recipe(self) -> str:
        """The label of its recipe, or of a script's variant."""
        return label_of(self.query.recipe)

    @property
    def global_batch(self) -> int:
        assert self.query.global_batch is not None
        return self.query.global_batch

    @property
    def samples_per_step(self) -> float:
        """Samples per step over all ranks, as its runs counted them, else the global batch."""
        row = self.rate.row
        if row is not None and row.group.measure == STEP and row.setup.recipe == self.recipe:
            return samples_per_step(row.group)
        return float(self.global_batch)


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """An instance type or recipe that is left out, and the reason."""

    instance: str | None  # None for all of them
    recipe: str | None
    reason: str
    purchase: str | None = None  # the option by which its cost cannot be told, if that is the reason
    hint: str | None = None  # what to do about that
    # Options of `submit` with which the training fits in the GPU's memory; None unless that is the reason.
    fits: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Scope:
    """Which configurations the user wants."""

    max_nodes: int = 1
    excluded_recipes: frozenset[str] = frozenset()
    batch_equivalent: bool = False
    measured_only: bool = False  # no predictions


def samples_to_train_as(reference: Row, comparison: Comparison) -> dict[int, float]:
    """Return each row's samples to the loss that all reference runs reached, relative to the reference's.

    Keys are the rows' `id`. Only rows on the same data whose three or more seeds all reached the loss count.
    """
    ends = [end.loss for run in reference.group.summaries if (end := at_end(run)) and end.loss is not None]
    if not ends:
        return {}
    results = to_target(comparison, Target(metric=LOSS, value=max(ends)))
    samples = {
        id(result.row): result.samples.value
        for result in results
        if result.samples
        and result.row.group.measure == STEP
        and data_of(result.row.group.first) == data_of(reference.group.first)
    }
    of_reference = samples.get(id(reference))
    return {row: number / of_reference for row, number in samples.items()} if of_reference else {}


#: The most options to name in a hint.
_MOST_NAMED = 3
#: A query, the factor of its samples, and the assumption behind that.
_Candidate = tuple[Query, float, str | None]


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
    """Return the configurations with their rates; add impossible and excluded ones to `left_out`.

    rows: all rows of the workload. candidates: rows that are configurations themselves. reference: the setup
    that configurations must train like. samples_factors: for rows of other batches, by `samples_to_train_as`.
    """
    known: dict[tuple[object, ...], _Candidate] = {}
    if reference is not None:
        measured = _measured(
            candidates, reference, subject.sequence_length, scope, left_out, samples_factors, catalogue
        )
        for candidate in measured:
            known[_key(candidate[0])] = candidate
    # A configuration that cannot be predicted anyway needs no reason.
    reasons = [] if scope.measured_only else left_out
    facts = facts_of(rows, subject, catalogue)
    for query in _queries(subject, facts, instances, catalogue, scope, reasons):
        known.setdefault(_key(query), (query, 1.0, None))
    kept = []
    answers = finder.rates([query for query, _, _ in known.values()], predicts=not scope.measured_only)
    for (query, factor, assumption), rate in zip(known.values(), answers, strict=True):
        name = query.instance.name
        if isinstance(rate, str):
            reasons.append(LeftOut(instance=name, recipe=query.undivided, reason=rate))
            continue
        if rate.published is not None:
            figure = rate.published
            reason = (
                f"published at {figure.samples_per_s.value:.4g}/s by {figure.source}: newer runs predict it"
            )
            left_out.append(LeftOut(instance=name, recipe=label_of(query.recipe), reason=reason))
        kept.append(Configuration(query=query, rate=rate, samples_factor=factor, assumption=assumption))
    return kept


def _key(query: Query) -> tuple[object, ...]:
    """Return the key by which two configurations are the same."""
    return query.instance.name, query.num_nodes, query.recipe, query.batch_size_per_gpu


def _measured(
    rows: Sequence[Row],
    reference: Setup,
    sequence_length: int | None,
    scope: Scope,
    left_out: list[LeftOut],
    samples_factors: Mapping[int, float],
    catalogue: Catalogue,
) -> Iterator[_Candidate]:
    """Yield the rows that ran on an instance type; add the others to `left_out`."""
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
        recipe = setup.known_recipe or setup.recipe
        if _is_excluded(recipe, scope):
            leave("--exclude-recipe")
        elif row.speed.samples_per_s is None or setup.batch_size_per_gpu is None:
            leave("its runs give no samples per second")
        elif row.is_barred:
            leave(f"{row.validity.failures[0]} (--allow-unverified)")
        elif setup.sequence_length != sequence_length:
            leave(f"samples of {setup.sequence_length} tokens, not {sequence_length}")
        elif not factor:
            leave(
                f"global batch {setup.global_batch}, not {reference.global_batch} as {reference.recipe}: a"
                " sample may train less, and no record says how much (--batch-equivalent)"
            )
        elif instance is None or setup.num_gpus != instance.num_accelerators * setup.num_nodes:
            leave(f"ran on {setup.num_gpus} GPUs, not on whole machines")
        else:
            query = Query(
                instance=instance,
                num_nodes=setup.num_nodes,
                recipe=recipe,
                batch_size_per_gpu=setup.batch_size_per_gpu,
                precision=precision_of(setup),
                sequence_length=setup.sequence_length,
            )
            yield query, factor, assumption


def _is_excluded(recipe: Recipe | str, scope: Scope) -> bool:
    names = {recipe} if isinstance(recipe, str) else {recipe.label, recipe.name}
    return bool(scope.excluded_recipes & names)


@dataclass(frozen=True, kw_only=True)
class RecipeFacts:
    """What a workload's rows show about a recipe, on any machine."""

    recipe: Recipe | str  # undivided
    precision: str
    batches: tuple[int, ...] = ()  # per GPU
    # GPU memory: a fixed part, and a part per sample of a micro-batch; None if unknown.
    fixed_gib: float = 0.0
    gib_per_sample: float | None = None
    memory: Memory | None = None  # as reckoned, if no run has a peak
    failure: str | None = None  # the check that its rows failed
    instead_of: str | None = None  # the recipe's label where this one is weighed only if that does not fit

    def on(self, subject: Subject, num_gpus: int) -> "RecipeFacts":
        """Return the facts for so many GPUs, which may share what is held."""
        if self.memory is None:
            return self
        fixed, per_sample = self.memory.line(subject.sequence_length or 0, num_gpus)
        return replace(self, fixed_gib=fixed, gib_per_sample=per_sample)


def facts_of(rows: Sequence[Row], subject: Subject, catalogue: Catalogue) -> list[RecipeFacts]:
    """Return the facts of each measured recipe and of those to weigh without, or else of plain bf16."""
    by_recipe: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.speed.samples_per_s is not None and gpu_of(row.setup, catalogue) is not None:
            by_recipe[undivided_of(row.setup)].append(row)
    facts = []
    for label, of_recipe in by_recipe.items():
        known = of_recipe[0].setup.known_recipe
        recipe = (known and in_parts(known, 1)) or label
        memory = subject.tuning.memory_of(recipe) if subject.tuning and isinstance(recipe, Recipe) else None
        fixed, per_sample = _memory_of(of_recipe, subject, memory, catalogue)
        facts.append(
            RecipeFacts(
                recipe=recipe,
                precision=precision_of(of_recipe[0].setup),
                batches=tuple(sorted({b for row in of_recipe if (b := row.setup.batch_size_per_gpu)})),
                fixed_gib=fixed,
                gib_per_sample=per_sample,
                memory=memory if per_sample is None else None,
                failure=next((row.validity.failures[0] for row in of_recipe if row.is_barred), None),
            )
        )
    weighed = subject.tuning.recipes if subject.tuning else () if by_recipe else (RECIPES["bf16"],)
    unmeasured = dict.fromkeys(recipe for recipe in weighed if recipe.label not in by_recipe)
    return facts + [_unmeasured(recipe, subject) for recipe in unmeasured]


def _unmeasured(recipe: Recipe, subject: Subject) -> RecipeFacts:
    return RecipeFacts(
        recipe=recipe,
        precision=recipe.precision,
        batches=(subject.info.batch_size,) if subject.info else (),
        memory=subject.tuning.memory_of(recipe) if subject.tuning else None,
        instead_of=recipe.name if recipe != RECIPES[recipe.name] else None,
    )


def _memory_of(
    rows: Sequence[Row], subject: Subject, memory: Memory | None, catalogue: Catalogue
) -> tuple[float, float | None]:
    """Return fixed GiB, and GiB per sample, by the rows' peaks; see `memory_line`.

    Without a recorded peak the memory is as reckoned, if it is, or the GPU's whole memory.
    """
    rows = [row for row in rows if memory is None or row.setup.sequence_length == subject.sequence_length]
    peaks = peaks_by_batch((row.setup.micro_batch, row.overhead.peak_memory_gib) for row in rows)
    if not peaks and memory is None:
        for row in rows:
            batch = row.setup.micro_batch
            accelerator = accelerator_of(row.setup, catalogue)
            if batch and accelerator:
                peaks[batch] = accelerator.memory_gib
    return memory_line(peaks, subject.params, memory) if peaks else (0.0, None)


def _is_of_several_gpus(facts: RecipeFacts) -> bool:
    """Return whether the recipe names what several GPUs exchange or share, which one GPU does not do."""
    fields, recipe = {"ddp_bucket_mb", "overlap_comm", "wire_dtype"}, facts.recipe
    is_shared = facts.memory is not None and facts.memory.is_sharded
    return is_shared or (isinstance(recipe, Recipe) and not fields.isdisjoint(dict(recipe.overrides)))


def _queries(
    subject: Subject,
    facts: Sequence[RecipeFacts],
    instances: Sequence[InstanceType],
    catalogue: Catalogue,
    scope: Scope,
    left_out: list[LeftOut],
) -> Iterator[Query]:
    def leave(
        instance: str | None, recipe: str | None, reason: str, fits: tuple[str, ...] | None = None
    ) -> None:
        left_out.append(LeftOut(instance=instance, recipe=recipe, reason=reason, fits=fits))

    usable = []
    for recipe_facts in facts:
        if _is_excluded(recipe_facts.recipe, scope):
            leave(None, label_of(recipe_facts.recipe), "--exclude-recipe")
        elif recipe_facts.failure is not None:
            leave(None, label_of(recipe_facts.recipe), f"{recipe_facts.failure} (--allow-unverified)")
        else:
            usable.append(recipe_facts)
    for instance in instances:
        name, accelerator = instance.name, catalogue.accelerators[instance.accelerator]
        if accelerator.compute_capability is None:
            leave(name, None, f"{accelerator.name} is not an NVIDIA GPU")
            continue
        most_nodes = scope.max_nodes
        if most_nodes > 1 and not instance.num_efa_interfaces:
            leave(name, None, "several nodes need EFA, which it does not have")
            most_nodes = 1
        fitting: set[tuple[str | None, int]] = set()  # recipes by label, and nodes
        for facts_of_recipe in usable:
            recipe_facts = facts_of_recipe
            label = label_of(recipe_facts.recipe)
            # For a script's variant, the predictor checks the GPU's formats.
            if lacking := isinstance(recipe_facts.recipe, Recipe) and what_lacks(
                recipe_facts.recipe, accelerator
            ):
                leave(name, label, lacking)
                continue
            for num_nodes in range(1, most_nodes + 1):
                num_gpus = num_nodes * instance.num_accelerators
                if num_gpus == 1 and _is_of_several_gpus(recipe_facts):
                    continue
                recipe_facts = facts_of_recipe.on(subject, num_gpus)
                if (recipe_facts.instead_of, num_nodes) in fitting:
                    continue
                for batch in _batches(subject, recipe_facts, num_gpus, scope):
                    part = largest_part(batch, recipe_facts, accelerator, is_script=subject.info is None)
                    if not part:
                        need_gib = recipe_facts.fixed_gib + (recipe_facts.gib_per_sample or 0.0)
                        leave(
                            name,
                            label,
                            f"does not fit in memory: one sample needs {need_gib:.3g} GiB, and"
                            f" {USABLE_MEMORY * accelerator.memory_gib:.3g} can be used",
                            subject.tuning.what_fits(label, accelerator, num_gpus)
                            if subject.tuning
                            else None,
                        )
                        continue
                    recipe = _in_parts(recipe_facts.recipe, batch // part)
                    if recipe is None:
                        leave(name, label, f"a batch of {batch} per GPU does not fit in memory, nor in parts")
                        continue
                    if isinstance(recipe, Recipe) and (
                        problem := batch_problem(recipe, batch, subject.sequence_length)
                    ):
                        leave(name, label, f"{problem[0]} (per GPU, on {num_gpus} GPUs)")
                        continue
                    fitting.add((label, num_nodes))
                    yield Query(
                        instance=instance,
                        num_nodes=num_nodes,
                        recipe=recipe,
                        batch_size_per_gpu=batch,
                        precision=recipe_facts.precision,
                        sequence_length=subject.sequence_length,
                    )


def _batches(subject: Subject, facts: RecipeFacts, num_gpus: int, scope: Scope) -> list[int]:
    """Return the batches per GPU to consider: the reference's global batch, and others on request."""
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
def _in_parts(recipe: Recipe | str, num_parts: int) -> Recipe | str | None:
    """Return the recipe with `num_parts` micro-batches; None if it cannot have them."""
    if num_parts == 1:
        return recipe
    return None if isinstance(recipe, str) else in_parts(recipe, num_parts)


def check_memory(query: Query, rows: Sequence[Row], subject: Subject, catalogue: Catalogue) -> str | None:
    """Return a note if it is unknown whether the batch fits in the GPU's memory; None if it fits.

    rows: the workload's. Raises UserError if the peaks of the recipe's rows show that it does not fit.
    """
    batch_size, part = query.batch_size_per_gpu, query.micro_batch
    if subject.tuning and batch_size is None:
        batch_size = part = 1  # the least that a search for a batch tries
    if batch_size is None or part is None:
        return None
    accelerator = catalogue.accelerators[query.instance.accelerator]
    alike = [row for row in rows if undivided_of(row.setup) == query.undivided]
    if any(
        accelerator_of(row.setup, catalogue) == accelerator and (row.setup.micro_batch or 0) >= part
        for row in alike
    ):
        return None
    known = facts_of(alike, subject, catalogue)
    facts = next((facts for facts in known if label_of(facts.recipe) == query.undivided), None)
    whole = in_one_part(query.recipe)
    if facts is None and isinstance(whole, Recipe):
        facts = _unmeasured(whole, subject)
    has_peak = any(row.overhead.peak_memory_gib is not None for row in alike)
    if facts is not None:
        has_peak = has_peak or facts.memory is not None
        facts = facts.on(subject, query.num_gpus)
    if facts is None or facts.gib_per_sample is None or not has_peak:
        return f"it is not known whether a batch of {batch_size} per GPU fits in its memory"
    is_script = subject.info is None
    largest = largest_part(part, facts, accelerator, is_script=is_script)
    if largest == part:
        return None
    room_gib = USABLE_MEMORY * accelerator.memory_gib
    most = query.num_parts * int((room_gib - facts.fixed_gib) / facts.gib_per_sample)
    fits = _fitting_batch(query.recipe, most)
    options = subject.tuning and subject.tuning.what_fits(query.undivided, accelerator, query.num_gpus)
    if fits is None and options:
        hint = f"give one of `{'`, `'.join(options[:_MOST_NAMED])}`, or take GPUs with more memory"
    elif fits is None:
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


def _fitting_batch(recipe: Recipe | str, most: int) -> int | None:
    """Return the largest batch up to `most` that the recipe accepts, preferring suitable multiples."""
    if isinstance(recipe, str):
        return most if most > 0 else None
    parts = recipe.grad_accumulation
    sizes = [most // multiple * multiple for multiple in (parts * batch_multiple(recipe), parts)]
    return next((size for size in sizes if size > 0 and not batch_problem(recipe, size)), None)

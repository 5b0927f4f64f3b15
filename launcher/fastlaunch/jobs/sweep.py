"""A sweep's cells: instance type x recipe x batch size, what is left out and why, and each type's options."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fastlaunch.catalog.prices import Catalogue
from fastlaunch.core.conventions import FIRST_LOOK
from fastlaunch.core.errors import UserError
from fastlaunch.jobs.build import CPU_WORKLOAD, FEWEST_TIMED_STEPS, GPU_WORKLOAD, instances_of
from fastlaunch.jobs.machine import Machine
from fastlaunch.jobs.options import Options
from fastlaunch.jobs.scripts import scripts_of
from fastlaunch.jobs.spec import Variant
from fastlaunch.jobs.variants import missing_on, problem_on, variants_of

AUTO = "auto"
#: The search for the batch size takes a few steps, and its machine at most this long.
SEARCH_MINUTES = 60
#: The part of a sweep on this machine.
HERE = "this machine"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A row of the matrix."""

    #: As it was typed; None for this machine.
    instance: str | None
    #: The label of the recipe, or of a script's variant.
    label: str
    #: A number or `auto`; None for the workload's own, and for a script.
    batch_size: int | str | None
    #: Why it is left out, if it is.
    skipped: str | None = None


@dataclass(frozen=True, kw_only=True)
class SweptType:
    """What a sweep does on one instance type, or on this machine."""

    cells: tuple[Cell, ...]
    #: For the cells that can run; None if none can.
    options: Options | None

    @property
    def num_rounds(self) -> int:
        """The most rounds of its runs; 0 if none can run."""
        return 0 if self.options is None else self.options.planned_rounds or self.options.num_repeats

    @property
    def is_until_best(self) -> bool:
        return self.options is not None and self.options.until_best

    @property
    def num_runs(self) -> int:
        """The most runs."""
        return self.num_rounds * sum(cell.skipped is None for cell in self.cells)


def types_on_aws(options: Options, catalogue: Catalogue) -> dict[str, SweptType]:
    """Return what to do on each instance type, by its name as typed. Raises UserError if none runs a cell."""
    instances = zip(options.instances, instances_of(options, catalogue), strict=True)
    if options.command is not None:
        return {name: _swept_script(name, options) for name, _ in instances}
    variants = variants_of(options, GPU_WORKLOAD)
    types = {}
    for name, instance in instances:
        problems = [problem_on(instance, each, options, catalogue, variants=(each,)) for each in variants]
        why = [problem.message if problem else None for problem in problems]
        types[name] = _swept(name, options, variants, why)
    return _checked(types)


def types_here(options: Options, machine: Machine, catalogue: Catalogue | None) -> dict[str, SweptType]:
    """Return what to do on this machine. Raises UserError if it runs no cell."""
    if options.command is not None:
        return {HERE: _swept_script(None, options)}
    variants = variants_of(options, GPU_WORKLOAD if machine.devices else CPU_WORKLOAD)
    kinds = machine.capabilities(catalogue)
    why = [missing_on(each.recipe, kinds) for each in variants]
    return _checked({HERE: _swept(None, options, variants, why)})


def _swept_script(instance: str | None, options: Options) -> SweptType:
    """Return the variants of the command as cells."""
    labels = [script.label for script in scripts_of(options)]
    options = _on(instance, options)
    cells = tuple(Cell(instance=instance, label=label, batch_size=None) for label in labels)
    return SweptType(cells=cells, options=_with_rounds(options, len(cells)))


def _swept(
    instance: str | None, options: Options, variants: Sequence[Variant], why: Sequence[str | None]
) -> SweptType:
    """Return the variants as cells. why: each is left out, or None."""
    cells = tuple(
        Cell(instance=instance, label=each.recipe.label, batch_size=each.batch_size, skipped=problem)
        for each, problem in zip(variants, why, strict=True)
    )
    left = [each.recipe.name for each, problem in zip(variants, why, strict=True) if problem is None]
    kept = replace(_on(instance, options), recipes=tuple(dict.fromkeys(left)))
    return SweptType(cells=cells, options=_with_rounds(kept, len(left)) if left else None)


def _on(instance: str | None, options: Options) -> Options:
    return options if instance is None else replace(options, instances=(instance,))


def _with_rounds(options: Options, num_cells: int) -> Options:
    """Return the options; a cell that has no other beside it is repeated as often as is looked at first.

    With `until_best`, in which it competes with those of other machines, at most as often as they are.
    """
    if num_cells > 1 or not options.until_resolved:
        return options
    repeats = (options.planned_rounds or 1) if options.until_best else FIRST_LOOK
    return replace(options, until_resolved=False, max_rounds=None, repeats=repeats)


def _checked(types: dict[str, SweptType]) -> dict[str, SweptType]:
    if any(each.options for each in types.values()):
        return types
    reasons = dict.fromkeys(str(cell.skipped) for each in types.values() for cell in each.cells)
    raise UserError(f"no cell can run: {'; '.join(reasons)}", "name other recipes or instance types")


def searches(types: Mapping[str, SweptType], options: Options, catalogue: Catalogue) -> dict[str, Options]:
    """Return the options of the runs that find the batch size for `auto`, by instance type.

    Each recipe is fitted where a GPU has the least memory, of the types that run it, the first of equals. So
    one run fits them all, and the smallest of what several find, unless a recipe takes more on a larger GPU.
    """
    memory_gib = {
        name: catalogue.accelerator_of(instance.name).memory_gib
        for name, instance in zip(options.instances, instances_of(options, catalogue), strict=True)
    }
    left = {name for each in types.values() if each.options for name in each.options.recipes}
    found = {}
    for name in sorted(types, key=lambda name: memory_gib[name]):
        swept = types[name].options
        if swept and (fits := tuple(recipe for recipe in swept.recipes if recipe in left)):
            found[name] = search_options(replace(swept, recipes=fits))
            left -= {*fits}
    return found


def search_options(options: Options) -> Options:
    """Return the options of the short run that finds the largest batch that fits all recipes of `options`."""
    return replace(
        options,
        batch_sizes=(),
        batch_size=AUTO,
        max_minutes=min(SEARCH_MINUTES, options.max_minutes),
        steps=FEWEST_TIMED_STEPS,
        epochs=None,
        repeats=1,
        until_resolved=False,
        max_rounds=None,
        eval_every=None,
        step_profile=False,
    )


def with_batch(options: Options, batch_size: int | None) -> Options:
    """Return the options with the batch size that was found in place of `auto`, each size once."""
    if batch_size is None:
        return options
    sizes = dict.fromkeys(batch_size if size == AUTO else size for size in options.batch_sizes)
    return replace(options, batch_sizes=tuple(sizes))

"""A sweep's cells: instance type x recipe x batch size, what is left out and why, and each type's options."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fastlaunch.catalog.prices import Catalogue
from fastlaunch.core.conventions import FIRST_LOOK
from fastlaunch.core.errors import UserError
from fastlaunch.jobs.build import CPU_WORKLOAD, FEWEST_TIMED_STEPS, GPU_WORKLOAD, instances_of
from fastlaunch.jobs.machine import Machine
from fastlaunch.jobs.options import CloudOptions, SubmitOptions, Variant
from fastlaunch.jobs.scripts import script_specs
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
    #: Of the recipe, or of a script's variant.
    label: str
    #: A number or `auto`; None for the workload's own, and for a script.
    batch_size: int | str | None
    #: Why it is left out, if it is.
    skipped: str | None = None


@dataclass(frozen=True, kw_only=True)
class SweptType:
    """What a sweep does on one instance type, or on this machine."""

    cells: tuple[Cell, ...]
    #: Of the cells that can run; None if none can.
    options: SubmitOptions | None

    @property
    def num_rounds(self) -> int:
        """The most rounds of its runs; 0 if none can run."""
        return 0 if self.options is None else self.options.planned_rounds or self.options.repeats

    @property
    def num_runs(self) -> int:
        """The most runs."""
        return self.num_rounds * sum(cell.skipped is None for cell in self.cells)


def types_on_aws(options: SubmitOptions, cloud: CloudOptions, catalogue: Catalogue) -> dict[str, SweptType]:
    """Return what to do on each instance type, by its name as typed. Raises UserError if none runs a cell."""
    variants = variants_of(options, GPU_WORKLOAD)
    types = {}
    for name, instance in zip(cloud.instances, instances_of(cloud, catalogue), strict=True):
        problems = [problem_on(instance, each, cloud, catalogue, variants=(each,)) for each in variants]
        why = [problem.message if problem else None for problem in problems]
        types[name] = _swept(name, options, variants, why)
    return _checked(types)


def types_here(options: SubmitOptions, machine: Machine, catalogue: Catalogue | None) -> dict[str, SweptType]:
    """Return what to do on this machine. Raises UserError if it runs no cell."""
    if options.command is not None:
        labels = [spec.label for spec in script_specs(options, machine)]
        cells = tuple(Cell(instance=None, label=label, batch_size=None) for label in labels)
        return {HERE: SweptType(cells=cells, options=_with_rounds(options, len(cells)))}
    variants = variants_of(options, GPU_WORKLOAD if machine.devices else CPU_WORKLOAD)
    kinds = machine.capabilities(catalogue)
    why = [missing_on(each.recipe, kinds) for each in variants]
    return _checked({HERE: _swept(None, options, variants, why)})


def _swept(
    instance: str | None, options: SubmitOptions, variants: Sequence[Variant], why: Sequence[str | None]
) -> SweptType:
    """Return the variants as cells. why: each is left out, or None."""
    cells = tuple(
        Cell(instance=instance, label=each.recipe.label, batch_size=each.batch_size, skipped=problem)
        for each, problem in zip(variants, why, strict=True)
    )
    left = [each.recipe.name for each, problem in zip(variants, why, strict=True) if problem is None]
    kept = replace(options, recipes=tuple(dict.fromkeys(left)))
    return SweptType(cells=cells, options=_with_rounds(kept, len(left)) if left else None)


def _with_rounds(options: SubmitOptions, num_cells: int) -> SubmitOptions:
    """Return the options; a cell that has no other beside it is repeated as often as is looked at first."""
    if num_cells > 1 or not options.until_resolved:
        return options
    return replace(options, until_resolved=False, max_rounds=None, repeats=FIRST_LOOK)


def _checked(types: dict[str, SweptType]) -> dict[str, SweptType]:
    if any(each.options for each in types.values()):
        return types
    reasons = dict.fromkeys(str(cell.skipped) for each in types.values() for cell in each.cells)
    raise UserError(f"no cell can run: {'; '.join(reasons)}", "name other recipes or instance types")


def smallest(types: Mapping[str, SweptType], cloud: CloudOptions, catalogue: Catalogue) -> str:
    """Return which instance type that runs a cell has the least memory on a GPU, the first of equals."""
    memory_gib = {
        name: catalogue.accelerator_of(instance.name).memory_gib
        for name, instance in zip(cloud.instances, instances_of(cloud, catalogue), strict=True)
        if types[name].options
    }
    return min(memory_gib, key=lambda name: memory_gib[name])


def search_options(options: SubmitOptions) -> SubmitOptions:
    """Return the options of the short run that finds the largest batch that fits all recipes of `options`."""
    return replace(
        options,
        batch_sizes=(),
        batch_size=AUTO,
        steps=FEWEST_TIMED_STEPS,
        epochs=None,
        repeats=1,
        until_resolved=False,
        max_rounds=None,
        eval_every=None,
    )


def with_batch(options: SubmitOptions, batch_size: int | None) -> SubmitOptions:
    """Return the options with the batch size that was found in place of `auto`, each size once."""
    if batch_size is None:
        return options
    sizes = dict.fromkeys(batch_size if size == AUTO else size for size in options.batch_sizes)
    return replace(options, batch_sizes=tuple(sizes), memory_budget=None)

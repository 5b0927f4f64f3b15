"""Commands for what a comparison still lacks: more runs for a verdict, or an instance to charge."""

import shlex
from collections.abc import Sequence
from fractions import Fraction

from fastlaunch.analysis.compare import Row
from fastlaunch.analysis.pooling import newest_version
from fastlaunch.analysis.pricing import ChargedAs, PriceRequest
from fastlaunch.analysis.suggest import next_seed, place_of, submit_command
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.measure.summary import Setup


def more_runs_command(rows: Sequence[Row], *, own_region: str) -> str | None:
    """Return the command for the first row whose verdict needs more runs, or None.

    It also runs the row's baseline if the two differ only in the recipe.
    """
    for row in rows:
        if row.verdict.more_rounds is None or row.setup.instance is not None or row.setup.num_nodes > 1:
            continue
        base = next(
            other for other in rows if other.setup.workload == row.setup.workload and other.is_baseline
        )
        if row.setup.is_script:
            runs = [run for other in rows if other.setup.workload == row.setup.workload for run in other.runs]
            is_still_there = row.setup.version == newest_version(runs)
            if row.runs[0].script and is_still_there:
                is_same = (base.runs[0].script, base.setup.version) == (row.runs[0].script, row.setup.version)
                is_same = is_same and base is not row
                return script_command([base, row] if is_same else [row], row.verdict.more_rounds or 1)
            continue
        is_pair = _terms(base.setup) == _terms(row.setup) and base.setup.recipe != row.setup.recipe
        return submit_command(
            [run.summary for run in row.runs],
            [of.setup.known_recipe or of.setup.recipe for of in ((base, row) if is_pair else (row,))],
            place=place_of(row.runs[0], own_region=own_region),
            # Choose unused seeds; a used seed would not form a new pair.
            first_seed=next_seed([run.summary for of in (base, row) for run in of.runs]),
            repeats=row.verdict.more_rounds or 1,
        )
    return None


def script_command(rows: Sequence[Row], repeats: int, *, place: Sequence[str] = ("--local",)) -> str:
    """Return the command that runs the rows' common script again. place: options that say where.

    If the rows differ in several texts, it makes every combination of them.
    """
    words = [*place]
    for name in rows[-1].setup.variant:
        texts = dict.fromkeys(of.setup.variant[name] for of in rows)
        words += ["-L", f"{name}={','.join(texts)}"]
    if repeats > 1:
        words += ["--repeats", str(repeats)]
    return shlex.join(["fastlaunch", "submit", *words, *rows[-1].runs[0].script])


def _terms(setup: Setup) -> tuple[object, ...]:
    """Return the settings that one command gives to all its recipes."""
    recipe = setup.known_recipe
    overrides = recipe.overrides if recipe else ()
    return overrides, setup.batch_size_per_gpu, setup.num_gpus, setup.data, setup.sequence_length


def instances_to_charge(rows: Sequence[Row], request: PriceRequest, catalogue: Catalogue) -> list[ChargedAs]:
    """Return instances at whose prices all unpriced `rows` can be charged; empty if some row cannot."""
    kinds = dict.fromkeys((row.setup.device_name, row.setup.num_gpus // row.setup.num_nodes) for row in rows)
    charges = [_cheapest_with(device_name, num, request, catalogue) for device_name, num in kinds]
    known = dict.fromkeys(charge for charge in charges if charge is not None)
    return [] if None in charges else list(known)


def _cheapest_with(
    device_name: str | None, num_gpus: int, request: PriceRequest, catalogue: Catalogue
) -> ChargedAs | None:
    """Return the cheapest instance with `num_gpus` of the GPU, else a share of one, or None."""
    device = catalogue.accelerator_of_device(device_name) if device_name else None
    offers = []
    for instance in catalogue.instances.values():
        if device is None or catalogue.accelerator_of(instance.name) != device:
            continue
        price = catalogue.find_price(instance.name, region=request.region, on=request.as_of or request.today)
        if price is not None and instance.num_accelerators >= num_gpus:
            offers.append((instance.num_accelerators != num_gpus, price.usd_per_hour, instance))
    if not offers:
        return None
    is_part, _, instance = min(offers, key=lambda offer: offer[:2])
    return ChargedAs(
        instance=instance.name, share=Fraction(num_gpus, instance.num_accelerators) if is_part else None
    )

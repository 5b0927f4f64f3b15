"""The command that makes more runs like some, at seeds that none of them has."""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

from fastlaunch.analysis.convergence import curve
from fastlaunch.analysis.cost import ChargedAs, PriceRequest
from fastlaunch.analysis.pooling import MeasuredRun
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.measure.summary import RunSummary, Setup
from fastlaunch_train.workloads.registry import WorkloadError, workload_info

if TYPE_CHECKING:
    from fastlaunch.analysis.compare import Row

#: On spot `submit` asks for the steps between checkpoints. For runs that made none we propose a quarter of
#: their steps, and at most this, as `submit` does.
_MOST_BETWEEN_CHECKPOINTS = 500


@dataclass(frozen=True, kw_only=True)
class Place:
    """How an instance was rented."""

    service: str  # `ec2` or `sagemaker`
    region: str | None  # None for the user's own
    purchase: str


def place_of(run: MeasuredRun, *, own_region: str) -> Place:
    """Return the place that was requested for `run`. own_region: the user's, the default of `submit`."""
    service, region, purchase = run.requested_offer
    return Place(service=service, region=None if region == own_region else region, purchase=purchase)


def next_seed(runs: Iterable[RunSummary]) -> int:
    """Return the first seed after all those of `runs`."""
    return max((run.seed for run in runs if run.seed is not None), default=-1) + 1


def seeds(first: int, number: int) -> str:
    """Return the options of `submit` for `number` runs, of the seeds from `first` on."""
    return f"--seed {first} --repeats {number}"


def submit_command(
    runs: Sequence[RunSummary], recipes: Sequence[str], *, place: Place, first_seed: int, repeats: int
) -> str:
    """Return the command that makes `repeats` more runs like `runs` of each of `recipes`.

    recipes: labels that share their overrides. place: of the runs' instance, if they had one. Records do not
    say where data lie, nor which capacity block it was: the user fills in PATH and cr-....
    """
    like = runs[0]
    names = [label.split()[0] for label in recipes]
    words = ["--local"] if like.setup.instance is None else list(_rented(runs, like.setup.instance, place))
    words += ["--workload", like.setup.workload, "--recipe", ",".join(names)]
    for override in recipes[0].split()[1:]:
        words += ["--set", override]
    words += ["--batch-size", str(like.setup.batch_size_per_gpu)]
    if like.setup.instance is None and (like.setup.num_gpus > 1 or _is_of_gpu(like)):
        words += ["--nproc", str(like.setup.num_gpus)]
    if like.setup.data not in ("synthetic", "published"):
        is_path = like.setup.data in ("folder", "file")
        words += ["--data", f"{like.setup.data}:PATH" if is_path else like.setup.data]
    if (num_workers := like.setup.fingerprint.get("num_data_workers")) is not None:
        words += ["--num-workers", num_workers]
    if (model := like.setup.fingerprint.get("model")) is not None:
        words += ["--model", model]
    if like.setup.sequence_length is not None and _takes_a_length(like.setup.workload):
        words += ["--sequence-length", str(like.setup.sequence_length)]
    if num_steps := max(run.num_steps for run in runs):
        words += ["--steps", str(num_steps)]
    if period := _evaluates_every(runs):
        words += ["--eval-every", str(period)]
    return f"fastlaunch submit {shlex.join(words)} {seeds(first_seed, repeats)}"


def _rented(runs: Sequence[RunSummary], instance: str, place: Place) -> Iterator[str]:
    """Yield the options that rent such machines again."""
    # `submit` tells the service by the prefix, which records leave out.
    yield from ("--instance", f"ml.{instance}" if place.service == "sagemaker" else instance)
    if place.region is not None:
        yield from ("--region", place.region)
    if place.purchase != "on-demand":
        yield from ("--purchase", place.purchase)
    if place.purchase == "capacity-block":
        yield from ("--reservation", "cr-...")
    if place.purchase == "spot":
        yield from ("--checkpoint-every", str(_saves_every(runs)))
    # Only with an instance: --local knows no nodes, and as many processes on one machine train alike.
    if runs[0].setup.num_nodes > 1:
        yield from ("--num-nodes", str(runs[0].setup.num_nodes))


def _saves_every(runs: Sequence[RunSummary]) -> int:
    """Return the steps between checkpoints, of the first run that made some; else what `submit` proposes."""
    for run in runs:
        if run.checkpoints.number and run.checkpoints.last_step:
            return max(1, run.checkpoints.last_step // run.checkpoints.number)
    return max(1, min(_MOST_BETWEEN_CHECKPOINTS, max(run.num_steps for run in runs) // 4))


def _is_of_gpu(run: RunSummary) -> bool:
    return run.setup.device_name is not None and "NVIDIA" in run.setup.device_name


def _takes_a_length(workload: str) -> bool:
    try:
        return "sequence_length" in workload_info(workload).takes
    except WorkloadError:
        return False


def _evaluates_every(runs: Iterable[RunSummary]) -> int | None:
    """Return the steps between evaluations, of the first run that has some; None without any."""
    return next((min(steps) for run in runs if (steps := [step for step in curve(run) if step > 0])), None)


def more_runs_command(rows: "Sequence[Row]", *, own_region: str) -> str | None:
    """Return the command for the first row here whose verdict waits for more runs; None if none does.

    It runs the row's baseline as well where the two differ in nothing but the recipe.
    """
    for row in rows:
        if row.verdict.more_runs is None or row.setup.instance is not None or row.setup.num_nodes > 1:
            continue
        base = next(
            other for other in rows if other.setup.workload == row.setup.workload and other.is_baseline
        )
        is_pair = _terms(base.setup) == _terms(row.setup) and base.setup.recipe != row.setup.recipe
        return submit_command(
            [run.summary for run in row.runs],
            [base.setup.recipe, row.setup.recipe] if is_pair else [row.setup.recipe],
            place=place_of(row.runs[0], own_region=own_region),
            # Seeds that none has: those of before would make no new pair.
            first_seed=next_seed([run.summary for of in (base, row) for run in of.runs]),
            repeats=row.verdict.more_runs or 1,
        )
    return None


def _terms(setup: Setup) -> tuple[object, ...]:
    """Return what one command can give to several recipes alike."""
    overrides = setup.recipe.split()[1:]
    return overrides, setup.batch_size_per_gpu, setup.num_gpus, setup.data, setup.sequence_length


def instances_to_charge(
    rows: "Sequence[Row]", request: PriceRequest, catalogue: Catalogue
) -> list[ChargedAs]:
    """Return instances whose prices charge all `rows`, which have none; empty if one cannot be charged."""
    kinds = dict.fromkeys((row.setup.device_name, row.setup.num_gpus // row.setup.num_nodes) for row in rows)
    charges = [_cheapest_with(device_name, num, request, catalogue) for device_name, num in kinds]
    known = dict.fromkeys(charge for charge in charges if charge is not None)
    return [] if None in charges else list(known)


def _cheapest_with(
    device_name: str | None, num_gpus: int, request: PriceRequest, catalogue: Catalogue
) -> ChargedAs | None:
    """Return the cheapest instance with so many of the GPU, else a share of one; None if none is sold."""
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

"""`recommend`: where and how to train, by the ledger, shipped measurements and predictions."""

import datetime
import math
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlaunch.analysis import recommend as analysis
from fastlaunch.analysis.recommend import Limits, Task
from fastlaunch.api.estimation import check_above_zero, length_of
from fastlaunch.api.results import data_frame
from fastlaunch.catalog.hardware import OFFERS, TRAINING_PLAN
from fastlaunch.catalog.prices import UPDATE_COMMAND, Catalogue, check_age
from fastlaunch.core.errors import UnknownName, UserError
from fastlaunch.core.units import is_region, parse_date, parse_duration_s
from fastlaunch.lifecycle.world import World, default_context
from fastlaunch_train.recipes.recipes import resolve_recipe

if TYPE_CHECKING:
    import pandas

    from fastlaunch.analysis.compare import Row
    from fastlaunch.analysis.configurations import Configuration, LeftOut, Scope
    from fastlaunch.analysis.cost import Purchase
    from fastlaunch.analysis.rate import Origin, Subject
    from fastlaunch.api.purchases import Market
    from fastlaunch.lifecycle.evidence import Known
    from fastlaunch.measure.summary import RunSummary, Setup
    from fastlaunch_train.recipes.recipe import Recipe

#: The number of instance types in a first measurement.
_MOST_MEASURED = 3
#: The most nodes of one job: every number of nodes up to it is computed.
_MOST_NODES = 512
#: Stands in a command for the image that the user has to build first.
IMAGE_TO_BUILD = "--image URI@sha256:..."


@dataclass(frozen=True, kw_only=True, repr=False)
class Recommendation(analysis.Recommendation):
    """The pick and its evidence; `print(recommendation)` shows them as `fastlaunch recommend` does."""

    source: str  # of the measured rows: `ledger` or `shipped`
    prices_as_of: datetime.date

    def __repr__(self) -> str:
        from fastlaunch.core.tables import WIDTH
        from fastlaunch.report.recommendation import as_text

        return as_text(self, width=WIDTH)

    def to_json(self) -> dict[str, Any]:
        """Return the data of `fastlaunch recommend --output json`; docs/reference.md describes it."""
        from fastlaunch.report.recommendation import to_json

        sources = {"measured": self.source, "prices_as_of": self.prices_as_of.isoformat()}
        batch = None
        if self.reference:
            batch = {"recipe": self.reference.recipe, "global_batch": self.reference.global_batch}
        return {**to_json(self), **sources, "reference": batch}

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a data frame of the choices, as `fastlaunch recommend --output csv` writes them."""
        from fastlaunch.report.recommendation import as_rows

        return data_frame(as_rows(self))


def recommend(
    workload: str,
    samples: int | str | None = None,
    *,
    tokens: int | str | None = None,
    sequence_length: int | None = None,
    deadline: float | str | None = None,
    max_cost_usd: float | None = None,
    purchases: Sequence[str] | str = ("on-demand",),
    regions: Sequence[str] | str = (),
    max_nodes: int = 1,
    prices_as_of: datetime.date | str | None = None,
    steps_only: bool = False,
    measured_only: bool = False,
    exclude_recipes: Sequence[str] = (),
    batch_equivalent: bool = False,
    allow_unverified: bool = False,
    assume: Mapping[str, Any] | Sequence[str] = (),
    prices: Path | str | None = None,
    with_shared: bool = False,
    image: str | None = None,
    with_data: bool = True,
    context: World | None = None,
) -> Recommendation:
    """Recommend instance, nodes, recipe, batch size and purchase option for a workload.

    workload: a name, or that of a script with runs. samples: a number, such as 100_000_000 or `100M`; or give
    tokens instead. sequence_length: tokens of a sample; by default as in the runs. deadline: hours, or text
    such as `48h`. purchases: of `OFFERS`. regions: the user's own by default. prices_as_of: use the prices of
    this day. steps_only: leave out waiting, boot and other fixed parts. measured_only: make no predictions.
    batch_equivalent: assume that a sample trains as much at any global batch. allow_unverified: include
    recipes that fail a check. assume: texts such as `boot=300s`, as for `estimate`; spot needs
    `spot_losses_per_hour` and `spot_available` unless you have runs on spot. prices: a file over the shipped
    prices. with_shared: also count runs that others shared.
    image: of the commands, where AWS's images lack what the training needs. with_data: its command names
    data and keeps checkpoints; without, it trains on synthetic data.

    Raises UserError for invalid options, and UnknownName for an unknown workload.
    """
    from fastlaunch.analysis.anchors import published_anchors
    from fastlaunch.analysis.configurations import Scope
    from fastlaunch.analysis.rate import Origin, published_speeds
    from fastlaunch.api.purchases import Market, read_assumptions
    from fastlaunch.catalog.load import load_catalogue
    from fastlaunch.lifecycle.evidence import check_known, known_rows

    context = context or default_context()
    settings = context.settings
    check_known(context, workload, exclude_recipes)
    check_above_zero(sequence_length=sequence_length)
    if not isinstance(max_nodes, int) or not 1 <= max_nodes <= _MOST_NODES:
        raise UserError(f"--max-nodes is {max_nodes}", f"give a whole number from 1 to {_MOST_NODES}")
    if max_cost_usd is not None and (not _is_number(max_cost_usd) or max_cost_usd < 0):
        raise UserError(f"{max_cost_usd!r} is not a cost", "give USD as a number of 0 or more, such as 400")
    hours = parse_duration_s(deadline) / 3600 if isinstance(deadline, str) else deadline
    if hours is not None and (not _is_number(hours) or hours <= 0):
        raise UserError(f"{deadline!r} is not a deadline", "give hours above 0, or text such as 48h")
    purchases = [*dict.fromkeys((purchases,) if isinstance(purchases, str) else purchases)]
    for purchase in purchases:
        if purchase not in OFFERS:
            raise UnknownName("purchase option", purchase, OFFERS)
    regions = [*dict.fromkeys((regions,) if isinstance(regions, str) else regions)]
    for region in regions:
        if not is_region(region):
            raise UserError(f"{region!r} is not the name of a region", "give one such as us-east-1")
    assumptions = read_assumptions(assume)
    as_of = parse_date(prices_as_of) if isinstance(prices_as_of, str) else prices_as_of
    catalogue = load_catalogue(*settings.price_files(Path(prices) if prices else None))
    unit, length = length_of(samples=samples, tokens=tokens)
    assert not isinstance(length, str)
    scope = Scope(
        max_nodes=max_nodes,
        excluded_recipes=frozenset(exclude_recipes),
        batch_equivalent=batch_equivalent,
        measured_only=measured_only,
    )
    market = Market(context, catalogue, assumptions, as_of=as_of)
    known = known_rows(
        context,
        workload,
        catalogue,
        day=market.day,
        allow_unverified=allow_unverified,
        reconciles=True,
        with_shared=with_shared,
        judges=False,
        counts=True,
        sequence_length=sequence_length,
    )
    candidates = _candidates(known)
    left_out: list[LeftOut] = []
    unsold: list[LeftOut] = []
    warnings: list[str] = []
    bought = _purchases(market, catalogue, purchases, regions or (context.own_region(),), unsold)
    scaling = assumptions.scaling if "scaling" in assumptions.given else None
    subject = _subject(known, candidates, scope)
    number = float(length)
    if unit == "tokens":
        if subject is None or subject.tokens_per_sample is None:
            raise UserError(f"the tokens of a sample of {workload} are not known", "give --samples")
        number /= subject.tokens_per_sample
    configurations = (
        _configurations(known, subject, candidates, scope, scaling, left_out, warnings, bought)
        if subject
        else []
    )
    recipes = {
        name
        for configuration in configurations
        for name in (configuration.recipe, configuration.query.undivided)
    }
    failures = {row.setup.recipe: row.validity.failures[0] for row in known.rows if row.validity.failures}
    failed: dict[str, list[str]] = {}
    for recipe in sorted(recipes & failures.keys()):
        failed.setdefault(failures[recipe], []).append(recipe)
    for reason, of_reason in failed.items():
        verb = "counts" if len(of_reason) == 1 else "count"
        warnings.append(f"{', '.join(of_reason)} {verb} as --allow-unverified asks, although {reason}")
    if as_of is None:
        used = {configuration.instance for configuration in configurations}
        paid = [purchase.price for purchase in bought if purchase.price.instance in used]
        if settings.max_price_age is not None:
            max_age = datetime.timedelta(seconds=parse_duration_s(settings.max_price_age))
            check_age([price.as_of for price in paid], market.day, max_age)
        warnings += market.age_notes(paid)
    job = Task(
        workload=workload,
        samples=number,
        like=_like(workload, known.rows, sequence_length),
        scripts={
            row.setup.recipe: words
            for row in known.rows
            if (words := next((run.script for run in reversed(row.runs) if run.script), ()))
        },
        variants={row.setup.recipe: row.setup.variant for row in known.rows if row.setup.is_script},
        own_region=settings.region,
        assumptions=assumptions,
        steps_only=steps_only,
        max_nodes=max_nodes,
        with_data=with_data,
    )
    choices = analysis.choices_of(configurations, bought, job)
    if configurations:
        offered = {bought[number].price.purchase for number in set(choices.purchase_ids.tolist())}
        priced = {purchase.price.purchase for purchase in bought}
        for name in purchases:
            if name not in offered:
                warnings.append(_no_candidate(name, has_price=name in priced))
    warnings += known.warnings
    if candidates.origin is Origin.SHIPPED and candidates.rows:
        warnings.append(f"no GPU run of {workload} in your ledger: what fastlaunch's authors measured counts")
    result = analysis.recommend(
        choices,
        Limits(deadline_hours=hours, budget_usd=max_cost_usd),
        left_out=[*left_out, *unsold],
        warnings=[*dict.fromkeys(warnings)],
    )
    if subject is not None and subject.tuning is not None:
        gpus = {gpu.name: gpu for way in bought for gpu in [catalogue.accelerator_of(way.price.instance)]}
        result = replace(
            result,
            memory=tuple(subject.tuning.needs(gpus.values())),
            published=tuple(published_speeds(published_anchors(), subject)),
        )
    trained = result.pick and result.pick.configuration.query.recipe
    if not configurations:
        # Measuring helps only then: otherwise it is prices that are unknown, or spot.
        too_small = {gpu for need in result.memory if need.recipe == "bf16" for gpu in need.too_small}
        result = replace(result, command=_sweep_command(job, bought, catalogue, too_small))
        trained = resolve_recipe("bf16")  # which sweep measures unless told otherwise
    if trained and not job.like.setup.is_script and (build := _image_to_build(workload, trained)):
        result = _with_image(replace(result, build=None if image else build), image)
    return Recommendation(
        **vars(replace(result, reference=candidates.reference)),
        source=str(candidates.origin),
        prices_as_of=market.day,
    )


def _no_candidate(option: str, *, has_price: bool) -> str:
    """Return the warning that a requested purchase option has no candidate, with what to type."""
    if not has_price:
        return f"no candidate is bought {option}: no such price is known; type `{UPDATE_COMMAND}`"
    known = ""
    if option == "spot":
        known = ", or give --assume spot_losses_per_hour=0.1 --assume spot_available=0.8, with your numbers"
    return f"no candidate is bought {option}: --output json lists why under left_out{known}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _image_to_build(workload: str, recipe: "Recipe | str") -> str | None:
    """Return the command for an image with what AWS's images lack for the training; None if nothing is."""
    from fastlaunch.jobs.variants import build_command, not_in_base_images
    from fastlaunch_train.workloads.registry import WorkloadError, workload_info

    if isinstance(recipe, str):
        return None
    try:
        lacking = not_in_base_images(recipe, workload_info(workload))
    except WorkloadError:
        return None
    return build_command(lacking) if lacking else None


def _with_image(result: analysis.Recommendation, image: str | None) -> analysis.Recommendation:
    """Return the recommendation with the image, or a place for it, in its commands."""
    experiment = result.experiment
    option = f"--image {shlex.quote(image)}" if image else IMAGE_TO_BUILD
    return replace(
        result,
        command=result.command and f"{result.command} {option}",
        experiment=experiment
        and replace(experiment, command=experiment.command and f"{experiment.command} {option}"),
    )


def _sweep_command(
    job: Task, bought: "Sequence[Purchase]", catalogue: Catalogue, too_small: Collection[str]
) -> str | None:
    """Return the command to measure on the cheapest instance types of a few families.

    None for a script whose command is unknown, and where no GPU is large enough. too_small: GPUs on which one
    sample does not fit.
    """
    cheapest: dict[str, str] = {}
    for purchase in sorted(bought, key=lambda purchase: purchase.paid_usd_per_hour):
        name = purchase.price.instance
        gpu = catalogue.accelerator_of(name)
        if gpu.compute_capability is not None and gpu.name not in too_small:
            cheapest.setdefault(name.partition(".")[0], name)
    if not cheapest:
        return None
    words = ["fastlaunch", "sweep", "--instance", ",".join([*cheapest.values()][:_MOST_MEASURED])]
    if not job.like.setup.is_script:
        return shlex.join([*words, "--workload", job.workload])
    if not job.scripts:
        return None
    script = [*job.scripts.values()][-1]
    texts: dict[str, dict[str, None]] = {}
    for recipe, variant in job.variants.items():
        if job.scripts.get(recipe) == script:
            for name, text in variant.items():
                texts.setdefault(name, {})[text] = None
    lists = [word for name, values in texts.items() for word in ("-L", f"{name}={','.join(values)}")]
    return shlex.join([*words, *lists, *script])


@dataclass(frozen=True, kw_only=True)
class _Candidates:
    """The rows that are configurations themselves: the ledger's if any is on a GPU, else the shipped rows."""

    rows: "tuple[Row, ...]"
    origin: "Origin"
    reference: "Setup | None"  # of the row whose global batch the others keep
    samples_factors: Mapping[int, float]  # see `configurations.samples_to_train_as`


def _like(workload: str, rows: "Sequence[Row]", sequence_length: int | None) -> "RunSummary":
    """Return a run of the workload as the model for commands, or a made-up one without runs.

    sequence_length: if not as in the run.
    """
    from fastlaunch.measure.summary import RunSummary, Setup
    from fastlaunch_train.workloads.registry import WorkloadError, workload_info

    measured = [row for row in rows if row.setup.kind != "published"]
    for row in measured or rows:
        first = row.group.first
        length = sequence_length or first.setup.sequence_length
        return replace(first, setup=replace(first.setup, sequence_length=length))
    try:
        unit = workload_info(workload).sample_unit
    except WorkloadError:
        unit = "samples"
    setup = Setup(
        kind="published",
        workload=workload,
        sample_unit=unit,
        recipe="bf16",
        sequence_length=sequence_length,
        data="synthetic",
        num_nodes=1,
        num_gpus=1,
    )
    return RunSummary(setup=setup, status="completed")


def _candidates(known: "Known") -> _Candidates:
    from fastlaunch.analysis.compare import baseline_of
    from fastlaunch.analysis.configurations import samples_to_train_as
    from fastlaunch.analysis.rate import Origin, gpu_of

    comparisons = known.comparisons
    origin, rows = Origin.LEDGER, comparisons[Origin.LEDGER].rows
    rows = tuple(row for row in rows if gpu_of(row.setup, known.catalogue))
    if not rows:
        origin, rows = Origin.SHIPPED, tuple(comparisons[Origin.SHIPPED].rows)
    reference = baseline_of(rows)
    factors = samples_to_train_as(reference, comparisons[origin]) if reference else {}
    reference = reference or baseline_of(comparisons[Origin.LEDGER].rows)
    return _Candidates(
        rows=rows, origin=origin, reference=reference.setup if reference else None, samples_factors=factors
    )


def _purchases(
    market: "Market",
    catalogue: Catalogue,
    options: Iterable[str],
    regions: Iterable[str],
    left_out: "list[LeftOut]",
) -> "list[Purchase]":
    """Return the purchases of each instance type; add impossible ones to `left_out`."""
    from fastlaunch.analysis.configurations import LeftOut
    from fastlaunch.analysis.pooling import Offer

    bought = []
    for region, (name, instance), option in product(regions, catalogue.instances.items(), options):
        service = "sagemaker" if option == TRAINING_PLAN else "ec2"
        price = market.price(name, Offer(service, region, option))
        if price is not None and instance.is_sold(option):
            bought.append(market.purchase(price))
            continue
        reason = f"no {option} price in {region} is known for {market.day}"
        if not instance.is_sold(option):
            reason = f"AWS does not sell it {option}"
        left_out.append(LeftOut(instance=name, recipe=None, reason=reason))
    left_out += [
        LeftOut(instance=name, recipe=None, reason=reason) for name, reason in catalogue.skipped.items()
    ]
    if not bought:
        raise UserError(
            f"no price is known in {', '.join(regions)} of what is asked for", f"type: {UPDATE_COMMAND}"
        )
    return bought


def _subject(known: "Known", candidates: _Candidates, scope: "Scope") -> "Subject | None":
    """Return the subject of the rates; None for an unknown workload if only measurements count."""
    from fastlaunch_train.workloads.registry import WorkloadError

    try:
        return known.subject(candidates.reference)
    except WorkloadError as error:
        if scope.measured_only:
            return None
        hint = "; for a script, the name that `fastlaunch runs list` shows"
        raise UserError(error.message, f"{error.hint}{hint}") from None


def _configurations(
    known: "Known",
    subject: "Subject",
    candidates: _Candidates,
    scope: "Scope",
    scaling: float | None,
    left_out: "list[LeftOut]",
    warnings: list[str],
    bought: "Sequence[Purchase]",
) -> "list[Configuration]":
    """Return the configurations of the workload, with their rates."""
    from fastlaunch.analysis.configurations import LeftOut, configurations

    if scope.measured_only:
        pass
    elif not subject.has_rows and subject.info is None:
        reason = "a script that ran on no GPU, so its size is not known"
        left_out.append(LeftOut(instance=None, recipe=None, reason=reason))
    elif not subject.has_rows:
        path, is_file, _ = known.workload.rpartition(".py:")
        if is_file and not Path(f"{path}.py").is_file():
            raise UserError(f"there is no file {path}.py", "name the workload as FILE.py:FUNCTION")
        recipes = "" if subject.tuning else " recipe bf16 and"
        warnings.append(
            f"no run of {known.workload} on a GPU is known: predictions go by published models, with{recipes}"
            f" a global batch of {subject.global_batch}"
        )
    types = dict.fromkeys(purchase.price.instance for purchase in bought)
    return configurations(
        known.finder(subject, scaling=scaling),
        subject,
        known.rows,
        candidates.rows,
        candidates.reference,
        scope,
        left_out,
        candidates.samples_factors,
        [known.catalogue.instances[name] for name in types],
        known.catalogue,
    )

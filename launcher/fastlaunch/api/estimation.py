"""`estimate`: the time and cost of a training before anything runs, from similar measurements."""

import datetime
import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastlaunch.catalog.prices import UPDATE_COMMAND, Catalogue, Price
from fastlaunch.core.errors import UserError
from fastlaunch.core.home import LEDGER_NAME
from fastlaunch.core.terminal import as_warning
from fastlaunch.core.units import enumerated, first_names, parse_count, parse_date
from fastlaunch.jobs.options import ML
from fastlaunch.lifecycle.world import World, default_context

if TYPE_CHECKING:
    from fastlaunch.analysis.compare import Row
    from fastlaunch.analysis.cost import Assumptions, Cost, Purchase, Training
    from fastlaunch.analysis.pooling import Offer
    from fastlaunch.analysis.rate import Query, Rate
    from fastlaunch.analysis.spot import SpotJob
    from fastlaunch.api.purchases import Market
    from fastlaunch.catalog.hardware import InstanceType
    from fastlaunch.lifecycle.evidence import Known
    from fastlaunch.measure.summary import Interval
    from fastlaunch_train.recipes.recipe import Recipe

#: The default recipe of `submit`.
DEFAULT_RECIPE = "bf16"
#: The most measured rows to name.
_MOST_NAMED = 6


@dataclass(frozen=True, kw_only=True, repr=False)
class Estimate:
    """The time and cost of a training; `print(estimate)` gives them in a sentence."""

    workload: str
    recipe: str
    instance: str  # with `ml.` on SageMaker
    num_nodes: int
    batch_size: int | None  # per GPU, as measured; None if a script does not record it
    sequence_length: int | None  # tokens of a sample; None without tokens or for a script
    samples: "Interval"
    sample_unit: str
    rate: "Rate"
    cost: "Cost"
    price: Price
    paid_usd_per_hour: float
    assumptions: "Assumptions"
    notes: tuple[str, ...]

    @property
    def answer(self) -> str:
        """Dollars and hours in a sentence."""
        from fastlaunch.report.cost import sentence

        nodes = f"{self.num_nodes} x " if self.num_nodes > 1 else ""
        what = f"{self.recipe} on {nodes}{self.instance}"
        return sentence(self.cost, self.rate, what=what, purchase=self.price.purchase)

    @property
    def subject(self) -> str:
        """What is trained, and whose runs the speed is from."""
        from fastlaunch.report.cost import tokens_text
        from fastlaunch.report.text import about

        length = f" of {self.sequence_length:,} tokens" if self.sequence_length else ""
        batch = "" if self.batch_size is None else f", batch {self.batch_size} per GPU"
        tokens = tokens_text(self.rate, self.cost.usd.value, self.samples.value)
        is_exact = self.samples.low in (None, self.samples.value)
        number = f"{math.ceil(self.samples.value):,}" if is_exact else about(self.samples.value)
        trained = f"{number} {self.sample_unit}{length} of {self.workload}{batch}"
        return f"{', '.join(filter(None, [trained, tokens]))}; {self.rate.source}"

    def __repr__(self) -> str:
        return f"{self.answer}\n{self.subject}"

    def to_json(self) -> dict[str, Any]:
        """Return plain data, the shape of `fastlaunch estimate --output json`."""
        from fastlaunch.report.cost import cost_to_json, rate_to_json

        return {
            "schema": 1,
            "answer": self.answer,
            "workload": self.workload,
            "recipe": self.recipe,
            "instance": self.instance,
            "num_nodes": self.num_nodes,
            "batch_size_per_gpu": self.batch_size,
            "sequence_length": self.sequence_length,
            "samples": vars(self.samples),
            "sample_unit": self.sample_unit,
            **rate_to_json(self.rate),
            "usd_per_million_tokens": self.rate.usd_per_million_tokens(
                self.cost.usd.value, self.samples.value
            ),
            "price": self.price.to_json(),
            "paid_usd_per_hour": self.paid_usd_per_hour,
            **cost_to_json(self.cost),
            "assumptions": {name: value for name, value in vars(self.assumptions).items() if name != "given"},
            "assumptions_given": sorted(self.assumptions.given),
            "notes": list(self.notes),
        }


def estimate(
    workload: str,
    instance: str | None = None,
    *,
    recipe: str | None = None,
    num_nodes: int = 1,
    batch_size: int | None = None,
    sequence_length: int | None = None,
    samples: int | str | None = None,
    epochs: float | None = None,
    tokens: int | str | None = None,
    target: str | None = None,
    purchase: str = "on-demand",
    region: str | None = None,
    usd_per_hour: float | None = None,
    assume: Mapping[str, Any] | Sequence[str] = (),
    spot_trace: Path | str | None = None,
    prices_as_of: datetime.date | str | None = None,
    steps_only: bool = False,
    with_shared: bool = False,
    context: World | None = None,
) -> Estimate:
    """Return the time and cost of a training, from similar runs in the ledger or among the shipped runs.

    workload: a workload of ours, or the name of a script. recipe: a label, or a script's variant; by default
    bf16, or the only measured recipe. instance: such as `p5.48xlarge`, or `ml.p5.48xlarge` on SageMaker. Give
    one of samples (`100M`), epochs, tokens and target (`accuracy=0.9`). sequence_length: tokens of a sample,
    by default as in the runs. usd_per_hour: replaces the price of a
    machine. assume: texts such as `boot=300s`; `fastlaunch estimate --assume help` lists the names.
    spot_trace: a CSV of spot capacity; without it and an assumed `spot_losses_per_hour`, the loss rate comes
    from your runs on spot of this type in this region. steps_only: count only the steps. with_shared: also
    count runs that others shared.

    Raises UserError if nothing similar was measured, or if a price or a number is unknown.
    """
    from fastlaunch.analysis.configurations import check_memory
    from fastlaunch.analysis.cost import cost_of, training_of
    from fastlaunch.analysis.pooling import Offer
    from fastlaunch.analysis.rate import Query, label_of, precision_of, unit_of
    from fastlaunch.api.purchases import Market, read_assumptions
    from fastlaunch.catalog.load import load_catalogue
    from fastlaunch.lifecycle.evidence import check_known, known_rows
    from fastlaunch.measure.summary import Interval
    from fastlaunch_train.recipes.recipe import Recipe
    from fastlaunch_train.recipes.recipes import RECIPES, recipe_of

    context = context or default_context()
    check_known(context, workload, () if recipe is None else (recipe,))
    check_above_zero(num_nodes=num_nodes, batch_size=batch_size, sequence_length=sequence_length)
    assumptions = read_assumptions(assume)
    as_of = parse_date(prices_as_of) if isinstance(prices_as_of, str) else prices_as_of
    catalogue = load_catalogue(*context.settings.price_files())
    lengths = {"samples": samples, "epochs": epochs, "tokens": tokens, "target": target}
    if instance is None:
        what, hint = "no instance type is named", "give --instance, such as p5.48xlarge"
        if all(length is None for length in lengths.values()):
            what += ", and the length of the training is missing"
            hint += f", and one of {enumerated([f'--{name}' for name in lengths])}"
        raise UserError(what, hint)
    kind = catalogue.instance(instance.removeprefix(ML))
    unit, length = length_of(**lengths)
    if catalogue.accelerators[kind.accelerator].compute_capability is None:
        raise UserError(
            f"{kind.name} has {kind.accelerator}, not NVIDIA GPUs: the workloads do not run on it",
            "take an instance type with NVIDIA GPUs, such as p5.48xlarge",
        )
    service, region = "sagemaker" if instance.startswith(ML) else "ec2", region or context.own_region()
    if purchase not in kind.purchase_options:
        sold = " or ".join(kind.purchase_options)
        raise UserError(f"AWS sells {kind.name} as {sold}, not {purchase}", "give --purchase, one of these")
    market = Market(context, catalogue, assumptions, as_of=as_of, trace=spot_trace)
    price = _price(market, catalogue, Offer(service, region, purchase), kind.name, usd_per_hour=usd_per_hour)
    bought = market.purchase(price, with_losses=not steps_only)
    known = known_rows(
        context,
        workload,
        catalogue,
        with_shared=with_shared,
        judges=False,
        counts=True,
        sequence_length=sequence_length,
    )
    for warning in known.warnings:
        context.report(as_warning(warning))
    typed_recipe = recipe and (recipe_of(recipe) or recipe)
    row = _row(known, typed_recipe, kind, num_nodes=num_nodes, batch_size=batch_size)
    setup = row.setup if row else None
    subject = known.subject(setup)
    used: Recipe | str = RECIPES[DEFAULT_RECIPE]
    if isinstance(typed_recipe, Recipe) and not (setup and setup.is_script):
        used = typed_recipe
    elif setup:
        used = setup.known_recipe or setup.recipe
    _check_gpu(setup.known_recipe if setup else used, workload, kind, catalogue)
    query = Query(
        instance=kind,
        num_nodes=num_nodes,
        recipe=used,
        batch_size_per_gpu=batch_size,
        precision=precision_of(setup) if setup else getattr(used, "precision", ""),
        sequence_length=subject.sequence_length,
    )
    # Keep the micro-batch size of the row.
    micro_batch = setup.micro_batch if setup else subject.info.batch_size if subject.info else None
    if batch_size is None and micro_batch is not None:
        query = replace(query, batch_size_per_gpu=micro_batch * query.num_parts)
    if row is not None:
        count = _samples(context, unit, length, known, row, query)
    elif unit == "samples" or (unit == "tokens" and subject.tokens_per_sample):
        count = Interval(
            value=float(length) / (subject.tokens_per_sample or 1.0 if unit == "tokens" else 1.0)
        )
    else:
        raise UserError(f"no run of {workload} shows how many samples {unit} takes", "give --samples")
    unknown = check_memory(query, known.rows, subject, catalogue)
    scaling = assumptions.scaling if "scaling" in assumptions.given else None
    rate = known.finder(subject, scaling=scaling).rate(query)
    if isinstance(rate, str):
        raise UserError(
            f"nobody measured {label_of(query.recipe)} on {query.num_gpus} x {kind.accelerator}, and it"
            f" cannot be predicted: {rate}",
            "take another recipe, or an instance type that can be predicted or was measured",
        )
    training = training_of(
        rate,
        query.recipe,
        count,
        num_nodes=num_nodes,
        global_batch=float(query.global_batch or query.num_gpus),
    )
    cost = cost_of(training, bought, assumptions=assumptions, steps_only=steps_only)
    sample_unit = unit_of(row) if row else subject.info.sample_unit if subject.info else "samples"
    return Estimate(
        workload=workload,
        recipe=label_of(query.recipe),
        instance=instance,
        num_nodes=num_nodes,
        batch_size=query.batch_size_per_gpu,
        rate=rate,
        sequence_length=subject.sequence_length,
        samples=count,
        sample_unit=sample_unit,
        cost=cost,
        price=price,
        paid_usd_per_hour=bought.paid_usd_per_hour,
        assumptions=assumptions,
        notes=(
            *_notes(rate, price, bought.paid_usd_per_hour, sample_unit),
            *([unknown] if unknown else []),
            *(_spot_notes(cost.spot_job, training, bought, assumptions) if cost.spot_job else ()),
            *market.age_notes([price]),
        ),
    )


def length_of(**lengths: float | str | None) -> tuple[str, float | str]:
    """Return the name and the number of the one length of the training that is given, or the target's text.

    Raises UserError if none is given, or several, or one that is not above 0.
    """
    given = {name: length for name, length in lengths.items() if length is not None}
    if len(given) != 1:
        names = [f"--{name}" for name in lengths]
        raise UserError(
            f"the length of the training is {'given twice' if given else 'missing'}",
            f"give one of {enumerated(names)}",
        )
    ((name, length),) = given.items()
    if isinstance(length, str) and name != "target":
        length = parse_count(length)
    if not isinstance(length, str) and not (isinstance(length, int | float) and 0 < length < math.inf):
        raise UserError(f"--{name} is not a number above 0", "give more than 0")
    return name, length


def check_above_zero(**counts: int | None) -> None:
    """Raise UserError for a given count below 1."""
    for name, count in counts.items():
        if count is not None and count < 1:
            raise UserError(f"--{name.replace('_', '-')} is {count}", "give 1 or more")


def _check_gpu(
    recipe: "Recipe | str | None", workload: str, instance: "InstanceType", catalogue: Catalogue
) -> None:
    """Raise UserError if the recipe, if it is one of ours, does not run on the instance type's GPUs."""
    from fastlaunch.jobs.variants import gpu_problem
    from fastlaunch_train.recipes.recipe import Recipe
    from fastlaunch_train.workloads.registry import WorkloadError, workload_info

    with suppress(WorkloadError):  # a script
        if isinstance(recipe, Recipe) and (
            problem := gpu_problem(instance, recipe, workload_info(workload), catalogue)
        ):
            raise problem


def _notes(rate: "Rate", price: Price, paid_usd_per_hour: float, sample_unit: str) -> Iterator[str]:
    """Yield what the rate rests on, the published figure beside it, doubts, and what a machine costs."""
    from fastlaunch.analysis.anchors import CLASS_MEANINGS

    if rate.prediction_class is not None:
        yield f"class {rate.prediction_class}: {CLASS_MEANINGS[rate.prediction_class]}"
    if rate.published is not None:
        figure = rate.published
        yield (
            f"published: {figure.samples_per_s.value:,.4g} {sample_unit}/s by {figure.source}; newer runs"
            f" predict {rate.samples_per_s.value:,.4g} {sample_unit}/s"
        )
    if rate.row is not None and rate.row.is_barred:
        yield f"its recipe is not ranked by compare: {rate.row.validity.failures[0]}"
    when = "" if price.basis == "given" else f" as of {price.as_of}"
    paid = "" if paid_usd_per_hour == price.usd_per_hour else f", of which you pay ${paid_usd_per_hour:g}"
    yield f"a machine costs ${price.usd_per_hour:g}/h{when}{paid}: {price.source}"


def _spot_notes(
    job: "SpotJob", training: "Training", bought: "Purchase", assumptions: "Assumptions"
) -> Iterator[str]:
    """Yield how often to write checkpoints, and the range of nine of ten such trainings."""
    from fastlaunch.analysis.spot import Fallback, forecast_spot, steps_between

    assert bought.market is not None
    step_time_s = training.samples_per_step / training.rate.samples_per_s.value
    if job.every_s is not None:
        steps = steps_between(job.every_s, step_time_s)
        yield f"to write checkpoints this often, submit with --checkpoint-every {steps}"
    deadline_s = assumptions.deadline_s - assumptions.waiting_s
    fallback = Fallback(deadline_s=deadline_s, start_s=job.restart_s) if assumptions.deadline_s else None
    forecast = forecast_spot(job, bought.market, fallback=fallback)
    hours = forecast.time_s()
    usd = forecast.usd(bought.paid_usd_per_hour, bought.on_demand_usd_per_hour or 0.0)
    if all(value is not None and math.isfinite(value) for value in (*vars(hours).values(), usd.high)):
        assert hours.low is not None and hours.high is not None
        yield (
            f"nine of ten simulated trainings, of 2,000, end after {hours.low / 3600:.3g} to"
            f" {hours.high / 3600:.3g} h and cost ${usd.low:,.2f} to ${usd.high:,.2f}, volumes and data apart"
        )
    if fallback is not None:
        yield f"{forecast.chance(deadline_s):.1%} of those end by the deadline"


def _price(
    market: "Market", catalogue: Catalogue, offer: "Offer", instance: str, *, usd_per_hour: float | None
) -> Price:
    """Return the price of one machine. usd_per_hour: replaces it. Raises UserError if none is known."""
    if usd_per_hour is not None:
        return Price(
            **offer._asdict(),
            instance=instance,
            usd_per_hour=usd_per_hour,
            as_of=market.day,
            source="--usd-per-hour",
            basis="given",
        )
    price = market.price(instance, offer)
    if price is None and offer.purchase == "on-demand":
        return catalogue.price(instance, **offer._asdict(), on=market.day)
    if price is None:
        raise UserError(
            f"no {offer.purchase} price of {instance} in {offer.region} is known for {market.day}",
            f"type: {UPDATE_COMMAND} --region {offer.region}; or give --usd-per-hour",
        )
    return price


def _row(
    known: "Known",
    recipe: "Recipe | str | None",
    instance: "InstanceType",
    *,
    num_nodes: int,
    batch_size: int | None,
) -> "Row | None":
    """Return the row of `_most_like`; None without any if the model's size is enough for a prediction."""
    try:
        return _most_like(known, recipe, instance, num_nodes=num_nodes, batch_size=batch_size)
    except UserError:
        if known.size is None or isinstance(recipe, str):
            raise
        return None


def _most_like(
    known: "Known",
    recipe: "Recipe | str | None",
    instance: "InstanceType",
    *,
    num_nodes: int,
    batch_size: int | None,
) -> "Row":
    """Return the most similar row, preferring the user's own, for a missing recipe and batch size.

    Without a recipe, use bf16, else the only measured one. Raises UserError if there is none.
    """
    from fastlaunch.analysis.pricing import accelerator_of
    from fastlaunch.analysis.rate import label_of, undivided, undivided_of

    def is_of(row: "Row") -> bool:
        if recipe is None or row.setup.is_named(label_of(recipe)):
            return True
        return not row.setup.is_script and undivided_of(row.setup) == undivided(recipe)

    def is_on(row: "Row") -> bool:
        accelerator = accelerator_of(row.setup, known.catalogue)
        return accelerator is not None and accelerator.name == instance.accelerator

    def distance(row: "Row") -> tuple[bool, float, float, bool, bool, int]:
        setup = row.setup
        sizes = (setup.batch_size_per_gpu, batch_size)
        return (
            setup.num_nodes != num_nodes,
            abs(math.log(setup.num_gpus / num_nodes / instance.num_accelerators)),
            abs(math.log(sizes[0] / sizes[1])) if sizes[0] and sizes[1] else 0.0,
            setup.instance != instance.name,
            setup.kind == "published",
            -row.num_runs,
        )

    fitting = [(origin, row) for origin, row in known.on_gpus if is_of(row)]
    on_it = [[row for of, row in fitting if of is origin and is_on(row)] for origin in known.comparisons]
    for rows in (*on_it, [row for _, row in fitting]):
        if rows:
            return min(_of_one_recipe(rows, known.workload), key=distance)
    raise _not_measured(known, recipe, instance)


def _not_measured(known: "Known", recipe: "Recipe | str | None", instance: "InstanceType") -> UserError:
    """Return the error that no row on a GPU is similar, with a hint."""
    from fastlaunch.analysis.rate import label_of
    from fastlaunch_train.workloads.registry import WorkloadError, workload_info

    workload, label = known.workload, label_of(recipe) if recipe else None
    if names := [*dict.fromkeys(row.setup.recipe for _, row in known.on_gpus)]:
        hint = f"measured: {first_names(names, _MOST_NAMED)}"
        return UserError(f"no run of {workload} with {label} was measured on a GPU", hint)
    try:
        workload_info(workload)
    except WorkloadError:
        hint = f"submit it with --instance {instance.name}"
        return UserError(f"{workload} is a script that ran on no GPU", hint)
    words = ["fastlaunch", "submit", "--workload", workload, "--instance", instance.name]
    if recipe and not isinstance(recipe, str):
        words += ["--recipe", recipe.name]
        for field, text in recipe.overrides:
            words += ["--set", f"{field}={text}"]
    hint = f"measure it: {shlex.join(words)}"
    if label in (None, DEFAULT_RECIPE):
        hint += f"; `fastlaunch recommend --workload {workload} --samples N` predicts it from other models"
    return UserError(f"no run of {workload} was measured on a GPU", hint)


def _of_one_recipe(rows: "Sequence[Row]", workload: str) -> "list[Row]":
    """Return the rows if they share a recipe, else the bf16 rows. Raises UserError without bf16."""
    recipes = dict.fromkeys(row.setup.recipe for row in rows)
    if len(recipes) == 1:
        return [*rows]
    if DEFAULT_RECIPE not in recipes:
        raise UserError(
            f"{workload} was measured with {len(recipes)} recipes",
            f"give --recipe, one of: {', '.join(recipes)}",
        )
    return [row for row in rows if row.setup.recipe == DEFAULT_RECIPE]


def _samples(
    context: World, unit: str, length: float | str, known: "Known", row: "Row", query: "Query"
) -> "Interval":
    """Return the number of samples, with an interval for a target. Raises UserError if unknown."""
    from fastlaunch.analysis.rate import tokens_of_sample
    from fastlaunch.measure.summary import Interval

    if isinstance(length, str):
        if query.num_gpus != row.setup.num_gpus:
            raise UserError(
                f"the batch on {query.num_gpus} GPUs differs from that on the {row.setup.num_gpus} that"
                " reached the target, and may need more samples",
                "give --samples",
            )
        return _samples_to(length, known, row)
    if unit == "tokens":
        tokens = known.sequence_length or tokens_of_sample(row) or row.setup.sequence_length
        if tokens is None:
            raise UserError(f"the tokens per sample of {row.setup.workload} are not known", "give --samples")
        return Interval(value=length / tokens)
    if unit == "epochs":
        return Interval(value=length * _samples_of_epoch(context, row))
    return Interval(value=length)


def _samples_of_epoch(context: World, row: "Row") -> float:
    """Return the size of the data set, from runs of whole epochs. Raises UserError without such runs."""
    from fastlaunch.analysis.pooling import samples_per_step

    if (context.settings.home / LEDGER_NAME).exists():
        from fastlaunch.ledger.ledger import open_ledger

        with open_ledger(context.settings, clock=context.now) as ledger:
            for run_id in ledger.existing(row.run_ids):
                run = ledger.get(run_id)
                epochs = (run.spec or {}).get("epochs")
                if epochs and run.summary and run.summary.status == "completed":
                    return run.summary.num_steps * samples_per_step(row.group) / int(epochs)
    raise UserError(
        f"the number of samples in the data of {row.setup.workload} is not known: no run did whole epochs",
        "give --samples",
    )


def _samples_to(target: str, known: "Known", row: "Row") -> "Interval":
    """Return the samples of the row's seeds to the target. Raises UserError unless all reached it."""
    from fastlaunch.analysis.rate import unit_of
    from fastlaunch.analysis.target import parse_target, to_target

    results = (
        result
        for comparison in known.comparisons.values()
        if any(row is other for other in comparison.rows)
        for result in to_target(comparison, parse_target(target))
    )
    result = next(result for result in results if result.row is row)
    if result.samples is None:
        raise UserError(
            f"how many {unit_of(row)} {row.setup.recipe} takes to {target} is not known: {result.reason}",
            "give --samples",
        )
    return result.samples

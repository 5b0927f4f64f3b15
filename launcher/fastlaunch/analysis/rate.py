"""Find how fast a workload trains with a recipe on machines of a type, with the evidence.

Use the first available source: the user's own runs on the instance type, then on its GPU elsewhere; the
shipped runs, likewise; a published figure; a prediction. A published figure comes from other software: if
newer runs of the recipe exist on any GPU, the prediction from them comes first and cites the figure.
"""

import functools
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from fastlaunch.analysis.anchors import CLASSES, MOST_OF_PEAK, OWN_SOURCE, Anchor, Config, config_of
from fastlaunch.analysis.compare import Row, rate_on_type
from fastlaunch.analysis.differences import MACHINE, Differences
from fastlaunch.analysis.memory import FineTuning, ModelSize, fine_tuning
from fastlaunch.analysis.pooling import BARE_STEP, run_times
from fastlaunch.analysis.pricing import accelerator_of, scaled
from fastlaunch.analysis.verdicts import ratio_between
from fastlaunch.catalog.hardware import Accelerator, InstanceType, identify
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.core.units import counted
from fastlaunch.measure.summary import Interval, Setup
from fastlaunch_train.recipes.recipe import Recipe
from fastlaunch_train.recipes.recipes import in_parts
from fastlaunch_train.workloads.registry import WorkloadError, WorkloadInfo, workload_info

if TYPE_CHECKING:
    from fastlaunch.analysis.predict import Prediction

#: The probability of ranges, and the normal quantile for it.
IN_RANGE, RANGE_DEVIATIONS = 0.9, 1.645
#: K nodes are K x this to the power of log2 K times as fast, unless runs show otherwise.
NODE_EFFICIENCY = 0.95
#: Deviation of log throughput: published runs on 8 to 512 H100 lie 5.4% off a straight line.
_NODE_DEVIATION = 0.06
#: The shortest step on a GPU, however small the model: launching the kernels takes this long.
_MIN_STEP_S = 0.005
#: FLOPs of a ViT per weight and image of 224 pixels; only the order of magnitude matters.
_FLOPS_PER_WEIGHT = {"images": 1200.0}
#: The most published runs in a prediction: per model, GPU and precision; and of models of similar size.
_MOST_ALIKE, _NEAREST = 2, 80


class Evidence(StrEnum):
    """How a rate is known."""

    MEASURED = "measured"  # on this instance type
    SAME_GPU = "same GPU"  # measured on this GPU elsewhere; the range adds the variation of machines
    PUBLISHED = "published"  # someone else's figure, with their software
    PREDICTED = "predicted"

    @property
    def is_measured(self) -> bool:
        return self in (Evidence.MEASURED, Evidence.SAME_GPU)


class Origin(StrEnum):
    """Who measured a row."""

    LEDGER = "ledger"
    SHIPPED = "shipped"


@dataclass(frozen=True, kw_only=True)
class Rate:
    """The speed of a workload on all nodes.

    If a script does not count samples, they are steps. The range holds 90% of machines of the type if
    measured, and 90% of runs if predicted. A published figure has no range.
    """

    samples_per_s: Interval
    evidence: Evidence
    row: Row | None = None  # its runs, or the figure; None if it is predicted
    origin: Origin | None = None  # of the row
    prediction_class: str | None = None  # of `anchors.CLASSES`
    num_rows: int = 0  # of the recipe, behind a prediction
    num_other_rows: int = 0  # of the workload's other recipes
    assumption: str | None = None
    published: "Rate | None" = None  # the figure older than the runs behind a prediction
    tokens_per_sample: float | None = None  # None if the workload has no tokens

    @property
    def deviation(self) -> float:
        """Return the deviation of the logarithm; without a range, the deviation between machines."""
        low, high = self.samples_per_s.low, self.samples_per_s.high
        return max(math.log(high / low) / (2 * RANGE_DEVIATIONS), MACHINE) if low and high else MACHINE

    @property
    def tokens_per_s(self) -> Interval | None:
        return scaled(self.samples_per_s, self.tokens_per_sample) if self.tokens_per_sample else None

    def usd_per_million_tokens(self, usd: float, samples: float) -> float | None:
        """Return the dollars of a million tokens, if so many samples cost `usd`."""
        return self.tokens_per_sample and 1e6 * usd / (samples * self.tokens_per_sample)

    @property
    def rank(self) -> int:
        """Return a number that is lower the better the rate is known; a published figure's is class A's."""
        return 0 if self.evidence.is_measured else 1 + CLASSES.index(self.prediction_class or "A")

    @property
    def measured_on(self) -> str | None:
        """Return the last day of the row's runs as an ISO date."""
        return _measured_on(self.row) or None if self.row else None

    @property
    def evidence_text(self) -> str:
        """Return `measured`, or `predicted (class A)`."""
        by = f" (class {self.prediction_class})" if self.prediction_class else ""
        return f"{self.evidence}{by}"

    @functools.cached_property
    def source(self) -> str:
        """Return `3 runs of yours, 2026-11-21`, the publisher, or the basis of a prediction."""
        if self.row is None:
            others = f", and {self.num_other_rows} with other recipes" if self.num_other_rows else ""
            by = "from published runs of this and other models"
            if self.num_rows:
                by = f"from {counted(self.num_rows, 'result')} with this recipe on other machines{others}"
            elif self.num_other_rows:
                by = f"from {counted(self.num_other_rows, 'result')} with other recipes, and published runs"
            return "; ".join(filter(None, (by, self.assumption)))
        if self.row.sources:
            by = self.row.sources[0].partition(",")[0]
        elif self.row.shared_by:
            runs = counted(self.row.num_runs, "run")
            by = f"{runs}, {self.row.num_shared} of them by {', '.join(self.row.shared_by)}"
        else:
            yours = self.origin is Origin.LEDGER
            runs = counted(self.row.num_runs, "run" if yours else "shipped run")
            by = f"{runs} of yours" if yours else runs
        return ", ".join(filter(None, (by, self.measured_on, self.assumption)))


def rate_of_row(row: Row) -> Rate | None:
    """Return a row's rate on the machine that it is charged as; None if it gives no speed."""
    price = row.price
    is_other_type = price is not None and price.basis == "named" and price.instance != row.setup.instance
    speed = rate_on_type(row.group, 1 - IN_RANGE, of_other_type=is_other_type, is_expected=True)
    evidence = Evidence.SAME_GPU if is_other_type else Evidence.MEASURED
    if row.setup.kind == "published":
        evidence = Evidence.PUBLISHED
    return Rate(samples_per_s=speed, evidence=evidence, row=row, origin=Origin.LEDGER) if speed else None


def _measured_on(row: Row) -> str:
    return max(run.summary.environment.measured_on or "" for run in row.runs)


def times_as_fast(rate: Rate, other: Rate) -> Interval | None:
    """Return how many times as fast the first rate is, at 95%, by rounds in which both were measured.

    None without such rounds, or if their scatter is unknown.
    """
    if rate.row is None or other.row is None:
        return None
    groups = (rate.row.group, other.row.group)
    runs = [time for number, group in enumerate(groups) for time in run_times(group, number)]
    differences = Differences(runs)
    return ratio_between(differences, runs, 0, 1) if differences.is_linked(0, 1) else None


@dataclass(frozen=True, kw_only=True)
class Query:
    """A way to train a workload on machines of a type, to look up its rate."""

    instance: InstanceType
    num_nodes: int
    recipe: Recipe | str  # text for a script's variant or a published name that is no recipe
    batch_size_per_gpu: int | None  # None where a script does not say
    precision: str
    data: str | None = None  # as in a record's header; None for any
    sequence_length: int | None = None  # None for any

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.instance.num_accelerators

    @property
    def global_batch(self) -> int | None:
        return None if self.batch_size_per_gpu is None else self.batch_size_per_gpu * self.num_gpus

    @property
    def num_parts(self) -> int:
        """The number of micro-batches in a GPU's batch."""
        return 1 if isinstance(self.recipe, str) else self.recipe.grad_accumulation

    @property
    def micro_batch(self) -> int | None:
        """The samples that a GPU computes at once."""
        return None if self.batch_size_per_gpu is None else self.batch_size_per_gpu // self.num_parts

    @property
    def undivided(self) -> str:
        """The label of its recipe without gradient accumulation."""
        return undivided(self.recipe)


def label_of(recipe: Recipe | str) -> str:
    return recipe if isinstance(recipe, str) else recipe.label


def in_one_part(recipe: Recipe | str) -> Recipe | str:
    """Return the recipe without gradient accumulation; a script's label unchanged."""
    return (isinstance(recipe, Recipe) and in_parts(recipe, 1)) or recipe


@functools.cache
def undivided(recipe: Recipe | str) -> str:
    """Return the recipe's label without gradient accumulation; any other label unchanged."""
    return label_of(in_one_part(recipe))


def undivided_of(setup: Setup) -> str:
    """Return `undivided` for the recipe of runs."""
    return undivided(setup.known_recipe or setup.recipe)


def precision_of(setup: Setup) -> str:
    if not setup.is_script:
        return setup.precision or ""
    match = re.search(r"fp8|bf16|fp16|tf32|fp32", f"{setup.recipe} {' '.join(setup.variant.values())}")
    return match[0] if match else ""


def unit_of(row: Row) -> str:
    """Return the unit of `samples`: images, sequences, or steps for a script without counts."""
    return "steps" if row.group.measure == BARE_STEP else row.setup.sample_unit


def tokens_of_sample(row: Row) -> float | None:
    """Return the tokens of a row's samples, as counted; None without."""
    tokens_per_s, samples_per_s = row.speed.tokens_per_s, row.speed.samples_per_s
    return tokens_per_s.value / samples_per_s.value if tokens_per_s and samples_per_s else None


def gpu_of(setup: Setup, catalogue: Catalogue) -> str | None:
    """Return the anchors' name of the GPU that a row ran on; None if unknown."""
    if setup.device_name is not None:
        return setup.device_name if identify(setup.device_name) else None
    accelerator = accelerator_of(setup, catalogue)
    return name_of(accelerator) if accelerator else None


def name_of(accelerator: Accelerator) -> str:
    return next(iter(accelerator.device_names), accelerator.name)


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A workload as predictions describe it."""

    workload: str
    info: WorkloadInfo | None  # None for a script
    unit: str  # of the anchors, such as `images`
    units_per_sample: float  # tokens of a sample if the unit is tokens, else 1
    global_batch: int
    sequence_length: int | None
    params: float | None
    flops_per_sample: float | None
    task: str
    has_rows: bool  # measured on some GPU
    tuning: FineTuning | None = None

    @property
    def has_adapters(self) -> bool:
        return self.tuning is not None and self.tuning.size.has_adapters

    @property
    def tokens_per_sample(self) -> float | None:
        return self.units_per_sample if self.unit == "tokens" else None

    def config(self, recipe: str, *, sequence_length: int | None, **place: Any) -> Config:
        """Return the predictor's configuration of the workload with this recipe, as its own model.

        recipe: its label, undivided. place: arguments of `config_of`.
        """
        return config_of(
            model=f"{self.workload} {recipe}"
            if self.has_rows or self.tuning
            else _published_name(self.workload),
            unit=self.unit,
            params=self.params,
            trained_params=self.tuning.size.num_trained if self.tuning and self.has_adapters else None,
            flops=self._flops_of_length(sequence_length),
            sequence=sequence_length,
            task=self.task,
            **place,
        )

    def _flops_of_length(self, tokens: int | None) -> float | None:
        """Return the FLOPs of a sample of so many tokens, and not of the subject's own length."""
        if tokens is None or self.unit != "tokens" or not self.flops_per_sample:
            return self.flops_per_sample
        if self.tuning is not None:
            return self.tuning.size.of_length(tokens).flops_per_sample
        return self.flops_per_sample * tokens / self.units_per_sample


def subject_of(
    workload: str,
    rows: Sequence[Row],
    reference: Setup | None,
    catalogue: Catalogue,
    size: ModelSize | None = None,
    sequence_length: int | None = None,
) -> Subject:
    """Return the subject that the workload's rows and name describe.

    rows: those with a speed, on any machine. reference: the setup that others must train like; without one,
    the global batch is that of eight GPUs with the workload's own batch. size: as counted. sequence_length:
    tokens of a sample; as in the rows by default, or else the workload's own. Raises WorkloadError for an
    unknown name without rows.
    """
    try:
        info = workload_info(workload)
    except WorkloadError:
        if reference is None:
            raise
        info = None
    on_gpu = [row for row in rows if gpu_of(row.setup, catalogue) is not None]
    if sequence_length and size:
        size = size.of_length(sequence_length)
    length = sequence_length or (
        reference.sequence_length if reference else size.tokens_per_sample if size else None
    )
    of_length = [row for row in rows if length in (None, row.setup.sequence_length)]
    in_tokens = [tokens for row in of_length if (tokens := tokens_of_sample(row))]
    unit = reference.sample_unit if reference else info.sample_unit if info else "samples"
    per_sample = 1.0
    if unit != "tokens" and (in_tokens or (length and (sequence_length or not rows))):
        unit, per_sample = "tokens", in_tokens[0] if in_tokens else float(length or 0)
    flops = next((row.setup.flops_per_sample for row in of_length if row.setup.flops_per_sample), None)
    flops = flops or (info.flops_per_sample if info else None) or (size.flops_per_sample if size else None)
    params = float(info.num_parameters) if info and info.num_parameters else None
    if params is None and size:
        params = float(size.num_parameters)
    if params is None and flops:
        params = flops / per_sample / _FLOPS_PER_WEIGHT.get(unit, 6.0)
    batch = reference.global_batch if reference else None
    return Subject(
        workload=workload,
        info=info,
        unit=unit,
        units_per_sample=per_sample,
        global_batch=batch or 8 * (info.batch_size if info else 1),
        sequence_length=length,
        params=params,
        flops_per_sample=flops,
        task="SFT Performance"
        if workload.startswith("hf-sft:")
        else {"images": "image classification (synthetic)", "tokens": "causal-LM pretrain"}.get(unit, ""),
        has_rows=bool(on_gpu),
        tuning=fine_tuning(workload, size),
    )


def _is_nf4(model: str) -> bool:
    """Return whether frozen weights are in 4 bits. model: a workload and a recipe's label."""
    return bool(re.search(r" nf4\b|frozen_weights=nf4", model))


def _published_name(workload: str) -> str:
    return re.sub(r"^(timm|hf-clm):", "", workload).rpartition("/")[2]


def near_anchors(published: Sequence[Anchor], subject: Subject) -> list[Anchor]:
    """Return the most informative published runs: models on several generations, and of similar size."""
    places: dict[str, set[str]] = defaultdict(set)
    for anchor in published:
        places[anchor.config.workload].add(anchor.config.generation)
    num_alike: dict[tuple[str, ...], int] = defaultdict(int)
    kept, others = [], []
    name = _published_name(subject.workload).lower()
    for anchor in published:
        config = anchor.config
        alike = config.workload, config.gpu_name, config.precision
        num_alike[alike] += 1
        if config.model == name or (len(places[config.workload]) > 1 and num_alike[alike] <= _MOST_ALIKE):
            kept.append(anchor)
        elif config.unit == subject.unit and config.params and num_alike[alike] <= _MOST_ALIKE:
            others.append(anchor)
    if subject.params is not None:
        log_params = math.log(subject.params)
        others.sort(
            key=lambda anchor: (
                anchor.config.is_frozen != subject.has_adapters,
                abs(math.log(anchor.config.params or 1.0) - log_params),
            )
        )
    return [*kept, *others[:_NEAREST]]


@dataclass(frozen=True, kw_only=True)
class PublishedSpeed:
    """Someone else's speed of fine-tuning a model alike, of a GPU, and what it is at the workload's FLOPs."""

    gpu: str
    model: str
    precision: str
    num_gpus: int
    source: str
    tokens_per_s: float
    tokens_per_s_by_flops: float


def published_speeds(published: Sequence[Anchor], subject: Subject) -> list[PublishedSpeed]:
    """Return for each GPU the figure of the same kind of fine-tuning whose model is nearest in FLOPs."""
    if subject.tuning is None:
        return []
    like = subject.config(
        "", precision="bf16", gpu="H100", num_gpus=1, sequence_length=subject.sequence_length
    )
    nearest: dict[str, tuple[float, float, PublishedSpeed]] = {}
    for anchor in published:
        config, log_flops = anchor.config, anchor.config.log_flops
        is_alike = config.is_frozen if like.is_frozen else config.task == like.task
        if not is_alike or config.unit != "tokens" or not config.source or log_flops is None:
            continue
        if config.source == OWN_SOURCE or like.log_flops is None:
            continue
        per_gpu = anchor.per_s / config.num_gpus
        speed = PublishedSpeed(
            gpu=config.gpu_name,
            model=config.model,
            precision=config.precision,
            num_gpus=round(config.num_gpus),
            source=config.source,
            tokens_per_s=per_gpu,
            tokens_per_s_by_flops=per_gpu * math.exp(log_flops - like.log_flops),
        )
        key = abs(log_flops - like.log_flops), -per_gpu
        if config.gpu_name not in nearest or key < nearest[config.gpu_name][:2]:
            nearest[config.gpu_name] = (*key, speed)
    return [speed for _, _, speed in nearest.values()]


#: The key of configurations with one speed: accelerator, recipe, micro-batch, nodes, GPUs.
_Key = tuple[str, str, int | None, int, int]


class Finder:
    """Finds the rates of a workload from its rows on any machine."""

    def __init__(
        self,
        rows: Mapping[Origin, Sequence[Row]],
        subject: Subject,
        catalogue: Catalogue,
        published: Callable[[], Sequence[Anchor]],
        *,
        scaling: float | None = None,
    ) -> None:
        """rows: the workload's. published: other models' runs to predict from, read only if needed.

        scaling: share of a GPU's throughput kept on other numbers of GPUs; None if not given.
        """
        self._subject, self._catalogue, self._scaling = subject, catalogue, scaling
        self._published = published
        self._rows: dict[_Key, list[tuple[Origin, Row]]] = defaultdict(list)
        self._newest_run: dict[str, str] = {}  # ISO day by recipe
        self._ranges: dict[tuple[int, bool], Interval] = {}  # by row, and whether it ran elsewhere
        for origin in Origin:
            for row in rows.get(origin, ()):
                accelerator = accelerator_of(row.setup, catalogue)
                if accelerator is None or not (row.speed.samples_per_s or row.speed.step_time_s):
                    continue
                setup = row.setup
                recipe = undivided_of(setup)
                key = (accelerator.name, recipe, setup.micro_batch, setup.num_nodes, setup.num_gpus)
                self._rows[key].append((origin, row))
                if setup.kind != "published":
                    self._newest_run[recipe] = max(self._newest_run.get(recipe, ""), _measured_on(row))

    @functools.cached_property
    def anchors(self) -> list[Anchor]:
        """The workload's rows as anchors, without rows that show no GPU's speed."""
        anchors = []
        for _, row in (pair for rows in self._rows.values() for pair in rows):
            setup, gpu = row.setup, gpu_of(row.setup, self._catalogue)
            is_in_tokens = self._subject.unit == "tokens"
            speed = row.speed.tokens_per_s if is_in_tokens else row.speed.samples_per_s
            if gpu is None or speed is None:
                continue
            config = self._subject.config(
                undivided_of(setup),
                precision=precision_of(setup),
                gpu=gpu,
                num_gpus=setup.num_gpus,
                batch=setup.micro_batch,
                sequence_length=setup.sequence_length,
                date=_measured_on(row),
            )
            anchors.append(Anchor(config=config, per_s=speed.value))
        return anchors

    def rates(self, queries: Sequence[Query], *, predicts: bool = True) -> list[Rate | str]:
        """Return each query's rate, or the reason why it is unknown. predicts: whether to predict."""
        known = [self._known(query, query.num_nodes) for query in queries]
        unknown = [at for at, rate in enumerate(known) if rate is None or self._is_old(rate, queries[at])]
        answers: list[Rate | str] = [rate or "nobody measured it" for rate in known]
        predicted = self._predicted([queries[at] for at in unknown]) if predicts and unknown else []
        for at, rate in zip(unknown, predicted, strict=bool(predicted)):
            figure = known[at]
            if figure is None:
                answers[at] = rate
            elif isinstance(rate, Rate):
                answers[at] = replace(rate, published=figure)
        tokens = self._subject.tokens_per_sample
        return [
            replace(rate, tokens_per_sample=tokens) if isinstance(rate, Rate) else rate for rate in answers
        ]

    def rate(self, query: Query) -> Rate | str:
        """Return the rate of one query, or the reason why it is unknown."""
        return self.rates([query])[0]

    def _is_old(self, rate: Rate, query: Query) -> bool:
        """Return whether the rate is a published figure older than runs of the recipe."""
        newest = self._newest_run.get(query.undivided, "")
        return rate.evidence is Evidence.PUBLISHED and newest > (rate.measured_on or "")

    def _known(self, query: Query, num_nodes: int) -> Rate | None:
        """Return the rate on `num_nodes` nodes, as measured, else as published."""
        num_gpus = num_nodes * query.instance.num_accelerators
        key = (query.instance.accelerator, query.undivided, query.micro_batch, num_nodes, num_gpus)
        # Tokens of a file are read before the steps, so these take as long as with generated ones.
        made_up = "synthetic" if query.data == "file" and self._subject.unit == "tokens" else query.data
        fitting = [
            (origin, row)
            for origin, row in self._rows.get(key, ())
            if (query.sequence_length in (None, row.setup.sequence_length))
            and (query.data is None or row.setup.data in ("published", query.data, made_up))
        ]
        if not fitting:
            return None

        def rank(candidate: tuple[Origin, Row]) -> tuple[bool, bool, bool, bool, bool, bool, str, int]:
            origin, row = candidate
            return (
                row.setup.kind != "published",
                not row.is_barred,
                row.setup.data == query.data,
                origin is Origin.LEDGER,
                row.setup.num_parts == query.num_parts,
                row.setup.instance == query.instance.name,
                _measured_on(row),
                row.num_runs,
            )

        origin, row = max(fitting, key=rank)
        is_divided_alike = row.setup.num_parts == query.num_parts
        is_on_type = row.setup.instance == query.instance.name and is_divided_alike
        evidence = Evidence.MEASURED if is_on_type else Evidence.SAME_GPU
        if row.setup.kind == "published":
            evidence = Evidence.PUBLISHED
        kind = id(row), evidence is Evidence.SAME_GPU
        rate = self._ranges.get(kind)
        if rate is None:
            rate = rate_on_type(row.group, 1 - IN_RANGE, of_other_type=kind[1], is_expected=True)
            assert rate is not None
            self._ranges[kind] = rate
        assumption = None
        if not is_divided_alike:
            batch = row.setup.batch_size_per_gpu
            assumption = f"measured at batch {batch} per GPU, {query.num_parts} parts assumed as fast"
        elif query.data not in (None, row.setup.data) and row.setup.data == made_up:
            assumption = "measured with generated text, which takes a step as long"
        return Rate(samples_per_s=rate, evidence=evidence, row=row, origin=origin, assumption=assumption)

    def _predicted(self, queries: Sequence[Query]) -> list[Rate | str]:
        """Return each query's rate as the anchors predict it, or the reason why they do not."""
        one_node = [self._known(query, 1) if query.num_nodes > 1 else None for query in queries]
        rest = {
            _node(query): query
            for query, rate in zip(queries, one_node, strict=True)
            if rate is None or not rate.evidence.is_measured
        }
        of_node = dict(zip(rest, self._predicted_nodes([*rest.values()]), strict=True))
        answers: list[Rate | str] = []
        for query, single in zip(queries, one_node, strict=True):
            if self._scaling is not None and (as_given := self._scaled(query)):
                answers.append(as_given)
                continue
            rate: Rate | str = single if single and single.evidence.is_measured else of_node[_node(query)]
            answers.append(rate if isinstance(rate, str) else self._on_nodes(rate, query))
        return answers

    def _predicted_nodes(self, queries: Sequence[Query]) -> list[Rate | str]:
        """Return the rate of one node of each query, by published runs and the workload's own."""
        if not queries:
            return []
        from fastlaunch.analysis.predict import Prediction

        subject = self._subject
        anchors = [*self.anchors, *near_anchors(self._published(), subject)]
        newest = max((anchor.config.year for anchor in anchors), default=0.0)
        num_rows_of = Counter(anchor.config.model for anchor in self.anchors)
        configs = []
        for query in queries:
            config = subject.config(
                query.undivided,
                precision=query.precision,
                gpu=name_of(self._catalogue.accelerators[query.instance.accelerator]),
                num_gpus=query.instance.num_accelerators,
                batch=query.micro_batch or None,
                sequence_length=query.sequence_length or subject.sequence_length,
            )
            configs.append(replace(config, year=newest))
        rates: list[Rate | str] = []
        log_ceilings = tuple(math.log(self._ceiling(query) * subject.units_per_sample) for query in queries)
        answers = _predictions(tuple(anchors), tuple(configs), log_ceilings)
        for config, answer in zip(configs, answers, strict=True):
            if not isinstance(answer, Prediction):
                rates.append(answer)
                continue
            if _is_nf4(config.model) and not any(_is_nf4(anchor.config.model) for anchor in anchors):
                rates.append("no run with frozen weights in 4 bits shows how long it takes to unpack them")
                continue
            num_rows = num_rows_of[config.model]
            low, high = (end / subject.units_per_sample for end in (answer.low, answer.high))
            rates.append(
                Rate(
                    # The median of a lognormal variable with this 90% range.
                    samples_per_s=Interval(value=math.sqrt(low * high), low=low, high=high),
                    evidence=Evidence.PREDICTED,
                    prediction_class=answer.evidence,
                    num_rows=num_rows,
                    num_other_rows=len(self.anchors) - num_rows,
                )
            )
        return rates

    def _on_nodes(self, node: Rate, query: Query) -> Rate:
        """Return the rate of all nodes from the rate of one; the value is the expected time's reciprocal."""
        rate, deviation, assumption = node.samples_per_s, node.deviation, None
        if query.num_nodes > 1:
            efficiency, source = self._node_efficiency
            share = self._scaling or efficiency ** math.log2(query.num_nodes)
            source = source if self._scaling is None else "as given"
            times = query.num_nodes * share
            rate = scaled(rate, times)
            deviation = math.hypot(deviation, _NODE_DEVIATION)
            assumption = f"{query.num_nodes} nodes train {times:.2f} times as fast as one, {source}"
        most = self._limit(query)
        half = math.exp(RANGE_DEVIATIONS * deviation)
        return Rate(
            samples_per_s=Interval(
                value=min(rate.value / math.exp(deviation**2 / 2), most),
                low=min(rate.value, most) / half,
                high=min(rate.value * half, most),
            ),
            evidence=Evidence.PREDICTED,
            prediction_class=node.prediction_class or "A",
            num_rows=node.num_rows or (1 if node.row else 0),
            num_other_rows=node.num_other_rows,
            assumption=assumption,
        )

    def _ceiling(self, query: Query) -> float:
        """Return the most samples/s of one GPU: by its peak, its bandwidth and the launch of kernels.

        Matrix products reach `MOST_OF_PEAK`. The rest of the recipe's fastest run takes as much longer as
        the GPU has less bandwidth and less peak in bf16, half by each.
        """
        limits = [query.micro_batch / _MIN_STEP_S] if query.micro_batch else []
        flops, here = self._subject.flops_per_sample, self._catalogue.accelerators[query.instance.accelerator]
        if flops and here.peak_tflops:
            products_s = flops / peak_flops(here, query.precision)
            limits.append(1 / products_s)
            fastest = self._fastest.get(query.undivided, {})
            # What it did itself, with other GPUs or another batch, is no limit.
            if fastest and here.name not in fastest:
                gpus = [(self._catalogue.accelerators[name], rate) for name, rate in fastest.items()]
                limits.append(
                    max(
                        1 / (products_s + _slower(here, there) * max(0.0, rest_s))
                        for there, rate in gpus
                        for rest_s in [1 / rate - flops / peak_flops(there, query.precision)]
                    )
                )
        return min(limits, default=math.inf)

    @functools.cached_property
    def _fastest(self) -> dict[str, dict[str, float]]:
        """The most samples/s that one GPU was measured at, by recipe and accelerator."""
        fastest: dict[str, dict[str, float]] = defaultdict(dict)
        for (gpu, recipe, _, _, num_gpus), rows in self._rows.items():
            for _, row in rows if self._catalogue.accelerators[gpu].peak_tflops else ():
                if row.setup.kind == "published" or not row.speed.samples_per_s:
                    continue
                # In samples of the subject's length.
                length = tokens_of_sample(row) or self._subject.units_per_sample
                share = length / self._subject.units_per_sample if self._subject.unit == "tokens" else 1.0
                rate = row.speed.samples_per_s.value * share / num_gpus
                fastest[recipe][gpu] = max(fastest[recipe].get(gpu, 0.0), rate)
        return fastest

    def _limit(self, query: Query) -> float:
        """Return an upper bound in samples/s of all nodes, from their GPUs and the network."""
        subject = self._subject
        limits = [self._ceiling(query) * query.num_gpus]
        if query.num_nodes > 1 and subject.params is not None and query.global_batch:
            # The nodes exchange fp32 gradients.
            trained = subject.tuning.size.num_trained if subject.tuning else None
            sent_bytes = 2 * (query.num_nodes - 1) / query.num_nodes * 4 * (trained or subject.params)
            limits.append(query.global_batch * query.instance.network_gbps / 8 * 1e9 / sent_bytes)
        return min(limits, default=math.inf)

    def _scaled(self, query: Query) -> Rate | None:
        """Return the rate by the nearest number of GPUs and the given scaling, without a range."""
        key = query.instance.accelerator, query.undivided, query.micro_batch
        alike = [
            (abs(math.log(num_gpus / query.num_gpus)), num_gpus, rows)
            for (*of, _, num_gpus), rows in self._rows.items()
            if (*of,) == key
        ]
        if not alike or self._scaling is None:
            return None
        _, num_gpus, rows = min(alike, key=lambda entry: entry[:2])
        rate = rate_on_type(rows[0][1].group)
        assert rate is not None
        how = (
            f"{self._scaling:.3g} times linear from {counted(num_gpus, 'GPU')} to {query.num_gpus}, as given"
        )
        return Rate(
            samples_per_s=Interval(value=rate.value * query.num_gpus / num_gpus * self._scaling),
            evidence=Evidence.PREDICTED,
            prediction_class="A",
            num_rows=len(rows),
            assumption=how,
        )

    @functools.cached_property
    def _node_efficiency(self) -> tuple[float, str]:
        """Return the efficiency of each doubling of the nodes, and its source."""
        logs = []
        for (gpu, recipe, batch, num_nodes, num_gpus), rows in self._rows.items():
            single = self._rows.get((gpu, recipe, batch, 1, num_gpus // num_nodes))
            for _, row in rows if single and num_nodes > 1 else ():
                rate = rate_on_type(row.group)
                alike = [
                    one_node
                    for _, other in single or ()
                    if other.setup.instance == row.setup.instance and (one_node := rate_on_type(other.group))
                ]
                if rate and alike:
                    ratio = rate.value / alike[-1].value / num_nodes
                    logs.append(math.log(ratio) / math.log2(num_nodes))
        if not logs:
            return NODE_EFFICIENCY, "an assumption"
        return min(1.0, math.exp(sum(logs) / len(logs))), "as measured on other nodes"


# A sweep, and Python, ask again for what was predicted already.
@functools.lru_cache(maxsize=64)
def _predictions(
    anchors: tuple[Anchor, ...], configs: tuple[Config, ...], log_ceilings: tuple[float, ...]
) -> "list[Prediction | str]":
    from fastlaunch.analysis.predict import Predictor

    return Predictor(anchors).predict(configs, log_ceilings)


def peak_flops(accelerator: Accelerator, precision: str) -> float:
    """Return the most FLOP/s that matrix products reach in the format, or the fastest one if unknown."""
    known = identify(name_of(accelerator))
    peaks = {**(known.peak_tflops if known else {}), **accelerator.peak_tflops}
    return MOST_OF_PEAK * 1e12 * (peaks.get(precision) or max(peaks.values()))


def _slower(here: Accelerator, there: Accelerator) -> float:
    """Return how many times as long as there other work than matrix products takes here."""
    by_bytes = there.bandwidth_tb_per_s / here.bandwidth_tb_per_s
    by_flops = there.peak_tflops.get("bf16", 0.0) / here.peak_tflops.get("bf16", math.inf)
    return (by_bytes + (by_flops or by_bytes)) / 2


def _node(query: Query) -> tuple[object, ...]:
    """Return the key that decides the speed of one of a query's nodes."""
    return (
        query.instance.accelerator,
        query.instance.num_accelerators,
        query.undivided,
        query.micro_batch,
        query.precision,
        query.sequence_length,
    )

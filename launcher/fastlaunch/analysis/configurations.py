"""How a workload could be trained, and how fast: configurations that were measured, and predicted ones.

A measured configuration is a row of runs on an instance type. Where there is none, throughput is predicted
from the workload's own rows, on whatever GPU, and from published runs.
"""

import functools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastlaunch.analysis.anchors import Anchor, Config, config_of
from fastlaunch.analysis.compare import Comparison, Row, rate_on_type
from fastlaunch.analysis.convergence import at_end
from fastlaunch.analysis.cost import accelerator_of
from fastlaunch.analysis.differences import MACHINE
from fastlaunch.analysis.pooling import STEP, data_of, samples_per_step
from fastlaunch.analysis.statistics import mean_of
from fastlaunch.analysis.target import LOSS, MIN_SEEDS, Target, usd_to_target
from fastlaunch.catalog.gpus import identify
from fastlaunch.catalog.hardware import Accelerator, InstanceType
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.measure.memory import USABLE_MEMORY, memory_line, peaks_by_batch
from fastlaunch.measure.summary import Interval, RunSummary, Setup
from fastlaunch_train.recipes.recipe import RecipeError
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.recipes.requirements import Capabilities, missing_part, parse_version
from fastlaunch_train.workloads.registry import WorkloadError, WorkloadInfo, workload_info

MEASURED = "measured"
#: K nodes give K x this to the power of log2 K, unless the ledger has runs that say otherwise.
NODE_EFFICIENCY = 0.95
#: Of log throughput: published runs on 8 to 512 H100 lie 5.4% off a straight line.
_NODE_DEVIATION = 0.06
#: A step is assumed to take no less on a GPU, however small the model: launching its kernels.
_MIN_STEP_S = 0.005
#: Log of a range's half is so many deviations: the range holds 90%.
RANGE_DEVIATIONS = 1.645
MEASURED_DEVIATIONS = 1.96
#: A ViT takes about as many FLOPs per weight and image of 224 pixels; only the order matters.
_FLOPS_PER_WEIGHT = {"images": 1200.0}
#: Published runs that a prediction uses: of a model on a GPU in a precision, and of models of like size.
_MOST_ALIKE, _NEAREST = 2, 80


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A way to train a workload, and its speed."""

    instance: str
    num_nodes: int
    recipe: str
    batch_size_per_gpu: int
    num_gpus: int  # over all nodes
    samples_per_s: float  # of all nodes
    # Of the logarithm of the speed; None for a single run or published figure, whose scatter is not known.
    deviation: float | None
    evidence: str  # MEASURED, or a class of predict.CLASSES
    # For as much training as the reference's samples give, such as 1.2 times as many.
    samples_factor: float = 1.0
    row: Row | None = None  # its runs
    assumption: str | None = None

    @property
    def deviation_or_usual(self) -> float:
        """Return the deviation; what machines of one type differ by where nothing else is known."""
        return max(self.deviation or 0.0, MACHINE)

    @property
    def speed(self) -> Interval:
        """Return samples/s with a range: of 95% as measured, or of 90% of a prediction.

        A prediction's value is such that its time is the expected one.
        """
        if self.deviation is None:
            return Interval(value=self.samples_per_s)
        half = math.exp(self.range_deviations * self.deviation)
        mean = 1.0 if self.evidence == MEASURED else math.exp(self.deviation**2 / 2)
        rate = self.samples_per_s
        return Interval(value=rate / mean, low=rate / half, high=rate * half)

    @property
    def range_deviations(self) -> float:
        """Return how many deviations the ends of the range are off."""
        return MEASURED_DEVIATIONS if self.evidence == MEASURED else RANGE_DEVIATIONS

    @property
    def global_batch(self) -> int:
        return self.batch_size_per_gpu * self.num_gpus

    @property
    def samples_per_step(self) -> float:
        """Return samples of a step of all ranks: as its runs counted them, else the global batch."""
        is_counted = self.row is not None and self.row.group.measure == STEP
        return samples_per_step(self.row.group) if self.row and is_counted else float(self.global_batch)

    @property
    def whole_recipe(self) -> str:
        """Return the recipe without the parts that a batch is taken in."""
        words = self.recipe.split(" ")
        return " ".join(word for word in words if not word.startswith("grad_accumulation="))


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
    node_scaling: float | None = None  # of K nodes, over K times one node's speed; None: measured or assumed


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


def measured_configurations(
    rows: Sequence[Row],
    reference: Setup,
    scope: Scope,
    left_out: list[LeftOut],
    samples_factors: Mapping[int, float],
) -> list[Configuration]:
    """Return a configuration for each of a workload's rows on an instance type, of several alike the newest.

    reference: of the row that others have to train like. left_out: gets what is not returned.
    samples_factors: of rows of other batches, from `samples_to_train_as`.
    """
    newest: dict[tuple[object, ...], Configuration] = {}
    for row in sorted(rows, key=_measured_on):
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
        else:
            speed = rate_on_type(row.group)
            assert speed is not None
            deviation = None
            if speed.low and speed.high:
                deviation = math.log(speed.high / speed.low) / (2 * MEASURED_DEVIATIONS)
            configuration = Configuration(
                instance=setup.instance,
                num_nodes=setup.num_nodes,
                recipe=setup.recipe,
                batch_size_per_gpu=setup.batch_size_per_gpu,
                num_gpus=setup.num_gpus,
                samples_per_s=speed.value,
                deviation=deviation,
                evidence=MEASURED,
                samples_factor=factor,
                row=row,
                assumption=assumption,
            )
            newest[key_of(configuration)] = configuration
    return list(newest.values())


def key_of(configuration: Configuration) -> tuple[object, ...]:
    """Return what two configurations share that are one."""
    return (
        configuration.instance,
        configuration.num_nodes,
        configuration.recipe,
        configuration.batch_size_per_gpu,
    )


def _measured_on(row: Row) -> str:
    return max(run.summary.environment.measured_on or "" for run in row.runs)


def _is_excluded(recipe: str, scope: Scope) -> bool:
    return recipe in scope.excluded_recipes or recipe.split()[0] in scope.excluded_recipes


@dataclass(frozen=True, kw_only=True)
class RecipeFacts:
    """What a workload's rows say of a recipe, wherever they ran."""

    recipe: str
    precision: str
    batches: tuple[int, ...] = ()  # per GPU
    # Of a GPU: what is there anyhow, and what each sample of a micro-batch adds; None if not known.
    fixed_gib: float = 0.0
    gib_per_sample: float | None = None
    failure: str | None = None  # a guard that its rows failed


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is trained, as predictions see it."""

    workload: str
    info: WorkloadInfo | None  # None for a script
    unit: str  # of the anchors, such as `images`
    units_per_sample: float  # tokens of a sample where the unit is tokens, else 1
    global_batch: int
    sequence_length: int | None
    params: float | None
    task: str
    has_rows: bool  # measured on some GPU

    def model_of(self, recipe: str) -> str:
        """Return the anchors' name of the workload by this recipe: each is a model of its own."""
        return f"{self.workload} {recipe}" if self.has_rows else _published_name(self.workload)

    def config(self, recipe: str, *, sequence_length: int | None, **place: Any) -> Config:
        """Return the workload by this recipe, as predictions see it. place: as `config_of` takes it."""
        return config_of(
            model=self.model_of(recipe),
            unit=self.unit,
            params=self.params,
            sequence=sequence_length,
            task=self.task,
            **place,
        )


def subject_of(workload: str, rows: Sequence[Row], reference: Setup | None, catalogue: Catalogue) -> Subject:
    """Return what is known of the workload by its rows and by its name.

    rows: those with a speed, wherever they ran. reference: of the row that others have to train like; without
    one the global batch is that of eight GPUs with the workload's own batch. Raises WorkloadError for a name
    that is none and has no rows.
    """
    try:
        info = workload_info(workload)
    except WorkloadError:
        if reference is None:
            raise
        info = None
    on_gpu = [row for row in rows if gpu_of(row.setup, catalogue) is not None]
    in_tokens = [row for row in rows if row.speed.tokens_per_s and row.speed.samples_per_s]
    unit = reference.sample_unit if reference else info.sample_unit if info else "samples"
    per_sample = 1.0
    if in_tokens and unit != "tokens":
        tokens_per_s, samples_per_s = in_tokens[0].speed.tokens_per_s, in_tokens[0].speed.samples_per_s
        assert tokens_per_s is not None and samples_per_s is not None
        unit, per_sample = "tokens", tokens_per_s.value / samples_per_s.value
    flops = next((row.setup.flops_per_sample for row in rows if row.setup.flops_per_sample), None)
    flops = flops or (info.flops_per_sample if info else None)
    params = float(info.num_parameters) if info and info.num_parameters else None
    if params is None and flops:
        params = flops / per_sample / _FLOPS_PER_WEIGHT.get(unit, 6.0)
    batch = reference.global_batch if reference else None
    return Subject(
        workload=workload,
        info=info,
        unit=unit,
        units_per_sample=per_sample,
        global_batch=batch or 8 * (info.batch_size if info else 1),
        sequence_length=reference.sequence_length if reference else None,
        params=params,
        task={"images": "image classification (synthetic)", "tokens": "causal-LM pretrain"}.get(unit, ""),
        has_rows=bool(on_gpu),
    )


def _published_name(workload: str) -> str:
    return re.sub(r"^(timm|hf-clm):", "", workload).rpartition("/")[2]


def facts_of(rows: Sequence[Row], subject: Subject, catalogue: Catalogue) -> list[RecipeFacts]:
    """Return what is known of each recipe that the workload was measured with; of none, plain bf16."""
    by_recipe: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        if row.speed.samples_per_s is not None and gpu_of(row.setup, catalogue) is not None:
            by_recipe[row.setup.recipe].append(row)
    if not by_recipe:
        own = (subject.info.batch_size,) if subject.info else ()
        return [RecipeFacts(recipe="bf16", precision="bf16", batches=own)]
    facts = []
    for recipe, own_rows in by_recipe.items():
        setup = own_rows[0].setup
        fixed, per_sample = _memory_of(own_rows, subject.params, catalogue)
        facts.append(
            RecipeFacts(
                recipe=recipe,
                precision=precision_of(setup),
                batches=tuple(sorted({b for row in own_rows if (b := row.setup.batch_size_per_gpu)})),
                fixed_gib=fixed,
                gib_per_sample=per_sample,
                failure=next((row.validity.failures[0] for row in own_rows if row.is_barred), None),
            )
        )
    return facts


def precision_of(setup: Setup) -> str:
    if not setup.is_script:
        return setup.precision or ""
    match = re.search(r"fp8|bf16|fp16|tf32|fp32", f"{setup.recipe} {' '.join(setup.variant.values())}")
    return match[0] if match else ""


def _memory_of(
    rows: Sequence[Row], num_parameters: float | None, catalogue: Catalogue
) -> tuple[float, float | None]:
    """Return GiB that are there anyhow, and GiB per sample, by the rows' peaks; see `memory_line`.

    Without a record of the peak, the GPU's whole memory stands for it.
    """
    peaks = peaks_by_batch((row.setup.batch_size_per_gpu, row.overhead.peak_memory_gib) for row in rows)
    if not peaks:
        for row in rows:
            accelerator = accelerator_of(row.setup, catalogue)
            if row.setup.batch_size_per_gpu and accelerator:
                peaks[row.setup.batch_size_per_gpu] = accelerator.memory_gib
    return memory_line(peaks, num_parameters) if peaks else (0.0, None)


def gpu_of(setup: Setup, catalogue: Catalogue) -> str | None:
    """Return the name of the GPU that a row ran on, as the anchors have it; None if it is not known."""
    if setup.device_name is not None:
        return setup.device_name if identify(setup.device_name) else None
    accelerator = accelerator_of(setup, catalogue)
    return name_of(accelerator) if accelerator else None


def name_of(accelerator: Accelerator) -> str:
    return next(iter(accelerator.device_names), accelerator.name)


def anchor_of(row: Row, subject: Subject, catalogue: Catalogue) -> Anchor | None:
    """Return a row as predictions read it; None if it says nothing of a GPU's speed."""
    setup, gpu = row.setup, gpu_of(row.setup, catalogue)
    speed = row.speed.tokens_per_s if subject.unit == "tokens" else row.speed.samples_per_s
    if gpu is None or speed is None:
        return None
    config = subject.config(
        setup.recipe,
        precision=precision_of(setup),
        gpu=gpu,
        num_gpus=setup.num_gpus,
        batch=setup.batch_size_per_gpu,
        sequence_length=setup.sequence_length,
        date=_measured_on(row),
    )
    return Anchor(config=config, per_s=speed.value)


def near_anchors(published: Sequence[Anchor], subject: Subject) -> list[Anchor]:
    """Return the published runs that tell most: of models on several generations, and of like size."""
    places: dict[str, set[str]] = defaultdict(set)
    for anchor in published:
        places[anchor.config.workload].add(anchor.config.generation)
    num_alike: dict[tuple[str, ...], int] = defaultdict(int)
    kept, others = [], []
    own = _published_name(subject.workload).lower()
    for anchor in published:
        config = anchor.config
        alike = config.workload, config.gpu_name, config.precision
        num_alike[alike] += 1
        if config.model == own or (len(places[config.workload]) > 1 and num_alike[alike] <= _MOST_ALIKE):
            kept.append(anchor)
        elif config.unit == subject.unit and config.params and num_alike[alike] <= _MOST_ALIKE:
            others.append(anchor)
    if subject.params is not None:
        log_params = math.log(subject.params)
        others.sort(key=lambda anchor: abs(math.log(anchor.config.params or 1.0) - log_params))
    return [*kept, *others[:_NEAREST]]


@dataclass(frozen=True, kw_only=True)
class Query:
    """A configuration whose speed is to be predicted."""

    instance: InstanceType
    num_nodes: int
    facts: RecipeFacts
    recipe: str  # with the micro-batches that it takes
    batch_size_per_gpu: int
    micro_batch: int  # 0 where a script does not say its batch
    gpu: str

    @property
    def node(self) -> tuple[str, int, str, int]:
        """What decides the speed of one of its nodes."""
        return self.gpu, self.instance.num_accelerators, self.facts.recipe, self.micro_batch


def predicted_configurations(
    subject: Subject,
    facts: Sequence[RecipeFacts],
    measured: Sequence[Configuration],
    anchors: Sequence[Anchor],
    instances: Sequence[InstanceType],
    catalogue: Catalogue,
    scope: Scope,
    left_out: list[LeftOut],
) -> list[Configuration]:
    """Return what was not measured, predicted from `anchors`; `left_out` gets what cannot be.

    A rank's batch that does not fit in its GPU's memory is split into micro-batches.
    """
    known = {key_of(each) for each in measured}
    queries = [
        query
        for query in _queries(subject, facts, instances, catalogue, scope, left_out)
        if (query.instance.name, query.num_nodes, query.recipe, query.batch_size_per_gpu) not in known
    ]
    answers = predict(queries, subject, anchors, measured, scope.node_scaling)
    for query, answer in zip(queries, answers, strict=True):
        if isinstance(answer, str):
            left_out.append(LeftOut(instance=query.instance.name, recipe=query.facts.recipe, reason=answer))
    return [answer for answer in answers if isinstance(answer, Configuration)]


def predict(
    queries: Sequence[Query],
    subject: Subject,
    anchors: Sequence[Anchor],
    measured: Sequence[Configuration] = (),
    node_scaling: float | None = None,
) -> list[Configuration | str]:
    """Return for each query what is predicted from `anchors`, or the reason why nothing is.

    measured: where one node of a query is among them, its speed counts. node_scaling: see `Scope`.
    """
    from fastlaunch.analysis.predict import Predictor

    known = {key_of(each): each for each in measured}
    precisions = {query.node: query.facts.precision for query in queries}
    newest = max((anchor.config.year for anchor in anchors), default=0.0)
    configs = [
        replace(
            subject.config(
                recipe,
                precision=precision,
                gpu=gpu,
                num_gpus=num_gpus,
                batch=micro_batch or None,
                sequence_length=subject.sequence_length,
            ),
            year=newest,
        )
        for (gpu, num_gpus, recipe, micro_batch), precision in precisions.items()
    ]
    of_node = dict(zip(precisions, Predictor(anchors).predict(configs), strict=True))
    efficiency, source = _node_efficiency(measured)
    source = source if node_scaling is None else "as given"
    answers: list[Configuration | str] = []
    for query in queries:
        name, num_nodes, answer = query.instance.name, query.num_nodes, of_node[query.node]
        one_node = known.get((name, 1, query.recipe, query.batch_size_per_gpu))
        if one_node is not None:
            rate, deviation, evidence = one_node.samples_per_s, one_node.deviation_or_usual, "A"
        elif isinstance(answer, str):
            answers.append(answer)
            continue
        else:
            rate, deviation = median_and_deviation(answer.low, answer.high)
            rate, evidence = rate / subject.units_per_sample, answer.evidence
        assumption = None
        if num_nodes > 1:
            share = node_scaling or efficiency ** math.log2(num_nodes)
            rate *= num_nodes * share
            deviation = math.hypot(deviation, _NODE_DEVIATION)
            assumption = f"{num_nodes} nodes train {num_nodes * share:.2f} times as fast as one, {source}"
        num_gpus = num_nodes * query.instance.num_accelerators
        limits = _network_limit(subject, query, num_gpus), query.micro_batch * num_gpus / _MIN_STEP_S
        answers.append(
            Configuration(
                instance=name,
                num_nodes=num_nodes,
                recipe=query.recipe,
                batch_size_per_gpu=query.batch_size_per_gpu,
                num_gpus=num_gpus,
                samples_per_s=min(rate, *(limits if query.micro_batch else ())),
                deviation=deviation,
                evidence=evidence,
                assumption=assumption,
            )
        )
    return answers


def median_and_deviation(low: float, high: float) -> tuple[float, float]:
    """Return the median of a lognormal number whose range of 90% this is, and its logarithm's deviation."""
    return math.sqrt(low * high), math.log(high / low) / (2 * RANGE_DEVIATIONS)


def _network_limit(subject: Subject, query: Query, num_gpus: int) -> float:
    """Return samples/s at which exchanging fp32 gradients alone fills the network between nodes."""
    if query.num_nodes == 1 or subject.params is None:
        return math.inf
    sent_bytes = 2 * (query.num_nodes - 1) / query.num_nodes * 4 * subject.params
    step_s = sent_bytes / (query.instance.network_gbps / 8 * 1e9)
    return query.batch_size_per_gpu * num_gpus / step_s


def _node_efficiency(measured: Sequence[Configuration]) -> tuple[float, str]:
    """Return by which factor each doubling of the nodes misses twice the speed, and who says so."""
    one_node = {key_of(each): each.samples_per_s for each in measured if each.num_nodes == 1}
    logs = []
    for each in measured:
        single = one_node.get(key_of(replace(each, num_nodes=1)))
        if each.num_nodes > 1 and single is not None:
            logs.append(math.log(each.samples_per_s / single / each.num_nodes) / math.log2(each.num_nodes))
    if not logs:
        return NODE_EFFICIENCY, "an assumption"
    return min(1.0, math.exp(sum(logs) / len(logs))), "as measured on other nodes"


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
                    micro_batch = largest_part(batch, each, accelerator, is_script=subject.info is None)
                    if not micro_batch:
                        need_gib = each.fixed_gib + (each.gib_per_sample or 0.0)
                        leave(
                            each.recipe,
                            f"does not fit in memory: {need_gib:.3g} GiB for one sample, of"
                            f" {USABLE_MEMORY * accelerator.memory_gib:.3g} that can be used",
                        )
                        continue
                    recipe = _in_parts(each.recipe, batch // micro_batch)
                    if recipe is None:
                        leave(each.recipe, f"a batch of {batch} per GPU does not fit in memory, nor in parts")
                        continue
                    yield Query(
                        instance=instance,
                        num_nodes=num_nodes,
                        facts=each,
                        recipe=recipe,
                        batch_size_per_gpu=batch,
                        micro_batch=micro_batch,
                        gpu=name_of(accelerator),
                    )


@functools.cache
def _lacking_at(recipe: str, capability: str, gpu: str) -> str | None:
    try:
        resolved = resolve_recipe(recipe.split()[0], recipe.split()[1:])
    except RecipeError:
        return None  # a script's variant: the predictor knows which formats a GPU has
    return missing_part(resolved, Capabilities(compute_capability=parse_version(capability), gpu=gpu))


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
def _in_parts(recipe: str, num_parts: int) -> str | None:
    """Return the recipe's label with so many micro-batches; None for one that cannot have them."""
    if num_parts == 1:
        return recipe
    name, *overrides = recipe.split()
    try:
        return resolve_recipe(name, [*overrides, f"grad_accumulation={num_parts}"]).label
    except RecipeError:
        return None

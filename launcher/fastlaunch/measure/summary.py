"""`RunSummary`, which `summarize` makes when a run is collected.

It is stored with the run, so that comparing never reads step files.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fastlaunch.core.data import read
from fastlaunch.core.terminal import printable_data
from fastlaunch.jobs.job import SCRIPT_RECIPE, names_variant
from fastlaunch_train.recipes.recipe import Recipe
from fastlaunch_train.recipes.recipes import recipe_of
from fastlaunch_train.records.records import Check, Eval

#: The text for useless limits.
BOUNDLESS = "wider than 100x"
#: The key of headers and fingerprints for the digest of a script's command, if the command is not recorded.
WORDS = "words"
#: The key of a fingerprint for the digest of a script's files.
VERSION = "version"


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A measured quantity with its 95% interval; `low` and `high` are None if there is none."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def is_boundless(self) -> bool:
        """Whether the limits of a positive quantity are useless: more than 10 x apart each way."""
        if self.low is None or self.high is None:
            return False
        return not (self.low > 0 and self.high <= 100 * self.low and math.isfinite(self.high))

    def range_text(self, format_value: Callable[[float], str]) -> str | None:
        """Return `1.02 to 1.89`; BOUNDLESS for useless limits, None without limits."""
        if self.low is None or self.high is None:
            return None
        return BOUNDLESS if self.is_boundless else f"{format_value(self.low)} to {format_value(self.high)}"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What was trained, how and on what."""

    kind: str  # `records`, of step records, or `published`, of a CSV row: no steps, so no interval of its own
    workload: str
    sample_unit: str
    flops_per_sample: int | None = None
    recipe: str  # its label, with the overrides that change what the workload does by itself
    precision: str | None = None
    data: str  # as the header says; `published` for a published row
    batch_size_per_gpu: int | None = None  # None where a script does not say
    sequence_length: int | None = None  # tokens of a sample
    num_nodes: int
    num_gpus: int  # ranks over all nodes
    instance: str | None = None
    device_name: str | None = None
    #: What must agree for two runs to be repeats of each other: GPU, versions, attention backend, data.
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    variant: Mapping[str, str] = field(default_factory=dict)  # of a script: text by the names it was given

    @property
    def version(self) -> str | None:
        """The digest of a script's files; None for a workload or if unknown."""
        return self.fingerprint.get(VERSION)

    @property
    def read_data(self) -> str | None:
        """The data, without the digest of the workload's own file, which `version` covers."""
        data = self.fingerprint.get("data")
        return data.partition("own ")[0].strip() or None if data and self.version else data

    @property
    def is_of_sequences(self) -> bool:
        """Whether its samples are of any length, so that people count their tokens."""
        return self.sample_unit == "sequences"

    @property
    def is_on_cpu(self) -> bool:
        """Whether a machine of the user's own trained it without a GPU."""
        return self.instance is None and self.device_name is not None and "NVIDIA" not in self.device_name

    @property
    def is_script(self) -> bool:
        """Whether it was the user's own command."""
        return self.precision == SCRIPT_RECIPE.precision

    @property
    def known_recipe(self) -> Recipe | None:
        """The recipe that the label names; None for a script's variant or an unknown published name."""
        return None if self.is_script else recipe_of(self.recipe)

    @property
    def num_parts(self) -> int:
        """The number of micro-batches in a GPU's batch."""
        recipe = self.known_recipe
        return recipe.grad_accumulation if recipe else 1

    @property
    def micro_batch(self) -> int | None:
        """The samples that a GPU computes at once; None if a script does not record them."""
        return None if self.batch_size_per_gpu is None else self.batch_size_per_gpu // self.num_parts

    def is_named(self, text: str) -> bool:
        """Return whether `text` is the recipe's label, or a script's variant or part of it."""
        return text == self.recipe or (self.is_script and names_variant(text, self.variant))

    @property
    def global_batch(self) -> int | None:
        """Samples per optimizer step over all GPUs, as requested; None if a script does not record them."""
        return None if self.batch_size_per_gpu is None else self.batch_size_per_gpu * self.num_gpus


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The steps of the attempt with the most retained steps. A published row knows few of these."""

    step_time_s: Interval | None = None  # synchronised wall time of the slowest rank per retained step
    num_retained_steps: int = 0
    samples_per_step: float | None = None  # over all ranks
    tokens_per_step: float | None = None  # over all ranks, without padding
    median_step_time_s: float | None = None  # device time, per step the greatest over ranks
    p95_step_time_s: float | None = None  # the 95th percentile of the same
    p5_step_time_s: float | None = None  # the 5th; unknown of older summaries
    data_wait_fraction: float | None = None  # of the wall time, fetching batches; of the rank that waits most
    utilization: float | None = None  # fraction of the time in which the least busy GPU ran a kernel, by NVML
    late: float | None = None  # log of the last half's mean over that of all retained steps
    warmup_s: float | None = None  # what the warm-up steps took
    compiled_late: bool = False  # a rank compiled among the retained steps, which count all the same
    num_warmup_steps: int | None = None


@dataclass(frozen=True, kw_only=True)
class Startup:
    """Seconds before the first step."""

    boot_s: float | None = None  # until a machine started for the run ran its script
    pull_s: float | None = None  # fetching code, image and inputs, and installing, after that
    install_s: float | None = None  # of that, installing what the run requires
    inputs_s: float | None = None  # of that, fetching its inputs; None where SageMaker did
    input_bytes: int | None = None
    fetch_s: float | None = None  # fetching a model's weights from the hub, after that
    build_s: float | None = None  # building model and data
    compile_s: float | None = None
    compile_cached: bool = False  # every rank found work of an earlier run on the disk


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """The checkpoints of a run, each as on its slowest rank."""

    longest_s: float | None = None  # from beginning one until it was written; None if there was none
    total_s: float | None = None  # for which the steps stood still; None of older records too
    write_s: float | None = None  # a mean, of writing one beside the steps; None where they waited for it
    number: int = 0
    last_step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Quality:
    """The losses and evaluations of the training, and the checks of its numerics."""

    first_loss: float | None = None  # of training at the first step: that of the initial weights
    final_loss: float | None = None  # of training, a mean over the last steps
    #: The change of the training loss per step over the last half of the steps; negative where it falls.
    loss_slope: float | None = None
    evals: tuple[Eval, ...] = ()  # on held-out data, by step
    eval_s: float | None = None  # all of them together
    checks: tuple[Check, ...] = ()  # of the recipe's numerics, before the steps
    skipped_fraction: float | None = None  # of the steps, by the loss scaler; None without one


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """The bandwidth of an all-reduce between the nodes, before the steps."""

    #: 10^9 bytes per second by nccl-tests' definition: 2 (n - 1) / n x bytes / seconds for n ranks.
    bus_gb_per_s: float
    message_bytes: int  # of each rank
    fabric: str  # the network between nodes, such as `efa` or `socket`

    def __str__(self) -> str:
        return (
            f"{self.bus_gb_per_s:.3g} GB/s of bus bandwidth between nodes over {self.fabric} "
            f"(all-reduce of {self.message_bytes / 2**20:.3g} MiB)"
        )


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """The parts of a step's time by the profiler, in a few steps after the counted ones.

    The profiler slows steps down, so `step_time_s` differs from the run's step time in `Timing`.
    """

    num_steps: int
    step_time_s: float  # their mean
    #: Seconds of a step by part of STEP_PARTS, without absent parts; they add up to step_time_s.
    #: Communication is the part that no computation hides.
    parts_s: Mapping[str, float]
    overlapped_communication_s: float = 0.0  # hidden under computation, so in none of the parts


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Machine, date and versions of a run."""

    service: str | None = None  # `sagemaker` if the instance was SageMaker's
    host_id: str | None = None  # of several nodes, theirs joined by commas
    measured_on: str | None = None  # ISO date
    record_schema: int | None = None
    recipe_schema: int | None = None
    # Older summaries lack these and are the same otherwise, so they are not compared.
    started_at: str | None = field(default=None, compare=False)  # ISO 8601
    session: str | None = field(default=None, compare=False)  # the submission that the run belongs to
    round: int | None = field(default=None, compare=False)  # which of the submission's rounds, from 1
    max_rounds: int | None = field(default=None, compare=False)  # that it planned, to stop when settled
    commit: str | None = field(default=None, compare=False)  # of the training code, or the script
    files: Mapping[str, str] = field(default_factory=dict, compare=False)  # digests of a script's, by path
    power_limit_w: float | None = field(default=None, compare=False)  # of its GPU


@dataclass(frozen=True, kw_only=True)
class Figures:
    """Fields that only a published row has, except the total time."""

    source: str | None = None
    derived: bool = False  # worked out from published percentages
    total_time_s: float | None = None  # of a script without steps, too: its wall time
    num_samples: int | None = None
    metric: str | None = None
    metric_value: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run for the analysis, recorded step by step or published as a total.

    Unknown fields are None; older records have more of them.
    """

    setup: Setup
    seed: int | None = None
    #: As in a record, or `killed` if a rank has no end line; of several ranks the one nearest the cause.
    status: str
    ended: str | None = None  # how it ended, in words, unless it completed
    num_steps: int = 0
    timing: Timing = Timing()
    startup: Startup = Startup()
    checkpoints: Checkpoints = Checkpoints()
    quality: Quality = Quality()
    peak_memory_gib: float | None = None
    padding_fraction: float | None = None  # of the tokens
    all_reduce: AllReduce | None = None  # None for one node, and for older records
    kernels: str | None = None  # what one forward pass ran, in words, for workloads that measure fusion
    profile: StepProfile | None = None  # of rank 0, where one was asked for
    environment: Environment = Environment()
    figures: Figures = Figures()
    warnings: tuple[str, ...] = ()
    uncounted: tuple[str, ...] = ()  # what ran or stepped and is in none of the figures, in words
    problems: tuple[str, ...] = ()  # what makes the run unfit to compare, in words

    @property
    def is_measured(self) -> bool:
        """Whether its figures count: it is fit to compare, and has a time or a published metric."""
        figures = (self.timing.step_time_s, self.figures.total_time_s, self.figures.metric_value)
        return not self.problems and any(figure is not None for figure in figures)

    @property
    def step_time_s(self) -> float | None:
        """The step time that counts; None without one, and if `problems` make the run unfit to compare."""
        step_time_s = self.timing.step_time_s
        return step_time_s.value if step_time_s and self.is_measured else None

    @property
    def pair_number(self) -> int | None:
        """The number that paired runs share: the seed, or for a script the round."""
        return self.environment.round if self.setup.is_script else self.seed


def read_summary(data: Any) -> RunSummary:
    """Return the summary from its `to_data`, with printable texts. Raises UserError."""
    return read(RunSummary, printable_data(data), "run summary")

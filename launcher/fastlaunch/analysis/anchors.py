"""Measured runs as numbers for predictions, and a reader of them from CSV.

The CSV has the columns of `COLUMNS`; it may use other packages' names for units, precisions and GPUs.
"""

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from fastlaunch.catalog.hardware import Gpu, identify, image_flops, training_throughput

Row = Mapping[str, str]

COLUMNS = (
    *("source_repo", "path", "model", "params", "task", "precision", "gpu", "num_gpus", "num_nodes"),
    *("batch_per_gpu", "seq_or_image", "throughput", "unit", "date", "notes"),
)
#: What the classes of evidence of a prediction mean, the best first.
CLASS_MEANINGS = {
    "A": "predicted from this model and precision on this generation of GPU",
    "B": "predicted from this model and this generation, which were not measured together",
    "B0": "predicted from the model's size alone",
    "C": "predicted without a measurement on this generation of GPU, or without any in FP8",
    "D": "predicted for several GPUs without NVLink",
}
CLASSES = tuple(CLASS_MEANINGS)
#: The largest share of the dense peak that matrix products of a training reach: large ones alone come to 0.87
#: on an A100 and 0.80 on an H100 in bf16, and to 0.71 in FP8.
MOST_OF_PEAK = 0.75
_FROZEN = r"lora|adapter|peft|prefix|frozen"
#: The source of what was measured for fastlaunch.
OWN_SOURCE = "fastlaunch"
#: Parameters of adapters over all weights, as of rank 16 on all linear layers of LLAMA2-7B.
_USUAL_ADAPTERS = 0.006
#: Weights that a token uses in mixtures of experts whose names do not say it, by their model cards.
_ACTIVE_PARAMS = {
    "deepseekv3": 37e9,
    "deepseekr1": 37e9,
    "gptoss120b": 5.1e9,
    "gptoss20b": 3.6e9,
    "mixtral8x7b": 12.9e9,
}
#: Precisions that mean the best format that the GPU has, as `FP8/AMP mix`.
_MIX = r"mix.*amp|amp.*mix"
#: FLOPs of a training per weight and image of 224 pixels: those of ResNet-50.
_IMAGE_FLOPS_PER_WEIGHT = 960.0
_SECONDS = {
    **dict.fromkeys(("s", "sec", "second"), 1),
    **dict.fromkeys(("min", "minute"), 60),
    **dict.fromkeys(("h", "hr", "hour"), 3600),
    "day": 86400,
}
#: Units of what is spent, not processed.
_SPENT = {*_SECONDS, "m", "ms", "millisecond", "us", "usd", "joule"}
_THINGS = {
    **dict.fromkeys(("token", "tok", "word"), "tokens"),
    **dict.fromkeys(("image", "img", "im", "picture"), "images"),
    **dict.fromkeys(("sample", "example", "sequence", "seq", "sentence", "record"), "samples"),
}


class Refusal(Exception):
    """The reason why a row gets no number."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A way to train a model on GPUs, as numbers that predictions compare."""

    workload: str  # model and unit, normalised
    model: str
    params: float | None
    image_flops: float | None  # of a forward and backward pass on one image
    unit: str  # such as `images`
    family: str
    precision: str
    gpu_name: str
    gpu: Gpu | None
    num_gpus: float
    log_batch: float | None
    sequence: float | None
    year: float  # since 2023, of the software
    task: str
    source: str  # who measured it: the repository without its version, or empty
    trained_params: float | None = None  # if not all are trained

    @property
    def is_frozen(self) -> bool:
        """Return whether most weights are frozen, as by LoRA."""
        return self.trained_params is not None or bool(
            re.search(_FROZEN, f"{self.task} {self.precision} {self.model}")
        )

    @property
    def exchanged_params(self) -> float | None:
        """Return the parameters whose gradients GPUs exchange: of adapters, if unknown, the usual share."""
        if self.trained_params is not None or self.params is None:
            return self.trained_params
        return self.params * (_USUAL_ADAPTERS if self.is_frozen else 1)

    @property
    def flops_per_weight(self) -> int:
        """Return the FLOPs of a token for each weight that it uses.

        They are 2 for the forward pass, 2 for the gradient of the input, 2 for that of the weight unless it
        is frozen, and 2 for a forward pass that activation checkpointing repeats. NVIDIA counts alike: 663
        TFLOP/s at 24,824 tokens/s, with LoRA of 6.7 billion weights (NeMo 24.12).
        """
        repeated = 2 if "activation_checkpointing=block" in self.model else 0
        return (4 if self.is_frozen else 6) + repeated

    @property
    def generation(self) -> str:
        return self.gpu.generation if self.gpu else self.gpu_name

    @property
    def is_narrow(self) -> bool:
        """Return whether matrix products take fewer than 16 bits."""
        return self.family in ("fp8", "fp4")

    @property
    def peak_tflops(self) -> float:
        """Return a known GPU's peak in the format of the matrix products."""
        assert self.gpu is not None
        peaks = self.gpu.peak_tflops
        formats = {
            "single": ("tf32", "fp32") if "tf32" in self.precision else ("fp32",),
            "half": ("bf16", "fp16"),
            "fp8": ("fp8",),
            "fp4": ("fp4", "fp8"),
        }[self.family]
        return next((peaks[name] for name in formats if name in peaks), max(peaks.values()))

    @property
    def active_params(self) -> float | None:
        """Return the weights that a token uses: of a mixture of experts only a part of `params`."""
        if self.params is None:
            return None
        in_name = re.search(r"\ba(\d+)b\b", re.sub("[^a-z0-9]", " ", self.model))
        if in_name:
            return float(in_name[1]) * 1e9
        name = re.sub("[^a-z0-9]", "", self.model)
        return next((active for known, active in _ACTIVE_PARAMS.items() if known in name), self.params)

    @property
    def log_ceiling(self) -> float:
        """Return the log of units/s of a GPU at which a dense model reaches `MOST_OF_PEAK`, or infinity.

        The FLOPs of other units than tokens and images are unknown.
        """
        if self.gpu is None:
            return math.inf
        flops = self.image_flops
        if self.unit == "tokens" and self.active_params is not None:
            flops = self.active_params * self.flops_per_weight
        if not flops:
            return math.inf
        peaks = [self.peak_tflops]
        if self.family == "single":
            # Libraries take TF32 for convolutions in fp32.
            peaks.append(self.gpu.peak_tflops.get("tf32", 0.0))
        elif re.search(_MIX, self.precision):
            peaks += self.gpu.peak_tflops.values()
        return math.log(MOST_OF_PEAK * max(peaks) * 1e12 / flops)

    @property
    def log_flops(self) -> float | None:
        """Return the log of FLOPs of a forward and backward pass per unit, up to the unit's constant."""
        if self.unit == "images":
            if self.image_flops is not None:
                return math.log(self.image_flops)
            if self.params is None:
                return None
            return math.log(_IMAGE_FLOPS_PER_WEIGHT * self.params) + 2 * math.log(
                (self.sequence or 224) / 224
            )
        params = self.active_params
        if params is None or (self.unit == "samples" and self.sequence is None):
            return None
        flops = self.flops_per_weight * params
        if self.sequence and self.sequence >= 64:
            # A decoder of `params` weights has about (params / 196,608)^(1/3) layers, 128 times as wide.
            width = 128 * (params / 196_608) ** (1 / 3)
            flops += params * self.sequence / width
            if self.unit == "samples":
                flops *= self.sequence
        return math.log(flops)


@dataclass(frozen=True, kw_only=True)
class Anchor:
    """A measured run. per_s: units per second, summed over its GPUs."""

    config: Config
    per_s: float


def config_of(
    *,
    model: str,
    unit: str,
    precision: str,
    gpu: str,
    num_gpus: float,
    params: float | None = None,
    trained_params: float | None = None,
    flops: float | None = None,
    batch: float | None = None,
    sequence: float | None = None,
    date: str = "",
    task: str = "",
    source: str = "",
    identify: Callable[[str], Gpu | None] = identify,
) -> Config:
    """Return the configuration.

    unit: such as `images`. flops: of a forward and backward pass on one image; the table's by default. batch:
    per GPU. date: `2024-06-12` or `2024-06`.
    """
    known = identify(gpu)
    precision = precision.lower()
    unit = _THINGS.get(unit.removesuffix("s"), unit)
    return Config(
        workload=f"{re.sub(r'[^a-z0-9]', '', model.lower())} {unit}",
        model=model.lower(),
        params=params,
        trained_params=trained_params,
        image_flops=(flops or image_flops(model, sequence)) if unit == "images" else None,
        unit=unit,
        family=precision_family(precision),
        precision=precision,
        gpu_name=known.name if known else gpu,
        gpu=known,
        num_gpus=num_gpus,
        log_batch=math.log(batch) if batch else None,
        sequence=sequence,
        year=_year(date),
        task=task.lower(),
        source=re.sub(r"_v[\d.]+$", "", source),
    )


def read(row: Row, identify: Callable[[str], Gpu | None] = identify) -> tuple[Config, float]:
    """Return the row's configuration, and the seconds in its unit's time, such as 60 for `images per minute`.

    Raises Refusal with the reason if the row names no configuration.
    """
    unit, per_s = read_unit(row.get("unit") or "")
    num_gpus = _positive(row, "num_gpus")
    if num_gpus is None:
        raise Refusal("num_gpus is missing")
    _positive(row, "num_nodes")
    model, gpu = ((row.get(column) or "").strip() for column in ("model", "gpu"))
    for column, text in (("model", model), ("gpu", gpu)):
        if not text:
            raise Refusal(f"{column} is missing")
    config = config_of(
        model=model,
        unit=unit,
        precision=(row.get("precision") or "").strip(),
        gpu=gpu,
        num_gpus=num_gpus,
        params=_positive(row, "params", strict=False),
        batch=_positive(row, "batch_per_gpu", strict=False),
        sequence=_positive(row, "seq_or_image", strict=False),
        date=row.get("date") or "",
        task=row.get("task") or "",
        source=row.get("source_repo") or "",
        identify=identify,
    )
    return config, per_s


def read_anchors(
    rows: Iterable[Row], identify: Callable[[str], Gpu | None] = identify
) -> tuple[list[Anchor], list[str]]:
    """Return the measured rows, and the reasons why other rows are left out."""
    anchors, skipped = [], []
    for row in rows:
        try:
            config, per_s = read(row, identify)
            throughput = _positive(row, "throughput")
            if throughput is None:
                raise Refusal("no throughput")
        except Refusal as refusal:
            skipped.append(str(refusal))
        else:
            anchors.append(Anchor(config=config, per_s=throughput / per_s))
    return anchors, skipped


@functools.cache
def published_anchors() -> tuple[Anchor, ...]:
    """Return the published runs that come with fastlaunch."""
    return tuple(read_anchors(training_throughput())[0])


def read_unit(text: str) -> tuple[str, float]:
    """Return the counted unit and the seconds of its time, from `images/s` or `tokens per minute`."""
    unit = text.strip().lower()
    if not unit:
        raise Refusal("unit is missing")
    if unit in ("ips", "fps", "tps"):
        unit = {"ips": "images", "fps": "frames", "tps": "tokens"}[unit] + "/s"
    match = re.fullmatch(r"([a-z][a-z _-]*?)\s*(?:/|\bper\b)\s*([a-z]+?)s?", unit)
    thing, period = (match[1].strip(), match[2]) if match else ("", "s")
    if not thing or period not in _SECONDS or thing.removesuffix("s") in _SPENT:
        raise Refusal(f"unit {text.strip()!r} is not a throughput such as images/s")
    singular = thing.removesuffix("s")
    return _THINGS.get(singular, singular + "s"), float(_SECONDS[period])


#: Patterns of precisions, with their families. The first match counts.
_FAMILIES = (
    (_MIX, "half"),
    (r"fp4", "fp4"),
    (r"fp8|float8|8-?bit|e4m3", "fp8"),
    (r"amp|mixed|half|16", "half"),
    (r"32|single|full|fp64", "single"),
)


def precision_family(precision: str) -> str:
    """Return `single`, `half`, `fp8` or `fp4`."""
    text = precision.replace("ampere", "")
    return next((family for pattern, family in _FAMILIES if re.search(pattern, text)), "half")


def _positive(row: Row, column: str, *, strict: bool = True) -> float | None:
    """Return the number in `column`; None if the cell is empty. Raises Refusal if it is not above 0.

    strict: refuse text that is not a number; otherwise such text, as `10@FP16, 4@TF32`, counts as missing.
    """
    text = (row.get(column) or "").strip().lower()
    try:
        value = float(text.removesuffix("px").replace("_", "")) if text else None
    except ValueError:
        if strict:
            raise Refusal(f"{column} is {text!r}, which is not a number") from None
        return None
    if value is not None and not (math.isfinite(value) and value > 0):
        raise Refusal(f"{column} is {text}, which is not above 0")
    return value


def _year(date: str) -> float:
    """Return the years from 2023 to `2024-06-12` or `2024-06`; 0 without a date."""
    match = re.match(r"(20\d\d)(?:-(\d\d))?", date)
    return int(match[1]) + (int(match[2] or 7) - 1) / 12 - 2023 if match else 0.0

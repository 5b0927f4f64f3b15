"""The workloads by name. Importing this needs no torch: a workload's module is imported to build it.

A name is built in, such as `vit-huge`, or `timm:MODEL` (any timm image model), `hf-clm:MODEL` (any causal
language model of the Hugging Face hub, or a folder), `hf-lora:MODEL` and `hf-sft:MODEL` (fine-tuning of such
a model), `gelu:ROWSxCOLUMNS` or `./file.py:function` (the user's function, which returns a
`fastlaunch_train.Workload`; `function_arguments` parses its arguments).
"""

import ast
import math
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class WorkloadInfo:
    """What is known of a workload without building it."""

    name: str
    description: str
    module: str
    sample_unit: str
    batch_size: int
    small: str  #: the workload that replaces it where there is no GPU
    #: FLOPs of a training step, forward and backward, without recomputation; None: unknown.
    flops_per_sample: int | None = None
    num_parameters: int | None = None
    width: int | None = None  #: features of a token of a vision transformer; None: another model, or unknown
    takes: tuple[str, ...] = ()  #: the fields of `ModelOptions` that it uses
    sequence_length: int | None = None  #: tokens of a sample by default; None: the model says, or none
    packages: tuple[str, ...] = ()  #: what it needs beside the recipe, by the names that are imported
    arguments: tuple[str, ...] = ()  #: what --set-workload gives to a workload that is built in

    @property
    def is_own(self) -> bool:
        """Whether it is the user's, about which little is known before it is built."""
        return ".py:" in self.name

    @property
    def is_fine_tuning(self) -> bool:
        """Whether it is of a causal language model, on documents in JSON Lines or on text."""
        return self.module == _TUNED

    @property
    def optimizer(self) -> str:
        """Its optimizer in a recipe with `optimizer=workload`; a user's workload may name another."""
        if self.is_own:
            return "sgd"
        # The optimizers are as published; the small models learn in few steps with AdamW.
        published = {
            "fastlaunch_train.workloads.vit": "sgd",
            "fastlaunch_train.workloads.causal_lm": "adafactor",
        }
        return "adamw" if self.name == self.small else published.get(self.module, "adamw")


#: The type of an argument of a user's workload.
Scalar = str | int | float | bool | None

_TEXT_OPTIONS = ("model", "tokenizer", "sequence_length")
_TUNED = "fastlaunch_train.workloads.fine_tuning"
#: Fine-tuning by its prefix: a description, the arguments, and packages.
_FINE_TUNING: Mapping[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "hf-lora:": ("LoRA of a causal language model", ("rank", "alpha", "dropout", "targets"), ("peft",)),
    "hf-sft:": ("full fine-tuning of a causal language model", (), ()),
}

#: Models for fine-tuning that need no files: their weights are random. `fine_tuning` has their sizes.
SHAPES = (
    *("llama-2-7b", "llama-3.1-8b", "llama-3.2-1b", "llama-3.2-3b", "qwen3-8b"),
    *("llama-tiny", "qwen3-tiny"),
)
#: Their linear layers, by Transformers' names, without the head.
_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

WORKLOADS: Mapping[str, WorkloadInfo] = {
    info.name: info
    for info in (
        WorkloadInfo(
            name="vit-huge",
            description="ViT-Huge/16 at 224 px, 1000 classes, as in the FP8 experiment",
            module="fastlaunch_train.workloads.vit",
            sample_unit="images",
            # 3 x forward, less the patch embedding's input gradient; FlopCounterMode counts the same.
            flops_per_sample=763_504_000_000,
            num_parameters=632_199_400,
            width=1280,
            batch_size=64,
            small="vit-wide",
        ),
        WorkloadInfo(
            name="vit-tiny",
            description="a small ViT at 32 px, 10 classes, that two CPU cores train in seconds",
            module="fastlaunch_train.workloads.vit",
            sample_unit="images",
            width=64,
            batch_size=8,
            small="vit-tiny",
        ),
        WorkloadInfo(
            name="vit-wide",
            description="a small ViT of a width and a batch that every recipe takes, for a CPU",
            module="fastlaunch_train.workloads.vit",
            sample_unit="images",
            width=256,
            batch_size=16,
            small="vit-wide",
        ),
        WorkloadInfo(
            name="gpt2-xsmall",
            description="causal-LM fine-tuning of a small GPT-2 (rinna/japanese-gpt2-xsmall)",
            module="fastlaunch_train.workloads.causal_lm",
            sample_unit="sequences",
            num_parameters=37_398_016,
            batch_size=4,
            small="gpt2-tiny",
            takes=_TEXT_OPTIONS,
        ),
        WorkloadInfo(
            name="gpt2-tiny",
            description="a small GPT-2 on bytes, that two CPU cores train in seconds",
            module="fastlaunch_train.workloads.causal_lm",
            sample_unit="sequences",
            batch_size=4,
            small="gpt2-tiny",
            takes=_TEXT_OPTIONS,
        ),
        WorkloadInfo(
            name="distilbert-imdb",
            description="DistilBERT fine-tuned to tell good film reviews from bad",
            module="fastlaunch_train.workloads.sentiment",
            sample_unit="reviews",
            num_parameters=66_955_010,
            batch_size=12,
            small="distilbert-tiny",
            takes=_TEXT_OPTIONS,
        ),
        WorkloadInfo(
            name="distilbert-tiny",
            description="a small DistilBERT, that two CPU cores train in seconds",
            module="fastlaunch_train.workloads.sentiment",
            sample_unit="reviews",
            batch_size=12,
            small="distilbert-tiny",
            takes=_TEXT_OPTIONS,
        ),
        WorkloadInfo(
            name="gelu",
            description="GELU written out in five operations, forward alone: what pointwise fusion gains",
            module="fastlaunch_train.workloads.gelu",
            sample_unit="tensors",
            batch_size=8,
            small="gelu:256x1024",
        ),
    )
}


class WorkloadError(ValueError):
    """A workload that does not exist or cannot be built; `hint` says what to do instead."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def names_folder(name: str) -> bool:
    """Return whether `name` is a path, not the name of a model or tokenizer on the Hugging Face hub."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def workload_info(name: str) -> WorkloadInfo:
    """Return what is known of workload `name`. Raises WorkloadError, naming the nearest, if there is none."""
    if name in WORKLOADS:
        return WORKLOADS[name]
    if name.startswith("timm:") and len(name) > len("timm:"):
        return WorkloadInfo(
            name=name,
            description="a timm image model",
            module="fastlaunch_train.workloads.vit",
            sample_unit="images",
            batch_size=64,
            small="vit-wide",
        )
    if name.startswith("hf-clm:") and len(name) > len("hf-clm:"):
        return replace(
            WORKLOADS["gpt2-xsmall"], name=name, description="a causal language model", num_parameters=None
        )
    for prefix, (description, arguments, packages) in _FINE_TUNING.items():
        if name in (prefix, prefix.removesuffix(":")):
            raise WorkloadError(
                f"workload {name!r} names no model",
                f"give {prefix}FOLDER, a name on the Hugging Face hub, or one of {', '.join(SHAPES)}",
            )
        if name.startswith(prefix):
            _check_shape(name.removeprefix(prefix), prefix)
            return WorkloadInfo(
                name=name,
                description=description,
                module=_TUNED,
                sample_unit="sequences",
                batch_size=1,
                small=f"{prefix}llama-tiny",
                takes=("tokenizer", "sequence_length"),
                sequence_length=128 if name.endswith("-tiny") else 4096,
                packages=packages,
                arguments=arguments,
            )
    if re.fullmatch(r"gelu:[1-9]\d{0,8}x[1-9]\d{0,8}", name):
        return replace(WORKLOADS["gelu"], name=name, small=name)
    if ".py:" in name:
        return WorkloadInfo(
            name=name,
            description="the user's own",
            module=name,
            sample_unit="samples",
            batch_size=8,
            small=name,
        )
    near = get_close_matches(name, WORKLOADS, n=3, cutoff=0.5)
    raise WorkloadError(
        f"unknown workload {name!r}",
        (f"did you mean {' or '.join(near)}? " if near else "")
        + f"known: {', '.join(WORKLOADS)}, timm:MODEL, hf-clm:MODEL, hf-lora:MODEL, hf-sft:MODEL, "
        "gelu:ROWSxCOLUMNS, ./file.py:function",
    )


def _check_shape(model: str, prefix: str) -> None:
    """Raise WorkloadError for what is nearly the name of a shape, and neither a folder nor on the hub.

    Names on the hub have an owner; the few without are older than any of these models.
    """
    near = get_close_matches(model, SHAPES, n=1, cutoff=0.75)
    if near and model != near[0] and "/" not in model and not Path(model).is_dir():
        raise WorkloadError(
            f"workload {prefix + model!r}: there is no model {model!r}", f"did you mean {prefix}{near[0]}?"
        )


def sized(info: WorkloadInfo, arguments: Mapping[str, Scalar]) -> WorkloadInfo:
    """Return what is known of a workload with these arguments: of a user's, `width` is that of a token."""
    width = arguments.get("width")
    return replace(info, width=width) if info.is_own and type(width) is int else info


def function_arguments(name: str, texts: Sequence[str]) -> dict[str, Scalar]:
    """Return the arguments in `texts`, each KEY=VALUE, for workload `name`.

    Raises WorkloadError for text of another form, for keys and values that a built-in workload does not take,
    and for keys with which the user's function cannot be called: its file is read, not run.
    """
    given: dict[str, Scalar] = {}
    for text in texts:
        key, separator, value = text.partition("=")
        if not separator or not key.isidentifier():
            raise WorkloadError(f"--set-workload {text!r} is not KEY=VALUE", "give one such as depth=12")
        if key in given:
            raise WorkloadError(f"--set-workload gives {key} twice", "give it once")
        given[key] = _scalar(value)
    info = workload_info(name)
    if info.is_own:
        _check_keys(name, given.keys())
    elif unknown := [key for key in given if key not in info.arguments]:
        raise WorkloadError(
            f"workload {name!r} takes no --set-workload {unknown[0]}",
            f"it takes {', '.join(info.arguments)}"
            if info.arguments
            else "it is for a workload of your own, ./file.py:function, or hf-lora:MODEL",
        )
    else:
        for key, scalar in given.items():
            _check_lora(key, scalar)
        _check_targets(name, given.get("targets"))
    return given


def _check_targets(name: str, targets: Scalar) -> None:
    """Raise WorkloadError for a layer that a built-in shape lacks; other models are asked once loaded."""
    if targets in (None, "all-linear") or name.partition(":")[2] not in SHAPES:
        return
    for target in str(targets).replace(" ", "").split(","):
        if target.rpartition(".")[2] not in (*_LAYERS, "lm_head", "embed_tokens"):
            raise WorkloadError(
                f"workload {name!r}: no layer is called {target}, one of LoRA's targets",
                f"give all-linear, or some of {', '.join(_LAYERS)}",
            )


def _check_lora(key: str, value: Scalar) -> None:
    """Raise WorkloadError for a value that LoRA does not take."""
    number = value if type(value) in (int, float) else math.nan
    assert isinstance(number, int | float)
    is_valid, hint = {
        "rank": (type(value) is int and 1 <= number <= 1024, "give a whole number from 1 to 1024"),
        "alpha": (number > 0, "give a number above 0"),
        "dropout": (0 <= number < 1, "give a number from 0 up to 1, such as 0.05"),
        "targets": (
            isinstance(value, str) and all(name.strip() for name in value.split(",")),
            "give all-linear, or names of layers, as in q_proj,v_proj",
        ),
    }[key]
    if not is_valid:
        raise WorkloadError(f"--set-workload {key} is {value!r}", hint)


def _check_keys(name: str, keys: Set[str]) -> None:
    """Raise WorkloadError if the keys do not fit the function, provided its file defines it undecorated."""
    path, _, function = name.rpartition(":")
    try:
        body = ast.parse(Path(path).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return
    functions = [
        statement
        for statement in body
        if isinstance(statement, ast.FunctionDef) and statement.name == function
    ]
    if not functions or functions[-1].decorator_list:
        return
    signature = functions[-1].args
    needed = {argument.arg for argument in signature.args[: len(signature.args) - len(signature.defaults)]}
    by_name = zip(signature.kwonlyargs, signature.kw_defaults, strict=True)
    needed |= {argument.arg for argument, default in by_name if default is None}
    known = {argument.arg for argument in (*signature.args, *signature.kwonlyargs)}
    if needed - keys or (keys - known and signature.kwarg is None):
        raise WorkloadError(
            f"workload {name!r}: {function}({ast.unparse(signature)}) cannot be called with"
            f" {', '.join(sorted(keys)) or 'no arguments'}",
            "--set-workload KEY=VALUE gives its arguments",
        )


def _scalar(text: str) -> Scalar:
    """Parse `text` as a scalar of YAML 1.2; numbers that are not finite stay text."""
    words: Mapping[str, Scalar] = {"true": True, "false": False, "null": None, "~": None, "": None}
    if text.lower() in words:
        return words[text.lower()]
    if re.fullmatch(r"[-+]?\d+", text):
        return int(text)
    if re.fullmatch(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?", text) and math.isfinite(float(text)):
        return float(text)
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    return text

"""The workloads by name. No torch: a workload's module is imported to build it.

A name is built in, such as `vit-huge`, or `timm:MODEL` (any timm image model), `hf-clm:MODEL` (any causal
language model of the Hugging Face hub, or a folder), `gelu:ROWSxCOLUMNS` or `./file.py:function` (the user's
own function, which returns a `fastlaunch_train.Workload`; `function_arguments` are what it is called with).
"""

import ast
import math
import re
from collections.abc import Mapping, Sequence
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
    #: For a training step, forward and backward, without recomputation; None: unknown.
    flops_per_sample: int | None = None
    num_parameters: int | None = None
    takes: tuple[str, ...] = ()  #: the fields of `ModelOptions` that it has a use for

    @property
    def is_own(self) -> bool:
        """Whether it is the user's own, of which little is known before it is built."""
        return ".py:" in self.name

    @property
    def optimizer(self) -> str:
        """What trains it by a recipe with `optimizer=workload`; of a user's own, unless it names another."""
        if self.is_own:
            return "sgd"
        # As published; in few steps, AdamW makes the small ones learn.
        published = {
            "fastlaunch_train.workloads.vit": "sgd",
            "fastlaunch_train.workloads.causal_lm": "adafactor",
        }
        return "adamw" if self.name == self.small else published.get(self.module, "adamw")


#: What an argument of a user's own workload may be.
Scalar = str | int | float | bool | None

_TEXT_OPTIONS = ("model", "tokenizer", "sequence_length")

WORKLOADS: Mapping[str, WorkloadInfo] = {
    info.name: info
    for info in (
        WorkloadInfo(
            name="vit-huge",
            description="ViT-Huge/16 at 224 px, 1000 classes, as in the FP8 experiment",
            module="fastlaunch_train.workloads.vit",
            sample_unit="images",
            # 3 x forward less the patch embedding's input gradient; FlopCounterMode counts the same.
            flops_per_sample=763_504_000_000,
            num_parameters=632_199_400,
            batch_size=64,
            small="vit-tiny",
        ),
        WorkloadInfo(
            name="vit-tiny",
            description="a small ViT at 32 px, 10 classes, that two CPU cores train in seconds",
            module="fastlaunch_train.workloads.vit",
            sample_unit="images",
            batch_size=8,
            small="vit-tiny",
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
    """Return whether a model or tokenizer is named by a path, not by its name on the Hugging Face hub."""
    return name.startswith((".", "/", "~")) or name.count("/") > 1


def workload_info(name: str) -> WorkloadInfo:
    """Return what is known of workload `name`. Raises WorkloadError, naming the nearest."""
    if name in WORKLOADS:
        return WORKLOADS[name]
    if name.startswith("timm:") and len(name) > len("timm:"):
        return WorkloadInfo(
            name=name,
            description="a timm image model",
            module="fastlaunch_train.workloads.vit",
            sample_unit="images",
            batch_size=64,
            small="vit-tiny",
        )
    if name.startswith("hf-clm:") and len(name) > len("hf-clm:"):
        return replace(
            WORKLOADS["gpt2-xsmall"], name=name, description="a causal language model", num_parameters=None
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
        + f"known: {', '.join(WORKLOADS)}, timm:MODEL, hf-clm:MODEL, gelu:ROWSxCOLUMNS, ./file.py:function",
    )


def function_arguments(name: str, texts: Sequence[str]) -> dict[str, Scalar]:
    """Return the arguments that `texts`, KEY=VALUE each, give to the function of workload `name`.

    Values have the types of the function's annotations; without one they are YAML's scalars. The file is read
    and not run. Raises WorkloadError for a key or a value that the function does not take, and if it needs
    more. A function that the file does not define itself, or decorates, is only known when it is called.
    """
    given = dict(_pair(text) for text in texts)
    if len(given) < len(texts):
        raise WorkloadError("--set-workload gives a key twice", "give it once")
    if not workload_info(name).is_own:
        if given:
            raise WorkloadError(
                f"workload {name!r} takes no --set-workload",
                "it is for a workload of your own, ./file.py:function",
            )
        return {}
    definition = _definition(name)
    if definition is None:
        return {key: _scalar(text) for key, text in given.items()}
    signature = definition.args
    keywords = [*signature.args, *signature.kwonlyargs]
    known = {each.arg: ast.unparse(each.annotation) if each.annotation else "" for each in keywords}
    for key in given.keys() - known.keys():
        if signature.kwarg is None:
            near = get_close_matches(key, known, n=1)
            takes = f"it takes {', '.join(known)}" if known else "it takes no arguments"
            raise WorkloadError(
                f"workload {name!r}: {definition.name} takes no {key!r}",
                (f"did you mean {near[0]}? " if near else "") + takes,
            )
    needed = signature.args[: max(0, len(signature.args) - len(signature.defaults))]
    by_name = zip(signature.kwonlyargs, signature.kw_defaults, strict=True)
    needed += [each for each, default in by_name if default is None]
    if missing := [each.arg for each in needed if each.arg not in given]:
        raise WorkloadError(
            f"workload {name!r}: {definition.name} needs {', '.join(missing)}",
            f"add {' '.join(f'--set-workload {key}=VALUE' for key in missing)}",
        )
    return {key: _typed(name, key, text, known.get(key, "")) for key, text in given.items()}


def _pair(text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not (separator and key.isidentifier()):
        raise WorkloadError(f"--set-workload {text!r} is not KEY=VALUE", "give one such as depth=12")
    return key, value


def _definition(name: str) -> ast.FunctionDef | None:
    """Return how the file defines the function; None if it does not, or cannot be read."""
    path, _, function = name.rpartition(":")
    try:
        body = ast.parse(Path(path).read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return None
    found = [each for each in body if isinstance(each, ast.FunctionDef) and each.name == function]
    return found[-1] if found and not found[-1].decorator_list else None


def _typed(name: str, key: str, text: str, annotation: str) -> Scalar:
    """Return `text` as the `annotation` of `key` says. Raises WorkloadError if it is no such thing."""
    plain = re.sub(r"(?:typing\.)?Optional\[(.*)\]", r"\1 | None", annotation.strip("'\""))
    kinds = {kind.strip() for kind in plain.split("|")}
    if not kinds <= {"str", "int", "float", "bool", "None"}:
        return _scalar(text)
    if text in ("none", "None", "null") and "None" in kinds:
        return None
    value = _scalar(text)
    if type(value) is int and "int" not in kinds and "float" in kinds:
        return float(value)
    if type(value).__name__ in kinds:
        return value
    if "str" in kinds:
        return text
    raise WorkloadError(f"workload {name!r}: {key} is {text!r}", f"give {annotation}, as the file has it")


def _scalar(text: str) -> Scalar:
    """Return the scalar of YAML 1.2 that `text` is; what is not finite stays text."""
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

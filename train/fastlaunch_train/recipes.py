"""How to train, as data: a `Recipe` is complete and reproducible from its name and its overrides.

No torch here: the launcher imports this module to list, check and label recipes.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from typing import Any

#: Counts changes to the meaning of a recipe's fields; it is written to every record.
RECIPE_SCHEMA = 1

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "fp8")
BLOCKS = ("timm", "te")
FP8_SCALINGS = ("none", "delayed", "current")
COMPILE_MODES = ("none", "default", "reduce-overhead", "max-autotune")
COMPILE_SCOPES = ("block", "model")
PARALLELISMS = ("ddp",)
OPTIMIZERS = ("workload", "sgd", "adamw")
OPTIMIZER_IMPLS = ("auto", "for-loop", "foreach", "fused")


class RecipeError(ValueError):
    """A recipe that does not exist or contradicts itself; `hint` says what would do."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One way to train a model; which model, on which data, is the workload's business.

    precision: of matrix products. `fp32` keeps full fp32, `tf32` allows TF32, `bf16` and `fp16` autocast
        (fp16 with loss scaling), `fp8` is bf16 autocast with the Transformer Engine blocks in FP8.
    blocks: `timm` as the model was built, `te` with its transformer blocks replaced by Transformer Engine's.
    fp8_scaling: how FP8 scale factors are found; `none` unless precision is `fp8`.
    compile_scope: `block` compiles each transformer block, `model` the whole model.
    ddp_bucket_mb: size of DDP's gradient buckets. 160 MB holds two ViT-Huge blocks' fp32 gradients.
    optimizer, learning_rate: `workload` and None take the workload's own.
    optimizer_impl: `auto` leaves the choice to torch.
    """

    name: str
    description: str
    precision: str = "bf16"
    blocks: str = "timm"
    fp8_scaling: str = "none"
    compile_mode: str = "none"
    compile_backend: str = "inductor"
    compile_scope: str = "block"
    parallelism: str = "ddp"
    ddp_bucket_mb: int = 160
    optimizer: str = "workload"
    optimizer_impl: str = "auto"
    learning_rate: float | None = None
    overrides: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        for field, allowed in _CHOICES.items():
            value = getattr(self, field)
            if value not in allowed:
                raise RecipeError(
                    f"recipe {self.name}: {field} is {value!r}", f"it is one of {', '.join(allowed)}"
                )
        if not 1 <= self.ddp_bucket_mb <= 4096:
            raise RecipeError(f"recipe {self.name}: ddp_bucket_mb is {self.ddp_bucket_mb}", "give 1 to 4096")
        if self.learning_rate is not None and not 0 < self.learning_rate < float("inf"):
            raise RecipeError(
                f"recipe {self.name}: learning_rate is {self.learning_rate}", "give a number > 0"
            )
        if (self.precision == "fp8") != (self.fp8_scaling != "none"):
            raise RecipeError(
                f"recipe {self.name}: precision is {self.precision!r} with fp8_scaling {self.fp8_scaling!r}",
                "fp8 needs a scaling (delayed or current), and other precisions take none",
            )
        if self.precision == "fp8" and self.blocks != "te":
            raise RecipeError(
                f"recipe {self.name}: FP8 runs in Transformer Engine's blocks", "add --set blocks=te"
            )
        if self.blocks == "te" and self.precision not in ("bf16", "fp8"):
            raise RecipeError(
                f"recipe {self.name}: Transformer Engine blocks run in bf16 or fp8, not {self.precision}",
                "add --set precision=bf16",
            )
        if self.blocks == "te" and self.compile_mode != "none":
            raise RecipeError(
                f"recipe {self.name}: Transformer Engine's modules break torch.compile's graph",
                "use compile_mode=none with blocks=te",
            )
        # No spaces: labels are read back word by word.
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", self.compile_backend):
            raise RecipeError(
                f"recipe {self.name}: compile_backend is {self.compile_backend!r}",
                "give the name of one, such as inductor",
            )
        # An option without effect would set apart, by their labels, runs that did the same.
        if self.compile_mode == "none" and (self.compile_backend, self.compile_scope) != (
            "inductor",
            "block",
        ):
            raise RecipeError(
                f"recipe {self.name}: nothing is compiled, yet compile_backend is {self.compile_backend!r} "
                f"and compile_scope {self.compile_scope!r}",
                "add --set compile_mode=default, or use compile_backend=inductor and compile_scope=block",
            )
        if self.compile_mode in ("reduce-overhead", "max-autotune") and self.compile_backend != "inductor":
            raise RecipeError(
                f"recipe {self.name}: compile_mode {self.compile_mode} is Inductor's, "
                f"not {self.compile_backend}'s",
                "use compile_mode=default with another backend",
            )

    @property
    def label(self) -> str:
        """Name and overrides, as tables show them and as runs are pooled: `bf16 optimizer_impl=fused`."""
        return " ".join([self.name, *(f"{field}={value}" for field, value in self.overrides)])

    def to_record(self) -> dict[str, Any]:
        """Every resolved field, as the record header holds it."""
        resolved = asdict(self)
        resolved["overrides"] = dict(self.overrides)
        resolved["label"] = self.label
        resolved["schema"] = RECIPE_SCHEMA
        return resolved


_CHOICES: Mapping[str, tuple[str, ...]] = {
    "precision": PRECISIONS,
    "blocks": BLOCKS,
    "fp8_scaling": FP8_SCALINGS,
    "compile_mode": COMPILE_MODES,
    "compile_scope": COMPILE_SCOPES,
    "parallelism": PARALLELISMS,
    "optimizer": OPTIMIZERS,
    "optimizer_impl": OPTIMIZER_IMPLS,
}

RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(name="fp32", description="full fp32 matrix products, no autocast", precision="fp32"),
        Recipe(name="tf32", description="fp32 with TF32 matrix products (Ampere or newer)", precision="tf32"),
        Recipe(name="bf16", description="bf16 autocast, eager: the reference of the published experiments"),
        Recipe(name="fp16", description="fp16 autocast with dynamic loss scaling", precision="fp16"),
        Recipe(
            name="compile",
            description="bf16 autocast, torch.compile of each block",
            compile_mode="default",
        ),
        # One CUDA graph needs one compiled region, so these two compile the whole model.
        Recipe(
            name="compile-reduce-overhead",
            description="bf16 autocast, torch.compile with CUDA graphs",
            compile_mode="reduce-overhead",
            compile_scope="model",
        ),
        Recipe(
            name="compile-max-autotune",
            description="bf16 autocast, torch.compile that times its kernels (long to compile)",
            compile_mode="max-autotune",
            compile_scope="model",
        ),
        Recipe(
            name="te-bf16",
            description="Transformer Engine blocks in bf16, equivalent to timm's",
            blocks="te",
            optimizer_impl="fused",
        ),
        Recipe(
            name="te-fp8",
            description="Transformer Engine blocks in FP8, delayed scaling (Ada, Hopper, Blackwell)",
            precision="fp8",
            blocks="te",
            fp8_scaling="delayed",
            optimizer_impl="fused",
        ),
    )
}

#: Fields a user may override; the others are the recipe's identity.
OVERRIDABLE = tuple(f.name for f in fields(Recipe) if f.name not in ("name", "description", "overrides"))


def choices_of(field: str) -> tuple[str, ...]:
    """The values that a recipe's field may have; empty where it is a number or free text."""
    return _CHOICES.get(field, ())


def resolve_recipe(name: str, overrides: Iterable[str] = ()) -> Recipe:
    """The recipe `name` with `field=value` overrides applied in order.

    An override that changes nothing is dropped, so that equal recipes carry equal labels; the rest are
    sorted. Raises RecipeError for an unknown recipe, field or value, naming the nearest ones.
    """
    if name not in RECIPES:
        raise RecipeError(f"unknown recipe {name!r}", _suggest(name, RECIPES))
    base = RECIPES[name]
    values: dict[str, Any] = {}
    for override in overrides:
        field, separator, text = override.partition("=")
        field = field.strip().replace("-", "_")
        if not separator:
            raise RecipeError(
                f"override {override!r} is not FIELD=VALUE", "as in --set compile_mode=max-autotune"
            )
        if field not in OVERRIDABLE:
            raise RecipeError(f"a recipe has no field {field!r}", _suggest(field, OVERRIDABLE))
        values[field] = _parse(field, text.strip())
    changed = {field: value for field, value in sorted(values.items()) if value != getattr(base, field)}
    return replace(base, **changed, overrides=tuple((f, str(v)) for f, v in changed.items()))


def _parse(field: str, text: str) -> str | int | float | None:
    try:
        if field == "ddp_bucket_mb":
            return int(text)
        if field == "learning_rate":
            return None if text == "none" else float(text)
    except ValueError:
        raise RecipeError(f"{field} is {text!r}", "it is a number") from None
    return text


def _suggest(name: str, known: Iterable[str]) -> str:
    names = list(known)
    near = get_close_matches(name, names, n=3, cutoff=0.5)
    return (f"did you mean {' or '.join(near)}? " if near else "") + f"known: {', '.join(names)}"

"""`Recipe`: how to train, as data, and the values that its fields may have. No torch."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

#: Counts changes to the meaning of a recipe's fields; in every record.
RECIPE_SCHEMA = 3

#: FP8 scalings of Transformer Engine's blocks, and of the model's own through torchao.
TE_SCALINGS = ("delayed", "current", "block", "mxfp8")
TORCHAO_SCALINGS = ("tensorwise", "rowwise")
ZERO_STAGES = ("zero1", "zero2")
#: Modes in which torch.compile records CUDA graphs.
CUDA_GRAPH_MODES = ("reduce-overhead", "max-autotune")
#: Transformer Engine's documented default, pinned: DelayedScaling(amax_history_len=1024), release 2.15.
AMAX_HISTORY = 1024
#: The values of each field that takes one of several words.
CHOICES: Mapping[str, tuple[str, ...]] = {
    "precision": ("fp32", "tf32", "bf16", "fp16", "fp8"),
    "blocks": ("native", "te", "te-article", "fused"),
    "fp8_scaling": ("none", *TE_SCALINGS, *TORCHAO_SCALINGS),
    "fp8_format": ("hybrid", "e4m3"),
    "last_block": ("all", "class_token"),
    "dgrad_accumulation": ("split", "fast"),
    "weight_cast": ("forward", "optimizer"),
    "frozen_weights": ("native", "fp8", "nf4"),
    "kernels": ("torch", "liger"),
    "pointwise": ("written", "scripted", "library"),
    "engine": ("torch", "ort"),
    "compile_mode": ("none", "default", *CUDA_GRAPH_MODES),
    "compile_scope": ("block", "model", "wrapped"),
    "parallelism": ("ddp", "fsdp2", *ZERO_STAGES),
    "wire_dtype": ("fp32", "bf16"),
    "activation_checkpointing": ("none", "block"),
    "optimizer": ("workload", "sgd", "adamw", "adafactor"),
    "optimizer_impl": ("auto", "for-loop", "foreach", "fused"),
    "parameter_dtype": ("fp32", "bf16", "bf16-master"),
    "loop": ("ours", "lightning", "transformers"),
}
#: What is wrong, and what to do instead.
Problem = tuple[str, str]


class RecipeError(ValueError):
    """A recipe that does not exist or contradicts itself; `hint` says what to do instead."""

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


def refuse(problem: Problem | None, of: str) -> None:
    """Raise RecipeError if a rule has found a problem with `of`, such as `recipe bf16`."""
    if problem is not None:
        message, hint = problem
        raise RecipeError(f"{of}: {message}", hint)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One way to train a model; the workload determines the model and the data."""

    name: str
    description: str
    #: For matrix products. `fp32`: full fp32; `tf32`: TF32; `bf16`, `fp16`: autocast, fp16 with loss scaling;
    #: `fp8`: bf16 autocast, with the blocks' products in FP8.
    precision: str = "bf16"
    #: `native`: as the model was built. `te`: replaced by Transformer Engine's, which compute the same.
    #: `te-article`: replaced by Transformer Engine's with its defaults, as an article of November 2023 had
    #: them: they attend across the batch, and train another model. `fused`: ours, in bf16 or FP8, whose
    #: pointwise passes are fused with each other and with the casts.
    blocks: str = "native"
    fp8_scaling: str = "none"  #: how FP8 scale factors are found; `none` unless precision is `fp8`
    fp8_format: str = "hybrid"  #: `hybrid`: E4M3 forward, E5M2 for gradients
    fp8_blocks: str = "all"  #: which of the model's blocks compute in FP8: `all`, or a slice such as `1:-1`
    amax_history: int = AMAX_HISTORY  #: steps whose largest value gives the scale of delayed scaling
    #: Tokens that fused blocks compute in the last block, after its attention: `class_token` alone is all
    #: that reaches the head of a model that classifies by it.
    last_block: str = "all"
    #: For FP8 products of fused blocks and torchao for input gradients: `split` sums up in fp32, `fast` in
    #: fewer bits.
    dgrad_accumulation: str = "split"
    #: When fused blocks round weights to FP8: in each `forward` pass, or in the pass of the `optimizer`,
    #: which has to be fused SGD.
    weight_cast: str = "forward"
    #: Weights that are not trained, in the Linear layers of blocks: `native` in the recipe's precision, `fp8`
    #: rounded once, `nf4` in the 4 bits of QLoRA, which makes another model.
    frozen_weights: str = "native"
    kernels: str = "torch"  #: of a language model's norms, rotations, gates and loss; `liger` is Liger Kernel
    #: Pointwise functions that the model writes out in several operations: as `written`, `scripted` by
    #: torch.jit.script, or by torch's own single operator (`library`).
    pointwise: str = "written"
    engine: str = "torch"  #: what runs the model; `ort` is ONNX Runtime's ORTModule
    compile_mode: str = "none"
    compile_backend: str = "inductor"
    compile_scope: str = "block"  #: what is compiled at once; `wrapped`: the model and its parallel wrapper
    parallelism: str = "ddp"  #: `fsdp2`: torch's fully_shard; `zero1`, `zero2`: DeepSpeed
    ddp_bucket_mb: int = 160  #: 160 MB hold the fp32 gradients of two ViT-Huge blocks
    overlap_comm: bool = True  #: DeepSpeed exchanges gradients while it computes; DDP and FSDP2 always do
    wire_dtype: str = "fp32"  #: of gradients on their way between ranks
    grad_accumulation: int = 1  #: micro-batches that a rank's batch is split into
    activation_checkpointing: str = "none"  #: `block`: keep a block's input, recompute the rest in backward
    optimizer: str = "workload"
    optimizer_impl: str = "auto"  #: `auto`: torch chooses
    set_to_none: bool = True  #: free gradients, do not zero them
    #: `bf16`: weights are held and updated in bf16. `bf16-master`: bf16 weights, updated in fp32 masters.
    parameter_dtype: str = "fp32"
    #: The GPU does a whole step, optimizer and all, by one CUDA graph. With several GPUs it has no effect,
    #: because they exchange gradients as they come.
    step_graph: bool = False
    deterministic: bool = False  #: torch's deterministic algorithms
    loop: str = "ours"  #: whose loop calls the steps: ours, or Lightning's or Transformers' Trainer
    learning_rate: float | None = None  #: None: the workload's own
    overrides: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_record(cls, data: Mapping[str, Any]) -> "Recipe":
        """Return the recipe that `to_record` wrote."""
        values = {key: value for key, value in data.items() if key not in ("label", "schema")}
        values["overrides"] = tuple(dict(values["overrides"]).items())
        return cls(**values)

    @property
    def difference(self) -> str | None:
        """What its model is known to compute otherwise; None if only what a step computes is rounded."""
        if self.blocks == "te-article":
            return "its blocks attend across the batch, and train another model"
        if self.frozen_weights == "nf4":
            return "its frozen weights are rounded to 4 bits, and what is trained on them is another model"
        return None

    @property
    def is_equivalent(self) -> bool:
        """Whether its blocks compute what the model's do, up to rounding of what a step computes."""
        return self.difference is None

    @property
    def compiles(self) -> bool:
        """Whether the first call of the recipe's model compiles, scripts, exports or captures something."""
        compiled = self.compile_mode != "none" or self.pointwise == "scripted" or self.engine == "ort"
        return compiled or self.step_graph

    @property
    def label(self) -> str:
        """The name and overrides, by which runs are pooled: `bf16 optimizer_impl=fused`."""
        return " ".join([self.name, *(f"{field}={value}" for field, value in self.overrides)])

    def to_record(self) -> dict[str, Any]:
        """Return every resolved field, as a record's header holds it."""
        resolved = asdict(self)
        resolved["overrides"] = dict(self.overrides)
        resolved["label"] = self.label
        resolved["schema"] = RECIPE_SCHEMA
        # DDP exchanges gradients as they are, and those of bf16 parameters are bf16.
        if self.parallelism == "ddp" and self.parameter_dtype != "fp32":
            resolved["wire_dtype"] = "bf16"
        return resolved

"""The GPU memory that fine-tuning a language model takes, before anything ran: of Llama-type blocks.

What a block keeps for its backward pass is counted tensor by tensor, as by Korthikanti et al. 2022, "Reducing
Activation Recomputation in Large Transformer Models", section 4, with three differences: FlashAttention keeps
no matrix of scores; a frozen weight has no gradient, so its input is kept only if an adapter reads it; and
keys and values may have fewer features than queries.
"""

import math
from dataclasses import dataclass, replace

_GIB = 2**30
#: What a block keeps of a token, in bf16 numbers: multiples of the width, of the features of keys and values,
#: and of the width of the MLP. By whether linear weights are frozen, whether the kernels of norms and MLP are
#: fused, and whether blocks are compiled, which recomputes casts and pointwise functions.
#:
#: Eager, with adapters: both norms' inputs in fp32 (4), a bf16 copy of the input for each of six adapters'
#: products and for the output projection's (6), queries and attention (2); in the MLP gate, its SiLU, up, and
#: their product. With fp32 weights the norms keep their outputs, too, and the residual stream is in fp32.
_KEPT = {
    (True, False, False): (12, 1, 4),
    (True, True, False): (10, 1, 3),
    (True, False, True): (6, 1, 3),
    (True, True, True): (8, 1, 3),
    (False, False, False): (15, 1, 4),
    (False, True, False): (13, 1, 3),
    (False, False, True): (8, 1, 3),
    (False, True, True): (10, 1, 3),
}
#: Bytes of a logit: in bf16, in fp32, its log softmax, and the gradients in fp32 and bf16.
_BYTES_PER_LOGIT = 2 + 4 + 4 + 4 + 2
#: Bytes of a trained parameter with its gradient and AdamW's two moments. The cast of fp32 weights to bf16,
#: which autocast keeps for the step, comes on top.
_BYTES_PER_TRAINED = {"fp32": 4 + 4 + 8, "bf16-master": 2 + 2 + 4 + 8, "bf16": 2 + 2 + 4}
_AUTOCAST_BYTES = 2
#: Bytes of a frozen weight of a linear layer; embeddings and the head stay in bf16. NF4 has 4 bits, and of 64
#: weights a scale of 8 bits and of 16,384 one of 32: Dettmers et al. 2023, "QLoRA", section 3.
_BYTES_PER_FROZEN = {"bf16": 2.0, "fp8": 1.0, "nf4": 0.52}


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The size of a model that no table knows and nobody ran; None where it is unknown."""

    num_parameters: int
    flops_per_sample: int | None = None
    tokens_per_sample: int | None = None
    num_trained: int | None = None  # parameters
    num_layers: int | None = None
    width: int | None = None
    mlp_width: int | None = None
    num_kv_features: int | None = None  # of keys and values together, in a layer
    vocabulary: int | None = None

    @property
    def has_layers(self) -> bool:
        """Return whether it is a decoder of known layers, of which `memory_of` knows the memory."""
        return None not in vars(self).values()

    @property
    def has_adapters(self) -> bool:
        return self.num_trained is not None and self.num_trained < self.num_parameters

    def of_length(self, tokens: int) -> "ModelSize":
        """Return the size with samples of this many tokens: attention's FLOPs grow with the square."""
        flops, usual = self.flops_per_sample, self.tokens_per_sample
        if flops and usual:
            # Four products of tokens x tokens x width a layer, and twice as many backward: two FLOPs each.
            squares = 12 * (self.num_layers or 0) * (self.width or 0)
            linear = (flops - squares * usual**2) / usual
            flops = round(linear * tokens + squares * tokens**2)
        return replace(self, flops_per_sample=flops, tokens_per_sample=tokens)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on a GPU: held ones, which several GPUs may share, and those that a step needs."""

    weights: float  # frozen
    states: float  # trained parameters, their gradients, and the optimizer's moments
    working: float  # one layer's, unpacked or gathered
    activations: float  # a token's, of all layers
    block: float  # a token's, of one block that is computed again
    logits: float  # a token's
    is_sharded: bool = False

    def line(self, tokens: int, num_gpus: int) -> tuple[float, float]:
        """Return the fixed GiB on each of the GPUs, and the GiB per sample of so many tokens."""
        held = (self.weights + self.states) / (num_gpus if self.is_sharded else 1)
        # The block is computed again when the logits are gone.
        per_token = self.activations + max(self.block, self.logits)
        return (held + self.working) / _GIB, per_token * tokens / _GIB


def memory_of(
    size: ModelSize,
    *,
    frozen: str = "bf16",
    is_fused: bool = False,
    compiles: bool = False,
    checkpoints: bool = False,
    parameter_dtype: str = "fp32",
    is_sharded: bool = False,
) -> Memory:
    """Return the memory of a training of the model, which has layers.

    frozen: the format of frozen weights. is_fused: norms, MLP and loss by fused kernels: the loss never holds
    the logits. checkpoints: only the inputs of blocks are kept.
    """
    width, mlp_width, num_layers = size.width or 0, size.mlp_width or 0, size.num_layers or 0
    kv_features, trained = size.num_kv_features or 0, size.num_trained or 0
    factors = _KEPT[size.has_adapters, is_fused, compiles]
    block = 2.0 * sum(map(math.prod, zip(factors, (width, kv_features, mlp_width), strict=True)))
    linear = num_layers * (width * (2 * width + kv_features) + 3 * width * mlp_width)
    held = size.num_parameters - trained
    packed = min(held, linear) if size.has_adapters else 0
    states, working = trained * _BYTES_PER_TRAINED[parameter_dtype], 0
    if is_sharded or frozen == "nf4":
        working = 2 * (linear // (num_layers or 1) if is_sharded else width * mlp_width)
    elif not size.has_adapters and parameter_dtype == "fp32":
        working = _AUTOCAST_BYTES * trained
    stream = 2.0 if size.has_adapters or parameter_dtype != "fp32" else 4.0
    return Memory(
        weights=packed * _BYTES_PER_FROZEN[frozen] + 2 * (held - packed),
        states=states,
        working=working,
        activations=num_layers * (width * stream if checkpoints else block),
        block=block if checkpoints else 0.0,
        logits=0.0 if is_fused else float(_BYTES_PER_LOGIT * (size.vocabulary or 0)),
        is_sharded=is_sharded,
    )

"""Fine-tuning of causal language models on packed text: `hf-lora:MODEL` and `hf-sft:MODEL`.

MODEL is a shape of this table, with random weights, a folder, or a name on the Hugging Face hub. The model
classes are those of Transformers, and the adapters those of PEFT.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from fastlaunch_train.data import corpus, documents
from fastlaunch_train.data.hub import import_peft, import_transformers, load_from_hub
from fastlaunch_train.data.text import LoadedText
from fastlaunch_train.data.tokens import ByteTokens, HubTokens, Tokenizer, has_tokenizer, load_tokenizer
from fastlaunch_train.models.document_attention import ATTENTION, document_mask, register_attention
from fastlaunch_train.models.flops import language_flops_per_sample
from fastlaunch_train.records.rows import is_rows_file
from fastlaunch_train.workloads.causal_lm import following, text_source
from fastlaunch_train.workloads.contract import NO_LABEL, Batch, BatchCount, ModelOptions, Score, Workload
from fastlaunch_train.workloads.language_models import (
    blocks_of,
    model_identity,
    published_config,
    sequence_length,
    transformer_blocks,
    vocabulary,
)
from fastlaunch_train.workloads.registry import SHAPES, Scalar, WorkloadError, workload_info

_LLAMA_3 = {
    "vocab_size": 128256,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 8,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}


def _llama_3_rope(factor: float) -> dict[str, Any]:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


_TINY = {
    "vocab_size": ByteTokens.vocabulary,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
}
#: Configurations, by the `config.json` of meta-llama/Llama-2-7b-hf, Llama-3.1-8B, Llama-3.2-1B, Llama-3.2-3B
#: and Qwen/Qwen3-8B-Base on the Hugging Face hub: the class, its arguments, and rotations (theta, scaling).
_SHAPES: Mapping[str, tuple[str, dict[str, Any], float, dict[str, Any] | None]] = {
    "llama-2-7b": (
        "LlamaConfig",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        1e4,
        None,
    ),
    "llama-3.1-8b": (
        "LlamaConfig",
        _LLAMA_3
        | {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
        5e5,
        _llama_3_rope(8.0),
    ),
    "llama-3.2-1b": (
        "LlamaConfig",
        _LLAMA_3
        | {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "tie_word_embeddings": True,
        },
        5e5,
        _llama_3_rope(32.0),
    ),
    "llama-3.2-3b": (
        "LlamaConfig",
        _LLAMA_3
        | {
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 28,
            "num_attention_heads": 24,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
        5e5,
        _llama_3_rope(32.0),
    ),
    "qwen3-8b": (
        "Qwen3Config",
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 32768,
            "rms_norm_eps": 1e-6,
        },
        1e6,
        None,
    ),
    "llama-tiny": ("LlamaConfig", _TINY, 1e4, None),
    "qwen3-tiny": ("Qwen3Config", _TINY | {"head_dim": 32}, 1e4, None),
}
assert tuple(_SHAPES) == SHAPES
#: Blocks and tokens of the model on which recipes are checked.
_CHECKED_BLOCKS, _CHECKED_LENGTH = 2, 256
#: Columns of the logits that are compared, and the distance of the tokens whose hidden states are.
_OUTPUT_COLUMNS, _WATCHED_TOKENS = 64, 64
#: Classes of published models whose head predicts something else, or that see the token they predict.
_OTHER_HEADS = re.compile(r"MaskedLM|PreTraining$|Classification|QuestionAnswering")
#: By a workload's prefix, with AdamW: what QLoRA's authors use up to 13B, and TRL's default for SFT.
_LEARNING_RATES = {"hf-lora": 2e-4, "hf-sft": 2e-5}


@dataclass(frozen=True, kw_only=True)
class Lora:
    """The adapters: each targeted layer adds `alpha / rank` times the product of two thin matrices."""

    rank: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    targets: str = "all-linear"  #: all but the head, or names of layers joined by commas
    starts_at_zero: bool = True  #: as it should; if not, adapters change the outputs from the start


class TunedModel(nn.Module):
    """A causal language model of Transformers that returns its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.head_loss = HeadLoss()

    def forward(
        self, tokens: torch.Tensor, labels: torch.Tensor | None, positions: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the mean loss in nats per labelled token, and some hidden states; or logits and these.

        tokens: (samples, tokens), int64. labels: of the same shape, the tokens to predict or `NO_LABEL`;
        None returns logits, (samples, tokens, vocabulary). positions: of the same shape, from 0 in each
        document of a packed sequence; None: each sample is one document.
        """
        model: Any = self.model
        packed = (
            {} if positions is None else {"position_ids": positions, "documents": document_mask(positions)}
        )
        decoder = getattr(model, model.base_model_prefix)
        hidden = decoder(input_ids=tokens, use_cache=False, **packed)[0]
        some = hidden.detach()[:, ::_WATCHED_TOKENS]
        head = model.get_output_embeddings()
        if labels is None:
            return head(hidden), some
        return self.head_loss(hidden, head.weight, following(labels)), some


class HeadLoss(nn.Module):
    """The head and its loss, which torch.compile fuses so that the logits are held in bf16 alone."""

    def __init__(self) -> None:
        super().__init__()
        #: Whether Liger computes it, in parts, without all logits.
        self.in_parts = False

    def forward(self, hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy. hidden: (samples, tokens, features). labels: (samples, tokens)."""
        if self.in_parts:
            from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

            loss = liger_fused_linear_cross_entropy(hidden.flatten(0, 1), weight, labels.flatten())
            return loss if isinstance(loss, torch.Tensor) else loss[0]
        logits = nn.functional.linear(hidden, weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def build(name: str, options: ModelOptions, **arguments: Scalar) -> Workload:
    """Build the workload called `name`. arguments: those of `Lora`, for hf-lora.

    Raises WorkloadError if model or tokenizer cannot be loaded, an argument has no such value, or the
    sequence is longer than the model's positions.
    """
    kind, _, model = name.partition(":")
    lora = Lora(**arguments) if kind == "hf-lora" else None  # type: ignore[arg-type]
    config = _config(model, name)
    kind_of_model = (getattr(config, "architectures", None) or [""])[0]
    if _OTHER_HEADS.search(kind_of_model) and not getattr(config, "is_decoder", False):
        raise WorkloadError(
            f"workload {name!r}: the weights are those of a {kind_of_model}, which does not write text",
            "give a causal language model, such as Llama or Qwen",
        )
    default = workload_info(name).sequence_length
    assert default is not None
    length = sequence_length(options.sequence_length, default, config, name)
    weights = None if model in _SHAPES else model
    published = _published_dtype(config) if weights else torch.bfloat16
    few = _few_blocks(config)
    inexact = None if lora is None else replace(lora, starts_at_zero=False)
    sample = partial(_workload, name, options, few, None, inexact, min(length, _CHECKED_LENGTH))
    return replace(
        _workload(name, options, config, weights, lora, length),
        sample=sample,
        flops_per_sample=language_flops_per_sample(
            lambda: _LogitsAlone(_tuned_model(name, config, None, lora).float()), length, transformer_blocks
        ),
        weights=weights,
        model_identity=partial(model_identity, config, weights),
        save=partial(_save, published, partial(_tokenizer, options.tokenizer or weights, name)),
    )


def _workload(
    name: str, options: ModelOptions, config: Any, weights: str | None, lora: Lora | None, length: int
) -> Workload:
    num_tokens = vocabulary(config, name)
    source = text_source(name, replace(options, model=weights), num_tokens, length, _read)
    return Workload(
        name=name,
        sample_unit="sequences",
        build_model=partial(_tuned_model, name, config, weights, lora),
        builds_on_device=True,
        batches=source.batches,
        held_out=source.held_out,
        samples_per_epoch=source.samples_per_epoch,
        data_identity=source.identity,
        loss=_loss,
        score=_score,
        outputs=partial(_outputs, every=max(1, num_tokens // _OUTPUT_COLUMNS)),
        count=_count,
        blocks=blocks_of,
        regions=lambda model: () if model.head_loss.in_parts else (model.head_loss,),  # type: ignore
        rounds_frozen=lora is not None,
        use_kernels=partial(_use_liger, name),
        tokens_per_sample=length,
        sequence_length=length,
        optimizer="adamw",
        learning_rate=_LEARNING_RATES[name.partition(":")[0]],
        weight_decay=0.0,
        max_grad_norm=1.0,
    )


def _loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(batch["tokens"], batch["labels"], batch.get("positions"))[0]
    return loss


def _score(model: nn.Module, batch: Batch) -> Score:
    weight = (following(batch["labels"]) != NO_LABEL).sum()
    # Samples that fill up a batch have no labels; the mean of none is not a number.
    loss_sum = torch.where(weight > 0, _loss(model, batch) * weight, 0.0)
    return Score(loss_sum=loss_sum, weight=weight, num_samples=(batch["labels"] != NO_LABEL).any(1).sum())


def _outputs(model: nn.Module, batch: Batch, every: int) -> torch.Tensor:
    """Return every position's logits of each `every`-th token: (samples, positions, columns)."""
    logits: torch.Tensor = model(batch["tokens"], None, batch.get("positions"))[0]
    return logits[..., ::every]


def _count(batch: Batch) -> BatchCount:
    padding = (batch["mask"] == 0).sum() if "mask" in batch else 0
    return BatchCount(num_tokens=batch["tokens"].numel(), num_padding=padding)


def _config(model: str, workload: str) -> Any:
    if model not in _SHAPES:
        return published_config(model, workload)
    kind, fields, theta, scaling = _SHAPES[model]
    transformers = import_transformers(workload)
    config_class = getattr(transformers, kind, None)
    if config_class is None:
        raise WorkloadError(
            f"workload {workload!r}: transformers {transformers.__version__} has no {kind}",
            "pip install --upgrade transformers",
        )
    return config_class(**fields, rope_theta=theta, rope_scaling=scaling)


def _few_blocks(config: Any) -> Any:
    """Return the configuration of the same layers, but fewer."""
    fields = config.to_dict()
    if "layer_types" in fields:
        fields["layer_types"] = fields["layer_types"] and fields["layer_types"][:_CHECKED_BLOCKS]
    return type(config).from_dict(fields | {"num_hidden_layers": _CHECKED_BLOCKS})


def _tuned_model(workload: str, config: Any, weights: str | None, lora: Lora | None) -> TunedModel:
    transformers = import_transformers(workload)
    _restore_transformers()
    try:
        register_attention()
    except ImportError:
        raise WorkloadError(
            f"workload {workload!r} needs transformers 4.51, and {transformers.__version__} is installed",
            "pip install --upgrade transformers",
        ) from None
    config.use_cache = False
    dtype = "dtype" if int(transformers.__version__.partition(".")[0]) >= 5 else "torch_dtype"
    # Frozen weights are published in bf16, and need no more.
    options = {dtype: torch.float32 if lora is None else torch.bfloat16, "attn_implementation": ATTENTION}
    auto = transformers.AutoModelForCausalLM
    try:
        if weights is None:
            model = auto.from_config(config, **options)
        else:
            model = load_from_hub(auto.from_pretrained, weights, workload, "model", config=config, **options)
    except (ValueError, AttributeError) as error:
        reason = " ".join(str(error).split()).partition(". ")[0]
        is_other = "Unrecognized configuration class" in reason
        raise WorkloadError(
            f"workload {workload!r}: a {config.model_type} model "
            + ("is no causal language model" if is_other else f"cannot be built: {reason}"),
            "give a model that writes text, such as Llama or Qwen",
        ) from error
    if weights is None:
        _let_blocks_add_little(model)
    if lora is not None:
        _add_adapters(workload, model, lora, weights)
    return TunedModel(model)


def _let_blocks_add_little(model: nn.Module) -> None:
    """Scale random blocks' last layers down, so that each adds little to its input, as in trained models.

    Otherwise each block's output is far larger than the embeddings, and rounding errors grow with every
    block: after the 32 of Llama 2 7B, eager and compiled FP8 differed by almost half (H100, 2026-11-28). All
    blocks together add as much as the embeddings are large; 60 is the usual size of a block's output in that
    of its weights, 0.02.
    """
    blocks = blocks_of(model)
    last = [
        module
        for name, module in blocks.named_modules()
        if isinstance(module, nn.Linear) and name.endswith((".o_proj", ".down_proj"))
    ]
    for layer in last:
        layer.weight.data.mul_(1 / (60 * max(1, len(last)) ** 0.5))


def _add_adapters(workload: str, model: nn.Module, lora: Lora, weights: str | None) -> None:
    peft = import_peft(workload)
    targets = lora.targets if lora.targets == "all-linear" else lora.targets.replace(" ", "").split(",")
    # PEFT passes over names that match none if another one does.
    names = [f".{name}" for name, _ in model.named_modules()]
    for target in [] if isinstance(targets, str) else targets:
        if not any(name.endswith(f".{target}") for name in names):
            linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
            known = sorted({name.rpartition(".")[2] for name in linear})
            raise WorkloadError(
                f"workload {workload!r}: no layer is called {target}, one of LoRA's targets",
                f"give all-linear, or some of {', '.join(known)}",
            )
    config = peft.LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=targets,
        init_lora_weights=lora.starts_at_zero,
        task_type="CAUSAL_LM",
        base_model_name_or_path=weights,
    )
    try:
        peft.inject_adapter_in_model(config, model)
    except ValueError as error:
        raise WorkloadError(
            f"workload {workload!r}: LoRA's targets {lora.targets}: {str(error).partition('. ')[0]}",
            "give all-linear, or names of the model's layers, as in q_proj,v_proj",
        ) from error
    for module in model.modules():
        if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer):
            # Autocast rounds what a product needs; PEFT would write each input in fp32 first.
            module.cast_input_dtype_enabled = False
            if not lora.starts_at_zero and isinstance(module.get_base_layer(), nn.Linear):
                # As large as what the layer itself computes.
                base = module.get_base_layer().weight
                size = float(base.float().std()) * base.shape[1] ** 0.5
                module.lora_B["default"].weight.data.mul_(size)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    # Transformers' save and peft's merge ask for it.
    model.peft_config = {"default": config}  # type: ignore[assignment]


def _use_liger(workload: str, model: nn.Module, kernels: str) -> None:
    assert kernels == "liger"
    assert isinstance(model, TunedModel)
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    inner: Any = model.model
    apply = MODEL_TYPE_TO_APPLY_LIGER_FN.get(inner.config.model_type)
    if apply is None:
        raise WorkloadError(
            f"workload {workload!r}: Liger Kernel knows no {inner.config.model_type} model",
            "use a recipe with kernels=torch",
        )
    modeling = sys.modules[type(inner).__module__]
    written = dict(vars(modeling))
    apply(model=inner, cross_entropy=False, fused_linear_cross_entropy=False)
    # Liger changes the module too, whose classes the next native model is made of.
    replaced = {name: value for name, value in written.items() if vars(modeling)[name] is not value}
    _REPLACED[modeling] = replaced | _REPLACED.get(modeling, {})
    model.head_loss.in_parts = True


#: What a module of Transformers held before Liger Kernel replaced it, by name.
_REPLACED: dict[ModuleType, dict[str, Any]] = {}


def _restore_transformers() -> None:
    """Undo what Liger Kernel changes in modules, so that the next model is built and computes as written."""
    while _REPLACED:
        modeling, written = _REPLACED.popitem()
        vars(modeling).update(written)


def _published_dtype(config: Any) -> torch.dtype | None:
    """Return the dtype of a published model's weights, as its configuration says; None if it does not."""
    dtype = getattr(config, "dtype", None) or getattr(config, "torch_dtype", None)
    dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    return dtype if isinstance(dtype, torch.dtype) else None


def _tokenizer(source: str | None, workload: str) -> HubTokens | None:
    return load_tokenizer(source, workload) if source is not None and has_tokenizer(source) else None


def _save(
    dtype: torch.dtype | None,
    load_tokens: Callable[[], HubTokens | None],
    model: nn.Module,
    state: Mapping[str, Any],
    folder: Path,
) -> None:
    """Write the adapters as PEFT reads them, or the whole model as Transformers does, and the tokenizer.

    dtype: of the whole model's weights in the files; None: as they are trained. Adapters stay in fp32.
    """
    assert isinstance(model, TunedModel)
    folder.mkdir(parents=True, exist_ok=True)
    _save_weights(dtype, model.model, state, folder)
    # What can be loaded again comes last: if that fails, what was trained is here.
    if tokens := load_tokens():
        tokens.save(folder)


def _save_weights(dtype: torch.dtype | None, inner: Any, state: Mapping[str, Any], folder: Path) -> None:
    state = {name.removeprefix("model."): value for name, value in state.items()}
    config = getattr(inner, "peft_config", {}).get("default")
    if config is None:
        if dtype is not None:
            state = {
                name: value.detach().cpu().to(dtype) if value.is_floating_point() else value
                for name, value in state.items()
            }
        # In parts that a machine on AWS sends home.
        inner.save_pretrained(folder, state_dict=state, max_shard_size="1GB")
        if dtype is not None:
            # Transformers has written the dtype of the model that was trained.
            path = folder / "config.json"
            fields = json.loads(path.read_text())
            name = "dtype" if "dtype" in fields else "torch_dtype"
            path.write_text(json.dumps(fields | {name: str(dtype).removeprefix("torch.")}, indent=2) + "\n")
        return
    from peft import get_peft_model_state_dict
    from safetensors.torch import save_file

    adapters = get_peft_model_state_dict(inner, state_dict=state)
    tensors = {
        f"base_model.model.{name}": value.detach().cpu().contiguous() for name, value in adapters.items()
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(str(folder))


class _LogitsAlone(nn.Module):
    """A tuned model as `language_flops_per_sample` calls it."""

    def __init__(self, tuned: TunedModel) -> None:
        super().__init__()
        self.tuned = tuned

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits. mask: all ones."""
        logits: torch.Tensor = self.tuned(tokens, None)[0]
        return logits


def _read(path: str, tokenizer: Tokenizer, length: int) -> LoadedText:
    read = documents.read_documents if is_rows_file(Path(path).expanduser()) else corpus.read_text
    return read(path, tokenizer, length)

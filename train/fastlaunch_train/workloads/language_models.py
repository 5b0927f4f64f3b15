"""Hugging Face's language models: built or loaded, called for their logits, and made into workloads."""

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastlaunch_train.data.hub import import_transformers, load_from_hub
from fastlaunch_train.data.text import TextSource
from fastlaunch_train.models.flops import build_on_meta, language_flops_per_sample
from fastlaunch_train.records.data_identity import digest_of, digest_of_file
from fastlaunch_train.workloads.contract import ModelOptions, Workload
from fastlaunch_train.workloads.registry import WorkloadError

#: Entries of a configuration that say nothing about the model.
_UNRELATED = ("_name_or_path", "_commit_hash", "transformers_version")


class Logits(nn.Module):
    """A Hugging Face model that returns only logits, which suits torch.compile, DDP and ORTModule best."""

    def __init__(self, model: nn.Module, *, broadcast_mask: bool = False) -> None:
        super().__init__()
        self.model = model
        self._broadcast_mask = broadcast_mask
        _give_torch("transformers.utils.output_capturing")

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits, (batch, tokens, vocabulary) or (batch, classes).

        tokens: (batch, tokens), int64. mask: of the same shape, 0 at padding.
        """
        if mask is not None and self._broadcast_mask:
            mask = mask[:, None, None, :].bool()
        logits: torch.Tensor = self.model(input_ids=tokens, attention_mask=mask).logits
        return logits


def _give_torch(name: str) -> None:
    """Give the module called `name`, if it was imported, a global `torch`, unless it has one.

    After a graph break in one of its functions torch 2.6 looks that name up (2.9 does not), and transformers
    5.23 imports it for type checkers only.
    """
    module = sys.modules.get(name)
    if module is not None and not hasattr(module, "torch"):
        setattr(module, "torch", torch)  # noqa: B010


def published_config(name: str, workload: str) -> Any:
    """Load the configuration of a model: a folder, or a name on the Hugging Face hub.

    Raises WorkloadError if there is none, or the hub cannot be reached.
    """
    transformers = import_transformers(workload)
    return load_from_hub(transformers.AutoConfig.from_pretrained, name, workload, "model")


def model_identity(config: Any, weights: str | None) -> dict[str, str | None]:
    """Return the identity of a published model: the digest of its configuration, and its weights if loaded.

    Weights in a folder are identified by the digest of their files, those on the hub by their commit. Raises
    OSError for files that cannot be read.
    """
    values = {name: value for name, value in config.to_diff_dict().items() if name not in _UNRELATED}
    encoded = json.dumps(values, sort_keys=True, default=str).encode()
    return {"config": digest_of([encoded]), "weights": None if weights is None else _weights(config, weights)}


def _weights(config: Any, name: str) -> str | None:
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return getattr(config, "_commit_hash", None)
    files = sorted(file for ending in ("*.safetensors", "*.bin") for file in folder.glob(ending))
    return digest_of(digest_of_file(file)[0].encode() for file in files)


def causal_model(workload: str, config: Any, weights: str | None) -> Logits:
    """Build a causal language model in fp32, with random weights or those of the model `weights`.

    The model is called with full sequences, without a mask. Raises WorkloadError if a token sees later ones.
    """
    transformers = import_transformers(workload)
    # The cache of keys and values is for generating text.
    config.use_cache = False
    options = _causal_attention(config)
    model = Logits(_build(transformers.AutoModelForCausalLM, workload, config, weights, options))
    if not options and _sees_what_follows(model):
        raise WorkloadError(
            f"workload {workload!r}: in this {config.model_type} model a token sees those that it has to "
            "predict",
            "give a model that writes text, such as GPT-2 or Llama, or set is_decoder to true in config.json",
        )
    return model


def classifier(workload: str, config: Any, weights: str | None) -> Logits:
    """Build a sequence classifier in fp32, as `causal_model` does; a head that `weights` lack is random.

    Raises WorkloadError for a model that does not take padded texts.
    """
    transformers = import_transformers(workload)
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "pad_token_id", None) is None:
        raise WorkloadError(
            f"workload {workload!r}: a {config.model_type} model is no classifier, or has no padding",
            "give an encoder such as DistilBERT or BERT, or set pad_token_id in the config.json of a decoder",
        )
    model = _build(transformers.AutoModelForSequenceClassification, workload, config, weights, {})
    # With a (batch, tokens) mask, release 5 waits for the device in every step to see whether it is all ones.
    sdpa = getattr(model.config, "_attn_implementation", None) == "sdpa"
    return Logits(model, broadcast_mask=sdpa and int(transformers.__version__.partition(".")[0]) >= 5)


def transformer_blocks(model: nn.Module) -> nn.ModuleList | None:
    """Return the model's transformer blocks: its list of modules with the most parameters, if it has one.

    GPT-2 and GPT-Neo call it `h`, Llama and its like `layers`, DistilBERT and BERT `layer`. Lists inside a
    block, such as a mixture's experts, hold fewer parameters than the list of the blocks.
    """
    sizes = {
        module: sum(parameter.numel() for parameter in module.parameters())
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
    }
    largest = max(sizes, key=sizes.__getitem__, default=None)
    return largest if largest is not None and sizes[largest] > 0 else None


def vocabulary(config: Any, workload: str) -> int:
    """Return how many tokens a model has. Raises WorkloadError if it is not a language model."""
    size = getattr(config, "vocab_size", None)
    if not isinstance(size, int):
        raise WorkloadError(
            f"workload {workload!r}: a {config.model_type} model has no vocabulary", "give a language model"
        )
    return size


def sequence_length(requested: int | None, default: int, config: Any, workload: str) -> int:
    """Return the tokens of a sample: as requested, else the workload's default, up to the model's positions.

    Raises WorkloadError for a request that is longer. Some configurations give no number of positions.
    """
    most = getattr(config, "max_position_embeddings", None)
    if requested is None:
        return min(default, most) if most else default
    if most and requested > most:
        raise WorkloadError(
            f"workload {workload!r}: --sequence-length {requested} is more than the model's {most} positions",
            f"give --sequence-length {most} or less",
        )
    return requested


def _build(auto: Any, workload: str, config: Any, weights: str | None, options: dict[str, Any]) -> Any:
    if weights is None:
        try:
            model = auto.from_config(config, **options)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise WorkloadError(
                    f"workload {workload!r}: no {config.model_type} model can be built: {error}",
                    "repair the model's config.json",
                ) from error
            raise WorkloadError(
                f"workload {workload!r}: a {config.model_type} model is of another kind",
                f"give a model that transformers' {auto.__name__} knows",
            ) from None
    else:
        model = load_from_hub(auto.from_pretrained, weights, workload, "model", config=config, **options)
    # Weights may have been published in another dtype.
    return model.float()


def _causal_attention(config: Any) -> dict[str, Any]:
    """Return options that make a model use causal attention without a mask, as full sequences allow.

    By default, transformers 5 checks in every step whether sequences are packed, which waits for the device;
    compiled as a whole it makes a mask, with which no flash kernel runs. The options are only for models in
    which every layer sees all earlier tokens; releases before 5 need none.
    """
    if config.model_type not in ("gpt2", "llama"):
        return {}
    try:
        from transformers import AttentionInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
    except ImportError:
        return {}
    AttentionInterface.register("fastlaunch_causal", sdpa_attention_forward)
    return {"attn_implementation": "fastlaunch_causal"}


def _sees_what_follows(model: Logits) -> bool:
    """Return whether a model's output at a token depends on later tokens; False if that cannot be tested.

    transformers counts encoders such as BERT as causal, which they are only if configured to be.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return False
    tokens = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 4]])
    was_training = model.training
    try:
        with torch.no_grad():
            before_last = model.eval()(tokens)[:, :-1]
    except (RuntimeError, NotImplementedError, ValueError, IndexError):
        return False
    finally:
        model.train(was_training)
    change = (before_last[0] - before_last[1]).abs().max()
    return bool(change > 1e-4 * before_last.abs().max())


def text_workload(
    name: str,
    options: ModelOptions,
    *,
    config: Any,
    build: Callable[[str, Any, str | None], Logits],
    own_length: int,
    source_of: Callable[[int], TextSource],
    **workload_fields: Any,
) -> Workload:
    """Return the workload of a model with `config`. workload_fields: the other fields of `Workload`.

    build: makes the model from the workload's name, a configuration, and the name of weights to load, if any.
    source_of: makes the text source for a number of tokens per sample. Raises WorkloadError if those exceed
    the model's.
    """
    length = sequence_length(options.sequence_length, own_length, config, name)
    build_random = partial(build, name, config, None)
    source = source_of(length)
    is_published = options.model is not None or name.startswith("hf-clm:")
    return Workload(
        name=name,
        build_model=partial(build, name, config, options.model),
        batches=source.batches,
        held_out=source.held_out,
        samples_per_epoch=source.samples_per_epoch,
        data_identity=source.identity,
        weights=options.model,
        model_identity=partial(model_identity, config, options.model) if is_published else None,
        blocks=blocks_of if transformer_blocks(build_on_meta(build_random)) is not None else None,
        flops_per_sample=language_flops_per_sample(build_random, length, transformer_blocks),
        tokens_per_sample=length,
        sequence_length=length,
        **workload_fields,
    )


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """Return the transformer blocks of a model that has some."""
    blocks = transformer_blocks(model)
    assert blocks is not None
    return blocks

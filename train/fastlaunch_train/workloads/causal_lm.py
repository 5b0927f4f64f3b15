"""Causal language models: `gpt2-xsmall`, `gpt2-tiny`, and any of Hugging Face's as `hf-clm:MODEL`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from fastlaunch_train.data import corpus
from fastlaunch_train.data.hub import import_transformers
from fastlaunch_train.data.text import LoadedText, TextSource
from fastlaunch_train.data.tokens import ByteTokens, Tokenizer, chosen_tokenizer, load_tokenizer
from fastlaunch_train.workloads.contract import NO_LABEL, Batch, ModelOptions, Score, Workload
from fastlaunch_train.workloads.language_models import (
    causal_model,
    published_config,
    text_workload,
    vocabulary,
)
from fastlaunch_train.workloads.registry import workload_info

#: rinna/japanese-gpt2-xsmall, from src/model/gpt2-ja-xsmall-config.json of the repository that its model card
#: names, github.com/rinnakk/japanese-pretrained-models (2026-11-21).
_XSMALL = {
    "n_embd": 512,
    "n_layer": 6,
    "n_head": 8,
    "n_inner": 2304,
    "n_positions": 1024,
    "vocab_size": 32000,
    "activation_function": "gelu_new",
    "attn_pdrop": 0.1,
    "embd_pdrop": 0.1,
    "resid_pdrop": 0.1,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TINY = _XSMALL | {
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 128,
    "n_positions": 128,
    "vocab_size": ByteTokens.vocabulary,
}
_CONFIGS = {"gpt2-xsmall": _XSMALL, "gpt2-tiny": _TINY}

#: Tokens of a sample; by default 1024 or the model's positions, if fewer, as in Hugging Face's run_clm.py.
_SEQUENCE_LENGTHS = {"gpt2-tiny": 64}
_SEQUENCE_LENGTH = 1024
#: Columns of the logits that `outputs` returns; all would take half a gigabyte for four sequences.
_OUTPUT_COLUMNS = 64


def build(name: str, options: ModelOptions) -> Workload:
    """Build the workload called `name`, with random weights or those of options.model.

    Raises WorkloadError if model or tokenizer cannot be loaded, or the sequence length exceeds the model's.
    """
    config = _config(name, options)
    num_tokens = vocabulary(config, name)
    return text_workload(
        name,
        options,
        config=config,
        build=causal_model,
        own_length=_SEQUENCE_LENGTHS.get(name, _SEQUENCE_LENGTH),
        source_of=partial(text_source, name, options, num_tokens),
        sample_unit="sequences",
        loss=next_token_loss,
        optimizer=workload_info(name).optimizer,
        # As in the experiment of 2023: run_clm.py --learning_rate 1e-3.
        learning_rate=1e-3,
        outputs=partial(_outputs, every=max(1, num_tokens // _OUTPUT_COLUMNS)),
        score=next_token_score,
    )


def next_token_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross entropy of all tokens but the first, given those before them, in nats."""
    return nn.functional.cross_entropy(*_predictions(model, batch))


def next_token_score(model: nn.Module, batch: Batch) -> Score:
    """Return the same as a sum, with the number of tokens."""
    logits, labels = _predictions(model, batch)
    loss_sum = nn.functional.cross_entropy(logits, labels, reduction="sum")
    return Score(
        loss_sum=loss_sum,
        weight=(labels != NO_LABEL).sum(),
        num_samples=(batch["labels"][:, 0] != NO_LABEL).sum(),
    )


def _predictions(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits (tokens, vocabulary) and the token that follows each, or `NO_LABEL`."""
    return model(batch["tokens"]).flatten(0, 1).float(), following(batch["labels"]).flatten()


def following(labels: torch.Tensor) -> torch.Tensor:
    """Return what each token predicts: the next one's label, and none at the end."""
    # Shift the labels, not the logits: these are the largest tensor, and would be copied.
    return nn.functional.pad(labels[:, 1:], (0, 1), value=NO_LABEL)


def _outputs(model: nn.Module, batch: Batch, every: int) -> torch.Tensor:
    """Return every position's logits of each `every`-th token: (sequences, positions, columns)."""
    logits: torch.Tensor = model(batch["tokens"])[..., ::every]
    return logits


def _config(name: str, options: ModelOptions) -> Any:
    if options.model is not None:
        return published_config(options.model, name)
    if name in _CONFIGS:
        return import_transformers(name).GPT2Config(**_CONFIGS[name])
    return published_config(name.removeprefix("hf-clm:"), name)


def text_source(
    name: str,
    options: ModelOptions,
    num_tokens: int,
    length: int,
    read_file: Callable[[str, Tokenizer, int], LoadedText] = corpus.read_text,
) -> TextSource:
    """Return where a model of `num_tokens` gets its samples of `length` tokens: made up, or from a file.

    read_file: takes the file's path, the tokenizer and the length.
    """
    given = load_tokenizer(options.tokenizer, name) if options.tokenizer is not None else None

    def read(path: str) -> LoadedText:
        tokenizer = chosen_tokenizer(given, options.model, num_tokens, name, otherwise=ByteTokens)
        return read_file(path, tokenizer, length)

    return TextSource(
        workload=name,
        synthetic_batches=partial(corpus.synthetic_batches, num_tokens, length),
        synthetic_splits=partial(corpus.synthetic_splits, num_tokens, length),
        synthetic_identity=corpus.SYNTHETIC,
        readers={"file": read},
    )

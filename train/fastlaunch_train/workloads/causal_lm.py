"""Causal language models: `gpt2-xsmall`, `gpt2-tiny`, and any of Hugging Face's as `hf-clm:MODEL`."""

from functools import partial
from typing import Any

import torch
from torch import nn

from fastlaunch_train.data import corpus
from fastlaunch_train.data.order import NO_LABEL
from fastlaunch_train.data.text import ReadText, TextSource
from fastlaunch_train.data.tokens import ByteTokens, chosen_tokenizer, load_tokenizer
from fastlaunch_train.text_workload import text_workload
from fastlaunch_train.workloads.contract import Asked, Batch, Score, Workload
from fastlaunch_train.workloads.language_models import (
    causal_model,
    published_config,
    transformers_for,
    vocabulary,
)

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

#: As Hugging Face's run_clm.py: 1024, or as many as the model has positions.
_SEQUENCE_LENGTHS = {"gpt2-tiny": 64}
_SEQUENCE_LENGTH = 1024
#: Columns of the logits that `outputs` looks at: all of them are half a gigabyte for four sequences.
_OUTPUT_COLUMNS = 64


def build(name: str, asked: Asked) -> Workload:
    """The workload called `name`, of random weights in the model's configuration, or those of asked.model.

    Raises WorkloadError if model or tokenizer cannot be had, or the sequence length is more than the model's.
    """
    config = _config(name, asked)
    num_tokens = vocabulary(config, name)
    return text_workload(
        name,
        asked,
        config=config,
        build=causal_model,
        own_length=_SEQUENCE_LENGTHS.get(name, _SEQUENCE_LENGTH),
        source_of=partial(_source, name, asked, num_tokens),
        sample_unit="sequences",
        loss=next_token_loss,
        # As in the experiment of 2023: run_clm.py --optim adafactor --learning_rate 1e-3. The small model
        # stands in for it where there is no GPU: AdamW teaches it more in few steps.
        optimizer="adamw" if name == "gpt2-tiny" else "adafactor",
        learning_rate=1e-3,
        outputs=partial(_outputs, every=max(1, num_tokens // _OUTPUT_COLUMNS)),
        score=next_token_score,
    )


def next_token_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean cross entropy of each token but the first, given those before it, in nats."""
    return nn.functional.cross_entropy(*_predictions(model, batch))


def next_token_score(model: nn.Module, batch: Batch) -> Score:
    """The same as a sum, over so many tokens."""
    logits, labels = _predictions(model, batch)
    loss_sum = nn.functional.cross_entropy(logits, labels, reduction="sum")
    return Score(
        loss_sum=loss_sum,
        weight=(labels != NO_LABEL).sum(),
        num_samples=(batch["labels"][:, 0] != NO_LABEL).sum(),
    )


def _predictions(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits (tokens, vocabulary) and the token that follows each, if one does."""
    # The labels are moved, not the logits: those are the largest tensor of all, and would be copied.
    following = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=NO_LABEL)
    return model(batch["tokens"]).flatten(0, 1).float(), following.flatten()


def _outputs(model: nn.Module, batch: Batch, every: int) -> torch.Tensor:
    """Logits at every position, of each `every`-th token: (sequences, positions, columns)."""
    logits: torch.Tensor = model(batch["tokens"])[..., ::every]
    return logits


def _config(name: str, asked: Asked) -> Any:
    if asked.model is not None:
        return published_config(asked.model, name)
    if name in _CONFIGS:
        return transformers_for(name).GPT2Config(**_CONFIGS[name])
    return published_config(name.removeprefix("hf-clm:"), name)


def _source(name: str, asked: Asked, num_tokens: int, length: int) -> TextSource:
    given = load_tokenizer(asked.tokenizer, name) if asked.tokenizer is not None else None

    def read(path: str) -> ReadText:
        tokenizer = chosen_tokenizer(given, asked.model, num_tokens, name, otherwise=ByteTokens)
        return corpus.read_text(path, tokenizer, length)

    return TextSource(
        workload=name,
        write=partial(corpus.written_batches, num_tokens, length),
        written=partial(corpus.written_splits, num_tokens, length),
        made_up=corpus.MADE_UP,
        read={"file": read},
    )

"""Telling good reviews from bad ones: `distilbert-imdb`, and the small `distilbert-tiny`."""

from functools import partial

import torch
from torch import nn

from fastlaunch_train.data import reviews
from fastlaunch_train.data.hub import import_transformers
from fastlaunch_train.data.text import LoadedText, TextSource
from fastlaunch_train.data.tokens import WordTokens, chosen_tokenizer, load_tokenizer
from fastlaunch_train.workloads.contract import Batch, BatchCount, ModelOptions, Score, Workload
from fastlaunch_train.workloads.language_models import classifier, published_config, text_workload, vocabulary
from fastlaunch_train.workloads.registry import workload_info

#: distilbert-base-uncased on the Hugging Face hub, and transformers' own defaults (5.23).
_BASE = {
    "vocab_size": 30522,
    "max_position_embeddings": 512,
    "dim": 768,
    "hidden_dim": 3072,
    "n_layers": 6,
    "n_heads": 12,
    "activation": "gelu",
    "dropout": 0.1,
    "attention_dropout": 0.1,
    "seq_classif_dropout": 0.2,
    "initializer_range": 0.02,
    "sinusoidal_pos_embds": False,
    "pad_token_id": 0,
}
_TINY = _BASE | {
    "vocab_size": 2048,
    "max_position_embeddings": 128,
    "dim": 64,
    "hidden_dim": 128,
    "n_layers": 2,
    "n_heads": 4,
}
#: Tokens of a sample. The experiment cuts reviews off at 512 and pads all to the longest, which has 512.
_SEQUENCE_LENGTH, _TINY_SEQUENCE_LENGTH = 512, 64


def build(name: str, options: ModelOptions) -> Workload:
    """Build the workload called `name`, with random weights or those of options.model.

    Raises WorkloadError if model or tokenizer cannot be loaded, or the sequence length exceeds the model's.
    """
    tiny = name == "distilbert-tiny"
    if options.model is not None:
        config = published_config(options.model, name)
        config.num_labels = 2
    else:
        config = import_transformers(name).DistilBertConfig(**(_TINY if tiny else _BASE))
    return text_workload(
        name,
        options,
        config=config,
        build=classifier,
        own_length=_TINY_SEQUENCE_LENGTH if tiny else _SEQUENCE_LENGTH,
        source_of=partial(_source, name, options, vocabulary(config, name)),
        sample_unit="reviews",
        loss=classification_loss,
        # As in the experiment of 2023: Adam, 5e-5, to fine-tune. The small model starts from scratch.
        optimizer=workload_info(name).optimizer,
        learning_rate=1e-3 if tiny else 5e-5,
        outputs=_logits,
        count=_count,
        score=classification_score,
        metric="accuracy",
    )


def classification_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Return the mean cross entropy of the classes, in nats."""
    return nn.functional.cross_entropy(_logits(model, batch).float(), batch["labels"])


def classification_score(model: nn.Module, batch: Batch) -> Score:
    """Return the sums of cross entropy and right answers over the reviews that have a label."""
    return Score.of_classes(_logits(model, batch).float(), batch["labels"])


def _logits(model: nn.Module, batch: Batch) -> torch.Tensor:
    logits: torch.Tensor = model(batch["tokens"], batch["mask"])
    return logits


def _count(batch: Batch) -> BatchCount:
    mask = batch["mask"]
    return BatchCount(num_tokens=mask.numel(), num_padding=mask.numel() - mask.sum())


def _source(name: str, options: ModelOptions, num_tokens: int, length: int) -> TextSource:
    given = load_tokenizer(options.tokenizer, name) if options.tokenizer is not None else None

    def read(all_reviews: reviews.Reviews) -> LoadedText:
        split = reviews.split_reviews(all_reviews)
        tokenizer = chosen_tokenizer(
            given,
            options.model,
            num_tokens,
            name,
            otherwise=lambda: WordTokens(split["train"].texts, num_tokens),
        )
        sequences = {
            part: reviews.as_sequences(part_reviews, tokenizer, length)
            for part, part_reviews in split.items()
        }
        return LoadedText(splits=sequences, digest=all_reviews.digest, tokenizer=tokenizer.identity)

    return TextSource(
        workload=name,
        synthetic_batches=partial(reviews.synthetic_batches, num_tokens, length),
        synthetic_splits=partial(reviews.synthetic_splits, num_tokens, length),
        synthetic_identity=reviews.SYNTHETIC,
        readers={
            "folder": lambda path: read(reviews.read_folder(path)),
            "file": lambda path: read(reviews.read_csv(path)),
        },
    )

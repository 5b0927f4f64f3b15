"""What workloads of text have in common: a model of Hugging Face's, built or loaded, and sequences for it."""

from collections.abc import Callable
from functools import partial
from typing import Any

from fastlaunch_train.data.text import TextSource
from fastlaunch_train.models.flops import build_on_meta, language_flops_per_sample
from fastlaunch_train.workloads.contract import Asked, Workload
from fastlaunch_train.workloads.language_models import (
    Logits,
    has_blocks,
    model_identity,
    sequence_length,
    transformer_blocks,
)


def text_workload(
    name: str,
    asked: Asked,
    *,
    config: Any,
    build: Callable[[str, Any, str | None], Logits],
    own_length: int,
    source_of: Callable[[int], TextSource],
    **own: Any,
) -> Workload:
    """The workload of a model of `config`; `own` are the other fields of Workload.

    build: the model, of the workload's name, a configuration, and the name of weights to load, if any.
    source_of: the text, of the tokens of a sample. Raises WorkloadError if those are more than the model's.
    """
    length = sequence_length(asked.sequence_length, own_length, config, name)
    build_random = partial(build, name, config, None)
    source = source_of(length)
    is_published = asked.model is not None or name.startswith("hf-clm:")
    return Workload(
        name=name,
        build_model=partial(build, name, config, asked.model),
        batches=source.batches,
        held_out=source.held_out,
        samples_per_epoch=source.samples_per_epoch,
        data_identity=source.identity,
        model_identity=partial(model_identity, config, asked.model) if is_published else None,
        blocks=transformer_blocks if has_blocks(build_on_meta(build_random)) else None,
        flops_per_sample=language_flops_per_sample(build_random, length),
        tokens_per_sample=length,
        sequence_length=length,
        **own,
    )

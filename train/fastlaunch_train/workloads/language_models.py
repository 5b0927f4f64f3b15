"""Hugging Face's language models: built or loaded, called for their logits alone, and their blocks found."""

import importlib.util
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fastlaunch_train.records.data_identity import digest_of, digest_of_file
from fastlaunch_train.workloads import WorkloadError, names_folder

#: What a configuration says that says nothing of the model.
_NOT_OF_THE_MODEL = ("_name_or_path", "_commit_hash", "transformers_version")
#: What transformers raises of files that are missing, cut off, or not what they are called; and safetensors'
#: own SafetensorError, known by its name: it need not be installed.
_UNLOADABLE = (OSError, ValueError, ImportError, KeyError, RuntimeError, EOFError, pickle.UnpicklingError)


class Logits(nn.Module):
    """A Hugging Face model's call, from token numbers to logits alone.

    One tensor out, whatever the model's own output holds: as torch.compile, DDP and ORTModule like it best.
    """

    def __init__(self, model: nn.Module, *, broadcast_mask: bool = False) -> None:
        super().__init__()
        self.model = model
        self._broadcast_mask = broadcast_mask
        _give_torch("transformers.utils.output_capturing")

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Logits, (batch, tokens, vocabulary) or (batch, classes).

        tokens: (batch, tokens), int64. mask: of the same shape, 0 where a token means nothing.
        """
        if mask is not None and self._broadcast_mask:
            mask = mask[:, None, None, :].bool()
        logits: torch.Tensor = self.model(input_ids=tokens, attention_mask=mask).logits
        return logits


def _give_torch(name: str) -> None:
    """Give the module called `name`, if it was imported, the global `torch` if it has none.

    Where compiling breaks off in a function there, torch 2.6 goes on by that name (2.9 does not ask for it),
    and transformers 5.23 imports it for type checkers alone.
    """
    module = sys.modules.get(name)
    if module is not None and not hasattr(module, "torch"):
        setattr(module, "torch", torch)  # noqa: B010


def transformers_for(workload: str, find: Callable[[str], object] = importlib.util.find_spec) -> Any:
    """The transformers package. Raises WorkloadError, naming the extra, where `find` finds none installed."""
    if find("transformers") is None:
        raise WorkloadError(
            f"workload {workload!r} needs transformers, which is not installed",
            "pip install 'fastlaunch[train]'",
        )
    # transformers imports torchvision where it is installed.
    if find("torchvision") is not None:
        from fastlaunch_train.data.cpu_torchvision import prepare_torchvision

        prepare_torchvision()
    import transformers

    return transformers


def published_config(name: str, workload: str) -> Any:
    """The configuration of model `name`: a folder, or a name on the Hugging Face hub.

    Raises WorkloadError if there is none such, or the hub cannot be reached.
    """
    transformers = transformers_for(workload)
    return of_the_hub(transformers.AutoConfig.from_pretrained, name, workload, "model")


def model_identity(config: Any, weights: str | None) -> dict[str, str | None]:
    """What a published model is: the digest of its configuration; and `weights`, where they are loaded.

    Those of a folder: the digest of their files, of large ones of pieces; those of the hub: the commit.
    Raises OSError for files that cannot be read.
    """
    values = {name: value for name, value in config.to_diff_dict().items() if name not in _NOT_OF_THE_MODEL}
    told = json.dumps(values, sort_keys=True, default=str).encode()
    return {"config": digest_of([told]), "weights": None if weights is None else _weights(config, weights)}


def _weights(config: Any, name: str) -> str | None:
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return getattr(config, "_commit_hash", None)
    files = sorted(file for ending in ("*.safetensors", "*.bin") for file in folder.glob(ending))
    return digest_of(digest_of_file(file)[0].encode() for file in files)


def causal_model(workload: str, config: Any, weights: str | None) -> Logits:
    """A causal language model in fp32: random weights of `config`, or those of `weights`, if given.

    It is called with full sequences, without a mask. Raises WorkloadError where a token sees those after it.
    """
    transformers = transformers_for(workload)
    # Keys and values of the tokens so far are kept for writing text, not for training.
    config.use_cache = False
    options = _causal_attention(config)
    model = Logits(_build(transformers.AutoModelForCausalLM, workload, config, weights, options))
    if not options and _sees_what_follows(model):
        raise WorkloadError(
            f"workload {workload!r}: in a {config.model_type} model as it is a token sees those that follow, "
            "which it is to predict",
            "give a model that writes text, such as GPT-2 or Llama, or set is_decoder to true in config.json",
        )
    return model


def classifier(workload: str, config: Any, weights: str | None) -> Logits:
    """A sequence classifier in fp32: as `causal_model`; a head that `weights` lack is random.

    Raises WorkloadError for a model that cannot be given reviews of several lengths, with a mask.
    """
    transformers = transformers_for(workload)
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "pad_token_id", None) is None:
        raise WorkloadError(
            f"workload {workload!r}: a {config.model_type} model is none of its kind, or without padding",
            "give an encoder such as DistilBERT or BERT, or set pad_token_id in the config.json of a decoder",
        )
    model = _build(transformers.AutoModelForSequenceClassification, workload, config, weights, {})
    # Given a mask of tokens, release 5 waits for the device in every step to see whether it is all ones.
    sdpa = getattr(model.config, "_attn_implementation", None) == "sdpa"
    return Logits(model, broadcast_mask=sdpa and int(transformers.__version__.partition(".")[0]) >= 5)


def of_the_hub(load: Callable[..., Any], name: str, workload: str, what: str, **options: Any) -> Any:
    """What transformers' `load` makes of `name`; WorkloadError if it is not there or is not `what`."""
    folder = Path(name).expanduser()
    option = "hf-clm:" if workload == f"hf-clm:{name}" else f"--{what} "
    if not folder.is_dir() and names_folder(name):
        raise WorkloadError(
            f"workload {workload!r}: there is no {what} folder {name}",
            f"give {option}FOLDER, or a name on the Hugging Face hub",
        )
    try:
        return load(str(folder) if folder.is_dir() else name, **options)
    except Exception as error:
        if not isinstance(error, _UNLOADABLE) and type(error).__name__ != "SafetensorError":
            raise
        reason = " ".join(str(error).split()).partition(". ")[0][:300] or type(error).__name__
        if "ignore_mismatched_sizes" in reason:
            reason = "its weights are of other sizes than its configuration says"
        if folder.is_dir():
            raise WorkloadError(
                f"workload {workload!r}: folder {name} holds no {what} that can be loaded: {reason}",
                f"give {option}FOLDER that {what}.save_pretrained() wrote",
            ) from error
        raise WorkloadError(
            f"workload {workload!r}: {what} {name} cannot be had: {reason}",
            f"check its name and the network, or download it and give {option}FOLDER",
        ) from error


def has_blocks(model: nn.Module) -> bool:
    """Whether the model has transformer blocks that `transformer_blocks` finds."""
    return _largest_list(model) is not None


def transformer_blocks(model: nn.Module) -> nn.ModuleList:
    """The model's transformer blocks: its list of modules with the most parameters.

    GPT-2 and GPT-Neo call it `h`, Llama and its like `layers`, DistilBERT and BERT `layer`. Lists inside a
    block, as of a mixture's experts, hold fewer parameters than the list of the blocks.
    """
    blocks = _largest_list(model)
    assert blocks is not None
    return blocks


def vocabulary(config: Any, workload: str) -> int:
    """How many tokens a model of `config` knows. Raises WorkloadError if it is none of language."""
    size = getattr(config, "vocab_size", None)
    if not isinstance(size, int):
        raise WorkloadError(
            f"workload {workload!r}: a {config.model_type} model has no vocabulary", "give a language model"
        )
    return size


def positions(config: Any) -> int | None:
    """The longest sequence that a model of `config` takes; None where it does not say."""
    value = getattr(config, "max_position_embeddings", None)
    return int(value) if value else None


def sequence_length(asked: int | None, own: int, config: Any, workload: str) -> int:
    """Tokens of a sample: as asked, else the workload's own or as many as the model has positions."""
    most = positions(config)
    if asked is None:
        return own if most is None else min(own, most)
    if most is not None and asked > most:
        raise WorkloadError(
            f"workload {workload!r}: --sequence-length {asked} is more than the model's {most} positions",
            f"give --sequence-length {most} or less",
        )
    return asked


def _build(auto: Any, workload: str, config: Any, weights: str | None, options: dict[str, Any]) -> Any:
    if weights is None:
        try:
            model = auto.from_config(config, **options)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise WorkloadError(
                    f"workload {workload!r}: no {config.model_type} model can be built: {error}",
                    "mend the model's config.json",
                ) from error
            raise WorkloadError(
                f"workload {workload!r}: a {config.model_type} model is none of its kind",
                "give a model that transformers' " + auto.__name__ + " knows",
            ) from None
    else:
        model = of_the_hub(auto.from_pretrained, weights, workload, "model", config=config, **options)
    # Weights may have been published in another type.
    return model.float()


def _causal_attention(config: Any) -> dict[str, Any]:
    """Options that make a model call torch's attention as causal, without a mask, as full sequences allow.

    Left alone, transformers 5 looks in every step whether sequences are packed, which waits for the device,
    and compiled as a whole it makes a mask, with which no flash kernel runs. Of models whose every layer sees
    all that is before; earlier releases do so by themselves.
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
    """Whether what a model says at a token depends on those after it; False where it cannot be asked.

    Encoders such as BERT are known to transformers as causal, too, and are not unless told to be.
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


def _largest_list(model: nn.Module) -> nn.ModuleList | None:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    largest = max(lists, key=_size, default=None)
    return largest if largest is not None and _size(largest) > 0 else None


def _size(modules: nn.Module) -> int:
    return sum(parameter.numel() for parameter in modules.parameters())

"""Language models, without any: how blocks are found, lengths are chosen and what cannot be had is said."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from fastlaunch_train.data.tokens import tokenizer_of_model
from fastlaunch_train.workloads import WorkloadError
from fastlaunch_train.workloads.language_models import (
    Logits,
    has_blocks,
    of_the_hub,
    sequence_length,
    transformer_blocks,
    transformers_for,
)


class Mixture(nn.Module):
    """Blocks that hold a list of their own, beside a list that is longer and has less in it."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(9))
        self.body = nn.Module()
        self.body.layers = nn.ModuleList(nn.ModuleDict({"experts": experts()}) for _ in range(2))
        self.empty = nn.ModuleList()


def experts() -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(4, 4) for _ in range(5))


def test_blocks_are_the_list_with_most_in_it() -> None:
    model = Mixture()
    assert transformer_blocks(model) is model.body.layers
    assert has_blocks(model)
    assert not has_blocks(nn.Sequential(nn.Linear(2, 2)))


def test_the_sequence_length_is_the_workloads_own_within_the_models_positions() -> None:
    def of(asked: int | None, positions: int | None) -> int:
        return sequence_length(asked, 1024, SimpleNamespace(max_position_embeddings=positions), "toy")

    assert [of(None, 2048), of(None, 512), of(None, None)] == [1024, 512, 1024]
    assert [of(512, 512), of(7, 512), of(9999, None)] == [512, 7, 9999]
    with pytest.raises(WorkloadError, match="--sequence-length 513 is more than the model's 512") as caught:
        of(513, 512)
    assert caught.value.hint == "give --sequence-length 512 or less"


def failing(error: Exception) -> Callable[..., object]:
    def load(name: str) -> object:
        raise error

    return load


def test_what_cannot_be_had_is_named_with_the_option_that_mends_it(tmp_path: Path) -> None:
    offline = OSError("We couldn't connect to the hub to load this file.\nCheck your connection. More")
    for name, error, message, hint in (
        (f"{tmp_path}/none", offline, "there is no model folder", "--model FOLDER"),
        ("./none", offline, "there is no model folder", "--model FOLDER"),
        ("a/b/c", offline, "there is no model folder", "--model FOLDER"),
        ("org/name", offline, "org/name cannot be had: We couldn't connect.* file$", "--model FOLDER"),
        (str(tmp_path), ValueError(""), "holds no model that can be loaded: ValueError", "save_pretrained"),
        (str(tmp_path), EOFError(), "holds no model that can be loaded: EOFError", "save_pretrained"),
        (
            str(tmp_path),
            RuntimeError("You set `ignore_mismatched_sizes`"),
            "are of other sizes than",
            "--model",
        ),
    ):
        with pytest.raises(WorkloadError, match=message) as caught:
            of_the_hub(failing(error), name, "toy", "model")
        assert hint in (caught.value.hint or "")
    assert of_the_hub(str.upper, str(tmp_path), "toy", "model") == str(tmp_path).upper()


def test_a_model_that_the_workload_names_is_mended_there(tmp_path: Path) -> None:
    for name, message, hint in (
        (f"{tmp_path}/none", "there is no model folder", "give hf-clm:FOLDER, or a name"),
        ("org/name", "cannot be had", "give hf-clm:FOLDER"),
        (str(tmp_path), "holds no model", "give hf-clm:FOLDER that"),
    ):
        with pytest.raises(WorkloadError, match=message) as caught:
            of_the_hub(failing(OSError("no")), name, f"hf-clm:{name}", "model")
        assert hint in (caught.value.hint or "")


def test_a_bug_is_not_taken_for_a_model_that_is_missing() -> None:
    with pytest.raises(TypeError):
        of_the_hub(failing(TypeError("bug")), "org/name", "toy", "model")


def test_without_transformers_the_extra_is_named() -> None:
    with pytest.raises(WorkloadError, match="'toy' needs transformers") as caught:
        transformers_for("toy", find=lambda name: None)
    assert caught.value.hint == "pip install 'fastlaunch[train]'"


def test_weights_without_their_tokenizer_are_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert tokenizer_of_model(str(tmp_path), "toy") is None
    assert "has no tokenizer and no --tokenizer is given" in caplog.text
    caplog.clear()
    assert tokenizer_of_model(None, "toy") is None
    assert not caplog.text


def test_torch_2_6_finds_the_name_by_which_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5 imports torch there for type checkers alone."""
    module = ModuleType("transformers.utils.output_capturing")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    Logits(nn.Identity())
    assert module.torch is torch
    module.torch = theirs = object()
    Logits(nn.Identity())
    assert module.torch is theirs


def test_a_mask_is_given_as_the_model_takes_it() -> None:
    class Model(nn.Module):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=attention_mask)

    mask = torch.tensor([[1, 0]])
    assert Logits(Model())(mask, mask) is mask
    broadcast = Logits(Model(), broadcast_mask=True)(mask, mask)
    assert broadcast.tolist() == [[[[True, False]]]]

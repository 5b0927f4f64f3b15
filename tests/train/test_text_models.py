"""Language models, without any: how blocks are found, lengths are chosen and what cannot be had is said."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from fastlaunch_train.data.hub import import_transformers, load_from_hub
from fastlaunch_train.data.tokens import tokenizer_of_model
from fastlaunch_train.workloads.language_models import Logits, sequence_length, transformer_blocks
from fastlaunch_train.workloads.registry import WorkloadError


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
    assert transformer_blocks(nn.Sequential(nn.Linear(2, 2))) is None


def test_the_sequence_length_is_the_workloads_own_within_the_models_positions() -> None:
    def of(requested: int | None, positions: int | None) -> int:
        return sequence_length(requested, 1024, SimpleNamespace(max_position_embeddings=positions), "toy")

    assert [of(None, 2048), of(None, 512), of(None, None)] == [1024, 512, 1024]
    assert [of(512, 512), of(7, 512), of(9999, None)] == [512, 7, 9999]
    with pytest.raises(WorkloadError, match="--sequence-length 513"):
        of(513, 512)


def failing(error: Exception) -> Callable[..., object]:
    def load(name: str) -> object:
        raise error

    return load


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("./none", OSError("offline"), "there is no model folder"),
        ("a/b/c", OSError("offline"), "there is no model folder"),
        ("org/name", OSError("We couldn't connect.\nMore. Yet more"), "We couldn't connect"),
        (".", EOFError(), "EOFError"),
        (".", RuntimeError("You set `ignore_mismatched_sizes`"), "sizes"),
    ],
)
def test_what_cannot_be_loaded_is_named_with_its_option(name: str, error: Exception, message: str) -> None:
    for workload, option in (("toy", "--model"), (f"hf-clm:{name}", "hf-clm:FOLDER")):
        with pytest.raises(WorkloadError, match=message) as caught:
            load_from_hub(failing(error), name, workload, "model")
        assert option in (caught.value.hint or "")


def test_without_transformers_the_extra_is_named() -> None:
    with pytest.raises(WorkloadError, match="transformers") as caught:
        import_transformers("toy", find=lambda name: None)
    assert "fastlaunch[train]" in (caught.value.hint or "")


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

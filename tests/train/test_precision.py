"""The arithmetic of recipes, and the cuDNN that computes it."""

from pathlib import Path

import pytest
import torch

from fastlaunch_train.models.attention import (
    cudnn_warning,
    decode_cudnn_version,
    guard_cudnn_attention,
    loaded_cudnn_versions,
)
from fastlaunch_train.models.precision import full_fp32, set_fp32_products, setup_precision
from fastlaunch_train.recipes.recipes import RECIPES
from fastlaunch_train.recipes.rules import batch_multiple

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_autocast_computes_products_in_the_recipes_precision(name: str, dtype: torch.dtype) -> None:
    precision = setup_precision(RECIPES[name], CPU)
    layer = torch.nn.Linear(4, 4)
    for _ in range(2):  # a fresh context each time
        with precision.autocast():
            assert layer(torch.ones(2, 4)).dtype == dtype
    assert layer(torch.ones(2, 4)).dtype == torch.float32
    assert (precision.scaler is not None) == (name == "fp16")


def test_fp8_and_fused_blocks_take_batches_of_more_samples() -> None:
    multiples = {name: batch_multiple(recipe) for name, recipe in RECIPES.items()}
    assert multiples["bf16"] == multiples["te-bf16"] == 8
    assert multiples["te-fp8"] == multiples["ao-fp8"] == multiples["te-article-fp8"] == 16
    assert multiples["fp8-fused"] == multiples["bf16-fused"] == 16
    assert multiples["te-mxfp8"] == 32


def test_torchaos_fp8_is_inside_plain_bf16_autocast() -> None:
    with setup_precision(RECIPES["ao-fp8"], CPU).autocast():
        assert torch.get_autocast_dtype("cpu") == torch.bfloat16


def test_tf32_is_on_for_tf32_alone_and_off_in_full_fp32() -> None:
    try:
        set_fp32_products(allow_tf32=True)
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.allow_tf32
        with full_fp32():
            assert torch.get_float32_matmul_precision() == "highest"
            assert not torch.backends.cudnn.allow_tf32
        assert torch.get_float32_matmul_precision() == "high"
        assert torch.backends.cudnn.allow_tf32
        setup_precision(RECIPES["fp32"], CPU)
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cudnn.allow_tf32
        # The compiler reads it through this one, which fails if torch's two interfaces were mixed.
        assert not torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cudnn.allow_tf32 = True


def test_cudnn_version_numbers() -> None:
    assert decode_cudnn_version(91501) == (9, 15, 1)
    assert decode_cudnn_version(8907) == (8, 9, 7)


def test_the_loaded_cudnn_are_found_in_the_process_map(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    numbers = {"/opt/libcudnn.so.9": 91900, "/usr/lib/libcudnn.so.9.14.0": 91400}
    mapped = [*numbers, *numbers, "/usr/lib/libcudnn_graph.so.9", "/usr/lib/libcublas.so.13"]
    lines = [f"7f00-7f01 r-xp 00000000 08:01 11   {path}" for path in mapped]
    maps.write_text("\n".join([*lines, "7f09-7f0a rw-p 00000000 00:00 0"]))
    assert loaded_cudnn_versions(maps, numbers.__getitem__) == [(9, 14, 0), (9, 19, 0)]
    assert loaded_cudnn_versions(maps, lambda path: None) == []
    assert loaded_cudnn_versions(tmp_path / "none", numbers.__getitem__) == []


def test_an_old_cudnn_and_several_are_warned_of() -> None:
    assert cudnn_warning([]) is None
    assert cudnn_warning([(9, 15, 1)]) is None
    assert "9.15.0 is older than 9.15.1" in (cudnn_warning([(9, 15, 0)]) or "")
    both = cudnn_warning([(9, 14, 0), (9, 19, 0)]) or ""
    assert "several cuDNN are loaded: 9.14.0, 9.19.0" in both
    assert "attention is off" in both


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU has a cuDNN")
def test_without_a_gpu_there_is_no_cudnn_to_guard() -> None:
    assert guard_cudnn_attention() == (None, None)

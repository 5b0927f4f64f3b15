"""DeepSpeed's ZeRO stages over two ranks: the same training as plain torch, also after a resume."""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import toy

from fastlaunch_train.recipes.recipe import RecipeError
from fastlaunch_train.recipes.recipes import RECIPES, resolve_recipe
from fastlaunch_train.steppers.deepspeed_engine import (
    BUCKET_ELEMENTS,
    check_overlap,
    check_recipe,
    engine_config,
    without_stale_locks,
)

STEPS = 6
#: Against plain fp64, of losses and weights; None where the optimizer is another than the reference's.
ARMS: dict[str, float | None] = {
    "zero1,precision=fp32": 1e-6,
    "zero1,precision=fp32,grad_accumulation=2": 1e-6,
    "zero1,precision=fp32,overlap_comm=false": 1e-6,
    "zero2,precision=fp32,grad_accumulation=2": 1e-6,
    "zero1": 5e-3,
    "zero2,wire_dtype=bf16": 5e-3,
    "zero1,parameter_dtype=bf16-master": 1e-2,
    "zero2,parameter_dtype=bf16-master": 1e-2,
    "zero1,precision=fp32,grad_accumulation=2,pretraining": 1e-6,
    "zero2,precision=fp32,pretraining": 1e-6,
    "zero2,parameter_dtype=bf16-master,pretraining": 1e-2,
    "zero2,optimizer=adamw,learning_rate=0.01": None,
}
needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_deepspeed
def test_two_ranks_train_as_one_and_resume_with_the_same_bits(tmp_path: Path) -> None:
    found = toy.run_ranks_and_resume(tmp_path, ARMS, model_class="DeepSpeedEngine", steps=STEPS)
    apart, overlapping = found["zero1,precision=fp32,overlap_comm=false"], found["zero1,precision=fp32"]
    assert overlapping["losses"] == apart["losses"]


@pytest.mark.full
@needs_deepspeed
def test_a_step_done_to_compile_is_undone(tmp_path: Path) -> None:
    arms = [
        "zero1,precision=fp32,compile_mode=default,compile_backend=eager",
        "zero2,parameter_dtype=bf16-master,compile_mode=default,compile_backend=eager,compile_scope=model",
    ]
    found = toy.run_ranks(tmp_path, arms, steps=STEPS)
    losses, weights = toy.reference(steps=STEPS)
    assert toy.distance(found[arms[0]], losses, weights) < 1e-6
    assert toy.distance(found[arms[1]], losses, weights) < 1e-2


@pytest.mark.parametrize(
    ("recipe", "overrides", "expected"),
    [
        ("zero1", [], {"stage": 1, "fp16": False, "bf16": False, "wire": None}),
        ("zero2", ["wire_dtype=bf16"], {"stage": 2, "fp16": False, "bf16": False, "wire": "bf16"}),
        ("zero2", ["parameter_dtype=bf16-master"], {"stage": 2, "fp16": False, "bf16": True, "wire": "fp32"}),
        ("zero2", ["precision=fp16"], {"stage": 2, "fp16": True, "bf16": False, "wire": "fp32"}),
    ],
)
def test_the_configuration_follows_the_recipe(
    recipe: str, overrides: list[str], expected: dict[str, Any]
) -> None:
    chosen = resolve_recipe(recipe, [*overrides, "grad_accumulation=4"])
    config = engine_config(chosen, world_size=2, max_grad_norm=None)
    assert {
        "stage": config["zero_optimization"]["stage"],
        "fp16": config["fp16"]["enabled"],
        "bf16": config["bf16"]["enabled"],
        "wire": config.get("communication_data_type"),
    } == expected
    assert (config["gradient_accumulation_steps"], config["train_batch_size"]) == (4, 8)
    assert config["zero_optimization"]["overlap_comm"] is True, "as DDP and FSDP2 do"
    assert config["zero_optimization"]["reduce_bucket_size"] == BUCKET_ELEMENTS
    assert config["gradient_clipping"] == 0.0
    assert engine_config(chosen, world_size=2, max_grad_norm=0.5)["gradient_clipping"] == 0.5


@needs_deepspeed
def test_what_deepspeed_does_not_compute_is_refused() -> None:
    with pytest.raises(RecipeError, match="adafactor needs rows and columns"):
        check_recipe(toy.TOY, resolve_recipe("zero1", ["optimizer=adafactor"]))
    adafactor = dataclasses.replace(toy.TOY, optimizer="adafactor")
    with pytest.raises(RecipeError, match="adafactor needs rows and columns"):
        check_recipe(adafactor, RECIPES["zero2"])
    with pytest.raises(RecipeError, match="frees gradients itself"):
        check_recipe(toy.TOY, resolve_recipe("zero1", ["set_to_none=false"]))
    check_recipe(adafactor, resolve_recipe("zero1", ["optimizer=adamw"]))


def test_gradients_are_not_overlapped_where_that_corrupts_them() -> None:
    apart = resolve_recipe("zero2", ["overlap_comm=false"])
    for release in ("0.15.4", "0.19.7+cu128", "0.19+9a1b"):
        with pytest.raises(RecipeError, match="can corrupt gradients"):
            check_overlap(RECIPES["zero2"], release)
        check_overlap(apart, release)
    for release in ("0.19.8+9a1b", "0.20"):
        check_overlap(RECIPES["zero2"], release)
    assert (
        engine_config(apart, world_size=2, max_grad_norm=None)["zero_optimization"]["overlap_comm"] is False
    )


def test_locks_of_killed_compilers_are_removed_and_those_of_the_living_kept(tmp_path: Path) -> None:
    locks = [tmp_path / "py311_cpu" / "deepspeed_shm_comm" / "lock", tmp_path / "utils" / "lock"]
    for lock in locks:
        lock.parent.mkdir(parents=True)
        lock.touch()
    with without_stale_locks(tmp_path):
        assert not any(lock.exists() for lock in locks)
        locks[0].touch()
        with without_stale_locks(tmp_path):
            assert locks[0].exists()
    # Another program's compiler holds its lock open.
    with locks[0].open(), without_stale_locks(tmp_path):
        assert locks[0].exists()
    with without_stale_locks(tmp_path):
        assert not locks[0].exists()


def test_an_extensions_folder_that_cannot_be_written_is_left_as_it_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with without_stale_locks(tmp_path / "absent"):
        pass
    assert not caplog.records
    (tmp_path / "file").touch()
    with without_stale_locks(tmp_path / "file" / "below"):
        compiled = True
    assert compiled and "stay there" in caplog.text

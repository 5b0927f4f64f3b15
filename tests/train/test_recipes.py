"""Recipes: each is sound, overrides work, contradictions are refused, labels are canonical; and warnings."""

import json
from itertools import permutations, product

import pytest
import toy
from hypothesis import given
from hypothesis import strategies as st

from fastlaunch_train.recipes.recipe import (
    CHOICES,
    RECIPE_SCHEMA,
    TE_SCALINGS,
    TORCHAO_SCALINGS,
    Recipe,
    RecipeError,
)
from fastlaunch_train.recipes.recipes import OVERRIDABLE, RECIPES, resolve_recipe
from fastlaunch_train.recipes.requirements import Capabilities, caveats

NAMES = tuple(RECIPES)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipes_record_is_complete_and_read_back(name: str) -> None:
    assert resolve_recipe(name) == RECIPES[name]
    record = json.loads(json.dumps(RECIPES[name].to_record(), allow_nan=False))
    assert set(record) == {*OVERRIDABLE, "name", "description", "overrides", "label", "schema"}
    assert (record["schema"], record["label"], record["overrides"]) == (RECIPE_SCHEMA, name, {})
    assert Recipe.from_record(record) == RECIPES[name]
    record = resolve_recipe(name, ["deterministic=true"]).to_record()
    assert (record["deterministic"], record["overrides"]) == (True, {"deterministic": "true"})
    assert record["label"] == f"{name} deterministic=true"


@pytest.mark.parametrize("text", ["compile_mode=default", "compile-mode=default", " compile_mode = default "])
def test_an_override_is_read_as_people_write_it(text: str) -> None:
    assert resolve_recipe("bf16", [text]).label == "bf16 compile_mode=default"


def test_the_last_override_of_a_field_counts_and_one_that_changes_nothing_does_not() -> None:
    assert resolve_recipe("bf16", ["ddp_bucket_mb=25", "ddp_bucket_mb=50"]).ddp_bucket_mb == 50
    assert resolve_recipe("zero1", ["overlap_comm=false"]).overlap_comm is False
    assert resolve_recipe("bf16", ["learning_rate=3e-4"]).learning_rate == 0.0003
    assert resolve_recipe("bf16", ["ddp_bucket_mb=25", "ddp_bucket_mb=160"]) == RECIPES["bf16"]
    assert resolve_recipe("bf16", ["precision=bf16", "learning_rate=none"]) == RECIPES["bf16"]


def test_equal_recipes_have_equal_labels() -> None:
    overrides = ["optimizer=adamw", "learning_rate=0.0010", "ddp_bucket_mb=25", "blocks=native"]
    labels = {resolve_recipe("bf16", order).label for order in permutations(overrides)}
    assert labels == {"bf16 ddp_bucket_mb=25 learning_rate=0.001 optimizer=adamw"}
    assert resolve_recipe("bf16", ["learning_rate=1e-3"]) == resolve_recipe("bf16", ["learning_rate=.001"])


def test_overrides_are_judged_together() -> None:
    # Each of the three alone contradicts the recipe.
    overrides = ["precision=fp8", "fp8_scaling=delayed", "blocks=te"]
    assert all(resolve_recipe("bf16", order).precision == "fp8" for order in permutations(overrides))


def test_an_unknown_name_comes_with_the_nearest() -> None:
    with pytest.raises(RecipeError, match="unknown recipe") as caught:
        resolve_recipe("te_fp8")
    assert "te-fp8" in (caught.value.hint or "").partition("? ")[0]
    assert all(known in (caught.value.hint or "") for known in NAMES)
    with pytest.raises(RecipeError, match="no field") as caught:
        resolve_recipe("bf16", ["compile_mod=x"])
    assert "compile_mode" in (caught.value.hint or "")


#: Recipe, overrides, and a word of why they are refused.
REFUSED = [
    *(("bf16", f"{field}=x", f"no field '{field}'") for field in ("name", "description", "overrides")),
    ("bf16", "compile_mode", "FIELD=VALUE"),
    ("bf16", "precision=int4", "precision"),
    ("bf16", "precision=", "precision"),
    ("bf16", "ddp_bucket_mb=0", "ddp_bucket_mb"),
    ("bf16", "ddp_bucket_mb=2.5", "ddp_bucket_mb"),
    ("bf16", "learning_rate=0", "learning_rate"),
    ("bf16", "learning_rate=nan", "learning_rate"),
    ("bf16", "learning_rate=fast", "learning_rate"),
    ("bf16", "set_to_none=yes", "set_to_none"),
    ("bf16", "grad_accumulation=0", "grad_accumulation"),
    ("te-fp8", "amax_history=0", "amax_history"),
    # Contradictions.
    ("bf16", "precision=fp8", "fp8_scaling"),
    ("bf16", "fp8_scaling=delayed", "fp8_scaling"),
    ("te-fp8", "blocks=native", "Transformer Engine"),
    ("ao-fp8", "blocks=te compile_mode=none", "torchao"),
    ("ao-fp8", "fp8_format=e4m3", "torchao"),
    ("bf16", "fp8_blocks=1:-1", "FP8"),
    ("te-fp8-current", "amax_history=16", "amax_history"),
    ("te-fp8", "fp8_blocks=1:2:3", "fp8_blocks"),
    ("te-fp8", "fp8_blocks=0:", "all of them"),
    ("fp16", "blocks=te", "fp16"),
    ("te-bf16", "compile_mode=default", "torch.compile"),
    ("bf16", "compile_backend=eager", "compiled"),
    ("bf16", "compile_scope=model", "compiled"),
    ("compile-max-autotune", "compile_backend=eager", "Inductor"),
    ("compile", "compile_backend=", "compile_backend"),
    ("compile", "pointwise=scripted", "scripted"),
    ("fsdp2", "ddp_bucket_mb=25", "ddp_bucket_mb"),
    ("bf16", "overlap_comm=false", "overlap_comm"),
    ("fsdp2", "blocks=te", "DDP"),
    ("zero1", "compile_mode=max-autotune compile_scope=model", "gradients"),
    ("zero1", "parameter_dtype=bf16", "fp32 masters"),
    ("ort", "compile_mode=default", "ORTModule"),
    ("ort", "blocks=te precision=bf16", "ORTModule"),
    ("ort", "parallelism=fsdp2", "ORTModule"),
    ("ort", "activation_checkpointing=block", "memory"),
    ("ort", "precision=bf16 parameter_dtype=bf16-master", "fp32 parameters"),
    ("lightning", "parallelism=zero2", "DDP"),
    ("lightning", "compile_mode=default compile_scope=wrapped", "wraps"),
    ("fp32", "parameter_dtype=bf16", "precision fp32"),
    ("transformers", "parameter_dtype=bf16-master", "our own loop"),
    ("bf16", "optimizer=adafactor optimizer_impl=fused", "fused adafactor"),
    ("fsdp2", "optimizer=sgd optimizer_impl=fused", "fused SGD"),
]


@pytest.mark.parametrize(("name", "overrides", "word"), REFUSED)
def test_what_is_wrong_is_refused_with_a_hint(name: str, overrides: str, word: str) -> None:
    with pytest.raises(RecipeError, match=word) as caught:
        resolve_recipe(name, overrides.split(" "))
    assert caught.value.hint


@pytest.mark.parametrize(
    ("label", "travelled"),
    [
        ("bf16", "fp32"),
        ("bf16 wire_dtype=bf16", "bf16"),
        ("bf16 parameter_dtype=bf16", "bf16"),
        ("bf16 parameter_dtype=bf16-master", "bf16"),
        ("fsdp2 parameter_dtype=bf16", "fp32"),
        ("zero1 parameter_dtype=bf16-master", "fp32"),
    ],
)
def test_a_record_says_what_gradients_travel_in(label: str, travelled: str) -> None:
    name, *overrides = label.split()
    recorded = resolve_recipe(name, overrides).to_record()
    assert recorded["wire_dtype"] == travelled
    assert Recipe.from_record(recorded).to_record() == recorded


def test_of_all_combinations_the_sound_ones_remain() -> None:
    fields = ("precision", "blocks", "fp8_scaling", "compile_mode", "compile_scope")
    sound = 0
    for values in product(*(CHOICES[field] for field in fields)):
        overrides = [f"{field}={value}" for field, value in zip(fields, values, strict=True)]
        try:
            resolve_recipe("bf16", overrides)
        except RecipeError:
            continue
        sound += 1
    compiled = 1 + (len(CHOICES["compile_mode"]) - 1) * len(CHOICES["compile_scope"])
    in_native_blocks = 4 + len(TORCHAO_SCALINGS)  # four precisions without a scaling
    in_te_blocks = 2 * (1 + len(TE_SCALINGS))  # bf16 or a scaling, in faithful blocks or the article's
    in_fused_blocks = 2  # bf16, or FP8 with delayed scaling
    assert sound == in_native_blocks * compiled + in_te_blocks + in_fused_blocks


choices = {
    **CHOICES,
    "compile_backend": ("inductor", "eager"),
    "ddp_bucket_mb": ("25", "160", "0160"),
    "overlap_comm": ("true", "false"),
    "fp8_blocks": ("all", ":", "1:-1", "-2:"),
    "amax_history": ("16", "1024"),
    "grad_accumulation": ("1", "2"),
    "set_to_none": ("true", "False"),
    "deterministic": ("true", "false"),
    "step_graph": ("true", "false"),
    "learning_rate": ("none", "1e-3", "0.001", "2"),
}
plausible = st.sampled_from([f"{field}={value}" for field, values in choices.items() for value in values])


@given(name=st.sampled_from(NAMES), overrides=st.lists(plausible, max_size=5))
def test_a_label_says_all_of_a_recipe(name: str, overrides: list[str]) -> None:
    try:
        recipe = resolve_recipe(name, overrides)
    except RecipeError:
        return
    first, *rest = recipe.label.split(" ")
    assert resolve_recipe(first, rest) == recipe
    assert resolve_recipe(first, rest[::-1]) == recipe
    assert all(getattr(recipe, field) != getattr(RECIPES[name], field) for field, _ in recipe.overrides)


@given(override=st.text() | st.builds("{}={}".format, st.sampled_from(OVERRIDABLE), st.text()))
def test_any_text_is_an_override_or_a_recipe_error(override: str) -> None:
    try:
        recipe = resolve_recipe("compile", [override])
    except RecipeError as error:
        assert error.message
    else:
        assert len(recipe.overrides) <= 1
        assert resolve_recipe("compile", recipe.label.split(" ")[1:]) == recipe


@pytest.mark.parametrize(
    ("label", "capability", "ranks", "words"),
    [
        ("bf16", (7, 5), 2, "emulates bf16"),
        ("fsdp2", None, 1, "shards nothing"),
        ("zero1", None, 1, "shards nothing"),
        ("bf16 wire_dtype=bf16", None, 1, "no gradient travels"),
        ("graph", (9, 0), 2, "no step is one CUDA graph"),
        ("fp8-fused", None, 2, "without a GPU"),
    ],
)
def test_what_does_nothing_here_is_warned_of(
    label: str, capability: tuple[int, int] | None, ranks: int, words: str
) -> None:
    machine = Capabilities(compute_capability=capability)
    (warning,) = caveats(toy.recipe_of(label), machine, world_size=ranks)
    assert words in warning


@pytest.mark.parametrize("capability", [None, (8, 0), (9, 0)])
def test_most_recipes_need_no_warning(capability: tuple[int, int] | None) -> None:
    machine = Capabilities(compute_capability=capability)
    assert list(caveats(RECIPES["fp16"], Capabilities(compute_capability=(7, 5)), world_size=2)) == []
    for name, recipe in RECIPES.items():
        if recipe.blocks == "fused" and capability is None:
            continue
        if recipe.parallelism == "ddp":
            assert list(caveats(recipe, machine, world_size=1)) == []
        if name != "graph":
            assert list(caveats(recipe, machine, world_size=2)) == []

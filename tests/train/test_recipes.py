"""Recipes: every one is sound, every override works, contradictions are refused, labels are canonical."""

import json
from dataclasses import replace
from itertools import permutations, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastlaunch_train.recipes import (
    BLOCKS,
    COMPILE_MODES,
    COMPILE_SCOPES,
    FP8_SCALINGS,
    OPTIMIZER_IMPLS,
    OPTIMIZERS,
    OVERRIDABLE,
    PRECISIONS,
    RECIPE_SCHEMA,
    RECIPES,
    RecipeError,
    resolve_recipe,
)

NAMES = (
    "fp32",
    "tf32",
    "bf16",
    "fp16",
    "compile",
    "compile-reduce-overhead",
    "compile-max-autotune",
    "te-bf16",
    "te-fp8",
)


def test_the_recipes_are_these() -> None:
    assert tuple(RECIPES) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_resolves_to_itself(name: str) -> None:
    recipe = resolve_recipe(name)
    assert recipe is RECIPES[name] or recipe == RECIPES[name]
    assert recipe.label == recipe.name == name
    assert recipe.description


@pytest.mark.parametrize("name", NAMES)
def test_a_recipes_record_is_json_and_complete(name: str) -> None:
    record = RECIPES[name].to_record()
    assert json.loads(json.dumps(record, allow_nan=False)) == record
    assert set(record) == {*OVERRIDABLE, "name", "description", "overrides", "label", "schema"}
    assert record["schema"] == RECIPE_SCHEMA
    assert record["label"] == name
    assert record["overrides"] == {}


def test_overrides_stand_in_the_record() -> None:
    record = resolve_recipe("bf16", ["ddp_bucket_mb=25", "optimizer=adamw"]).to_record()
    assert record["overrides"] == {"ddp_bucket_mb": "25", "optimizer": "adamw"}
    assert record["ddp_bucket_mb"] == 25
    assert record["label"] == "bf16 ddp_bucket_mb=25 optimizer=adamw"


#: field -> (recipe that takes the override, its text, the value that it stands for)
OVERRIDES: dict[str, tuple[str, str, object]] = {
    "precision": ("bf16", "fp16", "fp16"),
    "blocks": ("bf16", "te", "te"),
    "fp8_scaling": ("te-fp8", "current", "current"),
    "compile_mode": ("compile", "max-autotune", "max-autotune"),
    "compile_backend": ("compile", "aot_eager", "aot_eager"),
    "compile_scope": ("compile", "model", "model"),
    "parallelism": ("bf16", "ddp", "ddp"),
    "ddp_bucket_mb": ("bf16", "25", 25),
    "optimizer": ("bf16", "adamw", "adamw"),
    "optimizer_impl": ("bf16", "fused", "fused"),
    "learning_rate": ("bf16", "3e-4", 0.0003),
}


@pytest.mark.parametrize("field", OVERRIDABLE)
def test_every_field_can_be_overridden(field: str) -> None:
    name, text, value = OVERRIDES[field]
    recipe = resolve_recipe(name, [f"{field}={text}"])
    assert getattr(recipe, field) == value
    for other in set(OVERRIDABLE) - {field}:
        assert getattr(recipe, other) == getattr(RECIPES[name], other)


@pytest.mark.parametrize("text", ["compile_mode=default", "compile-mode=default", " compile_mode = default "])
def test_an_override_is_read_as_people_write_it(text: str) -> None:
    assert resolve_recipe("bf16", [text]).label == "bf16 compile_mode=default"


def test_the_last_override_of_a_field_counts() -> None:
    assert resolve_recipe("bf16", ["ddp_bucket_mb=25", "ddp_bucket_mb=50"]).ddp_bucket_mb == 50
    assert resolve_recipe("bf16", ["ddp_bucket_mb=25", "ddp_bucket_mb=160"]) == RECIPES["bf16"]


def test_an_override_that_changes_nothing_is_dropped() -> None:
    assert resolve_recipe("bf16", ["precision=bf16", "learning_rate=none"]) == RECIPES["bf16"]


def test_equal_recipes_have_equal_labels() -> None:
    overrides = ["optimizer=adamw", "learning_rate=0.0010", "ddp_bucket_mb=25", "blocks=timm"]
    labels = {resolve_recipe("bf16", order).label for order in permutations(overrides)}
    assert labels == {"bf16 ddp_bucket_mb=25 learning_rate=0.001 optimizer=adamw"}
    assert resolve_recipe("bf16", ["learning_rate=1e-3"]) == resolve_recipe("bf16", ["learning_rate=.001"])


def test_overrides_are_judged_together() -> None:
    # Each of the three alone contradicts the recipe.
    overrides = ["precision=fp8", "fp8_scaling=delayed", "blocks=te"]
    assert all(resolve_recipe("bf16", order).precision == "fp8" for order in permutations(overrides))


@pytest.mark.parametrize(
    ("name", "nearest"), [("bf-16", "bf16"), ("te_fp8", "te-fp8"), ("compile-max", "compile-max-autotune")]
)
def test_an_unknown_recipe_names_the_nearest(name: str, nearest: str) -> None:
    with pytest.raises(RecipeError, match=f"unknown recipe '{name}'") as caught:
        resolve_recipe(name)
    assert caught.value.hint is not None
    assert nearest in caught.value.hint.partition("? ")[0]
    assert all(known in caught.value.hint for known in NAMES)


def test_an_unknown_field_names_the_nearest() -> None:
    with pytest.raises(RecipeError, match="no field 'compile_mod'") as caught:
        resolve_recipe("bf16", ["compile_mod=default"])
    assert caught.value.hint is not None
    assert caught.value.hint.startswith("did you mean compile_mode")


@pytest.mark.parametrize("field", ["name", "description", "overrides", "label"])
def test_a_recipes_identity_cannot_be_overridden(field: str) -> None:
    with pytest.raises(RecipeError, match=f"no field '{field}'"):
        resolve_recipe("bf16", [f"{field}=x"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("compile_mode", "is not FIELD=VALUE"),
        ("", "is not FIELD=VALUE"),
        ("precision=int4", "precision is 'int4'"),
        ("precision=", "precision is ''"),
        ("precision=BF16", "precision is 'BF16'"),
        ("ddp_bucket_mb=0", "ddp_bucket_mb is 0"),
        ("ddp_bucket_mb=-25", "ddp_bucket_mb is -25"),
        ("ddp_bucket_mb=2.5", "ddp_bucket_mb is '2.5'"),
        ("ddp_bucket_mb=many", "ddp_bucket_mb is 'many'"),
        ("learning_rate=0", "learning_rate is 0"),
        ("learning_rate=-1e-3", "learning_rate is -0.001"),
        ("learning_rate=nan", "learning_rate is nan"),
        ("learning_rate=inf", "learning_rate is inf"),
        ("learning_rate=fast", "learning_rate is 'fast'"),
    ],
)
def test_a_wrong_value_is_refused(override: str, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        resolve_recipe("bf16", [override])
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "overrides", "message"),
    [
        ("bf16", ["precision=fp8"], "fp8_scaling 'none'"),
        ("bf16", ["fp8_scaling=delayed"], "fp8_scaling 'delayed'"),
        ("te-fp8", ["blocks=timm"], "FP8 runs in Transformer Engine's blocks"),
        ("te-fp8", ["precision=bf16"], "fp8_scaling 'delayed'"),
        ("fp32", ["blocks=te"], "run in bf16 or fp8, not fp32"),
        ("fp16", ["blocks=te"], "run in bf16 or fp8, not fp16"),
        ("te-bf16", ["compile_mode=default"], "break torch.compile"),
        ("bf16", ["compile_backend=eager"], "nothing is compiled"),
        ("bf16", ["compile_scope=model"], "nothing is compiled"),
        ("compile", ["compile_mode=none", "compile_scope=model"], "nothing is compiled"),
        ("compile-max-autotune", ["compile_backend=eager"], "is Inductor's, not eager's"),
        ("compile", ["compile_backend="], "compile_backend is ''"),
        ("compile", ["compile_backend=a b"], "compile_backend is 'a b'"),
    ],
)
def test_a_contradiction_is_refused(name: str, overrides: list[str], message: str) -> None:
    with pytest.raises(RecipeError, match=message) as caught:
        resolve_recipe(name, overrides)
    assert caught.value.hint


def test_a_recipe_made_by_hand_is_checked_too() -> None:
    with pytest.raises(RecipeError, match="FP8 runs in"):
        replace(RECIPES["te-fp8"], blocks="timm")


def test_of_all_combinations_the_sound_ones_remain() -> None:
    # Without TE: four precisions x (eager + three modes x two scopes). With it: bf16, fp8 in two scalings.
    sound = 0
    for precision, blocks, scaling, mode, scope in product(
        PRECISIONS, BLOCKS, FP8_SCALINGS, COMPILE_MODES, COMPILE_SCOPES
    ):
        overrides = {
            "precision": precision,
            "blocks": blocks,
            "fp8_scaling": scaling,
            "compile_mode": mode,
            "compile_scope": scope,
        }
        try:
            resolve_recipe("bf16", [f"{field}={value}" for field, value in overrides.items()])
        except RecipeError:
            continue
        sound += 1
    assert sound == 4 * (1 + 3 * 2) + 1 + 2


choices = {
    "precision": PRECISIONS,
    "blocks": BLOCKS,
    "fp8_scaling": FP8_SCALINGS,
    "compile_mode": COMPILE_MODES,
    "compile_scope": COMPILE_SCOPES,
    "compile_backend": ("inductor", "eager"),
    "optimizer": OPTIMIZERS,
    "optimizer_impl": OPTIMIZER_IMPLS,
    "ddp_bucket_mb": ("25", "160", "0160"),
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

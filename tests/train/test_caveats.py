"""What a run's record says of a recipe that runs, and is not what its name says."""

from pathlib import Path

import pytest
from entrypoint import arguments, record, run

from fastlaunch_train.recipes.advice import caveats
from fastlaunch_train.recipes.recipes import RECIPES, resolve_recipe
from fastlaunch_train.recipes.requirements import Capabilities


def told(name: str, *overrides: str, capability: tuple[int, int] | None = None, ranks: int = 2) -> list[str]:
    machine = Capabilities(compute_capability=capability)
    return list(caveats(resolve_recipe(name, overrides), machine, world_size=ranks))


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
def test_bf16_is_emulated_before_ampere(capability: tuple[int, int]) -> None:
    (warning,) = told("bf16", capability=capability)
    version = ".".join(map(str, capability))
    assert f"emulates bf16 with compute capability {version}" in warning
    assert "from 8.0 on" in warning and warning.endswith("is fp16")
    assert len(told("bf16", "parameter_dtype=bf16-master", capability=capability)) == 1
    for name in ("fp32", "fp16"):
        assert told(name, capability=capability) == []


@pytest.mark.parametrize("name", ["fsdp2", "zero1", "zero2", "zero3"])
def test_one_rank_shards_nothing(name: str) -> None:
    (warning,) = told(name, ranks=1)
    assert f"parallelism {name} with one rank shards nothing" in warning
    assert told(name, ranks=2) == []


def test_one_rank_sends_nothing() -> None:
    (warning,) = told("bf16", "wire_dtype=bf16", ranks=1)
    assert "no gradient travels" in warning


@pytest.mark.parametrize("capability", [None, (8, 0), (9, 0)])
def test_of_most_there_is_nothing_to_say(capability: tuple[int, int] | None) -> None:
    for name, recipe in RECIPES.items():
        assert told(name, capability=capability) == []
        if recipe.parallelism == "ddp":
            assert told(name, capability=capability, ranks=1) == []


def test_the_record_holds_it_and_the_log_says_it(tmp_path: Path) -> None:
    code, output = run(arguments(tmp_path, recipe="fsdp2"))
    assert code == 0, output
    (warning,) = (text for text in record(tmp_path).header["warnings"] if "shards nothing" in text)
    assert f"warning: {warning}" in output

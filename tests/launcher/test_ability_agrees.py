"""What the launcher lets through and what the entrypoint takes are the same, for each recipe on each GPU."""

from dataclasses import replace

import pytest
from ec2_builders import catalogue

from fastlaunch.ability import RECIPES, module_of, why_not
from fastlaunch.machine import Machine
from fastlaunch_train.requirements import Machine as TrainingMachine
from fastlaunch_train.requirements import missing_part

CATALOGUE = catalogue()
SOFTWARE = frozenset(module for recipe in RECIPES.values() for module, _, _ in module_of(recipe))
CPU = Machine(devices=(), num_cores=2, modules=SOFTWARE)
#: GPUs that AWS offers and the catalogue leaves out, and what nvidia-smi calls them.
UNKNOWN = {"Tesla V100-SXM2-16GB": (7, 0), "Tesla T4": (7, 5)}
NVIDIA = [name for name, item in CATALOGUE.accelerators.items() if item.compute_capability]


def nothing(*asked: str) -> str | None:
    return None


def as_training_sees_it(capability: tuple[int, int] | None) -> TrainingMachine:
    """With everything installed, and libraries that refuse nothing."""
    return TrainingMachine(
        device_type="cpu" if capability is None else "cuda",
        compute_capability=capability,
        cuda=None if capability is None else (13, 0),
        version_of=lambda package: (99,),
        transformer_engine_problem=nothing,
        scaling_problem=nothing,
        ort_problem=nothing,
        inductor_problem=nothing,
        compile_backends=lambda: ["inductor"],
    )


def refused(devices: tuple[str, ...]) -> set[str]:
    machine = replace(CPU, devices=devices)
    return {name for name, recipe in RECIPES.items() if why_not(recipe, machine, CATALOGUE)}


def refused_in_training(capability: tuple[int, int] | None) -> set[str]:
    machine = as_training_sees_it(capability)
    return {name for name, recipe in RECIPES.items() if missing_part(recipe, machine)}


@pytest.mark.parametrize("name", NVIDIA)
def test_both_refuse_the_same_on_a_gpu(name: str) -> None:
    accelerator = CATALOGUE.accelerators[name]
    major, minor = map(int, (accelerator.compute_capability or "").split("."))
    assert refused(accelerator.device_names[:1]) == refused_in_training((major, minor))


def test_both_refuse_the_same_on_a_cpu() -> None:
    assert refused(()) == refused_in_training(None) != set()


@pytest.mark.parametrize(("device", "capability"), UNKNOWN.items())
def test_a_gpu_that_is_not_known_is_left_to_training(device: str, capability: tuple[int, int]) -> None:
    assert CATALOGUE.accelerator_of_device(device) is None
    assert refused((device,)) == set() != refused_in_training(capability)


def test_the_gpus_that_matter_are_among_them() -> None:
    assert {"A10G", "L4", "A100 40GB", "H100", "H200", "B200", "B300", "RTX PRO 6000"} <= set(NVIDIA)

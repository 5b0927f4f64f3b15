"""What the launcher lets through and what the entrypoint takes are the same, for each recipe on each GPU."""

from dataclasses import replace

import pytest
from ec2_builders import catalogue

from fastlaunch import cloud_arms
from fastlaunch.ability import RECIPES, module_of, why_not
from fastlaunch.base_image_file import BaseImage, shipped_base_images, version
from fastlaunch.core.errors import UserError
from fastlaunch.emulation import emulated_here, emulated_on
from fastlaunch.jobs.build import Request
from fastlaunch.jobs.machine import Machine
from fastlaunch.jobs.variants import arms_of
from fastlaunch_train.caveats import caveats
from fastlaunch_train.models.te_fp8 import TE_RELEASES
from fastlaunch_train.recipes import requirements
from fastlaunch_train.recipes.requirements import Machine as TrainingMachine
from fastlaunch_train.recipes.requirements import missing_part

CATALOGUE = catalogue()
SOFTWARE = frozenset(module for recipe in RECIPES.values() for module, _, _ in module_of(recipe))
CPU = Machine(devices=(), num_cores=2, modules=SOFTWARE)
#: GPUs that AWS offers and the catalogue leaves out, and what nvidia-smi calls them.
UNKNOWN = {"Tesla V100-SXM2-16GB": (7, 0), "Tesla T4": (7, 5)}
NVIDIA = [name for name, item in CATALOGUE.accelerators.items() if item.compute_capability]
IMAGES = [one for one in shipped_base_images().images if one.flavour == "ec2" and not one.uncertain]


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


def warned_in_training(capability: tuple[int, int] | None) -> set[str]:
    # Of several ranks, so that nothing is said of a single one.
    of_each = {name: caveats(recipe, capability=capability, world_size=2) for name, recipe in RECIPES.items()}
    return {name for name, told in of_each.items() if any("bf16 is emulated" in text for text in told)}


def warned(devices: tuple[str, ...]) -> set[str]:
    machine = replace(CPU, devices=devices)
    return {name for name, recipe in RECIPES.items() if emulated_here(recipe, machine, CATALOGUE)}


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


@pytest.mark.parametrize("name", NVIDIA)
def test_both_warn_of_the_same_on_a_gpu(name: str) -> None:
    accelerator = CATALOGUE.accelerators[name]
    major, minor = map(int, (accelerator.compute_capability or "").split("."))
    assert warned(accelerator.device_names[:1]) == warned_in_training((major, minor)) == set()


@pytest.mark.parametrize(("device", "capability"), UNKNOWN.items())
def test_both_warn_of_the_same_on_a_gpu_that_is_older(device: str, capability: tuple[int, int]) -> None:
    assert warned((device,)) == warned(("NVIDIA H200", device)) == warned_in_training(capability)
    assert {"bf16", "te-bf16"} <= warned((device,)) and not {"fp16", "fp32", "te-fp8"} & warned((device,))
    # As somebody's own price file may have it.
    text = ".".join(map(str, capability))
    own = replace(CATALOGUE.accelerators["A10G"], name="own", compute_capability=text)
    found = {name for name, recipe in RECIPES.items() if emulated_on(recipe, own)}
    assert found == warned_in_training(capability)


def test_nothing_is_warned_of_without_a_gpu_or_on_one_that_nobody_knows() -> None:
    assert warned(()) == warned_in_training(None) == warned(("NVIDIA Z999",)) == set()


def test_both_ask_for_the_same_releases() -> None:
    assert {name: cloud_arms.TE_RELEASES[name] for name in TE_RELEASES} == TE_RELEASES
    for name in ("BLOCKS_ON_BLACKWELL", "BLOCKS_ON_BLACKWELL_RELEASE", "BLOCK_SCALING_CUDA"):
        assert getattr(cloud_arms, name) == getattr(requirements, name)


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.tag)
@pytest.mark.parametrize("name", ["H100", "B200", "RTX PRO 6000"])
def test_both_refuse_the_same_in_an_image(name: str, image: BaseImage) -> None:
    """What of a recipe is a matter of the GPU alone is looked at elsewhere: not MXFP8."""
    accelerator = CATALOGUE.accelerators[name]
    major, minor = map(int, (accelerator.compute_capability or "").split("."))
    held = {"torch": image.torch, "transformer_engine": image.transformer_engine or "0"}
    machine = replace(
        as_training_sees_it((major, minor)),
        cuda=version(image.cuda)[:2],
        version_of=lambda package: version(held[package]) if package in held else (99,),
    )
    for recipe in (RECIPES[of_te] for of_te in ("te-fp8", "te-fp8-current", "te-fp8-block")):
        (arm,) = arms_of(Request(recipes=(recipe.name,)), "vit-huge")
        try:
            cloud_arms.check_base([arm], image, [], [accelerator])
            is_refused = False
        except UserError:
            is_refused = True
        assert is_refused == bool(missing_part(recipe, machine)), recipe.name

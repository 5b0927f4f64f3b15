"""What of an arm can be done on AWS: what it needs has to be there, or to travel with the training code."""

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from fastlaunch.ability import format_in_words, module_of, nearest_that_runs, needed_format, takes
from fastlaunch.arms import Arm, reads_text
from fastlaunch.base_image_file import BaseImage, version
from fastlaunch.cloud_terms import CloudTerms
from fastlaunch.errors import UnknownName, UserError
from fastlaunch.hardware import Accelerator, InstanceType
from fastlaunch.machine import Machine
from fastlaunch.prices import Catalogue
from fastlaunch_train.recipes import Recipe

#: Modules that AWS's images hold; what is told of them in containers/base_images.yaml.
IN_BASE_IMAGES = ("torch", "transformer_engine", "deepspeed")
#: Releases of Transformer Engine that brought FP8's scalings, by its release notes; before 2.0 it knew less.
TE_RELEASES = {"none": (2, 0), "delayed": (2, 0), "mxfp8": (2, 0), "current": (2, 2), "block": (2, 3)}
#: owner/name or name, as the Hugging Face hub has them.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
#: Option of `fastlaunch build` for an image with a module, and with all else that runs beside it.
_BUILT_BY = {"torch_ort": "--ort"}


def check_travels(arm: Arm, terms: CloudTerms) -> None:
    """Nothing, if data, model and the user's own file are where the job will be. Raises UserError."""
    kind = arm.data.partition(":")[0]
    if kind in ("folder", "file"):
        raise UserError(
            f"{arm.data} is on this machine, not on the instance",
            "give --data synthetic, or --data loader, which makes its samples there",
        )
    if arm.data not in ("synthetic", "loader"):
        raise UnknownName("data arm", arm.data, ("synthetic", "loader"))
    for option, name in (("--model", arm.model), ("--tokenizer", arm.tokenizer)):
        if name is not None:
            _check_hub_name(option, name, terms)
    if arm.workload.name.startswith("hf-clm:"):
        _check_hub_name("--workload hf-clm:", arm.workload.name.partition(":")[2], terms)
    path = arm.workload.name.rpartition(".py:")[0]
    if path and (PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts):
        raise UserError(
            f"workload {arm.workload.name!r} is not below this folder",
            "its file travels with the training code: go to its folder, and give ./my.py:build",
        )
    if path and terms.image:
        raise UserError(
            f"workload {arm.workload.name!r} travels in the code bundle, which --image does without",
            "leave out --image",
        )


def why_not_on(
    instance: InstanceType, arm: Arm, terms: CloudTerms, catalogue: Catalogue, *, arms: Sequence[Arm]
) -> UserError | None:
    """Why the arm cannot run on the instance type, or in the image that it would get; None if it can.

    arms: all that are asked for, which one image serves.
    """
    accelerator = catalogue.accelerators[instance.accelerator]
    return (
        _gpu_problem(instance, accelerator, arm, catalogue)
        or _ranks_problem(instance, arm, terms)
        or _image_problem(arm, arms, terms)
    )


def check_base(arms: Sequence[Arm], base: BaseImage, others: Sequence[BaseImage]) -> None:
    """Nothing, if AWS's image holds what the arms' recipes need, in a version that has it; else UserError.

    others: images of its flavour, of which the error names those that do. What is not known is believed.
    """
    for arm in arms:
        problem = _base_problem(arm.recipe, base)
        if problem is None:
            continue
        fitting = [
            one.torch for one in others if _base_problem(arm.recipe, one) is None and not one.uncertain
        ]
        raise UserError(
            f"recipe {arm.recipe.label} needs {problem}", f"give --base-image {' or '.join(fitting[:3])}"
        )


def _base_problem(recipe: Recipe, base: BaseImage) -> str | None:
    if recipe.blocks != "native":
        wanted = TE_RELEASES.get(recipe.fp8_scaling, TE_RELEASES["none"])
        held = base.transformer_engine
        # An image inferred from its tag says nothing of what it holds.
        if held is None and not base.uncertain:
            return f"Transformer Engine, which {base.name} lacks"
        if held is not None and version(held) < wanted:
            return f"Transformer Engine {'.'.join(map(str, wanted))}, and {base.name} holds {held}"
    if recipe.parallelism.startswith("zero") and base.deepspeed is None and not base.uncertain:
        return f"DeepSpeed, which {base.name} lacks"
    return None


def _check_hub_name(option: str, name: str, terms: CloudTerms) -> None:
    """Nothing, if the job finds the model by this name: on the hub, or as a path in the user's own image."""
    if terms.image and PurePosixPath(name).is_absolute():
        return
    if _HUB_NAME.fullmatch(name) and not Path(name).exists():
        return
    raise UserError(
        f"{option} {name!r} is a folder on this machine, not on the instance",
        "give its name on the Hugging Face hub; or an image of your own with --image, and the path there",
    )


def _gpu_problem(
    instance: InstanceType, accelerator: Accelerator, arm: Arm, catalogue: Catalogue
) -> UserError | None:
    recipe = arm.recipe
    if accelerator.compute_capability is None:
        return UserError(
            f"{instance.name} carries {accelerator.name}, and training needs NVIDIA GPUs",
            f"instance types with NVIDIA GPUs: {_families('bf16', catalogue)}",
        )
    wanted = needed_format(recipe)
    if wanted is None or takes(accelerator, wanted):
        return None
    what = format_in_words(wanted)
    nearest = _nearest(recipe, accelerator, catalogue)
    return UserError(
        f"recipe {recipe.label} needs {what}, and {accelerator.name} of {instance.name} has none",
        f"instance types with {what}: {_families(wanted, catalogue)}; or recipe {nearest.label}",
    )


def _nearest(recipe: Recipe, accelerator: Accelerator, catalogue: Catalogue) -> Recipe:
    """The recipe that the GPU does run, with whatever software that needs."""
    software = frozenset(module for module, _, _ in module_of(recipe))
    machine = Machine(devices=accelerator.device_names[:1], num_cores=1, modules=software)
    return nearest_that_runs(recipe, machine, catalogue)


def _ranks_problem(instance: InstanceType, arm: Arm, terms: CloudTerms) -> UserError | None:
    """Of an arm that is for so many GPUs, whatever the machine has."""
    if arm.num_gpus is None:
        return None
    there = instance.num_accelerators * terms.num_nodes
    if terms.num_nodes > 1:
        why, hint = f"on {terms.num_nodes} nodes", "leave out --num-nodes"
    elif arm.num_gpus > there:
        why, hint = f"and {instance.name} has {there}", "choose a larger instance type"
    elif arm.num_gpus < there and terms.backend == "sagemaker":
        why, hint = (
            f"and a job of SageMaker's uses all {there} of ml.{instance.name}",
            "choose a smaller type",
        )
    else:
        return None
    return UserError(f"it is for {arm.num_gpus} GPU{'' if arm.num_gpus == 1 else 's'}, {why}", hint)


def _image_problem(arm: Arm, arms: Sequence[Arm], terms: CloudTerms) -> UserError | None:
    """What AWS's images lack for `arm`; an image of the user's is believed, which `arms` all get."""
    lacking = {} if terms.image else _lacking(arm)
    if not lacking:
        return None
    is_of_text = reads_text(arm.workload)
    who = f"workload {arm.workload.name}" if is_of_text else f"recipe {arm.recipe.label}"
    modules = dict.fromkeys(module for one in arms for module in _lacking(one))
    by_itself = [option for module, option in _BUILT_BY.items() if module in modules]
    options = " ".join(by_itself or [f"--with {module}" for module in modules])
    return UserError(
        f"{who} needs {' and '.join(lacking.values())}, which AWS's images lack",
        f"fastlaunch build {options} --push makes an image that has it; then give that as --image",
    )


def _lacking(arm: Arm) -> dict[str, str]:
    """Module -> its name in words, of what the arm needs and AWS's images lack."""
    needed = {module: name for module, name, _ in module_of(arm.recipe)}
    if reads_text(arm.workload):
        needed["transformers"] = "Transformers"
    return {module: name for module, name in needed.items() if module not in IN_BASE_IMAGES}


def _families(wanted: str, catalogue: Catalogue) -> str:
    """`p5, p5en, g6e`: the families whose GPUs take a format."""
    found = (
        name.partition(".")[0]
        for name, instance in catalogue.instances.items()
        if catalogue.accelerators[instance.accelerator].compute_capability
        and takes(catalogue.accelerators[instance.accelerator], wanted)
    )
    return ", ".join(dict.fromkeys(found))

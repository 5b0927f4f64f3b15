"""What of an arm can be done on AWS: its recipe needs GPUs that take it, and an image with the software."""

from collections.abc import Sequence

from fastlaunch.ability import format_in_words, module_of, nearest_that_runs, needed_format, takes
from fastlaunch.base_image_file import BaseImage, version
from fastlaunch.catalog.hardware import Accelerator, InstanceType
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.core.errors import UserError
from fastlaunch.jobs.machine import Machine
from fastlaunch.jobs.options import CloudTerms
from fastlaunch.jobs.variants import Arm, reads_text, workload_optimizer
from fastlaunch_train.recipes.recipes import Recipe

#: Modules that AWS's images hold; what is told of them in containers/base_images.yaml.
IN_BASE_IMAGES = ("torch", "transformer_engine", "deepspeed")
#: Releases of Transformer Engine that brought FP8's scalings, by its release notes; before 2.0 it knew less.
TE_RELEASES = {"none": (2, 0), "delayed": (2, 0), "mxfp8": (2, 0), "current": (2, 2), "block": (2, 3)}
#: From this compute capability on, Blackwell, what is scaled in blocks is computed by way of MXFP8, since
#: this release; and the CUDA that products scaled in blocks need anywhere.
BLOCKS_ON_BLACKWELL, BLOCKS_ON_BLACKWELL_RELEASE = (10, 0), (2, 9)
BLOCK_SCALING_CUDA = (12, 9)
#: Option of `fastlaunch build` for an image with a module, and with all else that runs beside it.
_BUILT_BY = {"torch_ort": "--ort"}


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


def check_base(
    arms: Sequence[Arm],
    base: BaseImage,
    others: Sequence[BaseImage],
    accelerators: Sequence[Accelerator],
) -> None:
    """Nothing, if AWS's image holds what the arms' recipes need, in a version that has it; else UserError.

    others: images of its flavour, of which the error names those that do. accelerators: that the image is to
    be used with. What is not known is believed.
    """
    blackwell = next((one.name for one in accelerators if _is_blackwell(one)), None)
    for arm in arms:
        problem = _base_problem(arm.recipe, base, blackwell)
        if problem is None:
            continue
        fitting = [
            one.torch
            for one in others
            if _base_problem(arm.recipe, one, blackwell) is None and not one.uncertain
        ]
        raise UserError(
            f"recipe {arm.recipe.label} needs {problem}", f"give --base-image {' or '.join(fitting[:3])}"
        )


def _is_blackwell(accelerator: Accelerator) -> bool:
    capability = accelerator.compute_capability
    return capability is not None and version(capability) >= BLOCKS_ON_BLACKWELL


def _base_problem(recipe: Recipe, base: BaseImage, blackwell: str | None) -> str | None:
    """What of the image is lacking, or too old. blackwell: a GPU of that kind, if there is one."""
    if recipe.blocks != "native":
        wanted, where = TE_RELEASES.get(recipe.fp8_scaling, TE_RELEASES["none"]), ""
        if recipe.fp8_scaling == "block" and blackwell is not None:
            wanted, where = BLOCKS_ON_BLACKWELL_RELEASE, f" on {blackwell}"
        held = base.transformer_engine
        # An image inferred from its tag says nothing of what it holds.
        if held is None and not base.uncertain:
            return f"Transformer Engine, which {base.name} lacks"
        if held is not None and version(held) < wanted:
            return f"Transformer Engine {_dotted(wanted)}{where}, and {base.name} holds {held}"
    if recipe.fp8_scaling == "block" and version(base.cuda) < BLOCK_SCALING_CUDA and not base.uncertain:
        return f"CUDA {_dotted(BLOCK_SCALING_CUDA)}, and {base.name} holds {base.cuda}"
    if recipe.parallelism.startswith("zero") and base.deepspeed is None and not base.uncertain:
        return f"DeepSpeed, which {base.name} lacks"
    return None


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


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
    nearest = _nearest(arm, accelerator, catalogue)
    return UserError(
        f"recipe {recipe.label} needs {what}, and {accelerator.name} of {instance.name} has none",
        f"instance types with {what}: {_families(wanted, catalogue)}; or recipe {nearest.label}",
    )


def _nearest(arm: Arm, accelerator: Accelerator, catalogue: Catalogue) -> Recipe:
    """The recipe that the GPU does run, with whatever software that needs."""
    software = frozenset(module for module, _, _ in module_of(arm.recipe))
    machine = Machine(devices=accelerator.device_names[:1], num_cores=1, modules=software)
    return nearest_that_runs(arm.recipe, machine, catalogue, optimizer=workload_optimizer(arm.workload))


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

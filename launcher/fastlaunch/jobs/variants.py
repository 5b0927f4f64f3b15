"""Variants: a recipe on a workload, with its batch size and length; and which of them can run where.

Named recipes share all but the recipe. Every variant of an experiment has its own values.
"""

import ast
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from fastlaunch.catalog.container_images import BaseImage
from fastlaunch.catalog.experiments import Experiment, ExperimentVariant, published_experiments
from fastlaunch.catalog.hardware import Accelerator, InstanceType
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.core.errors import UnknownName, UserError
from fastlaunch.core.units import enumerated
from fastlaunch.jobs.data_sources import MADE_UP, data_source, reads_text
from fastlaunch.jobs.job import Inputs, Variant
from fastlaunch.jobs.options import OPTIONS, Options
from fastlaunch.jobs.requirements import read_requirements
from fastlaunch_train.recipes.recipe import Recipe, RecipeError
from fastlaunch_train.recipes.recipes import resolve_recipe, stand_in
from fastlaunch_train.recipes.requirements import (
    Capabilities,
    Version,
    can_stand_in,
    missing_part,
    needed_packages,
    parse_version,
)
from fastlaunch_train.recipes.rules import (
    batch_problem,
    forward_only_problem,
    optimizer_problem,
    profile_problem,
    steps_problem,
    width_problem,
)
from fastlaunch_train.workloads.registry import (
    WorkloadError,
    WorkloadInfo,
    function_arguments,
    sized,
    workload_info,
)

DEFAULT_STEPS = 200
#: Options that an experiment says itself.
_FIXED = ("recipes", "overrides", "workload", "batch_size", "nproc")
#: Packages in AWS's images; containers/base_images.yaml has their releases.
IN_BASE_IMAGES = ("torch", "transformer_engine", "deepspeed")
#: Extras of `fastlaunch build --with` that bring more packages than the one they are named after.
_BROUGHT_BY = {"accelerate": "transformers"}
#: Option of `fastlaunch build` for an image with a package, and with all that runs beside it.
_BUILT_BY = {"torch_ort": "--ort"}


def variants_of(options: Options, default_workload: str) -> tuple[Variant, ...]:
    """Return the variants of `options`, in order. Raises UserError if they do not exist or fit together."""
    experiment = experiment_named(options.experiment) if options.experiment else None
    for name in _FIXED if experiment else ():
        if getattr(options, name) not in (None, ()):
            option, named = OPTIONS[name].flag, options.experiment
            raise UserError(
                f"--experiment {named} is a list of runs that says its own {option}",
                f"leave out {option}, or --experiment; `fastlaunch experiments {named}` shows it",
            )
    rows = experiment.variants if experiment else _named_rows(options, default_workload)
    data = data_source(options.data or (experiment.data if experiment else "synthetic"))
    steps, epochs = _length(options, experiment, data)
    inputs = Inputs(
        data=data,
        num_workers=options.num_workers,
        model=options.model,
        tokenizer=options.tokenizer,
        sequence_length=options.sequence_length,
        # In one order: the same arguments make the same job.
        workload_arguments=tuple(sorted(options.workload_arguments)),
    )
    variants = tuple(
        Variant(
            workload=known_workload(row.workload, inputs.workload_arguments),
            recipe=known_recipe(row.recipe, row.overrides),
            batch_size=row.batch_size,
            steps=steps,
            epochs=epochs,
            eval_every=row.eval_every if options.eval_every is None else options.eval_every,
            inputs=inputs,
            num_gpus=row.num_gpus,
            is_published=experiment is not None,
        )
        for row in rows
    )
    for variant in variants:
        _check_fits(variant)
        problem = profile_problem(variant.recipe) if options.step_profile else None
        if isinstance(variant.batch_size, int):
            length = options.sequence_length or variant.workload.sequence_length
            problem = problem or batch_problem(variant.recipe, variant.batch_size, length)
        if problem:
            message, hint = problem
            raise UserError(f"recipe {variant.recipe.label}: {message}", hint)
    return variants


def experiment_named(name: str) -> Experiment:
    """Return the published experiment. Raises UnknownName."""
    if name not in published_experiments():
        raise UnknownName("experiment", name, published_experiments())
    return published_experiments()[name]


def known_workload(name: str, arguments: Sequence[str] = ()) -> WorkloadInfo:
    """Return what is known of the workload. arguments: of its function, each KEY=VALUE.

    The user's own file is parsed, not run. Raises UserError if there is no such workload, file or function,
    and for arguments that the function does not take.
    """
    try:
        info = workload_info(name)
        info = sized(info, function_arguments(name, arguments))
    except WorkloadError as error:
        raise UserError(error.message, error.hint) from None
    start, separator, function = name.rpartition(".py:")
    if not separator:
        return info
    path = Path(f"{start}.py")
    if not path.is_file():
        raise UserError(
            f"workload {name!r}: there is no file {start}.py", "give its path from here, as in ./my.py:build"
        )
    try:
        module = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError) as error:
        raise UserError(f"workload {name!r}: {path} cannot be read as Python: {error}") from None
    # The function need not be defined here: an import may bring it in.
    named = {getattr(node, field, None) for node in ast.walk(module) for field in ("id", "name", "asname")}
    if function not in named and "*" not in named:
        defined = [node.name for node in module.body if isinstance(node, ast.FunctionDef)]
        raise UnknownName(f"function of {path}", function, defined)
    return info


def known_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe, with its overrides. Raises UserError if there is none."""
    try:
        return resolve_recipe(name, overrides)
    except RecipeError as error:
        raise UserError(error.message, error.hint) from None


def _named_rows(options: Options, default_workload: str) -> list[ExperimentVariant]:
    """Return the recipes of the options as rows of an experiment."""
    names = options.recipes or ("bf16",)
    doubled = {name for name in names if names.count(name) > 1}
    if doubled:
        raise UserError(f"recipe {min(doubled)} is given twice", "to run it twice, add --repeats 2")
    return [
        ExperimentVariant(
            workload=options.workload or default_workload,
            recipe=name,
            overrides=options.overrides,
            batch_size=batch_size,
        )
        for batch_size in options.batch_sizes or (options.batch_size,)
        for name in names
    ]


def _length(options: Options, experiment: Experiment | None, data: str) -> tuple[int | None, int | None]:
    """Return (steps, epochs), one of them None."""
    if options.steps is not None and options.epochs is not None:
        raise UserError("--steps and --epochs both say how long a run is", "give one of them")
    if options.steps is not None or options.epochs is not None:
        return options.steps, options.epochs
    # The epochs are passes over the published data. Made-up data have no end.
    if experiment and data not in MADE_UP:
        return experiment.steps, experiment.epochs
    return (experiment.steps if experiment else None) or DEFAULT_STEPS, None


def _check_fits(variant: Variant) -> None:
    """Raise UserError if the workload lacks what the recipe changes, or has no use for an option."""
    workload = variant.workload
    for field in ("model", "tokenizer", "sequence_length"):
        if getattr(variant.inputs, field) is not None and field not in workload.takes:
            option = f"--{field.replace('_', '-')}"
            raise UserError(f"workload {workload.name!r} takes no {option}", f"leave out {option}")
    # A workload of the user's own may have data of its own.
    if variant.inputs.data in MADE_UP and not workload.is_own:
        if variant.epochs:
            raise UserError(
                f"--epochs are passes over the data, and {variant.inputs.data} data have no end",
                "give --steps, or data of your own by --data folder:PATH or file:PATH",
            )
        if variant.inputs.data == "loader" and workload.sample_unit != "images":
            raise UserError(
                f"--data loader makes images, and workload {workload.name!r} takes none",
                "give --data synthetic",
            )
    if problem := fit_problem(variant.recipe, workload):
        raise problem
    if variant.eval_every and workload.sample_unit == "tensors":
        raise UserError(
            f"workload {workload.name!r} has no held-out data to evaluate on", "leave out --eval-every"
        )


def fit_problem(recipe: Recipe, workload: WorkloadInfo) -> UserError | None:
    """Return why the recipe does not fit the workload, as far as that is known without building it."""
    kind = workload.module.rpartition(".")[2]
    if problem := steps_problem(recipe):
        message, hint = problem
        return UserError(f"recipe {recipe.label}: {message}", hint)
    pair = f"recipe {recipe.label} does not fit workload {workload.name}"
    if too_wide := width_problem(recipe, workload.width):
        return UserError(f"{pair}: {too_wide[0]}", too_wide[1])
    if workload.is_own:
        return None
    if recipe.blocks != "native" and kind != "vit":
        return UserError(
            f"{pair}: Transformer Engine's blocks stand for those of image models here",
            "give a recipe with blocks=native, such as bf16 or compile",
        )
    if recipe.frozen_weights != "native" and not workload.name.startswith("hf-lora:"):
        return UserError(
            f"{pair}, which trains all its weights", "give bf16 or compile, or --workload hf-lora:MODEL"
        )
    if recipe.kernels != "torch" and not workload.is_fine_tuning:
        return UserError(
            f"{pair}: Liger's kernels are those of hf-lora:MODEL and hf-sft:MODEL", "give bf16 or compile"
        )
    if recipe.pointwise != "written" and kind != "gelu":
        return UserError(f"{pair}, which writes out no pointwise functions", "give bf16, or --workload gelu")
    optimizer = workload.optimizer if recipe.optimizer == "workload" else recipe.optimizer
    if recipe.parallelism.startswith("zero") and optimizer == "adafactor":
        return UserError(f"{pair}: DeepSpeed cannot shard adafactor", "add --set optimizer=adamw")
    problem = forward_only_problem(recipe) if kind == "gelu" else optimizer_problem(recipe, optimizer)
    if problem:
        message, hint = problem
        return UserError(f"{pair}: {message}", hint)
    return None


def without_model(variant: Variant) -> Variant:
    """Return the variant on the small workload that stands in for its own, without model and length."""
    info = workload_info(variant.workload.small)
    if info == variant.workload:
        return variant
    inputs = replace(variant.inputs, model=None, tokenizer=None, sequence_length=None)
    return replace(variant, workload=info, inputs=inputs)


def missing_on(recipe: Recipe, machines: Iterable[Capabilities]) -> str | None:
    """Return what the recipe needs and one of `machines` lacks; None if the recipe runs on all."""
    return next(filter(None, (missing_part(recipe, machine) for machine in machines)), None)


def nearest_on(recipe: Recipe, workload: WorkloadInfo, machines: Sequence[Capabilities]) -> Recipe:
    """Return the recipe nearest to `recipe` that fits the workload and runs on all of `machines`."""
    return stand_in(
        recipe,
        lambda other: (
            all(can_stand_in(other, machine) for machine in machines) and fit_problem(other, workload) is None
        ),
    )


def capabilities_of(accelerator: Accelerator, base: BaseImage | None = None) -> Capabilities:
    """Return what a rented GPU can do with the software of AWS's image; without an image, with any.

    If an image was inferred from its tag, we do not know what it lacks.
    """
    capability = parse_version(accelerator.compute_capability or "")
    if base is None:
        return Capabilities(compute_capability=capability, gpu=accelerator.name)

    def version_of(package: str) -> Version | None:
        held: str | None = getattr(base, package) if package in IN_BASE_IMAGES else ""
        return () if held is None and base.uncertain else None if held is None else parse_version(held)

    return Capabilities(
        compute_capability=capability,
        gpu=accelerator.name,
        cuda=() if base.uncertain else parse_version(base.cuda),
        version_of=version_of,
    )


def problem_on(
    instance: InstanceType,
    variant: Variant,
    options: Options,
    catalogue: Catalogue,
    *,
    variants: Sequence[Variant],
) -> UserError | None:
    """Return why the variant cannot run on the instance type, or in the image that it would get.

    variants: all of the submission, as one image serves all.
    """
    return (
        gpu_problem(instance, variant.recipe, variant.workload, catalogue)
        or _ranks_problem(instance, variant, options)
        or _image_problem(variant, variants, options)
    )


def check_base(
    variants: Sequence[Variant],
    base: BaseImage,
    others: Sequence[BaseImage],
    accelerators: Sequence[Accelerator],
) -> None:
    """Raise UserError unless AWS's image holds what the variants' recipes need, in a release that has it.

    others: images of its flavour, of which the error names those that do.
    """
    for variant in variants:

        def missing(image: BaseImage, recipe: Recipe = variant.recipe) -> str | None:
            return missing_on(recipe, (capabilities_of(accelerator, image) for accelerator in accelerators))

        if problem := missing(base):
            fitting = [image.torch for image in others if not image.uncertain and missing(image) is None]
            raise UserError(
                f"recipe {variant.recipe.label} cannot run in {base.name}: {problem}",
                f"give --base-image {' or '.join(fitting[:3])}" if fitting else None,
            )


def gpu_problem(
    instance: InstanceType, recipe: Recipe, workload: WorkloadInfo, catalogue: Catalogue
) -> UserError | None:
    """Return why the recipe cannot run on the instance type's accelerators; None if it can."""
    accelerator = catalogue.accelerators[instance.accelerator]
    if accelerator.compute_capability is None:
        families = _families(resolve_recipe("bf16"), catalogue)
        return UserError(
            f"{instance.name} carries {accelerator.name}, and training needs NVIDIA GPUs",
            f"instance types with NVIDIA GPUs: {families}",
        )
    gpu = capabilities_of(accelerator)
    missing = missing_part(recipe, gpu)
    if missing is None:
        return None
    nearest = nearest_on(recipe, workload, [gpu])
    return UserError(
        f"recipe {recipe.label} cannot run on {instance.name}: {missing}",
        f"it runs on {_families(recipe, catalogue)}; or give recipe {nearest.label}",
    )


def _ranks_problem(instance: InstanceType, variant: Variant, options: Options) -> UserError | None:
    """Return why a variant for a number of GPUs cannot have just as many."""
    if variant.num_gpus is None:
        return None
    there = instance.num_accelerators * options.num_nodes
    if options.num_nodes > 1:
        why, hint = f"on {options.num_nodes} nodes", "leave out --num-nodes"
    elif variant.num_gpus > there:
        why, hint = f"and {instance.name} has {there}", "choose a larger instance type"
    elif variant.num_gpus < there and options.backend == "sagemaker":
        why = f"and a SageMaker job uses all {there} of ml.{instance.name}"
        hint = "choose a smaller type"
    else:
        return None
    return UserError(f"it is for {variant.num_gpus} GPU{'' if variant.num_gpus == 1 else 's'}, {why}", hint)


def _image_problem(variant: Variant, variants: Sequence[Variant], options: Options) -> UserError | None:
    """Return what AWS's image and the requirements lack; an image of the user's is taken to hold all."""
    if options.image:
        return None
    required = read_requirements(Path(options.requirements)).names if options.requirements else ()
    installed = {name.lower().replace("-", "_") for name in required}
    lacking = [name for name in not_in_base_images(variant.recipe, variant.workload) if name not in installed]
    if not lacking:
        return None
    is_of_text = reads_text(variant.workload)
    who = f"workload {variant.workload.name}" if is_of_text else f"recipe {variant.recipe.label}"
    packages = dict.fromkeys(
        package for other in variants for package in not_in_base_images(other.recipe, other.workload)
    )
    return UserError(
        f"{who} needs {enumerated(lacking)}, which AWS's images lack",
        f"{how_to_build(packages)}; or name {enumerated(packages)} in a file, for --requirements",
    )


def how_to_build(packages: Collection[str]) -> str:
    """Return what to type to have an image with the packages."""
    return f"{build_command(packages)} makes an image that has it; then give that as --image"


def build_command(packages: Collection[str]) -> str:
    """Return the command that makes an image with the packages."""
    by_itself = [option for package, option in _BUILT_BY.items() if package in packages]
    extras = dict.fromkeys(_BROUGHT_BY.get(package, package) for package in packages)
    options = " ".join(by_itself or [f"--with {extra}" for extra in extras])
    return f"fastlaunch build {options} --push"


def not_in_base_images(recipe: Recipe, workload: WorkloadInfo) -> tuple[str, ...]:
    """Return the packages that the recipe or the workload needs and AWS's images lack."""
    is_of_text = ["transformers"] if reads_text(workload) else []
    packages = [*needed_packages(recipe), *is_of_text, *workload.packages]
    return tuple(dict.fromkeys(package for package in packages if package not in IN_BASE_IMAGES))


def _families(recipe: Recipe, catalogue: Catalogue) -> str:
    """`p5, p5en, g6e`: the families whose GPUs run the recipe."""
    accelerators = catalogue.accelerators
    running = {
        name
        for name, accelerator in accelerators.items()
        if accelerator.compute_capability and missing_part(recipe, capabilities_of(accelerator)) is None
    }
    families = (
        name.partition(".")[0]
        for name, instance in catalogue.instances.items()
        if instance.accelerator in running
    )
    return ", ".join(dict.fromkeys(families))

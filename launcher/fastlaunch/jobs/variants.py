"""Variants: a recipe on a workload, with its batch size and length; and which of them can run where.

Named recipes share all but the recipe; the variants of an experiment have each their own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from fastlaunch.catalog.container_images import BaseImage
from fastlaunch.catalog.experiments import EXPERIMENTS, Experiment
from fastlaunch.catalog.hardware import Accelerator, InstanceType
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.core.errors import UnknownName, UserError
from fastlaunch.jobs.options import CloudOptions, SubmitOptions, Variant
from fastlaunch_train.recipes.advice import nearest_recipe
from fastlaunch_train.recipes.recipe import Recipe, RecipeError
from fastlaunch_train.recipes.recipes import resolve_recipe
from fastlaunch_train.recipes.requirements import (
    Capabilities,
    Version,
    can_stand_in,
    missing_part,
    needed_packages,
    parse_version,
)
from fastlaunch_train.recipes.rules import forward_only_problem, optimizer_problem, steps_problem
from fastlaunch_train.workloads.registry import WorkloadError, WorkloadInfo, names_folder, workload_info

DATA_SOURCES = ("synthetic", "loader", "folder:PATH", "file:PATH")
#: Those that are made up as they are read, and so have no end.
MADE_UP = ("synthetic", "loader")
DEFAULT_STEPS = 200
#: Fields of a variant that only workloads of text take.
_OF_TEXT = ("model", "tokenizer", "sequence_length")
#: Packages in AWS's images; containers/base_images.yaml has their releases.
IN_BASE_IMAGES = ("torch", "transformer_engine", "deepspeed")
#: Extras of `fastlaunch build --with` that bring more packages than the one they are named after.
_BROUGHT_BY = {"accelerate": "transformers"}
#: Option of `fastlaunch build` for an image with a package, and with all that runs beside it.
_BUILT_BY = {"torch_ort": "--ort"}


def variants_of(options: SubmitOptions, default_workload: str) -> tuple[Variant, ...]:
    """Return the variants of `options`, in order. Raises UserError if they do not exist or fit together."""
    if options.experiment:
        variants = _published_variants(options)
    else:
        variants = _named_variants(options, default_workload)
    _check_text(options, variants)
    for variant in variants:
        _check_made_up(variant)
        if problem := fit_problem(variant.recipe, variant.workload):
            raise problem
        if variant.eval_every and variant.workload.sample_unit == "tensors":
            raise UserError(
                f"workload {variant.workload.name!r} has no held-out data to evaluate on",
                "leave out --eval-every",
            )
    return variants


def experiment_named(name: str) -> Experiment:
    """Return the published experiment. Raises UnknownName."""
    if name not in EXPERIMENTS:
        raise UnknownName("experiment", name, EXPERIMENTS)
    return EXPERIMENTS[name]


def known_workload(name: str) -> WorkloadInfo:
    """Return what is known of the workload. Raises UserError where there is none such, or no such file."""
    try:
        info = workload_info(name)
    except WorkloadError as error:
        raise UserError(error.message, error.hint) from None
    path, separator, _ = name.rpartition(".py:")
    if separator and not Path(f"{path}.py").is_file():
        raise UserError(
            f"workload {name!r}: there is no file {path}.py here", "give its path, as in ./my.py:build"
        )
    return info


def resolve_recipes(names: Sequence[str], overrides: Sequence[str]) -> list[Recipe]:
    """Return the recipes called `names`, each with every override. Raises UserError."""
    doubled = {name for name in names if names.count(name) > 1}
    if doubled:
        raise UserError(f"recipe {min(doubled)} is given twice", "to run it twice, add --repeats 2")
    try:
        return [resolve_recipe(name, overrides) for name in names]
    except RecipeError as error:
        raise UserError(error.message, error.hint) from None


def check_data(data: str, workloads: Iterable[WorkloadInfo]) -> None:
    """Raise UserError if there are no such data, or their files are not here."""
    kind, _, path = data.partition(":")
    if kind == "folder" and path and not _written_out(path).is_dir():
        raise UserError(
            f"there is no folder {path}", "give a folder with one folder of images, or of reviews, per class"
        )
    if kind == "file" and path and not _written_out(path).is_file():
        raise UserError(f"there is no file {path}", "give a file of text, or a CSV file of reviews")
    check_data_known(data, workloads)


def check_data_known(data: str, workloads: Iterable[WorkloadInfo]) -> None:
    """Raise UserError if the workloads read no such data, wherever they are."""
    kind, _, path = data.partition(":")
    if data in MADE_UP:
        return
    if kind not in ("folder", "file") or not path:
        raise UserError(f"unknown data source {data!r}", f"known: {', '.join(DATA_SOURCES)}")
    for workload in workloads:
        if ".py:" in workload.name:
            continue
        if workload.sample_unit == "tensors":
            raise UserError(f"workload {workload.name!r} makes its own data", "give --data synthetic")
        if kind == "file" and not reads_text(workload):
            raise UserError(
                f"workload {workload.name!r} reads no text", "give --data folder:PATH, or synthetic"
            )
        if kind == "folder" and workload.sample_unit == "sequences":
            raise UserError(
                f"workload {workload.name!r} reads one file of text, no folder", "give --data file:PATH"
            )


def check_models(variant: Variant) -> None:
    """Raise UserError if a folder that a model or tokenizer is read from is not here.

    What is written as no path is a name on the Hugging Face hub where there is no such folder.
    """
    of_workload = variant.workload.name.partition("hf-clm:")[2] or None
    for option, name in (
        ("--model ", variant.model),
        ("--tokenizer ", variant.tokenizer),
        ("hf-clm:", of_workload),
    ):
        if name is not None and names_folder(name) and not _written_out(name).is_dir():
            raise UserError(
                f"there is no folder {name}", f"give {option}FOLDER, or a name on the Hugging Face hub"
            )


def _written_out(path: str) -> Path:
    """Return the path with its `~` as a folder; as it is where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def reads_text(workload: WorkloadInfo) -> bool:
    """Return whether the workload is a language model's."""
    return "model" in workload.takes


def _named_variants(options: SubmitOptions, default_workload: str) -> tuple[Variant, ...]:
    steps, epochs = _length(options, DEFAULT_STEPS, None)
    workload = known_workload(options.workload or default_workload)
    return tuple(
        Variant(
            workload=workload,
            recipe=recipe,
            batch_size=options.batch_size,
            steps=steps,
            epochs=epochs,
            eval_every=options.eval_every or 0,
            data=options.data or "synthetic",
            model=options.model,
            tokenizer=options.tokenizer,
            sequence_length=options.sequence_length,
        )
        for recipe in resolve_recipes(options.recipes or ("bf16",), options.overrides)
    )


def _published_variants(options: SubmitOptions) -> tuple[Variant, ...]:
    assert options.experiment is not None
    experiment = experiment_named(options.experiment)
    fixed = (
        (bool(options.recipes), "--recipe"),
        (bool(options.overrides), "--set"),
        (options.workload is not None, "--workload"),
        (options.batch_size is not None, "--batch-size"),
        (options.nproc is not None, "--nproc"),
    )
    for is_given, option in fixed:
        if is_given:
            raise UserError(
                f"--experiment {experiment.name} is a list of runs that says its own {option}",
                f"leave out {option}, or --experiment; `fastlaunch experiments {experiment.name}` shows it",
            )
    data = options.data or experiment.data
    # Epochs are of the published data; those that are made up for want of it have none.
    usual = (
        (experiment.steps or DEFAULT_STEPS, None)
        if data in MADE_UP
        else (experiment.steps, experiment.epochs)
    )
    steps, epochs = _length(options, *usual)
    return tuple(
        Variant(
            workload=known_workload(published.workload),
            recipe=resolve_recipe(published.recipe, published.overrides),
            batch_size=published.batch_size,
            steps=steps,
            epochs=epochs,
            eval_every=published.eval_every if options.eval_every is None else options.eval_every,
            data=data,
            model=options.model,
            tokenizer=options.tokenizer,
            sequence_length=options.sequence_length,
            num_gpus=published.num_gpus,
            is_published=True,
        )
        for published in experiment.variants
    )


def _length(options: SubmitOptions, steps: int | None, epochs: int | None) -> tuple[int | None, int | None]:
    """(steps, epochs), one of them None: the user's, else these."""
    if options.steps is not None and options.epochs is not None:
        raise UserError("--steps and --epochs both say how long a run is", "give one of them")
    if options.steps is None and options.epochs is None:
        return steps, epochs
    return options.steps, options.epochs


def _check_text(options: SubmitOptions, variants: Sequence[Variant]) -> None:
    """Nothing, unless an option for text is given to a workload that reads none."""
    for field in _OF_TEXT:
        if getattr(options, field) is None:
            continue
        for variant in variants:
            if field not in variant.workload.takes:
                option = f"--{field.replace('_', '-')}"
                raise UserError(
                    f"workload {variant.workload.name!r} takes no {option}", f"leave out {option}"
                )


def _check_made_up(variant: Variant) -> None:
    """Raise UserError if nobody makes up such data. A workload of the user's own may have its own."""
    if variant.data not in MADE_UP or ".py:" in variant.workload.name:
        return
    if variant.epochs:
        raise UserError(
            f"--epochs are passes over the data, and {variant.data} data have no end",
            "give --steps, or data of your own by --data folder:PATH or file:PATH",
        )
    if variant.data == "loader" and variant.workload.sample_unit != "images":
        raise UserError(
            f"--data loader makes images, and workload {variant.workload.name!r} takes none",
            "give --data synthetic",
        )


def fit_problem(recipe: Recipe, workload: WorkloadInfo) -> UserError | None:
    """Return why the workload lacks what the recipe changes, as far as that is known without building it."""
    kind = workload.module.rpartition(".")[2]
    problem = steps_problem(recipe)
    if problem:
        message, hint = problem
        return UserError(f"recipe {recipe.label}: {message}", hint)
    if ".py:" in workload.name:
        return None
    pair = f"recipe {recipe.label} does not fit workload {workload.name}"
    if recipe.blocks != "native" and kind != "vit":
        return UserError(
            f"{pair}: Transformer Engine's blocks stand for those of image models here",
            "give a recipe with blocks=native, such as bf16 or compile",
        )
    if recipe.pointwise != "written" and kind != "gelu":
        return UserError(f"{pair}, which writes out no pointwise functions", "give bf16, or --workload gelu")
    optimizer = workload_optimizer(workload) if recipe.optimizer == "workload" else recipe.optimizer
    if recipe.parallelism.startswith("zero") and optimizer == "adafactor":
        return UserError(f"{pair}: DeepSpeed cannot shard adafactor", "add --set optimizer=adamw")
    problem = forward_only_problem(recipe) if kind == "gelu" else optimizer_problem(recipe, optimizer)
    if problem:
        message, hint = problem
        return UserError(f"{pair}: {message}", hint)
    return None


def workload_optimizer(workload: WorkloadInfo) -> str:
    """Return the optimizer of one of our workloads, as published; the small ones have another.

    Of a user's own it is not known here: the one of a Workload that names none.
    """
    if ".py:" in workload.name:
        return "sgd"
    if workload.small == workload.name:
        return "adamw"
    return {"causal_lm": "adafactor", "vit": "sgd"}.get(workload.module.rpartition(".")[2], "adamw")


def without_model(variant: Variant) -> Variant:
    """Return the variant on the small workload that stands in for its own, without model and length."""
    info = workload_info(variant.workload.small)
    if info == variant.workload:
        return variant
    return replace(variant, workload=info, model=None, tokenizer=None, sequence_length=None)


def missing_on(recipe: Recipe, machines: Iterable[Capabilities]) -> str | None:
    """Return what the recipe needs and the first of `machines` lacks; None if it runs on all."""
    return next(filter(None, (missing_part(recipe, machine) for machine in machines)), None)


def nearest_on(variant: Variant, machines: Sequence[Capabilities]) -> Recipe:
    """Return the recipe nearest to the variant's that fits its workload and runs on all of `machines`."""
    return nearest_recipe(
        variant.recipe,
        lambda recipe: (
            all(can_stand_in(recipe, machine) for machine in machines)
            and fit_problem(recipe, variant.workload) is None
        ),
    )


def capabilities_of(accelerator: Accelerator, base: BaseImage | None = None) -> Capabilities:
    """Return what a rented GPU can do with the software of AWS's image; without an image, with any.

    Nobody knows what an image holds that was inferred from its tag.
    """
    capability = parse_version(accelerator.compute_capability or "")
    if base is None:
        return Capabilities(compute_capability=capability, gpu=accelerator.name)

    def version_of(package: str) -> Version | None:
        if package not in IN_BASE_IMAGES:
            return ()
        held: str | None = getattr(base, package)
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
    cloud: CloudOptions,
    catalogue: Catalogue,
    *,
    variants: Sequence[Variant],
) -> UserError | None:
    """Return why the variant cannot run on the instance type, or in the image that it would get.

    variants: all of the submission, which one image serves.
    """
    return (
        _gpu_problem(instance, variant, catalogue)
        or _ranks_problem(instance, variant, cloud)
        or _image_problem(variant, variants, cloud)
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
            return missing_on(recipe, (capabilities_of(one, image) for one in accelerators))

        if problem := missing(base):
            fitting = [image.torch for image in others if not image.uncertain and missing(image) is None]
            raise UserError(
                f"recipe {variant.recipe.label} cannot run in {base.name}: {problem}",
                f"give --base-image {' or '.join(fitting[:3])}" if fitting else None,
            )


def _gpu_problem(instance: InstanceType, variant: Variant, catalogue: Catalogue) -> UserError | None:
    recipe, accelerator = variant.recipe, catalogue.accelerators[instance.accelerator]
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
    nearest = nearest_on(variant, [gpu])
    return UserError(
        f"recipe {recipe.label} cannot run on {instance.name}: {missing}",
        f"it runs on {_families(recipe, catalogue)}; or give recipe {nearest.label}",
    )


def _ranks_problem(instance: InstanceType, variant: Variant, cloud: CloudOptions) -> UserError | None:
    """Return why a variant for so many GPUs cannot have just these."""
    if variant.num_gpus is None:
        return None
    there = instance.num_accelerators * cloud.num_nodes
    if cloud.num_nodes > 1:
        why, hint = f"on {cloud.num_nodes} nodes", "leave out --num-nodes"
    elif variant.num_gpus > there:
        why, hint = f"and {instance.name} has {there}", "choose a larger instance type"
    elif variant.num_gpus < there and cloud.backend == "sagemaker":
        why = f"and a SageMaker job uses all {there} of ml.{instance.name}"
        hint = "choose a smaller type"
    else:
        return None
    return UserError(f"it is for {variant.num_gpus} GPU{'' if variant.num_gpus == 1 else 's'}, {why}", hint)


def _image_problem(variant: Variant, variants: Sequence[Variant], cloud: CloudOptions) -> UserError | None:
    """Return what AWS's images lack for the variant; an image of the user's is taken to hold everything."""
    lacking = () if cloud.image else _not_in_base_images(variant)
    if not lacking:
        return None
    is_of_text = reads_text(variant.workload)
    who = f"workload {variant.workload.name}" if is_of_text else f"recipe {variant.recipe.label}"
    packages = dict.fromkeys(package for other in variants for package in _not_in_base_images(other))
    by_itself = [option for package, option in _BUILT_BY.items() if package in packages]
    extras = dict.fromkeys(_BROUGHT_BY.get(package, package) for package in packages)
    options = " ".join(by_itself or [f"--with {extra}" for extra in extras])
    return UserError(
        f"{who} needs {' and '.join(lacking)}, which AWS's images lack",
        f"fastlaunch build {options} --push makes an image that has it; then give that as --image",
    )


def _not_in_base_images(variant: Variant) -> tuple[str, ...]:
    packages = [*needed_packages(variant.recipe), *(["transformers"] if reads_text(variant.workload) else [])]
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

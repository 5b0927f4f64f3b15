"""What a user asked `submit` to train -> its arms: a recipe on a workload, with its batch size and length.

The recipes that were named share all but the recipe; the arms of an experiment have each their own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from fastlaunch.catalog.experiments import EXPERIMENTS, Experiment
from fastlaunch.core.errors import UnknownName, UserError
from fastlaunch_train.recipes.recipes import (
    Recipe,
    RecipeError,
    forward_only_problem,
    optimizer_problem,
    resolve_recipe,
    steps_problem,
)
from fastlaunch_train.workloads import WorkloadError, WorkloadInfo, names_folder, workload_info

if TYPE_CHECKING:
    from fastlaunch.jobs.build import Request

DATA_ARMS = ("synthetic", "loader", "folder:PATH", "file:PATH")
#: Those that are made up as they are read, and so have no end.
MADE_UP = ("synthetic", "loader")
DEFAULT_STEPS = 200
#: Fields of an arm that hold for workloads of text alone.
_OF_TEXT = ("model", "tokenizer", "sequence_length")


@dataclass(frozen=True, kw_only=True)
class Arm:
    """See JobSpec. batch_size: samples per GPU, `auto`, or None for the workload's own.

    num_gpus: ranks that it is meant for, None for all there are. is_published: whether it is an experiment's,
    which is left out where it cannot run, and not refused.
    """

    workload: WorkloadInfo
    recipe: Recipe
    batch_size: int | str | None
    steps: int | None
    epochs: int | None
    eval_every: int
    data: str
    model: str | None = None
    tokenizer: str | None = None
    sequence_length: int | None = None
    num_gpus: int | None = None
    is_published: bool = False

    @property
    def name(self) -> str:
        """`te-fp8 on vit-huge at batch 128`: what sets it apart from the other arms."""
        batch = "" if self.batch_size is None else f" at batch {self.batch_size}"
        return f"{self.recipe.label} on {self.workload.name}{batch}"


def arms_of(request: "Request", default_workload: str) -> tuple[Arm, ...]:
    """The arms of `request`, in order. Raises UserError for what does not exist or means nothing together."""
    arms = _experiment_arms(request) if request.experiment else _asked_arms(request, default_workload)
    _check_text(request, arms)
    for arm in arms:
        _check_made_up(arm)
        _check_fits(arm)
        if arm.eval_every and arm.workload.sample_unit == "tensors":
            raise UserError(
                f"workload {arm.workload.name!r} has no held-out data to evaluate on",
                "leave out --eval-every",
            )
    return arms


def experiment_named(name: str) -> Experiment:
    """The published experiment. Raises UnknownName."""
    if name not in EXPERIMENTS:
        raise UnknownName("experiment", name, EXPERIMENTS)
    return EXPERIMENTS[name]


def known_workload(name: str) -> WorkloadInfo:
    """What is known of the workload. Raises UserError where there is none such, or no such file."""
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
    """The recipes called `names`, each with every override. Raises UserError."""
    doubled = {name for name in names if names.count(name) > 1}
    if doubled:
        raise UserError(f"recipe {min(doubled)} is given twice", "to run it twice, add --repeats 2")
    try:
        return [resolve_recipe(name, overrides) for name in names]
    except RecipeError as error:
        raise UserError(error.message, error.hint) from None


def check_data(data: str, workloads: Iterable[WorkloadInfo]) -> None:
    """Nothing, if the data arm is one and what it names is here. Raises UserError otherwise."""
    kind, _, path = data.partition(":")
    if kind == "folder" and path and not _written_out(path).is_dir():
        raise UserError(
            f"there is no folder {path}", "give a folder with one folder of images, or of reviews, per class"
        )
    if kind == "file" and path and not _written_out(path).is_file():
        raise UserError(f"there is no file {path}", "give a file of text, or a CSV file of reviews")
    check_data_known(data, workloads)


def check_data_known(data: str, workloads: Iterable[WorkloadInfo]) -> None:
    """Nothing, if the data arm is one that the workloads read, wherever it is. Raises UserError otherwise."""
    kind, _, path = data.partition(":")
    if data in MADE_UP:
        return
    if kind not in ("folder", "file") or not path:
        raise UserError(f"unknown data arm {data!r}", f"known: {', '.join(DATA_ARMS)}")
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


def check_models(arm: Arm) -> None:
    """Nothing, if the folders that models and tokenizers are read from are here. Raises UserError otherwise.

    What is written as no path is a name on the Hugging Face hub where there is no such folder.
    """
    of_workload = arm.workload.name.partition("hf-clm:")[2] or None
    for option, name in (("--model ", arm.model), ("--tokenizer ", arm.tokenizer), ("hf-clm:", of_workload)):
        if name is not None and names_folder(name) and not _written_out(name).is_dir():
            raise UserError(
                f"there is no folder {name}", f"give {option}FOLDER, or a name on the Hugging Face hub"
            )


def _written_out(path: str) -> Path:
    """The path with its `~` as a folder; as it is where there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def reads_text(workload: WorkloadInfo) -> bool:
    """Whether the workload is a language model's."""
    return "model" in workload.takes


def _asked_arms(request: "Request", default_workload: str) -> tuple[Arm, ...]:
    steps, epochs = _length(request, DEFAULT_STEPS, None)
    workload = known_workload(request.workload or default_workload)
    return tuple(
        Arm(
            workload=workload,
            recipe=recipe,
            batch_size=request.batch_size,
            steps=steps,
            epochs=epochs,
            eval_every=request.eval_every or 0,
            data=request.data or "synthetic",
            model=request.model,
            tokenizer=request.tokenizer,
            sequence_length=request.sequence_length,
        )
        for recipe in resolve_recipes(request.recipes or ("bf16",), request.overrides)
    )


def _experiment_arms(request: "Request") -> tuple[Arm, ...]:
    assert request.experiment is not None
    experiment = experiment_named(request.experiment)
    fixed = (
        (bool(request.recipes), "--recipe"),
        (bool(request.overrides), "--set"),
        (request.workload is not None, "--workload"),
        (request.batch_size is not None, "--batch-size"),
        (request.nproc is not None, "--nproc"),
    )
    for is_given, option in fixed:
        if is_given:
            raise UserError(
                f"--experiment {experiment.name} is a list of runs that says its own {option}",
                f"leave out {option}, or --experiment; `fastlaunch experiments {experiment.name}` shows it",
            )
    data = request.data or experiment.data
    # Epochs are of the published data; those that are made up for want of it have none.
    usual = (
        (experiment.steps or DEFAULT_STEPS, None)
        if data in MADE_UP
        else (experiment.steps, experiment.epochs)
    )
    steps, epochs = _length(request, *usual)
    found = []
    for arm in experiment.arms:
        workload = known_workload(arm.workload)
        found.append(
            Arm(
                workload=workload,
                recipe=resolve_recipe(arm.recipe, arm.overrides),
                batch_size=arm.batch_size,
                steps=steps,
                epochs=epochs,
                eval_every=arm.eval_every if request.eval_every is None else request.eval_every,
                data=data,
                model=request.model,
                tokenizer=request.tokenizer,
                sequence_length=request.sequence_length,
                num_gpus=arm.num_gpus,
                is_published=True,
            )
        )
    return tuple(found)


def _length(request: "Request", steps: int | None, epochs: int | None) -> tuple[int | None, int | None]:
    """(steps, epochs), one of them None: the user's, else these."""
    if request.steps is not None and request.epochs is not None:
        raise UserError("--steps and --epochs both say how long a run is", "give one of them")
    if request.steps is None and request.epochs is None:
        return steps, epochs
    return request.steps, request.epochs


def _check_text(request: "Request", arms: Sequence[Arm]) -> None:
    """Nothing, unless an option for text is given to a workload that reads none."""
    for field in _OF_TEXT:
        if getattr(request, field) is None:
            continue
        for arm in arms:
            if field not in arm.workload.takes:
                option = f"--{field.replace('_', '-')}"
                raise UserError(f"workload {arm.workload.name!r} takes no {option}", f"leave out {option}")


def _check_made_up(arm: Arm) -> None:
    """Nothing, if what is asked of made-up data is there. A workload of the user's own may have its own."""
    if arm.data not in MADE_UP or ".py:" in arm.workload.name:
        return
    if arm.epochs:
        raise UserError(
            f"--epochs are passes over the data, and {arm.data} data have no end",
            "give --steps, or data of your own by --data folder:PATH or file:PATH",
        )
    if arm.data == "loader" and arm.workload.sample_unit != "images":
        raise UserError(
            f"--data loader makes images, and workload {arm.workload.name!r} takes none",
            "give --data synthetic",
        )


def _check_fits(arm: Arm) -> None:
    """Nothing, if the workload has what the recipe changes, as far as is known without building it."""
    recipe, kind = arm.recipe, arm.workload.module.rpartition(".")[2]
    problem = steps_problem(recipe)
    if problem:
        message, hint = problem
        raise UserError(f"recipe {recipe.label}: {message}", hint)
    if ".py:" in arm.workload.name:
        return
    told = f"recipe {recipe.label} does not fit workload {arm.workload.name}"
    if recipe.blocks != "native" and kind != "vit":
        raise UserError(
            f"{told}: Transformer Engine's blocks stand for those of image models here",
            "give a recipe with blocks=native, such as bf16 or compile",
        )
    if recipe.pointwise != "written" and kind != "gelu":
        raise UserError(f"{told}, which writes out no pointwise functions", "give bf16, or --workload gelu")
    optimizer = workload_optimizer(arm.workload) if recipe.optimizer == "workload" else recipe.optimizer
    if recipe.parallelism.startswith("zero") and optimizer == "adafactor":
        raise UserError(f"{told}: DeepSpeed cannot shard adafactor", "add --set optimizer=adamw")
    problem = forward_only_problem(recipe) if kind == "gelu" else optimizer_problem(recipe, optimizer)
    if problem:
        message, hint = problem
        raise UserError(f"{told}: {message}", hint)


def workload_optimizer(workload: WorkloadInfo) -> str:
    """The optimizer of one of our workloads, as in the published experiments; the small ones' is another.

    Of a user's own it is not known here: the one of a Workload that names none.
    """
    if ".py:" in workload.name:
        return "sgd"
    if workload.small == workload.name:
        return "adamw"
    return {"causal_lm": "adafactor", "vit": "sgd"}.get(workload.module.rpartition(".")[2], "adamw")


def without_model(arm: Arm) -> Arm:
    """The arm on the small workload that stands in for its own, whose model and length are its own too."""
    info = workload_info(arm.workload.small)
    if info == arm.workload:
        return arm
    return replace(arm, workload=info, model=None, tokenizer=None, sequence_length=None)

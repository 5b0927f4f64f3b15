"""What a user asked to train on AWS -> the jobs for each instance type.

What is wrong with a request by itself is found here, before anything is asked of AWS.
"""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from fastlaunch.cloud_terms import ML, CloudTerms, check_terms
from fastlaunch.cost_ceiling import HourlyRate, check_sold, dearest_rate
from fastlaunch.errors import UnknownName, UserError
from fastlaunch.hardware import InstanceType
from fastlaunch.job import JobSpec
from fastlaunch.prices import Catalogue
from fastlaunch.request import MAX_REPEATS, Request, interleaved, known_workload, resolve_recipes
from fastlaunch_train.recipes import Recipe
from fastlaunch_train.workloads import WorkloadInfo

DEFAULT_WORKLOAD = "vit-huge"


@dataclass(frozen=True, kw_only=True)
class CloudRequest:
    """What to train, and where and how it may be bought: checked as far as that needs no AWS.

    batch_size: None to let the entrypoint find the largest. instances, regions: in the order they are tried.
    max_price_usd: the most paid per hour of spot, None for the on-demand price. image: a container image by
    digest that holds the training code; None for AWS's own with a code bundle, of tag `base_image` if given.
    allow_tcp: whether several nodes may do without EFA. reservation: of a capacity block; block_fee_usd: what
    it cost up front, None to take its hourly price from the price file. keep_alive_minutes: for which
    SageMaker keeps the machines, billed, for a next job. training_plan: ARN of SageMaker's.
    """

    recipes: tuple[Recipe, ...]
    workload: WorkloadInfo
    batch_size: int | None
    steps: int
    repeats: int
    seed: int
    data: str
    num_workers: int
    checkpoint_every: int
    instances: tuple[InstanceType, ...]
    regions: tuple[str, ...]
    purchase: str
    max_price_usd: float | None
    max_minutes: int
    image: str | None = None
    base_image: str | None = None
    backend: str = "ec2"
    num_nodes: int = 1
    allow_tcp: bool = False
    reservation: str | None = None
    block_fee_usd: float | None = None
    keep_alive_minutes: int = 0
    training_plan: str | None = None

    @property
    def user_file(self) -> Path | None:
        """The user's own workload file, which travels in the code bundle; None for any other workload."""
        path, separator, _ = self.workload.name.rpartition(".py:")
        return Path(f"{path}.py") if separator else None


def build_cloud_request(request: Request, terms: CloudTerms, *, catalogue: Catalogue) -> CloudRequest:
    """The checked request. Raises UserError for what does not exist, cannot be trained or is not sold."""
    recipes = resolve_recipes(request.recipes, request.overrides)
    workload = known_workload(request.workload or DEFAULT_WORKLOAD)
    check_terms(terms)
    instances = instances_of(terms, catalogue)
    _check_training(request, workload, terms)
    for instance in instances:
        if terms.backend == "ec2":
            check_sold(instance, terms.purchase, terms.max_price_usd)
        for recipe in recipes:
            _check_recipe(recipe, instance, catalogue)
    batch_size = workload.batch_size if request.batch_size is None else request.batch_size
    return CloudRequest(
        recipes=tuple(recipes),
        workload=workload,
        batch_size=None if isinstance(batch_size, str) else batch_size,
        steps=request.steps,
        repeats=request.repeats,
        seed=request.seed,
        data=request.data,
        num_workers=request.num_workers,
        checkpoint_every=request.checkpoint_every,
        instances=instances,
        regions=tuple(_once("region", terms.regions)),
        purchase=terms.purchase,
        max_price_usd=terms.max_price_usd,
        max_minutes=terms.max_minutes,
        image=terms.image,
        base_image=terms.base_image,
        backend=terms.backend,
        num_nodes=terms.num_nodes,
        allow_tcp=terms.allow_tcp and terms.num_nodes > 1,
        reservation=terms.reservation,
        block_fee_usd=terms.block_fee_usd,
        keep_alive_minutes=terms.keep_alive_minutes,
        training_plan=terms.training_plan,
    )


def instances_of(terms: CloudTerms, catalogue: Catalogue) -> tuple[InstanceType, ...]:
    """The instance types. Raises UserError for what does not exist, and what cannot join so many nodes."""
    found = tuple(_instance(name, catalogue) for name in _once("instance type", _names(terms)))
    for instance in found:
        _check_nodes(instance, terms, catalogue)
    return found


def rate_at(
    request: CloudRequest,
    instance: InstanceType,
    region: str,
    *,
    catalogue: Catalogue,
    today: datetime.date,
) -> HourlyRate:
    """The most that an hour of one instance costs there. Raises UserError if that is not known."""
    return dearest_rate(
        instance,
        region,
        purchase=request.purchase,
        max_price_usd=request.max_price_usd,
        catalogue=catalogue,
        today=today,
        service=request.backend,
    )


def jobs_at(
    request: CloudRequest, instance: InstanceType, region: str, *, image: str | None = None
) -> tuple[JobSpec, ...]:
    """The jobs on an instance type: each recipe as often as asked, A B, B A, one rank per GPU.

    As many, and in the same order, for every instance type. image: by digest, where it is known.
    """
    specs = [
        JobSpec(
            workload=request.workload.name,
            recipe=recipe,
            batch_size=request.batch_size,
            steps=request.steps,
            num_gpus=instance.num_accelerators * request.num_nodes,
            seed=request.seed,
            data=request.data,
            num_workers=request.num_workers,
            checkpoint_every=request.checkpoint_every,
            backend=request.backend,
            instance=instance.name,
            num_nodes=request.num_nodes,
            purchase=request.purchase,
            region=region,
            max_minutes=request.max_minutes,
            max_price_usd=request.max_price_usd,
            image=image,
            reservation=request.reservation,
            training_plan=request.training_plan,
            keep_alive_minutes=request.keep_alive_minutes,
            allow_tcp=request.allow_tcp,
        )
        for recipe in request.recipes
    ]
    return interleaved(specs, request.repeats)


def _instance(name: str, catalogue: Catalogue) -> InstanceType:
    sizes = [known for known in catalogue.instances if known.startswith(f"{name}.")]
    if sizes:
        raise UnknownName("instance", name, catalogue.instances, f"its sizes are {' and '.join(sizes)}")
    return catalogue.instance(name)


def _names(terms: CloudTerms) -> tuple[str, ...]:
    """The instance types as EC2 names them."""
    if terms.backend != "sagemaker":
        return terms.instances
    return tuple(name.removeprefix(ML) for name in terms.instances)


def _once(kind: str, names: Sequence[str]) -> Sequence[str]:
    if not names:
        raise UserError(f"no {kind} is named", f"give at least one {kind}")
    doubled = {name for name in names if names.count(name) > 1}
    if doubled:
        raise UserError(f"{kind} {min(doubled)} is given twice", "give it once")
    return names


def _check_nodes(instance: InstanceType, terms: CloudTerms, catalogue: Catalogue) -> None:
    if terms.num_nodes == 1 or instance.num_efa_interfaces or terms.allow_tcp:
        return
    raise UserError(
        f"{instance.name} has no EFA, by which {terms.num_nodes} nodes would talk",
        f"add --allow-tcp to do without, or choose a type with EFA: {_types_with_efa(catalogue)}",
    )


def _types_with_efa(catalogue: Catalogue) -> str:
    """The larger ones, by name."""
    return ", ".join(
        name
        for name, instance in catalogue.instances.items()
        if instance.num_efa_interfaces > 1 and catalogue.accelerators[instance.accelerator].compute_capability
    )


def _check_training(request: Request, workload: WorkloadInfo, terms: CloudTerms) -> None:
    if not 1 <= request.repeats <= MAX_REPEATS:
        raise UserError(f"repeats is {request.repeats}", f"give 1 to {MAX_REPEATS}")
    if request.nproc is not None:
        raise UserError(
            "--nproc is for training on this machine", "leave it out: on AWS it is one process per GPU"
        )
    if request.data.partition(":")[0] == "folder":
        raise UserError(
            f"{request.data} is on this machine, not on the instance",
            "give --data synthetic, or --data loader, which makes its images there",
        )
    if request.data not in ("synthetic", "loader"):
        raise UnknownName("data arm", request.data, ("synthetic", "loader"))
    if terms.purchase == "spot" and not request.checkpoint_every:
        steps = max(1, min(500, request.steps // 4))
        raise UserError(
            "spot without checkpoints: an interruption would lose everything",
            f"add --checkpoint-every {steps}, or another number of steps",
        )
    path = workload.name.rpartition(".py:")[0]
    if path and (PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts):
        raise UserError(
            f"workload {workload.name!r} is not below this folder",
            "its file travels with the training code: go to its folder, and give ./my.py:build",
        )
    if path and terms.image:
        raise UserError(
            f"workload {workload.name!r} travels in the code bundle, which --image does without",
            "leave out --image",
        )


def _check_recipe(recipe: Recipe, instance: InstanceType, catalogue: Catalogue) -> None:
    accelerator = catalogue.accelerators[instance.accelerator]
    if accelerator.compute_capability is None:
        raise UserError(
            f"{instance.name} carries {accelerator.name}, and training needs NVIDIA GPUs",
            f"instance types with NVIDIA GPUs: {_families('bf16', catalogue)}",
        )
    if recipe.precision in ("fp8", "tf32") and recipe.precision not in accelerator.formats:
        wanted = recipe.precision.upper()
        raise UserError(
            f"recipe {recipe.label} needs {wanted}, and {accelerator.name} of {instance.name} has none",
            f"instance types with {wanted}: {_families(recipe.precision, catalogue)}",
        )


def _families(precision: str, catalogue: Catalogue) -> str:
    """`p5, p5en, g6e`: the families whose GPUs multiply in this format."""
    found = (
        name.partition(".")[0]
        for name, instance in catalogue.instances.items()
        if precision in catalogue.accelerators[instance.accelerator].formats
        and catalogue.accelerators[instance.accelerator].compute_capability
    )
    return ", ".join(dict.fromkeys(found))

"""What a user asked to train on AWS -> the jobs for each instance type.

What is wrong with a request by itself is found here, before anything is asked of AWS.
"""

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.cloud_arms import why_not_on
from fastlaunch.core.errors import UnknownName, UserError
from fastlaunch.emulation import emulated_on
from fastlaunch.jobs.build import MAX_REPEATS, Request, interleaved
from fastlaunch.jobs.data_sources import check_travels
from fastlaunch.jobs.options import ML, CloudTerms, check_terms
from fastlaunch.jobs.spec import JobSpec
from fastlaunch.jobs.variants import DEFAULT_STEPS, Arm, arms_of
from fastlaunch.placement.cost_ceiling import HourlyRate, check_sold, dearest_rate

DEFAULT_WORKLOAD = "vit-huge"


@dataclass(frozen=True, kw_only=True)
class CloudRequest:
    """What to train, and where and how it may be bought: checked as far as that needs no AWS.

    arms: what is trained, in order. left_out: arms of an experiment that the machines cannot run, and why.
    caveats: what to know of the others' figures before they are made.
    instances, regions: in the order they are tried.
    max_price_usd: the most paid per hour of spot, None for the on-demand price. image: a container image by
    digest that holds the training code; None for AWS's own with a code bundle, of tag `base_image` if given.
    allow_tcp: whether several nodes may do without EFA. reservation: of a capacity block; block_fee_usd: what
    it cost up front, None to take its hourly price from the price file. keep_alive_minutes: for which
    SageMaker keeps the machines, billed, for a next job. training_plan: ARN of SageMaker's.
    """

    arms: tuple[Arm, ...]
    repeats: int
    seed: int
    num_workers: int | None
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
    left_out: tuple[tuple[str, str], ...] = ()
    caveats: tuple[str, ...] = ()

    @property
    def user_file(self) -> Path | None:
        """The user's own workload file, which travels in the code bundle; None for any other workload."""
        path, separator, _ = self.arms[0].workload.name.rpartition(".py:")
        return Path(f"{path}.py") if separator else None


def build_cloud_request(request: Request, terms: CloudTerms, *, catalogue: Catalogue) -> CloudRequest:
    """The checked request. Raises UserError for what does not exist, cannot be trained or is not sold."""
    arms = arms_of(request, DEFAULT_WORKLOAD)
    check_terms(terms)
    instances = instances_of(terms, catalogue)
    _check_training(request, terms)
    for arm in arms:
        check_travels(arm, terms)
    for instance in instances:
        if terms.backend == "ec2":
            check_sold(instance, terms.purchase, terms.max_price_usd)
    kept: list[Arm] = []
    left_out: list[tuple[str, UserError]] = []
    for arm in arms:
        # As many jobs for every instance type: what one of them cannot run, none does.
        found = (why_not_on(instance, arm, terms, catalogue, arms=arms) for instance in instances)
        refused = next(filter(None, found), None)
        if refused is None:
            kept.append(arm)
        elif arm.is_published:
            left_out.append((arm.name, refused))
        else:
            raise refused
    if not kept:
        name, why = left_out[0]
        raise UserError(
            f"no run of experiment {request.experiment} can be made there: {name}: {why.message}", why.hint
        )
    return CloudRequest(
        arms=tuple(kept),
        left_out=tuple((name, why.message) for name, why in left_out),
        caveats=_caveats(kept, instances, catalogue),
        repeats=request.repeats,
        seed=request.seed,
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
    """The jobs on an instance type: each arm as often as asked, A B, B A, one rank per GPU unless it says.

    As many, and in the same order, for every instance type. image: by digest, where it is known.
    """
    specs = [
        JobSpec(
            workload=arm.workload.name,
            recipe=arm.recipe,
            batch_size=_batch_size(arm),
            steps=arm.steps,
            epochs=arm.epochs,
            num_gpus=arm.num_gpus or instance.num_accelerators * request.num_nodes,
            seed=request.seed,
            data=arm.data,
            num_workers=request.num_workers,
            checkpoint_every=request.checkpoint_every,
            eval_every=arm.eval_every,
            model=arm.model,
            tokenizer=arm.tokenizer,
            sequence_length=arm.sequence_length,
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
        for arm in request.arms
    ]
    return interleaved(specs, request.repeats)


def _caveats(arms: Sequence[Arm], instances: Sequence[InstanceType], catalogue: Catalogue) -> tuple[str, ...]:
    accelerators = [catalogue.accelerators[instance.accelerator] for instance in instances]
    told = (emulated_on(arm.recipe, accelerator) for accelerator in accelerators for arm in arms)
    return tuple(filter(None, dict.fromkeys(told)))


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


def _batch_size(arm: Arm) -> int | None:
    """Samples per GPU; None to let the entrypoint find the largest."""
    asked = arm.workload.batch_size if arm.batch_size is None else arm.batch_size
    return None if isinstance(asked, str) else asked


def _check_training(request: Request, terms: CloudTerms) -> None:
    if not 1 <= request.repeats <= MAX_REPEATS:
        raise UserError(f"repeats is {request.repeats}", f"give 1 to {MAX_REPEATS}")
    if request.nproc is not None:
        raise UserError(
            "--nproc is for training on this machine", "leave it out: on AWS it is one process per GPU"
        )
    if terms.purchase == "spot" and not request.checkpoint_every:
        quarter = (DEFAULT_STEPS if request.steps is None else request.steps) // 4
        raise UserError(
            "spot without checkpoints: an interruption would lose everything",
            f"add --checkpoint-every {max(1, min(500, quarter))}, or another number of steps",
        )

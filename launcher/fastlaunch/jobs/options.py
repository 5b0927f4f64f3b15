"""Where a job may run and how it is bought, as typed, and what cannot be had together.

All of it is found out before anything is asked of AWS.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from fastlaunch.core.errors import UnknownName, UserError
from fastlaunch.core.settings import is_region
from fastlaunch.placement.cost_ceiling import MIN_MINUTES

BACKENDS = ("ec2", "sagemaker")
PURCHASES = ("on-demand", "spot", "capacity-block")
#: What SageMaker puts before EC2's name of an instance type.
ML = "ml."
MAX_MINUTES = 30 * 24 * 60
#: MaxRuntimeInSeconds and KeepAlivePeriodInSeconds: botocore's model of CreateTrainingJob, 1.44.5.
MAX_TRAINING_MINUTES = 28 * 24 * 60
MAX_KEEP_ALIVE_MINUTES = 6 * 60
_IMAGE = re.compile(r"[a-z0-9.-]*[.:][a-z0-9.:-]*/[a-z0-9._/-]+(:[\w.-]+)?@sha256:[0-9a-f]{64}")
_RESERVATION = re.compile(r"cr-[0-9a-f]{8,17}")
_TRAINING_PLAN = re.compile(r"arn:aws[a-z-]*:sagemaker:([a-z0-9-]+):[0-9]{12}:training-plan/\S+")


@dataclass(frozen=True, kw_only=True)
class CloudTerms:
    """See CloudRequest. instances: with `ml.` before them or, on SageMaker too, as EC2 names them."""

    instances: tuple[str, ...]
    regions: tuple[str, ...]
    backend: str = "ec2"
    num_nodes: int = 1
    allow_tcp: bool = False
    purchase: str = "on-demand"
    max_price_usd: float | None = None
    max_minutes: int = 120
    image: str | None = None
    base_image: str | None = None
    reservation: str | None = None
    block_fee_usd: float | None = None
    keep_alive_minutes: int = 0
    training_plan: str | None = None


def backend_of(instances: Sequence[str], named: str | None) -> str:
    """The backend for these instance types: `ml.` before them is SageMaker's. named: by --backend.

    Raises UserError where the two, or the types among themselves, contradict each other.
    """
    trained = [name for name in instances if name.startswith(ML)]
    others = [name for name in instances if not name.startswith(ML)]
    if trained and named == "ec2":
        raise UserError(
            f"{trained[0]} is SageMaker's name of a type, and the backend is ec2",
            f"give --backend sagemaker, or --instance {trained[0].removeprefix(ML)}",
        )
    if trained and others and named is None:
        raise UserError(
            f"{trained[0]} is SageMaker's name of a type, and {others[0]} EC2's",
            "one submission runs on one of the two: write ml. before all of them, or before none",
        )
    return named or ("sagemaker" if trained else "ec2")


def check_terms(terms: CloudTerms) -> None:
    """Nothing, if AWS could be asked for this; else UserError."""
    if terms.backend not in BACKENDS:
        raise UnknownName("backend", terms.backend, BACKENDS)
    if terms.purchase not in PURCHASES:
        raise UnknownName("purchase option", terms.purchase, PURCHASES)
    if terms.num_nodes < 1:
        raise UserError(f"--num-nodes is {terms.num_nodes}", "give 1 or more")
    for region in terms.regions:
        if not is_region(region):
            raise UserError(f"{region!r} is not the name of a region", "give one such as us-east-1")
    (_check_training_job if terms.backend == "sagemaker" else _check_machines)(terms)
    _check_block(terms)
    _check_limits(terms)
    _check_image(terms)


def _check_machines(terms: CloudTerms) -> None:
    if terms.keep_alive_minutes:
        raise UserError(
            "--keep-alive is for SageMaker's warm pools, and EC2's machines end with their job",
            "add --backend sagemaker, or leave it out",
        )
    if terms.training_plan:
        raise UserError(
            "--training-plan is for SageMaker",
            "add --backend sagemaker; on EC2 it is --purchase capacity-block --reservation cr-...",
        )
    if terms.max_price_usd is not None and terms.purchase != "spot":
        raise UserError("--max-price is the most that is paid for spot", "add --purchase spot")


def _check_training_job(terms: CloudTerms) -> None:
    spot = terms.purchase == "spot"
    if terms.purchase == "capacity-block":
        raise UserError(
            "SageMaker does not take EC2's capacity blocks",
            "its own are training plans: give --training-plan ARN instead of --purchase capacity-block",
        )
    if terms.max_price_usd is not None:
        raise UserError(
            "--max-price is for EC2: managed spot costs a share of the on-demand price, which AWS sets",
            "leave it out; --max-cost limits the whole",
        )
    if not 0 <= terms.keep_alive_minutes <= MAX_KEEP_ALIVE_MINUTES:
        raise UserError(
            f"--keep-alive is {terms.keep_alive_minutes} min", f"give 1 to {MAX_KEEP_ALIVE_MINUTES} minutes"
        )
    if spot and terms.keep_alive_minutes:
        raise UserError(
            "SageMaker keeps no warm pool of spot instances",
            "leave out --keep-alive, or give --purchase on-demand",
        )
    if terms.training_plan:
        _check_training_plan(terms, terms.training_plan)
    if terms.max_minutes > MAX_TRAINING_MINUTES:
        raise UserError(
            f"--max-hours is {terms.max_minutes} min, and SageMaker ends every job after 28 days",
            "give 28d or less",
        )


def _check_training_plan(terms: CloudTerms, arn: str) -> None:
    found = _TRAINING_PLAN.fullmatch(arn)
    if found is None:
        raise UserError(
            f"--training-plan {arn!r} is not an ARN of one",
            "aws sagemaker list-training-plans names yours: "
            "arn:aws:sagemaker:REGION:ACCOUNT:training-plan/NAME",
        )
    if terms.purchase == "spot":
        raise UserError(
            "a training plan is capacity that was paid for, which spot does not use", "leave out one of both"
        )
    if len(terms.instances) > 1:
        raise UserError("a training plan is of one instance type, and several are named", "name one")
    if tuple(terms.regions) != (found[1],):
        raise UserError(f"the training plan is of {found[1]}", f"give --region {found[1]}")


def _check_block(terms: CloudTerms) -> None:
    if terms.purchase != "capacity-block":
        for option, value in (("--reservation", terms.reservation), ("--block-fee", terms.block_fee_usd)):
            if value is not None:
                where = "add --purchase capacity-block" if terms.backend == "ec2" else "leave it out"
                raise UserError(f"{option} is for a capacity block of EC2's", where)
        return
    if terms.reservation is None:
        raise UserError(
            "it does not say which capacity block",
            "add --reservation cr-...; `aws ec2 describe-capacity-blocks` lists yours (fastlaunch buys none)",
        )
    if not _RESERVATION.fullmatch(terms.reservation):
        raise UserError(
            f"--reservation {terms.reservation!r} is not the id of a reservation",
            "give one such as cr-0a1b2c3d",
        )
    for what, names in (("instance type", terms.instances), ("region", terms.regions)):
        if len(names) > 1:
            raise UserError(f"a capacity block is of one {what}, and several are named", "name one")


def _check_limits(terms: CloudTerms) -> None:
    if terms.max_price_usd is not None and terms.max_price_usd < 0.001:
        raise UserError(f"--max-price is {terms.max_price_usd:g}", "EC2 takes $0.001 per hour or more")
    if not MIN_MINUTES <= terms.max_minutes <= MAX_MINUTES:
        raise UserError(
            f"--max-hours is {terms.max_minutes} min",
            f"give {MIN_MINUTES}min (booting, pulling the image, saving) to 30d",
        )


def _check_image(terms: CloudTerms) -> None:
    if terms.image and terms.base_image:
        raise UserError("--image and --base-image name two images", "give one of the two")
    if terms.image and not _IMAGE.fullmatch(terms.image):
        raise UserError(
            f"{terms.image!r} is not an image by its digest",
            "give REGISTRY/REPOSITORY@sha256:..., as `fastlaunch build --push` ends with",
        )

"""What was typed for `submit`, as data, and what cannot be had together. Asks AWS nothing."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fastlaunch.catalog.hardware import PURCHASE_OPTIONS
from fastlaunch.core.conventions import DEFAULT_MOST_ROUNDS, MAX_REPLACEMENTS, MIN_MINUTES, check_tags
from fastlaunch.core.errors import UnknownName, UserError
from fastlaunch.core.units import DEFAULT_REGION, is_region
from fastlaunch.jobs.spec import Inputs
from fastlaunch_train.node.protocol import input_environment
from fastlaunch_train.recipes.recipe import Recipe
from fastlaunch_train.workloads.registry import WorkloadInfo

BACKENDS = ("ec2", "sagemaker")
#: What SageMaker puts before EC2's name of an instance type.
ML = "ml."
MAX_MINUTES = 30 * 24 * 60
#: MaxRuntimeInSeconds: botocore's model of CreateTrainingJob, 1.44.5.
MAX_TRAINING_MINUTES = 28 * 24 * 60
_IMAGE = re.compile(r"[a-z0-9.-]*[.:][a-z0-9.:-]*/[a-z0-9._/-]+(:[\w.-]+)?@sha256:[0-9a-f]{64}")
_RESERVATION = re.compile(r"cr-[0-9a-f]{8,17}")
_SECRET = re.compile(
    r"arn:aws[a-z-]*:(secretsmanager:[a-z0-9-]+:[0-9]{12}:secret:|ssm:[a-z0-9-]+:[0-9]{12}:parameter/)[\w./+=@-]+",
    re.ASCII,
)
#: Names of variables; not ours, nor those that docker or the machine's shell would take for theirs.
_VARIABLE = re.compile(r"(?!FASTLAUNCH_|DOCKER_|(PATH|HOME)$)[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
#: Names of variables that hold secrets by custom, such as HF_TOKEN and PGPASSWORD; not those that say where
#: one is, nor the tokens of a vocabulary.
_SECRET_NAME = re.compile(
    r"(?!.*_(ARN|FILE|ID|NAME|PATH)$)(?!(BOS|CLS|EOS|MASK|PAD|SEP|UNK)_TOKEN$|.*PUBLIC_KEY$)"
    r"(.*(PASSWORD|PASSWD|PASSPHRASE|SECRET|APIKEY|CREDENTIALS).*|(.*_)?(TOKEN|KEY)|.*_(PASS|PAT|PWD))",
    re.IGNORECASE,
)
#: What is one whatever it is called: an address with a password, tokens of well-known services.
_SECRET_VALUE = re.compile(
    r"://[^/\s:@]*:[^/\s@]+@|\b(hf_|gh[opsu]_|github_pat_|glpat-|sk-|xox[abp]-)[\w-]{16}"
)
#: Names of channels, which SageMaker takes, and of variables; not our own channels.
_INPUT = re.compile(
    r"(?!(agent|code|requirements|runs)$)[A-Za-z][A-Za-z0-9_-]{0,62}", re.ASCII | re.IGNORECASE
)
FOLDER = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^<>]*)?")
_TRAINING_PLAN = re.compile(r"arn:aws[a-z-]*:sagemaker:([a-z0-9-]+):[0-9]{12}:training-plan/\S+")


#: Fields whose option is not called as they are.
_OPTIONS = {
    **{
        name: f"--{name.removesuffix('s').replace('_', '-')}"
        for name in (
            "inputs",
            "recipes",
            "instances",
            "regions",
            "tags",
            "secrets",
            "subnets",
            "security_groups",
            "placement_groups",
            "batch_sizes",
        )
    },
    **{"lists": "-L", "overrides": "--set", "workload_arguments": "--set-workload", "variables": "--env"},
    **{"hang_timeout_s": "--hang-timeout", "max_minutes": "--max-hours", "max_cost_usd": "--max-cost"},
    **{"max_price_usd": "--max-price", "block_fee_usd": "--block-fee", "account_timer": "--no-account-timer"},
}


def option_of(field: str) -> str:
    """Return the option of the command line that fills a field: `--max-hours` of `max_minutes`."""
    return _OPTIONS.get(field, f"--{field.replace('_', '-')}")


@dataclass(frozen=True, kw_only=True)
class SubmitOptions:
    """What to train, as typed; None, and no recipes, is `not given`."""

    #: A script of the user's own instead of workload and recipe, as its words; None without `--`.
    command: tuple[str, ...] | None = None
    #: `amp=bf16,fp32` each: texts that take the place of `{amp}` in the command.
    lists: tuple[str, ...] = ()
    #: `amp=fp32`: the variant that the others are compared with; None for the first.
    baseline: str | None = None
    #: Without a step for so long a script is ended.
    hang_timeout_s: float | None = None
    recipes: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()
    workload: str | None = None
    #: Samples per GPU; `auto` for the most that fit with all recipes, `auto-each` with each its own.
    batch_size: int | str | None = None
    #: Of a sweep, in place of that: each recipe is trained with each.
    batch_sizes: tuple[int | str, ...] = ()
    #: Bytes that the search for it may fill on a CPU.
    memory_budget: int | None = None
    steps: int | None = None
    epochs: int | None = None
    repeats: int = 1
    #: End as soon as the verdicts are settled, after so many rounds at most; None for the default.
    until_resolved: bool = False
    #: Id of the submission to whose runs these are more.
    add_to: str | None = None
    max_rounds: int | None = None
    #: Of a sweep: a cell runs only as long as it may be the best of all.
    until_best: bool = False
    seed: int = 0
    #: Processes on a node; `gpu` for one per GPU.
    nproc: int | str | None = None
    data: str | None = None
    num_workers: int | None = None
    checkpoint_every: int = 0
    eval_every: int | None = None
    #: Whether to profile a few steps after the last.
    step_profile: bool = False
    model: str | None = None
    tokenizer: str | None = None
    sequence_length: int | None = None
    #: KEY=VALUE each.
    workload_arguments: tuple[str, ...] = ()
    #: Of `catalog.experiments`: names recipes, overrides, workloads and batch sizes itself.
    experiment: str | None = None
    #: The instance type to rehearse.
    instance: str | None = None
    region: str = DEFAULT_REGION

    @property
    def planned_rounds(self) -> int | None:
        """The most rounds of a plan that ends when all is settled; None without one."""
        return (self.max_rounds or DEFAULT_MOST_ROUNDS) if self.until_resolved else None


@dataclass(frozen=True, kw_only=True)
class CloudOptions:
    """Where a job may run on AWS and how it is bought, as typed."""

    #: In the order they are tried; with `ml.` before them or, on SageMaker too, as EC2 names them.
    instances: tuple[str, ...]
    #: In the order they are tried.
    regions: tuple[str, ...]
    backend: str = "ec2"
    num_nodes: int = 1
    #: Whether several nodes may do without EFA.
    allow_tcp: bool = False
    purchase: str = "on-demand"
    #: The most paid for an hour of spot; None for the on-demand price.
    max_price_usd: float | None = None
    max_minutes: int = 120
    #: Return as soon as the machines have started.
    detach: bool = False
    #: Whether a schedule in the account ends machines on EC2 that nothing else ended.
    account_timer: bool = True
    #: How often a machine with a faulty GPU is replaced, within these minutes.
    max_replacements: int = MAX_REPLACEMENTS
    #: A container image by digest that holds the training code; None for AWS's own with a code bundle.
    image: str | None = None
    #: Tag of AWS's own image; None for the newest.
    base_image: str | None = None
    #: Id of a capacity block, and what it cost up front: None to take its hourly price from the price file.
    reservation: str | None = None
    block_fee_usd: float | None = None
    #: ARN of SageMaker's.
    training_plan: str | None = None
    #: KEY=VALUE each, on top of the config file's.
    tags: tuple[str, ...] = ()
    #: NAME=ARN each: a variable of the job, and what holds its value.
    secrets: tuple[str, ...] = ()
    #: NAME=VALUE each: variables of the job, as they are.
    variables: tuple[str, ...] = ()
    #: NAME=s3://BUCKET/PREFIX each: what a job reads from S3.
    inputs: tuple[str, ...] = ()
    #: A file in pip's format: what a job needs besides its image, as wheels that are resolved here, or from
    #: the index of the pip that is there.
    requirements: str | None = None
    requirements_from_index: bool = False


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to train a workload, before it is known where. `JobSpec` explains the other fields."""

    workload: WorkloadInfo
    recipe: Recipe
    #: Samples per GPU, `auto` or `auto-each`, or None for the workload's own.
    batch_size: int | str | None
    steps: int | None
    epochs: int | None
    eval_every: int
    inputs: Inputs
    #: Ranks that it is meant for; None for all there are.
    num_gpus: int | None = None
    #: Whether it is an experiment's, which is skipped where it cannot run, and not refused.
    is_published: bool = False

    @property
    def name(self) -> str:
        """`te-fp8 on vit-huge at batch 128`: what sets it apart from the other variants."""
        batch = "" if self.batch_size is None else f" at batch {self.batch_size}"
        return f"{self.recipe.label} on {self.workload.name}{batch}"


def backend_of(instances: Sequence[str], named: str | None) -> str:
    """Return the backend for these instance types: `ml.` before them is SageMaker's. named: by --backend.

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


def check_cloud_options(cloud: CloudOptions) -> None:
    """Raise UserError if AWS could not be asked for this."""
    if cloud.backend not in BACKENDS:
        raise UnknownName("backend", cloud.backend, BACKENDS)
    if cloud.purchase not in PURCHASE_OPTIONS:
        raise UnknownName("purchase option", cloud.purchase, PURCHASE_OPTIONS)
    if cloud.num_nodes < 1:
        raise UserError(f"--num-nodes is {cloud.num_nodes}", "give 1 or more")
    for region in cloud.regions:
        if not is_region(region):
            raise UserError(f"{region!r} is not the name of a region", "give one such as us-east-1")
    (_check_training_job if cloud.backend == "sagemaker" else _check_machines)(cloud)
    _check_block(cloud)
    _check_limits(cloud)
    check_tags(given_tags(cloud))
    _check_variables(cloud)
    given_inputs(cloud)
    _check_image(cloud)
    _check_requirements(cloud)


def given_tags(cloud: CloudOptions) -> dict[str, str]:
    """Return the tags that were typed. Raises UserError for a text that is none."""
    return _pairs("--tag", cloud.tags, "KEY=VALUE", "team=vision")


def given_secrets(cloud: CloudOptions) -> dict[str, str]:
    """Return ARNs by variable, as they were typed. Raises UserError for a text that is none."""
    return _pairs("--secret", cloud.secrets, "NAME=ARN", "HF_TOKEN=arn:aws:secretsmanager:...")


def given_variables(cloud: CloudOptions) -> dict[str, str]:
    """Return values by variable, as they were typed. Raises UserError for a text that is none."""
    return _pairs("--env", cloud.variables, "NAME=VALUE", "HF_HUB_OFFLINE=1")


def given_inputs(cloud: CloudOptions) -> dict[str, str]:
    """Return URIs by name, with a slash at their ends: what lies below them is meant.

    Raises UserError for what cannot be fetched.
    """
    inputs = _pairs("--input", cloud.inputs, "NAME=s3://BUCKET/PREFIX", "data=s3://acme-data/imagenet")
    for name, uri in inputs.items():
        if not _INPUT.fullmatch(name):
            raise UserError(
                f"--input {name!r} cannot be the name of an input",
                "give at most 63 letters, digits, _ and -, a letter first; agent, code, requirements and "
                "runs are taken",
            )
        check_folder(uri, form=f"{name}=")
    if len(input_environment(inputs)) < len(inputs):
        raise UserError(f"two of --input {', '.join(inputs)} make the same variable", "name them differently")
    return {name: f"{uri.rstrip('/')}/" for name, uri in inputs.items()}


def check_folder(uri: str, *, form: str = "") -> None:
    """Raise UserError unless the text is the URI of a folder in S3. form: what is typed before it."""
    if not FOLDER.fullmatch(uri) or not uri.isprintable():
        raise UserError(f"--input {form}{uri} is no folder in S3", f"give {form}s3://BUCKET/PREFIX")


def _check_requirements(cloud: CloudOptions) -> None:
    if cloud.requirements_from_index and cloud.requirements is None:
        raise UserError("--requirements-from-index is for --requirements", "add --requirements FILE")
    if cloud.requirements and cloud.image and not cloud.requirements_from_index:
        raise UserError(
            "--requirements resolves wheels for the Python of AWS's image, and that of yours is not known",
            "install them as you build it; or add --requirements-from-index, which has its own pip do it",
        )


def _check_variables(cloud: CloudOptions) -> None:
    secrets, variables = given_secrets(cloud), given_variables(cloud)
    for option, names in (("--secret", secrets), ("--env", variables)):
        for name in names:
            if not _VARIABLE.fullmatch(name):
                raise UserError(
                    f"{option} {name!r} cannot be a variable of the job",
                    "give letters, digits and _, such as HF_TOKEN; PATH, HOME, and what begins with "
                    "FASTLAUNCH_ or DOCKER_, are taken",
                )
    if both := secrets.keys() & variables.keys():
        raise UserError(f"{min(both)} is given by --secret and by --env", "give it once")
    for name, value in variables.items():
        if not value.isprintable():
            raise UserError(f"--env {name} has a value with control characters", "give text in one line")
        if value and (_SECRET_NAME.fullmatch(name) or _SECRET_VALUE.search(value)):
            raise UserError(
                f"--env {name} looks like a secret, and whoever may describe the job reads its variables",
                f"keep it in Secrets Manager or SSM, and give --secret {name}=ARN",
            )
    for name, arn in secrets.items():
        check_secret(arn, form=f"{name}=")


def check_words(words: Iterable[str]) -> None:
    """Raise UserError for a word of a job that is a secret: words are stored as variables are."""
    if any(map(_SECRET_VALUE.search, words)):
        raise UserError(
            "a word of the command or of --set-workload looks like a secret, and is stored with the job",
            "give it as a variable, by --secret NAME=ARN, and read that",
        )


def check_secret(arn: str, *, form: str = "") -> None:
    """Raise UserError unless the text is the ARN of a secret or parameter. form: what is typed before it."""
    # The value itself may have been typed: it is not repeated.
    if not _SECRET.fullmatch(arn):
        raise UserError(
            f"--secret {form}... names neither a secret nor a parameter by its ARN",
            f"give {form}arn:aws:secretsmanager:REGION:ACCOUNT:secret:NAME, or "
            f"{form}arn:aws:ssm:REGION:ACCOUNT:parameter/NAME",
        )


def _pairs(option: str, texts: Sequence[str], form: str, example: str) -> dict[str, str]:
    """Return what was typed as NAME=VALUE, by name."""
    pairs: dict[str, str] = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not (name and separator):
            # Without a name, it may be the value of a secret: then it is not repeated.
            is_shown = separator or option == "--tag" or name.isupper()
            raise UserError(
                f"{option} {repr(name) if is_shown else '...'} is not {form}", f"give one such as {example}"
            )
        if name in pairs:
            raise UserError(f"{option} {name} is given twice", "give it once")
        pairs[name] = value
    return pairs


def _check_machines(cloud: CloudOptions) -> None:
    if cloud.training_plan:
        raise UserError(
            "--training-plan is for SageMaker",
            "add --backend sagemaker; on EC2 it is --purchase capacity-block --reservation cr-...",
        )
    if cloud.max_price_usd is not None and cloud.purchase != "spot":
        raise UserError("--max-price is the most that is paid for spot", "add --purchase spot")


def _check_training_job(cloud: CloudOptions) -> None:
    if cloud.purchase == "capacity-block":
        raise UserError(
            "SageMaker does not take EC2's capacity blocks",
            "its own are training plans: give --training-plan ARN instead of --purchase capacity-block",
        )
    if cloud.max_price_usd is not None:
        raise UserError(
            "--max-price is for EC2: managed spot costs a share of the on-demand price, which AWS sets",
            "leave it out; --max-cost limits the whole",
        )
    if cloud.training_plan:
        _check_training_plan(cloud, cloud.training_plan)
    if cloud.max_minutes > MAX_TRAINING_MINUTES:
        raise UserError(
            f"--max-hours is {cloud.max_minutes} min, and SageMaker ends every job after 28 days",
            "give 28d or less",
        )


def _check_training_plan(cloud: CloudOptions, arn: str) -> None:
    match = _TRAINING_PLAN.fullmatch(arn)
    if match is None:
        raise UserError(
            f"--training-plan {arn!r} is not an ARN of one",
            "aws sagemaker list-training-plans names yours: "
            "arn:aws:sagemaker:REGION:ACCOUNT:training-plan/NAME",
        )
    if cloud.purchase == "spot":
        raise UserError(
            "a training plan is capacity that was paid for, which spot does not use", "leave out one of both"
        )
    if len(cloud.instances) > 1:
        raise UserError("a training plan is of one instance type, and several are named", "name one")
    if tuple(cloud.regions) != (match[1],):
        raise UserError(f"the training plan is of {match[1]}", f"give --region {match[1]}")


def _check_block(cloud: CloudOptions) -> None:
    if cloud.purchase != "capacity-block":
        for option, value in (("--reservation", cloud.reservation), ("--block-fee", cloud.block_fee_usd)):
            if value is not None:
                where = "add --purchase capacity-block" if cloud.backend == "ec2" else "leave it out"
                raise UserError(f"{option} is for a capacity block of EC2's", where)
        return
    if cloud.reservation is None:
        raise UserError(
            "it does not say which capacity block",
            "add --reservation cr-...; `aws ec2 describe-capacity-blocks` lists yours (fastlaunch buys none)",
        )
    if not _RESERVATION.fullmatch(cloud.reservation):
        raise UserError(
            f"--reservation {cloud.reservation!r} is not the id of a reservation",
            "give one such as cr-0a1b2c3d",
        )
    for what, names in (("instance type", cloud.instances), ("region", cloud.regions)):
        if len(names) > 1:
            raise UserError(f"a capacity block is of one {what}, and several are named", "name one")


def _check_limits(cloud: CloudOptions) -> None:
    if cloud.max_price_usd is not None and cloud.max_price_usd < 0.001:
        raise UserError(f"--max-price is {cloud.max_price_usd:g}", "EC2 takes $0.001 per hour or more")
    if not MIN_MINUTES <= cloud.max_minutes <= MAX_MINUTES:
        raise UserError(
            f"--max-hours is {cloud.max_minutes} min",
            f"give {MIN_MINUTES}min (booting, pulling the image, saving) to 30d",
        )


def _check_image(cloud: CloudOptions) -> None:
    if cloud.image and cloud.base_image:
        raise UserError("--image and --base-image name two images", "give one of the two")
    if cloud.image and not _IMAGE.fullmatch(cloud.image):
        raise UserError(
            f"{cloud.image!r} is not an image by its digest",
            "give REGISTRY/REPOSITORY@sha256:..., as `fastlaunch build --push` ends with",
        )

"""Which options exclude each other, and what a text of NAME=VALUE may hold. Asks AWS nothing."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace

from fastlaunch.catalog.hardware import PURCHASE_OPTIONS
from fastlaunch.core.errors import UnknownName, UserError
from fastlaunch.core.ownership import MAX_MINUTES, MIN_MINUTES, check_tags
from fastlaunch.core.settings import RegionSettings, Settings, misfit
from fastlaunch.core.units import is_region
from fastlaunch.jobs.options import BACKENDS, ML, OPTIONS, SERVICES, Options
from fastlaunch_train.node.protocol import input_environment

#: MaxRuntimeInSeconds: botocore's model of CreateTrainingJob, 1.44.5.
MAX_TRAINING_MINUTES = 28 * 24 * 60
_IMAGE = re.compile(r"[a-z0-9.-]*[.:][a-z0-9.:-]*/[a-z0-9._/-]+(:[\w.-]+)?@sha256:[0-9a-f]{64}")
#: docs.aws.amazon.com/batch, CreateJobQueue and ShareAttributes.
QUEUE = re.compile(r"[A-Za-z0-9][\w-]{0,127}", re.ASCII)
_SHARE = re.compile(r"[A-Za-z0-9]{1,255}")
_RESERVATION = re.compile(r"cr-[0-9a-f]{8,17}")
_SECRET = re.compile(
    r"arn:aws[a-z-]*:(secretsmanager:[a-z0-9-]+:[0-9]{12}:secret:|ssm:[a-z0-9-]+:[0-9]{12}:parameter/)[\w./+=@-]+",
    re.ASCII,
)
#: Names of variables, but for ours and those that docker or the machine's shell reads.
_VARIABLE = re.compile(r"(?!FASTLAUNCH_|DOCKER_|(PATH|HOME)$)[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
#: Names of variables that usually hold secrets, such as HF_TOKEN and PGPASSWORD. A variable may say where a
#: secret is, and may be a token of a vocabulary.
_SECRET_NAME = re.compile(
    r"(?!.*_(ARN|FILE|ID|NAME|PATH)$)(?!(BOS|CLS|EOS|MASK|PAD|SEP|UNK)_TOKEN$|.*PUBLIC_KEY$)"
    r"(.*(PASSWORD|PASSWD|PASSPHRASE|SECRET|APIKEY|CREDENTIALS).*|(.*_)?(TOKEN|KEY)|.*_(PASS|PAT|PWD))",
    re.IGNORECASE,
)
#: Secrets whatever their variable is called: an address with a password, tokens of well-known services.
_SECRET_VALUE = re.compile(
    r"://[^/\s:@]*:[^/\s@]+@|\b(hf_|gh[opsu]_|github_pat_|glpat-|sk-|xox[abp]-|AIza|eyJ[\w-]+\.eyJ)[\w-]{16}"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY"
)
#: The input by which a job gets a file of data from this machine.
LOCAL_DATA = "local-data"
#: Names that SageMaker takes for channels and that make a variable, but for our own channels.
_INPUT = re.compile(
    r"(?!(agent|code|local-data|requirements|runs)$)[A-Za-z][A-Za-z0-9_-]{0,62}", re.ASCII | re.IGNORECASE
)
FOLDER = re.compile(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[^<>]*)?")
_TRAINING_PLAN = re.compile(r"arn:aws[a-z-]*:sagemaker:([a-z0-9-]+):[0-9]{12}:training-plan/\S+")
#: What to type for an option of NAME=VALUE, by its field.
_EXAMPLES = {
    "tags": "team=vision",
    "secrets": "HF_TOKEN=arn:aws:secretsmanager:...",
    "variables": "HF_HUB_OFFLINE=1",
    "inputs": "data=s3://acme-data/imagenet",
    "subnets": "us-east-1a=subnet-0a1b2c",
    "placement_groups": "us-east-1a=fastlaunch-us-east-1a",
}


def backend_of(instances: Sequence[str], named: str | None) -> str:
    """Return the backend: SageMaker where the instance types begin with `ml.`. named: by --backend.

    Raises UserError if the types contradict each other, or the backend that is named.
    """
    with_ml = [name for name in instances if name.startswith(ML)]
    others = [name for name in instances if not name.startswith(ML)]
    if with_ml and named == "ec2":
        raise UserError(
            f"{with_ml[0]} is SageMaker's name of a type, and the backend is ec2",
            f"give --backend sagemaker, or --instance {with_ml[0].removeprefix(ML)}",
        )
    if with_ml and others and named is None:
        raise UserError(
            f"{with_ml[0]} is SageMaker's name of a type, and {others[0]} EC2's",
            "a submission runs on one of the two: write ml. before all types, or before none",
        )
    return named or ("sagemaker" if with_ml else "ec2")


def check_places(options: Options, place: str) -> None:
    """Raise UserError for an option that means nothing at the place, one of `PLACES`."""
    for name, option in OPTIONS.items():
        if place in option.places or getattr(options, name) in (None, option.default):
            continue
        if place in BACKENDS:
            service = " and ".join(SERVICES[name] for name in option.places if name in BACKENDS)
            raise UserError(f"{option.flag} is for {service}", option.elsewhere)
        hint = option.elsewhere if set(BACKENDS) <= set(option.places) else None
        raise UserError(f"{option.flag} is for AWS, and this trains here", hint or f"leave {option.flag} out")


def check_script(options: Options) -> None:
    """Raise UserError for options that mean nothing for the command."""
    meaningless = [
        option.flag
        for name, option in OPTIONS.items()
        if option.for_script is False and getattr(options, name) != option.default
    ]
    if options.rehearsed:
        # With --local a type is for a rehearsal of recipes.
        meaningless.append("--instance")
    if meaningless:
        raise UserError(
            f"these options are not for a script of your own: {', '.join(meaningless)}",
            "leave them out, and give the script its own options, which -L can vary",
        )


def check_no_script(options: Options) -> None:
    """Raise UserError for an option that is for a command, as none is given."""
    for name, option in OPTIONS.items():
        if option.for_script and getattr(options, name) != option.default:
            raise UserError(
                f"{option.flag} is for a script of your own, and no -- COMMAND follows",
                "end with the command, as in: -- python train.py --amp {amp}",
            )


def check_purchase(options: Options) -> None:
    """Raise UnknownName if AWS sells nothing that way."""
    if options.purchase not in PURCHASE_OPTIONS:
        raise UnknownName("purchase option", options.purchase, PURCHASE_OPTIONS)


def check_on_aws(options: Options) -> None:
    """Raise UserError if AWS could not be asked for this."""
    if options.service not in BACKENDS:
        raise UnknownName("backend", options.service, BACKENDS)
    check_purchase(options)
    if options.num_nodes < 1:
        raise UserError(f"--num-nodes is {options.num_nodes}", "give 1 or more")
    for region in options.regions:
        if not is_region(region):
            raise UserError(f"{region!r} is not the name of a region", "give one such as us-east-1")
    if options.purchase == "capacity-block" and options.service == "sagemaker":
        raise UserError(
            "SageMaker does not take EC2's capacity blocks",
            "its own are training plans: give --training-plan ARN instead of --purchase capacity-block",
        )
    check_places(options, options.service)
    _check_block(options)
    if options.training_plan:
        _check_training_plan(options, options.training_plan)
    _check_queue(options)
    _check_limits(options)
    check_tags(given_pairs(options, "tags"))
    _check_variables(options)
    check_words((*(options.command or ()), *options.workload_arguments))
    given_inputs(options)
    _check_image(options)
    _check_requirements(options)


def given_pairs(options: Options, name: str) -> dict[str, str]:
    """Return the values of an option that is typed as NAME=VALUE, by their names. name: the option's field.

    Raises UserError for a text that is no such pair, and for a name that is given twice.
    """
    flag = OPTIONS[name].flag
    pairs: dict[str, str] = {}
    for text in getattr(options, name):
        key, separator, value = text.partition("=")
        if not (key and separator):
            # A text without a name may be the value of a secret, which no message shows.
            is_shown = separator or name == "tags" or key.isupper()
            raise UserError(
                f"{flag} {repr(key) if is_shown else '...'} is not {OPTIONS[name].metavar}",
                f"give one such as {_EXAMPLES[name]}",
            )
        if key in pairs:
            raise UserError(f"{flag} {key} is given twice", "give it once")
        pairs[key] = value
    return pairs


def given_inputs(options: Options) -> dict[str, str]:
    """Return the URIs of input folders by name, with a slash at their ends.

    Raises UserError for what cannot be fetched.
    """
    inputs = given_pairs(options, "inputs")
    for name, uri in inputs.items():
        if not _INPUT.fullmatch(name):
            raise UserError(
                f"--input {name!r} cannot be the name of an input",
                "give at most 63 letters, digits, _ and -, a letter first; agent, code, local-data, "
                "requirements and runs are taken",
            )
        check_folder(uri, form=f"{name}=")
    if len(input_environment(inputs)) < len(inputs):
        raise UserError(f"two of --input {', '.join(inputs)} make the same variable", "name them differently")
    return {name: f"{uri.rstrip('/')}/" for name, uri in inputs.items()}


def check_folder(uri: str, *, form: str = "") -> None:
    """Raise UserError unless the text is the URI of a folder in S3. form: what is typed before it."""
    if not FOLDER.fullmatch(uri) or not uri.isprintable():
        raise UserError(f"--input {form}{uri} is no folder in S3", f"give {form}s3://BUCKET/PREFIX")
    # In a policy they stand for other text, and in a folder's name for themselves.
    if any(character in uri for character in "*?$"):
        raise UserError(
            f"--input {form}{uri} has one of * ? $",
            "name a folder without them: all that lies below it is fetched",
        )


def _check_requirements(options: Options) -> None:
    if options.requirements_from_index and options.requirements is None:
        raise UserError("--requirements-from-index is for --requirements", "add --requirements FILE")
    if options.requirements and options.image and not options.requirements_from_index:
        raise UserError(
            "--requirements resolves wheels for the Python of AWS's image, and that of yours is not known",
            "install them as you build it; or add --requirements-from-index, which has its own pip do it",
        )


def _check_variables(options: Options) -> None:
    secrets, variables = given_pairs(options, "secrets"), given_pairs(options, "variables")
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
    # The value itself may have been typed, so no message shows it.
    if not _SECRET.fullmatch(arn):
        raise UserError(
            f"--secret {form}... names neither a secret nor a parameter by its ARN",
            f"give {form}arn:aws:secretsmanager:REGION:ACCOUNT:secret:NAME, or "
            f"{form}arn:aws:ssm:REGION:ACCOUNT:parameter/NAME",
        )


def _check_training_plan(options: Options, arn: str) -> None:
    match = _TRAINING_PLAN.fullmatch(arn)
    if match is None:
        raise UserError(
            f"--training-plan {arn!r} is not an ARN of one",
            "aws sagemaker list-training-plans names yours: "
            "arn:aws:sagemaker:REGION:ACCOUNT:training-plan/NAME",
        )
    if options.purchase == "spot":
        raise UserError(
            "a training plan is capacity that was paid for, which spot does not use", "leave out one of both"
        )
    if len(options.instances) > 1:
        raise UserError("a training plan has one instance type, and several are named", "name one")
    if tuple(options.regions) != (match[1],):
        raise UserError(f"the training plan is in {match[1]}", f"give --region {match[1]}")


def _check_queue(options: Options) -> None:
    if options.queue is None:
        for name in ("priority", "share", "retries"):
            if getattr(options, name) is not None:
                raise UserError(f"{OPTIONS[name].flag} is for a queue of AWS Batch", "add --queue NAME")
        return
    if not QUEUE.fullmatch(options.queue):
        raise UserError(
            f"--queue {options.queue!r} cannot be the name of a queue",
            "give its name, not its ARN: `aws batch describe-job-queues` lists yours",
        )
    if options.share is not None and not _SHARE.fullmatch(options.share):
        raise UserError(
            f"--share {options.share!r} cannot be the name of a share", "give at most 255 letters and digits"
        )
    for name, most in (("priority", 9999), ("retries", 9)):
        number = getattr(options, name)
        if number is not None and not 0 <= number <= most:
            raise UserError(f"{OPTIONS[name].flag} is {number}", f"AWS Batch takes 0 to {most}")


def _check_block(options: Options) -> None:
    if options.purchase != "capacity-block":
        for name in ("reservation", "block_fee_usd"):
            if getattr(options, name) is not None:
                flag = OPTIONS[name].flag
                raise UserError(f"{flag} is for EC2's capacity blocks", "add --purchase capacity-block")
        return
    if options.placement_groups:
        raise UserError(
            "a capacity block's instances stand together by themselves, and take no placement group",
            "leave out --placement-group",
        )
    if options.reservation is None:
        raise UserError(
            "no capacity block is named",
            "add --reservation cr-...; `aws ec2 describe-capacity-blocks` lists yours (fastlaunch buys none)",
        )
    if not _RESERVATION.fullmatch(options.reservation):
        raise UserError(
            f"--reservation {options.reservation!r} is not the id of a reservation",
            "give one such as cr-0a1b2c3d",
        )
    for what, names in (("instance type", options.instances), ("region", options.regions)):
        if len(names) > 1:
            raise UserError(f"a capacity block has one {what}, and several are named", "name one")


def _check_limits(options: Options) -> None:
    if options.placement_groups and options.num_nodes == 1:
        raise UserError("--placement-group is for several nodes", "add --num-nodes, or leave it out")
    if options.max_price_usd is not None and options.purchase != "spot":
        raise UserError("--max-price is the most that is paid for spot", "add --purchase spot")
    if options.max_price_usd is not None and options.max_price_usd < 0.001:
        raise UserError(f"--max-price is {options.max_price_usd:g}", "EC2 takes $0.001 per hour or more")
    if options.service == "sagemaker" and options.max_minutes > MAX_TRAINING_MINUTES:
        raise UserError(
            f"--max-hours is {options.max_minutes} min, and SageMaker ends every job after 28 days",
            "give 28d or less",
        )
    if not MIN_MINUTES <= options.max_minutes <= MAX_MINUTES:
        raise UserError(
            f"--max-hours is {options.max_minutes} min",
            f"give {MIN_MINUTES}min (booting, pulling the image, saving) to 30d",
        )
    if options.idle_timeout_s is not None and options.idle_timeout_s >= options.max_minutes * 60:
        raise UserError(
            f"--idle-timeout is {options.idle_timeout_s / 60:g} min, and --max-hours ends everything after "
            f"{options.max_minutes} min",
            "give a shorter --idle-timeout",
        )


def _check_image(options: Options) -> None:
    if options.image and options.base_image:
        raise UserError("--image and --base-image name two images", "give one of the two")
    if options.image and not _IMAGE.fullmatch(options.image):
        raise UserError(
            f"{options.image!r} is not an image by its digest",
            "give REGISTRY/REPOSITORY@sha256:..., as `fastlaunch build --push` ends with",
        )


def settings_with(settings: Settings, options: Options) -> Settings:
    """Return the settings with the given options in place of the config file's entries for their regions.

    Bucket, subnets, security and placement groups belong to one region. Raises UserError where several are
    allowed.
    """
    regions = options.regions
    names = {field.name for field in fields(RegionSettings)} & OPTIONS.keys()
    changes = {name: value for name in OPTIONS if name in names and (value := getattr(options, name))}
    for name in ("subnets", "placement_groups"):
        if name in changes:
            changes[name] = _by_zone(options, name)
    regional = [name for name in changes if name not in ("instance_profile", "role")]
    if len(regions) > 1 and regional:
        raise UserError(
            f"{OPTIONS[regional[0]].flag} belongs to one region, and {len(regions)} are allowed",
            "give one --region, or say it for each region under `aws` in the config file",
        )
    if not changes:
        return settings
    changed = {name: replace(settings.region_settings(name), **changes) for name in regions}
    for name, region_settings in changed.items():
        if problem := misfit(name, region_settings):
            raise UserError(f"for {name}, {problem}", "correct the option, or the config file")
    return replace(settings, aws={**settings.aws, **changed})


def _by_zone(options: Options, name: str) -> dict[str, str]:
    flag = OPTIONS[name].flag
    by_zone = {zone.strip(): value.strip() for zone, value in given_pairs(options, name).items()}
    for zone, value in by_zone.items():
        if not value:
            raise UserError(
                f"{flag} '{zone}=' is not {OPTIONS[name].metavar}", f"give one such as {_EXAMPLES[name]}"
            )
        if not any(zone.startswith(region) and zone != region for region in options.regions):
            raise UserError(
                f"{flag}: {zone} is no zone of {' or '.join(options.regions)}", f"give --region {zone[:-1]}"
            )
    return by_zone

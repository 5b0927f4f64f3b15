"""The options of `submit` and `sweep` as keyword arguments, and what becomes of those for AWS."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from difflib import get_close_matches
from typing import Any, TypedDict, get_type_hints

from fastlaunch.core.errors import UserError
from fastlaunch.core.settings import Settings, misfit
from fastlaunch.core.units import join_list, parse_batch_size, parse_nproc, split_names
from fastlaunch.jobs.options import CloudOptions, option_of
from fastlaunch.jobs.scripts import split_command

#: Several, or one, or some with commas.
Names = str | Sequence[str]
#: KEY=VALUE each, or values by key.
Pairs = str | Sequence[str] | Mapping[str, Any]


class Training(TypedDict, total=False):
    """What to train and how, and what is bought: fields of the options of `submit --help`, by their units."""

    command: Names | None
    lists: Pairs
    baseline: str | None
    hang_timeout_s: float | None
    nproc: int | str | None
    recipes: Names
    overrides: Pairs
    workload: str | None
    workload_arguments: Pairs
    memory_budget: int | None
    steps: int | None
    epochs: int | None
    max_rounds: int | None
    seed: int
    data: str | None
    num_workers: int | None
    checkpoint_every: int
    eval_every: int | None
    step_profile: bool
    model: str | None
    tokenizer: str | None
    sequence_length: int | None
    num_nodes: int
    allow_tcp: bool
    purchase: str
    max_price_usd: float | None
    max_minutes: int
    account_timer: bool
    max_replacements: int
    image: str | None
    base_image: str | None
    tags: Pairs
    secrets: Pairs
    variables: Pairs
    requirements: str | None
    requirements_from_index: bool
    inputs: Pairs
    bucket: str | None
    instance_profile: str | None
    role: str | None
    subnets: Pairs
    security_groups: Names
    placement_groups: Pairs
    local: bool
    backend: str | None
    instances: Names | None
    regions: Names | None
    max_cost_usd: float | None


class SubmitArguments(Training, total=False):
    """The options of `submit`."""

    experiment: str | None
    batch_size: int | str | None
    repeats: int
    until_resolved: bool
    add_to: str | None
    detach: bool
    reservation: str | None
    block_fee_usd: float | None
    training_plan: str | None
    container: bool


class SweepArguments(Training, total=False):
    """The options of `sweep`."""

    batch_sizes: int | str | Sequence[int | str]
    repeats: int | None
    parallel: int | None
    until_best: bool


#: Several of these stand in one text, with commas.
_NAMES = ("recipes", "instances", "regions", "batch_sizes")
#: Fields that hold a count or a word, and what reads one that is written as text, as in its option.
_COUNTS_OR_WORDS = {"nproc": parse_nproc, "batch_size": parse_batch_size, "batch_sizes": parse_batch_size}
#: A field of several texts.
_TEXTS = frozenset(
    name
    for name, kind in (Training.__annotations__ | SweepArguments.__annotations__).items()
    if kind in (Names, Names | None, Pairs) or name == "batch_sizes"
)


def check_truths(function: str, **given: Any) -> None:
    """Raise TypeError for one that is neither True nor False: a text such as `no` would count as yes."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise TypeError(f"{function}(): {name} is {value!r}, and takes bool")


def arguments(given: Mapping[str, Any], kind: type, *, function: str) -> dict[str, Any]:
    """Return the arguments as the dataclasses of options have them. kind: the TypedDict of the function's.

    Raises TypeError for one that the function does not have, or of another type.
    """
    allowed = get_type_hints(kind)
    # What it is called where it is typed.
    typed = {option_of(field).lstrip("-").replace("-", "_"): field for field in allowed}
    for name, value in given.items():
        if name not in allowed:
            near = [typed[name]] if name in typed else get_close_matches(name, allowed, n=1)
            hint = f": {near[0]}?" if near else f"; help(fastlaunch.{kind.__name__}) lists them"
            raise TypeError(f"{function}() has no argument {name!r}{hint}")
        # A whole number is a float as well, and to Python a truth value is one, too.
        is_amount = allowed[name] == float | None
        expected = allowed[name] | int if is_amount else allowed[name]
        is_truth = isinstance(value, bool) and expected is not bool
        if name not in _TEXTS and (is_truth or not isinstance(value, expected)):
            kinds = getattr(expected, "__name__", None) or str(expected)
            raise TypeError(f"{function}(): {name} is {value!r}, and takes {kinds}")
        if is_amount and value is not None and not 0 < value < math.inf:
            raise UserError(f"{name} is {value!r}", "give a number above 0")
    return {
        name: _texts(name, value) if name in _TEXTS and value is not None else _read(name, value)
        for name, value in given.items()
    }


def _read(name: str, value: Any) -> Any:
    """Return the count or word that stands in a text; any other value as it is."""
    return _COUNTS_OR_WORDS[name](value) if name in _COUNTS_OR_WORDS and isinstance(value, str) else value


def _texts(name: str, value: Any) -> tuple[Any, ...]:
    """Return what a field of several texts holds, of whatever says it."""
    if isinstance(value, str) and name == "command":
        return split_command(value)
    if isinstance(value, str) or (isinstance(value, int) and name == "batch_sizes"):
        value = (value,)
    if not isinstance(value, Iterable):
        raise TypeError(f"{name} is {value!r}, and takes text, or several")
    if isinstance(value, Mapping):
        join = join_list if name == "lists" else ",".join
        return tuple(
            f"{key}={join(map(str, each)) if isinstance(each, list | tuple) else each}"
            for key, each in value.items()
        )
    if name in _NAMES:
        parts = (split_names(each) if isinstance(each, str) else (each,) for each in value)
        return tuple(_read(name, part) for several in parts for part in several)
    return tuple(map(str, value))


def command_line(command: str, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the words of the command line that says the same as these arguments."""
    words = [command]
    for name, value in given.items():
        option = option_of(name)
        if name == "command" or value is None or (value is False and name != "account_timer"):
            continue
        if isinstance(value, bool):
            words += [option] if value is not (name == "account_timer") else []
        elif name in _NAMES:
            words += [option, ",".join(map(str, value))] if value else []
        elif isinstance(value, tuple):
            words += [word for text in value for word in (option, text)]
        else:
            words += [option, _in_units(name, value)]
    return (*words, *(("--", *given["command"]) if given.get("command") is not None else ()))


def _in_units(name: str, value: object) -> str:
    """Return a value as it is typed: `90min`, `1.5GiB`, `12.5`."""
    if name == "memory_budget" and isinstance(value, int):
        return f"{value / 2**30!r}GiB".replace(".0GiB", "GiB")
    text = str(value).removesuffix(".0")
    return f"{text}min" if name == "max_minutes" else text


def take_fields(values: dict[str, Any], of: type) -> dict[str, Any]:
    """Move the values that are fields of a dataclass out of `values`, and return them."""
    names = {field.name for field in fields(of)} & values.keys()
    return {name: values.pop(name) for name in names}


#: What does here what an option does on AWS.
_HERE = {
    "requirements": "a script runs in the Python that is here: pip install -r FILE",
    "inputs": "name a folder that is here: FASTLAUNCH_INPUT_NAME=FOLDER fastlaunch submit --local ...",
}


def check_local(values: Mapping[str, Any], *, used: Collection[str]) -> None:
    """Raise UserError if one of these options for AWS was given. used: those that count here as well."""
    defaults = {field.name: field.default for field in fields(CloudOptions)}
    for name, value in values.items():
        if value not in (None, (), defaults.get(name)) and name not in used:
            option = option_of(name)
            hint = _HERE.get(name, f"leave {option} out")
            raise UserError(f"{option} is for AWS, and this trains here", hint)


#: Options of one backend alone, and what to do instead on the other.
_EC2_ONLY = {
    "instance_profile": "give --role ARN",
    "subnets": "leave it out; `sagemaker_subnets` in the config file names those of jobs",
    "security_groups": "leave it out; `sagemaker_security_groups` in the config file names those of jobs",
    "placement_groups": "leave it out: SageMaker places the nodes of a job by itself",
}
_SAGEMAKER_ONLY = {"role": "give --instance-profile NAME, or --backend sagemaker"}


def check_backend(region_fields: Mapping[str, Any], cloud: CloudOptions) -> None:
    """Raise UserError for an option that means nothing to the backend."""
    service, refused = ("EC2", _EC2_ONLY) if cloud.backend == "sagemaker" else ("SageMaker", _SAGEMAKER_ONLY)
    for name, hint in refused.items():
        if region_fields.get(name):
            raise UserError(f"{option_of(name)} is for {service}", hint)
    if not region_fields.get("placement_groups"):
        return
    if cloud.purchase == "capacity-block":
        raise UserError(
            "a capacity block's instances stand together by themselves, and take no placement group",
            "leave out --placement-group",
        )
    if cloud.num_nodes == 1:
        raise UserError("--placement-group is for several nodes", "add --num-nodes, or leave it out")


def settings_with(settings: Settings, region_fields: Mapping[str, Any], regions: tuple[str, ...]) -> Settings:
    """Return the settings with these fields, where given, in place of the config file's for `regions`.

    Bucket, subnets, security and placement groups belong to one region. Raises UserError where several are
    allowed.
    """
    changes: dict[str, Any] = {name: value for name, value in region_fields.items() if value}
    for name, (value, example) in _BY_ZONE.items():
        if name in changes:
            changes[name] = _by_zone(option_of(name), changes[name], regions, value=value, example=example)
    of_one_region = [name for name in changes if name not in ("instance_profile", "role")]
    if len(regions) > 1 and of_one_region:
        raise UserError(
            f"{option_of(of_one_region[0])} belongs to one region, and {len(regions)} are allowed",
            "give one --region, or say it for each region under `aws` in the config file",
        )
    if not changes:
        return settings
    changed = {name: replace(settings.region_settings(name), **changes) for name in regions}
    for name, region_settings in changed.items():
        if problem := misfit(name, region_settings):
            raise UserError(f"for {name}, {problem}", "correct the option, or the config file")
    return replace(settings, aws={**settings.aws, **changed})


#: Options given as ZONE=value: what the value is called, and an example.
_BY_ZONE = {"subnets": ("ID", "subnet-0a1b2c"), "placement_groups": ("NAME", "fastlaunch-us-east-1a")}


def _by_zone(
    option: str, texts: tuple[str, ...], regions: tuple[str, ...], *, value: str, example: str
) -> dict[str, str]:
    by_zone: dict[str, str] = {}
    for text in texts:
        zone, separator, name = (part.strip() for part in text.partition("="))
        if not (zone and separator and name):
            raise UserError(
                f"{option} {text!r} is not ZONE={value}", f"give one such as us-east-1a={example}"
            )
        if not any(zone.startswith(region) and zone != region for region in regions):
            raise UserError(
                f"{option}: {zone} is no zone of {' or '.join(regions)}", f"give --region {zone[:-1]}"
            )
        if zone in by_zone:
            raise UserError(f"{option}: {zone} is given twice", "give one per zone")
        by_zone[zone] = name
    return by_zone

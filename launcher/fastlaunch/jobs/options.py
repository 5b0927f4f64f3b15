"""The options of `submit` and `sweep`, each declared once, as a field of `Options`.

The options of the command line and their headings, the Python keywords, the job file with its schema and the
table in docs/reference.md are made from these fields. `jobs.option_rules` says what cannot be had together.
"""

import math
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import partial
from typing import Any, get_type_hints

from fastlaunch.core.errors import UserError
from fastlaunch.core.ownership import DEFAULT_MOST_ROUNDS, FIRST_LOOK, MAX_REPLACEMENTS, MOST_ROUNDS
from fastlaunch.core.units import (
    DEFAULT_REGION,
    join_list,
    parse_batch_size,
    parse_count,
    parse_hours,
    parse_nproc,
    parse_seconds,
    parse_usd,
    split_names,
)

#: AWS's services as the user knows them, by the backend that uses them.
SERVICES = {"ec2": "EC2", "sagemaker": "SageMaker"}
BACKENDS = tuple(SERVICES)
#: What SageMaker puts before EC2's name of an instance type.
ML = "ml."

#: The headings of `submit --help`, in order.
HEADINGS = TRAIN, SCRIPT, WHERE, SPEND, NETWORK, SAGEMAKER, ADVANCED = (
    *("Train", "Script", "Where", "Spend", "Network", "SageMaker", "Advanced"),
)
#: Words that only a shell understands.
_OF_SHELLS = ("&&", "||", "|", ";", "&", ">", ">>", "<")
#: Where a run trains: on this machine, in containers here, on EC2, on SageMaker.
PLACES = ("local", "container", "ec2", "sagemaker")
_AWS = BACKENDS
_AWS_AND_CONTAINER = ("container", *BACKENDS)
#: The commands that may have an option.
_SUBMIT, _SWEEP, _BOTH = ("submit",), ("sweep",), ("submit", "sweep")
_AND_DOCTOR = (*_BOTH, "doctor")


@dataclass(frozen=True, kw_only=True)
class Option:
    """How one field of `Options` is typed, and where it means something."""

    flag: str
    #: None for a switch.
    metavar: str | None
    heading: str
    help: str
    default: Any
    #: Reads the text of one value; None where the text is the value.
    parse: Callable[[str], Any] | None = None
    #: Whether a number has to be more than 0, and not just 0 or more.
    above_zero: bool = False
    #: Writes a value as it is typed.
    write: Callable[[Any], str] = str
    #: Whether commas separate several values in one text.
    commas: bool = False
    #: Whether it may be repeated, and whether its values are NAME=VALUE.
    repeated: bool = False
    pairs: bool = False
    #: Makes the text of a pair whose value is a list.
    join: Callable[[Iterable[str]], str] = ",".join
    commands: tuple[str, ...] = _BOTH
    #: Those of PLACES where it means something, and what to type elsewhere.
    places: tuple[str, ...] = PLACES
    elsewhere: str | None = None
    #: True for an option of scripts of the user's own alone, False for one of our workloads alone.
    for_script: bool | None = None
    #: Whether `--help` lists it; `--help-all` lists all.
    is_usual: bool = False

    @property
    def is_switch(self) -> bool:
        return self.metavar is None

    @property
    def key(self) -> str:
        """The name in a job file."""
        return self.flag.lstrip("-")

    @property
    def is_of_several(self) -> bool:
        return self.commas or self.repeated

    def read(self, text: str) -> Any:
        """Return the value that a text stands for, or several that commas separate."""
        if not self.commas:
            value = self.parse(text) if self.parse else text
            self.check(value, text)
            return value
        if not (names := split_names(text)):
            raise UserError(f"{text!r} names nothing", "give a name, or leave it out")
        return tuple(map(self.parse, names)) if self.parse else names

    def check(self, value: Any, typed: object) -> None:
        """Raise UserError for a number that is too small, infinite or NaN. typed: what it was read from."""
        if not isinstance(value, int | float) or self.is_switch:
            return
        if not (0 < value < math.inf if self.above_zero else 0 <= value < math.inf):
            least = "above 0" if self.above_zero else "0 or more"
            raise UserError(f"{typed!r} is not {least}", f"give a number, {least}")

    def gather(self, value: Any) -> tuple[Any, ...]:
        """Return the values in a text, in several texts, or in a mapping where they are NAME=VALUE.

        Raises TypeError, with what the option takes, for anything else.
        """
        if isinstance(value, Mapping) and self.pairs:
            return tuple(
                f"{name}={self.join(map(str, item)) if isinstance(item, list | tuple) else item}"
                for name, item in value.items()
            )
        if isinstance(value, str) or (isinstance(value, int) and self.parse):
            value = (value,)
        if not isinstance(value, Iterable) or isinstance(value, Mapping):
            raise TypeError("text, or several")
        if not self.commas:
            return tuple(map(str, value))
        items = tuple(value)
        # To Python a truth value is a number, too.
        if not all(isinstance(item, str) or (self.parse and type(item) is int) for item in items):
            raise TypeError("text, or several")
        values = [part for item in items for part in (self.read(item) if isinstance(item, str) else (item,))]
        # A repeated number changes nothing. A repeated name is refused where it is looked up.
        return tuple(dict.fromkeys(values) if self.parse else values)

    def words(self, value: Any) -> list[str]:
        """Return the words of the command line for a value."""
        if value is None or (self.is_switch and value is self.default):
            return []
        if self.is_switch:
            return [self.flag]
        if self.commas:
            return [self.flag, ",".join(map(str, value))] if value else []
        if self.repeated:
            return [word for text in value for word in (self.flag, text)]
        return [self.flag, f"{value}".removesuffix(".0") if isinstance(value, float) else self.write(value)]


def _parse_swept_batch_size(text: str) -> int | str:
    size = parse_batch_size(text)
    if size == "auto-each":
        raise UserError("auto-each is not for a sweep", "give numbers and auto, such as auto,64")
    return size


#: Reads the text of a value, by the metavar. Values of other metavars are texts.
_PARSERS: Mapping[str, Callable[[str], Any]] = {
    "COUNT": parse_count,
    "H": parse_hours,
    "K": parse_count,
    "N": parse_count,
    "N|auto": parse_batch_size,
    "N|auto[,N]": _parse_swept_batch_size,
    "N|gpu": parse_nproc,
    "S": parse_seconds,
    "TOKENS": parse_count,
    "USD": parse_usd,
}
_ABOVE_ZERO = ("H", "K", "S", "TOKENS", "USD")


def _option(heading: str, usage: str, help: str, *, default: Any = None, **how: Any) -> Any:
    """Declare a field. usage: `--flag METAVAR`, or the flag of a switch."""
    flag, _, metavar = usage.partition(" ")
    if not metavar:
        default = bool(default)
    elif how.keys() & {"pairs", "repeated", "commas"}:
        default = ()
    how = {"parse": _PARSERS.get(metavar), "above_zero": metavar in _ABOVE_ZERO, **how}
    how["repeated"] = bool(how.keys() & {"pairs", "repeated"})
    option = Option(flag=flag, metavar=metavar or None, heading=heading, help=help, default=default, **how)
    return field(default=default, metadata={"option": option})


_train, _script = partial(_option, TRAIN, for_script=False), partial(_option, SCRIPT)
_where = partial(_option, WHERE)
_spend, _network = partial(_option, SPEND, places=_AWS), partial(_option, NETWORK, places=("ec2",))
_sagemaker, _advanced = partial(_option, SAGEMAKER), partial(_option, ADVANCED)
#: For a job in a queue of AWS Batch.
_queued = partial(
    _sagemaker,
    commands=_AND_DOCTOR,
    places=("sagemaker",),
    elsewhere="add --queue NAME, which is for SageMaker",
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What was typed for `submit` or `sweep`, units in the names. What is None or empty was not given."""

    #: The words of a script of the user's own, in place of workload and recipe; None without `--`.
    command: tuple[str, ...] | None = None

    recipes: tuple[str, ...] = _train(
        "--recipe NAME",
        "Train with this recipe; several with commas, or repeated. `fastlaunch recipes` lists them."
        "  [default: bf16]",
        repeated=True,
        commas=True,
        is_usual=True,
    )
    workload: str | None = _train(
        "--workload NAME", "Train this workload; `fastlaunch workloads` lists them.", is_usual=True
    )
    workload_arguments: tuple[str, ...] = _train(
        "--set-workload KEY=VALUE",
        "Call the function of ./file.py:function with this argument. May be repeated.",
        pairs=True,
    )
    experiment: str | None = _train(
        "--experiment NAME",
        "Repeat a published experiment: its workloads, recipes and batch sizes. "
        "`fastlaunch experiments` lists them.",
        commands=_SUBMIT,
    )
    batch_size: int | str | None = _train(
        "--batch-size N|auto",
        "Train on this many samples per GPU and step; auto finds the most that fit all recipes, "
        "auto-each the most that fit each.",
        commands=_SUBMIT,
        is_usual=True,
    )
    batch_sizes: tuple[int | str, ...] = _train(
        "--batch-size N|auto[,N]",
        "Train with each of these, in samples per GPU; auto is the most that fit all recipes on the type "
        "with the least GPU memory, searched for first.",
        commas=True,
        commands=_SWEEP,
        is_usual=True,
    )
    steps: int | None = _train(
        "--steps COUNT",
        "Take this many optimizer steps per run.  [default: 200, or the experiment's]",
        is_usual=True,
    )
    epochs: int | None = _train(
        "--epochs COUNT", "Train for this many passes over the data instead of --steps."
    )
    repeats: int | None = _train(
        "--repeats COUNT",
        "Run each recipe or variant this often, interleaved.  [default: 1]",
        for_script=None,
    )
    until_resolved: bool = _train(
        "--until-resolved",
        "Run rounds until every recipe's verdict is settled; a settled one stops.",
        commands=_SUBMIT,
        for_script=None,
        is_usual=True,
    )
    max_rounds: int | None = _train(
        "--max-rounds N",
        f"Until all is settled, run at most this many rounds, {FIRST_LOOK} to {MOST_ROUNDS}."
        f"  [default: {DEFAULT_MOST_ROUNDS}]",
        for_script=None,
    )
    add_to: str | None = _train(
        "--add-to SUBMISSION",
        "Make these more runs of that submission: `compare` shows both. It prints the command.",
        commands=_SUBMIT,
        for_script=None,
    )
    seed: int = _train("--seed COUNT", "Seed the weights and the order of the data.  [default: 0]", default=0)
    data: str | None = _train(
        "--data SOURCE",
        "Read synthetic, loader, folder:PATH or file:PATH; a file here travels to AWS.  "
        "[default: synthetic, or the experiment's]",
    )
    model: str | None = _train(
        "--model PATH|HUB_ID", "Train this language model: a folder, or a name on the hub."
    )
    tokenizer: str | None = _train(
        "--tokenizer PATH|HUB_ID", "Split text with this tokenizer.  [default: the model's, else bytes]"
    )
    sequence_length: int | None = _train(
        "--sequence-length TOKENS", "Cut text into samples of this many tokens."
    )
    checkpoint_every: int = _train(
        "--checkpoint-every COUNT", "Save a checkpoint every so many steps.  [default: none]", default=0
    )
    eval_every: int | None = _train(
        "--eval-every COUNT",
        "Evaluate on held-out data every so many steps, and at the end.  [default: never]",
    )
    step_profile: bool = _train(
        "--step-profile",
        "After the last step, profile a few more: where a step's time goes. A bare --profile does, too.",
    )

    lists: tuple[str, ...] = _script(
        "-L NAME=A,B",
        "Run COMMAND with each of these in place of {NAME}; several -L make every combination. Write a "
        r"comma in a value as \, or in brackets.",
        pairs=True,
        join=join_list,
        for_script=True,
        is_usual=True,
    )
    baseline: str | None = _script(
        "--baseline NAME=A", "Compare the variants with this one.  [default: the first]", for_script=True
    )
    nproc: int | str | None = _script(
        "--nproc N|gpu",
        "Start this many processes, a Python script under torchrun; gpu is one per GPU."
        "  [default: one per GPU, one on a CPU; a script as it is]",
    )
    hang_timeout_s: float | None = _script(
        "--hang-timeout S",
        "End a script without a step for this long; 10min works too.  [default: never]",
        for_script=True,
    )
    requirements: str | None = _script(
        "--requirements FILE",
        "Resolve this file of pip's into wheels here, and install them before the job starts.",
        places=_AWS,
        elsewhere="a script runs in the Python that is here: pip install -r FILE",
    )
    requirements_from_index: bool = _script(
        "--requirements-from-index",
        "Let the machine's own pip resolve that file, from its index.",
        places=_AWS,
    )
    inputs: tuple[str, ...] = _script(
        "--input NAME=s3://...",
        "Fetch this folder of S3 before the clock starts; $FASTLAUNCH_INPUT_NAME says where it is. "
        "May be repeated.",
        pairs=True,
        places=_AWS,
        elsewhere="name a folder that is here: FASTLAUNCH_INPUT_NAME=FOLDER fastlaunch submit --local ...",
    )

    local: bool = _where("--local", "Train on this machine: short for --backend local.", is_usual=True)
    backend: str | None = _where(
        "--backend NAME",
        "Train on local, ec2 or sagemaker; --instance implies ec2, or sagemaker with ml. before it.",
        commands=_AND_DOCTOR,
    )
    instances: tuple[str, ...] = _where(
        "--instance TYPE[,TYPE]",
        "Train on this instance type; on the next where there is no capacity (`sweep` trains on each). "
        "With --local: rehearse for it here.",
        commas=True,
        commands=_AND_DOCTOR,
        is_usual=True,
    )
    regions: tuple[str, ...] = _where(
        "--region REGION[,REGION]",
        "Buy it in this region, else in the next.  [default: yours, or us-east-1]",
        commas=True,
        commands=_AND_DOCTOR,
        places=_AWS_AND_CONTAINER,
    )
    num_nodes: int = _where(
        "--num-nodes COUNT",
        "Train one job on this many machines.  [default: 1]",
        above_zero=True,
        default=1,
        commands=_AND_DOCTOR,
        places=_AWS_AND_CONTAINER,
    )

    until_best: bool = _spend(
        "--until-best",
        "Look for the cell that buys the most samples per dollar: stop a cell once it cannot be the best, "
        "and leave out an instance type that cannot have it.",
        commands=_SWEEP,
        places=PLACES,
        is_usual=True,
    )
    parallel: int | None = _spend(
        "--parallel K",
        "Train on up to K instance types at once, as far as their ceilings fit.  [default: 1]",
        commands=_SWEEP,
    )
    max_cost_usd: float | None = _spend(
        "--max-cost USD",
        "Refuse a submission that may cost more.  [default: `max_cost` of the config file]",
        commands=("submit", "sweep", "resume"),
        is_usual=True,
    )
    max_minutes: int = _spend(
        "--max-hours H",
        "Turn the machine off after this long; 90min works too.  [default: 2]",
        write=lambda minutes: f"{minutes}min",
        default=120,
        is_usual=True,
    )
    idle_timeout_s: float | None = _spend(
        "--idle-timeout S",
        "End a run whose GPUs do nothing, and that records no step, for this long; 30min works too."
        "  [default: never]",
        commands=("submit", "sweep"),
    )
    purchase: str = _spend(
        "--purchase OPTION",
        "Buy on-demand, spot (which AWS may take back at two minutes' notice) or capacity-block."
        "  [default: on-demand]",
        default="on-demand",
        commands=_AND_DOCTOR,
        is_usual=True,
    )
    max_price_usd: float | None = _spend(
        "--max-price USD",
        "Pay at most this for an hour of EC2 spot.",
        commands=_AND_DOCTOR,
        places=("ec2",),
        elsewhere="leave it out: AWS sets the price of managed spot; --max-cost limits the whole",
    )
    reservation: str | None = _spend(
        "--reservation cr-ID",
        "Run in this capacity block, which you have bought before, once it begins.",
        commands=("submit", "doctor"),
        places=("ec2",),
        elsewhere="leave it out: SageMaker's own are training plans, given by --training-plan",
    )
    block_fee_usd: float | None = _spend(
        "--block-fee USD",
        "Say what that block cost up front.  [default: the price file's]",
        commands=("submit", "doctor"),
        places=("ec2",),
        elsewhere="leave it out: SageMaker's own are training plans, given by --training-plan",
    )
    max_replacements: int = _spend(
        "--max-replacements N",
        "Replace a machine that is lost or has a faulty GPU at most this often, within --max-hours and the"
        " ceiling."
        f"  [default: {MAX_REPLACEMENTS}]",
        default=MAX_REPLACEMENTS,
    )
    detach: bool = _spend(
        "--detach",
        "Return once it runs. Timers stop a machine that hangs or is forgotten.",
        commands=("submit", "resume"),
        is_usual=True,
    )
    account_timer: bool = _spend(
        "--no-account-timer",
        "Make no schedule in the account that ends the machine. Its own timer does.",
        default=True,
        commands=("submit", "sweep", "resume"),
    )

    subnets: tuple[str, ...] = _network(
        "--subnet ZONE=ID",
        "Try this subnet; repeat for more, in order.  [default: the config's, else EC2's]",
        pairs=True,
        elsewhere="leave it out; `sagemaker_subnets` in the config file names those of jobs",
    )
    security_groups: tuple[str, ...] = _network(
        "--security-group ID",
        "Put the machine into this group; may be repeated.  [default: the config's, else the VPC's]",
        repeated=True,
        elsewhere="leave it out; `sagemaker_security_groups` in the config file names those of jobs",
    )
    placement_groups: tuple[str, ...] = _network(
        "--placement-group ZONE=NAME",
        "Keep several nodes close together in this group.  [default: the config's]",
        pairs=True,
        elsewhere="leave it out: SageMaker places the nodes of a job by itself",
    )
    allow_tcp: bool = _network(
        "--allow-tcp",
        "Let several nodes talk without EFA. The run records it.",
        commands=_AND_DOCTOR,
        places=_AWS,
    )

    role: str | None = _sagemaker(
        "--role ARN",
        "Run a SageMaker job with this role.  [default: the config's]",
        places=("sagemaker",),
        elsewhere="give --instance-profile NAME, or --backend sagemaker",
    )
    training_plan: str | None = _sagemaker(
        "--training-plan ARN",
        "Run in this reserved capacity of SageMaker.",
        commands=("submit", "doctor"),
        places=("sagemaker",),
        elsewhere="add --backend sagemaker; on EC2 it is --purchase capacity-block --reservation cr-...",
    )
    queue: str | None = _sagemaker(
        "--queue NAME",
        "Put the job into this queue of AWS Batch, which starts it in turn; waiting costs nothing.",
        commands=_AND_DOCTOR,
        places=("sagemaker",),
        elsewhere="give SageMaker's name of the type: --instance ml.p5.48xlarge",
    )
    priority: int | None = _queued(
        "--priority N", "In a queue: go before jobs of a lower priority, 0 to 9999.  [default: 0]"
    )
    share: str | None = _queued(
        "--share TEAM", "In a queue that shares fairly: take capacity from this share."
    )
    retries: int | None = _queued(
        "--retries COUNT",
        "In a queue: if SageMaker itself fails, start the job again, up to 9 times; the ceiling counts each."
        "  [default: 0]",
    )
    container: bool = _sagemaker(
        "--container",
        "With --local --backend sagemaker: rehearse the job in containers here, by the SageMaker SDK.",
        commands=_SUBMIT,
    )

    overrides: tuple[str, ...] = _advanced(
        "--set FIELD=VALUE",
        "Change a field of every recipe, such as compile_mode=max-autotune. May be repeated.",
        pairs=True,
        for_script=False,
    )
    num_workers: int | None = _advanced(
        "--num-workers COUNT",
        "Load that data with this many processes per GPU.  [default: a share of the cores, at most 12]",
        for_script=False,
    )
    tags: tuple[str, ...] = _advanced(
        "--tag KEY=VALUE",
        "Tag machines, volumes, network interfaces and training jobs; may be repeated."
        "  [default: the config's, and Owner]",
        pairs=True,
        places=_AWS,
    )
    secrets: tuple[str, ...] = _advanced(
        "--secret NAME=ARN",
        "Give jobs this secret or parameter as the variable NAME, read where they run; may be repeated.",
        pairs=True,
        places=_AWS,
    )
    variables: tuple[str, ...] = _advanced(
        "--env NAME=VALUE",
        "Give jobs this variable; may be repeated. It is stored as it is: for a password use --secret.",
        pairs=True,
        places=_AWS,
    )
    bucket: str | None = _advanced(
        "--bucket NAME",
        "Keep code, records and checkpoints in this bucket.  [default: the config's]",
        places=_AWS,
    )
    instance_profile: str | None = _advanced(
        "--instance-profile NAME",
        "Give the machine this profile.  [default: the config's]",
        places=("ec2",),
        elsewhere="give --role ARN",
    )
    base_image: str | None = _advanced(
        "--base-image TAG",
        "Use this container image of AWS.  [default: the newest]",
        places=_AWS_AND_CONTAINER,
    )
    image: str | None = _advanced(
        "--image URI@sha256:...",
        "Use this container image, made by `fastlaunch build`.",
        places=_AWS_AND_CONTAINER,
    )

    @property
    def service(self) -> str:
        """`local`, `ec2` or `sagemaker`, if the options do not contradict each other."""
        if self.local:
            return "local"
        is_ml = any(name.startswith(ML) for name in self.instances)
        return self.backend or ("sagemaker" if is_ml else "ec2")

    @property
    def rehearsed(self) -> str | None:
        """The instance type that this machine stands in for; None without one."""
        is_here = self.service == "local" and self.instances
        return self.instances[0].removeprefix(ML) if is_here else None

    @property
    def region(self) -> str:
        """The first region, or the default one."""
        return self.regions[0] if self.regions else DEFAULT_REGION

    @property
    def num_repeats(self) -> int:
        return 1 if self.repeats is None else self.repeats

    @property
    def planned_rounds(self) -> int | None:
        """The most rounds until all is settled; None without --until-resolved."""
        return (self.max_rounds or DEFAULT_MOST_ROUNDS) if self.until_resolved else None


#: By field, in the order of `--help`.
OPTIONS: Mapping[str, Option] = {
    field.name: field.metadata["option"] for field in fields(Options) if "option" in field.metadata
}


def options_of(command: str) -> dict[str, Option]:
    """Return the options of a command, by field."""
    return {name: option for name, option in OPTIONS.items() if command in option.commands}


def arguments(given: Mapping[str, Any], *, function: str) -> dict[str, Any]:
    """Return the arguments as the fields of `Options` hold them. function: `submit` or `sweep`.

    Raises TypeError for an argument that the function does not have, or that is of another type.
    """
    options, kinds = options_of(function), get_type_hints(Options)
    # Fields by what is typed on the command line.
    typed = {option.key.replace("-", "_"): name for name, option in options.items()}
    taken: dict[str, Any] = {}
    for name, value in given.items():
        if name == "command":
            taken[name] = _words(value)
        elif name not in options:
            near = [typed[name]] if name in typed else get_close_matches(name, options, n=1)
            hint = f": {near[0]}?" if near else f"; help(fastlaunch.{function.title()}Arguments) lists them"
            raise TypeError(f"{function}() has no argument {name!r}{hint}")
        elif value is not None or not options[name].is_of_several:
            try:
                taken[name] = _value(options[name], kinds[name], value)
            except TypeError as error:
                raise TypeError(f"{function}(): {name} is {value!r}, and takes {error}") from None
            except UserError as error:
                raise UserError(f"{name}: {error.message}", error.hint) from None
    return taken


def _value(option: Option, kind: Any, value: Any) -> Any:
    """Return a value of the field's type; a text is read as on the command line.

    Raises TypeError, with what the option takes, for a value of another type.
    """
    if option.is_of_several:
        return option.gather(value)
    # A whole number is a float as well, and Python takes a truth value for a number.
    expected = kind | int if kind == float | None else kind
    if (isinstance(value, bool) and kind is not bool) or not isinstance(value, expected):
        raise TypeError(getattr(expected, "__name__", str(expected)))
    option.check(value, value)
    return option.read(value) if isinstance(value, str) else value


def _words(command: Any) -> tuple[str, ...] | None:
    if command is None or isinstance(command, str):
        return None if command is None else split_command(command)
    if not isinstance(command, Iterable):
        raise TypeError(f"command is {command!r}, and takes text, or several")
    return tuple(map(str, command))


def command_line(command: str, given: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the words of the command line that says the same as these arguments."""
    options, script = options_of(command), given.get("command")
    words = [word for name, value in given.items() if name in options for word in options[name].words(value)]
    return (command, *words, *(("--", *script) if script is not None else ()))


def split_command(text: str) -> tuple[str, ...]:
    """Return the words of a command. Raises UserError for one that only a shell understands."""
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UserError(f"the command cannot be divided into words: {error}", "check its quotes") from None
    if meant := [word for word in words if word in _OF_SHELLS]:
        raise UserError(
            f"the command starts without a shell, to which {meant[0]} would mean something",
            "give words for a shell: [bash, -c, '...']",
        )
    return words

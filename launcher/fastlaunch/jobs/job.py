"""`Job`: one run to do. What really happened is a `Run`."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import PurePath
from typing import Any, Self

from fastlaunch.core.errors import UserError
from fastlaunch.core.units import DEFAULT_REGION
from fastlaunch_train.recipes.recipe import Recipe
from fastlaunch_train.records.contents import VARIABLE
from fastlaunch_train.workloads.registry import WorkloadInfo


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a run reads."""

    #: `synthetic`, `loader`, `folder:PATH` or `file:PATH`.
    data: str = "synthetic"
    #: Per GPU, to load the data; None for as many as the entrypoint chooses.
    num_workers: int | None = None
    #: For a language workload: a folder, or a name on the Hugging Face hub; None for its own.
    model: str | None = None
    tokenizer: str | None = None
    #: Tokens of a sample; None for the workload's own.
    sequence_length: int | None = None
    #: KEY=VALUE texts for the function that makes a workload of the user's own.
    workload_arguments: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How the machines are bought, and for how long."""

    #: One of `PURCHASE_OPTIONS`.
    purchase: str = "on-demand"
    #: Minutes that the machine may run in all, however many attempts it takes; None on this machine.
    max_minutes: int | None = None
    #: The most paid for an hour of spot; None for the on-demand price.
    max_price_usd: float | None = None
    #: Id of the capacity block to run in.
    reservation: str | None = None
    #: ARN of SageMaker's.
    training_plan: str | None = None
    #: A run is ended whose GPUs do nothing, and that records no step, for so long; None to let it be.
    idle_timeout_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Script:
    """A command of the user's own, which trains in place of a workload and a recipe of ours."""

    #: Its words, with `{NAME}` where the variant's text goes.
    command: tuple[str, ...]
    #: Texts by the names of `-L`, in their order.
    variant: tuple[tuple[str, str], ...] = ()
    #: Ranks on a node, under torchrun; None to run the command as it is.
    nproc: int | None = None
    #: Without a step for so long it is ended; None to let it be.
    hang_timeout_s: float | None = None
    #: Digests of the files that travel, by their path in the repository, and their commit, `-dirty` if they
    #: were changed since. The files of a script that runs here are read when it starts.
    files: tuple[tuple[str, str], ...] = ()
    commit: str | None = None

    @property
    def argv(self) -> tuple[str, ...]:
        """The command with the variant's texts in place; other braces stay."""
        texts = dict(self.variant)
        if not texts:
            return self.command
        names = re.compile("{(" + "|".join(map(re.escape, texts)) + ")}")
        return tuple(names.sub(lambda match: texts[match[1]], word) for word in self.command)

    @property
    def words(self) -> tuple[str, ...]:
        """The arguments of `python -m fastlaunch_train.script`, less `--output DIR`."""
        return (*self._options, "--", *self.argv)

    @property
    def typed(self) -> tuple[str, ...]:
        """What is typed for `submit` to run the command, its `{NAME}` in place, less the `-L`."""
        return (*self._options, "--", *self.command)

    @property
    def _options(self) -> list[str]:
        options = [] if self.nproc is None else ["--nproc", str(self.nproc)]
        return options + (
            [] if self.hang_timeout_s is None else ["--hang-timeout", f"{self.hang_timeout_s:g}"]
        )

    @property
    def label(self) -> str:
        """`amp=bf16 batch=32`, or `as is`."""
        return variant_label(dict(self.variant))

    def digest_under(self, name: str) -> str:
        """Return a digest of the command, wherever it was typed. name: of the script.

        It tells commands apart without revealing them, unless someone guesses one.
        """
        file = PurePath(name).name
        words = [file if PurePath(word).name == file else word for word in self.command]
        words[0] = PurePath(words[0]).name
        return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:8]

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `from_json`."""
        data = {**vars(self), "command": list(self.command), "variant": dict(self.variant)}
        contents = {"files": dict(self.files), "commit": self.commit}
        return {name: value for name, value in (data | contents).items() if value or name not in contents}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the script that `to_json` wrote."""
        pairs = {name: tuple(data.get(name, {}).items()) for name in ("variant", "files")}
        return cls(**{**data, "command": tuple(data["command"]), **pairs})


def variant_label(variant: Mapping[str, str]) -> str:
    """Return `amp=bf16 batch=32`; `as is` for a script that was not varied."""
    return " ".join(f"{name}={text}" for name, text in variant.items()) or "as is"


def names_variant(text: str, variant: Mapping[str, str]) -> bool:
    """Return whether `text` is the variant's label, or some of its `NAME=TEXT`, by blanks or commas."""
    parts = {f"{name}={value}" for name, value in variant.items()}
    typed = {part.replace(",", r"\,") for part in parts}
    named = (({*text.split()}, parts), ({*re.split(r"(?<!\\),", text)}, typed))
    return text == variant_label(variant) or any(words and words <= known for words, known in named)


#: Stands for what a script does, which is not known.
SCRIPT_RECIPE = Recipe(name="script", description="what the script does", precision="unknown")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to train a workload, wherever that is. `Job` explains the other fields."""

    workload: WorkloadInfo
    recipe: Recipe
    #: Samples per GPU, `auto` or `auto-each`, or None for the workload's own.
    batch_size: int | str | None
    steps: int | None
    epochs: int | None
    eval_every: int
    inputs: Inputs
    #: Ranks that it is meant for; None for one on every GPU.
    num_gpus: int | None = None
    #: Whether it is part of an experiment: then it is left out where it cannot run, and not refused.
    is_published: bool = False

    @property
    def name(self) -> str:
        """`te-fp8 on vit-huge at batch 128`, which tells it from other variants."""
        batch = "" if self.batch_size is None else f" at batch {self.batch_size}"
        return f"{self.recipe.label} on {self.workload.name}{batch}"


@dataclass(frozen=True, kw_only=True)
class Job:
    """Workload x recipe x batch size, or a script, on an instance type, with its limits."""

    #: For a script, its name.
    workload: str
    recipe: Recipe
    #: None for a workload of ours.
    script: Script | None = None
    #: Samples per GPU and step; None to let the entrypoint find the largest that fits.
    batch_size: int | None
    #: Labels of the recipes that this batch has to fit, in one order for all runs; empty for its own alone.
    fit: tuple[str, ...] = ()
    #: None where `epochs`, passes over the data, are given instead. How many steps those make is known when
    #: the workload is built, and stands in the record. A script has neither.
    steps: int | None
    epochs: int | None = None
    #: Ranks over all nodes; on a machine without a GPU, processes.
    num_gpus: int
    seed: int = 0
    #: Steps between checkpoints, and between evaluations; 0 for none.
    checkpoint_every: int = 0
    eval_every: int = 0
    #: Whether to profile a few steps after the last.
    step_profile: bool = False
    inputs: Inputs = Inputs()
    #: Id of the submission that it belongs to, and which of its rounds it is, from 1; None if not known.
    session: str | None = None
    round: int | None = None
    #: The most rounds of a submission that ends once its verdicts are settled; None for any other.
    max_rounds: int | None = None

    backend: str = "local"
    #: None for this machine.
    instance: str | None = None
    num_nodes: int = 1
    region: str = DEFAULT_REGION
    #: The container's, by digest; None for this machine.
    image: str | None = None
    #: Whether several nodes may do without EFA.
    allow_tcp: bool = False
    terms: Terms = Terms()

    def __post_init__(self) -> None:
        if self.script is None and (self.steps is None) == (self.epochs is None):
            raise UserError(
                f"a run of {self.steps} steps and {self.epochs} epochs", "give steps or epochs, one of them"
            )
        checks = (
            ("--batch-size", self.batch_size, 1, "1 or more, or auto"),
            ("--steps", self.steps, 1, "1 or more"),
            ("--epochs", self.epochs, 1, "1 or more"),
            ("--nproc", self.num_gpus, 1, "1 or more"),
            ("--num-nodes", self.num_nodes, 1, "1 or more"),
            ("--seed", self.seed, 0, "0 or more"),
            ("--num-workers", self.inputs.num_workers, 0, "0 or more"),
            ("--checkpoint-every", self.checkpoint_every, 0, "0 (none) or more steps"),
            ("--eval-every", self.eval_every, 0, "0 (none) or more steps"),
            ("--sequence-length", self.inputs.sequence_length, 2, "2 tokens or more"),
            ("--max-hours", self.terms.max_minutes, 1, "a minute or more"),
            ("--idle-timeout", self.terms.idle_timeout_s, 120, "two minutes or more"),
        )
        for what, value, least, allowed in checks:
            if value is not None and value < least:
                raise UserError(f"{what} is {value}", f"give {allowed}")
        if self.num_gpus % self.num_nodes:
            raise UserError(
                f"number of processes is {self.num_gpus} on {self.num_nodes} nodes",
                "give as many for every node",
            )
        max_price_usd = self.terms.max_price_usd
        if max_price_usd is not None and max_price_usd <= 0:
            raise UserError(f"--max-price is {max_price_usd:g}", "give more than 0")
        for option, name in (("--model", self.inputs.model), ("--tokenizer", self.inputs.tokenizer)):
            if name == "":
                raise UserError(f"{option} is empty", "give a folder, or a name on the hub")

    @property
    def label(self) -> str:
        """The recipe's or the script's label, which tells it from other jobs of its workload."""
        return self.script.label if self.script else self.recipe.label

    @property
    def length(self) -> str:
        """`200 steps`, or `3 epochs`."""
        number, unit = (self.steps, "step") if self.steps is not None else (self.epochs, "epoch")
        return f"{number:,} {unit}{'' if number == 1 else 's'}"

    @property
    def without_seed(self) -> Self:
        """The same job with seed 0, in no round: equal for runs that repeat each other."""
        return replace(self, seed=0, round=None)

    def to_json(self) -> dict[str, Any]:
        """Return flat plain data for `from_json`, the recipe with all that it resolved to."""
        data = {**vars(self), **vars(self.inputs), **vars(self.terms), "recipe": self.recipe.to_record()}
        left_out = {*_TOPICS, *(("script",) if self.script is None else _OF_TRAINING)}
        if self.script:
            recipe = {"name": self.recipe.name, "label": self.label, "precision": self.recipe.precision}
            data |= {"script": self.script.to_json(), "recipe": recipe}
        return {name: value for name, value in data.items() if name not in left_out}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Return the job that `to_json` wrote."""
        given = dict(data)
        if script := given.get("script"):
            given |= {"script": Script.from_json(script), "recipe": SCRIPT_RECIPE}
            given |= {"batch_size": None, "steps": None}
        else:
            given["recipe"] = Recipe.from_record(data["recipe"])
        given["fit"] = tuple(data.get("fit", ()))
        for topic, kind in _TOPICS.items():
            names = given.keys() & {field.name for field in fields(kind)}
            if "workload_arguments" in names:
                given["workload_arguments"] = tuple(given["workload_arguments"])
            given[topic] = kind(**{name: given.pop(name) for name in names})
        return cls(**given)


#: Fields of a job that its plain data hold flat.
_TOPICS: Mapping[str, type[Inputs | Terms]] = {"inputs": Inputs, "terms": Terms}
#: Fields that say nothing of a script, which its plain data lack.
_OF_TRAINING = (
    *("batch_size", "fit", "steps", "epochs", "seed", "checkpoint_every", "eval_every"),
    "step_profile",
    *(field.name for field in fields(Inputs)),
)


def names_apart(jobs: Sequence[Job]) -> list[str]:
    """Return names of the jobs, with what the jobs do not share: `bf16 on vit-huge at batch 64`."""
    differing = {
        field
        for field in ("workload", "batch_size", "num_gpus")
        if len({getattr(job, field) for job in jobs}) > 1
    }
    names = []
    for job in jobs:
        batch = "auto" if job.batch_size is None else job.batch_size
        parts = {
            "workload": f" on {job.workload}",
            "batch_size": f" at batch {batch}",
            "num_gpus": f" on {job.num_gpus} GPU{'' if job.num_gpus == 1 else 's'}",
        }
        names.append(job.label + "".join(words for field, words in parts.items() if field in differing))
    return names


def entrypoint_arguments(job: Job) -> tuple[str, ...]:
    """Return the arguments of `python -m fastlaunch_train`, less `--output DIR` and `--resume`."""
    inputs = job.inputs
    options = (
        ("--workload", job.workload),
        ("--recipe", job.recipe.name),
        *(("--set", f"{field}={value}") for field, value in job.recipe.overrides),
        *(("--set-workload", text) for text in inputs.workload_arguments),
        ("--batch-size", "auto" if job.batch_size is None else job.batch_size),
        ("--steps", job.steps),
        ("--epochs", job.epochs),
        ("--seed", job.seed),
        ("--data", inputs.data),
        *(("--fit", label) for label in job.fit),
        ("--num-workers", None if inputs.data == "synthetic" else inputs.num_workers),
        ("--checkpoint-every", job.checkpoint_every or None),
        ("--eval-every", job.eval_every or None),
        ("--model", inputs.model),
        ("--tokenizer", inputs.tokenizer),
        ("--sequence-length", inputs.sequence_length),
    )
    words = [word for option, value in options if value is not None for word in (option, str(value))]
    return (*words, "--step-profile") if job.step_profile else tuple(words)


def run_environment(job: Job) -> dict[str, str]:
    """Return the variables that tell the run's session, round and plan, if they are known.

    A script gets its name, variant and contents, too.
    """
    known = {
        "FASTLAUNCH_SESSION": job.session,
        "FASTLAUNCH_ROUND": job.round,
        "FASTLAUNCH_MAX_ROUNDS": job.max_rounds,
    }
    if job.script:
        known["FASTLAUNCH_SCRIPT"] = job.workload
        known["FASTLAUNCH_VARIANT"] = json.dumps(dict(job.script.variant))
        known |= contents_environment(job.script)
    return {name: str(value) for name, value in known.items() if value is not None}


def contents_environment(script: Script) -> dict[str, str]:
    """Return the variables that tell a run what its script is, as far as that is known."""
    files = {VARIABLE: json.dumps(dict(script.files))} if script.files else {}
    return files | ({"FASTLAUNCH_COMMIT": script.commit} if script.commit is not None else {})


def node_arguments(job: Job) -> tuple[str, ...]:
    """Return the arguments of `run_train.sh`, less `--output DIR` and `--resume`."""
    return ("--checkpoints", *job.script.words) if job.script else entrypoint_arguments(job)

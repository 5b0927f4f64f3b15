"""`JobSpec`: one run, asked for. A spec is a request; what really happened is a `Run`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from fastlaunch.core.errors import UserError
from fastlaunch_train.recipes.recipes import Recipe

#: Where prices and instances are looked up unless a region is given.
DEFAULT_REGION = "us-east-1"


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """Workload x recipe x batch size, on an instance type (None: this machine), with its limits.

    batch_size: samples per GPU and step, or None to let the entrypoint find the largest that fits.
    steps: None where epochs, passes over the data, are given instead: how many steps that makes is known
        when the workload is built, and stands in the record.
    num_gpus: ranks over all nodes; on a machine without a GPU, processes.
    data: `synthetic`, `loader`, `folder:PATH` or `file:PATH`.
    num_workers: that load it, per GPU; None for as many as the entrypoint chooses.
    checkpoint_every, eval_every: steps between checkpoints, and between evaluations; 0 for none.
    model, tokenizer: of a language workload, a folder or a name on the Hugging Face hub; None for its own.
    sequence_length: tokens of a sample; None for the workload's own.
    max_minutes: what the machine may run in all, however many attempts it takes; None on this machine.
    max_price_usd: per hour, the most that is paid for spot; None for the on-demand price.
    image: of the container, by digest; None for this machine.
    reservation: of the capacity block to run in. training_plan: ARN of SageMaker's.
    keep_alive_minutes: for which SageMaker keeps the machines, billed, for the next job.
    allow_tcp: whether several nodes may do without EFA.
    """

    workload: str
    recipe: Recipe
    batch_size: int | None
    steps: int | None
    num_gpus: int
    epochs: int | None = None
    seed: int = 0
    data: str = "synthetic"
    num_workers: int | None = None
    checkpoint_every: int = 0
    eval_every: int = 0
    model: str | None = None
    tokenizer: str | None = None
    sequence_length: int | None = None
    backend: str = "local"
    instance: str | None = None
    num_nodes: int = 1
    purchase: str = "on-demand"
    region: str = DEFAULT_REGION
    max_minutes: int | None = None
    max_price_usd: float | None = None
    image: str | None = None
    reservation: str | None = None
    training_plan: str | None = None
    keep_alive_minutes: int = 0
    allow_tcp: bool = False

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.epochs is None):
            raise UserError(
                f"a run of {self.steps} steps and {self.epochs} epochs", "give steps or epochs, one of them"
            )
        checks = (
            (
                self.batch_size is None or self.batch_size >= 1,
                "batch size",
                self.batch_size,
                "1 or more, or auto",
            ),
            (self.steps is None or self.steps >= 1, "steps", self.steps, "1 or more"),
            (self.epochs is None or self.epochs >= 1, "epochs", self.epochs, "1 or more"),
            (self.num_gpus >= 1, "number of processes", self.num_gpus, "1 or more"),
            (self.num_nodes >= 1, "number of nodes", self.num_nodes, "1 or more"),
            (
                self.num_nodes < 1 or self.num_gpus % self.num_nodes == 0,
                "number of processes",
                f"{self.num_gpus} on {self.num_nodes} nodes",
                "as many for every node",
            ),
            (self.seed >= 0, "seed", self.seed, "0 or more"),
            (
                self.num_workers is None or self.num_workers >= 0,
                "number of loader workers",
                self.num_workers,
                "0 or more",
            ),
            (
                self.checkpoint_every >= 0,
                "checkpoint interval",
                self.checkpoint_every,
                "0 (none) or more steps",
            ),
            (self.eval_every >= 0, "evaluation interval", self.eval_every, "0 (none) or more steps"),
            (
                self.sequence_length is None or self.sequence_length >= 2,
                "sequence length",
                self.sequence_length,
                "2 tokens or more",
            ),
            (self.model != "", "the model's name", "empty", "a folder, or a name on the Hugging Face hub"),
            (self.tokenizer != "", "the tokenizer's name", "empty", "a folder, or a name on the hub"),
            (
                self.max_minutes is None or self.max_minutes >= 1,
                "time limit",
                self.max_minutes,
                "a minute or more",
            ),
            (
                self.max_price_usd is None or self.max_price_usd > 0,
                "spot price",
                self.max_price_usd,
                "more than 0",
            ),
        )
        for holds, what, value, allowed in checks:
            if not holds:
                raise UserError(f"{what} is {value}", f"give {allowed}")

    @property
    def length(self) -> str:
        """`200 steps`, or `3 epochs`."""
        number, unit = (self.steps, "step") if self.steps is not None else (self.epochs, "epoch")
        return f"{number:,} {unit}{'' if number == 1 else 's'}"

    @property
    def without_seed(self) -> Self:
        """The same job with seed 0: equal for runs that repeat each other."""
        return replace(self, seed=0)

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` turns back into an equal spec; the recipe with all it resolved to."""
        return {**vars(self), "recipe": self.recipe.to_record()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The spec that `to_json` wrote."""
        return cls(**{**data, "recipe": Recipe.from_record(data["recipe"])})


def names_apart(jobs: Sequence[JobSpec]) -> list[str]:
    """A name of each job: its recipe, and what else the jobs do not share: `bf16 on vit-huge at batch 64`."""
    differing = {
        field
        for field in ("workload", "batch_size", "num_gpus")
        if len({getattr(job, field) for job in jobs}) > 1
    }
    names = []
    for job in jobs:
        batch = "auto" if job.batch_size is None else job.batch_size
        told = {
            "workload": f" on {job.workload}",
            "batch_size": f" at batch {batch}",
            "num_gpus": f" on {job.num_gpus} GPU{'' if job.num_gpus == 1 else 's'}",
        }
        names.append(job.recipe.label + "".join(words for field, words in told.items() if field in differing))
    return names

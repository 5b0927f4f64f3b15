"""`JobSpec`: one run, asked for. A spec is a request; what really happened is a `Run`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from fastlaunch.errors import UserError
from fastlaunch_train.recipes import Recipe

#: Where prices and instances are looked up unless a region is given.
DEFAULT_REGION = "us-east-1"


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """Workload x recipe x batch size, on an instance type (None: this machine), with its limits.

    batch_size: samples per GPU and step, or None to let the entrypoint find the largest that fits.
    num_gpus: ranks over all nodes; on a machine without a GPU, processes.
    data: `synthetic`, `loader` or `folder:PATH`.
    checkpoint_every: steps between checkpoints, 0 for none.
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
    steps: int
    num_gpus: int
    seed: int = 0
    data: str = "synthetic"
    num_workers: int = 12
    checkpoint_every: int = 0
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
        checks = (
            (
                self.batch_size is None or self.batch_size >= 1,
                "batch size",
                self.batch_size,
                "1 or more, or auto",
            ),
            (self.steps >= 1, "steps", self.steps, "1 or more"),
            (self.num_gpus >= 1, "number of processes", self.num_gpus, "1 or more"),
            (self.num_nodes >= 1, "number of nodes", self.num_nodes, "1 or more"),
            (
                self.num_nodes < 1 or self.num_gpus % self.num_nodes == 0,
                "number of processes",
                f"{self.num_gpus} on {self.num_nodes} nodes",
                "as many for every node",
            ),
            (self.seed >= 0, "seed", self.seed, "0 or more"),
            (self.num_workers >= 0, "number of loader workers", self.num_workers, "0 or more"),
            (
                self.checkpoint_every >= 0,
                "checkpoint interval",
                self.checkpoint_every,
                "0 (none) or more steps",
            ),
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

    def to_json(self) -> dict[str, Any]:
        """Plain data that `from_json` turns back into an equal spec; the recipe with all it resolved to."""
        return {**vars(self), "recipe": self.recipe.to_record()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """The spec that `to_json` wrote."""
        return cls(**{**data, "recipe": Recipe.from_record(data["recipe"])})

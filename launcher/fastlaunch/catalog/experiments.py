"""Read the published experiments of experiments.toml: lists of runs that anyone can repeat."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastlaunch.core.data import read


@dataclass(frozen=True, kw_only=True)
class ExperimentVariant:
    """One row of an experiment."""

    workload: str
    recipe: str
    overrides: tuple[str, ...] = ()
    # Per GPU, or `auto`; None for the workload's own.
    batch_size: int | str | None = None
    # Ranks; None for all GPUs of the machine.
    num_gpus: int | None = None
    # Steps between evaluations, 0 for none.
    eval_every: int = 0


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A published experiment."""

    name: str
    description: str
    # Who published it, and how it was done there.
    source: str
    variants: tuple[ExperimentVariant, ...]
    # The length of every run, in steps or epochs; the other is None. Epochs are of your own data: synthetic
    # data has no end, and a run on it is of the usual steps.
    steps: int | None = None
    epochs: int | None = None
    # The data source that its runs read, unless another is given.
    data: str = "synthetic"

    @property
    def length(self) -> str:
        """`200 steps`, or `3 epochs`, of each run."""
        return f"{self.epochs} epochs" if self.steps is None else f"{self.steps:,} steps"


@cache
def published_experiments() -> Mapping[str, Experiment]:
    """Return the experiments of experiments.toml by name."""
    import tomllib

    path = Path(__file__).with_suffix(".toml")
    entries = tomllib.loads(path.read_text(encoding="utf-8"))
    return {name: read(Experiment, {"name": name, **entry}, path.name) for name, entry in entries.items()}

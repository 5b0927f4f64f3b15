"""The options of `submit` and `sweep` as Python keywords, for editors and type checkers.

Made from `jobs.options.Options` by tests/launcher/test_declared_options.py: not edited by hand.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

#: A name, names with commas between them, or a sequence of names.
Names = str | Sequence[str]
#: KEY=VALUE texts, or values by key.
Pairs = str | Sequence[str] | Mapping[str, Any]


class Shared(TypedDict, total=False):
    """The options that `submit` and `sweep` share."""

    command: Names | None
    recipes: Names | None
    workload: str | None
    workload_arguments: Pairs | None
    steps: int | None
    epochs: int | None
    repeats: int | None
    max_rounds: int | None
    seed: int
    data: str | None
    model: str | None
    tokenizer: str | None
    sequence_length: int | None
    checkpoint_every: int
    eval_every: int | None
    step_profile: bool
    lists: Pairs | None
    baseline: str | None
    nproc: int | str | None
    hang_timeout_s: float | None
    requirements: str | None
    requirements_from_index: bool
    inputs: Pairs | None
    local: bool
    backend: str | None
    instances: Names | None
    regions: Names | None
    num_nodes: int
    max_cost_usd: float | None
    max_minutes: int
    idle_timeout_s: float | None
    purchase: str
    max_price_usd: float | None
    max_replacements: int
    account_timer: bool
    subnets: Pairs | None
    security_groups: Names | None
    placement_groups: Pairs | None
    allow_tcp: bool
    role: str | None
    queue: str | None
    priority: int | None
    share: str | None
    retries: int | None
    overrides: Pairs | None
    num_workers: int | None
    tags: Pairs | None
    secrets: Pairs | None
    variables: Pairs | None
    bucket: str | None
    instance_profile: str | None
    base_image: str | None
    image: str | None


class SubmitArguments(Shared, total=False):
    """The options of `submit`."""

    experiment: str | None
    batch_size: int | str | None
    until_resolved: bool
    add_to: str | None
    reservation: str | None
    block_fee_usd: float | None
    detach: bool
    training_plan: str | None
    container: bool


class SweepArguments(Shared, total=False):
    """The options of `sweep`."""

    batch_sizes: int | str | Sequence[int | str] | None
    until_best: bool
    parallel: int | None

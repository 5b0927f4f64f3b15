"""What tests of a submission's life share."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from cloud_world import World


@pytest.fixture
def world(tmp_path: Path) -> "Iterator[World]":
    """A launcher on the AWS in memory; nothing was asked for yet."""
    from cloud_world import opened_world

    with opened_world(tmp_path) as opened:
        yield opened


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Sizes of models in place of those that the training package would count, which takes seconds."""
    from fastlaunch.core.errors import UserError

    known: dict[str, Any] = {}

    def counted(workload: str) -> object:
        if workload not in known:
            raise UserError(f"the size of {workload} is unknown: no such model")
        return known[workload]

    monkeypatch.setattr("fastlaunch.lifecycle.model_size.counted_size", counted)
    return known

"""What tests of a submission's life share."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from cloud_world import World


@pytest.fixture
def world(tmp_path: Path) -> "Iterator[World]":
    """A launcher on the AWS in memory; nothing was asked for yet."""
    from cloud_world import opened_world

    with opened_world(tmp_path) as opened:
        yield opened

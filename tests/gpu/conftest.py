"""What all tests of this folder have in common: their tier, and that they need a GPU."""

from pathlib import Path

import pytest
import torch

MARKS = (
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for mark in MARKS if item.path.parent == Path(__file__).parent else ():
            item.add_marker(mark)

"""Every mutation still has its text and its tests: code that moves takes its mutations along."""

import shutil
from pathlib import Path

import pytest

from mutate import ROOT, Mutation, load, mutated


@pytest.mark.parametrize("mutation", load(), ids=lambda mutation: mutation.id)
def test_a_mutation_can_be_made(mutation: Mutation, tmp_path: Path) -> None:
    copy = tmp_path / mutation.file
    copy.parent.mkdir(parents=True)
    shutil.copy(ROOT / mutation.file, copy)
    with mutated(tmp_path, mutation) as wrong:
        assert not wrong
    assert [target for target in mutation.tests if not (ROOT / target.partition("::")[0]).exists()] == []

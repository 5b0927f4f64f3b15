"""`fastlaunch recipes`, `workloads` and `experiments`."""

import itertools
import json
import subprocess
import sys

import pytest

from fastlaunch.cli.main import run
from fastlaunch_train.recipes.recipes import OVERRIDABLE
from fastlaunch_train.workloads.registry import WORKLOADS


def test_recipes_of_a_kind_stand_together_and_those_not_equivalent_say_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["recipes", "--output", "json"]) == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)
    assert err == "" and set(rows[0]) == {"name", "description", "kind", "equivalent", *OVERRIDABLE}
    kinds = [kind for kind, _ in itertools.groupby(row["kind"] for row in rows)]
    assert len(kinds) == len(set(kinds)) == 11
    not_equivalent = [row["name"] for row in rows if row["equivalent"] == "NO"]
    assert not_equivalent == ["te-article", "te-article-fp8", "nf4"]


@pytest.mark.parametrize(
    ("command", "name", "nearest"),
    [
        ("recipes", "te-fp9", "te-fp8"),
        ("workloads", "vit-hug", "vit-huge"),
        ("workloads", "./no_such.py:build", "no file"),
        ("experiments", "fp9", "fp8"),
    ],
)
def test_an_unknown_name_gets_the_nearest(
    command: str, name: str, nearest: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, name]) == 2
    out, err = capsys.readouterr()
    assert out == "" and nearest in err


def test_workloads_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["workloads"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1 : len(WORKLOADS) + 1]] == list(WORKLOADS)
    for name in ("vit-huge", "timm:vit_base_patch16_224", "hf-clm:EleutherAI/gpt-neo-2.7B", "gelu:64x64"):
        assert run(["workloads", name]) == 0
        assert f"\nname              {name}\n" in capsys.readouterr().out


def test_the_lengths_of_experiments_have_a_heading_that_is_a_noun(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ((), ("fp8",)):
        assert run(["experiments", *name]) == 0
        assert "length" in capsys.readouterr().out.splitlines()[0].split()


@pytest.mark.slow
def test_listings_import_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from fastlaunch.cli.main import run; run(['recipes']); run(['workloads']);"
        "run(['experiments']); run(['runs']);"
        "sys.exit([name for name in ('torch', 'boto3', 'numpy') if name in sys.modules] or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

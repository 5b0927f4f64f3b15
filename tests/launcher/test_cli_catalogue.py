"""`fastlaunch recipes`, `workloads` and `experiments`."""

import csv
import io
import itertools
import json
import re
import subprocess
import sys

import pytest

from fastlaunch.cli.main import run
from fastlaunch_train.recipes.recipes import OVERRIDABLE, RECIPES
from fastlaunch_train.workloads.registry import WORKLOADS


def test_every_recipe_is_listed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["recipes"]) == 0
    heading, *lines, _ = capsys.readouterr().out.splitlines()
    assert heading.split() == ["recipe", "kind", "precision", "equivalent", "description"]
    assert [line.split()[0] for line in lines] == list(RECIPES)
    row = (
        f"te-fp8                   Transformer Engine  fp8        yes         {RECIPES['te-fp8'].description}"
    )
    assert row in lines


def test_recipes_of_a_kind_stand_together_and_those_not_equivalent_say_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["recipes", "--output", "json"]) == 0
    out, err = capsys.readouterr()
    rows = json.loads(out)
    assert err == "" and set(rows[0]) == {"name", "description", "kind", "equivalent", *OVERRIDABLE}
    kinds = [kind for kind, _ in itertools.groupby(row["kind"] for row in rows)]
    assert len(kinds) == len(set(kinds)) == 10
    not_equivalent = [row["name"] for row in rows if row["equivalent"] == "NO"]
    assert not_equivalent == ["te-article", "te-article-fp8"]


def test_a_recipe_is_shown_field_by_field_with_what_it_may_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes", "te-fp8"]) == 0
    fields = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines()[1:-1]}
    assert set(fields) == {"name", *OVERRIDABLE}
    assert fields["fp8_scaling"][1:6] == ["fp8_scaling=none", "|", "delayed", "|", "current"]
    assert fields["deterministic"] == ["false", "deterministic=true", "|", "false"]
    assert fields["ddp_bucket_mb"] == ["160", "ddp_bucket_mb=..."]
    assert run(["recipes", "bf16", "--output", "csv"]) == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (row["name"], row["precision"], row["learning_rate"]) == ("bf16", "bf16", "")


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
    assert [line.split()[0] for line in lines[1:-1]] == list(WORKLOADS)
    for name in ("vit-huge", "timm:vit_base_patch16_224", "hf-clm:EleutherAI/gpt-neo-2.7B", "gelu:64x64"):
        assert run(["workloads", name]) == 0
        assert f"\nname              {name}\n" in capsys.readouterr().out


@pytest.mark.slow
def test_listings_import_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from fastlaunch.cli.main import run; run(['recipes']); run(['workloads']);"
        "run(['experiments']); run(['runs']);"
        "sys.exit([name for name in ('torch', 'boto3', 'numpy') if name in sys.modules] or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "argv",
    [
        *(["recipes"], ["recipes", "te-fp8"], ["workloads"], ["workloads", "vit-huge"], ["experiments"]),
        *(["experiments", "fp8"], ["prices"], ["prices", "--region", "*", "--all"]),
    ],
)
def test_what_is_listed_fits_80_columns_with_whole_words_and_has_all_at_200(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str]
) -> None:
    shown = {}
    for columns in (80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        assert run(argv) == 0
        shown[columns] = capsys.readouterr().out
    assert max(map(len, shown[80].splitlines())) <= 80
    # A line under the table names the columns that left.
    listed = re.sub(r"\(left out for want of room: [^:]*?\)$", "", shown[80], flags=re.MULTILINE)
    assert set(listed.split()) <= set(shown[200].split())

"""`fastlaunch recipes` and `fastlaunch workloads`."""

import csv
import io
import itertools
import json
import subprocess
import sys

import pytest

from fastlaunch.cli.main import run
from fastlaunch_train.recipes.recipe import CHOICES, RecipeError
from fastlaunch_train.recipes.recipes import OVERRIDABLE, RECIPES, resolve_recipe
from fastlaunch_train.workloads.registry import WORKLOADS


def test_every_recipe_is_listed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["recipes"]) == 0
    told = capsys.readouterr()
    heading, *lines, sentence = told.out.splitlines()
    assert heading.split() == ["recipe", "kind", "precision", "equivalent", "description"]
    assert [line.split()[0] for line in lines] == list(RECIPES)
    row = (
        f"te-fp8                   Transformer Engine  fp8        yes         {RECIPES['te-fp8'].description}"
    )
    assert row in lines
    assert sentence == f"{len(RECIPES)} recipes."
    assert told.err.startswith("next: fastlaunch recipes ")


def test_recipes_of_a_kind_stand_together_and_those_not_equivalent_say_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["recipes", "--output", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    kinds = [kind for kind, _ in itertools.groupby(row["kind"] for row in rows)]
    assert kinds == [
        *("eager", "compiled", "Transformer Engine", "torchao", "pointwise", "sharded", "ORTModule"),
        "another loop",
    ]
    not_equivalent = [row["name"] for row in rows if row["equivalent"] == "NO"]
    assert not_equivalent == ["te-article", "te-article-fp8"]
    assert all("NOT equivalent" in RECIPES[name].description for name in not_equivalent)


def test_a_recipe_is_told_field_by_field_with_what_it_may_be(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes", "te-fp8"]) == 0
    told = capsys.readouterr()
    fields = {line.split()[0]: line.split()[1:] for line in told.out.splitlines()[1:-1]}
    assert set(fields) == {"name", *OVERRIDABLE}
    assert fields["fp8_scaling"][:1] == ["delayed"]
    assert fields["fp8_scaling"][1].startswith("fp8_scaling=none|delayed|current|")
    assert fields["deterministic"] == ["false", "deterministic=true|false"]
    assert fields["ddp_bucket_mb"] == ["160", "ddp_bucket_mb=..."]
    assert fields["name"] == ["te-fp8"]
    assert told.err == "next: fastlaunch submit --local --recipe te-fp8\n"


@pytest.mark.parametrize("field", [name for name in OVERRIDABLE if name in CHOICES])
def test_what_a_field_may_be_is_what_set_takes(field: str, capsys: pytest.CaptureFixture[str]) -> None:
    for value in CHOICES[field]:
        try:
            resolve_recipe("bf16", [f"{field}={value}"])
        except RecipeError as error:
            # Refused beside the recipe's other fields, not for the value itself.
            assert "is one of" not in (error.hint or "")


def test_recipes_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["recipes", "--output", "json"]) == 0
    told = capsys.readouterr()
    rows = json.loads(told.out)
    assert told.err == ""
    assert [row["name"] for row in rows] == list(RECIPES)
    assert set(rows[0]) == {"name", "description", "kind", "equivalent", *OVERRIDABLE}
    assert run(["recipes", "bf16", "--output", "csv"]) == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (row["name"], row["precision"], row["learning_rate"]) == ("bf16", "bf16", "")


@pytest.mark.parametrize(
    ("command", "name", "nearest"),
    [
        ("recipes", "te-fp9", "did you mean te-fp8"),
        ("workloads", "vit-hug", "did you mean vit-huge"),
        ("experiments", "fp9", "did you mean fp8"),
    ],
)
def test_an_unknown_name_gets_the_nearest(command: str, name: str, nearest: str) -> None:
    refused = subprocess.run(
        [sys.executable, "-m", "fastlaunch", command, name], capture_output=True, text=True, check=False
    )
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"error: unknown {command[:-1]} '{name}'\n  {nearest}")


def test_every_workload_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["workloads"]) == 0
    told = capsys.readouterr()
    lines = told.out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == list(WORKLOADS)
    assert "632199400" in told.out
    assert lines[-1] == (
        f"{len(WORKLOADS)} workloads, and timm:MODEL, hf-clm:MODEL, gelu:ROWSxCOLUMNS or your own "
        "./file.py:function."
    )


@pytest.mark.parametrize(
    "name",
    [
        "vit-huge",
        "timm:vit_base_patch16_224",
        "hf-clm:EleutherAI/gpt-neo-2.7B",
        "gelu:64x64",
        "./my.py:build",
    ],
)
def test_a_workload_is_told_field_by_field(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["workloads", name]) == 0
    told = capsys.readouterr()
    assert f"\nname              {name}\n" in told.out
    assert told.err == f"next: fastlaunch submit --local --workload {name}\n"


def test_listings_import_neither_torch_nor_numpy() -> None:
    code = (
        "import sys; from fastlaunch.cli.main import run; run(['recipes']); run(['workloads']);"
        "run(['experiments']); run(['runs']);"
        "sys.exit([name for name in ('torch', 'boto3', 'numpy') if name in sys.modules] or 0)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr

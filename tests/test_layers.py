"""Who may import whom: the design's table, checked against every import statement of the two packages."""

import ast
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

#: The only training modules that the launcher may import.
CONTRACT = (
    "fastlaunch_train.recipes.recipes",
    "fastlaunch_train.records.records",
    "fastlaunch_train.workloads",
)

#: The ledger: runs.py and the modules that it is made of.
LEDGER = "fastlaunch.ledger"

#: What only some recipes and workloads of the training package need: imported in the function that uses it,
#: so that the others do without it, and an error of ours says which extra to install.
EXTRAS = (
    *("transformer_engine", "torchao", "deepspeed", "lightning", "transformers", "tokenizers", "accelerate"),
    *("torch_ort", "onnxruntime", "timm", "torchvision"),
)

#: (modules, what they must not import, why). A pattern stands for a module and all below it.
FORBIDDEN = (
    ("fastlaunch", ("torch", *EXTRAS), "it runs on a laptop"),
    ("fastlaunch_train", ("fastlaunch", "click", "yaml", "boto3", "botocore"), "it trains alone"),
    ("fastlaunch.core.errors", ("fastlaunch",), "everything else stands on it"),
    ("fastlaunch.analysis", ("os", "io", "pathlib", "sqlite3", "subprocess", "click"), "it does no I/O"),
    ("fastlaunch.analysis", ("time", "random", "socket", "tempfile", "shutil", "rich"), "it is pure"),
    ("fastlaunch.analysis", (LEDGER, "fastlaunch.backends", "fastlaunch.report"), "it knows numbers only"),
    (LEDGER, ("fastlaunch.analysis", "fastlaunch.report", "fastlaunch.backends.*"), "it keeps runs"),
    ("fastlaunch.backends", (LEDGER, "fastlaunch.analysis", "fastlaunch.report"), "they run plans"),
    (
        "fastlaunch.measure.summarize",
        (LEDGER, "fastlaunch.analysis", "fastlaunch.backends"),
        "analysis needs it",
    ),
    (
        "fastlaunch.catalog.prices",
        (LEDGER, "fastlaunch.analysis", "fastlaunch.backends"),
        "the ledger needs it",
    ),
)

#: A module under `fastlaunch.backends` is of one of these if its name is, up to the first underscore.
BACKENDS = {"local", "ec2", "sagemaker"}

#: What only these modules import, for an extra of its name.
OPTIONAL = {"sagemaker": ("fastlaunch.runs.rehearsed_job",)}

#: What `fastlaunch.report` may import of the launcher.
REPORT_MAY = ("report", "analysis", "catalog", "measure", "core")


def module_files() -> dict[str, Path]:
    """Every module of both packages, by its name."""
    files = {}
    for package in ("fastlaunch", "fastlaunch_train"):
        spec = importlib.util.find_spec(package)
        assert spec is not None and spec.origin is not None
        root = Path(spec.origin).parent
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root.parent).with_suffix("").parts
            files[".".join(parts).removesuffix(".__init__")] = path
    return files


MODULES = module_files()


def imports(source: str) -> Iterator[tuple[int, str]]:
    """(line, imported module) of every import in `source`, wherever it stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, "relative imports are banned"
            yield node.lineno, node.module
            for alias in node.names:
                if f"{node.module}.{alias.name}" in MODULES:
                    yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            first = node.args[0] if node.args else None
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield node.lineno, str(first.value)


def within(module: str, pattern: str) -> bool:
    """Whether `module` is the one that `pattern` names, or is below it."""
    return fnmatch(module, pattern) or fnmatch(module, f"{pattern}.*")


def backend_of(module: str) -> str:
    """The backend that the module belongs to; another word for one that several of them use."""
    return module.removeprefix("fastlaunch.backends.").partition(".")[0].partition("_")[0]


def violations(module: str, source: str) -> list[str]:
    """What the table forbids in `source`, in words, one for each import."""
    found = []
    for line, imported in imports(source):
        top = imported.partition(".")[0]
        reasons = [
            f"{pattern} must not: {why}"
            for pattern, forbidden, why in FORBIDDEN
            if within(module, pattern) and any(within(imported, name) for name in forbidden)
        ]
        if within(module, "fastlaunch"):
            if top == "fastlaunch_train" and imported not in (*CONTRACT, "fastlaunch_train"):
                reasons.append(f"the launcher reads only {', '.join(CONTRACT)}")
            if top in ("boto3", "botocore") and module != "fastlaunch.aws.ec2":
                reasons.append("only fastlaunch.aws.ec2 speaks to AWS")
            reaches_cli = within(imported, "fastlaunch.cli") and not within(module, "fastlaunch.cli")
            if reaches_cli and module != "fastlaunch.__main__":
                reasons.append("only `python -m fastlaunch` needs the command line")
            reports = within(module, "fastlaunch.report") and within(imported, "fastlaunch.*")
            if reports and imported.split(".")[1] not in REPORT_MAY:
                reasons.append("a report shows an analysis")
            if {backend_of(module), backend_of(imported)} <= BACKENDS and (
                backend_of(module) != backend_of(imported)
            ):
                reasons.append("backends do not know each other")
        found += [f"{module}:{line} imports {imported}: {reason}" for reason in reasons]
    return found


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_what_it_may(module: str) -> None:
    assert violations(module, MODULES[module].read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("fastlaunch.measure.summarize", "import torch.cuda"),
        ("fastlaunch.measure.summarize", "def f():\n    from torch import nn"),
        ("fastlaunch.measure.summarize", "import fastlaunch_train.loop.train"),
        ("fastlaunch.measure.summarize", "from fastlaunch_train.workloads.contract import Workload"),
        ("fastlaunch.measure.summarize", "from fastlaunch_train.workloads import contract"),
        ("fastlaunch.measure.summarize", "from fastlaunch.ledger.ledger import Run"),
        ("fastlaunch_train.loop.train", "import fastlaunch.core.errors"),
        ("fastlaunch_train.loop.train", "from fastlaunch.core import errors"),
        ("fastlaunch_train.workloads.vit", "import yaml"),
        ("fastlaunch_train.workloads.vit", "from importlib import import_module\nimport_module('click')"),
        ("fastlaunch.core.errors", "from fastlaunch.jobs import spec"),
        ("fastlaunch.analysis", "import os"),
        ("fastlaunch.analysis.compare", "from pathlib import Path"),
        ("fastlaunch.analysis.compare", "import os.path"),
        ("fastlaunch.analysis.compare", "import sqlite3"),
        ("fastlaunch.analysis.cost", "from fastlaunch.ledger.ledger import Run"),
        ("fastlaunch.placement.checks", "import botocore.exceptions"),
        ("fastlaunch.report.table", "from fastlaunch.runs import reap"),
        ("fastlaunch.report.table", "from fastlaunch.ledger.ledger import Run"),
        ("fastlaunch.ledger.ledger", "from fastlaunch.analysis.compare import Candidate"),
        ("fastlaunch.ledger.ledger", "import fastlaunch.backends.local"),
        ("fastlaunch.ledger.rows", "from fastlaunch.report import table"),
        ("fastlaunch.backends.local", "import fastlaunch.ledger.rows"),
        ("fastlaunch.backends.local", "from fastlaunch.ledger.ledger import Run"),
        ("fastlaunch.backends.ec2.ec2", "from fastlaunch.backends.local import LocalBackend"),
        ("fastlaunch.backends.sagemaker.plan", "from fastlaunch.backends.ec2.plan import plan"),
        ("fastlaunch.sweep", "from fastlaunch.cli import run"),
    ],
)
def test_the_table_is_enforced(module: str, source: str) -> None:
    assert violations(module, source)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("fastlaunch.measure.summarize", "from fastlaunch_train.records.records import Step"),
        ("fastlaunch.jobs.spec", "from fastlaunch_train.recipes.recipes import RECIPES"),
        ("fastlaunch.aws.ec2", "import boto3, botocore.exceptions"),
        ("fastlaunch.ledger.ledger", "from fastlaunch.backends import RunState"),
        ("fastlaunch.backends.local", "from fastlaunch.backends import Plan"),
        ("fastlaunch.backends.ec2.plan", "from fastlaunch.backends.placements import Site"),
        ("fastlaunch.backends.local", "from fastlaunch.backends import entrypoint_arguments"),
        ("fastlaunch.report.table", "from fastlaunch.analysis.compare import Comparison"),
        ("fastlaunch.__main__", "from fastlaunch.cli import main"),
        ("fastlaunch.cli.runs", "from fastlaunch.cli.options import output"),
        ("fastlaunch_train.loop.train", "import torch, numpy"),
        ("fastlaunch_train.records.records", "import fastlaunch_train.record_lines"),
    ],
)
def test_what_the_table_allows_passes(module: str, source: str) -> None:
    assert violations(module, source) == []


def at_import(source: str) -> list[str]:
    """What a module with this source imports when it is imported itself, and not for types alone."""
    tree = ast.parse(source)
    later = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if node in later:
            continue
        if isinstance(node, ast.Import):
            found += [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("module", [name for name in MODULES if within(name, "fastlaunch_train")])
def test_what_few_recipes_need_is_imported_where_it_is_used(module: str) -> None:
    assert [name for name in at_import(MODULES[module].read_text()) if name in EXTRAS] == []


def test_imports_in_functions_and_for_types_are_no_imports_of_the_module() -> None:
    source = """
import torch, lightning.pytorch
if TYPE_CHECKING:
    import transformers
def f():
    import deepspeed
class C:
    import torchao
    def g(self):
        from timm import models
"""
    assert at_import(source) == ["torch", "lightning", "torchao"]


def test_the_launcher_needs_only_its_declared_dependencies() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    distributions = {re.split(r"[^\w.-]", text)[0].lower() for text in project["dependencies"]}
    extras = {name.lower() for name in project["optional-dependencies"]}
    names = importlib.metadata.packages_distributions()
    for module, path in MODULES.items():
        if not within(module, "fastlaunch"):
            continue
        for line, imported in imports(path.read_text()):
            top = imported.partition(".")[0]
            if top in sys.stdlib_module_names or top in ("fastlaunch", "fastlaunch_train"):
                continue
            owners = {name.lower() for name in names.get(top, [top])}
            # Imported where it is used, with an error that says which extra to install.
            if module in OPTIONAL.get(top, ()) and top in extras:
                continue
            assert owners & distributions, (
                f"{module}:{line} imports {imported}, which pyproject does not require"
            )


def test_the_contract_modules_load_without_torch() -> None:
    code = (
        f"import sys, {', '.join(CONTRACT)};"
        " print(*sorted({name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names))"
    )
    # -S would hide torch itself; what site-packages loads by itself is taken off instead.
    bare = "import sys; print(*sorted({n.partition('.')[0] for n in sys.modules} - sys.stdlib_module_names))"
    loaded, before = (
        set(
            subprocess.run(
                [sys.executable, "-c", text], capture_output=True, text=True, check=True
            ).stdout.split()
        )
        for text in (code, bare)
    )
    assert loaded - before == {"fastlaunch_train"}

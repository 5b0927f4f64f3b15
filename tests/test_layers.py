"""Who may import whom: the rooms of both packages, checked against every import statement."""

import ast
import graphlib
import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path

#: Rooms of the launcher, each with the rooms that it may import; None for all of them.
LAUNCHER_ROOMS: Mapping[str, tuple[str, ...] | None] = {
    "core": (),
    "catalog": ("core",),
    "aws": ("core",),
    "jobs": ("core", "catalog", "aws"),
    "measure": ("core", "catalog", "jobs"),
    "ledger": ("core", "catalog", "jobs", "measure"),
    "backends": ("core", "catalog", "jobs", "aws", "measure"),
    "placement": ("core", "catalog", "jobs", "aws", "backends"),
    "analysis": ("core", "catalog", "measure"),
    "report": ("core", "catalog", "measure", "analysis"),
    "lifecycle": (
        *("core", "catalog", "jobs", "aws", "measure", "ledger", "backends", "placement"),
        *("analysis", "report"),
    ),
    "api": (
        *("core", "catalog", "jobs", "aws", "measure", "ledger", "backends", "placement", "lifecycle"),
        *("analysis", "report"),
    ),
    "cli": None,
}

#: Rooms of the training package, in order: each may import those before it.
TRAIN_ROOMS = (
    *("records", "recipes", "process", "workloads.contract", "distributed", "models", "data", "workloads"),
    *("steppers", "checks", "loop", "run", "script"),
)

#: What data and models need of workloads: names, and what a workload is. They stand below both.
CONTRACT_OF_WORKLOADS = ("workloads.registry", "workloads.contract")

#: Modules of the training package that the launcher reads, and the rooms that do.
CONTRACT = ("records", "recipes", "workloads.registry", "node.protocol")
READS_CONTRACT = ("jobs", "measure", "analysis", "backends", "lifecycle", "report", "api", "cli")

#: What only some recipes and workloads need.
EXTRAS = {
    *("transformer_engine", "torchao", "deepspeed", "lightning", "transformers", "tokenizers", "accelerate"),
    *("torch_ort", "onnxruntime", "timm", "torchvision"),
}

#: Modules that nobody below `fastlaunch` or `fastlaunch_train` imports, by room or package.
FORBIDDEN = {
    "fastlaunch": ("torch", *EXTRAS),
    "fastlaunch_train": ("fastlaunch", "click", "yaml", "boto3", "botocore"),
    "fastlaunch.analysis": (
        *("os", "io", "pathlib", "sqlite3", "subprocess", "click"),
        *("time", "socket", "tempfile", "shutil", "rich"),
    ),
}


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


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """Every node of a source file, which is parsed once for all tests of a process."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, imported module) of every import in the file, wherever it stands."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module is not None, "relative imports are banned"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            if not all(name in MODULES for name in names):
                yield node.lineno, node.module
            yield from ((node.lineno, name) for name in names if name in MODULES)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            called = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            first = node.args[0] if node.args else None
            if called in ("import_module", "__import__") and isinstance(first, ast.Constant):
                yield node.lineno, str(first.value)


@cache
def all_imports() -> Mapping[str, Sequence[tuple[int, str]]]:
    """What every module imports, by line."""
    return {module: tuple(imports(path)) for module, path in MODULES.items()}


def within(module: str, package: str) -> bool:
    """Whether `module` is `package`, or is below it."""
    return module == package or module.startswith(f"{package}.")


def train_room(module: str) -> int:
    """Where the room of `fastlaunch_train.<module>` stands among TRAIN_ROOMS."""
    if module in CONTRACT_OF_WORKLOADS:
        return TRAIN_ROOMS.index("workloads.contract")
    return TRAIN_ROOMS.index(module.partition(".")[0])


def violation(module: str, imported: str) -> str | None:
    """Why `module` must not import `imported`; None if it may."""
    package, _, inside = module.partition(".")
    other_package, _, other = imported.partition(".")
    for below, names in FORBIDDEN.items():
        if within(module, below) and any(within(imported, name) for name in names):
            return f"{below} does without {imported}"
    room, other_room = inside.partition(".")[0], other.partition(".")[0]
    if package == "fastlaunch" and room not in ("", "__main__"):
        if other_package in ("boto3", "botocore") and room != "aws":
            return "only aws speaks to AWS"
        if other_package == "fastlaunch" and other:
            allowed = LAUNCHER_ROOMS[room]
            if other_room != room and allowed is not None and other_room not in allowed:
                return f"{room} may import {', '.join(allowed) or 'nothing of ours'}"
            if room == "backends" and _backend(inside) and _backend(other):
                return None if _backend(inside) == _backend(other) else "backends do not know each other"
        if other_package == "fastlaunch_train" and other:
            if room not in READS_CONTRACT:
                return f"only {', '.join(READS_CONTRACT)} read the contract"
            if not any(within(other, name) for name in CONTRACT):
                return f"the launcher reads only {', '.join(CONTRACT)}"
    if package == "fastlaunch_train" and other_package == package and other:
        if room in ("", "__main__"):
            return None
        if "node" in (room, other_room):
            return None if room == other_room else "the node agent stands alone"
        if other_room == "__main__" or train_room(other) > train_room(inside):
            return f"{room} stands before {other_room}"
    return None


def _backend(module: str) -> str | None:
    """The backend that the module of `fastlaunch.backends` is of; None for one that all use."""
    name = f"{module}.".split(".")[1]
    return name if name in ("local", "ec2", "sagemaker") else None


def test_every_module_imports_what_it_may() -> None:
    wrong = [
        f"{module}, line {line}: {imported}: {why}"
        for module, imported_there in all_imports().items()
        for line, imported in imported_there
        if (why := violation(module, imported))
    ]
    assert wrong == []


def test_no_module_imports_itself_through_others() -> None:
    sorter = graphlib.TopologicalSorter(
        {
            module: {name for _, name in imported if name in MODULES and name != module}
            for module, imported in all_imports().items()
        }
    )
    sorter.prepare()  # raises CycleError, which names the circle


#: What gives a day or a time of this machine's zone. Days are those of UTC: `core.units.utc_day`.
LOCAL_TIME = {
    **dict.fromkeys(("today", "date", "utcnow", "localtime", "ctime"), 0),
    **{"now": 0, "fromtimestamp": 1, "utcfromtimestamp": 1},
}


def local_times(nodes: Iterable[ast.AST]) -> list[int]:
    """Lines of calls by a method of that name, with as many arguments as take no zone."""
    return [
        node.lineno
        for node in nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and LOCAL_TIME.get(node.func.attr) == len(node.args) + len(node.keywords)
        # A clock that is passed in has a zone.
        and not (node.func.attr == "now" and "datetime" not in ast.unparse(node.func.value))
    ]


def test_no_module_takes_the_day_of_its_zone() -> None:
    found = {name: lines for name, path in MODULES.items() if (lines := local_times(nodes_of(path)))}
    assert set(found) == {"fastlaunch.core.units"}
    for text in (
        "datetime.date.today()",
        "datetime.now()",
        "context.now().date()",
        "datetime.fromtimestamp(0)",
    ):
        assert local_times(ast.walk(ast.parse(text))), text
    zoned = "context.now(), datetime.now(UTC), datetime.fromtimestamp(0, tz=UTC)"
    assert not local_times(ast.walk(ast.parse(zoned)))


def test_a_room_holds_a_door_sign_and_nothing_else() -> None:
    for module, path in MODULES.items():
        # The packages themselves export the public names.
        if path.name == "__init__.py" and "." in module:
            tree, *_ = nodes_of(path)
            assert isinstance(tree, ast.Module) and len(tree.body) == 1 and ast.get_docstring(tree), module
            assert len(path.read_text().splitlines()) <= 4, module


def test_every_module_is_in_a_room() -> None:
    rooms = {f"fastlaunch.{room}" for room in LAUNCHER_ROOMS} | {
        f"fastlaunch_train.{room.partition('.')[0]}" for room in (*TRAIN_ROOMS, "node")
    }
    flat = [
        module
        for module in MODULES
        if "." in module
        and not module.endswith("__main__")
        and not any(within(module, room) for room in rooms)
    ]
    assert flat == []


def test_the_table_forbids_and_allows() -> None:
    for module, imported in (
        ("fastlaunch.core.errors", "fastlaunch.catalog.prices"),
        ("fastlaunch.measure.summary", "torch.cuda"),
        ("fastlaunch.measure.summary", "fastlaunch_train.loop.train"),
        ("fastlaunch.core.units", "fastlaunch_train.records.records"),
        ("fastlaunch.backends.ec2.plan", "fastlaunch.backends.sagemaker.plan"),
        ("fastlaunch.placement.checks", "botocore.exceptions"),
        ("fastlaunch.analysis.compare", "os.path"),
        ("fastlaunch_train.models.te_blocks", "fastlaunch_train.data.images"),
        ("fastlaunch_train.workloads.vit", "click"),
        ("fastlaunch_train.node.agent", "fastlaunch_train.records.records"),
    ):
        assert violation(module, imported), (module, imported)
    for module, imported in (
        ("fastlaunch.jobs.job", "fastlaunch_train.recipes.recipe"),
        ("fastlaunch.aws.client", "botocore.exceptions"),
        ("fastlaunch.cli.runs", "fastlaunch.report.table"),
        ("fastlaunch_train.data.images", "fastlaunch_train.workloads.contract"),
    ):
        assert violation(module, imported) is None, (module, imported)


def test_the_launcher_needs_only_its_declared_dependencies() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    distributions = {re.split(r"[^\w.-]", text)[0].lower() for text in project["dependencies"]}
    names = importlib.metadata.packages_distributions()
    trackers = ("mlflow", "sqlalchemy", "wandb", "tensorboard")  # the second is MLflow's own
    optional = {("fastlaunch.lifecycle.rehearsal", "sagemaker")}
    optional |= {(f"fastlaunch.api.{name}", "pandas") for name in ("results", "comparison", "recommend")}
    optional |= {("fastlaunch.report.trackers", name) for name in trackers}
    optional |= {("fastlaunch.report.page.charts", name) for name in ("altair", "vl_convert")}
    for module, imported_there in all_imports().items():
        if not within(module, "fastlaunch"):
            continue
        for line, imported in imported_there:
            top = imported.partition(".")[0]
            if top in sys.stdlib_module_names or top in ("fastlaunch", "fastlaunch_train"):
                continue
            owners = {name.lower() for name in names.get(top, [top])}
            assert owners & distributions or (module, top) in optional, (
                f"{module}:{line} imports {imported}, which pyproject does not require"
            )


def test_the_page_of_the_design_has_this_table() -> None:
    text = (Path(__file__).parents[1] / "docs/design.md").read_text(encoding="utf-8")
    table = text.partition("## Rooms of the launcher")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([^|]+) \|$", table, re.MULTILINE)
    order = [room for room, _ in rows]
    for room, may_import in rows:
        allowed = LAUNCHER_ROOMS[room]
        words = {
            "nothing of ours": (),
            "all above": order[: order.index(room)],
            "all but cli": [name for name in order if name not in ("api", "cli")],
            "all": None,
        }.get(may_import, may_import.split(", "))
        assert (words and set(words)) == (allowed and set(allowed)), room
    assert set(order) == set(LAUNCHER_ROOMS)


def test_the_contract_modules_load_without_torch() -> None:
    contract = [
        module for module in MODULES if any(within(module, f"fastlaunch_train.{name}") for name in CONTRACT)
    ]
    code = (
        f"import sys, {', '.join(contract)};"
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

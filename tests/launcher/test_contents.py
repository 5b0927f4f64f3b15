"""Which script it was: what it is called, and which edits make it another version."""

import os
import shlex
import subprocess
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fastlaunch.jobs.contents import script_now, with_contents
from fastlaunch.jobs.job import Job, Script
from fastlaunch.jobs.scripts import script_name, script_spec
from fastlaunch.jobs.working_directory import working_directory
from fastlaunch_train.records.contents import version_of

#: A repository of two projects: what each file holds.
FILES = {
    "a/train.py": "import model, lib.loss\nfrom fast_attention import flash\nimport json, fastlaunch_train\n",
    "a/model.py": "def build():\n    from lib import parts\n",
    "a/config.json": "{}",
    "b/train.py": "import model\n",
    "b/model.py": "",
    "b/conf.yaml": "lr: 1",
    "lib/__init__.py": "",
    "lib/loss.py": "from . import scale\nfrom .deep.more import *\n",
    "lib/scale.py": "",
    "lib/deep/more.py": "",
    "lib/parts.py": "",
    "lib/unused.py": "",
    "src/fast_attention/__init__.py": "",
    "src/fast_attention/kernel.cu": "",
    "tools/json.py": "",
    "vendored/fastlaunch_train.py": "",
    "conf/base.yaml": "model: optim.lion.Lion\n",
    "optim/lion.py": "",
    "optim/adam.py": "",
    "free.py": "import importlib\nimportlib.import_module(name)\n",
    "run.sh": "python a/train.py",
    "pkg/train.py": "import lib",
    "README.md": "",
    "pyproject.toml": "",
}


def git(*words: str) -> None:
    given = {"GIT_CONFIG_GLOBAL": "/dev/null", "HOME": "/nowhere"}
    command = ["git", "-c", "user.name=x", "-c", "user.email=x@x", *words]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **given})


@pytest.fixture(params=["git", "plain"])
def here(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "work"
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.chdir(folder)
    if request.param == "git":
        git("init", "-q")
        git("add", "-A")
        git("commit", "-qm", "all")
    return folder


def files(command: str) -> dict[str, str]:
    return dict(with_contents(Script(command=tuple(shlex.split(command))), home=Path("/nowhere")).files)


OF_ALL = ("conf/base.yaml", "optim/lion.py", "run.sh")
OF_A = {
    *("a/train.py", "a/model.py", "a/config.json", "lib/__init__.py", "lib/loss.py", "lib/scale.py"),
    *("lib/deep/more.py", "lib/parts.py", "src/fast_attention/__init__.py", "src/fast_attention/kernel.cu"),
    *OF_ALL,
}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python -u a/train.py --lr 1", OF_A),
        ("torchrun --nproc-per-node 2 ./a/train.py", OF_A),
        ("accelerate launch a/train.py", OF_A),
        ("python -m torch.distributed.run a/train.py", OF_A),
        ("./a/train.py", OF_A),
        (
            "python b/train.py",
            {"b/train.py", "b/model.py", "b/conf.yaml", "conf/base.yaml", "optim/lion.py", "run.sh"},
        ),
        (
            "python -m pkg.train",
            {"pkg/train.py", "lib/__init__.py", "conf/base.yaml", "optim/lion.py", "run.sh"},
        ),
        ("python free.py", {*FILES} - {"README.md", "pyproject.toml"}),
        ("bash run.sh", {*FILES} - {"README.md", "pyproject.toml"}),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_scripts_files_are_what_it_imports_and_what_configures_it(command: str, expected: set[str]) -> None:
    assert {*files(command)} == expected


def test_where_a_script_is_started_from_does_not_matter(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not (here / ".git").exists():
        return
    (here / "link.py").symlink_to("a/train.py")
    clone = here.parent / "clone"
    git("clone", "-q", str(here), str(clone))
    told = set()
    for folder, word in (
        *((here, "a/train.py"), (here, "link.py"), (here / "a", "train.py"), (here / "b", "../a/train.py")),
        *((here.parent, "work/a/train.py"), (here.parent, str(here / "a/train.py")), (clone, "a/train.py")),
    ):
        monkeypatch.chdir(folder)
        told.add((script_name(["python", word]), version_of(files(f"python {word}"))))
    assert [name for name, _ in told] == ["a/train.py"]


def write(path: str, text: str = "x = 1") -> None:
    Path(path).parent.mkdir(exist_ok=True, parents=True)
    Path(path).write_text(text)


@pytest.mark.parametrize(
    ("edit", "is_another"),
    [
        (lambda: write("a/train.py"), True),
        (lambda: write("a/model.py"), True),
        (lambda: write("lib/scale.py"), True),
        (lambda: write("conf/base.yaml", "lr: 2"), True),
        (lambda: write("conf/new.yaml", "lr: 2"), True),
        (lambda: write("src/fast_attention/kernel.cu"), True),
        (lambda: write("a/config.json", "[1]"), True),
        (lambda: write("README.md"), False),
        (lambda: write("b/train.py"), False),
        (lambda: write("b/conf.yaml"), False),
        (lambda: write("lib/unused.py"), False),
        (lambda: write("scratch.py"), False),
        (lambda: write("metrics.json", "{}"), False),
        (lambda: write("saved/config.json", "{}"), False),
        (lambda: write("outputs/x/config.yaml", "lr: 2"), False),
        (lambda: write("lightning_logs/version_0/hparams.yaml"), False),
        (lambda: write("a/__pycache__/model.py"), False),
        (lambda: write("venv/lib/lib/loss.py"), False),
        (lambda: [write(".fastlaunchignore", "new.yaml"), write("conf/new.yaml")], False),
    ],
)
@pytest.mark.parametrize("here", ["git"], indirect=True)
@pytest.mark.usefixtures("here")
def test_what_is_edited_makes_another_version_if_it_can_change_training(
    edit: Callable[[], object], is_another: bool
) -> None:
    command = "python a/train.py --config new.json --out result.json"
    before = version_of(files(command))
    edit()
    write("result.json", "{}")
    assert (version_of(files(command)) != before) is is_another


@pytest.mark.parametrize("name", ["hp.json", "conf.yaml", "run.py"])
@pytest.mark.usefixtures("here")
def test_any_configuration_that_a_command_names_counts(name: str) -> None:
    write(name, "1")
    before = version_of(files(f"python a/train.py {name}"))
    write(name, "2")
    assert version_of(files(f"python a/train.py {name}")) != before


def test_a_configuration_that_a_run_wrote_is_none_of_its_script(here: Path) -> None:
    script = Script(command=("python", "a/train.py"))
    began = datetime.now(UTC)
    write("a/started.yaml", "at: 1")
    write("a/model.py", "edited = 1")
    runs = [(began, datetime.now(UTC) + timedelta(seconds=1))]
    names = {name for name, _ in with_contents(script, home=Path("/nowhere"), runs=runs).files}
    assert "a/started.yaml" not in names and "a/model.py" in names
    assert "a/started.yaml" in {
        name for name, _ in with_contents(script, home=Path("/nowhere"), runs=()).files
    }


def test_a_commit_of_what_is_there_changes_nothing_but_the_commit(here: Path) -> None:
    if not (here / ".git").exists():
        assert with_contents(Script(command=("python", "a/train.py")), home=here).commit is None
        return
    write("a/model.py")
    write("outputs/config.yaml", "a: 1")
    found = []
    for _ in range(2):
        script = with_contents(Script(command=("python", "a/train.py")), home=here.parent / "home")
        found.append((script.files, (script.commit or "").endswith("-dirty")))
        git("add", "-A")
        git("commit", "-qm", "edited", "--allow-empty")
    assert found == [(found[0][0], True), (found[0][0], False)]


def test_what_travels_is_what_runs_here(here: Path) -> None:
    """So a rehearsal and its job on AWS are of one version; what git does not track stays behind."""
    script, home = Script(command=("python", "a/train.py")), here.parent / "home"
    here_files = with_contents(script, home=home).files
    assert with_contents(script, home=home, directory=working_directory(here, home=home)).files == here_files
    write("conf/untracked.yaml", "a: 1")
    directory = working_directory(here, home=home)
    sent = dict(with_contents(script, home=home, directory=directory).files)
    assert ("conf/untracked.yaml" in sent) is (directory.rule is None)


def test_one_more_round_of_what_writes_many_files_is_the_same_version(here: Path) -> None:
    for number in range(150):
        write(f"lib/part_{number}.py")
    write("a/train.py", "\n".join(f"import lib.part_{number}" for number in range(150)))
    found = files("python a/train.py")
    # Of so many the folders stand for their files.
    assert "lib/" in found and len(found) < 100
    write("lib/part_7.py", "y = 2")
    assert {name for name, digest in files("python a/train.py").items() if found[name] != digest} == {"lib/"}


def test_a_workload_of_ones_own_has_files_and_one_of_ours_has_none(here: Path) -> None:
    from fastlaunch_train.recipes.recipes import RECIPES

    spec = {"recipe": RECIPES["bf16"], "batch_size": 1, "steps": 1, "num_gpus": 1}
    own = script_now(Job(workload="./b/train.py:build", **spec), here, home=here.parent / "home")
    assert own is not None and {"b/train.py", "b/model.py"} <= {*dict(own.files)}
    assert script_now(Job(workload="vit-tiny", **spec), here, home=here) is None


def test_a_folder_that_is_gone_keeps_nothing_from_running(here: Path) -> None:
    job = script_spec(Script(command=("python", "a/train.py")))
    found = script_now(job, here / "gone", home=here)
    assert found is not None and not found.files

"""What travels with a script: by git, by .fastlaunchignore, by neither; and what is refused."""

import os
import subprocess
from pathlib import Path

import pytest

from fastlaunch.core.errors import BadFile, UserError
from fastlaunch.jobs.working_directory import MAX_BYTES, WorkingDirectory, commit_of, shown, working_directory


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with files, outside of any checkout."""
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    folder = tmp_path / "project"
    write(folder, "train.py", "src/model.py", "data/big.bin", "__pycache__/train.pyc", "home/runs/log.txt")
    return folder


def write(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(os.fsencode(name))


def git(root: Path, *arguments: str) -> None:
    subprocess.run(["git", "-C", str(root), *arguments], check=True, capture_output=True)


def travelling(root: Path) -> WorkingDirectory:
    return working_directory(root, home=root / "home")


def paths(root: Path) -> list[str]:
    return [file.path for file in travelling(root).files]


def test_without_a_rule_all_travels_but_fastlaunchs_home_and_caches(root: Path) -> None:
    directory = travelling(root)
    assert [file.path for file in directory.files] == ["data/big.bin", "src/model.py", "train.py"]
    assert (directory.rule, directory.num_bytes) == (None, 12 + 12 + 8)
    assert [file.path for file in directory.largest][:2] == ["data/big.bin", "src/model.py"]


def test_what_git_tracks_travels_as_it_is_on_disk(root: Path) -> None:
    git(root, "init")
    write(root, "gone.py", "run.sh", "odd \udcff name.txt", "home/kept.txt", "secret.env")
    (root / ".gitignore").write_text("*.env\n")
    git(root, "add", "train.py", "gone.py", "run.sh", ".gitignore", "src", "home/kept.txt", "odd*")
    (root / "train.py").write_text("changed since")
    (root / "gone.py").unlink()
    (root / "run.sh").chmod(0o700)
    directory = travelling(root)
    found = {file.path: (file.num_bytes, file.is_executable) for file in directory.files}
    assert found == {
        ".gitignore": (6, False),
        "odd \udcff name.txt": (14, False),
        "run.sh": (6, True),
        "src/model.py": (12, False),
        "train.py": (13, False),
    }
    assert directory.rule == "git"
    assert set(directory.untracked) >= {"data/big.bin"} and "secret.env" not in directory.untracked
    assert shown("odd \udcff name.txt") == "odd \ufffd name.txt"
    # From a folder in a checkout, that folder's.
    assert paths(root / "src") == ["model.py"]
    with pytest.raises(UserError, match="git tracks nothing here"):
        travelling(root / "data")


def test_a_fastlaunchignore_says_it_instead_of_git(root: Path) -> None:
    git(root, "init")
    git(root, "add", "train.py")
    write(root, "logs/a.log", "logs/keep.log", "notes/x")
    (root / ".fastlaunchignore").write_text("# data stay\n/data/\n*.log\n!keep.log\nnotes\n!notes/x\n")
    # What is in a folder that is ignored cannot come back, as with git.
    assert paths(root) == [".fastlaunchignore", "logs/keep.log", "src/model.py", "train.py"]
    (root / ".fastlaunchignore").write_bytes("\ufeff/data/\r\n*.log\r\nnotes\r\n".encode())
    assert paths(root) == [".fastlaunchignore", "src/model.py", "train.py"]
    (root / ".fastlaunchignore").write_text("*\n")
    with pytest.raises(UserError, match=r"\.fastlaunchignore leaves nothing"):
        travelling(root)
    (root / ".fastlaunchignore").write_bytes(b"\xff\n")
    with pytest.raises(BadFile, match="not UTF-8"):
        travelling(root)


def test_links_travel_as_links_unless_they_lead_out(root: Path) -> None:
    (root / "src/last").symlink_to("../train.py")
    (root / "whole").symlink_to(root / "src")
    (root / "nowhere").symlink_to("missing.py")
    targets = {file.path: file.target for file in travelling(root).files if file.target}
    assert targets == {"src/last": "../train.py", "whole": "src", "nowhere": "missing.py"}
    (root / "data/all").symlink_to("/usr")
    with pytest.raises(UserError, match=f"the link data/all leads out of {root}, to /usr") as refused:
        travelling(root)
    assert "/data/all" in (refused.value.hint or "")


@pytest.mark.parametrize("is_inside", [False, True])
def test_a_tracked_folder_that_became_a_link_sends_nothing_else(root: Path, is_inside: bool) -> None:
    git(root, "init")
    git(root, "add", "data/big.bin", "train.py")
    elsewhere = root / ".git" if is_inside else root.parent / "elsewhere"
    write(elsewhere, "big.bin")
    (root / "data/big.bin").unlink()
    (root / "data").rmdir()
    (root / "data").symlink_to(elsewhere)
    with pytest.raises(UserError, match=r"data/big\.bin lies behind a link"):
        travelling(root)
    (root / ".fastlaunchignore").write_text("data\n")
    assert "train.py" in paths(root) and "data/big.bin" not in paths(root)


def test_nothing_runs_that_a_repositorys_configuration_names(root: Path) -> None:
    git(root, "init")
    git(root, "add", "train.py", "src")
    git(root, "-c", "user.name=a", "-c", "user.email=a@example.com", "commit", "-qm", "all")
    program = root.parent / "program"
    program.write_text(f"#!/bin/sh\ntouch {root.parent}/ran\ncat\n")
    program.chmod(0o755)
    (root / ".git/info/attributes").write_text("*.py filter=own\n")
    for name in ("core.fsmonitor", "filter.own.clean", "filter.own.process"):
        git(root, "config", name, str(program))
    # As long as before, so that git has to look at what is in it.
    (root / "train.py").write_bytes(b"TRAIN.PY")
    assert "train.py" in paths(root)
    assert (commit_of(root) or "").endswith("-dirty")
    assert not (root.parent / "ran").exists()


def test_too_much_is_refused_with_the_largest_and_what_to_type(root: Path) -> None:
    for name, size in (("data/big.bin", MAX_BYTES), ("model.pt", 2**20)):
        (root / name).touch()
        os.truncate(root / name, size)
    with pytest.raises(UserError) as refused:
        travelling(root)
    assert "4 files of 201 MiB" in refused.value.message
    assert "the largest: data/ 200 MiB, model.pt 1 MiB" in refused.value.message
    assert "echo /data/ >> .fastlaunchignore" in (refused.value.hint or "")
    (root / ".fastlaunchignore").write_text("/data/\n")
    assert "model.pt" in paths(root)


def test_what_cannot_be_told_or_read_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(root))
    with pytest.raises(UserError, match="may be private"):
        travelling(root)
    (root / ".git").mkdir()
    with pytest.raises(UserError, match="it is not known what of"):
        travelling(root)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="git is not installed"):
        travelling(root)
    with pytest.raises(UserError, match="there is none"):
        empty = root.parent / "empty"
        empty.mkdir()
        travelling(empty)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_a_file_that_cannot_be_read_is_named(root: Path) -> None:
    (root / "train.py").chmod(0)
    with pytest.raises(BadFile, match=r"train\.py: cannot be read"):
        travelling(root)

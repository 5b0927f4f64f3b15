"""`--requirements`: what pip resolves here for the node's Python, and what of that travels."""

import gzip
import io
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
from wheel_builder import make_wheel

from fastlaunch.catalog.container_images import shipped_base_images
from fastlaunch.core.errors import BadFile, UserError
from fastlaunch.jobs import requirements
from fastlaunch.jobs.code_bundle import run_pip
from fastlaunch.jobs.requirements import read_requirements, requirements_bundle

#: Of another Python than the one that runs this.
BASE = replace(shipped_base_images().images[0], python="3.12", torch="1.2")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels, which is all that pip knows: tiny needs torch, which brings nvidia-x."""
    folder = tmp_path / "index"
    make_wheel(folder, "tiny", needs=("torch", "nvidia-ml-py", 'newer; python_version == "3.12"'))
    make_wheel(folder, "torch", needs=("nvidia-x; platform_system == 'Linux'", "filelock"))
    for name in ("nvidia_x", "nvidia_ml_py", "newer", "filelock"):
        make_wheel(folder, name)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def wrote(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "requirements.txt"
    path.write_text(text)
    return path


def contents(data: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(data))) as archive:
        members = {member.name: archive.extractfile(member) for member in archive if member.isfile()}
    return {name: file.read() for name, file in members.items() if file is not None}


def test_wheels_for_the_nodes_python_travel_and_the_images_torch_stays(index: Path, tmp_path: Path) -> None:
    path = wrote(tmp_path, "tiny>=1 # what it is for\ntorch\n")
    bundle = requirements_bundle(path, BASE)
    names = ("filelock", "newer", "nvidia_ml_py", "tiny")
    files = contents(bundle.data)
    assert sorted(files) == ["requirements.txt", *(f"wheels/{name}-1.2-py3-none-any.whl" for name in names)]
    assert files["requirements.txt"] == b"tiny>=1\ntorch\n"
    # From an index nothing is resolved here.
    assert contents(requirements_bundle(path, None).data) == {"requirements.txt": b"tiny>=1\ntorch\n"}


@pytest.mark.slow
def test_a_torch_that_is_pinned_travels_with_what_it_brings(index: Path, tmp_path: Path) -> None:
    other = replace(BASE, torch="1.1")
    pinned = requirements_bundle(wrote(tmp_path, "torch==1.2\n"), other)
    assert {"wheels/torch-1.2-py3-none-any.whl", "wheels/nvidia_x-1.2-py3-none-any.whl"} <= {
        *contents(pinned.data)
    }
    with pytest.raises(UserError, match=r"requested \(constraint\) torch==1\.1") as error:
        requirements_bundle(wrote(tmp_path / "index", "tiny"), other)
    assert error.value.hint and "image has torch 1.1" in error.value.hint


@pytest.mark.slow
def test_no_module_of_the_current_folder_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("pip", "json"):
        (tmp_path / f"{name}.py").write_text("open('hacked', 'w').close()\n")
    for arguments in (("-m", "pip", "--version"), ("-c", "import json, pip")):
        assert run_pip(*arguments) == []
    assert not (tmp_path / "hacked").exists()


@pytest.mark.slow
def test_too_much_does_not_travel(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "MAX_WHEEL_BYTES", 100)
    with pytest.raises(UserError, match="at most 100 B travel; the largest: newer"):
        requirements_bundle(wrote(tmp_path, "newer"), BASE)


def test_a_file_is_read_with_what_it_includes(tmp_path: Path) -> None:
    (tmp_path / "base.txt").write_text("b == 2 ; python_version > '3'\n-f .\n")
    path = wrote(tmp_path, "\n# first\na[x]>=1,<2 \\\n  --hash=sha256:00\n-r base.txt\n--pre\n")
    required = read_requirements(path)
    assert required.packages == ("a[x]>=1,<2    --hash=sha256:00", "b == 2 ; python_version > '3'")
    assert required.names == ("a", "b")
    assert required.options == (f"--find-links {tmp_path}", "--pre")
    for name in ("base.txt", path.name):
        text = (tmp_path / name).read_text().replace("\n", "\r\n")
        (tmp_path / name).write_bytes(f"\ufeff{text}".encode())
    assert read_requirements(path) == required


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("# nothing\n", "it names no package"),
        ("a\n-e .\n", ":2: -e cannot travel"),
        ("-r requirements.txt\n", ":1: includes itself"),
        ("-r other.txt\n", "other.txt: cannot be read: No such file"),
        ("a \\\n  >1\ngit+https://example.com/b\n", ":3: it names a file or an address"),
        ("?!\n", ":1: '\\?!' names no package"),
        ("a @ file:b\n", ":1: it names a file or an address"),
        ("a[x]@./b ; python_version > '3'\n", ":1: it names a file or an address"),
        ("a-1.0-py3-none-any.whl\n", ":1: it names a file or an address"),
        ("a.tar.gz --hash=sha256:00\n", ":1: it names a file or an address"),
        ("b/a\n", ":1: 'b/a' names no package"),
        ("a>1 -e b\n", "names no package"),
        ("-c b.txt\n", ":1: -c cannot travel"),
        ("a\n--pre -e ./b\n", ":2: --pre cannot travel"),
        ("a\n--no-index -r ../outside.txt\n", ":2: --no-index cannot travel"),
        ("a\n-i https://a.b --extra-index-url https://me:0a1b@c.d\n", ":2: -i cannot travel"),
        # pip ends the line at the comment.
        ("a \\\n# b \\\n-e c\n", "names no package|-e cannot travel"),
        ("-r ../outside.txt\n", ":1: includes a file outside"),
        ("-r link.txt\n", ":1: includes a file outside"),
    ],
)
def test_a_file_that_cannot_travel_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "outside.txt").write_text("a")
    (tmp_path / "own" / "link.txt").symlink_to(tmp_path / "outside.txt")
    path = wrote(tmp_path / "own", text)
    for from_index in (False, True):
        with pytest.raises(BadFile, match=problem):
            read_requirements(path, from_index=from_index)


def test_where_a_node_looks_it_can_reach_without_a_password_in_the_file(tmp_path: Path) -> None:
    for value in (".", "file:///srv/index", "wheels"):
        path = wrote(tmp_path, f"a\n--find-links {value}\n")
        read_requirements(path)
        with pytest.raises(BadFile, match=":2: --find-links names no address") as refused:
            read_requirements(path, from_index=True)
        assert "--requirements-from-index" in str(refused.value.hint)
    for login in ("me:0a1b", "m${E}:0a1b", "me:0${P}a1b", "${A}:0a1b"):
        path = wrote(tmp_path, f"a\n-i https://{login}@pypi.acme.com/simple\n")
        read_requirements(path)
        with pytest.raises(BadFile, match="has a password") as refused:
            read_requirements(path, from_index=True)
        assert "--secret" in str(refused.value.hint) and "0a1b" not in refused.value.message
    with pytest.raises(BadFile, match="names no address"):
        read_requirements(wrote(tmp_path, "a\n-i ${NONE}https://me:0a1b@a.b\n"), from_index=True)
    options = (
        "-i https://me:${PIP_PASSWORD}@pypi.acme.com/simple",
        "--extra-index-url=https://a.b",
        "-i ${INDEX}",
        "--pre",
    )
    path = wrote(tmp_path, "\n".join(["a", *options]))
    assert read_requirements(path, from_index=True).options == options

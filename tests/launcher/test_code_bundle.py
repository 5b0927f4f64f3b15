"""The code bundle: what is in it, that equal files make equal bytes, and that it is stored once."""

import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from wheel_builder import make_wheel

from fastlaunch.aws.client import Aws
from fastlaunch.catalog.container_images import shipped_base_images
from fastlaunch.core.errors import BadFile
from fastlaunch.core.paths import training_package
from fastlaunch.jobs.code_bundle import Bundle, make_bundle, pack, script_bundle, upload_bundle
from fastlaunch.jobs.working_directory import working_directory

if TYPE_CHECKING:
    from moto_server import MotoServer

BASE = next(image for image in shipped_base_images().images if image.torch == "2.13.0")


def members(data: bytes) -> dict[str, tarfile.TarInfo]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {member.name: member for member in archive}


def bundle_here(wheels: Path, user_file: Path | None = None, name: str = "tiny") -> Bundle:
    pin = make_wheel(wheels, name)
    return make_bundle(BASE, user_file=user_file, commit="c0ffee", wheels=wheels, pins=[pin])


def test_a_bundle_holds_what_the_container_needs_and_nothing_else(tmp_path: Path) -> None:
    bundle = bundle_here(tmp_path)
    found = members(bundle.data)
    assert bundle.sha256 == hashlib.sha256(bundle.data).hexdigest()
    assert bundle.commit == "c0ffee"
    assert {name.partition("/")[0] for name in found} == {
        *("run_train.sh", "run_sagemaker.sh", "train", "site", "user")
    }
    package = training_package()
    sources = {f"train/fastlaunch_train/{path.relative_to(package)}" for path in package.rglob("*.py")}
    assert {name for name in found if name.startswith("train/")} == sources
    assert {name for name in found if name.startswith("site/tiny/")} == {"site/tiny/__init__.py"}
    assert found["user"].isdir()


def test_the_user_file_keeps_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("models").mkdir()
    Path("models", "my.py").write_text("def build(): ...\n")
    found = members(bundle_here(tmp_path / "wheels", Path("./models/my.py")).data)
    assert found["user/models/my.py"].size == len("def build(): ...\n")
    with pytest.raises(BadFile, match=r"gone\.py: cannot be read"):
        bundle_here(tmp_path, Path("gone.py"))


def test_a_scripts_bundle_holds_its_folder_as_it_is_and_no_wheels(tmp_path: Path) -> None:
    root = tmp_path / "project"
    (root / "src").mkdir(parents=True)
    (root / "src" / "train.py").write_text("print()\n")
    (root / "run.sh").touch(mode=0o755)
    (root / "last").symlink_to("src/train.py")
    directory = working_directory(root, home=tmp_path / "home")
    bundle = script_bundle(directory)
    found = members(bundle.data)
    assert {name.partition("/")[0] for name in found} == {"run_train.sh", "run_sagemaker.sh", "train", "user"}
    own = {name: (each.mode, each.size, each.linkname) for name, each in found.items() if "user/" in name}
    assert own == {
        "user/src/train.py": (0o644, 8, ""),
        "user/run.sh": (0o755, 0, ""),
        "user/last": (0o777, 0, "src/train.py"),
    }
    os.utime(root / "run.sh", (1, 1))
    assert script_bundle(directory) == bundle and bundle.commit is None
    (root / "run.sh").unlink()
    with pytest.raises(BadFile, match=r"run\.sh: cannot be read"):
        script_bundle(directory)


def test_equal_files_make_equal_bytes(tmp_path: Path) -> None:
    first = bundle_here(tmp_path / "a")
    os.utime(training_package() / "records" / "records.py")
    assert bundle_here(tmp_path / "b").data == first.data
    assert bundle_here(tmp_path / "c", name="other").sha256 != first.sha256
    files = {"b/x": b"1", "a": b"22", "run_train.sh": b"exec"}
    assert pack(files) == pack(dict(reversed(files.items())))


def test_a_bundle_tells_neither_who_made_it_nor_when() -> None:
    data = pack({"run_train.sh": b"", "a": b""})
    assert data[3:8] == b"\0\0\0\0\0", "gzip: no name, no time"
    found = {
        (name, member.mode, member.uid, member.gid, member.uname, member.gname, member.mtime)
        for name, member in members(data).items()
    }
    modes = {("user", 0o755), ("run_train.sh", 0o755), ("a", 0o644)}
    assert found == {(name, mode, 0, 0, "", "", 315532800) for name, mode in modes}


def test_the_nodes_tar_unpacks_it(tmp_path: Path) -> None:
    bundle = bundle_here(tmp_path)
    (tmp_path / "code.tar.gz").write_bytes(bundle.data)
    (tmp_path / "code").mkdir()
    done = subprocess.run(
        ["tar", "-xzf", tmp_path / "code.tar.gz", "-C", tmp_path / "code", "--no-same-owner"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == ""
    assert os.access(tmp_path / "code" / "run_train.sh", os.X_OK)
    check = "import tiny, fastlaunch_train.recipes.recipes as r; print(tiny.__version__, r.__file__)"
    path = os.pathsep.join(str(tmp_path / "code" / name) for name in ("train", "site"))
    out = subprocess.run(
        [sys.executable, "-c", check], env={"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert out.stdout == f"1.2 {tmp_path}/code/train/fastlaunch_train/recipes/recipes.py\n"


def test_a_bundle_is_stored_once(aws_server: "MotoServer", tmp_path: Path) -> None:
    from moto_server import backend

    bucket = aws_server.set_up_region("us-east-1").bucket
    assert bucket is not None
    bundle = bundle_here(tmp_path)
    stored = upload_bundle(Aws(), "us-east-1", bucket, "team/fastlaunch", bundle)
    assert stored.key == f"team/fastlaunch/code/{bundle.sha256}.tar.gz"
    assert (stored.sha256, stored.commit) == (bundle.sha256, "c0ffee")
    data = backend("s3", "aws").get_object(bucket, stored.key).value
    assert data == bundle.data and gzip.decompress(data)

    assert upload_bundle(Aws(), "us-east-1", bucket, "team/fastlaunch", bundle) == stored
    assert [request.status for request in aws_server.sent("PutObject")] == [200, 412]
    assert upload_bundle(Aws(), "us-east-1", bucket, "", bundle).key == f"code/{bundle.sha256}.tar.gz"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_real_bundle_imports_what_training_needs(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    bundle = make_bundle(BASE, user_file=None, commit=None, wheels=tmp_path / "wheels")
    with tarfile.open(fileobj=io.BytesIO(bundle.data)) as archive:
        archive.extractall(tmp_path / "code", filter="data")
    code = (
        "import sys, importlib.machinery as m\n"
        "absent = {'timm', 'huggingface_hub', 'safetensors', 'yaml', 'tqdm', 'requests', 'packaging'}\n"
        "find = m.PathFinder.find_spec\n"
        "class Image:\n"
        "    @staticmethod\n"
        "    def find_spec(name, path=None, target=None):\n"
        "        top = name.partition('.')[0]\n"
        "        if top in absent and (top != 'timm' or path is None):\n"
        "            path = [one for one in sys.path if one.endswith('/site')] if top == 'timm' else []\n"
        "        return find(name, path, target)\n"
        "sys.meta_path = [Image if one is m.PathFinder else one for one in sys.meta_path]\n"
        "from fastlaunch_train.workloads.vit import prepare_torchvision\n"
        "prepare_torchvision()\n"
        "import timm; timm.create_model('vit_tiny_patch16_224'); print(timm.__file__)\n"
    )
    path = os.pathsep.join(str(tmp_path / "code" / name) for name in ("train", "site"))
    told = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert told.stdout == f"{tmp_path}/code/site/timm/__init__.py\n", told.stderr

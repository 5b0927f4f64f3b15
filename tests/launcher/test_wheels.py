"""Wheels for the container: pinned, fetched once, pure Python; and what pip installs in an own image."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from wheel_builder import make_wheel

from fastlaunch.core.errors import BadFile, UnknownName, UserError
from fastlaunch.jobs.code_bundle import Pin, cached_wheel, fetch_wheels, read_pins, unpack_wheel, wanted_pins
from fastlaunch.jobs.image_build import context_without_wheels, packages_of, read_extras, with_extras
from fastlaunch.jobs.variants import IN_BASE_IMAGES

TIMM = Pin(name="timm", version="1.0.31", sha256="5b" * 32)
CONSTRAINTS = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
DOCKERFILE = context_without_wheels()["Dockerfile"]


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder from which a stand-in for pip copies all wheels; without any it fails as pip does."""
    folder = tmp_path / "index"
    folder.mkdir()
    python = tmp_path / "python"
    python.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> {tmp_path}/arguments\n'
        "for to; do :; done\n"
        f'cp {folder}/*.whl "$to" 2>/dev/null || {{ echo "ERROR: No matching" >&2; exit 1; }}\n'
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    return folder


def test_the_shipped_lists_are_of_the_constraints_and_leave_the_images_own_alone() -> None:
    assert [pin.name for pin in wanted_pins()] == ["timm"]
    # `submit` says `fastlaunch build --with` these, by the names they are imported by.
    assert set(read_extras()) == {"transformers", "lightning", "torchao", "peft", "liger_kernel"}
    packages = [*packages_of(list(read_extras())), *(f"{pin.name}=={pin.version}" for pin in wanted_pins())]
    assert set(packages) <= set(CONSTRAINTS)
    assert not {each.partition("==")[0] for each in packages} & {"torchvision", "numpy", *IN_BASE_IMAGES}


def test_a_list_of_ones_own_is_taken_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin = make_wheel(tmp_path)
    listed = tmp_path / "own.txt"
    monkeypatch.setenv("FASTLAUNCH_WHEELS", str(listed))
    with pytest.raises(BadFile, match="cannot be read"):
        wanted_pins()
    listed.write_text(f"# mine\n{pin.name}=={pin.version} --hash=sha256:{pin.sha256}\n")
    assert wanted_pins() == (pin,)


def test_a_wheel_is_fetched_once(index: Path, tmp_path: Path) -> None:
    pin = make_wheel(index)
    make_wheel(tmp_path / "wheels", files={"more.py": ""})
    assert cached_wheel(pin, tmp_path / "wheels") is None, "it is damaged"
    for _ in range(2):
        fetch_wheels([pin], tmp_path / "wheels", python="3.12.10")
    assert [path.name for path in (tmp_path / "wheels").iterdir()] == ["tiny-1.2-py3-none-any.whl"]
    assert cached_wheel(pin, tmp_path / "wheels")
    (arguments,) = (tmp_path / "arguments").read_text().splitlines()
    assert " --no-deps --only-binary=:all: --platform any --python-version 3.12 --require-hashes" in arguments


def test_without_the_wheel_the_user_learns_where_to_put_it(index: Path, tmp_path: Path) -> None:
    folder = tmp_path / "wheels"
    with pytest.raises(UserError, match=r"cannot get timm 1\.0\.31 for the container: No matching") as caught:
        fetch_wheels([TIMM], folder, python="3.12")
    assert "timm-1.0.31-py3-none-any.whl" in str(caught.value.hint) and str(folder) in str(caught.value.hint)
    pin = make_wheel(index)
    with pytest.raises(UserError, match=r"cannot get tiny 1\.2"):
        fetch_wheels([replace(pin, sha256="0" * 64)], folder, python="3.12")


def test_a_wheel_is_unpacked_without_what_python_makes_itself(tmp_path: Path) -> None:
    pin = make_wheel(tmp_path, files={"tiny/old.pyc": "", "tiny/data.json": "{}"})
    content = cached_wheel(pin, tmp_path)
    assert content is not None
    assert sorted(unpack_wheel(pin, content)) == [
        *("tiny-1.2.dist-info/METADATA", "tiny-1.2.dist-info/RECORD", "tiny-1.2.dist-info/WHEEL"),
        *("tiny/__init__.py", "tiny/data.json"),
    ]
    pin = make_wheel(tmp_path, pure=False)
    content = cached_wheel(pin, tmp_path)
    assert content is not None
    with pytest.raises(UserError, match="not pure Python"):
        unpack_wheel(pin, content)


@pytest.mark.parametrize(
    "line", ["timm==1.0.31", "timm>=1 --hash=sha256:" + "0" * 64, "timm==1.0.31 --hash=sha256:12"]
)
def test_a_list_with_a_wrong_line_names_it(line: str, tmp_path: Path) -> None:
    path = tmp_path / "wheels.txt"
    path.write_text(f"# a comment\n\n{line}\n")
    with pytest.raises(BadFile) as caught:
        read_pins(path)
    assert caught.value.line == 3


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_pip_gets_a_wheel_by_its_hash_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = tmp_path / "index"
    pin = make_wheel(index)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    with pytest.raises(UserError, match="HASH"):
        fetch_wheels([replace(pin, sha256="0" * 64)], tmp_path / "wheels", python="3.12")
    assert list((tmp_path / "wheels").iterdir()) == []
    fetch_wheels([pin], tmp_path / "wheels", python="3.12")
    assert cached_wheel(pin, tmp_path / "wheels")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_real_wheels_come_through_pip_as_it_is_set_up_here(tmp_path: Path) -> None:
    fetch_wheels(wanted_pins(), tmp_path, python="3.12")
    for pin in wanted_pins():
        content = cached_wheel(pin, tmp_path)
        assert content is not None
        assert f"{pin.name}/__init__.py" in unpack_wheel(pin, content)


def test_an_unknown_extra_gets_the_nearest() -> None:
    with pytest.raises(UnknownName, match="unknown extra 'transformer'") as caught:
        packages_of(["lightning", "transformer"])
    assert "did you mean transformers" in str(caught.value.hint)


def test_without_extras_nothing_is_run_while_an_image_is_built() -> None:
    assert with_extras(DOCKERFILE, ()) == DOCKERFILE
    assert b"\nRUN" not in DOCKERFILE


def test_extras_are_installed_before_the_code_by_the_python_that_has_torch(tmp_path: Path) -> None:
    made = with_extras(DOCKERFILE, ("transformers==5.23.0", "accelerate==1.15.0")).decode()
    assert made.index("RUN ") < made.index("COPY site/")
    command = made[made.index("RUN ") + 4 : made.index("COPY site/")]
    for name, has_torch in (("python", False), ("python3", True)):
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit {0 if has_torch else 1}\necho {name} "$@"\n')
        program.chmod(0o755)
    done = subprocess.run(
        ["/bin/sh", "-c", command], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=True
    )
    assert done.stdout == (
        "python3 -m pip install --no-cache-dir --disable-pip-version-check"
        " transformers==5.23.0 accelerate==1.15.0\n"
    )
    (tmp_path / "python3").unlink()
    alone = subprocess.run(
        ["/bin/sh", "-c", command], env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False
    )
    assert (alone.returncode, alone.stderr) == (1, "no Python with torch in this image\n")

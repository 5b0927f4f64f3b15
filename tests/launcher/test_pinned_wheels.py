"""Wheels for the container: pinned, fetched once through pip, and nothing but pure Python."""

from dataclasses import replace
from pathlib import Path

import pytest
from wheel_builder import make_wheel

from fastlaunch.core.errors import BadFile, UserError
from fastlaunch.images.wheels import (
    Pin,
    cached_wheel,
    fetch_wheels,
    pip_arguments,
    read_pins,
    unpack_wheel,
    wanted_pins,
)

TIMM = Pin(name="timm", version="1.0.31", sha256="5b" * 32)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only place where pip finds anything."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def test_the_wanted_pins_name_timm_of_the_constraints() -> None:
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    assert [pin.name for pin in wanted_pins()] == ["timm"]
    assert all(f"{pin.name}=={pin.version}" in constraints for pin in wanted_pins())


def test_a_list_of_ones_own_is_taken_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pin = make_wheel(tmp_path)
    listed = tmp_path / "own.txt"
    monkeypatch.setenv("FASTLAUNCH_WHEELS", str(listed))
    with pytest.raises(BadFile, match="cannot be read"):
        wanted_pins()
    listed.write_text(f"# mine\n{pin.name}=={pin.version} --hash=sha256:{pin.sha256}\n")
    assert wanted_pins() == (pin,)


def test_pip_is_asked_for_wheels_of_no_platform_and_for_nothing_else(tmp_path: Path) -> None:
    assert pip_arguments(Path("w.txt"), Path("to"), "3.12.10") == [
        *("download", "--quiet", "--disable-pip-version-check", "--no-input", "--no-deps"),
        *("--only-binary=:all:", "--platform", "any", "--python-version", "3.12"),
        *("--require-hashes", "--requirement", "w.txt", "--dest", "to"),
    ]


def test_a_wheel_is_fetched_once(index: Path, tmp_path: Path) -> None:
    pin = make_wheel(index)
    fetch_wheels([pin], tmp_path / "wheels", python="3.12")
    assert [path.name for path in (tmp_path / "wheels").iterdir()] == ["tiny-1.2-py3-none-any.whl"]
    (index / "tiny-1.2-py3-none-any.whl").unlink()
    fetch_wheels([pin], tmp_path / "wheels", python="3.12")
    assert cached_wheel(pin, tmp_path / "wheels")


def test_a_wheel_with_another_hash_is_not_taken(index: Path, tmp_path: Path) -> None:
    pin = make_wheel(index)
    with pytest.raises(UserError, match=r"cannot get tiny 1\.2 for the container: .*HASH") as caught:
        fetch_wheels([replace(pin, sha256="0" * 64)], tmp_path / "wheels", python="3.12")
    assert str(tmp_path / "wheels") in str(caught.value.hint)
    assert list((tmp_path / "wheels").iterdir()) == []


def test_a_damaged_wheel_is_fetched_again(index: Path, tmp_path: Path) -> None:
    pin = make_wheel(index)
    make_wheel(tmp_path / "wheels", files={"more.py": ""})
    assert cached_wheel(pin, tmp_path / "wheels") is None
    fetch_wheels([pin], tmp_path / "wheels", python="3.12")
    assert cached_wheel(pin, tmp_path / "wheels") == (index / "tiny-1.2-py3-none-any.whl").read_bytes()


def test_without_network_the_user_is_told_where_to_put_the_wheel(index: Path, tmp_path: Path) -> None:
    folder = tmp_path / "wheels"
    with pytest.raises(UserError, match=r"cannot get timm 1\.0\.31 for the container: No matching") as caught:
        fetch_wheels([TIMM], folder, python="3.12")
    assert caught.value.hint == (
        "with a network, try again; or put timm-1.0.31-py3-none-any.whl of the Python Package Index into "
        f"{folder}"
    )


def test_a_wheel_is_unpacked_without_what_python_makes_itself(tmp_path: Path) -> None:
    pin = make_wheel(tmp_path, files={"tiny/old.pyc": "", "tiny/data.json": "{}"})
    content = cached_wheel(pin, tmp_path)
    assert content is not None
    assert sorted(unpack_wheel(pin, content)) == [
        *("tiny-1.2.dist-info/METADATA", "tiny-1.2.dist-info/RECORD", "tiny-1.2.dist-info/WHEEL"),
        *("tiny/__init__.py", "tiny/data.json"),
    ]


def test_a_wheel_that_says_it_is_not_pure_is_refused(tmp_path: Path) -> None:
    pin = make_wheel(tmp_path, pure=False)
    content = cached_wheel(pin, tmp_path)
    assert content is not None
    with pytest.raises(UserError, match="not pure Python"):
        unpack_wheel(pin, content)


@pytest.mark.parametrize(
    "line",
    [
        "timm",
        "timm==1.0.31",
        "timm>=1 --hash=sha256:" + "0" * 64,
        "timm==1.0.31 --hash=sha256:12",
        "torch==2.13.0 --hash=sha256:" + "0" * 64,
        "Transformer_Engine==2.13.0 --hash=sha256:" + "0" * 64,
    ],
)
def test_a_list_with_a_wrong_line_names_it(line: str, tmp_path: Path) -> None:
    path = tmp_path / "wheels.txt"
    path.write_text(f"# a comment\n\n{line}\n")
    with pytest.raises(BadFile) as caught:
        read_pins(path)
    assert caught.value.line == 3


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_real_wheels_come_through_pip_as_it_is_set_up_here(tmp_path: Path) -> None:
    fetch_wheels(wanted_pins(), tmp_path, python="3.12")
    for pin in wanted_pins():
        content = cached_wheel(pin, tmp_path)
        assert content is not None
        assert f"{pin.name}/__init__.py" in unpack_wheel(pin, content)

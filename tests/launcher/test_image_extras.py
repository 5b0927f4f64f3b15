"""What pip installs in an image of one's own."""

import subprocess
from pathlib import Path

import pytest

from fastlaunch.core.errors import BadFile, UnknownName
from fastlaunch.images.build import context_without_wheels
from fastlaunch.images.wheels import packages_of, read_extras, with_extras
from fastlaunch.jobs.variants import IN_BASE_IMAGES

DOCKERFILE = context_without_wheels()["Dockerfile"]


def test_the_extras_are_of_the_constraints_and_leave_torch_alone() -> None:
    constraints = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    wanted = packages_of(list(read_extras()))
    assert set(wanted) <= set(constraints)
    assert not {one.partition("==")[0] for one in wanted} & {"torch", "torchvision", "numpy", *IN_BASE_IMAGES}


def test_every_extra_that_submit_names_is_one() -> None:
    # `submit` says `fastlaunch build --with` these, by the names they are imported by.
    assert set(read_extras()) == {"transformers", "lightning", "torchao"}


def test_an_unknown_extra_gets_the_nearest() -> None:
    with pytest.raises(UnknownName, match="unknown extra 'transformer'") as caught:
        packages_of(["lightning", "transformer"])
    assert "did you mean transformers" in str(caught.value.hint)


@pytest.mark.parametrize("line", ["transformers", "x transformers>=5", "a b==1\na c==1", "x torch==2 ; rm"])
def test_a_damaged_list_is_refused_with_its_line(line: str, tmp_path: Path) -> None:
    path = tmp_path / "extras.txt"
    path.write_text(f"# a comment\n\n{line}\n")
    with pytest.raises(BadFile) as caught:
        read_extras(path)
    assert f"{path}:{3 + line.count(chr(10))}" in caught.value.message


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

"""What a job on AWS reads: data, models and the user's own file, which have to be there when it runs.

Only the user's own workload file travels, with the training code. Data and models are in the user's own
image, at an absolute path; models may be on the Hugging Face hub, and data made up there.
"""

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath, PureWindowsPath

from fastlaunch.core.errors import UserError
from fastlaunch.jobs.options import CloudTerms
from fastlaunch.jobs.variants import MADE_UP, Arm, check_data_known
from fastlaunch_train.workloads import WorkloadInfo

#: owner/name or name, as the Hugging Face hub has them.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
#: Folders that containers get from outside: what an image has there is hidden. EC2's gets /out, SageMaker's
#: the others below /opt/ml.
_HIDDEN = ("/opt/ml", "/out", "/dev", "/proc", "/sys")
#: A placeholder of a dry run looks like <this>; SageMaker takes a value of one line.
_NO_PATH = re.compile(r"[\x00-\x1f\x7f<>]")


def check_travels(arm: Arm, terms: CloudTerms) -> None:
    """Nothing, if data, model and the user's own file are where the job will be. Raises UserError."""
    _check_data(arm, terms)
    for option, name in (("--model", arm.model), ("--tokenizer", arm.tokenizer)):
        if name is not None:
            _check_model(option, name, terms)
    if arm.workload.name.startswith("hf-clm:"):
        _check_model("--workload hf-clm:", arm.workload.name.partition(":")[2], terms)
    path = arm.workload.name.rpartition(".py:")[0]
    if path and (PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts):
        raise UserError(
            f"workload {arm.workload.name!r} is not below this folder",
            "its file travels with the training code: go to its folder, and give ./my.py:build",
        )
    if path and terms.image:
        raise UserError(
            f"workload {arm.workload.name!r} travels in the code bundle, which --image does without",
            "leave out --image",
        )


def check_data_in_image(data: str, workloads: Iterable[WorkloadInfo]) -> None:
    """Nothing, if the workloads read the data arm, and an image may have it. Raises UserError."""
    check_data_known(data, workloads)
    if data in MADE_UP:
        return
    _, _, path = data.partition(":")
    if not PurePosixPath(path).is_absolute():
        raise UserError(
            f"--data {data} is a path on this machine: in an image it begins with /",
            f"give the path that the image has it at, such as --data {_example(data)}",
        )
    _check_path("--data", path)


def _check_data(arm: Arm, terms: CloudTerms) -> None:
    if terms.image is not None:
        check_data_in_image(arm.data, [arm.workload])
        return
    check_data_known(arm.data, [arm.workload])
    if arm.data not in MADE_UP:
        name = PurePosixPath(_example(arm.data)).name
        raise UserError(
            f"{arm.data} is on this machine, not on the instance, and data do not travel",
            f"build an image with it, COPY {name} /opt/data/{name}, and give --image REGISTRY/NAME@sha256:..."
            f" --data {_example(arm.data)}; or --data synthetic, or loader for images, which are made there",
        )


def _example(data: str) -> str:
    """The arm with a path in an image, of the name that it has here; `C:\\data\\acl` has one, too."""
    kind, _, path = data.partition(":")
    return f"{kind}:/opt/data/{PureWindowsPath(path).name or 'NAME'}"


def _check_model(option: str, name: str, terms: CloudTerms) -> None:
    """Nothing, if the job finds the model by this name: on the hub, or as a path in the user's own image."""
    if terms.image and PurePosixPath(name).is_absolute():
        _check_path(option, name)
        return
    if _HUB_NAME.fullmatch(name) and not Path(name).exists():
        return
    raise UserError(
        f"{option} {name!r} is a folder on this machine, not on the instance",
        "give its name on the Hugging Face hub; or build an image with it, COPY it to /opt/models/...,"
        " and give --image REGISTRY/NAME@sha256:... and the path there",
    )


def _check_path(option: str, path: str) -> None:
    """Nothing, if an image may have something at the absolute path. What is there only the job can tell."""
    # Two slashes at the start would be another root.
    parts = PurePosixPath("/" + path.lstrip("/"))
    if _NO_PATH.search(path):
        raise UserError(
            f"{option}: {path!r} has < or >, or a character that cannot be printed", "rename it in the image"
        )
    if ".." in parts.parts or len(parts.parts) == 1:
        raise UserError(f"{option}: {path} is no path in an image", "give the whole path, without ..")
    hidden = next((name for name in _HIDDEN if parts.is_relative_to(name)), None)
    if hidden:
        raise UserError(
            f"{option}: {path} cannot be read in a job, whose containers get {hidden} from outside",
            "have it elsewhere in the image, as in /opt/data",
        )

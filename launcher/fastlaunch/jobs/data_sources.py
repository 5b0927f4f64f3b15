"""What a job on AWS reads: data, models and the user's own file, which have to be there when it runs.

Only the user's own workload file travels, with the training code. Data and models are in the user's own
image, at an absolute path; models may be on the Hugging Face hub, and data made up there.
"""

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath, PureWindowsPath

from fastlaunch.core.errors import UserError
from fastlaunch.jobs.options import CloudOptions, Variant
from fastlaunch.jobs.variants import MADE_UP, check_data_known
from fastlaunch_train.workloads.registry import WorkloadInfo

#: owner/name or name, as the Hugging Face hub has them.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
#: Folders that containers get from outside: what an image has there is hidden. EC2's gets /out, SageMaker's
#: the others below /opt/ml.
_HIDDEN = ("/opt/ml", "/out", "/dev", "/proc", "/sys")
#: A placeholder of a dry run looks like <this>; SageMaker takes a value of one line.
_NO_PATH = re.compile(r"[\x00-\x1f\x7f<>]")


def check_travels(variant: Variant, cloud: CloudOptions) -> None:
    """Raise UserError if data, model or the user's own file are not where the job will be."""
    _check_data(variant, cloud)
    for option, name in (("--model", variant.model), ("--tokenizer", variant.tokenizer)):
        if name is not None:
            _check_model(option, name, cloud)
    if variant.workload.name.startswith("hf-clm:"):
        _check_model("--workload hf-clm:", variant.workload.name.partition(":")[2], cloud)
    path = variant.workload.name.rpartition(".py:")[0]
    if path and (PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts):
        raise UserError(
            f"workload {variant.workload.name!r} is not below this folder",
            "its file travels with the training code: go to its folder, and give ./my.py:build",
        )
    if path and cloud.image:
        raise UserError(
            f"workload {variant.workload.name!r} travels in the code bundle, which --image does without",
            "leave out --image",
        )


def check_data_in_image(data: str, workloads: Iterable[WorkloadInfo]) -> None:
    """Raise UserError if a workload does not read the data, or no image can have them."""
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


def _check_data(variant: Variant, cloud: CloudOptions) -> None:
    if cloud.image is not None:
        check_data_in_image(variant.data, [variant.workload])
        return
    check_data_known(variant.data, [variant.workload])
    if variant.data not in MADE_UP:
        example = _example(variant.data)
        name = PurePosixPath(example).name
        raise UserError(
            f"{variant.data} is on this machine, not on the instance, and data do not travel",
            f"build an image with it, COPY {name} /opt/data/{name}, and give --image REGISTRY/NAME@sha256:..."
            f" --data {example}; or --data synthetic, or loader for images, which are made there",
        )


def _example(data: str) -> str:
    """Return the data source with a path in an image, by its name here; `C:\\data\\acl` has one, too."""
    kind, _, path = data.partition(":")
    return f"{kind}:/opt/data/{PureWindowsPath(path).name or 'NAME'}"


def _check_model(option: str, name: str, cloud: CloudOptions) -> None:
    """Raise UserError unless the job finds the model by this name: on the hub, or in the user's own image."""
    if cloud.image and PurePosixPath(name).is_absolute():
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
    """Raise UserError if no image can have something at the absolute path."""
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

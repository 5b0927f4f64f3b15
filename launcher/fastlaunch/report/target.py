"""What it costs to train to a target, as a table for people and as plain data for programs."""

from typing import Any

from fastlaunch.analysis.compare import Comparison


def target_table(comparison: Comparison, target: str) -> str:
    """Which runs of each row reached `target` (`accuracy=0.9`, `loss=2.5`), when, and for how much.

    Raises UserError for a target that cannot be read, and for a metric that no run has.
    """
    raise NotImplementedError


def target_json(comparison: Comparison, target: str) -> dict[str, Any]:
    """The same as plain data; its shape is described in docs/compare-json.md."""
    raise NotImplementedError

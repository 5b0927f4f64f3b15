"""What jobs cost to their end, as a table for people and as plain data for programs."""

from typing import Any

from fastlaunch.analysis.compare import Comparison


def finish_table(comparison: Comparison, steps: float) -> str:
    """The time and the money to the end of a job of `steps` steps of the baseline, and the break-evens.

    Raises UserError for a number of steps that is not above 0.
    """
    raise NotImplementedError


def finish_json(comparison: Comparison, steps: float) -> dict[str, Any]:
    """The same as plain data; its shape is described in docs/compare-json.md."""
    raise NotImplementedError

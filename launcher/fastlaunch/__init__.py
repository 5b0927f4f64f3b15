"""fastlaunch: which AWS instance and which training recipe give the most training per dollar."""

__version__ = "0.1.0"

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fastlaunch.api.comparison import compare
    from fastlaunch.api.estimation import estimate
    from fastlaunch.api.keywords import SubmitArguments, SweepArguments
    from fastlaunch.api.listing import prices, runs
    from fastlaunch.api.recommend import recommend
    from fastlaunch.api.report import report
    from fastlaunch.api.submission import submit
    from fastlaunch.api.sweep import sweep
    from fastlaunch.core.errors import UserError

#: The public API, each from its module when it is first used.
_API = {
    "submit": "api.submission",
    "sweep": "api.sweep",
    "compare": "api.comparison",
    "estimate": "api.estimation",
    "recommend": "api.recommend",
    "report": "api.report",
    "runs": "api.listing",
    "prices": "api.listing",
    "SubmitArguments": "api.keywords",
    "SweepArguments": "api.keywords",
    "UserError": "core.errors",
}
__all__ = [
    "SubmitArguments",
    "SweepArguments",
    "UserError",
    "__version__",
    "compare",
    "estimate",
    "prices",
    "recommend",
    "report",
    "runs",
    "submit",
    "sweep",
]


def __getattr__(name: str) -> Any:
    if name not in _API:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"fastlaunch.{_API[name]}"), name)


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """Keeps `fastlaunch.report` the function: importing the subpackage of that name would bind it here."""

    @property
    def report(self) -> Any:
        return __getattr__("report")

    @report.setter
    def report(self, subpackage: ModuleType) -> None:
        pass


sys.modules[__name__].__class__ = _Package

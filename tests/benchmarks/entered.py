"""Count the modules and functions of ours that a command enters, and how often its calls climb back up.

    cd tests; python -m benchmarks.entered [--modules] ['COMMAND' ...]

Each COMMAND runs in a process of its own, as `fastlaunch COMMAND` does, on a ledger of all shipped
measurements.

functions  distinct functions of fastlaunch and fastlaunch_train that are called at least once, on any thread:
           methods, properties, nested functions and lambdas. Not counted: bodies of modules and classes, all
           that runs while a module is imported, comprehensions and generator expressions (Python 3.12 inlines
           some of them), and the methods that `dataclass` writes.
modules    those with at least one such function.
climbs     distinct pairs of a function and a function in a higher room that it calls, itself or through a
           library (a callback); n/a while a module that is entered stands in no room.

--modules lists the modules, with the functions entered in each, and the climbs.
"""

import argparse
import contextlib
import inspect
import io
import multiprocessing
import os
import shlex
import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from tabulate import tabulate

from benchmarks.bench import DRY_RUN, launch_s

MEASUREMENTS = Path(__file__).parents[2] / "train" / "measurements"
COMMANDS = (shlex.join(DRY_RUN), "compare", "prices")
#: The launcher's rooms, lowest first. The training package counts as one room below them.
ROOMS = (
    *("core", "catalog", "jobs", "aws", "measure", "ledger", "backends", "images", "placement"),
    *("runs", "analysis", "report", "account", "api", "cli"),
)


@dataclass(frozen=True, kw_only=True)
class Entered:
    """What a command entered."""

    functions: set[tuple[str, str, int]] = field(default_factory=set)  # module, qualified name, first line
    climbs: set[tuple[str, str]] = field(default_factory=set)  # caller, function in a higher room

    @property
    def modules(self) -> Counter[str]:
        return Counter(module for module, _, _ in self.functions)

    @property
    def num_climbs(self) -> int | None:
        return None if None in map(height, self.modules) else len(self.climbs)


def height(module: str) -> int | None:
    """Return how high the module's room is; None if it stands in no room."""
    package, *path = module.split(".")
    if package == "fastlaunch_train":
        return -1
    if path in ([], ["__main__"]):
        return len(ROOMS)
    return ROOMS.index(path[0]) if len(path) > 1 and path[0] in ROOMS else None


def module_of(frame: FrameType) -> str | None:
    """Return the module of a function's frame; None for any other frame, and for a library's."""
    code, module = frame.f_code, str(frame.f_globals.get("__name__"))
    is_ours = module.startswith(("fastlaunch.", "fastlaunch_train.")) or module == "fastlaunch"
    is_written = not code.co_filename.startswith("<") and bool(code.co_flags & inspect.CO_OPTIMIZED)
    is_named = code.co_name == "<lambda>" or not code.co_name.startswith("<")
    return module if is_ours and is_written and is_named else None


def trace(command: str) -> Entered:
    """Run the command in this process. Raises RuntimeError if it fails."""
    from fastlaunch.cli.main import main

    entered = Entered()

    def profile(frame: FrameType, event: str, _: object) -> None:
        module = module_of(frame) if event == "call" else None
        if module is None:
            return
        caller, outer = None, frame.f_back
        while outer is not None and outer.f_code is not trace.__code__:
            if outer.f_code.co_name == "<module>":
                return  # a module is being imported
            if caller is None and module_of(outer):
                caller = outer
            outer = outer.f_back
        name = frame.f_code.co_qualname
        entered.functions.add((module, name, frame.f_code.co_firstlineno))
        if caller is not None:
            origin = module_of(caller) or ""
            here, there = height(origin), height(module)
            if here is not None and there is not None and there > here:
                entered.climbs.add((f"{origin}.{caller.f_code.co_qualname}", f"{module}.{name}"))

    sys.argv = ["fastlaunch", *shlex.split(command)]
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        threading.setprofile(profile)
        sys.setprofile(profile)
        try:
            main()
        except SystemExit as error:
            if error.code:
                raise RuntimeError(f"fastlaunch {command}:\n{output.getvalue()}") from error
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
    return entered


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commands", nargs="*", metavar="COMMAND", default=COMMANDS)
    parser.add_argument("--modules", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        os.environ |= {"FASTLAUNCH_HOME": home, "FASTLAUNCH_CONFIG": os.devnull}
        for archive in sorted(MEASUREMENTS.glob("*/records.tar.xz")):
            launch_s("-m", "fastlaunch", "runs", "import", str(archive.parent))
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
            traces = dict(zip(options.commands, pool.map(trace, options.commands), strict=True))
    lines = [
        (command, len(entered.modules), len(entered.functions), entered.num_climbs)
        for command, entered in traces.items()
    ]
    print(tabulate(lines, headers=("fastlaunch", "modules", "functions", "climbs"), missingval="n/a"))
    for command, entered in traces.items() if options.modules else ():
        print(f"\nfastlaunch {command}")
        for module, num_functions in sorted(entered.modules.items()):
            print(f"{num_functions:5}  {module}")
        for origin, target in sorted(entered.climbs):
            print(f"climb  {origin} -> {target}")


if __name__ == "__main__":
    main()

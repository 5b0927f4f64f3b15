"""`submit`: train a workload with a recipe, or run the user's script, here or on AWS."""

from typing import Any, Literal, Unpack, overload

from fastlaunch.api.keywords import SubmitArguments
from fastlaunch.api.results import Runs, Submitted
from fastlaunch.jobs.options import Options, arguments, command_line
from fastlaunch.lifecycle import submit as lifecycle
from fastlaunch.lifecycle.announcement import DryRun
from fastlaunch.lifecycle.world import World, default_context


@overload
def submit(
    *,
    dry_run: Literal[True],
    yes: bool = ...,
    context: World | None = ...,
    **options: Unpack[SubmitArguments],
) -> DryRun: ...


@overload
def submit(
    *,
    dry_run: Literal[False] = ...,
    yes: bool = ...,
    context: World | None = ...,
    **options: Unpack[SubmitArguments],
) -> Submitted: ...


@overload
def submit(
    *, dry_run: bool, yes: bool = ..., context: World | None = ..., **options: Unpack[SubmitArguments]
) -> DryRun | Submitted: ...


def submit(
    *,
    dry_run: bool = False,
    yes: bool = False,
    context: World | None = None,
    **options: Unpack[SubmitArguments],
) -> DryRun | Submitted:
    """Train a workload with a recipe, or run `command`, the user's script, here or on AWS.

    The keywords are the options of `fastlaunch submit`, as named in `SubmitArguments`: repeatable options
    take a list, and NAME=VALUE options a dict. Show progress on stderr. Return when all runs have ended, or
    with `detach` once they run.

    dry_run: return the plan without starting, writing or asking anything. yes: spend up to the ceiling
    without asking; required on AWS without a terminal. context: the environment to act on, detected by
    default.

    Raises UserError for an impossible request, and its kinds if AWS refuses. A failed run raises no
    exception; `Submitted.runs` tells how each run ended.
    """
    check_truths("submit", dry_run=dry_run, yes=yes)
    given = arguments(options, function="submit")
    world = context or default_context(command_line("submit", given))
    done = lifecycle.submit(Options(**given), world, dry_run=dry_run, yes=yes)
    if isinstance(done, DryRun):
        return done
    runs, is_stopped = done
    return Submitted(runs=Runs(runs), is_stopped=is_stopped)


def check_truths(function: str, **given: Any) -> None:
    """Raise TypeError for an argument that is neither True nor False: a text such as `no` would be true."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise TypeError(f"{function}(): {name} is {value!r}, not a bool")

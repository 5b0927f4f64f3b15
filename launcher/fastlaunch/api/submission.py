"""`submit`: train a workload with a recipe, or run a script of the user's own, here or on AWS."""

from typing import Any, Literal, Unpack, overload

from fastlaunch.api.keywords import SubmitArguments
from fastlaunch.api.results import Runs, Submitted
from fastlaunch.jobs.options import Options, arguments, command_line
from fastlaunch.lifecycle import submit as lifecycle
from fastlaunch.lifecycle.submit import DryRun
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
    """Train a workload with a recipe, here or on AWS; or run `command`, a script of the user's own.

    Takes the options of `fastlaunch submit`, named as in `SubmitArguments`: one that may be repeated takes a
    list, and NAME=VALUE a dict. Progress is shown on stderr. Returns when all runs have ended, unless
    `detach`.

    dry_run: return the plan; start, write and ask nothing. yes: spend up to the ceiling without being asked;
    on AWS it is needed where there is nobody to ask. context: what it acts on, looked up by default.

    Raises UserError for what cannot be, and its kinds where AWS refuses. A run that fails is no exception:
    `Submitted.runs` say how each ended.
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
    """Raise TypeError for one that is neither True nor False: a text such as `no` would count as yes."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise TypeError(f"{function}(): {name} is {value!r}, and takes bool")

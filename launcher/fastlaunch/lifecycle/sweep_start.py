"""Start a planned sweep, or go on with one, after asking."""

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from fastlaunch.core import locks
from fastlaunch.core.errors import UserError
from fastlaunch.core.home import make_folder
from fastlaunch.core.terminal import as_warning, report_line
from fastlaunch.ledger.ledger import open_ledger
from fastlaunch.ledger.rows import Sweep as StoredSweep
from fastlaunch.lifecycle.display import PlainLines
from fastlaunch.lifecycle.launcher import Launcher
from fastlaunch.lifecycle.submit import report_edits
from fastlaunch.lifecycle.sweep import Sweep
from fastlaunch.lifecycle.sweep_plan import SweepPlan, make_parts, plan_lines
from fastlaunch.lifecycle.until_best import until_best
from fastlaunch.lifecycle.world import StopRequest, World

#: Shows a sweep's plan before it starts.
Announce = Callable[[SweepPlan], None]


def stored_sweep(world: World, name: str) -> StoredSweep:
    """Return the sweep to continue. Raises UserError if there is none, or it belongs to another folder."""
    with open_ledger(world.settings, clock=world.now) as ledger:
        stored = ledger.sweep(name or None)
    if Path.cwd() != stored.directory:
        raise UserError(f"{stored.id} was started in {stored.directory}", f"type: cd {stored.directory}")
    return stored


def carry_out(
    launcher: Launcher,
    world: World,
    plan: SweepPlan,
    stored: StoredSweep | None,
    *,
    given: dict[str, Any],
    yes: bool,
    announce: Announce | None,
) -> Sweep:
    """Show the plan, ask, and carry out the sweep, or what is left of a stored one. given: its options."""
    ledger, num_parallel = launcher.ledger, given.get("parallel") or 1
    started = ledger.parts_of(stored.id) if stored else {}
    if announce is not None:
        announce(plan)
    for line in () if announce else plan_lines(plan):
        world.report(line)
    for line in plan.warnings:
        world.report(as_warning(line))
    if stored:
        world.report(f"going on with {stored.id}; started: {', '.join(started) or 'nothing'}")
        for submission in started.values():
            report_edits(world, ledger.select(submission=submission), plan.scripts)
    parts, refused = make_parts(plan, started, world)
    for name, error in refused.items():
        world.report(f"left out: {name}: {error.message}")
    if plan.ceilings:
        world.confirm("Go on?" if stored else "Start it?", yes=yes)
    sweep_id = stored.id if stored else ledger.add_sweep(given, Path.cwd())
    world.report(f"{sweep_id}: to go on with it if it is stopped: fastlaunch sweep --resume")
    lock = ledger.launcher_lock(sweep_id)
    if locks.is_held(lock):
        raise UserError(f"another fastlaunch is running {sweep_id}", "look: fastlaunch status")
    make_folder(lock.parent)
    carried_out = Sweep(
        id=sweep_id,
        launcher=launcher,
        command=shlex.join(["fastlaunch", *world.argv]),
        parts=parts,
        max_cost_usd=plan.max_cost_usd,
        num_parallel=num_parallel,
        open_beside=partial(_open_beside, world, launcher.stop) if num_parallel > 1 else None,
        until_best=until_best(plan, world) if plan.is_until_best else None,
        left_out=refused,
    )
    with locks.held(lock):
        carried_out.carry_out()
    return carried_out


@contextmanager
def _open_beside(world: World, stop: StopRequest, name: str) -> Iterator[Launcher]:
    """Yield a launcher with its own ledger connection, whose lines begin with its part's name."""
    beside = replace(world, connect=lambda: world.aws, sleep=stop.sleeping(world.sleep))
    with open_ledger(world.settings, clock=world.now) as ledger:
        yield Launcher(
            backends=beside.cloud_backends,
            ledger=ledger,
            settings=world.settings,
            display=PlainLines(clock=world.monotonic_s, prefix=f"{name}: "),
            stop=stop,
            report=lambda line: report_line(f"{name}: {line}"),
        )

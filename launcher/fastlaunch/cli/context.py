"""The `World` of a command, kept in click's context."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from fastlaunch.core.activity import activity
from fastlaunch.lifecycle.world import World, default_context

if TYPE_CHECKING:
    from fastlaunch.ledger.ledger import Ledger


def app_context(*, config_may_lack: bool = False) -> World:
    """Return the world passed to the current command, else a default one, which asks on the terminal."""
    given = click.get_current_context().find_object(World)
    given = given or default_context(tuple(sys.argv[1:]), config_may_lack=config_may_lack)
    return replace(given, ask=_ask) if sys.stdin.isatty() else given


def _ask(question: str) -> bool:
    return click.confirm(question, err=True)


@contextmanager
def answer_first() -> Iterator[World]:
    """Yield the context; the line on the region follows what is printed inside."""
    context, late = app_context(), list[str]()
    try:
        yield replace(context, report_region=late.append)
    finally:
        for line in late:
            context.report(line)


@contextmanager
def open_reconciled() -> "Iterator[tuple[World, Ledger]]":
    """Yield the context and the open ledger, reconciled with AWS."""
    from fastlaunch.ledger.ledger import open_ledger
    from fastlaunch.lifecycle.reconcile import reconcile

    context = app_context()
    with open_ledger(context.settings, clock=context.now) as ledger:
        with activity("asking AWS what runs are doing"):
            reconcile(ledger, context.backends, context.settings)
        yield context, ledger

"""Which runs a command line means, by name or by `field=glob`, as conditions on the ledger."""

from collections.abc import Callable, Sequence
from typing import Any

from fastlaunch.core.errors import UnknownName, UserError

#: Field of a filter -> what it is matched against.
FIELDS = {
    "workload": "workload",
    "recipe": "recipe",
    "instance": "ifnull(instance, '')",
    "state": "state",
    "submission": "submission_id",
    "backend": "backend",
    "commit": "CASE WHEN json_valid(summary) THEN ifnull(json_extract(summary, '$.commit'), '') ELSE '' END",
}
_MAX_LENGTH = 1000
_MAX_CANDIDATES = 8
_Query = Callable[[str, Sequence[Any]], list[Any]]


def where(query: _Query, selectors: Sequence[str], submission: str | None) -> tuple[str, list[Any]]:
    """The SQL condition on `runs`, and its values, that `Ledger.select` describes."""
    named: list[str] = []
    filters: dict[str, list[str]] = {}
    for selector in selectors:
        field, separator, glob = selector.partition("=")
        if not separator:
            named.append(named_run(query, selector))
        elif field not in FIELDS:
            raise UnknownName("field to select runs by", field, FIELDS)
        else:
            filters.setdefault(field, []).append(_checked(glob))
    conditions, values = [], []
    if filters:
        fits = [" OR ".join(f"{FIELDS[field]} GLOB ?" for _ in globs) for field, globs in filters.items()]
        conditions.append(" AND ".join(f"({fit})" for fit in fits))
        values += [glob for globs in filters.values() for glob in globs]
    if named:
        conditions.append(f"id IN ({', '.join('?' * len(named))})")
        values += named
    condition = " OR ".join(f"({condition})" for condition in conditions) or "1"
    if submission is not None:
        return f"({condition}) AND submission_id = ?", [*values, submission]
    return condition, values


def named_run(query: _Query, name: str) -> str:
    """Id of the run called `name`: its id, or a prefix or last part of it that no other run has.

    Raises UnknownName if there is none, UserError if there are several.
    """
    _checked(name)
    for condition, value in (
        ("id = ?", name),
        ("substr(id, 1, length(?1)) = ?1", name),
        ("substr(id, -length(?1)) = ?1", "-" + name),
    ):
        found = [
            run_id for (run_id,) in query(f"SELECT id FROM runs WHERE {condition} ORDER BY id", (value,))
        ]
        if not name or not found:
            continue
        if len(found) == 1:
            return str(found[0])
        shown = ", ".join(found[:_MAX_CANDIDATES])
        more = f" and {len(found) - _MAX_CANDIDATES} more" if len(found) > _MAX_CANDIDATES else ""
        raise UserError(f"{name!r} fits {len(found)} runs: {shown}{more}", "give more of the id")
    raise UnknownName("run", name, (), hint="`fastlaunch runs list` shows what there is")


def _checked(text: str) -> str:
    # An argument that is no text (undecodable bytes) or a pattern without end fits no run that there can be.
    if len(text) > _MAX_LENGTH or not text.isprintable():
        raise UnknownName("run", text[:40], (), hint="`fastlaunch runs list` shows what there is")
    return text

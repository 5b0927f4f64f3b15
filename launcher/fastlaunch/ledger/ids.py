"""Ids of runs, and the selectors that find runs by id or by what they are."""

import hashlib
import json
import random
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from fastlaunch.core.data import to_data
from fastlaunch.core.errors import UnknownName, UserError
from fastlaunch.core.ownership import RUN_ID
from fastlaunch.core.units import first_names
from fastlaunch.measure.summary import RunSummary

#: Part of a sweep: the search for its batch size. On further instance types ` on TYPE` follows.
BATCH_SEARCH = "batch size"
_OF_SUMMARY = "CASE WHEN json_valid(summary) THEN ifnull(json_extract(summary, '$.{}'), '') ELSE '' END"
#: Field of a filter -> what it is matched against.
FIELDS = {
    "workload": "workload",
    "recipe": "recipe",
    "instance": "ifnull(instance, '')",
    "state": "state",
    "submission": "submission_id",
    # Without the searches for its batch size, which are no cells.
    "sweep": (
        "(SELECT ifnull(sweep_id, '') FROM submissions"
        f" WHERE submissions.id = submission_id AND ifnull(part, '') NOT LIKE '{BATCH_SEARCH}%')"
    ),
    "backend": "backend",
    "owner": "ifnull(owner, '')",
    **{
        name: _OF_SUMMARY.format(path)
        for name, path in {"commit": "environment.commit", "version": "setup.fingerprint.version"}.items()
    },
}
_MAX_SELECTOR_LENGTH = 1000
_MAX_CANDIDATES = 8
_Query = Callable[[str, Sequence[Any]], list[Any]]

#: Without letters and digits that are mistaken for each other.
_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"
_GIVEN_HERE = re.compile(RUN_ID)
_MAX_FIELD_LENGTH = 40
_DIGEST_LENGTH = 8


def is_batch_search(part: str) -> bool:
    """Return whether the part of a sweep is a search for its batch size."""
    return part.startswith(BATCH_SEARCH)


def new_run_id(now: datetime, randomness: random.Random) -> str:
    """Return an id such as `20261121-090312-k3f9`: it sorts by time, and AWS takes it in names."""
    return f"{now:%Y%m%d-%H%M%S}-" + "".join(randomness.choices(_ALPHABET, k=4))


def recorded_run_id(header: Mapping[str, Any]) -> str:
    """Return the id of the run whose record has this header: its own, if a ledger gave it out.

    An entrypoint started by hand may use the same id over and over: it gets a digest of when and where the
    run started, so the same files have the same id wherever they lie.
    """
    run_id = str(header["run_id"])
    if _GIVEN_HERE.fullmatch(run_id):
        return run_id
    name = re.sub(r"[^a-zA-Z0-9]+", "-", run_id).strip("-")[: _MAX_FIELD_LENGTH - _DIGEST_LENGTH - 1] or "run"
    return f"{name}-{_digest([run_id, header['started_at'], header['machine'].get('host_id')])}"


def published_run_id(summary: RunSummary) -> str:
    """Return an id that follows from what the row says: equal rows are one run."""
    return f"pub-{_digest(json.dumps(to_data(summary), sort_keys=True), num_digits=16)}"


def shared_id(name: str, *keys: str | None) -> str:
    """Return the id here of a run or a submission that somebody shared under `name`.

    keys: the owner, and what else tells it from another of that name. Whatever name a sender chooses, the id
    is never one of this ledger or of another owner.
    """
    return f"shared-{_digest(keys, num_digits=16)}-{name}"


def _digest(data: object, num_digits: int = _DIGEST_LENGTH) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:num_digits]


def where(
    query: _Query, selectors: Sequence[str], submissions: Sequence[str] | None
) -> tuple[str, list[Any]]:
    """Return the SQL condition on `runs`, with its values, for selectors as in `Ledger.select`."""
    named: list[str] = []
    filters: dict[str, list[str]] = {}
    for selector in selectors:
        field, separator, glob = selector.partition("=")
        if not separator and query("SELECT 1 FROM submissions WHERE id = ?", (_checked(selector),)):
            filters.setdefault("submission", []).append(selector)
        elif not separator:
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
    if submissions is not None:
        return f"({condition}) AND submission_id IN ({', '.join('?' * len(submissions))})", [
            *values,
            *submissions,
        ]
    return condition, values


def named_run(query: _Query, name: str) -> str:
    """Return the id of the run called `name`; see `Ledger.get`.

    Raises UnknownName if there is none, UserError if there are several.
    """
    _checked(name)
    for condition, value in (
        ("id = ?", name),
        ("substr(id, 1, length(?1)) = ?1", name),
        ("substr(id, -length(?1)) = ?1", "-" + name),
    ):
        rows = query(f"SELECT id, owner FROM runs WHERE {condition} ORDER BY id", (value,))
        # Whoever shares a run chooses its name, which may be that of a run of the user's own.
        made_here = [run_id for run_id, owner in rows if owner is None]
        ids = made_here or [run_id for run_id, _ in rows]
        if not name or not ids:
            continue
        if len(ids) == 1:
            return str(ids[0])
        shown = first_names(ids, _MAX_CANDIDATES)
        raise UserError(f"{name!r} fits {len(ids)} runs: {shown}", "give more of the id")
    hint = "`fastlaunch runs list` shows what there is"
    if Path(name).exists():
        hint = f"these are records: fastlaunch runs import {shlex.quote(name)}, then fastlaunch compare"
    raise UnknownName("run", name, (), hint=hint)


def _checked(text: str) -> str:
    # Undecodable bytes, or a pattern without end, fit no run.
    if len(text) > _MAX_SELECTOR_LENGTH or not text.isprintable():
        raise UnknownName("run", text[:40], (), hint="`fastlaunch runs list` shows what there is")
    return text

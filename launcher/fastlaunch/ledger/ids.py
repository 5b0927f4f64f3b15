"""Ids of runs: of one about to start, and of one that was recorded or published elsewhere."""

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from fastlaunch.measure.summarize import RunSummary

#: Without letters and digits that are mistaken for each other.
_ALPHABET = "abcdefghjkmnpqrstuvwxyz23456789"
_GIVEN_HERE = re.compile(r"\d{8}-\d{6}-[a-z0-9]{4}")
_MAX_LENGTH = 40
_DIGEST_LENGTH = 8


def new_run_id(now: datetime, randomness: random.Random) -> str:
    """An id such as `20261121-090312-k3f9`: sorts by time, and may stand in names of AWS resources."""
    return f"{now:%Y%m%d-%H%M%S}-" + "".join(randomness.choices(_ALPHABET, k=4))


def recorded_run_id(header: Mapping[str, Any]) -> str:
    """Id of the run whose record has this header: its own, if a ledger gave it out.

    Another one (of an entrypoint started by hand) may be used over and over, so it gets a digest of when and
    where the run started: the same files have the same id, wherever they lie.
    """
    run_id = str(header["run_id"])
    if _GIVEN_HERE.fullmatch(run_id):
        return run_id
    name = re.sub(r"[^a-zA-Z0-9]+", "-", run_id).strip("-")[: _MAX_LENGTH - _DIGEST_LENGTH - 1] or "run"
    return f"{name}-{_digest([run_id, header['started_at'], header['machine'].get('host_id')])}"


def published_run_ids(summaries: Sequence[RunSummary]) -> list[str]:
    """Ids that follow from what the summaries say; the same rows have the same ids when they come again.

    Equal rows among `summaries` are told apart by counting them.
    """
    seen: Counter[str] = Counter()
    ids = []
    for summary in summaries:
        text = json.dumps(summary.to_json(), sort_keys=True)
        seen[text] += 1
        ids.append(f"pub-{_digest([text, seen[text]])}")
    return ids


def _digest(data: object) -> str:
    return hashlib.sha256(json.dumps(data).encode()).hexdigest()[:_DIGEST_LENGTH]

"""What a row of a comparison is called beside others."""

from collections.abc import Sequence

from fastlaunch.analysis.rows import Row

NONE = "none"


def name_of(row: Row, rows: Sequence[Row]) -> str:
    """The row's recipe, with as much more as tells it from the other rows."""
    name = row.recipe
    if len({other.place for other in rows}) > 1:
        name += f" on {row.place}"
    alike = [other for other in rows if (other.recipe, other.place) == (row.recipe, row.place)]
    if len({other.num_gpus for other in alike}) > 1:
        name += f" x {row.num_gpus}"
    if len({other.batch_size_per_gpu for other in alike}) > 1:
        name += f" at batch {row.batch_size_per_gpu}"
    if len({other.sequence_length for other in alike}) > 1:
        name += f" of {row.sequence_length} tokens"
    of_a_kind = [other for other in alike if other.data == row.data]
    if len({dict(other.fingerprint).get("data") for other in of_a_kind}) > 1:
        name += f" from {row.data} {dict(row.fingerprint).get('data', 'not identified')}"
    elif len(of_a_kind) < len(alike):
        name += f" from {row.data}"
    same = [other for other in alike if _asked(other) == _asked(row)]
    if len(same) > 1:
        name += _versions(row, same)
    return name


def _asked(row: Row) -> tuple[object, ...]:
    return row.num_gpus, row.batch_size_per_gpu, row.sequence_length, row.data


def _versions(row: Row, same: Sequence[Row]) -> str:
    """` with torch 2.6.0`: in what the row differs from those that were asked for alike."""
    own, others = dict(row.fingerprint), [dict(other.fingerprint) for other in same]
    names = dict.fromkeys(name for of in others for name in of if name != "data")
    differing = [name for name in names if len({of.get(name) for of in others}) > 1]
    return f" with {', '.join(f'{name} {own.get(name, NONE)}' for name in differing)}" if differing else ""

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
    if terms := _terms(row, same):
        name += f" ({', '.join(terms)})"
    if versions := _versions(row, same):
        name += f" with {', '.join(versions)}"
    return name


def which(row: Row, rows: Sequence[Row]) -> str:
    """`spot, torch 2.6.0`: what tells the row from others that were asked for alike; else nothing."""
    same = [other for other in rows if _columns(other) == _columns(row)]
    return ", ".join([*_terms(row, same), *_versions(row, same)])


def _columns(row: Row) -> tuple[object, ...]:
    return row.recipe, row.place, *_asked(row), dict(row.fingerprint).get("data")


def _asked(row: Row) -> tuple[object, ...]:
    return row.num_gpus, row.batch_size_per_gpu, row.sequence_length, row.data


def _terms(row: Row, same: Sequence[Row]) -> list[str]:
    """`sagemaker`, `us-west-2`, `spot`: how its machine was rented, where that is not how all were."""
    names = ("service", "region", "purchase")
    return [getattr(row, name) for name in names if len({getattr(other, name) for other in same}) > 1]


def _versions(row: Row, same: Sequence[Row]) -> list[str]:
    """`torch 2.6.0`: in what the row differs from those that were asked for alike."""
    own, others = dict(row.fingerprint), [dict(other.fingerprint) for other in same]
    names = dict.fromkeys(name for of in others for name in of if name != "data")
    differing = [name for name in names if len({of.get(name) for of in others}) > 1]
    return [f"{name} {own.get(name, NONE)}" for name in differing]

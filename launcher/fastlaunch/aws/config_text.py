"""The config file's text: what `init` adds to it, with everything else as it stands."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastlaunch.core.errors import UserError
from fastlaunch.core.yaml_file import load_yaml

#: What an entry is for, by its name; the order of a region's entries.
_MEANINGS = {
    "bucket": "Records, logs, code and checkpoints of runs, below the prefix.",
    "prefix": "",
    "instance_profile": "The role of machines on EC2.",
    "security_groups": "Nothing else reaches the machines.",
    "subnets": "A subnet for each zone, tried in this order.",
    "placement_groups": "For several nodes.",
    "repository": "For images that `fastlaunch build --push` makes.",
    "role": "The role of training jobs: --backend sagemaker.",
    "scheduler_role": "By which the account ends machines that are forgotten.",
}
_HEAD = '# Config file of fastlaunch. All keys: docs/reference.md, "Config file".\n'
_REGION = "# Where jobs run, unless --region says.\n"
_MAX_COST = "# The most USD that a submission may cost, unless --max-cost says.\n"
#: What a region has that does not name it, as core/settings.py has it.
_DEFAULTS = {"prefix": "fastlaunch"}


@dataclass(frozen=True, kw_only=True)
class ConfigChange:
    """What has to become of the config file."""

    # All of the file; None if it is to stay as it is, or only its user can change it.
    text: str | None
    # The lines that are new, as they are, or would be, in the file; empty if it says all of it already.
    lines: str
    # Why only its user can change it.
    obstacle: str | None = None
    # Whether each entry has a value in it, though maybe another than the stack's.
    is_complete: bool = False


def region_lines(region: str, entries: Mapping[str, Any], indent: int = 2) -> str:
    """Return a region's part of the config file, with comments."""
    outer, inner = " " * indent, " " * (2 * indent)
    lines = [f"{outer}{region}:"]
    names = [*_MEANINGS, *(name for name in entries if name not in _MEANINGS)]
    for name in (name for name in names if entries.get(name)):
        if _MEANINGS.get(name):
            lines.append(f"{inner}# {_MEANINGS[name]}")
        value = entries[name]
        if isinstance(value, Mapping):
            lines.append(f"{inner}{name}:")
            lines += [f"{inner}  {key}: {_scalar(part)}" for key, part in value.items()]
        elif isinstance(value, list | tuple):
            lines.append(f"{inner}{name}: [{', '.join(map(_scalar, value))}]")
        else:
            lines.append(f"{inner}{name}: {_scalar(value)}")
    return "\n".join(lines) + "\n"


def config_change(
    text: str | None, *, region: str, entries: Mapping[str, Any], max_cost_usd: float | None
) -> ConfigChange:
    """Return how a config file comes to hold a region's entries, and the budget.

    text: what it holds now, which can be read as YAML; None if there is none.
    """
    import yaml

    data: dict[str, Any] = (load_yaml(text) if text else None) or {}
    regions: dict[str, Any] = data.get("aws") or {}
    if not data:
        lines = _HEAD * (not text) + f"{_REGION}region: {region}\n"
        lines += f"{_MAX_COST}max_cost: {max_cost_usd:.10g}\n" * (max_cost_usd is not None)
        lines += f"aws:\n{region_lines(region, entries)}"
        return ConfigChange(text=_ended(text) + lines, lines=lines)
    new = {**data}
    text, added = text or "", ""
    if max_cost_usd is not None and float(data.get("max_cost") or 0) != max_cost_usd:
        new["max_cost"] = f"{max_cost_usd:.10g}"
        line = f"max_cost: {new['max_cost']}\n"
        if "max_cost" in data:
            text, added = _with_value(text, "max_cost", new["max_cost"]), line
        else:
            text, added = f"{_ended(text)}{_MAX_COST}{line}", _MAX_COST + line
    if not regions and "region" not in data:
        new["region"] = region
        line = f"{_REGION}region: {region}\n"
        text, added = _ended(text) + line, added + line
    if region not in regions:
        new["aws"] = {**regions, region: dict(entries)}
        text = _with_region(text, region, entries)
        added += f"aws:\n{region_lines(region, entries)}"
    elif other := _differing(regions[region] or {}, entries):
        return ConfigChange(
            text=None,
            lines=f"aws:\n{region_lines(region, {name: entries[name] for name in other})}",
            obstacle=f"it has other values for {region}, or none",
            is_complete=not [name for name in other if (regions[region] or {}).get(name) is None],
        )
    if not added:
        return ConfigChange(text=None, lines="")
    try:
        is_as_meant = load_yaml(text) == new
    except yaml.YAMLError:
        is_as_meant = False
    if not is_as_meant:
        obstacle = "its form leaves no room for these lines"
        return ConfigChange(text=None, lines=added, obstacle=obstacle)
    return ConfigChange(text=text, lines=added)


def stack_entries(output: str, region: str) -> dict[str, Any]:
    """Return the region's entries that a stack's output `ConfigFile` holds. Raises UserError without any."""
    import yaml

    try:
        entries = load_yaml(output)["aws"][region]
    except (yaml.YAMLError, KeyError, TypeError):
        entries = None
    if not isinstance(entries, dict):
        raise UserError(
            f"the stack's output ConfigFile has no entries for {region}",
            "it is no stack of fastlaunch's: give another name, --stack-name NAME",
        )
    return entries


def _differing(present: Mapping[str, Any], entries: Mapping[str, Any]) -> list[str]:
    """Return the names of entries that the file has otherwise, or not at all."""
    known = {**_DEFAULTS, **present}
    return [name for name, value in entries.items() if value and known.get(name) != value]


def _with_value(text: str, key: str, value: str) -> str:
    """Return the YAML text with another value for a key at its top."""
    import yaml

    root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    node = next(node for name, node in root.value if name.value == key)
    return text[: node.start_mark.index] + value + text[node.end_mark.index :]


def _with_region(text: str, region: str, entries: Mapping[str, Any]) -> str:
    """Return the YAML text with a region more under `aws`, after the others."""
    import yaml

    root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    regions = next((node for name, node in root.value if name.value == "aws"), None)
    if regions is None or not regions.value:
        head = "" if regions else "aws:\n"
        where = len(text) if regions is None else regions.start_mark.index
        before = _ended(text[:where])
        return before + head + region_lines(region, entries) + text[where:].lstrip("\n")
    indent = regions.value[0][0].start_mark.column
    line = _last_line(regions)
    kept = text.splitlines(keepends=True)
    before = _ended("".join(kept[: line + 1]))
    return before + region_lines(region, entries, indent) + "".join(kept[line + 1 :])


def _last_line(node: Any) -> int:
    """Return the last line, from 0, that has something of the node on it, and not just a comment."""
    if node.id == "mapping" and not node.flow_style and node.value:
        return max(_last_line(part) for pair in node.value for part in pair)
    if node.id == "sequence" and not node.flow_style and node.value:
        return max(map(_last_line, node.value))
    return int(node.end_mark.line)


def _ended(text: str | None) -> str:
    """Return the text with the end of its last line."""
    return text if text and text.endswith("\n") else f"{text}\n" if text else ""


def _scalar(value: Any) -> str:
    """Return a name or number as YAML has it, in quotes only if it would be read as something else."""
    import yaml

    text = str(value)
    plain = re.fullmatch(r"[\w./:-]*\w", text) and yaml.safe_load(f"[{text}]") == [value]
    return text if plain else yaml.safe_dump(text, default_style='"', width=10_000).strip()

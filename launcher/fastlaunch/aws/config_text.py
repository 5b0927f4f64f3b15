"""Edit the text of the config file: add what `init` writes, and leave the rest as it is."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastlaunch.core.errors import UserError
from fastlaunch.core.yaml_file import load_yaml

#: Comments on a region's entries, in the order in which they are written.
_MEANINGS = {
    "bucket": "Records, logs, code and checkpoints of runs, below the prefix.",
    "prefix": "",
    "instance_profile": "The role of machines on EC2.",
    "security_groups": "The security groups of the machines.",
    "subnets": "A subnet for each zone, tried in this order.",
    "placement_groups": "For several nodes.",
    "repository": "For images that `fastlaunch build --push` makes.",
    "role": "The role of training jobs: --backend sagemaker.",
    "scheduler_role": "The role that ends forgotten machines.",
}
_HEAD = '# Config file of fastlaunch. All keys: docs/reference.md, "Config file".\n'
_REGION = "# Where jobs run, unless --region says.\n"
_MAX_COST = "# The most USD that a submission may cost, unless --max-cost says.\n"
#: Defaults of core/settings.py, for a region that does not set them.
_DEFAULTS = {"prefix": "fastlaunch"}


@dataclass(frozen=True, kw_only=True)
class ConfigChange:
    """A change of the config file."""

    # The new text of the file; None if nothing changes, or only the user can change it.
    text: str | None
    # The lines to add; empty if the file has them already.
    lines: str
    # Why only the user can change it.
    obstacle: str | None = None
    # Whether the file has a value for every entry, though perhaps not the stack's.
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
    """Return the change that puts a region's entries, and the budget, into a config file.

    text: its present text, which is valid YAML; None if there is no file.
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
    elif other := [
        name
        for name, value in entries.items()
        if value and {**_DEFAULTS, **(regions[region] or {})}.get(name) != value
    ]:
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
    """Return the region's entries from a stack's output `ConfigFile`. Raises UserError if it has none."""
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


def _with_value(text: str, key: str, value: str) -> str:
    """Return the YAML text with another value for a key at its top."""
    import yaml

    root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    node = next(node for name, node in root.value if name.value == key)
    return text[: node.start_mark.index] + value + text[node.end_mark.index :]


def _with_region(text: str, region: str, entries: Mapping[str, Any]) -> str:
    """Return the YAML text with one more region under `aws`, after the others."""
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
    """Return the number, from 0, of the last line that belongs to the node and is not just a comment."""
    if node.id == "mapping" and not node.flow_style and node.value:
        return max(_last_line(part) for pair in node.value for part in pair)
    if node.id == "sequence" and not node.flow_style and node.value:
        return max(map(_last_line, node.value))
    return int(node.end_mark.line)


def _ended(text: str | None) -> str:
    """Return the text, with a newline at its end unless it is empty."""
    return text if text and text.endswith("\n") else f"{text}\n" if text else ""


def _scalar(value: Any) -> str:
    """Return a name or number as YAML, quoted only if YAML would read something else."""
    import yaml

    text = str(value)
    plain = re.fullmatch(r"[\w./:-]*\w", text) and yaml.safe_load(f"[{text}]") == [value]
    return text if plain else yaml.safe_dump(text, default_style='"', width=10_000).strip()

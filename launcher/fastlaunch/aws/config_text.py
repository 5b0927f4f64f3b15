"""Edit the text of the config file: add what `init` writes, and leave the rest as it is."""

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastlaunch.core.errors import BadFile, UserError
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
    import yaml

    lines = ""
    for name in sorted(entries, key=[*_MEANINGS, *entries].index):
        if value := entries[name]:
            lines += f"# {_MEANINGS[name]}\n" if _MEANINGS.get(name) else ""
            # A list stands in one line.
            style = None if isinstance(value, list | tuple) else False
            lines += yaml.safe_dump({name: value}, default_flow_style=style, sort_keys=False, width=10_000)
    return " " * indent + f"{region}:\n" + textwrap.indent(lines, " " * 2 * indent)


def config_change(
    text: str | None, *, region: str, entries: Mapping[str, Any], max_cost_usd: float | None
) -> ConfigChange:
    """Return the change that puts a region's entries, and the budget, into a config file.

    text: its present text, which is valid YAML; None if there is no file.
    """
    data: dict[str, Any] = (load_yaml(text) if text else None) or {}
    regions: dict[str, Any] = data.get("aws") or {}
    new, lines = {**data}, "" if text else _HEAD
    changed = text or lines
    if not regions and "region" not in data:
        new["region"] = region
        added = f"{_REGION}region: {region}\n"
        changed, lines = _ended(changed) + added, lines + added
    if max_cost_usd is not None and float(data.get("max_cost") or 0) != max_cost_usd:
        new["max_cost"] = f"{max_cost_usd:.10g}"
        added = f"max_cost: {new['max_cost']}\n"
        if "max_cost" in data:
            _, value = _top(changed)["max_cost"]
            start, end = value.start_mark.index, value.end_mark.index
            changed = changed[:start] + new["max_cost"] + changed[end:]
        else:
            added = _MAX_COST + added
            changed = _ended(changed) + added
        lines += added
    if region not in regions:
        new["aws"] = {**regions, region: dict(entries)}
        changed = _with_region(changed, region, entries)
        lines += f"aws:\n{region_lines(region, entries)}"
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
    try:
        is_as_meant = load_yaml(changed) == new
    except BadFile:
        is_as_meant = False
    if lines and not is_as_meant:
        return ConfigChange(text=None, lines=lines, obstacle="its form leaves no room for these lines")
    return ConfigChange(text=changed if lines else None, lines=lines)


def stack_entries(output: str, region: str) -> dict[str, Any]:
    """Return the region's entries from a stack's output `ConfigFile`. Raises UserError if it has none."""
    try:
        entries = load_yaml(output)["aws"][region]
    except (BadFile, KeyError, TypeError):
        entries = None
    if not isinstance(entries, dict):
        raise UserError(
            f"the stack's output ConfigFile has no entries for {region}",
            "it is no stack of fastlaunch's: give another name, --stack-name NAME",
        )
    return entries


def _top(text: str) -> dict[str, tuple[Any, Any]]:
    """Return the nodes of key and value, by key, at the top of a YAML text."""
    import yaml

    root: Any = yaml.compose(text, Loader=yaml.SafeLoader)
    return {key.value: (key, value) for key, value in root.value}


def _with_region(text: str, region: str, entries: Mapping[str, Any]) -> str:
    """Return the YAML text with one more region, the first under `aws`."""
    if (pair := _top(text).get("aws")) is None:
        return f"{_ended(text)}aws:\n{region_lines(region, entries)}"
    key, regions = pair
    indent = regions.value[0][0].start_mark.column if regions.id == "mapping" and regions.value else 2
    lines = text.splitlines(keepends=True)
    before, after = lines[: key.end_mark.line + 1], lines[key.end_mark.line + 1 :]
    return _ended("".join(before)) + region_lines(region, entries, indent) + "".join(after)


def _ended(text: str) -> str:
    """Return the text, with a newline at its end unless it is empty."""
    return text if text.endswith("\n") or not text else f"{text}\n"

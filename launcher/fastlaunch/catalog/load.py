"""The price file: `instance_prices.yaml` or one of the user's own, checked field by field.

    schema: 1
    accelerators: {NAME: {memory_gib, bandwidth_tb_per_s, compute_capability?, peak_tflops, formats, ...}}
    instances: {NAME: {accelerator, num_accelerators, vcpus, memory_gib, network_gbps, ...}}
    prices: [{instance, service, region or regions, purchase?, usd_per_hour, as_of, source, inferred?}]

Every section may be left out. Every fault is a BadFile with the line it is on.
"""

import re
from collections.abc import Collection
from pathlib import Path

from fastlaunch.catalog.hardware import FORMATS, PURCHASE_OPTIONS, Accelerator, InstanceType
from fastlaunch.catalog.prices import SERVICES, Catalogue, Price
from fastlaunch.core.errors import BadFile
from fastlaunch.core.yaml_file import Located, read_yaml

SCHEMA = 1
_REGION = re.compile(r"[a-z]{2,4}(-[a-z]+)+-[0-9]+")


def read_catalogue(path: Path, known: Catalogue | None = None) -> Catalogue:
    """What the file holds, and nothing of `known`, whose accelerators and instances it may refer to."""
    root = read_yaml(path)
    sections = root.fields(
        "a price file", required=(), optional=("schema", "accelerators", "instances", "prices")
    )
    if "schema" in sections and sections["schema"].whole("schema") != SCHEMA:
        raise sections["schema"].wrong("is of another schema", f"this version of fastlaunch reads {SCHEMA}")
    accelerators = {
        name: _accelerator(name, entry)
        for name, entry in _named(sections.get("accelerators"), "accelerators")
    }
    known_accelerators = {**(known.accelerators if known else {}), **accelerators}
    instances = {
        name: _instance(name, entry, known_accelerators)
        for name, entry in _named(sections.get("instances"), "instances")
    }
    known_instances = {**(known.instances if known else {}), **instances}
    prices = _prices(sections["prices"], known_instances) if "prices" in sections else ()
    return Catalogue(accelerators=accelerators, instances=instances, prices=prices)


def _named(section: Located | None, what: str) -> list[tuple[str, Located]]:
    if section is None:
        return []
    entries = []
    for key, entry in section.mapping(what).items():
        if not key.text.strip():
            raise BadFile(section.file, f"a name in {what} is empty", line=key.line)
        entries.append((key.text, entry))
    return entries


def _accelerator(name: str, entry: Located) -> Accelerator:
    fields = entry.fields(
        name,
        required=("memory_gib", "bandwidth_tb_per_s", "peak_tflops", "formats", "source"),
        optional=("compute_capability", "device_names"),
    )
    formats = fields["formats"].choices("formats", FORMATS)
    peaks = fields["peak_tflops"].fields(f"peak_tflops of {name}", required=(), optional=FORMATS)
    for format_name, peak in peaks.items():
        if format_name not in formats:
            raise peak.wrong(
                f"{name} has a peak for {format_name}, which its formats leave out",
                "add the format, or remove the peak",
            )
    capability, device_names = fields.get("compute_capability"), fields.get("device_names")
    return Accelerator(
        name=name,
        memory_gib=fields["memory_gib"].number("memory_gib"),
        bandwidth_tb_per_s=fields["bandwidth_tb_per_s"].number("bandwidth_tb_per_s"),
        compute_capability=capability.text("compute_capability") if capability else None,
        peak_tflops={key: peak.number(f"{key} peak of {name}") for key, peak in peaks.items()},
        formats=frozenset(formats),
        device_names=device_names.texts("device_names") if device_names else (),
        source=fields["source"].text("source"),
    )


def _instance(name: str, entry: Located, accelerators: Collection[str]) -> InstanceType:
    wholes = ("num_accelerators", "vcpus", "num_network_cards")
    numbers = ("memory_gib", "network_gbps")
    from_zero = ("num_efa_interfaces", "local_nvme_gb")
    fields = entry.fields(
        name, required=("accelerator", *wholes, *numbers, *from_zero, "purchase_options", "source")
    )
    accelerator = fields["accelerator"].text("accelerator")
    if accelerator not in accelerators:
        raise fields["accelerator"].wrong(
            f"{name} refers to an accelerator {accelerator!r} that is not listed", _known(accelerators)
        )
    return InstanceType(
        name=name,
        accelerator=accelerator,
        num_accelerators=fields["num_accelerators"].whole("num_accelerators"),
        vcpus=fields["vcpus"].whole("vcpus"),
        memory_gib=fields["memory_gib"].number("memory_gib"),
        network_gbps=fields["network_gbps"].number("network_gbps"),
        num_network_cards=fields["num_network_cards"].whole("num_network_cards"),
        num_efa_interfaces=fields["num_efa_interfaces"].whole("num_efa_interfaces", zero_allowed=True),
        local_nvme_gb=fields["local_nvme_gb"].number("local_nvme_gb", zero_allowed=True),
        purchase_options=fields["purchase_options"].choices("purchase_options", PURCHASE_OPTIONS),
        source=fields["source"].text("source"),
    )


def _prices(section: Located, instances: Collection[str]) -> tuple[Price, ...]:
    prices: list[Price] = []
    first_lines: dict[tuple[object, ...], int] = {}
    for entry in section.items("prices"):
        for price in _price_per_region(entry, instances):
            if price.key in first_lines:
                offer = f"{price.service}, {price.region}, {price.purchase}, {price.as_of}"
                raise entry.wrong(
                    f"is a duplicate: {price.instance} ({offer}) has a price on line {first_lines[price.key]}"
                )
            first_lines[price.key] = entry.line
            prices.append(price)
    return tuple(prices)


def _price_per_region(entry: Located, instances: Collection[str]) -> list[Price]:
    fields = entry.fields(
        "a price",
        required=("instance", "service", "usd_per_hour", "as_of", "source"),
        optional=("region", "regions", "purchase", "inferred"),
    )
    instance = fields["instance"].text("instance")
    if instance not in instances:
        raise fields["instance"].wrong(
            f"the price is of an instance {instance!r} that is not listed", _known(instances)
        )
    if ("region" in fields) == ("regions" in fields):
        raise entry.wrong("a price has either `region` or `regions`")
    regions = [fields["region"]] if "region" in fields else fields["regions"].items("regions")
    if not regions:
        raise fields["regions"].wrong("regions is empty", "name one, such as us-east-1")
    return [
        Price(
            instance=instance,
            service=fields["service"].choice("service", SERVICES),
            region=_region(region),
            purchase=_purchase(fields.get("purchase")),
            usd_per_hour=fields["usd_per_hour"].number("usd_per_hour"),
            as_of=fields["as_of"].date("as_of"),
            source=fields["source"].text("source"),
            inferred=fields["inferred"].flag("inferred") if "inferred" in fields else False,
        )
        for region in regions
    ]


def _region(field: Located) -> str:
    region = field.text("region")
    if not _REGION.fullmatch(region):
        raise field.wrong(f"{region!r} is not the name of a region", "it looks like us-east-1")
    return region


def _purchase(field: Located | None) -> str:
    if field is None:
        return "on-demand"
    purchase = field.choice("purchase", PURCHASE_OPTIONS)
    if purchase == "spot":
        raise field.wrong("spot prices have no place in a table", "they change by the hour and are queried")
    return purchase


def _known(names: Collection[str]) -> str:
    return f"listed: {', '.join(names)}" if names else "none is listed"

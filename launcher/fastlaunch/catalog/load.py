"""The price file: `instance_prices.yaml`, what `fastlaunch prices update` puts over it, and the user's own.

    schema: 1
    accelerators: {NAME: {memory_gib, bandwidth_tb_per_s, compute_capability?, peak_tflops, formats, ...}}
    instances: {NAME: {accelerator, num_accelerators, vcpus, memory_gib, network_gbps, ...}}
    prices: [{instance, service, region or regions, purchase?, usd_per_hour, as_of, source, inferred?,
              secondary?}]
    volume_prices: [{region or regions, usd_per_gib_month, usd_per_mib_per_s_month, as_of, source}]
    skipped: {NAME: why no instance of it is listed}

Every section may be left out.
"""

import datetime
import functools
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from fastlaunch.catalog.hardware import OFFERS, Accelerator, InstanceType
from fastlaunch.catalog.prices import Catalogue, Price, VolumePrice
from fastlaunch.core.paths import shipped
from fastlaunch.core.units import is_region
from fastlaunch.core.yaml_file import YamlFile

SCHEMA = 1


def load_catalogue(*files: Path) -> Catalogue:
    """Return the shipped catalogue with the entries of the files put over it, the lowest file first.

    An entry with the same name (for a price: instance, service, region, purchase option and date) replaces
    the one below; any other is added. A price also ends those of the file below that are newer, so that an
    update never takes the place of the user's own. Raises BadFile, with the line, for a file with a fault.
    """
    catalogue, layered = _shipped(), list[Price]()
    for path in files:
        upper = read_catalogue(path, known=catalogue)
        starts: dict[tuple[str, ...], datetime.date] = {}
        for price in upper.prices:
            starts[price.key[:4]] = min(price.as_of, starts.get(price.key[:4], price.as_of))
        layered = [
            price for price in layered if price.key[:4] not in starts or price.as_of < starts[price.key[:4]]
        ]
        layered.extend(upper.prices)
        volume_prices = {
            (price.region, price.as_of): price for price in (*catalogue.volume_prices, *upper.volume_prices)
        }
        catalogue = Catalogue(
            accelerators={**catalogue.accelerators, **upper.accelerators},
            instances={**catalogue.instances, **upper.instances},
            prices=catalogue.prices,
            volume_prices=tuple(volume_prices.values()),
            skipped={
                name: reason
                for name, reason in {**catalogue.skipped, **upper.skipped}.items()
                if name not in upper.instances
            },
        )
    prices = {price.key: price for price in (*catalogue.prices, *layered)}
    return replace(catalogue, prices=tuple(prices.values())) if files else catalogue


@functools.cache
def _shipped() -> Catalogue:
    return read_catalogue(shipped("instance_prices.yaml"))


def read_catalogue(path: Path, known: Catalogue | None = None) -> Catalogue:
    """Return what the file holds; it may refer to accelerators and instances of `known`."""
    file = YamlFile(path)
    file.refuse_unknown(known=["schema", "accelerators", "instances", "prices", "volume_prices", "skipped"])
    check_schema(file, SCHEMA)
    accelerators = {
        name: file.record(Accelerator, "accelerators", name, name=name)
        for name in file.mapping("accelerators")
    }
    instances = {
        name: file.record(InstanceType, "instances", name, name=name) for name in file.mapping("instances")
    }
    known_accelerators = {*accelerators, *(known.accelerators if known else ())}
    for name, instance in instances.items():
        if instance.accelerator not in known_accelerators:
            problem = f"{name} has an accelerator {instance.accelerator!r} that is not listed"
            raise file.fault(problem, "instances", name, "accelerator", hint=_listing(known_accelerators))
    prices = _prices(file, {*instances, *(known.instances if known else ())})
    volume_prices = tuple(
        file.record(VolumePrice, "volume_prices", index, without=("region", "regions"), region=region)
        for index, region in _regions(file, "volume_prices")
    )
    return Catalogue(
        accelerators=accelerators,
        instances=instances,
        prices=prices,
        volume_prices=volume_prices,
        skipped={name: file.value(str, "skipped", name) for name in file.mapping("skipped")},
    )


def check_schema(file: YamlFile, schema: int) -> None:
    """Raise BadFile if the file says that it is of another schema."""
    if "schema" in file.mapping() and file.value(int, "schema") != schema:
        hint = f"this version of fastlaunch reads {schema}"
        raise file.fault("the file is of another schema", "schema", hint=hint)


def _prices(file: YamlFile, instances: Collection[str]) -> tuple[Price, ...]:
    prices: dict[tuple[object, ...], Price] = {}
    for index, region in _regions(file, "prices"):
        at = ("prices", index)
        price = file.record(
            Price,
            *at,
            without=("region", "regions"),
            region=region,
            zone=None,
            basis="listed",
            hypothetical=None,
            other_gpu=None,
        )
        if price.instance not in instances:
            problem = f"the price is of an instance {price.instance!r} that is not listed"
            raise file.fault(problem, *at, "instance", hint=_listing(instances))
        if (price.purchase == "spot" and not price.secondary) or price.purchase not in OFFERS:
            hint = "on-demand, capacity-block or training-plan; spot prices change hourly and are queried"
            raise file.fault(f"purchase is {price.purchase!r}", *at, "purchase", hint=hint)
        if price.key in prices:
            offer = f"{price.service}, {price.region}, {price.purchase}, {price.as_of}"
            raise file.fault(f"is a duplicate: {price.instance} has a price for {offer} above", *at)
        prices[price.key] = price
    return tuple(prices.values())


def _regions(file: YamlFile, section: str) -> Iterator[tuple[int, str]]:
    """Yield the number of each price in the section with each of its regions."""
    for index, entry in enumerate(file.items(section)):
        at = (section, index)
        if ("region" in file.mapping(*at)) == ("regions" in entry):
            raise file.fault("a price has either `region` or `regions`", *at)
        key, kind = ("region", str) if "region" in entry else ("regions", tuple[str, ...])
        value = file.value(kind, *at, key)
        for region in [value] if key == "region" else value:
            if not is_region(region):
                problem = f"{region!r} is not the name of a region"
                raise file.fault(problem, *at, key, hint="such as us-east-1")
            yield index, region


def _listing(names: Collection[str]) -> str:
    return f"listed: {', '.join(sorted(names))}" if names else "none is listed"

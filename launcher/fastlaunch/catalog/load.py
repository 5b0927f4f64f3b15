"""The price file: `instance_prices.yaml`, or one of the user's own put over it.

    schema: 1
    accelerators: {NAME: {memory_gib, bandwidth_tb_per_s, compute_capability?, peak_tflops, formats, ...}}
    instances: {NAME: {accelerator, num_accelerators, vcpus, memory_gib, network_gbps, ...}}
    prices: [{instance, service, region or regions, purchase?, usd_per_hour, as_of, source, inferred?}]
    volume_prices: [{region or regions, usd_per_gib_month, usd_per_mib_per_s_month, as_of, source}]

Every section may be left out.
"""

import functools
from collections.abc import Collection, Iterator
from pathlib import Path

from fastlaunch.catalog.hardware import PURCHASE_OPTIONS, Accelerator, InstanceType
from fastlaunch.catalog.prices import Catalogue, Price, VolumePrice
from fastlaunch.core.paths import shipped
from fastlaunch.core.units import is_region
from fastlaunch.core.yaml_file import YamlFile

SCHEMA = 1


def load_catalogue(user_file: Path | None = None) -> Catalogue:
    """Return the shipped catalogue with the entries of the user's file put over it, one by one.

    An entry with the same name (for a price: instance, service, region, purchase option and date) replaces
    the shipped one; any other is added. Raises BadFile, with the line, for a file with a fault.
    """
    catalogue = _shipped()
    if user_file is None:
        return catalogue
    user = read_catalogue(user_file, known=catalogue)
    prices = {price.key: price for price in (*catalogue.prices, *user.prices)}
    volume_prices = {
        (price.region, price.as_of): price for price in (*catalogue.volume_prices, *user.volume_prices)
    }
    return Catalogue(
        accelerators={**catalogue.accelerators, **user.accelerators},
        instances={**catalogue.instances, **user.instances},
        prices=tuple(prices.values()),
        volume_prices=tuple(volume_prices.values()),
    )


@functools.cache
def _shipped() -> Catalogue:
    return read_catalogue(shipped("instance_prices.yaml"))


def read_catalogue(path: Path, known: Catalogue | None = None) -> Catalogue:
    """Return what the file holds; it may refer to accelerators and instances of `known`."""
    file = YamlFile(path)
    file.refuse_unknown(known=["schema", "accelerators", "instances", "prices", "volume_prices"])
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
        accelerators=accelerators, instances=instances, prices=prices, volume_prices=volume_prices
    )


def check_schema(file: YamlFile, schema: int) -> None:
    """Raise BadFile if the file says that it is of another schema."""
    if file.mapping().get("schema", schema) != schema:
        hint = f"this version of fastlaunch reads {schema}"
        raise file.fault("the file is of another schema", "schema", hint=hint)


def _prices(file: YamlFile, instances: Collection[str]) -> tuple[Price, ...]:
    prices: dict[tuple[object, ...], Price] = {}
    for index, region in _regions(file, "prices"):
        at = ("prices", index)
        price = file.record(
            Price, *at, without=("region", "regions"), region=region, basis="listed", hypothetical=None
        )
        if price.instance not in instances:
            problem = f"the price is of an instance {price.instance!r} that is not listed"
            raise file.fault(problem, *at, "instance", hint=_listing(instances))
        if price.purchase == "spot" or price.purchase not in PURCHASE_OPTIONS:
            hint = "on-demand or capacity-block; spot prices change by the hour and are queried"
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
        regions = (
            [file.value(str, *at, "region")]
            if "region" in entry
            else file.value(tuple[str, ...], *at, "regions")
        )
        for region in regions:
            if not is_region(region):
                problem = f"{region!r} is not the name of a region"
                raise file.fault(
                    problem, *at, *({"region", "regions"} & entry.keys()), hint="such as us-east-1"
                )
            yield index, region


def _listing(names: Collection[str]) -> str:
    return f"listed: {', '.join(sorted(names))}" if names else "none is listed"

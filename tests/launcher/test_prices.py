"""The catalogue: what was in force when, what each GPU supports, and every fault of a file with its line."""

import contextlib
import dataclasses
import datetime
import re
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from fake_summaries import price_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastlaunch.catalog.load import load_catalogue, read_catalogue
from fastlaunch.catalog.prices import Catalogue, Price
from fastlaunch.core.data import read
from fastlaunch.core.errors import BadFile, UserError
from fastlaunch.core.units import parse_date
from fastlaunch.placement.capacity_block import block_usd_per_hour

DATE = datetime.date
TODAY = DATE(2026, 11, 21)
NOVEMBER_2023 = DATE(2023, 11, 15)
INSTANCES = load_catalogue().instances


# Prices


@pytest.fixture(scope="module")
def shipped() -> Catalogue:
    return load_catalogue()


@pytest.mark.parametrize(
    ("instance", "on", "usd_per_hour"),
    [
        ("p4d.24xlarge", NOVEMBER_2023, 32.7726),
        ("p5.48xlarge", NOVEMBER_2023, 98.32),
        ("p4d.24xlarge", TODAY, 21.957642),
        ("p5.48xlarge", TODAY, 55.04),
        ("p5.48xlarge", DATE(2025, 6, 4), 98.32),
        ("p5.48xlarge", DATE(2025, 6, 5), 55.04),
        ("trn1n.32xlarge", DATE(2023, 4, 17), 24.78),
        ("p5en.48xlarge", TODAY, 63.296),
        ("p6-b300.48xlarge", TODAY, 142.416),
        ("p5.4xlarge", TODAY, 6.88),
    ],
)
def test_known_prices(shipped: Catalogue, instance: str, on: datetime.date, usd_per_hour: float) -> None:
    assert shipped.price(instance, on=on).usd_per_hour == usd_per_hour


def test_every_type_that_trains_is_listed_or_skipped_with_a_reason(shipped: Catalogue) -> None:
    model = botocore.session.get_session().get_service_model("ec2").shape_for("InstanceType")
    families = re.compile(r"(p[4-9]|trn|g[5-9]|gr|g4dn)[a-z0-9-]*\.")
    assert {name for name in model.enum if families.match(name)} == {*shipped.instances, *shipped.skipped}
    assert not shipped.instances.keys() & shipped.skipped.keys()


@pytest.mark.parametrize(
    ("instance", "region", "usd_per_hour"),
    [("p5e.48xlarge", "us-east-2", 39.80), ("p5en.48xlarge", "us-east-1", 41.61)],
)
def test_secondary_prices_of_capacity_blocks_bound_no_cost(
    shipped: Catalogue, instance: str, region: str, usd_per_hour: float
) -> None:
    price = shipped.price(instance, region=region, purchase="capacity-block", on=TODAY)
    assert price.usd_per_hour == usd_per_hour
    assert price.secondary
    with pytest.raises(UserError):
        block_usd_per_hour(shipped.instance(instance), region, shipped, TODAY)


def test_price_of_another_region_and_service(shipped: Catalogue) -> None:
    assert shipped.price("p4d.24xlarge", region="eu-west-1", on=TODAY).usd_per_hour == 23.71569
    training = shipped.price("p4d.24xlarge", service="sagemaker", on=TODAY)
    assert training.usd_per_hour == 25.251286
    assert training.inferred


@pytest.mark.parametrize(
    ("instance", "num_gpus", "num_nodes", "lacks"),
    [
        ("p5.48xlarge", 8, 1, False),
        ("p5.48xlarge", 4, 1, False),
        ("p5.48xlarge", 9, 1, True),
        ("ml.p5.48xlarge", 16, 2, False),
        ("p5.48xlarge", 17, 2, True),
        ("p5.4xlarge", 2, 1, True),
        # Frameworks count cores of its chips.
        ("trn1n.32xlarge", 32, 1, False),
        ("somebodys", 99, 1, False),
        (None, 99, 1, False),
    ],
)
def test_instances_that_lack_gpus(
    shipped: Catalogue, instance: str | None, num_gpus: int, num_nodes: int, lacks: bool
) -> None:
    lack = shipped.lack_of_gpus(instance, num_gpus=num_gpus, num_nodes=num_nodes)
    assert (lack is not None) is lacks


@pytest.mark.parametrize(
    ("instance", "where", "hint"),
    [
        ("p5.48xlarge", {"on": DATE(2023, 1, 1)}, "the earliest known is of 2023-07-31: $98.32 per hour"),
        ("p5e.48xlarge", {"region": "us-east-2"}, "as spot or capacity-block"),
        ("p5.48xlarge", {"region": "eu-west-1"}, "known: ec2 us-east-1 on-demand"),
        ("p5.48xlarge", {"purchase": "spot"}, "by the hour"),
    ],
)
def test_an_unknown_price_is_never_another_one(
    shipped: Catalogue, instance: str, where: dict[str, Any], hint: str
) -> None:
    with pytest.raises(UserError, match="is known") as caught:
        shipped.price(instance, **{"on": TODAY, **where})
    assert hint in str(caught.value.hint)


def test_every_shipped_price_has_its_source_and_date_and_is_of_a_known_accelerator(
    shipped: Catalogue,
) -> None:
    assert len(shipped.prices) > 100
    for price in shipped.prices:
        assert len(price.source) > 10
        assert DATE(2022, 1, 1) <= price.as_of <= TODAY
        assert shipped.accelerator_of(price.instance).source
        assert price.purchase in (("capacity-block", "spot") if price.secondary else ("on-demand",))
        if price.service == "sagemaker" and price.instance != "g5.2xlarge":
            assert price.inferred


@given(
    days=st.lists(st.dates(DATE(2020, 1, 1), DATE(2030, 1, 1)), unique=True, max_size=8),
    on=st.dates(DATE(2019, 1, 1), DATE(2031, 1, 1)),
)
def test_the_price_in_force_is_the_latest_on_or_before_the_day(
    days: list[datetime.date], on: datetime.date
) -> None:
    # The same days in another region, at prices that must not come back.
    prices = [price_of(1 + n, as_of=day) for n, day in enumerate(days)]
    others = [price_of(99, as_of=day, region="eu-west-1") for day in days]
    catalogue = Catalogue(accelerators={}, instances=INSTANCES, prices=(*prices, *others))
    past = [day for day in days if day <= on]
    if not past:
        with pytest.raises(UserError):
            catalogue.price("p5.48xlarge", on=on)
    else:
        price = catalogue.price("p5.48xlarge", on=on)
        assert price.as_of == max(past)
        assert price.usd_per_hour == 1 + days.index(max(past))


def test_the_users_file_replaces_entry_by_entry_and_adds(shipped: Catalogue, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        """
instances:
  lab-8xh100: {accelerator: H100, num_accelerators: 8, vcpus: 64, memory_gib: 1024, network_gbps: 100,
    num_network_cards: 1, num_efa_interfaces: 0, local_nvme_gb: 0, purchase_options: [on-demand],
    source: me}
prices:
  - {as_of: 2026-07-20, instance: p5.48xlarge, service: ec2, region: us-east-1, usd_per_hour: 40, source: me}
  - {as_of: 2026-11-01, instance: p5.48xlarge, service: ec2, region: eu-west-1, usd_per_hour: 66, source: me}
  - {as_of: 2026-01-01, instance: lab-8xh100, service: ec2, region: us-east-1, usd_per_hour: 9, source: me}
"""
    )
    merged = load_catalogue(file)
    assert merged.price("p5.48xlarge", on=TODAY).usd_per_hour == 40
    assert merged.price("p5.48xlarge", on=DATE(2026, 7, 19)).usd_per_hour == 55.04
    assert merged.price("p5.48xlarge", region="eu-west-1", on=TODAY).usd_per_hour == 66
    assert merged.price("lab-8xh100", on=TODAY).usd_per_hour == 9
    assert merged.accelerator_of("lab-8xh100").name == "H100"
    assert len(merged.prices) == len(shipped.prices) + 2
    assert merged.price("p4d.24xlarge", on=TODAY) == shipped.price("p4d.24xlarge", on=TODAY)


def test_a_price_survives_being_stored_and_anything_else_is_none() -> None:
    price = price_of(98.32, as_of=NOVEMBER_2023)
    stored = price.to_json()
    assert stored["as_of"] == "2023-11-15"
    assert read(Price, stored, "price") == price
    for change in ({"as_of": "soon"}, {"as_of": 5}, {"usd_per_hour": "x"}, {"service": "gcp"}, {"x": 1}):
        with pytest.raises(UserError):
            read(Price, stored | change, "price")
    for usd_per_hour in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(UserError, match=r"of p5\.48xlarge is"):
            price_of(usd_per_hour, as_of=NOVEMBER_2023)


@given(st.text())
def test_a_date_or_a_user_error(text: str) -> None:
    with contextlib.suppress(UserError):
        assert parse_date(text).isoformat() == text


# Hardware


def test_fp8_needs_ada_hopper_or_blackwell(shipped: Catalogue) -> None:
    for accelerator in shipped.accelerators.values():
        assert len(accelerator.source) > 10
        if "bf16" in accelerator.formats:
            assert accelerator.peak_tflops["bf16"] == accelerator.peak_tflops["fp16"]
    with_fp8 = {name for name, item in shipped.accelerators.items() if "fp8" in item.formats}
    assert with_fp8 == {
        "L4",
        "L40S",
        "H100",
        "H200",
        "B200",
        "B300",
        "RTX PRO 4500",
        "RTX PRO 6000",
        "Trainium2",
    }
    for name in ("A100 40GB", "A100 80GB", "A10G", "T4"):
        assert "fp8" not in shipped.accelerators[name].peak_tflops
        capability = shipped.accelerators[name].compute_capability
        assert capability is not None
        assert float(capability) < 8.9


@pytest.mark.parametrize(
    ("name", "bf16", "fp8", "bandwidth", "capability"),
    [
        ("A100 40GB", 312, None, 1.555, "8.0"),
        ("H100", 989.4, 1978.9, 3.35, "9.0"),
        ("H200", 989.4, 1978.9, 4.8, "9.0"),
        ("B300", 2250, 4500, 8, "10.3"),
        ("A10G", 70, None, 0.6, "8.6"),
    ],
)
def test_dense_peaks(
    shipped: Catalogue, name: str, bf16: float, fp8: float | None, bandwidth: float, capability: str
) -> None:
    accelerator = shipped.accelerators[name]
    assert accelerator.peak_tflops["bf16"] == bf16
    assert accelerator.peak_tflops.get("fp8") == fp8
    assert accelerator.bandwidth_tb_per_s == bandwidth
    assert accelerator.compute_capability == capability


def test_an_accelerator_goes_by_its_whole_device_name(shipped: Catalogue) -> None:
    for device, name in (
        ("NVIDIA H200", "H200"),
        (" nvidia  h200 ", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
    ):
        accelerator = shipped.accelerator_of_device(device)
        assert accelerator is not None and accelerator.name == name
    for device in ("", "H200", "NVIDIA H100 PCIe", "NVIDIA L40", "NVIDIA H100 80GB HBM3 MIG 1g.10gb"):
        assert shipped.accelerator_of_device(device) is None
    names = [name for item in shipped.accelerators.values() for name in item.device_names]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "change", [{"memory_gib": 0}, {"bandwidth_tb_per_s": -1}, {"peak_tflops": {"bf16": float("nan")}}]
)
def test_hardware_figures_are_above_zero(shipped: Catalogue, change: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="of H100 is"):
        dataclasses.replace(shipped.accelerators["H100"], **change)


@pytest.mark.parametrize("change", [{"num_accelerators": 0}, {"vcpus": -1}, {"num_efa_interfaces": -1}])
def test_instance_figures(shipped: Catalogue, change: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=r"of p5\.48xlarge is"):
        dataclasses.replace(shipped.instances["p5.48xlarge"], **change)


# Files

#: A whole file, whose lines the tests change. Line 1 is the first.
GOOD = """\
schema: 1
accelerators:
  H100:
    memory_gib: 80
    bandwidth_tb_per_s: 3.35
    compute_capability: "9.0"
    peak_tflops: {bf16: 989.4}
    formats: [bf16, fp8]
    device_names: [NVIDIA H100 80GB HBM3]
    source: datasheet
instances:
  p5.48xlarge:
    accelerator: H100
    num_accelerators: 8
    vcpus: 192
    memory_gib: 2048
    network_gbps: 3200
    num_network_cards: 32
    num_efa_interfaces: 32
    local_nvme_gb: 30400
    purchase_options: [on-demand, spot, capacity-block]
    source: EC2
prices:
  - instance: p5.48xlarge
    service: ec2
    regions: [us-east-1, us-east-2]
    usd_per_hour: 98.32
    as_of: 2023-08-08
    source: price list
  - instance: p5.48xlarge
    service: ec2
    region: us-east-1
    purchase: on-demand
    usd_per_hour: 55.04
    as_of: "2025-06-23"
    source: price list
    inferred: true
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "prices.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refusal(folder: Path, text: str) -> BadFile:
    with pytest.raises(BadFile) as caught:
        read_catalogue(write(folder, text))
    return caught.value


def test_volumes_have_prices_by_region_and_date(shipped: Catalogue, tmp_path: Path) -> None:
    entry = "usd_per_gib_month: 0.1, usd_per_mib_per_s_month: 0.05, source: invoice"
    text = f"volume_prices:\n  - {{regions: [us-east-1, eu-west-1], as_of: 2026-11-01, {entry}}}\n"
    catalogue = load_catalogue(write(tmp_path, text))
    for region, on, usd in (
        ("us-east-1", datetime.date(2026, 11, 1), 0.1),
        ("us-east-1", datetime.date(2026, 10, 31), 0.08),
        ("eu-west-1", datetime.date(2026, 11, 1), 0.1),
        ("eu-west-1", datetime.date(2026, 10, 31), 0.088),
        ("eu-west-1", datetime.date(2023, 12, 7), None),
    ):
        found = catalogue.find_volume_price(region, on=on)
        assert (found and found.usd_per_gib_month) == usd
    assert all(price.source for price in shipped.volume_prices)
    assert "us_east" in refusal(tmp_path, text.replace("us-east-1", "us_east")).message
    assert refusal(tmp_path, text.replace("0.05", "0")).line == 2


def test_a_good_file(tmp_path: Path) -> None:
    catalogue = read_catalogue(write(tmp_path, GOOD))
    assert [(price.region, price.usd_per_hour, price.as_of.isoformat()) for price in catalogue.prices] == [
        ("us-east-1", 98.32, "2023-08-08"),
        ("us-east-2", 98.32, "2023-08-08"),
        ("us-east-1", 55.04, "2025-06-23"),
    ]
    assert [price.inferred for price in catalogue.prices] == [False, False, True]
    assert {price.purchase for price in catalogue.prices} == {"on-demand"}
    assert catalogue.instances["p5.48xlarge"].local_nvme_gb == 30400
    assert catalogue.accelerators["H100"].formats == {"bf16", "fp8"}
    assert catalogue.accelerators["H100"].compute_capability == "9.0"


#: what to replace in GOOD, by what, the line of the fault, what the message says
FAULTS = {
    "price 0": ("usd_per_hour: 98.32", "usd_per_hour: 0", 27, "p5.48xlarge is 0"),
    "price not a number": ("usd_per_hour: 98.32", "usd_per_hour: .nan", 27, "is '.nan'"),
    **{
        f"price {text}": ("usd_per_hour: 98.32", f"usd_per_hour: {text}", 27, f"is '{text}', not a number")
        for text in ("1:30", "0x10", "1_000", "1e3", "1.0e+3", "010", ".inf", "true", "1,000", "$5", "98,32")
    },
    "negative price": ("usd_per_hour: 98.32", "usd_per_hour: -1", 27, "p5.48xlarge is -1"),
    "octal count": ("vcpus: 192", "vcpus: 0192", 15, "'0192', not a whole number"),
    "price as text": ("usd_per_hour: 98.32", 'usd_per_hour: "98.32"', 27, "not a number"),
    "no price": ("usd_per_hour: 98.32", "usd_per_hour:", 27, "is empty"),
    "unknown unit": ("usd_per_hour: 98.32", "eur_per_hour: 98.32", 27, "unknown field `eur_per_hour`"),
    "missing date": ("    as_of: 2023-08-08\n", "", 24, "no `as_of`"),
    "empty source": ("-08\n    source: price list", '-08\n    source: ""', 29, "source is empty"),
    "wrong date": ("as_of: 2023-08-08", 'as_of: "2023-02-30"', 28, "is not a date"),
    "date as a number": ("as_of: 2023-08-08", "as_of: 20230808", 28, "is not a date"),
    "date and time": ("as_of: 2023-08-08", "as_of: 2023-08-08 10:00:00", 28, "is not a date"),
    "duplicate": ('as_of: "2025-06-23"', "as_of: 2023-08-08", 30, "duplicate: p5.48xlarge"),
    "duplicate region": ("[us-east-1, us-east-2]", "[us-east-1, us-east-1]", 24, "duplicate"),
    "duplicate key": (
        *("service: ec2\n    region:", "instance: x\n    region:"),
        *(31, "`instance` is given twice"),
    ),
    "spot": ("purchase: on-demand", "purchase: spot", 33, "purchase is 'spot'"),
    "unknown service": ("ec2\n    region:", "gcp\n    region:", 31, "service is 'gcp'"),
    "unknown instance": ("- instance: p5.48xlarge", "- instance: p9", 24, "'p9' that is not listed"),
    "unknown accelerator": ("accelerator: H100", "accelerator: H900", 13, "'H900' that is not listed"),
    "region misspelt": ("region: us-east-1", "region: us-east", 32, "not the name of a region"),
    "region and regions": ("    region:", "    regions: [eu-west-1]\n    region:", 30, "either"),
    "regions as text": ("[us-east-1, us-east-2]", "us-east-1", 26, "not a list"),
    "half an accelerator": ("num_accelerators: 8", "num_accelerators: 0.5", 14, "whole number"),
    "unknown purchase option": ("capacity-block]", "barter]", 21, "'barter'"),
    "unknown format": ("formats: [bf16, fp8]", "formats: [bf16, fp9]", 8, "'fp9'"),
    "peak without its format": ("{bf16: 989.4}", "{tf32: 494.7}", 7, "peak_tflops of H100 has tf32"),
    "another schema": ("schema: 1", "schema: 2", 1, "another schema"),
    "an empty name": ("  H100:\n", '  "":\n', 3, "for a name"),
    "syntax": ("regions: [us-east-1, us-east-2]", "regions: [us-east-1, us-east-2", 27, "is not YAML"),
    "a second document": ("instances:", "---\ninstances:", 11, "another document"),
    "a Python object": ("source: EC2", "source: !!python/name:os.system EC2", 22, "is not YAML"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_refused_with_its_line(name: str, tmp_path: Path) -> None:
    old, new, line, says = FAULTS[name]
    assert GOOD.count(old) >= 1
    error = refusal(tmp_path, GOOD.replace(old, new, 1))
    assert says in error.message
    assert error.line == line
    assert f"prices.yaml:{line}:" in error.message


def test_files_that_are_no_price_file(tmp_path: Path) -> None:
    assert "not `name: value` pairs" in refusal(tmp_path, "just text").message
    (tmp_path / "latin.yaml").write_bytes(b"schema: 1\n# caf\xe9\n")
    for name, problem in (("absent", "does not exist"), ("", "cannot be read"), ("latin.yaml", "not UTF-8")):
        with pytest.raises(BadFile, match=problem):
            read_catalogue(tmp_path / name)


def test_the_users_file_may_refer_to_what_is_shipped_and_hold_prices_alone(tmp_path: Path) -> None:
    text = GOOD[GOOD.index("prices:") :]
    assert "'p5.48xlarge' that is not listed" in refusal(tmp_path, text).message
    assert len(load_catalogue(write(tmp_path, text)).prices) > 3
    with pytest.raises(BadFile, match=r"prices\.yaml:27: .*usd_per_hour"):
        load_catalogue(write(tmp_path, GOOD.replace("98.32", "0")))


_FRAGMENTS = (*"{}[]'\"|#%@\n\t\x85", "- ", ": ", "*a", "&a ", "!!", "<<: ", "? ", "---", ".nan")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    line=st.integers(0, len(GOOD.splitlines()) - 1),
    start=st.integers(0, 60),
    end=st.integers(0, 60),
    new=st.one_of(st.text(max_size=10), st.sampled_from(_FRAGMENTS), st.floats().map(str)),
)
def test_a_changed_line_is_read_or_refused(tmp_path: Path, line: int, start: int, end: int, new: str) -> None:
    lines = GOOD.splitlines()
    lines[line] = lines[line][:start] + new + lines[line][max(start, end) :]
    path = tmp_path / "changed.yaml"
    path.write_text("\n".join(lines), encoding="utf-8", errors="surrogatepass", newline="")
    try:
        catalogue = read_catalogue(path)
    except BadFile as error:
        assert str(path) in error.message
    else:
        assert all(price.usd_per_hour > 0 and price.source for price in catalogue.prices)


def test_a_third_partys_old_spot_price_is_for_forecasts_alone(shipped: Catalogue) -> None:
    offer: dict[str, Any] = {"region": "us-east-1", "purchase": "spot", "on": TODAY}
    old = shipped.find_price("p5.48xlarge", **offer, old_spot=True)
    assert old is not None and old.secondary and old.as_of == DATE(2025, 6, 28)
    assert shipped.find_price("p5.48xlarge", **offer) is None
    with pytest.raises(UserError, match="no ec2 spot price"):
        shipped.price("p5.48xlarge", **offer)

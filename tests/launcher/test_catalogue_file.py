"""The price file: every fault is refused with its line, and nothing else is raised."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastlaunch.catalog.load import load_catalogue, read_catalogue
from fastlaunch.catalog.prices import Catalogue
from fastlaunch.core.errors import BadFile

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


def refusal(folder: Path, text: str, known: Catalogue | None = None) -> BadFile:
    with pytest.raises(BadFile) as caught:
        read_catalogue(write(folder, text), known)
    return caught.value


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
    "infinite price": ("usd_per_hour: 98.32", "usd_per_hour: .inf", 27, "is inf"),
    "price not a number": ("usd_per_hour: 98.32", "usd_per_hour: .nan", 27, "is nan"),
    "price as text": ("usd_per_hour: 98.32", 'usd_per_hour: "98.32"', 27, "is a number"),
    "price with a comma": ("usd_per_hour: 98.32", "usd_per_hour: 98,32", 27, "is a number"),
    "no price": ("usd_per_hour: 98.32", "usd_per_hour:", 27, "is empty"),
    "unknown unit": ("usd_per_hour: 98.32", "eur_per_hour: 98.32", 27, "unknown field `eur_per_hour`"),
    "missing date": ("    as_of: 2023-08-08\n", "", 24, "no `as_of`"),
    "empty source": ("-08\n    source: price list", '-08\n    source: ""', 29, "source is empty"),
    "wrong date": ("as_of: 2023-08-08", 'as_of: "2023-02-30"', 28, "is not a date"),
    "date as a number": ("as_of: 2023-08-08", "as_of: 20230808", 28, "it is a date"),
    "date and time": ("as_of: 2023-08-08", "as_of: 2023-08-08 10:00:00", 28, "is not a date"),
    "duplicate": ('as_of: "2025-06-23"', "as_of: 2023-08-08", 30, "duplicate: p5.48xlarge"),
    "duplicate region": ("[us-east-1, us-east-2]", "[us-east-1, us-east-1]", 24, "duplicate"),
    "duplicate key": ("service: ec2\n    region:", "instance: x\n    region:", 31, "`instance` stands"),
    "spot": ("purchase: on-demand", "purchase: spot", 33, "purchase is 'spot'"),
    "unknown purchase": ("purchase: on-demand", "purchase: reserved", 33, "purchase is 'reserved'"),
    "unknown service": ("ec2\n    region:", "gcp\n    region:", 31, "service is 'gcp'"),
    "unknown instance": ("- instance: p5.48xlarge", "- instance: p9", 24, "'p9' that is not listed"),
    "unknown accelerator": ("accelerator: H100", "accelerator: H900", 13, "'H900' that is not listed"),
    "region misspelt": ("region: us-east-1", "region: us-east", 32, "not the name of a region"),
    "region and regions": ("    region:", "    regions: [eu-west-1]\n    region:", 30, "either"),
    "regions as text": ("[us-east-1, us-east-2]", "us-east-1", 26, "it is a list"),
    "half an accelerator": ("num_accelerators: 8", "num_accelerators: 0.5", 14, "whole number"),
    "no accelerator": ("num_accelerators: 8", "num_accelerators: 0", 14, "is 0"),
    "unknown purchase option": ("capacity-block]", "barter]", 21, "'barter'"),
    "unknown format": ("formats: [bf16, fp8]", "formats: [bf16, fp9]", 8, "'fp9'"),
    "peak without its format": ("{bf16: 989.4}", "{tf32: 494.7}", 7, "peak_tflops of H100 has tf32"),
    "memory in another unit": ("    memory_gib: 80\n", "    memory_gb: 80\n", 4, "unknown field `memory_gb`"),
    "another schema": ("schema: 1", "schema: 2", 1, "another schema"),
    "unknown section": ("schema: 1", "version: 1", 1, "unknown field `version`"),
    "an empty name": ("  H100:\n", '  "":\n', 3, "for a name"),
    "syntax": ("regions: [us-east-1, us-east-2]", "regions: [us-east-1, us-east-2", 27, "is not YAML"),
    "a tab": ("    service: ec2\n    regions", "\tservice: ec2\n    regions", 25, "is not YAML"),
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
    assert "takes `name: value` pairs" in refusal(tmp_path, "just text").message
    with pytest.raises(BadFile, match="does not exist"):
        read_catalogue(tmp_path / "absent.yaml")
    with pytest.raises(BadFile, match="cannot be read"):
        read_catalogue(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"schema: 1\n# caf\xe9\n")
    with pytest.raises(BadFile, match="not UTF-8"):
        read_catalogue(tmp_path / "latin.yaml")


def test_the_users_file_may_refer_to_what_is_shipped_and_hold_prices_alone(tmp_path: Path) -> None:
    text = GOOD[GOOD.index("prices:") :]
    assert "'p5.48xlarge' that is not listed" in refusal(tmp_path, text).message
    assert len(read_catalogue(write(tmp_path, text), load_catalogue()).prices) == 3


def test_a_fault_in_the_users_file_names_that_file(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD.replace("98.32", "0"))
    with pytest.raises(BadFile, match=r"prices\.yaml:27: .*usd_per_hour"):
        load_catalogue(path)


_FRAGMENTS = (*"{}[]'\"|#%@\n\t\x85", "- ", ": ", "*a", "&a ", "!!", "<<: ", "? ", "---", ".nan")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50)
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

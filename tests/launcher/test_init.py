"""What `init` decides: VPC, subnets, route tables, and the config file's text."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from fastlaunch.aws.config_text import config_change, region_lines, stack_entries
from fastlaunch.aws.types import RouteTable, Subnet, Vpc
from fastlaunch.core.errors import UserError
from fastlaunch.core.settings import load_settings
from fastlaunch.placement.network import only_vpc, subnets_by_zone, tables_without_gateway

REGION = "us-east-1"
DEFAULT = Vpc(id="vpc-d", name="", cidr="172.31.0.0/16", is_default=True)
OTHERS = [Vpc(id=f"vpc-{name}", name=name, cidr="10.0.0.0/16", is_default=False) for name in ("lab", "prod")]


def test_the_default_vpc_or_the_only_one_is_taken_and_several_are_left_to_the_user() -> None:
    assert only_vpc([DEFAULT, *OTHERS], region=REGION) == DEFAULT
    assert only_vpc(OTHERS[:1], region=REGION) == OTHERS[0]
    assert only_vpc(OTHERS, region=REGION) is None
    assert only_vpc([DEFAULT, *OTHERS], region=REGION, given="vpc-lab") == OTHERS[0]
    with pytest.raises(UserError) as caught:
        only_vpc(OTHERS, region=REGION, given="vpc-x")
    assert caught.value.hint is not None and "--vpc vpc-lab  10.0.0.0/16" in caught.value.hint
    with pytest.raises(UserError) as caught:
        only_vpc([], region=REGION)
    assert "aws ec2 create-default-vpc --region us-east-1" in str(caught.value.hint)


def subnet(id: str, zone: str = "a", *, public: bool = False) -> Subnet:
    return Subnet(id=id, zone=REGION + zone, vpc="vpc-d", maps_public_ip=public)


def table(id: str, route: str, *subnets: str, main: bool = False) -> RouteTable:
    return RouteTable(id=id, is_main=main, subnets=frozenset(subnets), default_route=route)


TABLES = [
    table("rtb-main", "igw-1", main=True),
    table("rtb-nat", "nat-1", "s-nat", "s-nat-b"),
    table("rtb-none", "", "s-none", "s-none-c"),
]
SUBNETS = [
    subnet("s-nat"),
    subnet("s-none"),
    subnet("s-public", public=True),
    # To the gateway, and without an address.
    subnet("s-lost", "b"),
    subnet("s-nat-b", "b"),
    subnet("s-none-c", "c", public=True),
]


def test_each_zone_has_the_subnet_from_which_machines_get_out() -> None:
    chosen = subnets_by_zone(SUBNETS, TABLES, vpc="vpc-d")
    assert {zone: one.id for zone, one in chosen.items()} == {
        "us-east-1a": "s-public",
        "us-east-1b": "s-nat-b",
    }
    assert tables_without_gateway(chosen.values(), TABLES, ()) == ("rtb-main", "rtb-nat")
    assert tables_without_gateway(chosen.values(), TABLES, {"rtb-main", "rtb-x"}) == ("rtb-nat",)


def test_the_subnets_given_are_taken_as_they_are() -> None:
    chosen = subnets_by_zone(SUBNETS, TABLES, vpc="vpc-d", given=("s-none-c", "s-nat"))
    assert [(zone, one.id) for zone, one in chosen.items()] == [
        ("us-east-1a", "s-nat"),
        ("us-east-1c", "s-none-c"),
    ]


@pytest.mark.parametrize(
    ("subnets", "given", "message", "hint"),
    [
        (SUBNETS, ("s-x",), "no subnet s-x", "--subnet s-nat  us-east-1a"),
        (SUBNETS, ("s-nat", "s-none"), "both in us-east-1a", "one subnet per zone"),
        ([SUBNETS[3]], (), "no subnet of vpc-d has a way out", "--subnet s-lost"),
        ([], (), "vpc-d has no subnet", "create-subnet"),
    ],
)
def test_subnets_that_do_not_do_are_refused(
    subnets: list[Subnet], given: tuple[str, ...], message: str, hint: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        subnets_by_zone(subnets, TABLES, vpc="vpc-d", given=given)
    assert hint in str(caught.value.hint)


# The config file

ENTRIES = {
    "bucket": "acme-runs",
    "prefix": "fastlaunch",
    "security_groups": ["sg-1"],
    "subnets": {"us-east-1a": "subnet-a", "us-east-1b": "subnet-b"},
}


def change(text: str | None, *, entries: Any = ENTRIES, max_cost_usd: float | None = 25.0) -> Any:
    return config_change(text, region=REGION, entries=entries, max_cost_usd=max_cost_usd)


def test_a_new_file_is_commented_and_can_be_read(isolated: Path) -> None:
    changed = change(None)
    assert changed.text == changed.lines and changed.text.count("# ") >= 6
    (isolated.parent / "config.yaml").write_text(changed.text)
    settings = load_settings()
    here = settings.aws[REGION]
    assert (settings.region, settings.max_cost, here.bucket) == (REGION, 25.0, "acme-runs")
    assert list(here.subnets.values()) == ["subnet-a", "subnet-b"] and here.security_groups == ("sg-1",)
    # Again, it says all of it.
    again = change(changed.text)
    assert (again.text, again.lines, again.obstacle) == (None, "", None)


@pytest.mark.parametrize(
    "text",
    [
        "# mine\n",
        "# mine\nregion: eu-west-1  # home\nprices: own.yaml",
        "aws:\n# the first\n    eu-west-1:  # old\n        bucket: b  # it\n\n    # end\nregion: us-west-2\n",
        "aws:\n  eu-west-1:\n    subnets:\n      eu-west-1a: subnet-1\n    security_groups:\n    - sg-2\n",
        "max_cost: 25\naws:\n",
        "tags: {team: vision}\r\naws:\r\n  eu-west-1: {bucket: b}\r\n# end\r\n",
        "region: eu-west-1\ntags:\n  note: |\n    several\n    lines\n",
    ],
)
def test_a_file_of_the_users_keeps_everything_else(text: str) -> None:
    changed = change(text)
    before, after = yaml.safe_load(text) or {}, yaml.safe_load(changed.text)
    assert after["aws"].pop(REGION) == ENTRIES
    assert after.pop("max_cost") == 25
    before.pop("max_cost", None)
    has_regions = bool(before.get("aws"))
    assert after["aws"] == (before.pop("aws", None) or {})
    if not has_regions and "region" not in before:
        assert after.pop("region") == REGION
    after.pop("aws")
    assert after == before
    # Every line stands there as it was, and in its order.
    lines = iter(changed.text.splitlines())
    assert all(line in lines for line in text.splitlines())


def test_another_budget_takes_the_place_of_the_old_one() -> None:
    text = f"max_cost: 25.0  # for now\naws:\n{region_lines(REGION, ENTRIES)}"
    changed = change(text, max_cost_usd=1234567.0)
    assert changed.text == text.replace("25.0 ", "1234567 ")
    assert change(text, max_cost_usd=None).lines == ""


@pytest.mark.parametrize(
    ("text", "obstacle"),
    [
        (f"max_cost: 25\naws:\n  {REGION}:\n    bucket: another\n", "other values for us-east-1, or none"),
        ("max_cost: 25\naws: {eu-west-1: {bucket: b}}\n", "leaves no room"),
        ("---\nmax_cost: 25\naws: {eu-west-1: {bucket: b}}\n...\n", "leaves no room"),
    ],
)
def test_what_only_the_user_can_change_is_shown_alone(text: str, obstacle: str) -> None:
    changed = change(text)
    assert changed.text is None and obstacle in changed.obstacle
    # The prefix is that of a file without one.
    assert {**yaml.safe_load(changed.lines)["aws"][REGION], "prefix": "fastlaunch"} == ENTRIES
    assert not changed.is_complete


def test_entries_of_the_users_own_do_not_make_a_region_another() -> None:
    text = f"max_cost: 25\naws:\n{region_lines(REGION, {**ENTRIES, 'prefix': None})}    volume_kms_key: x\n"
    assert change(text) == change(text, entries={**ENTRIES, "role": ""}) and change(text).lines == ""


def test_what_yaml_would_read_as_something_else_is_quoted() -> None:
    entries = {"bucket": "123", "prefix": "on", "repository": "a: b", "role": "arn:aws:iam::1:role/x"}
    assert yaml.safe_load(region_lines(REGION, entries)) == {REGION: entries}


def test_a_stack_of_another_kind_has_no_entries() -> None:
    assert stack_entries(f"aws:\n  {REGION}:\n    bucket: b\n", REGION) == {"bucket": "b"}
    for output in ("", "x: [", "aws: {eu-west-1: {bucket: b}}"):
        with pytest.raises(UserError, match="ConfigFile"):
            stack_entries(output, REGION)

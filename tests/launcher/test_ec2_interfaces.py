"""Which network interfaces a node of several gets: known answers, and what holds for every type."""

import pytest
from ec2_builders import catalogue

from fastlaunch.backends.ec2.plan import interfaces_of


def places(name: str) -> list[tuple[str, int, int]]:
    """Kind, card and device of every interface."""
    made = interfaces_of(catalogue().instance(name), subnet="subnet-0", groups=("sg-0",))
    return [(one["InterfaceType"], one["NetworkCardIndex"], one["DeviceIndex"]) for one in made]


PRIMARY = ("interface", 0, 0)


@pytest.mark.parametrize(
    ("name", "efa"),
    [
        ("p4d.24xlarge", [(0, 1), (1, 0), (2, 0), (3, 0)]),
        ("p5.48xlarge", [(0, 1), *((card, 0) for card in range(1, 32))]),
        ("p5en.48xlarge", [(0, 1), *((card, 0) for card in range(1, 16))]),
        # 17 cards, and the first one has no EFA.
        ("p6-b300.48xlarge", [(card, 0) for card in range(1, 17)]),
        ("g6e.48xlarge", [(0, 1), (1, 0), (2, 0), (3, 0)]),
        ("g5.48xlarge", [(0, 1)]),
        ("g5.xlarge", []),
    ],
)
def test_efa_is_on_every_card_that_has_it(name: str, efa: list[tuple[int, int]]) -> None:
    assert places(name) == [PRIMARY, *(("efa-only", card, device) for card, device in efa)]


def test_every_type_gets_all_its_efa_and_no_place_twice() -> None:
    for name, instance in catalogue().instances.items():
        found = places(name)
        assert found[0] == PRIMARY and len(set(found)) == len(found) == 1 + instance.num_efa_interfaces, name
        cards = [card for kind, card, _ in found if kind == "efa-only"]
        assert len(set(cards)) == len(cards) and all(card < instance.num_network_cards for card in cards)


def test_every_interface_is_in_the_subnet_with_the_groups_and_gone_with_the_machine() -> None:
    instance = catalogue().instance("p4d.24xlarge")
    for one in interfaces_of(instance, subnet="subnet-0", groups=("sg-0", "sg-1")):
        assert (one["SubnetId"], one["Groups"], one["DeleteOnTermination"]) == (
            "subnet-0",
            ["sg-0", "sg-1"],
            True,
        )
    for one in interfaces_of(instance, subnet=None, groups=()):
        assert not {"SubnetId", "Groups"} & one.keys()

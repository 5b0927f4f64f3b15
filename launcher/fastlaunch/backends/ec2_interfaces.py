"""Network interfaces of one of several nodes: EFA on every card that has it. Pure.

docs.aws.amazon.com/AWSEC2/latest/UserGuide/efa-acc-inst-types.html, read 2026-11: the primary interface (card
0, device 0) is an ordinary one; EFA stands beside it on card 0, where that card has it, as device 1, and on
every other card as device 0. `efa-only` interfaces carry no IP and take no address out of the subnet.
"""

from collections.abc import Sequence
from typing import Any

from fastlaunch.catalog.hardware import InstanceType


def has_efa(instance: InstanceType) -> bool:
    """Whether nodes of this type can speak EFA to each other."""
    return instance.num_efa_interfaces > 0


def first_efa_card(instance: InstanceType) -> int:
    """The lowest card with EFA: 1 where cards outnumber EFA interfaces, as p6-b300's card 0 has none."""
    return 0 if instance.num_efa_interfaces >= instance.num_network_cards else 1


def interfaces_of(
    instance: InstanceType, *, subnet: str | None, groups: Sequence[str]
) -> list[dict[str, Any]]:
    """What `NetworkInterfaces` of RunInstances takes: one plain interface, and one for every card with EFA.

    subnet, groups: of all of them; left to EC2 where they are None or empty. With more than one interface
    EC2 gives no public address, and must not be asked for one.
    """
    efa = [(card, 1 if card == 0 else 0) for card in _efa_cards(instance)]
    places = [("interface", 0, 0), *(("efa-only", card, device) for card, device in efa)]
    where: dict[str, Any] = {}
    if subnet:
        where["SubnetId"] = subnet
    if groups:
        where["Groups"] = list(groups)
    return [
        {
            "NetworkCardIndex": card,
            "DeviceIndex": device,
            "InterfaceType": kind,
            "DeleteOnTermination": True,
            **where,
        }
        for kind, card, device in places
    ]


def _efa_cards(instance: InstanceType) -> range:
    first = first_efa_card(instance)
    return range(first, first + min(instance.num_efa_interfaces, instance.num_network_cards))

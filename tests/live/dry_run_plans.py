"""Asks EC2, without starting or paying anything, whether it would take the launcher's plans of several nodes.

Each golden plan with EFA goes out as RunInstances with DryRun, with this account's image, subnets, groups and
role in place of the plan's. EC2 looks at rights and at parameters, not at quota or capacity.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fastlaunch.aws.client import Aws
from fastlaunch.core.errors import CloudRefused
from fastlaunch.core.settings import RegionSettings, load_settings

PLANS = Path(__file__).parents[1] / "plans"
#: What EC2 says instead of starting something. docs.aws.amazon.com/AWSEC2, "Error codes".
WOULD_DO = "DryRunOperation"


def efa_plans() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and request of every golden plan whose machines have EFA, but for those in a capacity block."""
    for path in sorted(PLANS.glob("ec2-*.json")):
        request = json.loads(path.read_text(encoding="utf-8"))["request"]
        kinds = {one.get("InterfaceType") for one in request.get("NetworkInterfaces", ())}
        # A block has to be there, and nothing here knows of one.
        if "efa-only" in kinds and "CapacityReservationSpecification" not in request:
            yield path.stem, request


def moved(request: Mapping[str, Any], *, here: RegionSettings, zone: str, ami: str) -> dict[str, Any]:
    """The request with the names of this account, in the zone."""
    interfaces = [
        {**one, "SubnetId": here.subnets[zone], "Groups": list(here.security_groups)}
        for one in request["NetworkInterfaces"]
    ]
    changed = {
        **request,
        "ImageId": ami,
        # Kept as lines, to be read by people; what it holds does not matter for a dry run.
        "UserData": "\n".join(request["UserData"]),
        "NetworkInterfaces": interfaces,
        "IamInstanceProfile": {"Name": here.instance_profile},
    }
    if "Placement" in request:
        changed["Placement"] = {**request["Placement"], "GroupName": here.placement_groups[zone]}
    return changed


def answer(
    aws: Aws, region: str, here: RegionSettings, request: Mapping[str, Any], ami: str
) -> tuple[bool, str]:
    """Whether EC2 would take the request, or cannot be asked here; and what there is to say of it."""
    offered = aws.zones_offering(region, request["InstanceType"])
    zones = [zone for zone in here.subnets if zone in offered and zone in here.placement_groups]
    if not zones:
        return True, f"not asked: no zone of the config file with a placement group offers it ({offered})"
    try:
        asked = moved(request, here=here, zone=zones[0], ami=ami)
        aws.call("ec2", region, "RunInstances", DryRun=True, **asked)
    except CloudRefused as error:
        return (
            error.code == WOULD_DO,
            f"{zones[0]}: {error.code if error.code == WOULD_DO else error.message}",
        )
    raise AssertionError("a dry run has to be refused")


def main(aws: Aws) -> int:
    """Exit code: 1 if EC2 would refuse a plan."""
    settings = load_settings()
    region = settings.region
    here = settings.region_settings(region)
    ami = aws.parameter(region, here.ami_parameter)
    refused = 0
    for name, request in efa_plans():
        is_taken, told = answer(aws, region, here, request, ami)
        print(f"{'ok' if is_taken else 'REFUSED':8}{name}: {told}", flush=True)
        refused += not is_taken
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main(Aws()))

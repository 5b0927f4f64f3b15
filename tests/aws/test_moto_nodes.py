"""The tests' AWS knows interfaces, placement groups and capacity blocks as EC2 does."""

from datetime import UTC, datetime
from typing import Any

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError
from moto_gaps import machine_image_id
from moto_nodes import Block
from moto_server import MotoServer

REGION, TYPE = "us-east-1", "p4d.24xlarge"
IN_BLOCK = {
    "InstanceMarketOptions": {"MarketType": "capacity-block"},
    "CapacityReservationSpecification": {
        "CapacityReservationTarget": {"CapacityReservationId": "cr-0a1b2c3d"}
    },
}


def client() -> Any:
    return boto3.client(
        "ec2", region_name=REGION, config=Config(retries={"total_max_attempts": 1, "mode": "standard"})
    )


def launch(count: int = 1, **changed: Any) -> list[dict[str, Any]]:
    request = {
        "ImageId": machine_image_id(REGION),
        "InstanceType": TYPE,
        "MinCount": count,
        "MaxCount": count,
        **changed,
    }
    made: list[dict[str, Any]] = client().run_instances(**request)["Instances"]
    return made


def refused(**changed: Any) -> str:
    with pytest.raises(ClientError) as error:
        launch(**changed)
    code: str = error.value.response["Error"]["Code"]
    return code


def add_block(server: MotoServer, **changes: Any) -> str:
    """A block of two p4d, and the subnet of its zone."""
    subnets = subnets_of(server)
    zone = next(iter(subnets))
    block = {
        "id": "cr-0a1b2c3d",
        "region": REGION,
        "zone": zone,
        "instance_type": TYPE,
        "num_instances": 2,
        "starts_at": datetime(2026, 11, 20, 11, 30, tzinfo=UTC),
        "ends_at": datetime(2026, 11, 25, 11, 30, tzinfo=UTC),
        **changes,
    }
    server.blocks["cr-0a1b2c3d"] = Block(**block)
    return subnets[zone]


def subnets_of(server: MotoServer) -> dict[str, str]:
    """Subnets by zone."""
    found = client().describe_subnets()["Subnets"]
    return {one["AvailabilityZone"]: one["SubnetId"] for one in found}


def test_interfaces_are_told_as_they_were_asked_for(aws_server: MotoServer) -> None:
    subnet = next(iter(subnets_of(aws_server).values()))
    client().create_placement_group(GroupName="near", Strategy="cluster")
    places = [("interface", 0, 0), ("efa-only", 0, 1), ("efa-only", 1, 0), ("efa-only", 2, 0)]
    asked = [
        {"InterfaceType": kind, "NetworkCardIndex": card, "DeviceIndex": device, "SubnetId": subnet}
        for kind, card, device in places
    ]
    made = launch(2, NetworkInterfaces=asked, Placement={"GroupName": "near"})
    assert [one["AmiLaunchIndex"] for one in made] == [0, 1]
    told = client().describe_instances()["Reservations"][0]["Instances"]
    for instance in (*made, *told):
        found = [
            (one["InterfaceType"], one["Attachment"]["NetworkCardIndex"], one["Attachment"]["DeviceIndex"])
            for one in instance["NetworkInterfaces"]
        ]
        assert found == places
        assert "PublicIpAddress" not in instance
        assert instance["Placement"]["GroupName"] == "near"
    assert [one["InstanceId"] for one in told] == [one["InstanceId"] for one in made]


def test_several_interfaces_get_no_public_address(aws_server: MotoServer) -> None:
    both = [{"DeviceIndex": 0, "AssociatePublicIpAddress": True}, {"DeviceIndex": 1}]
    assert refused(NetworkInterfaces=both) == "InvalidParameterCombination"
    assert launch(NetworkInterfaces=both[:1])


def test_a_placement_group_has_to_be_there(aws_server: MotoServer) -> None:
    assert refused(Placement={"GroupName": "near"}) == "InvalidPlacementGroup.Unknown"


def test_a_block_gives_what_it_has_in_its_zone_and_no_more(aws_server: MotoServer) -> None:
    subnet = add_block(aws_server)
    other = list(subnets_of(aws_server).values())[1]

    def num_free() -> int:
        (told,) = client().describe_capacity_reservations(CapacityReservationIds=["cr-0a1b2c3d"])[
            "CapacityReservations"
        ]
        assert (told["ReservationType"], told["State"]) == ("capacity-block", "active")
        assert told["EndDate"] == datetime(2026, 11, 25, 11, 30, tzinfo=UTC)
        assert told["TotalInstanceCount"] == 2
        free: int = told["AvailableInstanceCount"]
        return free

    assert num_free() == 2
    assert refused(**IN_BLOCK, SubnetId=other) == "InvalidParameterCombination"
    assert refused(**IN_BLOCK, SubnetId=subnet, InstanceType="p5.48xlarge") == "InvalidParameterCombination"
    assert refused(**IN_BLOCK, SubnetId=subnet, count=3) == "ReservationCapacityExceeded"
    (first,) = launch(**IN_BLOCK, SubnetId=subnet)
    assert first["CapacityReservationId"] == "cr-0a1b2c3d"
    told = client().describe_instances()["Reservations"][0]["Instances"][0]
    assert (told["InstanceLifecycle"], told["CapacityReservationId"]) == ("capacity-block", "cr-0a1b2c3d")
    assert num_free() == 1
    assert refused(**IN_BLOCK, SubnetId=subnet, count=2) == "ReservationCapacityExceeded"
    client().terminate_instances(InstanceIds=[first["InstanceId"]])
    assert num_free() == 2


def test_a_block_is_named_as_one_and_is_there(aws_server: MotoServer) -> None:
    subnet = add_block(aws_server)
    market, target = IN_BLOCK["InstanceMarketOptions"], IN_BLOCK["CapacityReservationSpecification"]
    assert refused(SubnetId=subnet, InstanceMarketOptions=market) == "InvalidParameterCombination"
    assert refused(SubnetId=subnet, CapacityReservationSpecification=target) == "InvalidParameterCombination"
    add_block(aws_server, state="expired")
    assert refused(SubnetId=subnet, **IN_BLOCK) == "ReservationCapacityExceeded"
    aws_server.blocks.clear()
    assert refused(SubnetId=subnet, **IN_BLOCK) == "InvalidCapacityReservationId.NotFound"
    with pytest.raises(ClientError, match=r"InvalidCapacityReservationId\.NotFound"):
        client().describe_capacity_reservations(CapacityReservationIds=["cr-0a1b2c3d"])

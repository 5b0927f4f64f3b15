"""What `Aws` makes of answers that the AWS of the tests does not give."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from botocore.stub import ANY
from stubbed_aws import StubbedAws

from fastlaunch.aws.types import MachineImage
from fastlaunch.core.errors import BadConfiguration, NotAuthorised

THEN = datetime(2026, 11, 21, tzinfo=UTC)


def test_all_pages_are_read(stubbed_aws: StubbedAws) -> None:
    stub = stubbed_aws.stub("ec2")
    asked = {"Filters": [{"Name": "client-token", "Values": ["run-a1"]}], "MaxResults": 1000}
    for number, token in ((1, "more"), (2, None)):
        instance = {
            "InstanceId": f"i-{number}",
            "InstanceType": "p5.48xlarge",
            "State": {"Name": "running"},
            "LaunchTime": THEN,
            "StateReason": {"Code": "pending", "Message": "pending"},
        }
        page = {"Reservations": [{"Instances": [instance]}], **({"NextToken": token} if token else {})}
        stub.add_response("describe_instances", page, asked)
        asked = {**asked, "NextToken": "more"}
    found = stubbed_aws.aws.describe_instances("us-east-1", tokens=["run-a1"])
    assert [one.id for one in found] == ["i-1", "i-2"]
    assert [one.state_reason for one in found] == [None, None]


def test_capacity_blocks_are_no_spot_and_reasons_are_told_once(stubbed_aws: StubbedAws) -> None:
    def instance(lifecycle: str, reason: str) -> dict[str, Any]:
        return {
            "InstanceId": f"i-{lifecycle}",
            "InstanceType": "p5.48xlarge",
            "InstanceLifecycle": lifecycle,
            "State": {"Name": "terminated"},
            "LaunchTime": THEN,
            "StateReason": {"Code": "Server.InternalError", "Message": reason},
            "StateTransitionReason": "",
        }

    told = [instance("spot", "told so"), instance("capacity-block", "Server.InternalError: told so")]
    stubbed_aws.stub("ec2").add_response("describe_instances", {"Reservations": [{"Instances": told}]})
    spot, block = stubbed_aws.aws.describe_instances("us-east-1", ids=["i-spot", "i-capacity-block"])
    assert (spot.is_spot, block.is_spot) == (True, False)
    assert spot.state_reason == block.state_reason == "Server.InternalError: told so"
    assert (spot.zone, spot.token, spot.transition_reason, spot.tags) == (None, None, None, {})


def test_of_a_zones_spot_prices_the_newest_counts(stubbed_aws: StubbedAws) -> None:
    history = [
        ("us-east-1a", 1, "9.0"),
        ("us-east-1a", 3, "20.0"),
        ("us-east-1a", 2, "1.0"),
        ("us-east-1b", 0, "21.5"),
    ]
    told = [
        {"AvailabilityZone": zone, "Timestamp": THEN + timedelta(hours=hour), "SpotPrice": usd}
        for zone, hour, usd in history
    ]
    for page in ({"SpotPriceHistory": told[:2], "NextToken": "more"}, {"SpotPriceHistory": told[2:]}):
        stubbed_aws.stub("ec2").add_response("describe_spot_price_history", page)
    assert stubbed_aws.aws.spot_price_usd("us-east-1", "p5.48xlarge", None) == (20.0, "us-east-1a")


def test_the_root_volume_is_the_one_of_the_root_device(stubbed_aws: StubbedAws) -> None:
    image = {
        "RootDeviceName": "/dev/xvda",
        "BlockDeviceMappings": [
            {"DeviceName": "/dev/sdb", "VirtualName": "ephemeral0"},
            {"DeviceName": "/dev/sdf", "Ebs": {"VolumeSize": 500}},
            {"DeviceName": "/dev/xvda", "Ebs": {"VolumeSize": 75}},
        ],
    }
    stubbed_aws.stub("ec2").add_response("describe_images", {"Images": [image]}, {"ImageIds": ["ami-1"]})
    found = stubbed_aws.aws.machine_image("us-east-1", "ami-1")
    assert found == MachineImage(id="ami-1", root_device="/dev/xvda", root_gib=75)


def test_a_refusal_for_want_of_a_context_is_not_taken_for_one(stubbed_aws: StubbedAws) -> None:
    iam, sts = stubbed_aws.stub("iam"), stubbed_aws.stub("sts")
    role = {"RoleName": "node", "RoleId": "AROAAAAAAAAAAAAAAAAA", "Path": "/", "CreateDate": THEN}
    arn = "arn:aws:iam::123456789012:role/node"
    profile = {"Path": "/", "InstanceProfileName": "node", "InstanceProfileId": "AIPAAAAAAAAAAAAAAAAA"}
    dated = {"Arn": "arn:aws:iam::123456789012:instance-profile/node", "CreateDate": THEN}
    refused = {"EvalActionName": "iam:PassRole", "EvalDecision": "explicitDeny"}
    for missing in ([], ["aws:MultiFactorAuthPresent"]):
        told = {"InstanceProfile": {**profile, **dated, "Roles": [{**role, "Arn": arn}]}}
        iam.add_response("get_instance_profile", told, {"InstanceProfileName": "node"})
        who = {"Account": "123456789012", "Arn": "arn:aws:iam::123456789012:user/ada"}
        sts.add_response("get_caller_identity", who)
        results = {"EvaluationResults": [{**refused, "MissingContextValues": missing}]}
        iam.add_response("simulate_principal_policy", results)
    assert "iam:PassRole is not allowed" in (stubbed_aws.aws.may_pass_role("node") or "")
    with pytest.raises(NotAuthorised, match=r"iam:PassRole on .*node depends on aws:MultiFactorAuthPresent"):
        stubbed_aws.aws.may_pass_role("node")


@pytest.mark.parametrize(
    ("service", "more", "counts"),
    [
        ("com.amazonaws.us-east-1.ecr.dkr", {}, True),
        ("cn.com.amazonaws.us-east-1.ecr.dkr", {}, True),
        ("com.amazonaws.us-east-1.ecr.dkr", {"PrivateDnsEnabled": False}, False),
        ("com.amazonaws.us-east-1.ecr.dkr", {"PrivateDnsEnabled": False, "VpcEndpointType": "Gateway"}, True),
        ("com.amazonaws.us-east-1.ecr.dkr", {"State": "deleting"}, False),
        ("com.amazonaws.us-east-1.ecr.api", {}, False),
    ],
)
def test_only_an_endpoint_in_use_takes_what_goes_to_its_service(
    stubbed_aws: StubbedAws, service: str, more: dict[str, Any], counts: bool
) -> None:
    usually = {"VpcEndpointType": "Interface", "State": "available", "PrivateDnsEnabled": True}
    told = {"ServiceName": service, **usually, **more}
    stubbed_aws.stub("ec2").add_response("describe_vpc_endpoints", {"VpcEndpoints": [told]}, {"Filters": ANY})
    assert ("ecr.dkr" in stubbed_aws.aws.endpoints("us-east-1", "vpc-1")) is counts


def test_a_route_that_leads_nowhere_is_none(stubbed_aws: StubbedAws) -> None:
    def table(subnet: str, state: str) -> dict[str, Any]:
        route = {"DestinationCidrBlock": "0.0.0.0/0", "NatGatewayId": "nat-1", "State": state}
        return {"Associations": [{"SubnetId": subnet, "Main": False}], "Routes": [route]}

    tables = [table("subnet-1", "active"), table("subnet-2", "blackhole")]
    stubbed_aws.stub("ec2").add_response("describe_route_tables", {"RouteTables": tables}, {"Filters": ANY})
    assert stubbed_aws.aws.default_routes("us-east-1", "vpc-1") == {"subnet-1": "nat-1", "subnet-2": ""}


def test_a_failure_of_an_image_is_not_taken_for_none(stubbed_aws: StubbedAws) -> None:
    failure = {"imageId": {"imageTag": "2.13"}, "failureCode": "InvalidImageTag", "failureReason": "told so"}
    stubbed_aws.stub("ecr").add_response("batch_get_image", {"images": [], "failures": [failure]})
    with pytest.raises(BadConfiguration, match=r"pytorch:2\.13 .*told so"):
        stubbed_aws.aws.image_digest("us-east-1", "763104351884", "pytorch", "2.13")

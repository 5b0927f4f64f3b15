"""Groups, reservations and roles as AWS tells of them; what is asked and told is held to botocore's model."""

from datetime import UTC, datetime

from stubbed_aws import StubbedAws


def test_rules_of_groups_are_those_for_all_traffic(stubbed_aws: StubbedAws) -> None:
    itself = [{"GroupId": "sg-1"}]
    told = {
        "GroupId": "sg-1",
        "IpPermissions": [
            {"IpProtocol": "-1", "UserIdGroupPairs": itself},
            {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "UserIdGroupPairs": [{"GroupId": "sg-9"}]},
        ],
        "IpPermissionsEgress": [{"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}],
    }
    stubbed_aws.stub("ec2").add_response(
        "describe_security_groups", {"SecurityGroups": [told]}, {"GroupIds": ["sg-1"]}
    )
    rules = stubbed_aws.aws.group_rules("us-east-1", ("sg-1",))["sg-1"]
    assert (rules.lets_in, rules.lets_out) == (frozenset({"sg-1"}), frozenset())


def test_a_placement_group_that_is_not_there_is_none(stubbed_aws: StubbedAws) -> None:
    stub = stubbed_aws.stub("ec2")
    stub.add_response(
        "describe_placement_groups",
        {"PlacementGroups": [{"GroupName": "close", "Strategy": "cluster", "State": "available"}]},
        {"GroupNames": ["close"]},
    )
    stub.add_client_error("describe_placement_groups", "InvalidPlacementGroup.Unknown", "no", 400)
    found = stubbed_aws.aws.placement_group("us-east-1", "close")
    assert found is not None and (found.strategy, found.state) == ("cluster", "available")
    assert stubbed_aws.aws.placement_group("us-east-1", "other") is None


def test_a_reservation_is_asked_for_by_id(stubbed_aws: StubbedAws) -> None:
    stub = stubbed_aws.stub("ec2")
    told = {
        "CapacityReservationId": "cr-1",
        "InstanceType": "p5.48xlarge",
        "AvailabilityZone": "us-east-1b",
        "State": "active",
        "TotalInstanceCount": 2,
        "AvailableInstanceCount": 1,
        "ReservationType": "capacity-block",
        "StartDate": datetime(2026, 11, 20, tzinfo=UTC),
    }
    stub.add_response(
        "describe_capacity_reservations",
        {"CapacityReservations": [told]},
        {"CapacityReservationIds": ["cr-1"]},
    )
    stub.add_client_error(
        "describe_capacity_reservations", "InvalidCapacityReservationId.NotFound", "no", 400
    )
    found = stubbed_aws.aws.reservation("us-east-1", "cr-1")
    assert found is not None
    assert (found.kind, found.zone, found.num_free, found.ends_at) == (
        *("capacity-block", "us-east-1b", 1, None),
    )
    assert stubbed_aws.aws.reservation("us-east-1", "cr-2") is None


def test_a_role_of_another_path_or_account_is_none(stubbed_aws: StubbedAws) -> None:
    arn = "arn:aws:iam::123456789012:role/jobs/training"
    created = datetime(2026, 11, 21, tzinfo=UTC)
    told = {
        "Path": "/jobs/",
        "RoleName": "training",
        "RoleId": "AROA1234567890ABCDEF",
        "Arn": arn,
        "CreateDate": created,
    }
    for _ in range(2):
        stubbed_aws.stub("iam").add_response("get_role", {"Role": told}, {"RoleName": "training"})
    found = stubbed_aws.aws.role("us-east-1", arn)
    assert found is not None and found.trusts == frozenset()
    assert stubbed_aws.aws.role("us-east-1", arn.replace("/jobs", "")) is None

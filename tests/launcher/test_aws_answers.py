"""What `Aws` makes of answers that the AWS of the tests does not give; questions fit botocore's model."""

import io
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from itertools import chain, repeat
from typing import Any

import pytest
from botocore.response import StreamingBody
from botocore.stub import ANY
from stubbed_aws import StubbedAws
from urllib3.exceptions import ProtocolError

from fastlaunch.aws.client import Aws
from fastlaunch.aws.types import MachineImage
from fastlaunch.core.errors import BadConfiguration, NotAuthorised, Unreachable

REGION = "us-east-1"
REQUEST = {"MinCount": 1, "MaxCount": 1}
THEN = datetime(2026, 11, 21, tzinfo=UTC)


def instance(id: str, **changes: Any) -> dict[str, Any]:
    usual = {
        "InstanceId": id,
        "InstanceType": "p5.48xlarge",
        "State": {"Name": "running"},
        "LaunchTime": THEN,
        "StateReason": {"Code": "pending", "Message": "pending"},
    }
    return {**usual, **changes}


def test_all_pages_are_read(stubbed_aws: StubbedAws) -> None:
    stub = stubbed_aws.stub("ec2")
    asked = {"Filters": [{"Name": "client-token", "Values": ["run-a1"]}], "MaxResults": 1000}
    for number, token in ((1, {"NextToken": "more"}), (2, {})):
        page = {"Reservations": [{"Instances": [instance(f"i-{number}")]}], **token}
        stub.add_response("describe_instances", page, asked)
        asked = {**asked, "NextToken": "more"}
    found = stubbed_aws.aws.describe_instances(REGION, tokens=["run-a1"])
    assert [one.id for one in found] == ["i-1", "i-2"]
    assert [one.state_reason for one in found] == [None, None]


def test_capacity_blocks_are_no_spot_and_reasons_have_their_code_once(stubbed_aws: StubbedAws) -> None:
    answers = [
        instance(
            f"i-{lifecycle}",
            InstanceLifecycle=lifecycle,
            StateReason={"Code": "Server.InternalError", "Message": reason},
            StateTransitionReason="",
        )
        for lifecycle, reason in (("spot", "why"), ("capacity-block", "Server.InternalError: why"))
    ]
    stubbed_aws.stub("ec2").add_response("describe_instances", {"Reservations": [{"Instances": answers}]})
    spot, block = stubbed_aws.aws.describe_instances(REGION, ids=["i-spot", "i-capacity-block"])
    assert (spot.is_spot, block.is_spot) == (True, False)
    assert spot.state_reason == block.state_reason == "Server.InternalError: why"
    assert (spot.zone, spot.token, spot.transition_reason, spot.tags) == (None, None, None, {})


def test_of_a_zones_spot_prices_the_newest_counts(stubbed_aws: StubbedAws) -> None:
    history = [("a", 1, "9.0"), ("a", 3, "20.0"), ("a", 2, "1.0"), ("b", 0, "21.5")]
    prices = [
        {
            "InstanceType": "p5.48xlarge",
            "AvailabilityZone": f"us-east-1{zone}",
            "Timestamp": THEN + timedelta(hours=hour),
            "SpotPrice": usd,
        }
        for zone, hour, usd in history
    ]
    for page in ({"SpotPriceHistory": prices[:2], "NextToken": "more"}, {"SpotPriceHistory": prices[2:]}):
        stubbed_aws.stub("ec2").add_response("describe_spot_price_history", page)
    assert stubbed_aws.aws.spot_price_usd(REGION, "p5.48xlarge", None) == (20.0, "us-east-1a")


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
    found = stubbed_aws.aws.machine_image(REGION, "ami-1")
    assert found == MachineImage(id="ami-1", root_device="/dev/xvda", root_gib=75)


def test_a_denial_for_want_of_a_context_is_not_taken_for_one(stubbed_aws: StubbedAws) -> None:
    denied = {"EvalActionName": "iam:PassRole", "EvalDecision": "explicitDeny"}
    who = {"UserId": "AIDAX", "Account": "123456789012", "Arn": "arn:aws:iam::123456789012:user/ada"}
    stubbed_aws.stub("sts").add_response("get_caller_identity", who)
    for missing in ([], ["aws:MultiFactorAuthPresent"]):
        results = {"EvaluationResults": [{**denied, "MissingContextValues": missing}]}
        stubbed_aws.stub("iam").add_response("simulate_principal_policy", results)
    role = "arn:aws:iam::123456789012:role/node"
    assert not stubbed_aws.aws.may_pass(role, "ec2.amazonaws.com")
    with pytest.raises(NotAuthorised, match="aws:MultiFactorAuthPresent"):
        stubbed_aws.aws.may_pass(role, "ec2.amazonaws.com")


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
    usual = {"VpcEndpointType": "Interface", "State": "available", "PrivateDnsEnabled": True}
    answer = {"VpcEndpoints": [{"ServiceName": service, **usual, **more}]}
    stubbed_aws.stub("ec2").add_response("describe_vpc_endpoints", answer, {"Filters": ANY})
    assert ("ecr.dkr" in stubbed_aws.aws.endpoints(REGION, "vpc-1")) is counts


def test_a_route_that_leads_nowhere_is_none(stubbed_aws: StubbedAws) -> None:
    tables = [
        {
            "RouteTableId": "rtb-1",
            "Associations": [{"SubnetId": subnet, "Main": False}],
            "Routes": [{"DestinationCidrBlock": "0.0.0.0/0", "NatGatewayId": "nat-1", "State": state}],
        }
        for subnet, state in (("subnet-1", "active"), ("subnet-2", "blackhole"))
    ]
    stubbed_aws.stub("ec2").add_response("describe_route_tables", {"RouteTables": tables}, {"Filters": ANY})
    assert stubbed_aws.aws.default_routes(REGION, "vpc-1") == {"subnet-1": "nat-1", "subnet-2": ""}


def test_a_failure_of_an_image_is_not_taken_for_none(stubbed_aws: StubbedAws) -> None:
    failure = {"imageId": {"imageTag": "2.13"}, "failureCode": "InvalidImageTag", "failureReason": "why"}
    stubbed_aws.stub("ecr").add_response("batch_get_image", {"images": [], "failures": [failure]})
    with pytest.raises(BadConfiguration, match=r"pytorch:2\.13 .*why"):
        stubbed_aws.aws.image_digest(REGION, "763104351884", "pytorch", "2.13")


def test_rules_of_groups_are_those_for_all_traffic(stubbed_aws: StubbedAws) -> None:
    ssh = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "UserIdGroupPairs": [{"GroupId": "sg-9"}]}
    group = {
        "GroupId": "sg-1",
        "IpPermissions": [{"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": "sg-1"}]}, ssh],
        "IpPermissionsEgress": [{"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}],
    }
    stub = stubbed_aws.stub("ec2")
    stub.add_response("describe_security_groups", {"SecurityGroups": [group]}, {"GroupIds": ["sg-1"]})
    rules = stubbed_aws.aws.group_rules(REGION, ("sg-1",))["sg-1"]
    assert (rules.lets_in, rules.lets_out) == (frozenset({"sg-1"}), frozenset())


def test_a_training_plan_is_asked_for_by_name(stubbed_aws: StubbedAws) -> None:
    begins = datetime(2026, 12, 1, 11, 30, tzinfo=UTC)
    answer = {
        "TrainingPlanArn": "arn:aws:sagemaker:us-east-1:123456789012:training-plan/december",
        "TrainingPlanName": "december",
        "Status": "Scheduled",
        "TotalInstanceCount": 2,
        "AvailableInstanceCount": 1,
        "StartTime": begins,
        "EndTime": begins + timedelta(days=1),
    }
    sagemaker = stubbed_aws.stub("sagemaker")
    sagemaker.add_response("describe_training_plan", answer, {"TrainingPlanName": "december"})
    stubbed_aws.error("sagemaker", "describe_training_plan", "ResourceNotFound")
    plan = stubbed_aws.aws.training_plan(REGION, answer["TrainingPlanArn"])
    assert plan is not None and (plan.status, plan.num_free, plan.starts_at) == ("Scheduled", 1, begins)
    assert stubbed_aws.aws.training_plan(REGION, answer["TrainingPlanArn"]) is None


def test_a_reservation_is_asked_for_by_id(stubbed_aws: StubbedAws) -> None:
    answer = {
        "CapacityReservationId": "cr-1",
        "InstanceType": "p5.48xlarge",
        "AvailabilityZone": "us-east-1b",
        "State": "active",
        "TotalInstanceCount": 2,
        "AvailableInstanceCount": 1,
        "ReservationType": "capacity-block",
        "StartDate": THEN,
    }
    stubbed_aws.stub("ec2").add_response(
        "describe_capacity_reservations",
        {"CapacityReservations": [answer]},
        {"CapacityReservationIds": ["cr-1"]},
    )
    stubbed_aws.error("ec2", "describe_capacity_reservations", "InvalidCapacityReservationId.NotFound")
    found = stubbed_aws.aws.reservation(REGION, "cr-1")
    assert found is not None
    assert (found.kind, found.zone, found.num_free) == ("capacity-block", "us-east-1b", 1)
    assert (found.starts_at, found.ends_at) == (THEN, None)
    assert stubbed_aws.aws.reservation(REGION, "cr-2") is None


def test_a_role_of_another_path_or_account_is_none(stubbed_aws: StubbedAws) -> None:
    arn = "arn:aws:iam::123456789012:role/jobs/training"
    role = {"Path": "/jobs/", "RoleName": "training", "RoleId": "AROA1234567890ABCDEF", "CreateDate": THEN}
    for _ in range(2):
        answer = {"Role": {**role, "Arn": arn}}
        stubbed_aws.stub("iam").add_response("get_role", answer, {"RoleName": "training"})
    found = stubbed_aws.aws.role(REGION, arn)
    assert found is not None and found.trusts == frozenset()
    assert stubbed_aws.aws.role(REGION, arn.replace("/jobs", "")) is None


def test_the_accounts_quotas_stand_over_the_defaults_on_all_pages(stubbed_aws: StubbedAws) -> None:
    def quota(name: str, value: float) -> dict[str, Any]:
        return {"QuotaName": name, "QuotaCode": "L-1", "Value": value, "ServiceCode": "sagemaker"}

    stub, asked = stubbed_aws.stub("servicequotas"), {"ServiceCode": "sagemaker", "MaxResults": 100}
    defaults = {"Quotas": [quota("p5", 0.0), quota("p4d", 0.0)]}
    stub.add_response("list_aws_default_service_quotas", defaults, asked)
    stub.add_response("list_service_quotas", {"Quotas": [], "NextToken": "t"}, asked)
    stub.add_response("list_service_quotas", {"Quotas": [quota("p5", 4.0)]}, {**asked, "NextToken": "t"})
    found = stubbed_aws.aws.quotas_by_name(REGION, "sagemaker")
    assert (found["p5"].value, found["p5"].is_default) == (4.0, False)
    assert (found["p4d"].value, found["p4d"].is_default) == (0.0, True)


class Answer:
    """A body that comes in these pieces, and may break off."""

    def __init__(self, *pieces: bytes | Exception, then: bytes = b"") -> None:
        self._pieces = chain(pieces, repeat(then))

    def read(self, num_bytes: int) -> bytes:
        piece = next(self._pieces)
        if isinstance(piece, Exception):
            raise piece
        return piece

    def close(self) -> None: ...


def test_a_download_that_breaks_off_begins_anew(stubbed_aws: StubbedAws) -> None:
    for body in (Answer(b"ab", ProtocolError("reset")), Answer(b"a", b"bcd")):
        stubbed_aws.stub("s3").add_response("get_object", {"Body": StreamingBody(body, 4)})
    file = io.BytesIO()
    assert stubbed_aws.aws.download(REGION, "b", "k", file, max_bytes=10)
    assert file.getvalue() == b"abcd"


def test_a_download_that_does_not_end_is_ended(stubbed_aws: StubbedAws) -> None:
    body = StreamingBody(Answer(then=b"x" * 2**10), None)
    stubbed_aws.stub("s3").add_response("get_object", {"Body": body})
    file = io.BytesIO()
    assert stubbed_aws.aws.download(REGION, "b", "k", file, max_bytes=10_000)
    assert file.getvalue() == b"x" * 10_000


# Stacks

CHANGE_SET = f"arn:aws:cloudformation:{REGION}:123456789012:changeSet/fastlaunch-1/x"


def stack_answer(status: str, **more: Any) -> dict[str, Any]:
    return {
        "Stacks": [{"StackId": "id", "StackName": "fl", "CreationTime": THEN, "StackStatus": status, **more}]
    }


def event(
    number: int, name: str, status: str, reason: str | None = None, kind: str = "AWS::IAM::Role"
) -> Any:
    return {
        "StackId": "id",
        "EventId": str(number),
        "StackName": "fl",
        "Timestamp": THEN,
        "LogicalResourceId": name,
        "ResourceType": kind,
        "ResourceStatus": status,
        **({"ResourceStatusReason": reason} if reason else {}),
    }


def test_a_change_set_is_read_once_it_is_made_with_all_pages(stubbed_aws: StubbedAws) -> None:
    stub, asked = stubbed_aws.stub("cloudformation"), {"ChangeSetName": CHANGE_SET}
    change = {"Action": "Modify", "LogicalResourceId": "Bucket", "ResourceType": "AWS::S3::Bucket"}
    stub.add_response("describe_change_set", {"Status": "CREATE_PENDING"}, asked)
    for replaced, token in (("True", {"NextToken": "more"}), ("Conditional", {})):
        changes = [{"Type": "Resource", "ResourceChange": {**change, "Replacement": replaced}}]
        answer = {"Status": "CREATE_COMPLETE", "Changes": changes, **token}
        stub.add_response("describe_change_set", answer, asked)
        asked = {**asked, "NextToken": "more"}
    found = stubbed_aws.aws.changes(REGION, CHANGE_SET)
    assert [one.is_replaced for one in found] == [True, False] and stubbed_aws.slept_s == [2.0]


@pytest.mark.parametrize(
    "reason",
    [
        "The submitted information didn't contain changes. Submit different information.",
        "No updates are to be performed.",
    ],
)
def test_a_change_set_without_a_change_changes_nothing(stubbed_aws: StubbedAws, reason: str) -> None:
    answer = {"Status": "FAILED", "StatusReason": reason}
    stubbed_aws.stub("cloudformation").add_response("describe_change_set", answer)
    assert stubbed_aws.aws.changes(REGION, CHANGE_SET) == []


def test_a_template_that_is_refused_says_why(stubbed_aws: StubbedAws) -> None:
    answer = {"Status": "FAILED", "StatusReason": "Resource of type 'AWS::S3::Bucket' already exists"}
    stubbed_aws.stub("cloudformation").add_response("describe_change_set", answer)
    with pytest.raises(BadConfiguration, match="refuses the template: Resource of type"):
        stubbed_aws.aws.changes(REGION, CHANGE_SET)


def test_a_stack_is_followed_from_its_first_new_event_to_the_failure_that_others_follow_from(
    stubbed_aws: StubbedAws,
) -> None:
    stub, shown = stubbed_aws.stub("cloudformation"), []
    old = [event(1, "Bucket", "CREATE_FAILED", "long ago")]
    new = [
        event(5, "fl", "UPDATE_FAILED", "[NodeRole] failed", "AWS::CloudFormation::Stack"),
        event(4, "TrainingRole", "CREATE_FAILED", "Resource creation cancelled"),
        event(3, "NodeRole", "CREATE_FAILED", "may not be made"),
        event(2, "NodeRole", "CREATE_IN_PROGRESS"),
    ]
    stub.add_response("describe_stack_events", {"StackEvents": old})
    stub.add_response("execute_change_set", {}, {"ChangeSetName": CHANGE_SET, "ClientRequestToken": "x"})
    # Nothing of it is to be seen at first.
    stub.add_response("describe_stack_events", {"StackEvents": old})
    stub.add_response("describe_stack_events", {"StackEvents": [*new[3:], *old]})
    stub.add_response("describe_stacks", stack_answer("UPDATE_IN_PROGRESS"))
    stub.add_response("describe_stack_events", {"StackEvents": [*new[2:], *old]})
    stub.add_response("describe_stacks", stack_answer("UPDATE_ROLLBACK_COMPLETE"))
    stub.add_response("describe_stack_events", {"StackEvents": [*new, *old]})
    with pytest.raises(BadConfiguration) as caught:
        stubbed_aws.aws.execute_change_set(REGION, "fl", CHANGE_SET, shown.append)
    assert caught.value.message == "stack fl is UPDATE_ROLLBACK_COMPLETE: NodeRole: may not be made"
    assert shown == ["NodeRole is CREATE_FAILED"]


def test_a_stack_that_does_not_come_to_rest_is_left_alone(stubbed_aws: StubbedAws) -> None:
    stub = stubbed_aws.stub("cloudformation")
    for _ in range(360):
        stub.add_response("describe_stacks", stack_answer("DELETE_IN_PROGRESS"))
    with pytest.raises(Unreachable, match="not done after 30 minutes"):
        stubbed_aws.aws.settled_stack(REGION, "fl")


def test_only_an_empty_stack_is_deleted(stubbed_aws: StubbedAws) -> None:
    stub = stubbed_aws.stub("cloudformation")
    for status in ("CREATE_IN_PROGRESS", "REVIEW_IN_PROGRESS"):
        stub.add_response("delete_change_set", {}, {"ChangeSetName": CHANGE_SET})
        stub.add_response("describe_stacks", stack_answer(status))
        if status == "REVIEW_IN_PROGRESS":
            stub.add_response("delete_stack", {}, {"StackName": "id"})
        stubbed_aws.aws.discard(REGION, CHANGE_SET, "fl")


@pytest.mark.parametrize(
    "service, method, answer, ask",
    [
        ("sts", "get_caller_identity", {}, lambda aws: aws.identity()),
        ("ec2", "run_instances", {}, lambda aws: aws.run_instances(REGION, {**REQUEST, "ClientToken": "a"})),
        (
            *("ec2", "describe_instances", {"Reservations": [{"Instances": [{"InstanceId": "i-1"}]}]}),
            lambda aws: aws.describe_instances(REGION, ids=["i-1"]),
        ),
    ],
)
def test_what_lacks_what_aws_always_gives_is_no_answer(
    stubbed_aws: StubbedAws, service: str, method: str, answer: dict[str, Any], ask: Callable[[Aws], object]
) -> None:
    stubbed_aws.stub(service).add_response(method, answer)
    with pytest.raises(Unreachable):
        ask(stubbed_aws.aws)


def test_what_botocore_cannot_parse_is_no_answer() -> None:
    class Proxied:
        def get_caller_identity(self) -> None:
            raise KeyError("GetCallerIdentityResult")

    with pytest.raises(Unreachable):
        Aws(attempts=1, connect=lambda *_: Proxied()).identity()

"""Policies against the reviewed table: whatever is asked of AWS is in it, allowed, and nothing else is."""

import ast
import json
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from policy_simulator import Ask, allows, listed
from policy_table import ACCOUNT, BUCKET, KEY, LAUNCHER, NODE, SCENARIOS, TABLE, Scenario

from fastlaunch.account.policies import POLICIES, policy, trust
from fastlaunch.account_statements import names_by_hand
from fastlaunch.base_image_file import shipped_base_images
from fastlaunch.core.paths import shipped
from fastlaunch.core.settings import RegionSettings
from fastlaunch.images.build import DEFAULT_REPOSITORY
from fastlaunch.preflight_region import DOCTOR_KEY

NAMES = names_by_hand(account=ACCOUNT, bucket=BUCKET, kms_key=KEY)
DOCUMENTS = {name: policy(name, NAMES) for name in POLICIES}
PLANS = Path(__file__).parents[1] / "plans"


def calls_of_the_launcher() -> set[str]:
    """`service:Action` of every call in the room `aws`."""
    sources = sorted(Path(str(files("fastlaunch.aws"))).glob("*.py"))
    found = set()
    for node in (node for path in sources for node in ast.walk(ast.parse(path.read_text()))):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name in ("ask", "pages"):
            parts = [node.args[0], node.args[2]]
        elif name == "Asked":
            named = {keyword.arg: keyword.value for keyword in node.keywords}
            parts = [named["service"], named["action"]]
        else:
            continue
        if all(isinstance(part, ast.Constant) for part in parts):
            found.add(":".join(str(part.value) for part in parts))  # type: ignore[attr-defined]
    return found


def refused(scenario: Scenario, documents: Mapping[str, Any]) -> Iterator[str]:
    """What the scenario asks for and these documents do not allow, in words."""
    held = [documents[name] for name in scenario.policies]
    for operation in scenario.operations:
        yield from (f"{operation}: {ask}" for ask in TABLE[operation] if not allows(held, ask))


def breaks(name: str, statements: list[Any]) -> bool:
    """Whether some scenario is not allowed any more if the policy of this name has these statements."""
    documents = {**DOCUMENTS, name: {"Statement": statements}}
    return any(any(refused(one, documents)) for one in SCENARIOS.values() if name in one.policies)


def test_every_call_of_the_launcher_is_in_the_table_and_no_other() -> None:
    calls = calls_of_the_launcher()
    assert len(calls) > 30
    assert {operation.partition(" ")[0] for operation in LAUNCHER} == calls


def test_aws_is_asked_nowhere_else() -> None:
    package = Path(str(files("fastlaunch")))
    asking = [
        path.parent.name
        for path in package.rglob("*.py")
        if re.search(
            r"\.(ask|pages)\(\s*\"(ec2|s3|ecr|iam|sts|ssm|logs|sagemaker|scheduler|servicequotas)\"",
            path.read_text(),
        )
    ]
    assert [name for name in asking if name != "aws"] == []


def test_every_command_of_the_node_is_in_the_table_and_no_other() -> None:
    template = (files("fastlaunch.backends") / "templates" / "user_data.sh.j2").read_text()
    found = re.findall(r"\bcloud (s3|s3api|ecr) ([a-z0-9-]+)", template)
    assert {f"node {service} {command}" for service, command in found} == NODE.keys()
    # Nothing reaches AWS but through `cloud`, and nothing in a container at all.
    assert len(re.findall(r"(?<![\w/.-])aws --", template)) == 1
    for script in ("run_train.sh", "run_sagemaker.sh"):
        text = (shipped("containers") / script).read_text(encoding="utf-8")
        assert not re.search(r"^[^#]*(?<![\w/.-])(aws|boto3) ", text, re.MULTILINE)


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_is_allowed(name: str) -> None:
    assert list(refused(SCENARIOS[name], DOCUMENTS)) == []


def test_every_operation_and_policy_has_its_scenario() -> None:
    done = {operation for scenario in SCENARIOS.values() for operation in scenario.operations}
    assert done == TABLE.keys()
    assert {name for scenario in SCENARIOS.values() for name in scenario.policies} == POLICIES.keys()


@pytest.mark.parametrize("part", ["Statement", "Action", "Resource"])
def test_nothing_is_allowed_that_no_scenario_needs(part: str) -> None:
    spare = []
    for name, document in DOCUMENTS.items():
        for index, statement in enumerate(document["Statement"]):
            for value in listed(statement[part]) if part != "Statement" else [None]:
                left = [one for one in listed(statement.get(part)) if one != value] if value else []
                shorter = [{**statement, part: left}] if left else []
                rest = [*document["Statement"][:index], *shorter, *document["Statement"][index + 1 :]]
                if not breaks(name, rest):
                    spare.append(f"{name} {statement['Sid']} {value or ''}")
    assert spare == []


def test_every_condition_refuses_something() -> None:
    """What must not be done, and would be without the condition of a statement."""
    run, tags = "arn:aws:ec2:us-west-2:123456789012:instance/*", "aws:RequestTag/fastlaunch:run"
    job = "arn:aws:sagemaker:us-west-2:123456789012:training-job/other"
    bucket = f"arn:aws:s3:::{BUCKET}"
    forbidden = {
        "launcher": (
            Ask(action="ec2:RunInstances", resource=run),
            # A limit is what ends it.
            Ask(action="ec2:RunInstances", resource=run, context={tags: "r"}),
            Ask(action="ec2:CreateTags", resource=run),
            Ask(action="ec2:CreateTags", resource=run, context={"ec2:CreateAction": "CreateVolume"}),
            Ask(action="ec2:TerminateInstances", resource=run),
            Ask(action="sagemaker:StopTrainingJob", resource=job),
            *(
                Ask(
                    action="iam:PassRole",
                    resource=role,
                    context={"iam:PassedToService": "lambda.amazonaws.com"},
                )
                for role in (NAMES.node_role, NAMES.scheduler_role)
            ),
            Ask(action="iam:PassRole", resource=NAMES.node_role),
            Ask(action="kms:CreateGrant", resource=KEY),
            Ask(action="s3:GetObject", resource=f"{bucket}/somebody-elses"),
            Ask(
                action="scheduler:DeleteSchedule",
                resource="arn:aws:scheduler:us-west-2:123456789012:schedule/default/nightly",
            ),
        ),
        "launcher-sagemaker": (
            Ask(action="sagemaker:CreateTrainingJob", resource=job),
            Ask(action="sagemaker:AddTags", resource=job),
            Ask(
                action="iam:PassRole",
                resource=NAMES.training_role,
                context={"iam:PassedToService": "ec2.amazonaws.com"},
            ),
        ),
        "node": (
            Ask(action="s3:ListBucket", resource=bucket),
            Ask(action="s3:ListBucket", resource=bucket, context={"s3:prefix": "somebody-elses/"}),
            Ask(action="s3:PutObject", resource=f"{bucket}/fastlaunch/code/0.tar.gz"),
            Ask(action="ec2:TerminateInstances", resource=run),
        ),
        "training": (
            Ask(action="s3:ListBucket", resource=bucket, context={"s3:prefix": "somebody-elses/"}),
            Ask(action="cloudwatch:PutMetricData", context={"cloudwatch:namespace": "AWS/EC2"}),
            Ask(action="s3:PutObject", resource=f"{bucket}/fastlaunch/code/0.tar.gz"),
        ),
        "scheduler": (Ask(action="ec2:TerminateInstances", resource=run),),
    }
    for name, asks in forbidden.items():
        assert [str(ask) for ask in asks if allows([DOCUMENTS[name]], ask)] == []
        for statement in DOCUMENTS[name]["Statement"]:
            if "Condition" in statement:
                without = {"Statement": [{k: v for k, v in statement.items() if k != "Condition"}]}
                assert any(allows([without], ask) for ask in asks), f"{name} {statement['Sid']}"


def asks_of(plan: Mapping[str, Any]) -> list[Ask]:
    """What the request of a plan asks IAM for, by what it names."""
    request, region = plan["request"], plan["region"]
    arn = f"arn:aws:ec2:{region}:{ACCOUNT}"
    if plan["operation"] == "CreateTrainingJob":
        job = f"arn:aws:sagemaker:{region}:{ACCOUNT}:training-job/{request['TrainingJobName']}"
        tags = {f"aws:RequestTag/{tag['Key']}": tag["Value"] for tag in request["Tags"]}
        tagging = {**tags, "sagemaker:TaggingAction": "CreateTrainingJob"}
        used = request["ResourceConfig"].get("TrainingPlanArn")
        return [
            Ask(action="sagemaker:CreateTrainingJob", resource=job, context=tags),
            Ask(action="sagemaker:AddTags", resource=job, context=tagging),
            *([Ask(action="sagemaker:CreateTrainingJob", resource=used)] if used else []),
        ]
    interfaces = [request, *request.get("NetworkInterfaces", ())]
    named = [f"arn:aws:ec2:{region}::image/{request['ImageId']}", f"{arn}:network-interface/*"]
    for one in interfaces:
        named += [
            f"{arn}:security-group/{group}"
            for key in ("Groups", "SecurityGroupIds")
            for group in one.get(key, ())
        ]
        named += [f"{arn}:subnet/{one['SubnetId']}"] if "SubnetId" in one else []
    named += (
        [f"{arn}:placement-group/{request['Placement']['GroupName']}"]
        if "GroupName" in request.get("Placement", {})
        else []
    )
    target = request.get("CapacityReservationSpecification", {}).get("CapacityReservationTarget", {})
    named += [f"{arn}:capacity-reservation/{value}" for value in target.values()]
    market = request.get("InstanceMarketOptions", {}).get("MarketType")
    named += [f"{arn}:spot-instances-request/*"] if market == "spot" else []
    asks = [Ask(action="ec2:RunInstances", resource=resource) for resource in named]
    for specification in request["TagSpecifications"]:
        made = f"{arn}:{specification['ResourceType']}/*"
        tags = {f"aws:RequestTag/{tag['Key']}": tag["Value"] for tag in specification["Tags"]}
        creating = {**tags, "ec2:CreateAction": "RunInstances"}
        asks.append(Ask(action="ec2:RunInstances", resource=made, context=tags))
        asks.append(Ask(action="ec2:CreateTags", resource=made, context=creating))
    return asks


def test_every_golden_plan_may_be_sent() -> None:
    plans = {path.name: json.loads(path.read_text()) for path in PLANS.glob("*.json")}
    held = [DOCUMENTS["launcher"], DOCUMENTS["launcher-sagemaker"]]
    sent = 0
    for name, plan in plans.items():
        if plan["backend"] == "local":
            continue
        asks = asks_of(plan)
        assert [str(ask) for ask in asks if not allows(held, ask)] == [], name
        sent += len(asks)
        # EC2 asks for what is made with it, tagged or not.
        if plan["backend"] == "ec2":
            kinds = {one["ResourceType"] for one in plan["request"]["TagSpecifications"]}
            assert kinds == {"instance", "volume"}, name
    assert sent > 100


def test_the_policies_cover_every_image_and_folder_that_is_used() -> None:
    pulls = [
        Ask(action="ecr:BatchGetImage", resource=f"arn:aws:ecr:eu-west-1:{owner}:repository/{name}")
        for owner, name in {("763104351884", image.repository) for image in shipped_base_images().images}
        | {(ACCOUNT, DEFAULT_REPOSITORY)}
    ]
    for name in ("node", "training", "launcher", "launcher-build"):
        assert all(allows([DOCUMENTS[name]], ask) for ask in pulls), name
    assert NAMES.prefix == RegionSettings().prefix
    doctor = Ask(action="s3:PutObject", resource=f"arn:aws:s3:::{BUCKET}/{NAMES.prefix}/{DOCTOR_KEY}")
    assert allows([DOCUMENTS["launcher"]], doctor)


@pytest.mark.parametrize(
    ("name", "service"), [("node", "ec2"), ("training", "sagemaker"), ("scheduler", "scheduler")]
)
def test_a_role_is_taken_on_by_its_service_alone(name: str, service: str) -> None:
    (statement,) = trust(name, NAMES)["Statement"]
    assert statement["Principal"] == {"Service": f"{service}.amazonaws.com"}
    if name != "node":
        assert statement["Condition"] == {"StringEquals": {"aws:SourceAccount": ACCOUNT}}

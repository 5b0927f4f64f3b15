"""What moto's CloudFormation lacks: outputs, kinds of resources, stacks that take a while, and that fail."""

from collections.abc import Callable
from copy import copy
from functools import cache
from typing import TYPE_CHECKING, Any

from sent_request import SentRequest

from fastlaunch.aws.batch import TRAINING

if TYPE_CHECKING:
    from moto_server import Answer, MotoServer

#: By name in the template: why CloudFormation gives the stack up. For the tests' one server.
FAILING: dict[str, str] = {}
#: How often a stack is seen changing.
LOOKS = 1
_IMPORTS = [False]
#: Region, name and strategy of those that stacks have made.
PLACEMENT_GROUPS: list[tuple[str, str, str]] = []
#: What stacks have made of queues of AWS Batch, part by part.
QUEUES: list[dict[str, Any]] = []
#: Subclasses that nobody holds are gone.
_MODELS: list[Any] = []


def clear() -> None:
    FAILING.clear()
    PLACEMENT_GROUPS.clear()
    QUEUES.clear()
    _IMPORTS[:] = [False]


def note_import(server: "MotoServer", request: SentRequest) -> "Answer | None":
    """Remember whether what exists becomes part of the stack, which moto does not read."""
    _IMPORTS[:] = [request.parameters.get("ImportExistingResources") == "true"]
    return None


@cache
def mend() -> None:
    """Change moto's CloudFormation where it is not AWS's."""
    from moto.cloudformation.models import ChangeSet, CloudFormationBackend, Stack
    from moto.cloudformation.responses import CloudFormationResponse
    from moto.core.common_models import CloudFormationModel
    from moto.ecr.models import Repository
    from moto.s3.models import FakeBucket

    _add_models(CloudFormationModel)
    _import_existing(FakeBucket, "s3")
    _import_existing(Repository, "ecr")
    apply, create = ChangeSet.apply, CloudFormationBackend.create_change_set
    execute, describe = CloudFormationBackend.execute_change_set, CloudFormationBackend.describe_stacks
    diff, listed = ChangeSet.diff, Stack.parameter_list.fget

    def apply_with_outputs(change_set: Any) -> None:
        apply(change_set)
        change_set.stack.template_dict = change_set.template_dict
        change_set.stack.output_map = change_set.stack._create_output_map()

    def diff_with_imports(change_set: Any) -> list[Any]:
        changes = diff(change_set)
        names = {"AWS::S3::Bucket": "BucketName", "AWS::ECR::Repository": "RepositoryName"}
        given = change_set.parameters
        for change in changes:
            name = given.get(names.get(change.resource_type, ""), "fastlaunch")
            if (
                change.resource_type in names
                and _IMPORTS == [True]
                and _exists(change_set.stack, change, name)
            ):
                change.action = "Import"
        return changes

    def create_change_set(backend: Any, **given: Any) -> Any:
        alike = [stack for stack in backend.stacks.values() if stack.name == given["stack_name"]]
        if given["change_set_type"] == "CREATE":
            for stack in alike:
                del backend.stacks[stack.stack_id]
        elif alike and {key: _text(value) for key, value in given["parameters"].items()} == {
            each["ParameterKey"]: each["ParameterValue"] for each in alike[0].parameter_list
        }:
            # All as before, though not all was given before.
            given["parameters"] = alike[0].parameters
        return create(backend, **given)

    def execute_change_set(backend: Any, change_set_name: str, stack_name: str | None = None) -> None:
        change_set = backend.describe_change_set(change_set_name)
        if change_set.execution_status == "EXECUTE_COMPLETE":
            return  # the same request again
        stack, kind = change_set.stack, change_set.change_set_type
        before, resources = len(stack.events), change_set.template_dict["Resources"]
        failing = {name: why for name, why in FAILING.items() if name in resources}
        if not failing:
            try:
                execute(backend, change_set_name, stack_name)
            except Exception as error:
                failing = {"Bucket": str(getattr(error, "message", error))}
        if failing:
            del stack.events[before:]
            stack._add_stack_event(f"{kind}_IN_PROGRESS")
            for name, why in failing.items():
                _add_event(stack, resources, name, f"{kind}_FAILED", why)
            _add_event(stack, resources, "NodeRole", f"{kind}_FAILED", "Resource creation cancelled")
            rollback = "ROLLBACK" if kind == "CREATE" else "UPDATE_ROLLBACK"
            stack._add_stack_event(f"{rollback}_IN_PROGRESS", resource_status_reason="[...] failed")
            stack.status = f"{rollback}_COMPLETE"
        else:
            for name in stack.resource_map._parsed_resources:
                if name in resources:
                    _add_event(stack, resources, name, f"{kind}_COMPLETE", None)
            stack._add_stack_event(stack.events[-1].resource_status)
        stack.num_looks = LOOKS

    def describe_stacks(backend: Any, name: str) -> list[Any]:
        return [_seen(stack) for stack in describe(backend, name)]

    # A change set without a change fails once it is made, and is not refused.
    CloudFormationResponse._validate_different_update = lambda *given: None
    ChangeSet.apply = apply_with_outputs
    ChangeSet.diff = diff_with_imports
    Stack.parameter_list = property(
        lambda stack: [{**each, "ParameterValue": _text(each["ParameterValue"])} for each in listed(stack)]
    )
    CloudFormationBackend.create_change_set = create_change_set
    CloudFormationBackend.execute_change_set = execute_change_set
    CloudFormationBackend.describe_stacks = describe_stacks


def _seen(stack: Any) -> Any:
    """The stack as a look at it shows it: changing for a while."""
    if not getattr(stack, "num_looks", 0):
        return stack
    stack.num_looks -= 1
    changing = copy(stack)
    changing.status = stack.status.replace("_COMPLETE", "_IN_PROGRESS")
    return changing


def _add_event(stack: Any, resources: Any, name: str, status: str, why: str | None) -> None:
    from moto.cloudformation.models import Event

    kind = resources.get(name, {}).get("Type", "AWS::IAM::Role")
    stack.events.append(
        Event(
            stack_id=stack.stack_id,
            stack_name=stack.name,
            logical_resource_id=name,
            physical_resource_id=name,
            resource_type=kind,
            resource_status=status,
            resource_status_reason=why,
            resource_properties=None,
        )
    )


def _exists(stack: Any, change: Any, name: str) -> bool:
    from moto_server import backend

    if change.resource_type == "AWS::S3::Bucket":
        return name in backend("s3", "aws").buckets
    return name in backend("ecr", stack.region_name).repositories


def _import_existing(model: Any, service: str) -> None:
    """Have a resource's creation take what is there, if the change set says so."""
    from moto_server import backend

    create: Callable[..., Any] = model.create_from_cloudformation_json.__func__

    def create_or_import(cls: Any, name: str, *given: Any, **more: Any) -> Any:
        region = more.get("region_name") or given[-1]
        held = backend("s3", "aws").buckets if service == "s3" else backend("ecr", region).repositories
        return held[name] if _IMPORTS == [True] and name in held else create(cls, name, *given, **more)

    model.create_from_cloudformation_json = classmethod(create_or_import)


def _text(value: Any) -> str:
    """A parameter's value as AWS shows it: a list with commas."""
    return ",".join(value) if isinstance(value, list) else str(value)


def _add_models(base: Any) -> None:
    """The kinds of resources in the template that moto does not know."""
    from moto_server import backend

    def model(kind: str, make: Callable[[str, Any, str], None]) -> None:
        class Made(base):  # type: ignore[misc]
            # moto takes the service from it.
            __module__ = "moto.ec2.models.stacks"

            def __init__(self, name: str) -> None:
                self.name = name

            @property
            def physical_resource_id(self) -> str:
                return self.name

            @classmethod
            def has_cfn_attr(cls, attr: str) -> bool:
                return attr.endswith("Arn")

            def get_cfn_attribute(self, attribute_name: str) -> str:
                return f"arn:aws:batch:us-east-1:123456789012:{self.name}"

            @staticmethod
            def cloudformation_name_type() -> str:
                return ""

            @staticmethod
            def cloudformation_type() -> str:
                return kind

            @classmethod
            def create_from_cloudformation_json(
                cls, name: str, data: Any, account_id: str, region_name: str, **more: Any
            ) -> Any:
                make(name, data["Properties"], region_name)
                return cls(name)

            @classmethod
            def update_from_cloudformation_json(cls, original: Any, *given: Any) -> Any:
                return original

            @classmethod
            def delete_from_cloudformation_json(cls, *given: Any) -> None:
                pass

            def is_created(self) -> bool:
                return True

        _MODELS.append(Made)

    def egress(name: str, given: Any, region: str) -> None:
        backend("ec2", region).authorize_security_group_egress(
            given["GroupId"],
            given["IpProtocol"],
            None,
            None,
            [],
            source_groups=[{"GroupId": given["DestinationSecurityGroupId"]}],
        )

    def policy(name: str, given: Any, region: str) -> None:
        pass

    def environment(name: str, given: Any, region: str) -> None:
        (limit,) = given["CapacityLimits"]
        assert (given["ServiceEnvironmentType"], limit["CapacityUnit"]) == (TRAINING, "NUM_INSTANCES")
        QUEUES.append({"num_instances": int(limit["MaxCapacity"])})

    def shares(name: str, given: Any, region: str) -> None:
        QUEUES.append({"sharing": "fairsharePolicy" if "FairsharePolicy" in given else None})

    def queue(name: str, given: Any, region: str) -> None:
        QUEUES.append({"name": given["JobQueueName"], "region": region, "kind": given["JobQueueType"]})

    def group(name: str, given: Any, region: str) -> None:
        PLACEMENT_GROUPS.append((region, name, given["Strategy"]))

    model("AWS::EC2::SecurityGroupEgress", egress)
    model("AWS::S3::BucketPolicy", policy)
    model("AWS::EC2::PlacementGroup", group)
    model("AWS::Batch::ServiceEnvironment", environment)
    model("AWS::Batch::SchedulingPolicy", shares)
    model("AWS::Batch::JobQueue", queue)

"""CloudFormation stacks: look at one, ask what a template would change in it, and carry that out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from fastlaunch.aws.session import AwsSession
from fastlaunch.core.errors import BadConfiguration, Unreachable
from fastlaunch.core.terminal import printable

#: The pause between looks at a change set, and at a stack, and the most looks: 5 and 30 minutes in all.
CHANGE_SET_PAUSE_S, MAX_CHANGE_SET_LOOKS = 2.0, 150
STACK_PAUSE_S, MAX_STACK_LOOKS = 5.0, 360
#: The status of a stack that has a change set, but no resources yet.
EMPTY = "REVIEW_IN_PROGRESS"
_ROLES = "CAPABILITY_IAM"
#: CloudFormation has no codes for these. docs.aws.amazon.com/AWSCloudFormation, "Change set status codes".
_NO_STACK = "does not exist"
_NO_CHANGES = ("didn't contain changes", "No updates are to be performed")
#: Why a resource was not created if another one failed.
_CANCELLED = "Resource creation cancelled"


@dataclass(frozen=True, kw_only=True)
class Stack:
    id: str
    name: str
    region: str
    # CREATE_COMPLETE, UPDATE_ROLLBACK_COMPLETE, ROLLBACK_IN_PROGRESS, ...
    status: str
    # Empty where CloudFormation gives none.
    reason: str = ""
    parameters: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether it never had a resource."""
        return self.status == EMPTY

    @property
    def is_usable(self) -> bool:
        """Whether its resources exist and can be changed, as also after a rolled back update."""
        return self.status in (
            *("CREATE_COMPLETE", "UPDATE_COMPLETE", "IMPORT_COMPLETE"),
            *("UPDATE_ROLLBACK_COMPLETE", "IMPORT_ROLLBACK_COMPLETE"),
        )


@dataclass(frozen=True, kw_only=True)
class StackChange:
    """A planned change of one resource of a stack."""

    # Add, Modify, Remove, Import, ...
    action: str
    # The resource's name in the template.
    name: str
    # Such as AWS::S3::Bucket.
    kind: str
    # Whether another one takes its place.
    is_replaced: bool = False


class CloudFormationCalls(AwsSession):
    def stack(self, region: str, name: str) -> Stack | None:
        """Return the stack of this name or id, None if there is none."""
        try:
            answer = self.call("cloudformation", region, "DescribeStacks", subject=name, StackName=name)
        except BadConfiguration as error:
            if error.code == "ValidationError" and _NO_STACK in error.message:
                return None
            raise
        (answer,) = answer["Stacks"]
        if answer["StackStatus"] == "DELETE_COMPLETE":
            return None
        return Stack(
            id=answer["StackId"],
            name=answer["StackName"],
            region=region,
            status=answer["StackStatus"],
            reason=printable(answer.get("StackStatusReason", "")),
            parameters={
                pair["ParameterKey"]: pair.get("ParameterValue", "") for pair in answer.get("Parameters", ())
            },
            outputs={pair["OutputKey"]: pair["OutputValue"] for pair in answer.get("Outputs", ())},
        )

    def settled_stack(
        self, region: str, name: str, shown: Callable[[str], None] = lambda line: None
    ) -> Stack | None:
        """Return the stack once nothing changes it any more; None if there is none.

        shown: called at each look while it changes. Raises Unreachable if that does not end.
        """
        for _ in range(MAX_STACK_LOOKS):
            stack = self.stack(region, name)
            if stack is None or stack.is_empty or not stack.status.endswith("_IN_PROGRESS"):
                return stack
            shown(f"{stack.name} is {stack.status}")
            self._sleep(STACK_PAUSE_S)
        minutes = MAX_STACK_LOOKS * STACK_PAUSE_S / 60
        raise Unreachable(
            f"stack {name} in {region} is not done after {minutes:.0f} minutes",
            "it goes on without fastlaunch: type the same again",
        )

    def create_change_set(
        self,
        region: str,
        stack: str,
        *,
        is_new: bool,
        template: str,
        parameters: Mapping[str, str | None],
        import_existing: bool,
    ) -> str:
        """Create a change set of what the template would change in the stack; return its id.

        A new stack is created empty. parameters: None keeps the stack's present value. import_existing: take
        existing resources with the template's names into the stack.
        """
        name = f"fastlaunch-{self._now():%Y%m%d-%H%M%S}"
        answer = self.call(
            "cloudformation",
            region,
            "CreateChangeSet",
            subject=stack,
            StackName=stack,
            ChangeSetName=name,
            # The same request twice makes one.
            ClientToken=name,
            ChangeSetType="CREATE" if is_new else "UPDATE",
            TemplateBody=template,
            Parameters=[
                {"ParameterKey": key, "UsePreviousValue": True}
                if value is None
                else {"ParameterKey": key, "ParameterValue": value}
                for key, value in parameters.items()
            ],
            Capabilities=[_ROLES],
            **({"ImportExistingResources": True} if import_existing else {}),
        )
        return str(answer["Id"])

    def changes(self, region: str, change_set: str) -> list[StackChange]:
        """Wait until a change set is ready; return its changes.

        Raises BadConfiguration if CloudFormation refuses it, Unreachable if it is not ready in time.
        """
        changes: list[StackChange] = []
        for _ in range(MAX_CHANGE_SET_LOOKS):
            changes.clear()
            pages = self.paginate("cloudformation", region, "DescribeChangeSet", ChangeSetName=change_set)
            for page in pages:
                status, reason = page["Status"], printable(page.get("StatusReason", ""))
                for change in (change["ResourceChange"] for change in page.get("Changes", ())):
                    changes.append(
                        StackChange(
                            action=change["Action"],
                            name=change["LogicalResourceId"],
                            kind=change["ResourceType"],
                            is_replaced=change.get("Replacement") == "True",
                        )
                    )
            if status == "CREATE_COMPLETE":
                return changes
            if status == "FAILED" and any(text in reason for text in _NO_CHANGES):
                return []
            if status not in ("CREATE_PENDING", "CREATE_IN_PROGRESS"):
                raise BadConfiguration(f"CloudFormation refuses the template: {reason or status}")
            self._sleep(CHANGE_SET_PAUSE_S)
        raise Unreachable(f"change set {change_set} is not ready", "type the same again")

    def discard(self, region: str, change_set: str, stack: str) -> None:
        """Delete a change set that was not carried out, and its stack if that never had a resource."""
        self.call_or_none(
            "cloudformation",
            region,
            "DeleteChangeSet",
            absent=["ChangeSetNotFound", "ChangeSetNotFoundException"],
            ChangeSetName=change_set,
        )
        present = self.stack(region, stack)
        if present is not None and present.is_empty:
            self.call("cloudformation", region, "DeleteStack", subject=stack, StackName=present.id)

    def execute_change_set(
        self, region: str, stack: str, change_set: str, shown: Callable[[str], None] = lambda line: None
    ) -> Stack:
        """Carry out a change set; return the stack when that is done.

        shown: called with the resource that changed last. Raises BadConfiguration with the failures if
        CloudFormation gives up.
        """
        events = self.items("cloudformation", region, "DescribeStackEvents", "StackEvents", StackName=stack)
        before = next((str(event["EventId"]) for event in events), None)

        def show_progress(_: str) -> None:
            if events := self._events_since(region, stack, before):
                shown(f"{events[0]['LogicalResourceId']} is {events[0]['ResourceStatus']}")

        self.call(
            "cloudformation",
            region,
            "ExecuteChangeSet",
            subject=stack,
            ChangeSetName=change_set,
            ClientRequestToken=change_set.rpartition("/")[2],
        )
        # Before its first event the stack looks unchanged.
        for _ in range(MAX_CHANGE_SET_LOOKS):
            if self._events_since(region, stack, before):
                break
            self._sleep(CHANGE_SET_PAUSE_S)
        settled = self.settled_stack(region, stack, show_progress)
        if settled is None or not settled.is_usable or "ROLLBACK" in settled.status:
            # The oldest first, without mere consequences.
            reasons = [
                f"{event['LogicalResourceId']}: {printable(event['ResourceStatusReason'])}"
                for event in reversed(self._events_since(region, stack, before))
                if event["ResourceStatus"].endswith("_FAILED")
                and event.get("ResourceStatusReason", _CANCELLED).partition(":")[0] != _CANCELLED
                and event["ResourceType"] != "AWS::CloudFormation::Stack"
            ]
            status = settled.status if settled else "gone"
            why = "; ".join(reasons) or (settled.reason if settled else "") or "no reason is given"
            raise BadConfiguration(f"stack {stack} is {status}: {why}")
        return settled

    def _events_since(self, region: str, stack: str, before: str | None) -> list[Any]:
        """Return the stack's events after the one with this id, the newest first."""
        events = self.items("cloudformation", region, "DescribeStackEvents", "StackEvents", StackName=stack)
        return list(takewhile(lambda event: event["EventId"] != before, events))

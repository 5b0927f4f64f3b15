"""An account: who is logged in, what roles and policies allow, quotas, and one-time schedules."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from fastlaunch.aws.session import AwsSession
from fastlaunch.aws.types import Identity
from fastlaunch.core.errors import BadConfiguration, NotAuthorised
from fastlaunch.core.ownership import SCHEDULE_PREFIX

#: A resource, and the actions on it. Resources begin with `arn:PARTITION:`, or are `*`.
Permission = tuple[str, tuple[str, ...]]
#: The most quotas that a page may hold.
_PAGE = 100


@dataclass(frozen=True, kw_only=True)
class Role:
    """A role of the account."""

    arn: str
    # Services that may assume it, such as `sagemaker.amazonaws.com`.
    trusts: frozenset[str]


@dataclass(frozen=True, kw_only=True)
class Quota:
    """A quota of a service, and its value."""

    code: str
    name: str
    value: float
    # Nobody has changed it for this account.
    is_default: bool


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A schedule that has not run yet."""

    name: str
    region: str
    # With its time zone.
    created_at: datetime


class AccountCalls(AwsSession):
    def identity(self) -> Identity:
        """Return whose credentials these are; asks AWS once (sts:GetCallerIdentity)."""
        if self._identity is None:
            answer = self.call("sts", self.home_region(), "GetCallerIdentity")
            self._identity = Identity(account=answer["Account"], arn=answer["Arn"], user_id=answer["UserId"])
        return self._identity

    def role(self, region: str, arn: str) -> Role | None:
        """Return the role of this ARN, None if the account has none (iam:GetRole)."""
        name = arn.rpartition("/")[2]
        absent = ["NoSuchEntity"]
        answer = self.call_or_none("iam", region, "GetRole", absent=absent, subject=name, RoleName=name)
        # The name may belong to another account's role, or to another path.
        if answer is None or answer["Role"]["Arn"] != arn:
            return None
        services: set[str] = set()
        for statement in _as_list(answer["Role"].get("AssumeRolePolicyDocument", {}).get("Statement", ())):
            if statement.get("Effect") == "Allow" and isinstance(statement.get("Principal"), Mapping):
                services |= set(_as_list(statement["Principal"].get("Service", ())))
        return Role(arn=arn, trusts=frozenset(services))

    def profile_role(self, instance_profile: str) -> str | None:
        """Return the ARN of the profile's role; None if there is no such profile, or it holds no role."""
        name = instance_profile.rpartition("/")[2]
        answer = self.call_or_none(
            "iam",
            self.home_region(),
            "GetInstanceProfile",
            absent=["NoSuchEntity"],
            subject=name,
            InstanceProfileName=name,
        )
        roles = answer["InstanceProfile"]["Roles"] if answer else ()
        return next((str(role["Arn"]) for role in roles), None)

    def may_pass(self, role: str, service: str) -> bool:
        """Return whether you may pass the role to `service`, such as `sagemaker.amazonaws.com`.

        Raises NotAuthorised if IAM does not say.
        """
        passed_to = {
            "ContextKeyName": "iam:PassedToService",
            "ContextKeyValues": [service],
            "ContextKeyType": "string",
        }
        principal = self._principal(self.identity().arn)
        return not self._denied(principal, ["iam:PassRole"], role, context=[passed_to])

    def role_lacks(self, role: str, permissions: Sequence[Permission]) -> list[str]:
        """Return which permissions the role's policies lack. Raises NotAuthorised if IAM does not say."""
        partition = role.split(":")[1]
        return [
            f"{action} on {resource}"
            for pattern, actions in permissions
            for resource in [pattern.replace("PARTITION", partition, 1)]
            for action in self._denied(role, actions, resource)
        ]

    def _denied(
        self, principal: str, actions: Sequence[str], resource: str, *, context: Sequence[Any] = ()
    ) -> list[str]:
        """Return the actions that the principal's policies deny. Raises NotAuthorised if IAM cannot say."""
        try:
            answer = self.call(
                "iam",
                self.home_region(),
                "SimulatePrincipalPolicy",
                PolicySourceArn=principal,
                ActionNames=list(actions),
                ResourceArns=[resource],
                ContextEntries=list(context),
            )
        except BadConfiguration as error:
            # IAM knows users and roles, but not the account itself (root) or federated users.
            raise NotAuthorised(f"IAM does not say what {principal} may do: {error.message}") from None
        denied = [result for result in answer["EvaluationResults"] if result["EvalDecision"] != "allowed"]
        if unknown := sorted({key for result in denied for key in result.get("MissingContextValues", ())}):
            # A policy that demands a second factor, say, denies a simulation that has none.
            raise NotAuthorised(
                f"whether {principal} may {', '.join(actions)} on {resource} depends on {', '.join(unknown)}"
            )
        return [str(result["EvalActionName"]) for result in denied]

    def _principal(self, arn: str) -> str:
        """Return the ARN of the user or role whose policies count; for an assumed role, that of the role."""
        head, _, assumed = arn.partition(":assumed-role/")
        if not assumed:
            return arn
        name = assumed.partition("/")[0]
        try:
            # Only IAM knows the path that belongs to the ARN.
            role: str = self.call("iam", self.home_region(), "GetRole", RoleName=name)["Role"]["Arn"]
        except (NotAuthorised, BadConfiguration):
            return f"{head.replace(':sts:', ':iam:')}:role/{name}"
        return role

    # Quotas

    def quota(self, region: str, service: str, code: str) -> float | None:
        """Return the account's quota; None where AWS has none under this code."""
        return self._quota("GetServiceQuota", region, service, code)

    def default_quota(self, region: str, service: str, code: str) -> float | None:
        """Return AWS's default of a quota, which counts where `quota` is None; None if there is none."""
        return self._quota("GetAWSDefaultServiceQuota", region, service, code)

    def quotas_by_name(self, region: str, service: str) -> Mapping[str, Quota]:
        """Return every quota of a service by its name: the account's, and AWS's default for all others.

        For services whose codes nobody can know beforehand. It takes tens of pages for SageMaker: ask once.
        """
        quotas: dict[str, Quota] = {}
        for action, is_default in (("ListAWSDefaultServiceQuotas", True), ("ListServiceQuotas", False)):
            for entry in self.items(
                "servicequotas", region, action, "Quotas", ServiceCode=service, MaxResults=_PAGE
            ):
                if "Value" in entry:
                    name, value = entry["QuotaName"], float(entry["Value"])
                    code = entry["QuotaCode"]
                    quotas[name] = Quota(code=code, name=name, value=value, is_default=is_default)
        return quotas

    def _quota(self, action: str, region: str, service: str, code: str) -> float | None:
        answer = self.call_or_none(
            "servicequotas",
            region,
            action,
            absent=["NoSuchResourceException"],
            subject=f"{service} {code}",
            ServiceCode=service,
            QuotaCode=code,
        )
        value: float | None = answer["Quota"].get("Value") if answer else None
        return value

    # Schedules of EventBridge Scheduler; fastlaunch's are known by their names.

    def create_schedule(self, region: str, request: Mapping[str, Any]) -> None:
        """Send `request` as it is (scheduler:CreateSchedule).

        A schedule of that name is no error: the name holds the token of the request whose machines it ends.
        """
        assert request["Name"].startswith(SCHEDULE_PREFIX) and request["ClientToken"]
        absent = ["ConflictException"]
        self.call_or_none(
            "scheduler", region, "CreateSchedule", absent=absent, subject=request["Name"], **request
        )

    def delete_schedule(self, region: str, name: str) -> None:
        """Delete a schedule; do nothing if there is none of the name."""
        absent = ["ResourceNotFoundException"]
        self.call_or_none("scheduler", region, "DeleteSchedule", absent=absent, subject=name, Name=name)

    def list_schedules(self, region: str) -> list[Schedule]:
        """Return the region's schedules of fastlaunch, sorted by name; all pages."""
        schedules = [
            Schedule(name=entry["Name"], region=region, created_at=entry["CreationDate"])
            for entry in self.items(
                "scheduler", region, "ListSchedules", "Schedules", NamePrefix=SCHEDULE_PREFIX
            )
            # Checked again here: what is not fastlaunch's is never deleted.
            if entry["Name"].startswith(SCHEDULE_PREFIX) and entry["GroupName"] == "default"
        ]
        return sorted(schedules, key=lambda schedule: schedule.name)


def _as_list(value: Any) -> Sequence[Any]:
    """Return a list, also where a policy writes a single entry without brackets."""
    return [value] if isinstance(value, str | Mapping) else value

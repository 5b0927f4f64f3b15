"""Quotas of an account, by code or by name (Service Quotas)."""

from collections.abc import Mapping
from dataclasses import dataclass

from fastlaunch.aws.session import AwsSession

#: The most entries that one page may hold.
_PAGE = 100


@dataclass(frozen=True, kw_only=True)
class Quota:
    """A quota of a service, and its value."""

    code: str
    name: str
    value: float
    # Nobody has changed it for this account.
    is_default: bool


class QuotaCalls(AwsSession):
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
            pages = self.paginate("servicequotas", region, action, ServiceCode=service, MaxResults=_PAGE)
            for entry in (quota for page in pages for quota in page["Quotas"] if "Value" in quota):
                name, value = entry["QuotaName"], float(entry["Value"])
                quotas[name] = Quota(code=entry["QuotaCode"], name=name, value=value, is_default=is_default)
        return quotas

    def _quota(self, action: str, region: str, service: str, code: str) -> float | None:
        parameters = {"ServiceCode": service, "QuotaCode": code}
        answer = self.call_or_none(
            "servicequotas",
            region,
            action,
            absent=["NoSuchResourceException"],
            subject=f"{service} {code}",
            **parameters,
        )
        value: float | None = answer["Quota"].get("Value") if answer else None
        return value

"""EC2 quotas by purchase option and instance type, and where to ask for more."""

from dataclasses import dataclass

#: Console hosts of the other partitions, by what their regions start with.
_CONSOLES = {"us-gov-": "console.amazonaws-us-gov.com", "cn-": "console.amazonaws.cn"}


@dataclass(frozen=True, kw_only=True)
class QuotaCode:
    """A quota of the service `ec2`, counted in vCPUs."""

    code: str
    # As the Service Quotas console lists it.
    name: str


#: (purchase option, prefix of the instance type, quota); the first match counts. Codes as in public quota
#: tables and AWS's own examples, 2026-11; the code for P6 spot is not published.
_QUOTAS = (
    ("on-demand", "p", QuotaCode(code="L-417A185B", name="Running On-Demand P instances")),
    ("on-demand", "g", QuotaCode(code="L-DB2E81BA", name="Running On-Demand G and VT instances")),
    ("on-demand", "vt", QuotaCode(code="L-DB2E81BA", name="Running On-Demand G and VT instances")),
    ("on-demand", "trn", QuotaCode(code="L-2C3B7624", name="Running On-Demand Trn instances")),
    ("spot", "p5", QuotaCode(code="L-C4BD4855", name="All P5 Spot Instance Requests")),
    ("spot", "p6", None),
    ("spot", "p", QuotaCode(code="L-7212CCBC", name="All P4, P3 and P2 Spot Instance Requests")),
    ("spot", "g", QuotaCode(code="L-3819A6DF", name="All G and VT Spot Instance Requests")),
    ("spot", "vt", QuotaCode(code="L-3819A6DF", name="All G and VT Spot Instance Requests")),
    ("spot", "trn", QuotaCode(code="L-6B0D517C", name="All Trn Spot Instance Requests")),
)


def quota_code(instance_type: str, purchase: str) -> QuotaCode | None:
    """Return the quota that the type counts against; None if it is unknown, or none (reservations)."""
    for option, prefix, quota in _QUOTAS:
        if option == purchase and instance_type.startswith(prefix):
            return quota
    return None


def quota_page(region: str, code: str, *, service: str = "ec2") -> str:
    """Return the address of the console's page on which to ask for more of a quota."""
    hosts = (host for prefix, host in _CONSOLES.items() if region.startswith(prefix))
    host = next(hosts, "console.aws.amazon.com")
    return f"https://{region}.{host}/servicequotas/home/services/{service}/quotas/{code}"

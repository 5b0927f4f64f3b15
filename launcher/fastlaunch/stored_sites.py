"""Sites as plain data, for the ledger: where a submission's runs may be carried out, now and after a stop."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fastlaunch.backends.ec2_site import Site
from fastlaunch.backends.stored_code import CodeBundle
from fastlaunch.errors import UserError
from fastlaunch.hardware import InstanceType


def site_to_json(site: Site) -> dict[str, Any]:
    """Plain data that `site_from_json` turns back into an equal site."""
    return asdict(site)


def site_from_json(data: Mapping[str, Any]) -> Site:
    """The site that `site_to_json` wrote. Raises UserError where it is no such thing."""
    try:
        instance = {**data["instance"], "purchase_options": tuple(data["instance"]["purchase_options"])}
        code = data["code"]
        return Site(
            **{
                **data,
                "instance": InstanceType(**instance),
                "security_groups": tuple(data["security_groups"]),
                "code": CodeBundle(**code) if code else None,
            }
        )
    except (KeyError, TypeError) as error:
        raise UserError(f"the ledger holds no site, but {data!r}: {error}") from None

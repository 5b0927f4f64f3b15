"""Sites as plain data, for the ledger: where a submission's runs may be carried out, now and after a stop."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fastlaunch.backends.placements import CapacityBlock, Site
from fastlaunch.backends.protocol import Place
from fastlaunch.backends.sagemaker_site import TrainingSite
from fastlaunch.backends.stored_code import CodeBundle
from fastlaunch.catalog.hardware import InstanceType
from fastlaunch.core.errors import UserError


def site_to_json(site: Place) -> dict[str, Any]:
    """Plain data that `site_from_json` turns back into an equal site."""
    assert isinstance(site, Site | TrainingSite)
    return {"backend": site.backend, **asdict(site)}


def site_from_json(data: Mapping[str, Any]) -> Place:
    """The site that `site_to_json` wrote. Raises UserError where it is no such thing."""
    try:
        given = {**data}
        # The sites of older submissions are all EC2's, and do not say so.
        backend = given.pop("backend", "ec2")
        code = given["code"]
        given |= {"instance": _instance(given["instance"]), "code": CodeBundle(**code) if code else None}
        if backend == "sagemaker":
            return TrainingSite(**{**given, "others": tuple(map(_instance, given["others"]))})
        block = given.get("block")
        given |= {"block": CapacityBlock(**block) if block else None}
        return Site(**{**given, "security_groups": tuple(given["security_groups"])})
    except (KeyError, TypeError) as error:
        raise UserError(f"the ledger holds no site, but {data!r}: {error}") from None


def _instance(data: Mapping[str, Any]) -> InstanceType:
    return InstanceType(**{**data, "purchase_options": tuple(data["purchase_options"])})

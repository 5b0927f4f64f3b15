"""The AWS Price List API: what an hour costs on demand on EC2 and in SageMaker training."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastlaunch.aws.session import AwsSession
from fastlaunch.core.errors import CloudRefused

#: One of the three regions that have the API; it knows the prices of all.
_REGION = "us-east-1"
#: Filters for the plain hour of an instance. EC2's are Karpenter's: without `marketoption`,
#: types with GPUs come with the rows of their capacity blocks too.
_PRODUCTS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "ec2": (
        "AmazonEC2",
        {
            "productFamily": "Compute Instance",
            "operatingSystem": "Linux",
            "tenancy": "Shared",
            "preInstalledSw": "NA",
            "capacitystatus": "Used",
            "marketoption": "OnDemand",
        },
    ),
    "sagemaker": ("AmazonSageMaker", {"productFamily": "ML Instance", "platoinstancetype": "Training"}),
}
_DECIMAL = re.compile(r"[0-9]+(\.[0-9]+)?", re.ASCII)


@dataclass(frozen=True, kw_only=True)
class Product:
    """A product of the price list: what an hour of an instance type costs in a region."""

    sku: str
    # Without SageMaker's `ml.`.
    instance: str
    # None if the list has no single price in USD per hour for it.
    usd_per_hour: float | None


class PricingCalls(AwsSession):
    def products(self, service: str, region: str) -> list[Product]:
        """Return the price list's products for every instance type. service: `ec2` or `sagemaker`.

        A type may occur more than once. Raises CloudRefused, also for an unreadable answer.
        """
        code, fields = _PRODUCTS[service]
        filters = [
            {"Type": "TERM_MATCH", "Field": field, "Value": value}
            for field, value in {**fields, "regionCode": region}.items()
        ]
        pages = self.paginate(
            "pricing",
            _REGION,
            "GetProducts",
            subject=region,
            ServiceCode=code,
            Filters=filters,
            MaxResults=100,
        )
        products = []
        try:
            for text in (text for page in pages for text in page["PriceList"]):
                listed = json.loads(text)
                attributes = listed["product"]["attributes"]
                # A filter that the API does not know (any more) would let all through.
                if all(attributes.get(field, value) == value for field, value in fields.items()):
                    products.append(_product(listed, attributes))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CloudRefused(
                f"the price list of {service} in {region} cannot be read: {type(error).__name__}: {error}",
                "try again later",
            ) from None
        return products


def _product(listed: Any, attributes: Any) -> Product:
    # SageMaker's list has used both names.
    name = attributes.get("instanceName") or attributes["instanceType"]
    rates = {
        usd_of(dimension["pricePerUnit"]["USD"])
        for term in listed.get("terms", {}).get("OnDemand", {}).values()
        for dimension in term["priceDimensions"].values()
        if "USD" in dimension["pricePerUnit"] and dimension["unit"].lower() in ("hrs", "hours")
    }
    return Product(
        sku=listed["product"]["sku"],
        instance=name.removeprefix("ml."),
        usd_per_hour=rates.pop() if len(rates) == 1 else None,
    )


def usd_of(text: Any) -> float | None:
    """Return an amount that AWS writes as text; None unless it is a plain decimal above 0."""
    usd = float(text) if isinstance(text, str) and _DECIMAL.fullmatch(text) else 0.0
    return usd if 0 < usd < math.inf else None

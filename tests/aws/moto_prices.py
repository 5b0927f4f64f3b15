"""AWS's price lists, spot history and capacity blocks on offer, in the services' own formats."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import moto_gaps
from sent_request import SentRequest

if TYPE_CHECKING:
    from moto_server import Answer, MotoServer

#: So that a list of a few types has pages.
PAGE = 3


def product(instance: str, usd: str, *, sku: str = "", currency: str = "USD", **attributes: str) -> str:
    """An entry of the price list, as the API gives it: JSON as text. instance: `ml.` for SageMaker's."""
    sku = sku or f"SKU{abs(hash((instance, usd))) % 10**8:08}"
    of_service = (
        {"instanceName": instance, "platoinstancetype": "Training", "usagetype": f"USE1-Train:{instance}"}
        if instance.startswith("ml.")
        else {
            "instanceType": instance,
            "operatingSystem": "Linux",
            "tenancy": "Shared",
            "preInstalledSw": "NA",
            "capacitystatus": "Used",
            "marketoption": "OnDemand",
            "usagetype": f"BoxUsage:{instance}",
        }
    )
    family = "ML Instance" if instance.startswith("ml.") else "Compute Instance"
    dimension = {
        "unit": "Hrs",
        "beginRange": "0",
        "endRange": "Inf",
        "description": f"${usd} per On Demand Linux {instance} Instance Hour",
        "appliesTo": [],
        "rateCode": f"{sku}.JRTCKXETXF.6YS6EN2CT7",
        "pricePerUnit": {currency: usd},
    }
    term = {
        "sku": sku,
        "offerTermCode": "JRTCKXETXF",
        "effectiveDate": "2026-11-01T00:00:00Z",
        "termAttributes": {},
        "priceDimensions": {dimension["rateCode"]: dimension},
    }
    listed = {
        "product": {
            "productFamily": family,
            "sku": sku,
            "attributes": {"regionCode": "us-east-1", **of_service, **attributes},
        },
        "serviceCode": "AmazonSageMaker" if instance.startswith("ml.") else "AmazonEC2",
        "terms": {"OnDemand": {f"{sku}.JRTCKXETXF": term}},
        "version": "20261120000000",
        "publicationDate": "2026-11-20T00:00:00Z",
    }
    return json.dumps(listed)


@dataclass(kw_only=True)
class PriceLists:
    """What AWS charges."""

    #: Entries as `product` makes them.
    products: list[str] = field(default_factory=list)
    #: (instance type, zone, time, USD per hour)
    spot: list[tuple[str, str, str, float]] = field(default_factory=list)
    #: (instance type, zone, start, hours, fee in USD)
    blocks: list[tuple[str, str, str, int, float]] = field(default_factory=list)
    #: The same of SageMaker's training plans, with the start in seconds since 1970.
    plans: list[tuple[str, str, float, int, float]] = field(default_factory=list)
    #: Called before each answer, with the action.
    when_asked: Callable[[str], None] = lambda action: None


def get_products(server: "MotoServer", request: SentRequest) -> "Answer":
    lists, asked = server.price_lists, request.parameters
    lists.when_asked(request.action)
    wanted = {each["Field"]: each["Value"] for each in asked["Filters"]}
    matching = [text for text in lists.products if _matches(text, asked["ServiceCode"], wanted)]
    start = int(asked.get("NextToken", 0))
    more = {"NextToken": str(start + PAGE)} if len(matching) > start + PAGE else {}
    answer = {"FormatVersion": "aws_v1", "PriceList": matching[start : start + PAGE], **more}
    return 200, [("Content-Type", "application/x-amz-json-1.1")], json.dumps(answer).encode()


def _matches(text: str, service: str, wanted: dict[str, Any]) -> bool:
    try:
        listed = json.loads(text)
    except ValueError:
        return service == "AmazonEC2"
    known = {**listed["product"]["attributes"], "productFamily": listed["product"]["productFamily"]}
    return listed["serviceCode"] == service and all(known.get(key) == value for key, value in wanted.items())


def spot_history(server: "MotoServer", request: SentRequest) -> "Answer":
    lists, asked = server.price_lists, request.parameters
    lists.when_asked(request.action)
    kinds = {value for key, value in asked.items() if key.startswith("InstanceType.")}
    rows = [
        (name, zone, at, usd)
        for name, zone, at, usd in (
            *lists.spot,
            *(
                (name, zone, "2026-11-21T09:00:00.000Z", usd)
                for (region, name, zone), usd in server.spot_prices.items()
                if region == request.region
            ),
        )
        if name in (kinds or {name}) and asked.get("AvailabilityZone") in (None, zone)
    ]
    items = [
        f"<item><availabilityZone>{zone}</availabilityZone><instanceType>{name}</instanceType>"
        f"<productDescription>Linux/UNIX</productDescription><spotPrice>{usd:.6f}</spotPrice>"
        f"<timestamp>{at}</timestamp></item>"
        for name, zone, at, usd in rows
    ]
    body = f"<spotPriceHistorySet>{''.join(items)}</spotPriceHistorySet>"
    return moto_gaps.xml("DescribeSpotPriceHistory", body)


def plan_offerings(server: "MotoServer", request: SentRequest) -> "Answer":
    lists, asked = server.price_lists, request.parameters
    lists.when_asked(request.action)
    plans = [
        {
            "TrainingPlanOfferingId": f"tpo-{number}",
            "TargetResources": asked["TargetResources"],
            "DurationHours": hours,
            "UpfrontFee": f"{fee:.2f}",
            "CurrencyCode": "USD",
            "ReservedCapacityOfferings": [
                {"InstanceType": name, "InstanceCount": 1, "AvailabilityZone": zone, "StartTime": start}
            ],
        }
        for number, (name, zone, start, hours, fee) in enumerate(lists.plans)
        if name == asked["InstanceType"]
    ]
    return moto_gaps.as_json({"TrainingPlanOfferings": plans})


def block_offerings(server: "MotoServer", request: SentRequest) -> "Answer":
    lists, asked = server.price_lists, request.parameters
    lists.when_asked(request.action)
    items = [
        f"<item><capacityBlockOfferingId>cb-0a{number}</capacityBlockOfferingId><instanceType>{name}"
        f"</instanceType><availabilityZone>{zone}</availabilityZone><instanceCount>1</instanceCount>"
        f"<startDate>{start}</startDate><capacityBlockDurationHours>{hours}</capacityBlockDurationHours>"
        f"<upfrontFee>{fee:.3f}</upfrontFee><currencyCode>USD</currencyCode></item>"
        for number, (name, zone, start, hours, fee) in enumerate(lists.blocks)
        if name == asked["InstanceType"]
    ]
    body = f"<capacityBlockOfferingSet>{''.join(items)}</capacityBlockOfferingSet>"
    return moto_gaps.xml("DescribeCapacityBlockOfferings", body)

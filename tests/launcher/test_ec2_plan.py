"""The RunInstances request: golden plans, valid for botocore's own model of EC2, and what stands in them.

Golden plans hold what the bootstrap is made of instead of the script. To write them anew after a change that
is meant: python tests/launcher/test_ec2_plan.py
"""

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlencode

import botocore.session
import ec2_builders
import pytest
from botocore.serialize import create_serializer
from botocore.validate import ParamValidator
from ec2_builders import (
    IMAGE,
    LANGUAGE,
    NEEDS,
    RUN_ID,
    SCRIPTS,
    bootstrap_as_text,
    catalogue,
    job,
    plan,
    program_of,
    script_job,
    site,
)
from hypothesis import example, given
from hypothesis import strategies as st

from fastlaunch.backends.ec2.plan import Bootstrap, _decimal, interfaces_of, plan_ec2, render_user_data
from fastlaunch.backends.validate import request_problems
from fastlaunch.core.data import read as from_data
from fastlaunch.core.data import to_data
from fastlaunch.core.plan import Plan

GOLDEN = Path(__file__).parents[1] / "plans"
FP8 = "te-fp8"


SPOT = {"purchase": "spot", "checkpoint_every": 50}
BLOCK = {"purchase": "capacity-block", "reservation": ec2_builders.BLOCK.reservation}
GROUP = "fastlaunch-us-east-1a"
KEY = "arn:aws:kms:us-east-1:123456789012:key/0a1b2c3d"
SECRET = "arn:aws:secretsmanager:us-east-1:123456789012:secret:hub-x1y2z3"
TAGS = {"Owner": "ada", "cost-center": "4711"}


def nodes(instance: str, num_nodes: int = 1, *, purchase: str = "on-demand", **changes: Any) -> Plan:
    """The plan of a job on so many of them, a rank per GPU, in whatever they need for it."""
    num_gpus = num_nodes * catalogue().instance(instance).num_accelerators
    bought = {"spot": SPOT, "capacity-block": BLOCK}.get(purchase, {})
    tcp = {"allow_tcp": True} if instance == "g5.xlarge" and num_nodes > 1 else {}
    one = job(instance=instance, num_gpus=num_gpus, num_nodes=num_nodes, **bought, **tcp)
    place = ec2_builders.block_site if purchase == "capacity-block" else site
    at = place(instance, placement_group=GROUP if num_nodes > 1 else None)
    return plan(one, at=at, **changes)


def golden_plans(render: Callable[[Bootstrap], str]) -> dict[str, Plan]:
    """The plans that are kept, by the name of their file: one of each shape."""
    plan, of = partial(ec2_builders.plan, render=render), partial(nodes, render=render)
    gov = "151742754352.dkr.ecr.us-gov-west-1.amazonaws.com/mine@sha256:" + "f" * 64
    limit = {"max_price_usd": 25.5, "usd_per_hour": 25.5}
    anywhere = {"zone": None, "subnets": (), "security_groups": ()}
    block = "capacity-block"
    return {
        "ec2-g5.xlarge-on-demand": of("g5.xlarge"),
        # Its single GPU has no NVSwitch.
        "ec2-p5.4xlarge-on-demand": of("p5.4xlarge"),
        "ec2-p5.48xlarge-spot": of("p5.48xlarge", purchase="spot"),
        "ec2-p5.48xlarge-capacity-block": of("p5.48xlarge", purchase=block),
        "ec2-g5.xlarge-2-nodes-on-demand": of("g5.xlarge", 2),
        "ec2-p4d.24xlarge-2-nodes-spot": of("p4d.24xlarge", 2, purchase="spot"),
        "ec2-p5en.48xlarge-4-nodes-capacity-block": of("p5en.48xlarge", 4, purchase=block),
        "ec2-p5.48xlarge-2-nodes-on-demand": of("p5.48xlarge", 2),
        "ec2-p5en.48xlarge-2-nodes-spot": of("p5en.48xlarge", 2, purchase="spot"),
        "ec2-p6-b300.48xlarge-2-nodes-on-demand": of("p6-b300.48xlarge", 2),
        "ec2-4-runs": plan(job(), job(recipe=FP8), job(recipe=FP8), job(), max_minutes=90),
        # Runs of an experiment differ in more than their recipe, also in how many GPUs they use.
        "ec2-language": plan(
            job(num_gpus=1, **LANGUAGE), job("transformers", ("precision=fp32",), **LANGUAGE)
        ),
        "ec2-third-attempt": plan(job(**SPOT), attempt=3, max_minutes=47),
        "ec2-spot-max-price": plan(
            job(instance="p5e.48xlarge", max_price_usd=25.5, **SPOT), at=site("p5e.48xlarge", **limit)
        ),
        "ec2-any-zone": plan(
            job(instance="p6-b200.48xlarge", recipe=FP8, batch_size=None),
            at=site("p6-b200.48xlarge", **anywhere),
        ),
        # An image built here holds the code, and may lie in another region's registry than the machine.
        "ec2-built-image": plan(
            job(overrides=("optimizer_impl=fused",), data="loader", num_workers=3),
            at=site(code=None, image=gov, role="arn:aws:iam::1:instance-profile/x"),
        ),
        "ec2-script": plan(*map(script_job, SCRIPTS), at=site(**NEEDS)),
        "ec2-account-with-rules": plan(at=site(tags=TAGS, volume_kms_key=KEY, secrets={"HF_TOKEN": SECRET})),
    }


PLANS = golden_plans(bootstrap_as_text)


def written(plan: Plan) -> str:
    """The plan as it is kept: the user data as a list of lines."""
    data = to_data(plan)
    data["request"] = {**data["request"], "UserData": data["request"]["UserData"].split("\n")}
    return json.dumps(data, indent=2) + "\n"


def read(name: str) -> Plan:
    """The plan that was kept under this name."""
    data = json.loads((GOLDEN / f"{name}.json").read_text())
    data["request"]["UserData"] = "\n".join(data["request"]["UserData"])
    return from_data(Plan, data, "plan")


@pytest.mark.parametrize("name", PLANS)
def test_plan_is_the_golden_one_and_valid(name: str) -> None:
    assert read(name) == PLANS[name]
    check(PLANS[name])


def test_no_golden_plan_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("ec2-*.json")} == set(PLANS)


def test_a_plan_with_its_user_data_is_valid_too() -> None:
    real = plan(render=render_user_data)
    check(real)
    assert real.request["UserData"].startswith("#!/bin/bash\n")


def check(plan: Plan) -> None:
    """Fails unless botocore's model and EC2's rules take the plan's request."""
    operation = run_instances()
    assert plan.operation == operation.name
    report = ParamValidator().validate(plan.request, operation.input_shape)
    assert not report.has_errors(), report.generate_report()
    assert plan.request["InstanceType"] in operation.input_shape.members["InstanceType"].enum
    # What goes over the wire is what was planned: no parameter is lost between the two.
    body = create_serializer("ec2").serialize_to_request(dict(plan.request), operation)["body"]
    sent = {key: values[0] for key, values in parse_qs(urlencode(body)).items()}
    assert sent["ClientToken"] == plan.request["ClientToken"]
    assert sent["UserData"] == plan.request["UserData"]
    assert sent["BlockDeviceMapping.1.Ebs.Encrypted"] == "true"
    assert sent["TagSpecification.2.ResourceType"] == "volume"
    assert request_problems(plan) == []


@cache
def run_instances() -> Any:
    """botocore's model of the operation."""
    return botocore.session.get_session().get_service_model("ec2").operation_model("RunInstances")


def test_planning_is_pure() -> None:
    assert plan() == plan()
    assert from_data(Plan, json.loads(json.dumps(to_data(plan()))), "plan") == plan()


def test_the_machine_ends_its_own_cost() -> None:
    request = plan(max_minutes=75).request
    assert request["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert program_of(plan(max_minutes=75))["max_minutes"] == 75
    for tagged in request["TagSpecifications"]:
        tags = {tag["Key"]: tag["Value"] for tag in tagged["Tags"]}
        assert tags == {
            "Name": f"fastlaunch {RUN_ID}",
            "fastlaunch:run": RUN_ID,
            "fastlaunch:attempt": "1",
            "fastlaunch:max-minutes": "75",
            "fastlaunch:output": f"s3://acme-training/fastlaunch/runs/{RUN_ID}/attempt-1",
        }
    tagged_kinds = [tagged["ResourceType"] for tagged in request["TagSpecifications"]]
    assert tagged_kinds == ["instance", "volume", "network-interface"]
    (volume,) = request["BlockDeviceMappings"]
    assert volume["Ebs"]["DeleteOnTermination"] is True


def test_a_container_which_is_a_network_hop_away_gets_no_credentials() -> None:
    options = plan(max_minutes=75).request["MetadataOptions"]
    assert (options["HttpTokens"], options["HttpPutResponseHopLimit"]) == ("required", 1)


@given(usd=st.floats(0.001, 10_000))
@example(30.0)
@example(1e-3 + 1e-9)
@example(7.1234567)
def test_the_most_paid_for_spot_is_plain_digits_and_never_more_than_given(usd: float) -> None:
    text = _decimal(usd)
    assert re.fullmatch(r"[0-9]+(\.[0-9]*[1-9])?", text)
    assert -1e-9 <= usd - float(text) < 1.1e-6


@pytest.mark.parametrize(
    ("image", "region"),
    [
        (IMAGE, "us-east-1"),
        (IMAGE.replace("us-east-1", "eu-west-1"), "eu-west-1"),
        (IMAGE.replace("us-east-1.amazonaws.com", "cn-north-1.amazonaws.com.cn"), "cn-north-1"),
        ("localhost:5000/x@sha256:" + "0" * 64, "us-east-1"),
    ],
)
def test_the_image_says_in_which_region_its_registry_is(image: str, region: str) -> None:
    program = program_of(plan(at=site(image=image)))
    assert program["image_region"] == region
    assert program["environment"]["FASTLAUNCH_IMAGE_DIGEST"] == image.partition("@")[2]


def test_placeholders_are_those_that_the_request_holds() -> None:
    assert plan().placeholders == ()
    at = site(
        ami="<ami-id>", bucket="<bucket>", subnets=("<subnet-id>",), image="host.example/x@<image-digest>"
    )
    open_plan = plan_ec2(
        {"<run-id>": job(), "<run-id-2>": job()},
        attempt=1,
        site=at,
        max_minutes=120,
        render=bootstrap_as_text,
    )
    assert open_plan.placeholders == (
        *("ami-id", "bucket", "image-digest", "run-id", "run-id-2", "runs-sha256", "subnet-id"),
    )
    # One node stands in no group.
    assert "group" not in plan(at=replace(at, placement_group="<group>")).placeholders
    unknown = ec2_builders.block_site(block=replace(ec2_builders.BLOCK, ends_at="<block-end>"))
    assert plan(job(**BLOCK), at=unknown).placeholders == ("block-end", "runs-sha256")


def test_the_nodes_fetch_what_stands_beside_the_request() -> None:
    agent, run_list = plan(job(), job(recipe=FP8)).objects
    runs = program_of(plan(job(), job(recipe=FP8)))["runs"]
    assert [(run["run_id"], run["arguments"][3]) for run in runs] == [
        (RUN_ID, "bf16"),
        ("20261121-090313-k3f9", "te-fp8"),
    ]
    assert agent.key == f"fastlaunch/code/agent-{ec2_builders.AGENT}.pyz"
    assert run_list.key.startswith(f"fastlaunch/runs/{RUN_ID}/attempt-1/runs-")
    assert hashlib.sha256(str(run_list.text).encode()).hexdigest() in run_list.key
    real = plan(job(), job(recipe=FP8), render=render_user_data).request["UserData"]
    assert all(one.uri in real and one.sha256 in real for one in (agent, run_list))


def test_a_run_is_told_its_session_and_its_round() -> None:
    program = program_of(plan(replace(job(), session="sub-1", round=2)))
    assert program["runs"][0]["environment"] == {"FASTLAUNCH_SESSION": "sub-1", "FASTLAUNCH_ROUND": "2"}


def test_the_request_does_not_grow_with_its_runs() -> None:
    def size(number: int) -> int:
        jobs = {f"20261121-090312-{n:04d}": job() for n in range(number)}
        return len(plan_ec2(jobs, attempt=1, site=site(), max_minutes=600).request["UserData"].encode())

    assert size(1) == size(500) < 6000


def test_the_ceiling_is_of_all_nodes_and_no_more_than_the_blocks_fee() -> None:
    # Known answer: 2 x (120 + 10) min at $55.04 per hour.
    assert nodes("p5.48xlarge", 2).max_cost_usd == pytest.approx(238.5066667)
    in_block = nodes("p5.48xlarge", 2, purchase="capacity-block")
    # Known answer: $3,840 for 4 instances and 24 h are $40 per instance and hour; 2 x 130 min of it.
    assert in_block.sunk_usd == 3840.0
    assert in_block.usd_per_hour == pytest.approx(40.0)
    assert in_block.max_cost_usd == pytest.approx(173.3333333)
    # All of it cannot cost more than all of it did.
    longest = nodes("p5.48xlarge", 4, purchase="capacity-block", max_minutes=24 * 60)
    assert longest.max_cost_usd == 3840.0


def test_what_is_bought_otherwise_has_no_block() -> None:
    other = plan(at=ec2_builders.block_site())
    assert other.sunk_usd is None and "CapacityReservationSpecification" not in other.request
    assert program_of(other)["block_ends_at"] is None


def test_a_block_without_a_subnet_says_its_zone() -> None:
    one = job(**BLOCK)
    assert plan(one, at=ec2_builders.block_site(subnets=())).request["Placement"] == {
        "AvailabilityZone": "us-east-1a"
    }


def test_nvswitch_is_where_eight_large_gpus_are() -> None:
    assert {name for name, instance in catalogue().instances.items() if instance.has_nvswitch} == {
        *("p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge", "p5e.48xlarge", "p5en.48xlarge"),
        *("p6-b200.48xlarge", "p6-b300.48xlarge"),
    }


def interfaces(name: str) -> list[tuple[str, int, int]]:
    """Kind, card and device of every interface of a node of several."""
    made = interfaces_of(catalogue().instance(name), subnet="subnet-0", groups=("sg-0",))
    assert all(one["DeleteOnTermination"] for one in made)
    return [(one["InterfaceType"], one["NetworkCardIndex"], one["DeviceIndex"]) for one in made]


@pytest.mark.parametrize(
    ("name", "efa"),
    [
        ("p4d.24xlarge", [(0, 1), (1, 0), (2, 0), (3, 0)]),
        ("p5.48xlarge", [(0, 1), *((card, 0) for card in range(1, 32))]),
        # 17 cards, and the first one has no EFA.
        ("p6-b300.48xlarge", [(card, 0) for card in range(1, 17)]),
        ("g5.48xlarge", [(0, 1)]),
        ("g5.xlarge", []),
    ],
)
def test_efa_is_on_every_card_that_has_it(name: str, efa: list[tuple[int, int]]) -> None:
    assert interfaces(name) == [("interface", 0, 0), *(("efa-only", card, device) for card, device in efa)]


def test_every_type_gets_all_its_efa_and_no_place_twice() -> None:
    for name, instance in catalogue().instances.items():
        found = interfaces(name)
        assert len(set(found)) == len(found) == 1 + instance.num_efa_interfaces, name
        cards = [card for kind, card, _ in found if kind == "efa-only"]
        assert len(set(cards)) == len(cards) and all(card < instance.num_network_cards for card in cards)


def test_every_type_sold_by_the_hour_has_a_valid_plan() -> None:
    names = run_instances().input_shape.members["InstanceType"].enum
    for name, instance in catalogue().instances.items():
        assert name in names
        if "on-demand" in instance.purchase_options and not name.startswith("trn"):
            assert request_problems(nodes(name)) == []


if __name__ == "__main__":
    for stem, one in PLANS.items():
        (GOLDEN / f"{stem}.json").write_text(written(one))

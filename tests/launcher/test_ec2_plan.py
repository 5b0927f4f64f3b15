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
from ec2_builders import IMAGE, LANGUAGE, RUN_ID, bootstrap_as_text, catalogue, job, plan, program_of, site
from hypothesis import given
from hypothesis import strategies as st

from fastlaunch.backends.ec2.plan import has_nvswitch, plan_ec2, runs_uri
from fastlaunch.backends.ec2.user_data import Bootstrap, render_user_data
from fastlaunch.backends.validate import request_problems
from fastlaunch.core.errors import UserError
from fastlaunch.core.plan import Plan
from fastlaunch.jobs.spec import JobSpec

GOLDEN = Path(__file__).parents[1] / "plans"
FP8 = "te-fp8"


def of(instance: str, **changes: Any) -> JobSpec:
    """A job on one such instance, a rank per GPU."""
    return job(instance=instance, num_gpus=catalogue().instance(instance).num_accelerators, **changes)


#: One size of every family; p5's single GPU has no NVSwitch, and is a case of its own.
FAMILIES = (
    *("g5.xlarge", "g6e.12xlarge", "p4d.24xlarge", "p5.4xlarge", "p5.48xlarge"),
    *("p5en.48xlarge", "p6-b200.48xlarge"),
)
SPOT = {"purchase": "spot", "checkpoint_every": 50}
BLOCK = {"purchase": "capacity-block", "reservation": ec2_builders.BLOCK.reservation}
#: Types whose nodes train together; the last one has no EFA.
SEVERAL = ("p4d.24xlarge", "p5.48xlarge", "p5en.48xlarge", "p6-b300.48xlarge", "g5.xlarge")
GROUP = "fastlaunch-us-east-1a"


def nodes(instance: str, num_nodes: int, *, purchase: str = "on-demand", **changes: Any) -> Plan:
    """The plan of a job on so many of them, in whatever they need for it."""
    per_node = catalogue().instance(instance).num_accelerators
    bought = {"spot": SPOT, "capacity-block": BLOCK}.get(purchase, {})
    tcp = {"allow_tcp": True} if instance == "g5.xlarge" else {}
    one = job(instance=instance, num_gpus=num_nodes * per_node, num_nodes=num_nodes, **bought, **tcp)
    place = ec2_builders.block_site if purchase == "capacity-block" else site
    at = place(instance, placement_group=GROUP if num_nodes > 1 else None)
    return ec2_builders.plan(one, at=at, **{"max_minutes": 120, **changes})


def golden_plans(render: Callable[[Bootstrap], str]) -> dict[str, Plan]:
    """The plans that are kept, by the name of their file: on demand and spot for every family, and more."""
    plan = partial(ec2_builders.plan, render=render)
    gov = "151742754352.dkr.ecr.us-gov-west-1.amazonaws.com/mine@sha256:" + "f" * 64
    limit = {"max_price_usd": 25.5, "usd_per_hour": 25.5, "price_as_of": "2026-11-21"}
    anywhere = {"zone": None, "subnet": None, "security_groups": ()}
    several = [
        (name, 2, purchase) for name in SEVERAL for purchase in ("on-demand", "spot", "capacity-block")
    ]
    several += [("p5en.48xlarge", 4, purchase) for purchase in ("on-demand", "spot", "capacity-block")]
    several += [(name, 1, "capacity-block") for name in SEVERAL]
    return {
        **{
            f"ec2-{name}-{num}-nodes-{purchase}".replace("-1-nodes", ""): nodes(
                name, num, purchase=purchase, render=render
            )
            for name, num, purchase in several
            if purchase in catalogue().instance(name).purchase_options
        },
        **{f"ec2-{name}-on-demand": plan(of(name), at=site(name)) for name in FAMILIES},
        **{f"ec2-{name}-spot": plan(of(name, **SPOT), at=site(name)) for name in FAMILIES},
        "ec2-4-runs": plan(job(), job(recipe=FP8), job(recipe=FP8), job(), max_minutes=90),
        # Runs of an experiment differ in more than their recipe, also in how many GPUs they use.
        "ec2-language": plan(
            job(num_gpus=1, **LANGUAGE), job("transformers", ("precision=fp32",), **LANGUAGE)
        ),
        "ec2-third-attempt": plan(job(**SPOT), attempt=3, max_minutes=47),
        "ec2-spot-max-price": plan(
            of("p5e.48xlarge", max_price_usd=25.5, **SPOT), at=site("p5e.48xlarge", **limit)
        ),
        "ec2-any-zone": plan(
            of("p6-b200.48xlarge", recipe=FP8, batch_size=None), at=site("p6-b200.48xlarge", **anywhere)
        ),
        # An image built here holds the code, and may lie in another region's registry than the machine.
        "ec2-built-image": plan(
            job(overrides=("optimizer_impl=fused",), data="loader", num_workers=3),
            at=site(code=None, image=gov, instance_profile="arn:aws:iam::1:instance-profile/x"),
        ),
    }


PLANS = golden_plans(bootstrap_as_text)


def written(plan: Plan) -> str:
    """The plan as it is kept: the user data as a list of lines."""
    data = plan.to_json()
    data["request"] = {**data["request"], "UserData": data["request"]["UserData"].split("\n")}
    return json.dumps(data, indent=2) + "\n"


def read(name: str) -> Plan:
    """The plan that was kept under this name."""
    data = json.loads((GOLDEN / f"{name}.json").read_text())
    data["request"]["UserData"] = "\n".join(data["request"]["UserData"])
    return Plan.from_json(data)


@pytest.mark.parametrize("name", PLANS)
def test_plan_is_the_golden_one(name: str) -> None:
    assert read(name) == PLANS[name]


def test_no_golden_plan_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("ec2-*.json")} == set(PLANS)


@pytest.mark.parametrize("name", PLANS)
def test_golden_plan_is_valid_for_botocore_and_for_ec2(name: str) -> None:
    check(read(name))


def test_the_same_plans_with_their_user_data_are_valid_too() -> None:
    for name, real in golden_plans(render_user_data).items():
        check(real)
        assert real.request["UserData"].startswith("#!/bin/bash\n"), name
        assert real.request["UserData"] != PLANS[name].request["UserData"]


def check(plan: Plan) -> None:
    """Fails unless botocore's model and EC2's rules take the plan's request."""
    operation = run_instances()
    assert plan.operation == operation.name
    report = ParamValidator().validate(plan.request, operation.input_shape)
    assert not report.has_errors(), report.generate_report()
    assert plan.request["InstanceType"] in enum_of(operation.input_shape, "InstanceType")
    # What goes over the wire is what was planned: no parameter is lost between the two.
    body = serializer().serialize_to_request(dict(plan.request), operation)["body"]
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


@cache
def serializer() -> Any:
    return create_serializer("ec2")


def enum_of(shape: Any, member: str) -> list[str]:
    enum: list[str] = shape.members[member].enum
    return enum


def test_planning_is_pure() -> None:
    assert plan() == plan()
    assert Plan.from_json(json.loads(json.dumps(plan().to_json()))) == plan()


def test_the_ceiling_is_the_time_limit_and_ten_minutes() -> None:
    # Known answer: (120 + 10) min at $55.04 per hour.
    assert plan().max_cost_usd == pytest.approx(119.2533333)
    assert plan(max_minutes=50).max_cost_usd == pytest.approx(55.04)
    assert (plan().usd_per_hour, plan().price_as_of, plan().region) == (55.04, "2026-07-20", "us-east-1")


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
    assert [tagged["ResourceType"] for tagged in request["TagSpecifications"]] == ["instance", "volume"]
    (volume,) = request["BlockDeviceMappings"]
    assert volume["Ebs"]["DeleteOnTermination"] is True


def test_the_container_gets_no_credentials() -> None:
    options = plan().request["MetadataOptions"]
    assert (options["HttpTokens"], options["HttpPutResponseHopLimit"]) == ("required", 1)


def test_an_attempt_has_a_token_and_an_output_of_its_own() -> None:
    first, third = plan(), plan(attempt=3)
    assert first.request["ClientToken"] == f"{RUN_ID}-a1"
    assert third.request["ClientToken"] == f"{RUN_ID}-a3"
    assert program_of(third)["output"].endswith(f"/runs/{RUN_ID}/attempt-3")
    assert program_of(third)["environment"]["FASTLAUNCH_ATTEMPT"] == "3"


def test_spot_asks_once_and_pays_up_to_the_on_demand_price() -> None:
    options = plan(job(purchase="spot")).request["InstanceMarketOptions"]
    assert options == {
        "MarketType": "spot",
        "SpotOptions": {"SpotInstanceType": "one-time", "InstanceInterruptionBehavior": "terminate"},
    }
    assert program_of(plan(job(purchase="spot")))["is_spot"] is True
    assert "InstanceMarketOptions" not in plan().request


@pytest.mark.parametrize(
    ("usd", "text"),
    [(25.5, "25.5"), (30.0, "30"), (0.001, "0.001"), (1e-3 + 1e-9, "0.001"), (7.1234567, "7.123456")],
)
def test_the_most_paid_for_spot_is_plain_digits(usd: float, text: str) -> None:
    market = plan(job(purchase="spot"), at=site(max_price_usd=usd)).request["InstanceMarketOptions"]
    assert market["SpotOptions"]["MaxPrice"] == text


@given(usd=st.floats(0.001, 10_000))
def test_the_most_paid_for_spot_is_never_more_than_was_said(usd: float) -> None:
    market = plan(job(purchase="spot"), at=site(max_price_usd=usd)).request["InstanceMarketOptions"]
    text = market["SpotOptions"]["MaxPrice"]
    assert re.fullmatch(r"[0-9]+(\.[0-9]+)?", text)
    assert -1e-9 <= usd - float(text) < 1.1e-6


def test_zone_and_subnet_are_ec2s_choice_where_none_is_configured() -> None:
    request = plan(at=site(zone=None, subnet=None, security_groups=())).request
    assert not {"SubnetId", "SecurityGroupIds", "NetworkInterfaces", "Placement"} & request.keys()
    assert plan(at=site(subnet=None)).request["Placement"] == {"AvailabilityZone": "us-east-1a"}
    named = plan().request
    assert (named["SubnetId"], named["SecurityGroupIds"]) == ("subnet-0a1b2c3d", ["sg-0123abcd"])


def test_the_runs_share_one_machine_in_order() -> None:
    program = program_of(plan(job(), job(recipe=FP8)))
    assert [run["run_id"] for run in program["runs"]] == [RUN_ID, "20261121-090313-k3f9"]
    assert [run["arguments"][3] for run in program["runs"]] == ["bf16", "te-fp8"]
    assert program["environment"]["FASTLAUNCH_NPROC"] == "8"


def test_the_image_says_in_which_region_its_registry_is() -> None:
    assert program_of(plan())["image_region"] == "us-east-1"
    elsewhere = IMAGE.replace("us-east-1", "eu-west-1")
    assert program_of(plan(at=site(image=elsewhere)))["image_region"] == "eu-west-1"
    china = IMAGE.replace("us-east-1.amazonaws.com", "cn-north-1.amazonaws.com.cn")
    assert program_of(plan(at=site(image=china)))["image_region"] == "cn-north-1"
    assert (
        program_of(plan(at=site(image="localhost:5000/x@sha256:" + "0" * 64)))["image_region"] == "us-east-1"
    )
    assert program_of(plan())["environment"]["FASTLAUNCH_IMAGE_DIGEST"] == IMAGE.partition("@")[2]


def test_code_comes_from_the_bucket_or_with_the_image() -> None:
    program = program_of(plan())
    assert (program["code_uri"], program["code_sha256"]) == (
        "s3://acme-training/fastlaunch/code/c0de.tar.gz",
        "c0de",
    )
    assert program["environment"]["FASTLAUNCH_COMMIT"] == "ab" * 20
    built = program_of(plan(at=site(code=None)))
    assert (built["code_uri"], built["code_sha256"]) == (None, None)
    assert "FASTLAUNCH_COMMIT" not in built["environment"]


def test_without_a_prefix_the_runs_lie_at_the_top_of_the_bucket() -> None:
    assert runs_uri(site(prefix="")) == "s3://acme-training/runs"
    assert runs_uri(site(prefix="a/b")) == "s3://acme-training/a/b/runs"


def test_placeholders_are_those_that_the_request_holds() -> None:
    assert plan().placeholders == ()
    at = site(ami="<ami-id>", bucket="<bucket>", subnet="<subnet-id>", image="host.example/x@<image-digest>")
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
    assert plan(at=replace(at, placement_group="<group>")).placeholders == (
        *("ami-id", "bucket", "image-digest", "runs-sha256", "subnet-id"),
    )


def test_the_nodes_fetch_what_stands_beside_the_request() -> None:
    agent, run_list = plan(job(), job(recipe=FP8)).objects
    assert agent.key == f"fastlaunch/code/agent-{ec2_builders.AGENT}.pyz"
    assert run_list.key.startswith(f"fastlaunch/runs/{RUN_ID}/attempt-1/runs-")
    assert hashlib.sha256(str(run_list.text).encode()).hexdigest() in run_list.key
    real = plan(job(), job(recipe=FP8), render=render_user_data).request["UserData"]
    assert all(one.uri in real and one.sha256 in real for one in (agent, run_list))


def test_the_request_does_not_grow_with_its_runs() -> None:
    def size(number: int) -> int:
        jobs = {f"20261121-090312-{n:04d}": job() for n in range(number)}
        return len(plan_ec2(jobs, attempt=1, site=site(), max_minutes=600).request["UserData"].encode())

    assert size(1) == size(500) < 6000


def test_several_nodes_are_one_request_for_exactly_so_many() -> None:
    request = nodes("p5.48xlarge", 4).request
    assert (request["MinCount"], request["MaxCount"]) == (4, 4)
    assert request["Placement"] == {"GroupName": GROUP}
    assert not {"SubnetId", "SecurityGroupIds"} & request.keys()
    for interface in request["NetworkInterfaces"]:
        assert (interface["SubnetId"], interface["Groups"]) == ("subnet-0a1b2c3d", ["sg-0123abcd"])
        assert "AssociatePublicIpAddress" not in interface
    # The container is on the host's network, and no hop away.
    assert request["MetadataOptions"]["HttpPutResponseHopLimit"] == 1


def test_several_nodes_know_how_many_they_are_and_what_to_speak() -> None:
    program = program_of(nodes("p5.48xlarge", 2))
    assert (program["num_nodes"], program["needs_efa"]) == (2, True)
    environment = program["environment"]
    assert (environment["FASTLAUNCH_NUM_NODES"], environment["FASTLAUNCH_FABRIC"]) == ("2", "efa")
    assert environment["FASTLAUNCH_NPROC"] == "8"
    slow = program_of(nodes("g5.xlarge", 2))
    assert (slow["needs_efa"], slow["environment"]["FASTLAUNCH_FABRIC"]) == (False, "any")
    alone = program_of(plan())
    assert (alone["num_nodes"], alone["needs_efa"]) == (1, False)
    assert not {"FASTLAUNCH_NUM_NODES", "FASTLAUNCH_FABRIC"} & alone["environment"].keys()


def test_the_ceiling_is_of_all_nodes() -> None:
    # Known answer: 2 x (120 + 10) min at $55.04 per hour.
    assert nodes("p5.48xlarge", 2).max_cost_usd == pytest.approx(238.5066667)


def test_a_capacity_block_is_named_and_costs_what_was_paid() -> None:
    in_block = nodes("p5.48xlarge", 2, purchase="capacity-block")
    request = in_block.request
    assert request["InstanceMarketOptions"] == {"MarketType": "capacity-block"}
    assert request["CapacityReservationSpecification"] == {
        "CapacityReservationTarget": {"CapacityReservationId": "cr-0a1b2c3d4e5f60718"}
    }
    assert "Placement" not in request
    assert program_of(in_block)["block_ends_at"] == "2026-11-22T11:30:00+00:00"
    # Known answer: $3,840 for 4 instances and 24 h are $40 per instance and hour; 2 x 130 min of it.
    assert in_block.sunk_usd == 3840.0
    assert in_block.usd_per_hour == pytest.approx(40.0)
    assert in_block.max_cost_usd == pytest.approx(173.3333333)
    assert Plan.from_json(json.loads(json.dumps(in_block.to_json()))) == in_block
    # All of it cannot cost more than all of it did.
    longest = nodes("p5.48xlarge", 4, purchase="capacity-block", max_minutes=24 * 60)
    assert longest.max_cost_usd == 3840.0


def test_what_is_bought_otherwise_has_no_block() -> None:
    other = plan(at=ec2_builders.block_site())
    assert other.sunk_usd is None and "CapacityReservationSpecification" not in other.request
    assert program_of(other)["block_ends_at"] is None


def test_a_block_without_a_subnet_says_its_zone() -> None:
    one = job(**BLOCK)
    assert plan(one, at=ec2_builders.block_site(subnet=None)).request["Placement"] == {
        "AvailabilityZone": "us-east-1a"
    }


def test_what_is_not_known_of_a_block_is_a_placeholder() -> None:
    unknown = replace(ec2_builders.BLOCK, ends_at="<block-end>")
    assert plan(job(**BLOCK), at=ec2_builders.block_site(block=unknown)).placeholders == (
        *("block-end", "runs-sha256"),
    )


TWO = {"num_nodes": 2, "num_gpus": 16}


@pytest.mark.parametrize(
    ("changes", "place", "told"),
    [
        (BLOCK, {}, "no capacity block is named"),
        (
            {**BLOCK, "num_nodes": 5, "num_gpus": 40},
            {"block": ec2_builders.BLOCK},
            "holds 4 p5.48xlarge, and 5",
        ),
        (TWO, {"subnet": None}, "has no subnet of its own"),
        (TWO, {"security_groups": ()}, "has no security group of its own"),
        ({**TWO, "instance": "g5.xlarge"}, {}, "g5.xlarge has no EFA for 2 nodes"),
    ],
)
def test_what_would_start_in_vain_is_refused(
    changes: dict[str, Any], place: dict[str, Any], told: str
) -> None:
    with pytest.raises(UserError, match=re.escape(told)):
        plan(job(**changes), at=site(changes.get("instance", "p5.48xlarge"), **place))


def test_nvswitch_is_where_eight_large_gpus_are() -> None:
    assert {name for name, instance in catalogue().instances.items() if has_nvswitch(instance)} == {
        *("p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge", "p5e.48xlarge", "p5en.48xlarge"),
        *("p6-b200.48xlarge", "p6-b300.48xlarge"),
    }


def test_every_instance_type_sold_by_the_hour_has_a_valid_plan() -> None:
    names = enum_of(run_instances().input_shape, "InstanceType")
    for name, instance in catalogue().instances.items():
        assert name in names
        if "on-demand" not in instance.purchase_options or name.startswith("trn"):
            continue
        assert request_problems(plan(of(name), at=site(name))) == []


if __name__ == "__main__":
    for stem, one in PLANS.items():
        (GOLDEN / f"{stem}.json").write_text(written(one))

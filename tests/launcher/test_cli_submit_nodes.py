"""`fastlaunch submit` for several nodes, a capacity block and SageMaker, against an AWS on loopback."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cloud_commands import configure
from fake_train.launcher import app_context
from fake_train.processes import runs
from moto_nodes import Block
from moto_schedules import Scheduler
from moto_server import MotoServer, backend

from fastlaunch.aws.client import Aws
from fastlaunch.cli.main import run
from fastlaunch.core.plan import RunState
from fastlaunch.core.settings import load_settings
from fastlaunch.ledger.ledger import open_ledger

IMAGE = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch@sha256:" + "0123456789abcdef" * 4
#: With an image that holds the code there is nothing to fetch; detached, nothing to wait for.
SUBMIT = ("submit", "--image", IMAGE, "--steps", "20", "--detach", "--yes")
#: For all tests, since making a client takes most of their time.
AWS = Aws(timeouts_s=(5, 20), attempts=1)
RESERVATION = "cr-0a1b2c3d4e5f67890"


@pytest.fixture
def account(aws_server: MotoServer, isolated: Path) -> MotoServer:
    """An account set up for several nodes of EC2 and for jobs of SageMaker, with its config file."""
    region = aws_server.set_up_region("us-east-1")
    ec2 = backend("ec2", "us-east-1")
    vpc = ec2.get_default_vpc()
    group = ec2.create_security_group("nodes", "speak to each other", vpc.id)
    itself = {"IpProtocol": "-1", "UserIdGroupPairs": [{"GroupId": group.id}]}
    for action in ("AuthorizeSecurityGroupIngress", "AuthorizeSecurityGroupEgress"):
        AWS.call("ec2", "us-east-1", action, GroupId=group.id, IpPermissions=[itself])
    (main,) = (table for table in ec2.route_tables.values() if table.vpc_id == vpc.id)
    subnets = dict(list(region.subnets.items())[:2])
    nat = ec2.create_nat_gateway(next(iter(subnets.values())), None, connectivity_type="private")
    ec2.create_route(main.id, "0.0.0.0/0", nat_gateway_id=nat.id)
    AWS.call("ec2", "us-east-1", "CreatePlacementGroup", GroupName="close", Strategy="cluster")
    aws_server.quotas["us-east-1", "L-417A185B"] = 384
    aws_server.quotas["us-east-1", "ml.p5.48xlarge for training job usage"] = 2
    configure(
        isolated,
        region,
        security_groups=[group.id],
        placement_groups=dict.fromkeys(subnets, "close"),
        role=aws_server.training_jobs.role(),
    )
    return aws_server


def fastlaunch(*argv: str) -> int:
    """Exit code of the command in this process."""
    return run(list(argv), replace(app_context(*argv), connect=lambda: AWS))


def interfaces(parameters: dict[str, Any]) -> list[str]:
    """Types of a request's network interfaces, by card."""
    numbers = range(1, 1 + sum(name.endswith(".NetworkCardIndex") for name in parameters))
    return [parameters[f"NetworkInterface.{number}.InterfaceType"] for number in numbers]


def test_two_nodes_are_one_request_in_their_placement_group(
    account: MotoServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fastlaunch(*SUBMIT, "--instance", "p5.48xlarge", "--num-nodes", "2") == 0
    err = " ".join(capsys.readouterr().err.split())
    (sent,) = account.sent("RunInstances")
    assert (sent.parameters["MinCount"], sent.parameters["MaxCount"]) == ("2", "2")
    assert sent.parameters["Placement.GroupName"] == "close"
    # One that has an address, one for EFA beside it, and 31 other cards.
    assert interfaces(sent.parameters) == ["interface", *["efa-only"] * 32]
    assert len(account.instances("pending", "running")) == 2
    (job,) = runs()
    assert (job.state, job.backend) == (RunState.RUNNING, "ec2")
    assert job.spec is not None and (job.spec["num_nodes"], job.spec["num_gpus"]) == (2, 16)
    # Known answer: 2 x (2 h + 10 min) at $55.04.
    assert "on 2 x p5.48xlarge (8 x H100 each) in us-east-1a, on-demand." in err
    assert "at most $238.71 of instance time and volumes: 2 x (2 h + 10 min) x ($55.04 + $0.046)/h" in err
    # How old all prices are depends on the day.
    assert err.count("warning: at most $55.04/h, as of") == 1 and "fastlaunch prices update" in err


def block(account: MotoServer, **changes: Any) -> None:
    """Two p5.48xlarge in us-east-1b, until tomorrow."""
    now = datetime.now(UTC)
    account.blocks[RESERVATION] = replace(
        Block(
            id=RESERVATION,
            region="us-east-1",
            zone="us-east-1b",
            instance_type="p5.48xlarge",
            num_instances=2,
            starts_at=now - timedelta(hours=4),
            ends_at=now + timedelta(hours=20),
        ),
        **changes,
    )


IN_BLOCK = (
    *("--instance", "p5.48xlarge", "--num-nodes", "2", "--purchase", "capacity-block"),
    *("--reservation", RESERVATION, "--block-fee", "1887.84"),
)


def test_a_block_is_used_and_none_is_bought(account: MotoServer, capsys: pytest.CaptureFixture[str]) -> None:
    block(account)
    account.quotas.clear()
    assert fastlaunch(*SUBMIT, *IN_BLOCK) == 0
    err = " ".join(capsys.readouterr().err.split())
    (sent,) = account.sent("RunInstances")
    target = "CapacityReservationSpecification.CapacityReservationTarget.CapacityReservationId"
    assert sent.parameters["InstanceMarketOptions.MarketType"] == "capacity-block"
    assert sent.parameters[target] == RESERVATION
    assert "Placement.GroupName" not in sent.parameters
    assert f"in us-east-1b, capacity block {RESERVATION}." in err
    # Known answer: $39.33 for each of 48 instance hours.
    assert "effectively at most $170.43: 2 x (2 h + 10 min) x $39.33/h" in err
    assert "fee of $1,887.84, which is spent already (2 for 24 h)" in err
    assert not any("Purchase" in one.action for one in account.sent())
    with open_ledger(load_settings()) as ledger:
        (attempt,) = ledger.attempts_of(runs()[0].id)
        plan = ledger.plan_of(attempt.id)
    assert (
        plan is not None
        and plan.sunk_usd == 1887.84
        and plan.max_cost_usd == pytest.approx(170.43 + 2 * 130 / 60 * 31 / 672)
    )


def sent_twice(account: MotoServer) -> tuple[dict[str, Any], ...]:
    """Parameters of the start's two requests."""
    return tuple(dict(sent.parameters) for sent in account.sent("RunInstances"))


def test_a_block_that_is_to_come_is_started_by_its_schedule(
    account: MotoServer, capsys: pytest.CaptureFixture[str]
) -> None:
    begins = (datetime.now(UTC) + timedelta(days=2)).replace(second=0, microsecond=0)
    block(account, state="scheduled", starts_at=begins, ends_at=begins + timedelta(days=1))
    assert fastlaunch(*SUBMIT, *IN_BLOCK) == 0
    err = " ".join(capsys.readouterr().err.split())
    assert f"{RESERVATION} begins at {begins:%Y-%m-%d %H:%M} UTC: a schedule in the account starts it" in err
    assert account.sent("RunInstances") == [] and "Nothing has to run here" in err
    (job,) = runs()
    with open_ledger(load_settings()) as ledger:
        (attempt,) = ledger.attempts_of(job.id)
        plan = ledger.plan_of(attempt.id)
    assert plan is not None and job.state is RunState.PLANNED
    assert fastlaunch("status", job.id) == 0
    shown = capsys.readouterr().out
    assert f"a schedule starts it at {begins:%Y-%m-%d %H:%M} UTC" in shown and "planned" in shown
    assert fastlaunch("reap", "--yes") == 0
    assert "it starts its attempt later" in capsys.readouterr().out
    scheduler = Scheduler(server=account, regions=["us-east-1"])
    scheduler.carry_out(begins - timedelta(minutes=1))
    assert account.sent("RunInstances") == []
    block(account, starts_at=begins, ends_at=begins + timedelta(days=1))
    scheduler.carry_out(begins + timedelta(minutes=10))
    # The second of the two requests, which are the plan's, starts nothing.
    assert len(account.instances("pending", "running")) == 2 and scheduler.names() == {}
    first, second = sent_twice(account)
    AWS.run_instances("us-east-1", plan.request)
    assert first == second == account.sent("RunInstances")[-1].parameters


def test_without_a_block_what_aws_sells_is_shown_with_what_it_would_leave_unused(
    account: MotoServer, capsys: pytest.CaptureFixture[str]
) -> None:
    lists = account.price_lists
    lists.blocks = [
        ("p5.48xlarge", "us-east-1b", "2026-11-25T11:30:00.000Z", 24, usd) for usd in (900.0, 720.0)
    ]
    lists.plans = [("ml.p5.48xlarge", "us-east-1c", 1_764_000_000.0, 24, 960.0)]
    here = ("--purchase", "capacity-block", "--instance")
    assert fastlaunch(*SUBMIT, *here, "p5.48xlarge") == 2
    err = capsys.readouterr().err
    assert "no capacity block is named" in err and "fastlaunch does not buy" in err
    first, second = (line.strip() for line in err.splitlines() if "purchase-capacity-block" in line)
    assert first == (
        "aws ec2 purchase-capacity-block --region us-east-1 --capacity-block-offering-id cb-0a1 "
        "--instance-platform Linux/UNIX"
    )
    assert "cb-0a0" in second and "$720.00 in us-east-1b from 2026-11-25 11:30 UTC: " in err
    # Twenty steps take minutes, by the published figures.
    assert "this training would probably not use 23.9 h of it, $71" in err
    assert fastlaunch(*SUBMIT, *here, "ml.p5.48xlarge") == 2
    err = capsys.readouterr().err
    assert "aws sagemaker create-training-plan --region us-east-1" in err and "tpo-0" in err
    assert not any("Purchase" in one.action or "CreateTrainingPlan" in one.action for one in account.sent())


def test_the_budget_is_held_against_what_the_block_costs_effectively(
    account: MotoServer, capsys: pytest.CaptureFixture[str]
) -> None:
    block(account)
    assert fastlaunch(*SUBMIT, *IN_BLOCK, "--max-cost", "170") != 0
    assert "of $170.00" in capsys.readouterr().err
    assert account.sent("RunInstances") == []
    assert fastlaunch(*SUBMIT, *IN_BLOCK, "--max-cost", "171") == 0


def test_a_training_job_is_one_request(account: MotoServer, capsys: pytest.CaptureFixture[str]) -> None:
    argv = (*SUBMIT, "--instance", "ml.p5.48xlarge", "--num-nodes", "2")
    account.quotas["us-east-1", "ml.p5.48xlarge for training job usage"] = 2
    assert fastlaunch(*argv) == 0
    err = " ".join(capsys.readouterr().err.split())
    (job,) = account.training_jobs.live()
    assert job.request["ResourceConfig"]["InstanceCount"] == 2
    (stored,) = runs()
    assert (stored.backend, stored.state, stored.instance) == ("sagemaker", RunState.RUNNING, "p5.48xlarge")
    assert job.name == f"{stored.id}-a1"
    # Known answer: 2 x (120 + 10) min at $63.296.
    assert "at most $274.28 of SageMaker instance time: 2 x (2 h + 10 min)" in err
    # Nothing of EC2's was asked for, and nothing started there.
    asked = {sent.action for sent in account.sent() if sent.service == "ec2"}
    assert {name for name in asked if name.startswith(("Describe", "Run"))} == {"DescribeRegions"}

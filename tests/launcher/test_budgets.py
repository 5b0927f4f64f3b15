"""Budgets of a day and a month: what takes of them, and what does not start for want of room."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Barrier, Thread
from typing import Any

import pytest
import yaml
from attempt_builders import attempt_with
from cloud_commands import cloud, configure
from cloud_world import World, opened_world
from moto_server import MotoServer
from test_cli_reap import start
from test_cloud_resume import interrupted, type_in
from test_cloud_spot import spot, taken_once
from test_sweep import carry_out, part

from fastlaunch.core.errors import UserError
from fastlaunch.core.plan import RunState
from fastlaunch.core.settings import Budgets, load_settings
from fastlaunch.jobs.options import Options
from fastlaunch.ledger.attempt_cost import usd_since
from fastlaunch.ledger.rows import Attempt
from fastlaunch.lifecycle.budgets import BudgetUse, budget_uses

#: (2 h + 10 min) at $55.04.
CEILING_USD = 119.25
#: The next midnight is in 15 h.
MIDNIGHT = datetime(2026, 11, 22, tzinfo=UTC)


def uses(world: World) -> dict[str, BudgetUse]:
    return {use.name: use for use in budget_uses(world.ledger, world.settings, world.clock.now())}


def test_what_is_under_way_takes_its_ceiling_and_the_next_does_not_start(world: World) -> None:
    world.budgets = Budgets(day=2 * CEILING_USD - 1, month=10_000)
    world.aws.node = lambda node: None
    world.submit(detach=True)
    with pytest.raises(UserError) as caught:
        world.submit(detach=True)
    assert f"this may cost ${CEILING_USD}, and `budgets.day` has ${CEILING_USD - 1} left" in str(caught.value)
    assert f"${CEILING_USD} for what is under way" in str(caught.value)
    assert "2026-11-22 00:00 UTC" in (caught.value.hint or "")
    assert len(world.aws.requests) == 1
    states = [(run.state, len(world.ledger.attempts_of(run.id))) for run in world.ledger.select()]
    assert states == [(RunState.RUNNING, 1), (RunState.CANCELLED, 0)]


def test_what_has_ended_takes_what_it_was_billed(world: World) -> None:
    world.budgets = Budgets(day=1.5 * CEILING_USD, owner_month=400)
    (run,) = world.submit()
    billed_s = world.attempt(run).billing.billed_s
    assert billed_s
    taken = uses(world)
    assert {use.open_usd for use in taken.values()} == {0.0}
    assert (
        taken["day"].billed_usd == taken["owner_month"].billed_usd == pytest.approx(billed_s * 55.04 / 3600)
    )
    (second,) = world.submit()
    assert second.state is RunState.COMPLETED
    # The day is over, and the month is not.
    world.clock.moment = MIDNIGHT + timedelta(hours=1)
    taken = uses(world)
    assert taken["day"].taken_usd == 0.0 and taken["owner_month"].taken_usd > 0.0
    world.clock.moment = datetime(2026, 12, 1, tzinfo=UTC)
    assert uses(world)["owner_month"].taken_usd == 0.0


def test_what_was_billed_counts_though_its_run_was_removed(world: World) -> None:
    world.budgets = Budgets(day=1.5 * CEILING_USD)
    (run,) = world.submit()
    billed_usd = uses(world)["day"].billed_usd
    world.ledger.remove([run.id])
    assert world.ledger.select() == [] and uses(world)["day"].billed_usd == billed_usd > 0
    world.reconcile()
    # Next month nothing of it is left.
    world.clock.moment = datetime(2027, 1, 1, tzinfo=UTC)
    world.ledger.remove([])
    assert world.ledger.attempts_since(MIDNIGHT - timedelta(days=30)) == []


def test_what_has_no_end_yet_is_not_removed(world: World) -> None:
    world.aws.node = lambda node: None
    (run,) = world.submit(detach=True)
    world.ledger.set_state(run.id, RunState.FAILED)
    with pytest.raises(UserError, match="may not have ended yet"):
        world.ledger.remove([run.id])
    assert world.ledger.get(run.id).state is RunState.FAILED


def lived(**changes: Any) -> Attempt:
    """An attempt that took four hours at $10, half of them before midnight."""
    usual = {
        "launched_at": (MIDNIGHT - timedelta(hours=2)).isoformat(),
        "max_cost_usd": 100.0,
        "usd_per_hour": 10.0,
    }
    return attempt_with(**{**usual, **changes})


ENDED = {
    "ended_at": (MIDNIGHT + timedelta(hours=2)).isoformat(),
    "lived_s": 14400.0,
    "billed_s": 14400.0,
    "source": "times",
}


@pytest.mark.parametrize(
    ("attempt", "since", "usd"),
    [
        (lived(**ENDED), MIDNIGHT - timedelta(days=1), 40.0),
        (lived(**ENDED), MIDNIGHT, 20.0),
        (lived(**ENDED), MIDNIGHT + timedelta(days=1), 0.0),
        (lived(**{**ENDED, "lived_s": None, "billed_s": None}), MIDNIGHT, 0.0),
        # As long as it may go on, all that is left of its ceiling.
        (lived(), MIDNIGHT - timedelta(days=1), 100.0),
        (lived(), MIDNIGHT, 80.0),
        # It is over its ceiling.
        (lived(max_cost_usd=30.0), MIDNIGHT - timedelta(days=1), 50.0),
        # It waits for its machines, or their price is not known.
        (lived(launched_at=None, handle=None), MIDNIGHT, 100.0),
        (lived(usd_per_hour=None), MIDNIGHT, 100.0),
        (lived(**{**ENDED, "usd_per_hour": None}), MIDNIGHT, 100.0),
    ],
)
def test_known_answers(attempt: Attempt, since: datetime, usd: float) -> None:
    assert usd_since(attempt, since, MIDNIGHT + timedelta(hours=3)) == pytest.approx(usd)


def test_another_machine_in_place_of_one_that_was_taken_needs_room(world: World) -> None:
    # Meanwhile another command of the same ledger starts something.
    world.aws.node = taken_once(world, after_s=90 * 60, then=lambda: world.add(sent=False))
    world.budgets = Budgets(day=150)
    with pytest.raises(UserError, match=r"this may cost \$36\.69, and `budgets\.day` has \$5\.25 left"):
        world.submit(jobs=(spot(),))
    run, _ = world.ledger.select()
    assert (run.state, len(world.aws.requests)) == (RunState.INTERRUPTED, 1)
    assert "budgets.day" in (run.reason or "")


def test_a_run_is_resumed_only_within_the_budgets(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    run = interrupted(world)
    world.budgets = Budgets(owner_day=60)
    assert type_in(world, "resume", run.id, "--yes") == 2
    assert "`budgets.owner_day` has $" in capsys.readouterr().err
    assert world.ledger.get(run.id).state is RunState.INTERRUPTED and len(world.aws.requests) == 1


def test_a_sweep_leaves_out_what_has_no_room(world: World) -> None:
    world.budgets = Budgets(day=100)
    parts = [part("p5.48xlarge", "bf16"), part("g5.xlarge", "bf16", options=Options(repeats=1))]
    done = carry_out(world, *parts, id=world.ledger.add_sweep({}, world.home))
    assert list(done.left_out) == ["p5.48xlarge"]
    assert "`budgets.day` has $100.00 left" in done.left_out["p5.48xlarge"].message
    assert [request["InstanceType"] for _, request in world.aws.requests] == ["g5.xlarge"]


@pytest.mark.parametrize("_", range(5))
def test_of_two_launchers_at_once_one_finds_no_room(tmp_path: Path, _: int) -> None:
    barrier, errors = Barrier(2), list[UserError]()

    def submit() -> None:
        with opened_world(tmp_path, budgets=Budgets(day=1.5 * CEILING_USD)) as world:
            world.aws.node = lambda node: None
            barrier.wait()
            try:
                world.submit(detach=True)
            except UserError as error:
                errors.append(error)

    with opened_world(tmp_path):
        threads = [Thread(target=submit) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(errors) == 1 and "`budgets.day` has $59.62 left" in errors[0].message


# On an AWS with tags

IMAGE = "763104351884.dkr.ecr.us-east-1.amazonaws.com/pytorch@sha256:" + "0123456789abcdef" * 4
SUBMIT = ("submit", "--instance", "g5.xlarge", "--image", IMAGE, "--detach", "--steps", "20", "--yes")


def set_budgets(isolated: Path, **usd: float) -> None:
    path = isolated.parent / "config.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "budgets": usd}))


@pytest.fixture
def region(aws_server: MotoServer, isolated: Path) -> MotoServer:
    aws_server.quotas["us-east-1", "L-DB2E81BA"] = 768
    configure(isolated, aws_server.set_up_region("us-east-1"))
    return aws_server


def test_machines_of_other_ledgers_count_at_the_list_price(
    region: MotoServer, isolated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # 70 minutes at $55.04.
    start(tags={"Owner": "ben"}, server=region)
    # It is nobody's: it lacks a tag.
    start("20261121-090001-abcd", tags={"fastlaunch:max-minutes": "x"}, server=region)
    set_budgets(isolated, month=65)
    assert cloud(*SUBMIT) == 2
    err = capsys.readouterr().err
    assert "`budgets.month` has $0.79 left" in err and "at most $64.21 for machines of other ledgers" in err
    assert region.sent("RunInstances")[2:] == []
    # Another owner's machines take nothing of the owner's.
    set_budgets(isolated, owner_month=65)
    assert cloud(*SUBMIT) == 0
    set_budgets(isolated, month=70)
    # What this ledger started is not counted twice.
    assert cloud(*SUBMIT) == 0


def test_an_owner_is_one_whatever_the_case_of_the_tag(
    region: MotoServer, isolated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start(tags={"owner": "ben"}, server=region)
    set_budgets(isolated, owner_day=65)
    path = isolated.parent / "config.yaml"
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "tags": {"OWNER": "ben"}}))
    assert cloud(*SUBMIT) == 2
    assert "at most $64.21 for machines of other ledgers" in capsys.readouterr().err


def test_a_region_that_may_not_be_looked_at_is_named(
    region: MotoServer, isolated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_budgets(isolated, day=65)
    region.refuse("ListTrainingJobs", "AccessDeniedException", times=None)
    assert cloud(*SUBMIT) == 0
    assert "machines of other ledgers in us-east-1 count in no budget" in capsys.readouterr().err


def test_a_dry_run_tells_what_is_taken_and_asks_nothing(
    region: MotoServer, isolated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_budgets(isolated, day=100, owner_month=1.5)
    assert cloud(*SUBMIT[:-1], "--dry-run") == 0
    err = capsys.readouterr().err
    assert "budgets.day: $0.00 of $100.00 are taken since" in err
    assert "and `budgets.owner_month` has $1.50 left" in err
    assert region.sent() == [] and not load_settings().home.exists()
    assert cloud(*SUBMIT) == 2
    assert region.sent() == []


def test_status_and_doctor_show_what_is_taken(
    region: MotoServer, isolated: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    set_budgets(isolated, day=20, owner_month=1.51)
    assert cloud(*SUBMIT) == 2
    set_budgets(isolated, day=20, owner_month=3)
    assert cloud(*SUBMIT) == 0
    start(tags={"Owner": "ben"}, server=region)
    capsys.readouterr()
    assert cloud("status") == 0
    assert "budgets.day: $2.28 of $20.00 are taken since" in capsys.readouterr().out
    assert cloud("status", "--output", "json") == 0
    day, month = json.loads(capsys.readouterr().out)["budgets"]
    assert (day["name"], day["open_usd"], day["others_usd"]) == ("day", pytest.approx(2.28, abs=0.01), None)
    assert (month["name"], month["billed_usd"]) == ("owner_month", 0.0)
    cloud("doctor", "--output", "json")
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)["checks"]}
    assert checks["budgets.day"]["result"] == "warning"
    assert "at most $64.21 for machines of other ledgers" in checks["budgets.day"]["message"]
    assert checks["budgets.owner_month"]["result"] == "ok"

"""A sweep on the AWS in memory: its parts, its budget, and what becomes of it when its launcher is killed."""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cloud_world import World, job, opened_world
from ec2_builders import site
from fake_cloud import FakeAws
from test_rounds import recorded, settled_after

from fastlaunch.core.errors import NoCapacity, UserError
from fastlaunch.core.plan import RunState
from fastlaunch.jobs.build import interleaved
from fastlaunch.jobs.options import SubmitOptions
from fastlaunch.jobs.spec import JobSpec
from fastlaunch.ledger.db import LedgerFile
from fastlaunch.ledger.ids import BATCH_SEARCH
from fastlaunch.ledger.ledger import LEDGER_NAME, Run
from fastlaunch.runs.launcher import Submission
from fastlaunch.runs.rounds import Verdicts
from fastlaunch.runs.sweep import OverBudget, Part, Sweep, saved, states, sweep_runs

P4D, P5 = "p4d.24xlarge", "p5.48xlarge"
MOST = 6


class Killed(BaseException):
    """SIGKILL: nothing that the launcher does after it has any effect."""


class Death:
    """Counts what the launcher does to the ledger and asks of AWS; from `at` on nothing gets through."""

    def __init__(self) -> None:
        self.num_done, self.at = 0, 0

    def step(self) -> None:
        self.num_done += 1
        if self.at and self.num_done >= self.at:
            raise Killed


class MortalFile(LedgerFile):
    """A ledger's file that a dead launcher cannot change."""

    def __init__(self, path: Path, death: Death) -> None:
        self.death = death
        super().__init__(path)

    def transaction(self) -> AbstractContextManager[None]:
        self.death.step()
        return super().transaction()


class MortalAws(FakeAws):
    """An AWS that a dead launcher cannot reach."""

    death: Death | None = None

    def _called(self, method: str) -> None:
        if self.death:
            self.death.step()
        super()._called(method)


def specs(*recipes: str, instance: str, options: SubmitOptions, **changes: Any) -> tuple[JobSpec, ...]:
    return interleaved([job(recipe, instance=instance, **changes) for recipe in recipes], options)


def part(
    name: str,
    *recipes: str,
    ceiling_usd: float = 0.0,
    options: SubmitOptions | None = None,
    verdicts: Verdicts | None = None,
) -> Part:
    """Two rounds of the recipes, unless the options say otherwise."""

    def submission(batch_size: int | None) -> Submission:
        changes = {"batch_size": batch_size} if batch_size else {}
        made = specs(*recipes, instance=name, options=options or SubmitOptions(repeats=2), **changes)
        at = site(name, zone="us-east-1a", subnet="subnet-a")
        return Submission(
            jobs_at=lambda _: made, placements=(at,), max_minutes=120, account_timer=False, verdicts=verdicts
        )

    return Part(name=name, ceiling_usd=ceiling_usd, submission=submission)


def carry_out(world: World, *parts: Part, id: str, max_cost_usd: float | None = None) -> Sweep:
    sweep = Sweep(
        id=id, launcher=world.launcher(), command="fastlaunch sweep", parts=parts, max_cost_usd=max_cost_usd
    )
    sweep.carry_out()
    return sweep


def new_sweep(world: World) -> str:
    world.aws.node = lambda node: node.train(how=lambda run_id: recorded(world, run_id))
    return world.ledger.add_sweep(["sweep"], world.home)


def cells(world: World, id: str) -> list[tuple[str, str, int, RunState]]:
    """Part, recipe, round and state of each run."""
    return [
        (name, run.recipe, (run.spec or {})["round"], run.state)
        for name, runs in sweep_runs(world.ledger, id).items()
        for run in runs
    ]


def test_each_type_is_one_machine_in_rounds(world: World) -> None:
    id = new_sweep(world)
    done = carry_out(world, part(P4D, "bf16"), part(P5, "bf16", "te-fp8"), id=id)
    assert cells(world, id) == [
        *((P4D, "bf16", number, RunState.COMPLETED) for number in (1, 2)),
        *((P5, recipe, 1, RunState.COMPLETED) for recipe in ("bf16", "te-fp8")),
        *((P5, recipe, 2, RunState.COMPLETED) for recipe in ("te-fp8", "bf16")),
    ]
    assert [one.instance_type for one in world.aws.instances.values()] == [P4D, P5]
    assert done.left_out == {}
    selected = world.ledger.select([f"sweep={id}"])
    assert len(selected) == 6 and world.ledger.select(["sweep=sweep-0*"]) == []
    # Carried out again, it does nothing more.
    carry_out(world, part(P4D, "bf16"), part(P5, "bf16", "te-fp8"), id=id)
    assert len(world.aws.requests) == 2 and len(world.ledger.select()) == 6


def test_money_that_was_not_used_starts_the_next_type_and_what_does_not_fit_is_left_out(world: World) -> None:
    id = new_sweep(world)
    parts = [part(P4D, "bf16", ceiling_usd=60), part(P5, "bf16", ceiling_usd=95)]
    dear = part("p5en.48xlarge", "bf16", ceiling_usd=99.9)
    done = carry_out(world, *parts, dear, id=id, max_cost_usd=100)
    # 60 + 95 is above 100, but minutes of p4d cost a few dollars.
    assert [name for name, *_ in cells(world, id)] == [P4D, P4D, P5, P5]
    assert list(done.left_out) == [dear.name] and isinstance(done.left_out[dear.name], OverBudget)
    assert done.left_usd is not None and 80 < done.left_usd < 99.9


def test_a_type_without_capacity_keeps_none_of_the_budget_and_is_tried_again(world: World) -> None:
    id = new_sweep(world)
    world.aws.answers = [NoCapacity("none here")]
    parts = [part(P4D, "bf16", ceiling_usd=60), part(P5, "bf16", ceiling_usd=95)]
    done = carry_out(world, *parts, id=id, max_cost_usd=100)
    assert isinstance(done.left_out[P4D], NoCapacity)
    assert [state for name, _, _, state in cells(world, id) if name == P5] == [RunState.COMPLETED] * 2
    done = carry_out(world, *parts, id=id, max_cost_usd=100)
    assert done.left_out == {} and {state for *_, state in cells(world, id)} == {RunState.COMPLETED}


def test_the_batch_size_is_searched_for_first_and_every_type_gets_it(world: World) -> None:
    id = new_sweep(world)

    def search(_: int | None) -> Submission:
        return replace(
            part(P4D, "bf16", options=SubmitOptions()).submission(None),
            jobs_at=lambda at: (job("bf16", instance=P4D, batch_size=None),),
        )

    # Its record says what it found; that of every other run what it was asked for.
    def how(run_id: str) -> dict[str, Any]:
        batch_size = (world.ledger.get(run_id).spec or {})["batch_size"]
        return recorded(world, run_id) | {"batch_size": batch_size or 48}

    world.aws.node = lambda node: node.train(how=how)
    carry_out(world, Part(name=BATCH_SEARCH, submission=search), part(P5, "bf16"), id=id)
    assert [(run.spec or {})["batch_size"] for run in world.ledger.select()] == [None, 48, 48]
    assert [(run.spec or {})["batch_size"] for run in world.ledger.select([f"sweep={id}"])] == [48, 48]
    failed = world.ledger.add_sweep(["sweep"], world.home)
    world.aws.answers = [NoCapacity("none here")]
    with pytest.raises(UserError, match="no batch size was found: none here"):
        carry_out(world, Part(name=BATCH_SEARCH, submission=search), part(P5, "bf16"), id=failed)


def planned(verdicts: Callable[[Sequence[Run]], Mapping[str, str]]) -> Part:
    options = SubmitOptions(until_resolved=True, max_rounds=MOST)
    return part(P5, "bf16", "te-fp8", options=options, verdicts=verdicts)


def test_what_stopping_early_saved_is_told_by_the_measured_times(world: World) -> None:
    id = new_sweep(world)
    carry_out(world, planned(settled_after({"te-fp8": 3})), id=id)
    runs = sweep_runs(world.ledger, id)[P5]
    assert states(runs)["completed"] >= 6
    early = saved(world.ledger, runs)
    assert 4 <= early.num_runs <= 6 and early.machine_s is not None and early.usd is not None
    # Known answer: p5.48xlarge costs $55.04 an hour.
    assert early.usd == pytest.approx(early.machine_s / 3600 * 55.04)


def test_a_sweep_that_goes_on_looks_on(tmp_path: Path) -> None:
    with opened_world(tmp_path, MortalAws) as world:
        id, death = new_sweep(world), mortal(world)
        follow = planned(settled_after({"te-fp8": 3}))
        # It follows its machine by then.
        death.at = 40
        with pytest.raises(Killed):
            carry_out(world, follow, id=id)
        death.at = 0
        carry_out(world, follow, id=id)
        made = [recipe for _, recipe, _, state in cells(world, id) if state is RunState.COMPLETED]
        assert {recipe: made.count(recipe) for recipe in made} == {"bf16": 3, "te-fp8": 3}
        assert len(world.aws.instances) == 1


def mortal(world: World) -> Death:
    death = Death()
    world.ledger._file.close()
    world.ledger._file = MortalFile(world.home / LEDGER_NAME, death)
    world.aws.death = death
    return death


def sweep_of_two(world: World, id: str) -> None:
    carry_out(world, part(P4D, "bf16"), part(P5, "bf16", "te-fp8"), id=id)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[tuple[str, str, int, RunState]]]:
    """How many steps the sweep takes, and its cells."""
    with opened_world(tmp_path_factory.mktemp("undisturbed"), MortalAws) as world:
        id, death = new_sweep(world), mortal(world)
        sweep_of_two(world, id)
        return death.num_done, cells(world, id)


@pytest.mark.parametrize(
    "seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 40))]
)
def test_a_sweep_killed_at_any_moment_ends_with_the_same_cells_and_runs(
    tmp_path: Path, undisturbed: tuple[int, list[tuple[str, str, int, RunState]]], seed: int
) -> None:
    num_steps, expected = undisturbed
    rng = random.Random(seed)
    with opened_world(tmp_path, MortalAws) as world:
        id, death = new_sweep(world), mortal(world)
        # The moments of a launcher that is only waiting are many, and alike.
        death.at = rng.choice((rng.randint(1, 60), rng.randint(1, num_steps - 1)))
        first = death.at
        with pytest.raises(Killed):
            sweep_of_two(world, id)
        for _ in range(20):
            death.num_done, death.at = 0, rng.choice((0, rng.randint(1, num_steps)))
            # What it left goes on, or ends, meanwhile.
            world.clock.sleep(rng.choice((0, 90, 1800)))
            try:
                sweep_of_two(world, id)
                break
            except Killed:
                continue
        told = f"killed first at step {first} of {num_steps}"
        assert cells(world, id) == expected, told
        assert [one.instance_type for one in world.aws.instances.values()] == [P4D, P5], told
        assert world.aws.live() == [], told

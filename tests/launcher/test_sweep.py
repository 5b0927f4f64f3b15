"""A sweep on the AWS in memory: its parts, its budget, and what becomes of it when its launcher is killed."""

import itertools
import random
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import date, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from cloud_world import World, job, opened_world
from ec2_builders import catalogue, site
from fake_cloud import Clock, FakeAws, FakeNode
from test_rounds import settled_after

from fastlaunch.analysis.compare import compare
from fastlaunch.analysis.pricing import PriceRequest
from fastlaunch.backends.ec2.ec2 import Ec2Backend
from fastlaunch.core.errors import NoCapacity, UserError
from fastlaunch.core.plan import RunState
from fastlaunch.jobs.build import interleaved
from fastlaunch.jobs.job import Job, Script
from fastlaunch.jobs.options import Options
from fastlaunch.jobs.scripts import script_spec
from fastlaunch.ledger.db import LedgerFile
from fastlaunch.ledger.ids import BATCH_SEARCH
from fastlaunch.ledger.ledger import LEDGER_NAME, Ledger, Run
from fastlaunch.lifecycle.evidence import measured_run
from fastlaunch.lifecycle.launcher import Launcher, Submission
from fastlaunch.lifecycle.rounds import Verdicts
from fastlaunch.lifecycle.sweep import OverBudget, Sweep, saved, states, sweep_runs, under_way
from fastlaunch.lifecycle.sweep_plan import Cell, Part, PlannedPart, SweepPlan
from fastlaunch.lifecycle.until_best import UntilBest, best_rows, until_best
from fastlaunch.lifecycle.world import StopRequest
from fastlaunch.lifecycle.world import World as RealWorld

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


class SharedClock(Clock):
    """A clock of several threads, of which one runs at a time: who sleeps makes way for who wakes first."""

    def __init__(self) -> None:
        super().__init__()
        self._turn = threading.Condition()
        self._order = itertools.count()
        self._wakes: dict[threading.Thread, tuple[datetime, int]] = {}
        self._foreign = set(threading.enumerate()) - {threading.current_thread()}

    def sleep(self, seconds: float) -> None:
        me = threading.current_thread()
        with self._turn:
            wake = self._wakes[me] = (self.moment + timedelta(seconds=seconds), next(self._order))
            self._turn.notify_all()
            # One that ends makes way, too, and does not say so.
            while not self._is_first(wake):
                self._turn.wait(0.005)
            del self._wakes[me]
        super().sleep(max(0.0, (wake[0] - self.moment).total_seconds()))

    def _is_first(self, wake: tuple[datetime, int]) -> bool:
        alive = set(threading.enumerate()) - self._foreign
        return alive <= self._wakes.keys() and wake == min(self._wakes.values())


def specs(*recipes: str, instance: str, options: Options, **changes: Any) -> tuple[Job, ...]:
    return interleaved([job(recipe, instance=instance, **changes) for recipe in recipes], options)


def part(
    name: str,
    *recipes: str,
    ceiling_usd: float = 0.0,
    options: Options | None = None,
    verdicts: Verdicts | None = None,
) -> Part:
    """Two rounds of the recipes, unless the options say otherwise."""

    def submission(batch_size: int | None) -> Submission:
        changes = {"batch_size": batch_size} if batch_size else {}
        made = specs(*recipes, instance=name, options=options or Options(repeats=2), **changes)
        at = site(name, zone="us-east-1a", subnets=("subnet-a",))
        return Submission(
            jobs_at=lambda _: made, placements=(at,), options=Options(account_timer=False), verdicts=verdicts
        )

    return Part(name=name, ceiling_usd=ceiling_usd, submission=submission)


def carry_out(
    world: World,
    *parts: Part,
    id: str,
    max_cost_usd: float | None = None,
    num_parallel: int = 1,
    until_best: UntilBest | None = None,
) -> Sweep:
    @contextmanager
    def open_beside(name: str) -> Iterator[Launcher]:
        world.clock.sleep(0)
        with Ledger(world.ledger.path, clock=world.clock.now) as ledger:
            if isinstance(world.ledger._file, MortalFile):
                ledger._file.close()
                ledger._file = MortalFile(ledger.path, world.ledger._file.death)
            launcher = replace(world, ledger=ledger).launcher()
            sleep = world.stop.sleeping(world.clock.sleep)
            ec2 = Ec2Backend(aws=world.aws, home=world.home, sleep=sleep, now=world.clock.now)
            yield replace(launcher, backends={"ec2": ec2})

    sweep = Sweep(
        id=id,
        launcher=replace(world.launcher(), sleep=world.clock.sleep),
        command="fastlaunch sweep",
        parts=parts,
        max_cost_usd=max_cost_usd,
        num_parallel=num_parallel,
        open_beside=open_beside if num_parallel > 1 else None,
        until_best=until_best,
        monotonic_s=lambda: world.clock.now().timestamp(),
    )
    sweep.carry_out()
    return sweep


def new_sweep(world: World) -> str:
    world.aws.node = lambda node: node.train(how=replayed(world))
    return world.ledger.add_sweep({}, world.home)


def replayed(world: World) -> Callable[[str], dict[str, Any]]:
    """What the records of a run say: what its job asked for, and the same times whenever it is made."""

    def how(run_id: str) -> dict[str, Any]:
        # Machines act in the thread of whoever sleeps.
        with Ledger(world.ledger.path) as ledger:
            spec = ledger.get(run_id).spec or {}
        label, script = spec["recipe"]["label"], spec.get("script")
        time_s = random.Random(f"{spec['instance']} {label} {spec['round']}").uniform(0.1, 0.11)
        record = {"instance": spec["instance"], "step_time_s": time_s, "header": {"round": spec["round"]}}
        if script is None:
            return {**record, "recipe": label, "seed": spec["seed"]}
        workload = {"name": "train.py", "sample_unit": "samples", "flops_per_sample": None}
        workload["num_parameters"] = None
        record["header"] |= {"script": script, "recipe": spec["recipe"], "seed": None, "workload": workload}
        return record

    return how


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


def test_a_sweep_says_which_type_it_is_at_and_its_pace(world: World) -> None:
    id = new_sweep(world)
    carry_out(world, part(P4D, "bf16"), part(P5, "bf16"), id=id)
    began, then = [line for line in world.reports if " of 2" in line]
    assert began == f"{P4D}: 1 of 2"
    # The first one took 280 s.
    assert then == f"{P5}: 2 of 2, about 4.67 min left at this pace"
    world.reports.clear()
    carry_out(world, part(P4D, "bf16"), part(P5, "bf16"), id=id)
    assert world.reports[-2:] == [f"{P4D}: 1 of 2", f"{P5}: 2 of 2"]


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


def test_types_run_at_the_same_time_as_far_as_the_budget_holds_them(tmp_path: Path) -> None:
    with opened_world(tmp_path, clock=SharedClock()) as world:
        id = new_sweep(world)
        parts = [*map(script_part, (P4D, P5, "p5en.48xlarge")), part("p5e.48xlarge", ceiling_usd=300)]
        done = carry_out(world, *parts, id=id, max_cost_usd=230, num_parallel=3)
        started = [one.launch_time for one in world.aws.instances.values()]
        ends = [world.ledger.attempts_of(run.id)[-1].ended_at or "" for run in world.ledger.select()]
        assert started[1] < datetime.fromisoformat(min(ends)) <= started[2]
        assert list(done.left_out) == ["p5e.48xlarge"]
        assert [*sweep_runs(world.ledger, id)] == [each.name for each in parts[:3]]


@pytest.mark.parametrize("num_signals", [1, 2])
def test_ctrl_c_stops_all_types(tmp_path: Path, num_signals: int) -> None:
    with opened_world(tmp_path, clock=SharedClock()) as world:
        id, parts = new_sweep(world), [*map(script_part, (P4D, P5, "p5en.48xlarge"))]
        train = world.aws.node

        def interrupt() -> None:
            for _ in range(num_signals):
                with suppress(KeyboardInterrupt):
                    world.stop._note(signal.SIGINT, None)

        def stopping(node: FakeNode) -> None:
            node.train(upto=1, how=replayed(world))
            if node.instance_id == "i-0002":
                world.clock.at(130, interrupt)

        world.aws.node = stopping
        with pytest.raises(KeyboardInterrupt) if num_signals > 1 else nullcontext():
            carry_out(world, *parts, id=id, num_parallel=2)
        assert len(world.aws.instances) == 2 and world.aws.live() == []
        world.stop, world.aws.node = StopRequest(), train
        carry_out(world, *parts, id=id, num_parallel=2)
        assert {state for *_, state in cells(world, id)} == {RunState.COMPLETED}


def test_a_type_that_is_tried_again_waits_for_one_that_was_left_under_way(tmp_path: Path) -> None:
    with opened_world(tmp_path, MortalAws) as world:
        id, death = new_sweep(world), mortal(world)
        world.aws.answers = [NoCapacity("none here")]
        parts = [part(P4D, "bf16", ceiling_usd=60), part(P5, "bf16", ceiling_usd=95)]
        train = world.aws.node

        def dying(node: FakeNode) -> None:
            train(node)
            world.clock.at(100, lambda: setattr(death, "at", 1))

        world.aws.node = dying
        with pytest.raises(Killed):
            carry_out(world, *parts, id=id, max_cost_usd=100)
        death.at, world.aws.node = 0, train
        carry_out(world, *parts, id=id, max_cost_usd=100)
        p5, p4d = world.aws.instances.values()
        ended = world.ledger.attempts_of(sweep_runs(world.ledger, id)[P5][0].id)[-1].ended_at or ""
        assert (p5.instance_type, p4d.instance_type) == (P5, P4D)
        assert datetime.fromisoformat(ended) <= p4d.launch_time


def test_the_batch_size_is_searched_for_first_and_every_type_gets_it(world: World) -> None:
    id = new_sweep(world)

    def search(_: int | None) -> Submission:
        return replace(
            part(P4D, "bf16", options=Options()).submission(None),
            jobs_at=lambda at: (job("bf16", instance=P4D, batch_size=None),),
        )

    # Its record says what it found; that of every other run what it was asked for.
    def how(run_id: str) -> dict[str, Any]:
        batch_size = (world.ledger.get(run_id).spec or {})["batch_size"]
        return {"batch_size": batch_size or 48}

    world.aws.node = lambda node: node.train(how=how)

    def next_part(runs: Sequence[Run], names: Sequence[str]) -> str:
        assert names == [P5]
        return names[0]

    for_best = UntilBest(elimination=lambda runs: {}, next_part=next_part)
    search_part = Part(name=BATCH_SEARCH, submission=search)
    carry_out(world, search_part, part(P5, "bf16"), id=id, until_best=for_best)
    assert [(run.spec or {})["batch_size"] for run in world.ledger.select()] == [None, 48, 48]
    assert [(run.spec or {})["batch_size"] for run in world.ledger.select([f"sweep={id}"])] == [48, 48]
    failed = world.ledger.add_sweep({}, world.home)
    world.aws.answers = [NoCapacity("none here")]
    with pytest.raises(UserError, match="no batch size was found: none here"):
        carry_out(world, Part(name=BATCH_SEARCH, submission=search), part(P5, "bf16"), id=failed)


def planned(verdicts: Callable[[Sequence[Run]], Mapping[str, str]]) -> Part:
    options = Options(until_resolved=True, max_rounds=MOST)
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


MATRIX = {P5: ("bf16", "te-fp8"), P4D: ("bf16", "compile")}
ROUNDS = Options(until_resolved=True, max_rounds=4, until_best=True)


def plan_of_matrix() -> SweepPlan:
    parts = {
        name: PlannedPart(
            cells=tuple(Cell(instance=name, label=recipe, batch_size=None) for recipe in recipes),
            options=ROUNDS,
        )
        for name, recipes in MATRIX.items()
    }
    return SweepPlan(parts=parts, is_until_best=True)


def context_of(world: World) -> RealWorld:
    return RealWorld(settings=world.settings, backends={})


def sweep_until_best(world: World, id: str) -> None:
    decides = until_best(plan_of_matrix(), context_of(world))
    parts = [part(name, *recipes, options=ROUNDS) for name, recipes in MATRIX.items()]
    carry_out(world, *parts, id=id, until_best=decides)


def check_best(world: World, id: str) -> list[tuple[str, str, int, RunState]]:
    """Every run was made or is not needed, and the best is on p4d: p5 costs 2.5 times as much an hour."""
    runs = [run for of in sweep_runs(world.ledger, id).values() for run in of]
    assert len(runs) == 4 * 4
    assert all(run.state is RunState.COMPLETED or run.is_unneeded for run in runs)
    ((best, *_),) = best_rows(runs, plan_of_matrix(), context_of(world))
    assert best.setup.instance == P4D
    return [each for each in cells(world, id) if each[-1] is RunState.COMPLETED]


def test_a_sweep_for_the_best_cell_starts_the_cheapest_type_and_leaves_the_others_soon(world: World) -> None:
    id = new_sweep(world)
    sweep_until_best(world, id)
    made = check_best(world, id)
    assert [one.instance_type for one in world.aws.instances.values()] == [P4D, P5]
    assert 1 <= sum(name == P5 for name, *_ in made) <= 3


def test_a_type_that_cannot_have_the_best_cell_gets_no_machine(world: World) -> None:
    id = new_sweep(world)
    best = UntilBest(
        elimination=lambda runs: {
            run.id: "predicted not to be the best" for run in runs if run.instance == P5
        },
        next_part=lambda runs, names: names[0],
    )
    carry_out(world, part(P5, "bf16", "te-fp8"), part(P4D, "bf16"), id=id, until_best=best)
    assert [one.instance_type for one in world.aws.instances.values()] == [P4D]
    assert all(run.is_unneeded for run in sweep_runs(world.ledger, id)[P5])


def test_a_choice_that_fails_leaves_nothing_out(world: World) -> None:
    def fail(*given: object) -> Any:
        raise OverflowError

    id = new_sweep(world)
    best = UntilBest(elimination=fail, next_part=fail)
    carry_out(world, part(P4D, "bf16"), part(P5, "bf16"), id=id, until_best=best)
    assert [state for *_, state in cells(world, id)] == 4 * [RunState.COMPLETED]
    assert [one.instance_type for one in world.aws.instances.values()] == [P4D, P5]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 20))])
def test_a_sweep_for_the_best_cell_that_is_killed_at_any_moment_ends_with_it(
    tmp_path: Path, seed: int
) -> None:
    rng = random.Random(seed)
    with opened_world(tmp_path, MortalAws) as world:
        id, death = new_sweep(world), mortal(world)
        for _ in range(5):
            death.num_done, death.at = 0, rng.randint(1, 100)
            try:
                sweep_until_best(world, id)
                break
            except Killed:
                world.clock.sleep(rng.choice((0, 90, 1800)))
        death.at = 0
        sweep_until_best(world, id)
        check_best(world, id)
        assert world.aws.live() == []
        assert sorted({one.instance_type for one in world.aws.instances.values()}) == [P4D, P5]


def mortal(world: World) -> Death:
    death = Death()
    world.ledger._file.close()
    world.ledger._file = MortalFile(world.home / LEDGER_NAME, death)
    world.aws.death = death
    return death


def script_part(name: str) -> Part:
    """Two rounds of two variants of a script."""
    scripts = [Script(command=("python", "train.py", "{amp}"), variant=(("amp", amp),)) for amp in ("1", "2")]
    made = interleaved(
        [script_spec(script, backend="ec2", instance=name) for script in scripts], Options(repeats=2)
    )
    at = site(name, zone="us-east-1a", subnets=("subnet-a",))
    submission = Submission(jobs_at=lambda _: made, placements=(at,), options=Options(account_timer=False))
    return Part(name=name, ceiling_usd=100.0, submission=lambda _: submission)


def sweep_of_types(world: World, id: str, num_parallel: int) -> None:
    """Of recipes one after another; of a script two at a time, of which the budget holds no third."""
    if num_parallel == 1:
        carry_out(world, part(P4D, "bf16"), part(P5, "bf16", "te-fp8"), id=id)
        return
    parts = map(script_part, (P4D, P5, "p5en.48xlarge"))
    carry_out(world, *parts, id=id, max_cost_usd=230.0, num_parallel=num_parallel)


def table(world: World, id: str) -> list[tuple[object, ...]]:
    """The rows of the comparison of all cells, with their figures."""
    runs = [run for of in sweep_runs(world.ledger, id).values() for run in of]
    measured = [each for run in runs if (each := measured_run(run, "us-east-1"))]
    comparison = compare(measured, catalogue=catalogue(), prices=PriceRequest(today=date(2026, 11, 21)))
    return [(row.setup, row.speed, row.cost, row.verdict, row.num_runs) for row in comparison.rows]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[int, Any, Any]]:
    """How many steps the sweep takes, its cells and its table, by how many types it follows at a time."""

    @cache
    def of(num_parallel: int) -> tuple[int, Any, Any]:
        with opened_world(tmp_path_factory.mktemp("undisturbed"), MortalAws, SharedClock()) as world:
            id, death = new_sweep(world), mortal(world)
            sweep_of_types(world, id, num_parallel)
            return death.num_done, cells(world, id), table(world, id)

    return of


FAST = [(1, 0), (2, 0)]
ALL = [(num_parallel, seed) for num_parallel in (1, 2) for seed in range(40)]


@pytest.mark.parametrize(
    ("num_parallel", "seed"),
    [*FAST, *(pytest.param(*one, marks=pytest.mark.full) for one in ALL if one not in FAST)],
)
def test_a_sweep_killed_at_any_moment_ends_with_the_same_cells_runs_and_table(
    tmp_path: Path, undisturbed: Callable[[int], tuple[int, Any, Any]], num_parallel: int, seed: int
) -> None:
    num_steps, expected, expected_table = undisturbed(num_parallel)
    rng = random.Random(seed)
    with opened_world(tmp_path, MortalAws, SharedClock()) as world:
        id, death = new_sweep(world), mortal(world)
        # The moments of a launcher that is only waiting are many, and alike.
        death.at = rng.choice((rng.randint(1, 60 * num_parallel), rng.randint(1, num_steps - 1)))
        first = death.at
        with pytest.raises(Killed):
            sweep_of_types(world, id, num_parallel)
        for _ in range(20):
            death.num_done, death.at = 0, rng.choice((0, rng.randint(1, num_steps)))
            # What it left goes on, or ends, meanwhile.
            world.clock.sleep(rng.choice((0, 90, 1800)))
            try:
                sweep_of_types(world, id, num_parallel)
                break
            except Killed:
                continue
        death.at = 0
        told = f"killed first at step {first} of {num_steps}"
        assert sorted(cells(world, id)) == sorted(expected), told
        types = [one.instance_type for one in world.aws.instances.values()]
        assert sorted(types) == sorted({name for name, *_ in expected}), told
        assert world.aws.live() == [], told
        assert sorted(table(world, id), key=repr) == sorted(expected_table, key=repr), told


def test_a_sweep_typed_again_while_the_last_one_has_runs_is_told(world: World) -> None:
    given = {"instances": ("p5.48xlarge",), "max_cost_usd": 300.0}
    assert under_way(world.ledger, given) is None
    sweep_id = world.ledger.add_sweep(given, world.home)
    submission = world.ledger.add_submission("fastlaunch sweep", sweep=sweep_id, part="p5.48xlarge")
    run_id = world.ledger.new_run_id()
    columns = {"workload": "vit-tiny", "recipe": "bf16", "backend": "ec2", "plan": None, "spec": {}}
    world.ledger.add_run(submission, run_id, **columns)
    world.ledger.add_sweep(given, world.home)
    alike = under_way(world.ledger, given)
    assert alike is not None and "of which 1 run may" in alike and f"--resume {sweep_id}" in alike
    assert under_way(world.ledger, {**given, "max_cost_usd": 200.0}) is None
    world.ledger.set_state(run_id, RunState.FAILED)
    assert under_way(world.ledger, given) is None

"""The ledger: what is written is there, for good, whoever else writes and whatever happens."""

import contextlib
import datetime
import multiprocessing
import random
import resource
import shlex
import sqlite3
import stat
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path

import pytest
from fake_summaries import PLAIN, changed, price_of
from hypothesis import given
from hypothesis import strategies as st

from fastlaunch.core.errors import BadFile, UnknownName, UserError
from fastlaunch.core.plan import Plan, RunState
from fastlaunch.core.settings import Settings
from fastlaunch.ledger.db import VERSION
from fastlaunch.ledger.ledger import IMPORT, Ledger, open_ledger

NOON = datetime.datetime(2026, 11, 21, 12, 0, 5, 250_000, tzinfo=datetime.UTC)
SUMMARY = changed(PLAIN, instance="p5.48xlarge")
PRICE = price_of(98.32)
FORK = multiprocessing.get_context("fork")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.sqlite"


@pytest.fixture
def ledger(path: Path) -> Iterator[Ledger]:
    """Two runs on EC2."""
    with Ledger(path, clock=lambda: NOON) as ledger:
        submission = ledger.add_submission("fastlaunch submit")
        for run_id in ("run-a", "run-b"):
            add_run(ledger, submission, run_id, backend="ec2")
        yield ledger


def add_run(ledger: Ledger, submission: str, run_id: str, **values: object) -> str:
    usual = {"spec": {}, "plan": {}, "workload": "vit-tiny", "recipe": "bf16", "backend": "local"}
    ledger.add_run(submission, run_id, **{**usual, **values})  # type: ignore[arg-type]
    return run_id


def plan(n: int, run_id: str = "run-a") -> Plan:
    tags = [{"Key": "fastlaunch:output", "Value": f"s3://b/runs/{run_id}/attempt-{n}"}]
    request = {
        "InstanceType": "p5.48xlarge",
        "ClientToken": f"{run_id}-a{n}",
        "TagSpecifications": [{"ResourceType": "instance", "Tags": tags}],
    }
    return Plan(backend="ec2", operation="RunInstances", request=request, region="us-east-1")


def test_a_run_keeps_what_was_asked_for_and_what_became_of_it(path: Path) -> None:
    with Ledger(path, clock=lambda: NOON) as ledger:
        submission = ledger.add_submission("fastlaunch submit --local")
        add_run(
            ledger,
            submission,
            "20261121-120005-abcd",
            spec={"steps": 5},
            plan={"argv": ["python"]},
            instance="p5.48xlarge",
            price=PRICE,
            directory=Path("/runs/x"),
        )
        assert ledger.set_state("20261121-120005-abcd", RunState.RUNNING)
        ledger.set_summary("20261121-120005-abcd", SUMMARY)
        assert ledger.set_state("20261121-120005-abcd", RunState.FAILED, "out of memory")
    with Ledger(path) as ledger:
        run = ledger.get("abcd")
        assert (run.id, run.submission_id, run.backend) == ("20261121-120005-abcd", submission, "local")
        assert (run.workload, run.recipe, run.instance) == ("vit-tiny", "bf16", "p5.48xlarge")
        assert (run.state, run.reason) == (RunState.FAILED, "out of memory")
        assert (run.spec, run.plan) == ({"steps": 5}, {"argv": ["python"]})
        assert (run.price, run.summary, run.directory) == (PRICE, SUMMARY, Path("/runs/x"))
        assert run.created_at == "2026-11-21T12:00:05.250+00:00"
        states = [(event.state, event.reason) for event in ledger.history(run.id)]
        assert states == [("planned", None), ("running", None), ("failed", "out of memory")]
        assert ledger.command_of(submission) == "fastlaunch submit --local"


@pytest.mark.parametrize("final", [state for state in RunState if state.is_final])
def test_a_final_state_stands_until_the_run_is_reopened(ledger: Ledger, final: RunState) -> None:
    assert ledger.set_state("run-a", final, "first")
    for state in RunState:
        assert not ledger.set_state("run-a", state, "second")
    assert (ledger.get("run-a").state, ledger.get("run-a").reason) == (final, "first")
    assert len(ledger.history("run-a")) == 2
    can_be_reopened = final in (RunState.INTERRUPTED, RunState.FAILED, RunState.LOST)
    assert ledger.reopen("run-a", "resumed") == can_be_reopened
    assert (ledger.get("run-a").state is RunState.PLANNED) == can_be_reopened
    assert not ledger.reopen("run-a", "again")
    assert ledger.set_state("run-a", RunState.RUNNING) == can_be_reopened


def test_a_run_is_placed_anew_for_every_candidate(ledger: Ledger) -> None:
    spec = {"steps": 3, "num_gpus": 8}
    ledger.place("run-a", spec=spec, instance="p5.48xlarge", price=None)
    ledger.explain("run-a", "no answer yet")
    run = ledger.get("run-a")
    assert (run.instance, run.spec, run.reason) == ("p5.48xlarge", spec, "no answer yet")
    assert run.price is None


# Attempts


def test_an_attempt_is_numbered_above_all_of_its_runs_and_stores_its_plan_before(ledger: Ledger) -> None:
    first, token = ledger.add_attempt(["run-a", "run-b"], max_minutes=130, make_plan=plan)
    assert (token, ledger.plan_of(first)) == ("run-a-a1", plan(1))
    attempt = ledger.attempt(first)
    assert (attempt.region, attempt.instance, attempt.max_minutes) == ("us-east-1", "p5.48xlarge", 130)
    assert (attempt.output, attempt.handle) == ("s3://b/runs/run-a/attempt-1", None)
    ledger.end_attempt(first, RunState.FAILED)
    _, token = ledger.add_attempt(["run-a"], make_plan=plan)
    assert token == "run-a-a2"
    # Its files carry the attempt's number: run-a has used 2, though run-b has not.
    third, token = ledger.add_attempt(["run-b", "run-a"], make_plan=lambda n: plan(n, "run-b"))
    assert token == "run-b-a3"
    assert ledger.attempts_by_token(["run-b-a3", "no-such"])["run-b-a3"].id == third
    assert [attempt.run_ids for attempt in ledger.attempts_of("run-b")] == [
        ("run-a", "run-b"),
        ("run-b", "run-a"),
    ]


def test_what_a_machine_cost_is_stored_with_how_it_is_known(ledger: Ledger) -> None:
    attempt, _ = ledger.add_attempt(["run-a", "run-b"], region="us-east-1", max_minutes=60)
    ledger.set_handle(attempt, {"id": "i-1"})
    ledger.set_machine(attempt, zone="us-east-1a", launched_at=NOON, usd_per_hour=55.04)
    (unfinished,) = ledger.unfinished_attempts("ec2")
    assert (unfinished.state, unfinished.handle) == (
        RunState.RUNNING,
        {"id": "i-1", "run_ids": ["run-a", "run-b"]},
    )
    assert ledger.end_attempt(attempt, RunState.LOST, billed_seconds=90.5, billing="times", lived_s=91.0)
    assert not ledger.end_attempt(attempt, RunState.COMPLETED, billed_seconds=1)
    (found,) = ledger.attempts_of("run-b")
    assert (found.state, found.zone, found.region) == (RunState.LOST, "us-east-1a", "us-east-1")
    assert found.launched_at == found.ended_at == "2026-11-21T12:00:05.250+00:00"
    billing = found.billing
    assert (billing.usd_per_hour, billing.billed_s, billing.source, billing.lived_s) == (
        *(55.04, 90.5, "times", 91.0),
    )


def test_a_handle_that_comes_late_does_not_bring_an_attempt_back(ledger: Ledger) -> None:
    attempt, _ = ledger.add_attempt(["run-a"])
    ledger.end_attempt(attempt, RunState.CANCELLED, reason="fastlaunch cancel")
    ledger.set_handle(attempt, {"instance_id": "i-1"})
    ledger.explain_attempt(attempt, "something else")
    found = ledger.attempt(attempt)
    assert (found.state, found.handle) == (RunState.CANCELLED, {"instance_id": "i-1", "run_ids": ["run-a"]})
    assert found.reason == "fastlaunch cancel"
    assert ledger.unfinished_attempts("ec2") == []


def test_sites_are_kept_and_damaged_ones_named(ledger: Ledger) -> None:
    submission = ledger.last_submission()
    assert submission is not None
    ledger.set_sites(submission, [{"region": "us-east-1"}])
    assert ledger.sites_of(submission) == [{"region": "us-east-1"}]
    attempt, _ = ledger.add_attempt(["run-a"], make_plan=plan)
    ledger._file.write("UPDATE submissions SET sites = '{'")
    ledger._file.write("UPDATE attempts SET plan = '{}'")
    with pytest.raises(BadFile, match="ledger is damaged"):
        ledger.sites_of(submission)
    with pytest.raises(BadFile, match="plan of attempt run-a-a1"):
        ledger.plan_of(attempt)


def test_an_id_is_not_given_out_twice(path: Path) -> None:
    class Stuck(random.Random):
        """Says everything three times."""

        calls = 0

        def choices(self, population, weights=None, *, cum_weights=None, k=1):  # type: ignore[no-untyped-def]
            self.calls += 1
            return [population[self.calls // 3]] * k

    with Ledger(path, clock=lambda: NOON, randomness=Stuck()) as ledger:
        ids = [ledger.new_run_id() for _ in range(3)]
        assert len(set(ids)) == 3
    with Ledger(path, clock=lambda: NOON, randomness=Stuck()) as ledger:
        add_run(ledger, ledger.add_submission("x"), ids[0])
        assert ledger.new_run_id() == ids[1]
    with Ledger(path.with_name("another.sqlite"), clock=lambda: NOON, randomness=Stuck()) as ledger:
        assert len({ledger.add_submission("x") for _ in range(3)}) == 3


# Selecting


@pytest.fixture
def filled(path: Path) -> Ledger:
    ledger = Ledger(path)
    old, new = ledger.add_submission("old"), ledger.add_submission("new")
    add_run(ledger, old, "20261120-100000-aaaa", recipe="bf16", instance="p5.48xlarge")
    add_run(ledger, old, "20261120-100001-bbbb", recipe="te-fp8", instance="p4d.24xlarge")
    add_run(ledger, new, "20261121-100000-cccc", recipe="te-fp8 fp8_scaling=current", workload="vit-huge")
    ledger.set_state("20261120-100000-aaaa", RunState.COMPLETED)
    return ledger


def test_selectors(filled: Ledger) -> None:
    for selectors, found in (
        ([], "abc"),
        (["20261120-100000-aaaa"], "a"),
        (["20261121"], "c"),
        (["cccc", "aaaa"], "ac"),
        (["recipe=te-*"], "bc"),
        (["recipe=te-fp8 fp8_scaling=*"], "c"),
        (["recipe=te-*", "workload=vit-huge"], "c"),
        (["recipe=bf16", "recipe=te-fp8"], "ab"),
        (["state=planned"], "bc"),
        (["instance=p[45]*"], "ab"),
        (["instance="], "c"),
        (["backend=ec2"], ""),
        (["submission=*"], "abc"),
        (["aaaa", "workload=vit-huge"], "ac"),
        (["recipe='; DROP TABLE runs; --"], ""),
        (["recipe=te-fp8", f"recipe={'x' * 900}"], "b"),
    ):
        assert "".join(run.id[-1] for run in filled.select(selectors)) == found, selectors
        brief = filled.fetch_comparable(selectors, all_runs=True)
        assert "".join(run.id[-1] for run in brief) == found, selectors
    submission = filled.get("aaaa").submission_id
    assert "".join(run.id[-1] for run in filled.select([submission, "recipe=te-*"])) == "b"
    with pytest.raises(UserError, match="'20261120' fits 2 runs: 20261120-100000-aaaa, 20261120-100001-bbbb"):
        filled.select(["20261120"])
    for name in ("", "zzzz", "aaa", "100000-aaaa-", "%", "*", "a" * 2000, "\udcff", "\0"):
        with pytest.raises(UnknownName, match="unknown run"):
            filled.get(name)
    with pytest.raises(UnknownName, match="unknown field"):
        filled.select(["recipes=bf16"])


def test_an_exact_id_wins_over_longer_ones(ledger: Ledger) -> None:
    for run_id in ("run", "run-ab"):
        add_run(ledger, ledger.add_submission("x"), run_id)
    assert [ledger.get(name).id for name in ("run", "run-a", "ab")] == ["run", "run-a", "run-ab"]


@pytest.fixture(scope="module")
def of_one_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ledger]:
    with Ledger(tmp_path_factory.mktemp("selectors") / "ledger.sqlite") as ledger:
        add_run(ledger, ledger.add_submission("x"), "20261120-100000-aaaa")
        yield ledger


@given(
    selectors=st.lists(
        st.text() | st.builds("{}={}".format, st.sampled_from(["recipe", "state"]), st.text()), max_size=4
    )
)
def test_selectors_never_crash(of_one_run: Ledger, selectors: list[str]) -> None:
    try:
        assert len(of_one_run.select(selectors)) <= 1
    except UserError as error:
        assert error.hint


def test_comparable_runs_are_those_of_the_last_submission_that_has_any(filled: Ledger) -> None:
    filled.add_submission("a command that failed before its first run")
    assert [run.id[-1] for run in filled.fetch_comparable()] == ["c"]
    assert [run.id[-1] for run in filled.fetch_comparable(all_runs=True)] == ["a", "b", "c"]
    old = filled.get("aaaa").submission_id
    assert [run.id[-1] for run in filled.fetch_comparable(submission=old)] == ["a", "b"]
    assert filled.fetch_comparable()[0].spec is None


# Importing and removing


def test_rows_imported_again_are_the_same_runs_and_join_the_newest_import(path: Path) -> None:
    with Ledger(path) as ledger:
        first, second = ledger.add_submission("first"), ledger.add_submission("second")
        # Equal rows are one run.
        rows = [(SUMMARY, None), (SUMMARY, Path("/a.csv")), (changed(SUMMARY, recipe="te-fp8"), None)]
        ids = ledger.add_imported(rows, submission_id=first)
        assert len(set(ids)) == 2
        assert ledger.add_imported([(SUMMARY, Path("/b.csv"))], submission_id=second) == ids[:1]
        assert len(ledger.select()) == 2
        run = ledger.get(ids[0])
        assert (run.submission_id, run.directory) == (second, Path("/b.csv"))
        assert (run.backend, run.state, run.summary) == (IMPORT, RunState.COMPLETED, SUMMARY)
        assert (run.workload, run.recipe, run.instance) == ("vit-huge", "bf16", "p5.48xlarge")


def test_a_run_imported_before_its_end_is_brought_up_to_date(path: Path) -> None:
    killed = changed(SUMMARY, status="killed", ended="ended as killed", step_time_s=None)
    with Ledger(path) as ledger:
        submission = ledger.add_submission("x")
        for summary in (killed, SUMMARY, SUMMARY):
            ledger.add_imported([(summary, None)], submission_id=submission, run_ids=["run-a"])
        run = ledger.get("run-a")
        assert (run.state, run.reason, run.summary) == (RunState.COMPLETED, None, SUMMARY)
        assert [event.state for event in ledger.history("run-a")] == ["lost", "completed"]
        for status, state in (("interrupted", "interrupted"), ("nan_loss", "failed")):
            ended = changed(SUMMARY, status=status, problems=("it broke",))
            (run_id,) = ledger.add_imported([(ended, None)], submission_id=submission)
            assert (ledger.get(run_id).state, ledger.get(run_id).reason) == (state, "it broke")


def test_an_import_leaves_a_run_of_this_ledger_as_it_is(ledger: Ledger) -> None:
    before = ledger.get("run-a")
    ledger.add_imported([(SUMMARY, None)], submission_id=ledger.add_submission("x"), run_ids=["run-a"])
    assert ledger.get("run-a") == before


def test_an_import_is_all_or_nothing(path: Path) -> None:
    impossible = changed(SUMMARY, final_loss=float("nan"))
    with Ledger(path) as ledger:
        with pytest.raises(ValueError, match="not JSON compliant"):
            ledger.add_imported(
                [(SUMMARY, None), (impossible, None)],
                submission_id=ledger.add_submission("x"),
                run_ids=["a", "b"],
            )
        assert ledger.select() == []


def test_removing_takes_a_run_with_all_that_belongs_to_it(ledger: Ledger) -> None:
    attempt_id, _ = ledger.add_attempt(["run-a", "run-b"])
    ledger.set_state("run-a", RunState.COMPLETED)
    with pytest.raises(UserError, match="run run-b is planned"):
        ledger.remove(["run-a", "run-b"])
    assert len(ledger.select()) == 2
    ledger.remove(["run-a"])
    assert [run.id for run in ledger.select()] == ["run-b"]
    assert [attempt.run_ids for attempt in ledger.attempts_of("run-b")] == [("run-b",)]
    ledger.set_state("run-b", RunState.COMPLETED)
    ledger.end_attempt(attempt_id, RunState.COMPLETED)
    ledger.remove(["run-b"])
    for table in ("runs", "attempts", "attempt_runs", "run_events"):
        assert ledger._file.one(f"SELECT count(*) FROM {table}") == (0,), table


# The file


@pytest.mark.parametrize("offset", [0, 24, 4096])
def test_a_damaged_ledger_is_named(filled: Ledger, offset: int) -> None:
    filled.close()
    with filled.path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\x99" * 50_000)
    with pytest.raises(BadFile, match=r"ledger\.sqlite: the ledger is damaged"), Ledger(filled.path) as it:
        it.select()


@pytest.mark.parametrize(
    "damage",
    [
        *("state = 'no such state'", "summary = '{'", "spec = '{'", "price = '{}'"),
        "workload = CAST(x'ff' AS TEXT)",
    ],
)
def test_a_damaged_row_is_named(filled: Ledger, damage: str) -> None:
    filled._file.write(f"UPDATE runs SET {damage}")
    for read in (filled.select, filled.fetch_comparable):
        with pytest.raises(BadFile, match=r"ledger\.sqlite: the ledger is damaged: "):
            read()


@pytest.mark.parametrize(
    ("restored", "is_whole"),
    [
        ("PRAGMA user_version = 0", True),
        ("PRAGMA application_id = 0", True),
        ("PRAGMA application_id = 0; PRAGMA user_version = 0", True),
        ("DROP TABLE sweeps", False),
        ("ALTER TABLE runs DROP COLUMN owner", False),
        ("CREATE TABLE copy AS SELECT * FROM runs; DROP TABLE runs; ALTER TABLE copy RENAME TO runs", False),
    ],
)
def test_a_bad_restore_is_named_and_stays_as_it_is(filled: Ledger, restored: str, is_whole: bool) -> None:
    filled.close()
    with contextlib.closing(sqlite3.connect(filled.path)) as database:
        database.executescript(restored)
    before = filled.path.read_bytes()
    with pytest.raises(BadFile, match=r"ledger\.sqlite: the ledger is damaged") as error:
        Ledger(filled.path)
    assert filled.path.read_bytes() == before
    proposed = shlex.split(str(error.value.hint).splitlines()[0].replace("`", "'"))
    assert (proposed[0] == "sqlite3") == is_whole
    if is_whole:
        with contextlib.closing(sqlite3.connect(proposed[1])) as database:
            database.executescript(proposed[2])
        with Ledger(filled.path) as ledger:
            assert ledger.select()


def test_a_foreign_database_stays_as_it_is(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE theirs (x)")
    before = path.read_bytes()
    with pytest.raises(BadFile, match="not a fastlaunch ledger"):
        Ledger(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("version", [-1, VERSION - 1, VERSION + 1])
@pytest.mark.parametrize("is_whole", [True, False])
def test_a_ledger_of_another_version_is_refused_and_stays_as_it_is(
    filled: Ledger, version: int, is_whole: bool
) -> None:
    filled.close()
    with contextlib.closing(sqlite3.connect(filled.path)) as database:
        database.execute(f"PRAGMA user_version = {version}")
        if not is_whole:
            database.execute("ALTER TABLE runs DROP COLUMN ending")
    before = filled.path.read_bytes()
    with pytest.raises(UserError, match="another fastlaunch") as caught:
        Ledger(filled.path)
    assert not isinstance(caught.value, BadFile)
    assert "fastlaunch reap" in str(caught.value.hint) and "move it aside" in str(caught.value.hint)
    assert filled.path.read_bytes() == before


def test_half_a_character_is_stored_as_far_as_it_can_be(ledger: Ledger) -> None:
    ledger.set_state("run-a", RunState.FAILED, "loss \ud83d is \u03c0")
    assert ledger.get("run-a").reason == "loss ? is \u03c0"


def test_the_ledger_is_the_users_alone(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "data" / "home")
    with open_ledger(settings) as ledger:
        ledger.add_submission("x")
        paths = [settings.home, *settings.home.iterdir()]
        assert {path.name for path in paths[1:]} == {
            f"ledger.sqlite{suffix}" for suffix in ("", "-wal", "-shm")
        }
        assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o700, 0o600, 0o600, 0o600]
    settings.home.chmod(0o755)
    with open_ledger(settings) as ledger:
        assert ledger.add_submission("y")
        assert [stat.S_IMODE(path.stat().st_mode) for path in paths] == [0o700, 0o600, 0o600, 0o600]


def test_what_is_written_in_a_transaction_is_written_together(path: Path) -> None:
    with Ledger(path) as ledger, Ledger(path) as other:
        with ledger.transaction():
            submission = ledger.add_submission("x")
            add_run(ledger, submission, "run-a")
            # Whoever reads meanwhile neither waits nor sees half of it.
            assert other.select() == []
        assert len(other.select()) == 1
        with pytest.raises(KeyboardInterrupt), ledger.transaction():
            add_run(ledger, submission, "run-b")
            raise KeyboardInterrupt
        assert len(other.select()) == 1


def test_what_was_read_in_a_transaction_still_holds_when_it_writes(path: Path) -> None:
    with Ledger(path) as ledger:
        written = threading.Event()

        def write() -> None:
            with Ledger(path) as other:
                other.add_submission("other")
            written.set()

        with ledger.transaction():
            assert ledger.select() == []
            thread = threading.Thread(target=write)
            thread.start()
            # The other waits for its turn; had it written now, this transaction could not go on.
            assert not written.wait(0.3)
            ledger.add_submission("this")
        thread.join()
        assert written.is_set()


# Several processes


def at_once(num_processes: int, target: Callable[[Path, Barrier], None], path: Path) -> None:
    """Run `target` in so many processes, which wait for each other at the barrier."""
    barrier = FORK.Barrier(num_processes)
    processes = [FORK.Process(target=target, args=(path, barrier)) for _ in range(num_processes)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * num_processes


def write_runs(path: Path, barrier: Barrier) -> None:
    with Ledger(path) as ledger:
        barrier.wait()
        for _ in range(10):
            run_id = add_run(ledger, ledger.add_submission("x"), ledger.new_run_id())
            ledger.set_state(run_id, RunState.RUNNING)
            ledger.add_attempt(["shared"])


def test_two_launchers_do_not_disturb_each_other(path: Path) -> None:
    with Ledger(path) as ledger:
        add_run(ledger, ledger.add_submission("x"), "shared")
    at_once(2, write_runs, path)
    with Ledger(path) as ledger:
        assert len(ledger.select(["state=running"])) == 20
        assert [attempt.n for attempt in ledger.attempts_of("shared")] == list(range(1, 21))


def make_ledgers(folder: Path, barrier: Barrier) -> None:
    barrier.wait()
    for number in range(10):
        Ledger(folder / f"{number}.sqlite").close()


def test_launchers_may_make_the_ledger_at_the_same_time(tmp_path: Path) -> None:
    at_once(3, make_ledgers, tmp_path)
    for number in range(10):
        with Ledger(tmp_path / f"{number}.sqlite") as ledger:
            assert ledger.select() == []


def write_half(path: Path, is_half_way: Event) -> None:
    ledger = Ledger(path)
    submission = ledger.add_submission("x")
    add_run(ledger, submission, "whole")
    with ledger.transaction():
        for number in range(500):
            add_run(ledger, submission, f"half-{number}", spec={"x": "y" * 1000})
        is_half_way.set()
        time.sleep(60)


def test_a_launcher_killed_half_way_leaves_what_it_had_committed(path: Path) -> None:
    is_half_way = FORK.Event()
    writer = FORK.Process(target=write_half, args=(path, is_half_way))
    writer.start()
    assert is_half_way.wait(30)
    writer.kill()
    writer.join()
    with Ledger(path) as ledger:
        assert [run.id for run in ledger.select()] == ["whole"]
        ledger.add_submission("and it can be written")


def fill_disk(path: Path, answer: Connection) -> None:
    ledger = Ledger(path)
    submission = ledger.add_submission("x")
    resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))
    for number in range(1000):
        try:
            add_run(ledger, submission, f"run-{number}", spec={"x": "y" * 5000})
        except UserError as error:
            answer.send((number, error.message, error.hint))
            return


def test_a_full_disk_is_an_error_and_keeps_what_was_there(path: Path) -> None:
    receiver, sender = FORK.Pipe(duplex=False)
    writer = FORK.Process(target=fill_disk, args=(path, sender))
    writer.start()
    number, message, hint = receiver.recv()
    writer.join()
    assert f"{path} cannot be written" in message
    assert "free some space" in hint
    with Ledger(path) as ledger:
        assert len(ledger.select()) == number > 10

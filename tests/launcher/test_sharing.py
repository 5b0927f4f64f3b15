"""Runs shared through a folder of S3: what is sent and taken, and ledgers that merge without a double."""

import io
import json
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import BinaryIO

import pytest
from fake_records import write_run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastlaunch.api.comparison import measured_run
from fastlaunch.aws.errors import CloudRefused
from fastlaunch.aws.types import StoredObject
from fastlaunch.core.plan import RunState
from fastlaunch.jobs.spec import JobSpec
from fastlaunch.ledger.ledger import Ledger, Run
from fastlaunch.lifecycle import sharing
from fastlaunch.lifecycle.importer import find_runs
from fastlaunch_train.recipes.recipes import resolve_recipe

ACCOUNTS = {"ann": "111111111111", "bob": "222222222222", "cem": "333333333333"}


@dataclass
class Bucket:
    """S3 in memory, which counts the calls and may break off after some."""

    objects: dict[str, bytes] = field(default_factory=dict)
    modified: dict[str, datetime] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    fails_after: int | None = None

    def _called(self, name: str) -> None:
        if self.fails_after is not None and len(self.calls) >= self.fails_after:
            raise CloudRefused("no answer")
        self.calls.append(name)

    def list_objects(self, region: str, bucket: str, prefix: str) -> list[StoredObject]:
        return [
            StoredObject(key=key, size=len(body), modified_at=self.modified[key])
            for key, body in sorted(self.objects.items())
            if key.startswith(prefix)
        ]

    def put_object(self, region: str, bucket: str, key: str, body: bytes, *, only_new: bool = False) -> bool:
        self._called("put")
        self.objects[key] = body
        self.modified[key] = datetime(2026, 11, 24, tzinfo=UTC) + timedelta(minutes=len(self.modified))
        return True

    def download(self, region: str, bucket: str, key: str, file: BinaryIO, *, max_bytes: int) -> bool:
        self._called("get")
        file.write(self.objects.get(key, b"")[:max_bytes])
        return key in self.objects


@dataclass
class Person:
    """Somebody with a home and a ledger."""

    name: str
    home: Path
    ledger: Ledger

    def made(self, recipe: str = "bf16", *, run_id: str | None = None) -> str:
        """Return the id of a run that has ended here."""
        run_id = run_id or self.ledger.new_run_id()
        folder = self.home / "runs" / run_id
        write_run(folder, steps=40, run_id=run_id, workload="vit-tiny", recipe=recipe)
        spec = JobSpec(workload="vit-tiny", recipe=resolve_recipe(recipe), batch_size=2, steps=40, num_gpus=1)
        self.ledger.add_run(
            self.ledger.add_submission(f"fastlaunch submit --env PASSWORD=sesame --recipe {recipe}"),
            run_id,
            spec=spec.to_json(),
            plan={"request": {"argv": ["python", str(folder)]}},
            workload="vit-tiny",
            recipe=recipe,
            backend="local",
            directory=folder,
        )
        self.ledger.set_state(run_id, RunState.RUNNING)
        self.ledger.set_summary(run_id, find_runs([folder]).runs[run_id].summary)
        self.ledger.set_state(run_id, RunState.COMPLETED)
        return run_id

    def push(self, folder: sharing.SharedFolder, *, dry_run: bool = False) -> sharing.Transfer:
        own = [run for run in self.ledger.select() if run.owner is None]
        return sharing.push(
            own, folder, owner=self.name, account=lambda run: ACCOUNTS[self.name], dry_run=dry_run
        )

    def pull(self, folder: sharing.SharedFolder, *, dry_run: bool = False) -> sharing.Transfer:
        return sharing.pull(self.ledger, folder, self.home / "shared", dry_run=dry_run)

    def runs(self) -> dict[str, Run]:
        return {run.id: run for run in self.ledger.select()}


@pytest.fixture
def folder() -> sharing.SharedFolder:
    return sharing.SharedFolder(store=Bucket(), region="us-east-1", bucket="team", prefix="runs/")


@pytest.fixture
def meet(tmp_path: Path) -> Iterator[Callable[[str], Person]]:
    opened: list[Ledger] = []

    def person(name: str) -> Person:
        home = tmp_path / f"{len(opened)}-{name}"
        home.mkdir()
        opened.append(Ledger(home / "ledger.sqlite"))
        return Person(name=name, home=home, ledger=opened[-1])

    yield person
    for ledger in opened:
        ledger.close()


def bucket_of(folder: sharing.SharedFolder) -> Bucket:
    assert isinstance(folder.store, Bucket)
    return folder.store


def content(body: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(body)) as archive:
        return {
            member.name: file.read()
            for member in archive.getmembers()
            if (file := archive.extractfile(member))
        }


def packed(files: dict[str, bytes]) -> bytes:
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w:xz") as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    return body.getvalue()


def test_a_shared_run_says_whose_it_is_and_measures_the_same(
    meet: Callable[[str], Person], folder: sharing.SharedFolder
) -> None:
    ann, bob = meet("ann"), meet("bob")
    run_id = ann.made()
    assert ann.push(folder) == sharing.Transfer(new=[run_id])
    assert bob.pull(folder) == sharing.Transfer(new=[run_id])
    here, there = bob.runs()[run_id], ann.runs()[run_id]
    assert (here.owner, here.account, here.backend) == ("ann", ACCOUNTS["ann"], "import")
    assert (there.owner, there.account) == (None, None)
    assert here.summary == there.summary and here.submission_id == there.submission_id
    # Rounds are compared within the submission, as in Ann's ledger.
    measured = measured_run(here, "us-east-1")
    assert measured is not None and measured.session == there.submission_id
    # What Bob typed last counts without arguments, and not what he pulled.
    assert bob.ledger.last_submission() is None
    assert [run.id for run in bob.ledger.select(["owner=ann"])] == [run_id]
    assert bob.ledger.select(["owner=bob"]) == []


def test_what_is_private_stays(meet: Callable[[str], Person], folder: sharing.SharedFolder) -> None:
    ann = meet("ann")
    run_id = ann.made()
    ann.push(folder)
    (body,) = bucket_of(folder).objects.values()
    run_file = content(body)[f"{run_id}/run.json"].decode()
    assert "sesame" not in run_file and str(ann.home) not in run_file
    assert {"plan", "attempts", "command", "directory", "history"}.isdisjoint(json.loads(run_file))


def test_again_nothing_is_sent_and_nothing_fetched(
    meet: Callable[[str], Person], folder: sharing.SharedFolder
) -> None:
    ann, bob = meet("ann"), meet("bob")
    runs = [ann.made(), ann.made("compile")]
    assert ann.push(folder, dry_run=True).new == runs and bucket_of(folder).calls == []
    ann.push(folder)
    assert sorted(bob.pull(folder, dry_run=True).new) == sorted(runs) and bob.runs() == {}
    bob.pull(folder)
    before = list(bucket_of(folder).calls)
    assert ann.push(folder).known == runs and sorted(bob.pull(folder).known) == sorted(runs)
    assert bucket_of(folder).calls == before
    # Nor does Ann get her own back.
    assert sorted(ann.pull(folder).known) == sorted(runs) and len(ann.runs()) == 2


def test_what_was_summarised_anew_is_updated(
    meet: Callable[[str], Person], folder: sharing.SharedFolder
) -> None:
    ann, bob = meet("ann"), meet("bob")
    run_id = ann.made()
    ann.push(folder)
    bob.pull(folder)
    summary = ann.runs()[run_id].summary
    assert summary is not None
    ann.ledger.set_summary(run_id, replace(summary, startup=replace(summary.startup, boot_s=41.0)))
    assert ann.push(folder).updated == [run_id]
    assert bob.pull(folder).updated == [run_id]
    pulled = bob.runs()[run_id].summary
    assert pulled is not None and pulled.startup.boot_s == 41.0
    # The archive of the older copy is gone.
    assert len(list((bob.home / "shared").iterdir())) == 1
    assert bob.pull(folder).known == [run_id]


def test_runs_of_others_and_runs_under_way_are_not_pushed(
    meet: Callable[[str], Person], folder: sharing.SharedFolder
) -> None:
    ann, bob = meet("ann"), meet("bob")
    theirs = ann.made()
    ann.push(folder)
    bob.pull(folder)
    planned = bob.ledger.new_run_id()
    bob.ledger.add_run(
        bob.ledger.add_submission("x"), planned, spec={}, plan=None, workload="w", recipe="r", backend="local"
    )
    done = sharing.push(bob.ledger.select(), folder, owner="bob", account=lambda run: None)
    assert set(done.left_out) == {theirs, planned} and "ann" in done.left_out[theirs]
    assert len(bucket_of(folder).objects) == 1


def test_a_run_started_here_is_never_replaced(
    meet: Callable[[str], Person], folder: sharing.SharedFolder
) -> None:
    ann, bob = meet("ann"), meet("bob")
    run_id = ann.made("compile")
    bob.made("bf16", run_id=run_id)
    ann.push(folder)
    assert bob.pull(folder).known == [run_id]
    assert bob.runs()[run_id].recipe == "bf16" and bob.runs()[run_id].owner is None


@pytest.mark.parametrize("verb", ["push", "pull"])
def test_after_a_lost_network_the_rest_is_done(
    meet: Callable[[str], Person], folder: sharing.SharedFolder, verb: str
) -> None:
    ann, bob = meet("ann"), meet("bob")
    runs = [ann.made() for _ in range(3)]
    bucket = bucket_of(folder)
    if verb == "pull":
        ann.push(folder)
        bucket.calls.clear()
    bucket.fails_after = 2
    transfer = ann.push if verb == "push" else bob.pull
    with pytest.raises(CloudRefused):
        transfer(folder)
    bucket.fails_after = None
    assert len(transfer(folder).known) == 2
    assert len(bucket.calls) == 3
    bob.pull(folder)
    assert bob.runs().keys() == set(runs)


def renamed(files: dict[str, bytes], run_id: str, other: str) -> dict[str, bytes]:
    return {name.replace(run_id, other): data for name, data in files.items()}


def without_owner(files: dict[str, bytes], run_id: str) -> dict[str, bytes]:
    run_file = json.loads(files[f"{run_id}/run.json"]) | {"owner": None}
    return {**files, f"{run_id}/run.json": json.dumps(run_file).encode()}


HOSTILE: dict[str, Callable[[dict[str, bytes], str], bytes]] = {
    "no archive": lambda files, run_id: b"not an archive",
    "cut": lambda files, run_id: packed(files)[:100],
    "empty": lambda files, run_id: packed({}),
    "changed": lambda files, run_id: packed(
        {**files, f"{run_id}/run.json": files[f"{run_id}/run.json"] + b" "}
    ),
    "of another run": lambda files, run_id: packed(renamed(files, run_id, "20260101-000000-aaaa")),
    "nobody's": lambda files, run_id: packed(without_owner(files, run_id)),
    "outside": lambda files, run_id: packed({**files, "../../outside": b"x"}),
    "no run file": lambda files, run_id: packed(
        {name: data for name, data in files.items() if not name.endswith("run.json")}
    ),
    "wrong types": lambda files, run_id: packed({**files, f"{run_id}/run.json": b'{"schema": []}'}),
    "another schema": lambda files, run_id: packed(
        {**files, f"{run_id}/run.json": files[f"{run_id}/run.json"].replace(b"-run/1", b"-run/99")}
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_not_a_shared_run_is_left_out_and_the_others_come(
    meet: Callable[[str], Person], folder: sharing.SharedFolder, tmp_path: Path, kind: str
) -> None:
    ann, bob = meet("ann"), meet("bob")
    bad, good = ann.made(), ann.made()
    ann.push(folder)
    bucket = bucket_of(folder)
    key = next(key for key in bucket.objects if bad in key)
    bucket.objects[key] = HOSTILE[kind](content(bucket.objects[key]), bad)
    before = {path for path in tmp_path.rglob("*") if bob.home not in (path, *path.parents)}
    done = bob.pull(folder)
    assert (done.new, list(done.left_out)) == ([good], [bad])
    assert bob.runs().keys() == {good}
    assert {path for path in tmp_path.rglob("*") if bob.home not in (path, *path.parents)} == before
    # Repaired, it comes.
    del bucket.objects[key]
    ann.push(folder)
    assert bob.pull(folder).new == [bad]


@pytest.mark.parametrize(("limit", "value"), [("MAX_PACKED_BYTES", 100), ("MAX_UNPACKED_BYTES", 1000)])
def test_a_run_that_is_too_large_is_left_out(
    meet: Callable[[str], Person],
    folder: sharing.SharedFolder,
    monkeypatch: pytest.MonkeyPatch,
    limit: str,
    value: int,
) -> None:
    ann, bob = meet("ann"), meet("bob")
    run_id = ann.made()
    ann.push(folder)
    monkeypatch.setattr(sharing, limit, value)
    assert list(bob.pull(folder).left_out) == [run_id]
    assert bob.runs() == {}


def test_other_objects_and_one_that_is_gone(
    meet: Callable[[str], Person], folder: sharing.SharedFolder
) -> None:
    ann, bob = meet("ann"), meet("bob")
    run_id = ann.made()
    ann.push(folder)
    bucket = bucket_of(folder)
    (key,) = bucket.objects
    for name in ("notes.txt", "../x.0123456789abcdef.tar.xz", "a/b.0123456789abcdef.tar.xz", "x.tar.xz"):
        bucket.put_object("us-east-1", "team", f"runs/{name}", b"")
    assert bob.pull(folder, dry_run=True).new == [run_id]
    bucket.download = lambda *args, **kwargs: False  # type: ignore[method-assign]
    assert list(bob.pull(folder).left_out) == [run_id]
    assert key in bucket.objects


STEPS = st.lists(
    st.tuples(st.sampled_from(["make", "push", "pull"]), st.integers(0, 2)), min_size=3, max_size=14
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_in_any_order_ledgers_merge_into_the_union_without_a_double(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    home = tmp_path_factory.mktemp("team")
    folder = sharing.SharedFolder(store=Bucket(), region="us-east-1", bucket="team", prefix="")
    people = [
        Person(name=name, home=home / name, ledger=Ledger(home / f"{name}.sqlite")) for name in ACCOUNTS
    ]
    made: dict[str, str] = {}
    try:
        for verb, index in steps:
            person = people[index]
            if verb == "make":
                made[person.made()] = person.name
            else:
                getattr(person, verb)(folder)
        for verb in ("push", "pull"):
            for person in people:
                assert getattr(person, verb)(folder).left_out == {}
        for person in people:
            runs = person.runs()
            assert {run.id: run.owner or person.name for run in runs.values()} == made
            again = person.pull(folder)
            assert (again.new, again.updated) == ([], [])
        assert len(bucket_of(folder).objects) == len(made)
    finally:
        for person in people:
            person.ledger.close()

"""Runs shared through a folder of S3: what is sent and taken, and ledgers that merge without a double."""

import io
import json
import lzma
import tarfile
from collections.abc import Callable, Collection, Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import BinaryIO

import pytest
from fake_records import write_run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastlaunch.analysis.pooling import STEP, Group, pool, run_times
from fastlaunch.aws.errors import CloudRefused
from fastlaunch.aws.types import StoredObject
from fastlaunch.core.errors import UserError
from fastlaunch.core.plan import RunState
from fastlaunch.jobs.job import SCRIPT_RECIPE, Job, Script
from fastlaunch.ledger.ledger import Ledger, Run
from fastlaunch.lifecycle import importer, sharing
from fastlaunch.lifecycle.evidence import measured_run, measured_runs
from fastlaunch.lifecycle.export import Words, record_files, series_of
from fastlaunch.lifecycle.importer import find_runs
from fastlaunch.measure.summary import RunSummary
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

    def list_objects(self, region: str, bucket: str, prefix: str, **_: object) -> list[StoredObject]:
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
    folder: sharing.SharedFolder

    def made(self, recipe: str = "bf16", *, run_id: str | None = None, session: str | None = None) -> str:
        """Return the id of a run that has ended here."""
        run_id = run_id or self.ledger.new_run_id()
        folder = self.home / "runs" / run_id
        write_run(
            folder, steps=40, run_id=run_id, workload="vit-tiny", recipe=recipe, header={"session": session}
        )
        spec = Job(workload="vit-tiny", recipe=resolve_recipe(recipe), batch_size=2, steps=40, num_gpus=1)
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

    def push(self, *, dry_run: bool = False) -> sharing.Transfer:
        own = [run for run in self.ledger.select() if run.owner is None]
        account = ACCOUNTS[self.name]
        return sharing.push(own, self.folder, owner=self.name, account=lambda run: account, dry_run=dry_run)

    def pull(self, *, dry_run: bool = False) -> sharing.Transfer:
        return sharing.pull(self.ledger, self.folder, self.home / "shared", owner=self.name, dry_run=dry_run)

    def runs(self) -> dict[str, Run]:
        return {run.id: run for run in self.ledger.select()}

    def origins(self) -> dict[str, Run]:
        """Return the runs by the ids that they have where they were made."""
        return {run.recorded_id: run for run in self.ledger.select()}


class Team:
    """People with a folder of S3 in common."""

    def __init__(self, home: Path, names: Collection[str]) -> None:
        for name in names:
            (home / name).mkdir()
        self.bucket = Bucket()
        self.folder = sharing.SharedFolder(
            store=self.bucket, region="us-east-1", bucket="team", prefix="runs/"
        )
        self.people = [
            Person(name=name, home=home / name, ledger=Ledger(home / name / "l.sqlite"), folder=self.folder)
            for name in names
        ]
        self.ann, self.bob, self.cem, *_ = self.people

    def close(self) -> None:
        for person in self.people:
            person.ledger.close()


@pytest.fixture
def team(tmp_path: Path) -> Iterator[Team]:
    with closing(Team(tmp_path, ACCOUNTS)) as met:
        yield met


def summary_of(run: Run) -> RunSummary:
    assert run.summary is not None
    return run.summary


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


def test_a_shared_run_says_whose_it_is_and_measures_the_same(team: Team) -> None:
    ann, bob = team.ann, team.bob
    run_id = ann.made()
    assert ann.push() == sharing.Transfer(new=[run_id])
    (here_id,) = bob.pull().new
    here, there = bob.runs()[here_id], ann.runs()[run_id]
    assert here.recorded_id == run_id and bob.ledger.get(run_id).id == here_id
    assert (here.owner, here.account, here.backend) == ("ann", ACCOUNTS["ann"], "import")
    assert (there.owner, there.account) == (None, None)
    assert here.summary == there.summary and here.submission_id != there.submission_id
    # Rounds are compared within the submission, as in Ann's ledger.
    measured = measured_run(here, "us-east-1")
    assert measured is not None and measured.session == here.submission_id
    with record_files(here) as files:
        assert len(files) == 1
    assert series_of([here]).keys() == {here_id}
    # What Bob typed last counts without arguments, and not what he pulled.
    assert bob.ledger.last_submission() is None
    assert [run.id for run in bob.ledger.select(["owner=ann"])] == [here_id]
    assert bob.ledger.select(["owner=bob"]) == []


def test_what_is_private_stays(team: Team) -> None:
    ann = team.ann
    run_id = ann.made()
    ann.push()
    (body,) = team.bucket.objects.values()
    run_file = content(body)[f"{run_id}/run.json"].decode()
    assert "sesame" not in run_file and str(ann.home) not in run_file
    assert {"plan", "attempts", "command", "directory", "history"}.isdisjoint(json.loads(run_file))


def test_again_nothing_is_sent_and_nothing_fetched(team: Team) -> None:
    ann, bob = team.ann, team.bob
    runs = [ann.made(), ann.made("compile")]
    assert ann.push(dry_run=True).new == runs and team.bucket.calls == []
    ann.push()
    would = bob.pull(dry_run=True).new
    assert len(would) == 2 and bob.runs() == {}
    assert bob.pull().new == would and bob.origins().keys() == {*runs}
    before = list(team.bucket.calls)
    assert ann.push().known == runs and bob.pull().known == would
    assert team.bucket.calls == before
    # Nor does Ann get her own back.
    assert sorted(ann.pull().known) == sorted(runs) and len(ann.runs()) == 2


def test_what_was_summarised_anew_comes_beside_and_the_last_counts(team: Team) -> None:
    ann, bob, cem = team.ann, team.bob, team.cem
    run_id = ann.made()
    ann.push()
    (first,) = bob.pull().new
    summary = ann.runs()[run_id].summary
    assert summary is not None
    ann.ledger.set_summary(run_id, replace(summary, startup=replace(summary.startup, boot_s=41.0)))
    assert ann.push().updated == [run_id]
    done = bob.pull()
    (second,) = done.new
    assert done.beside == {second: first} and bob.runs().keys() == {first, second}
    assert bob.pull().known == [first, second]
    # Whoever comes later has the same.
    assert cem.pull().new == [first, second] == list(cem.runs())
    for person in (bob, cem):
        kept, left_out = measured_runs(person.ledger.select(), "us-east-1", with_shared=False)
        assert [run.run_id for run in kept] == [second] and len(left_out) == 1
        assert kept[0].summary.startup.boot_s == 41.0


def test_runs_of_others_and_runs_under_way_are_not_pushed(team: Team) -> None:
    ann, bob = team.ann, team.bob
    theirs = ann.made()
    ann.push()
    bob.pull()
    planned = bob.ledger.new_run_id()
    bob.ledger.add_run(
        bob.ledger.add_submission("x"), planned, spec={}, plan=None, workload="w", recipe="r", backend="local"
    )
    done = sharing.push(bob.ledger.select(), team.folder, owner="bob", account=lambda run: None)
    (pulled,) = [run.id for run in bob.runs().values() if run.recorded_id == theirs]
    assert set(done.left_out) == {pulled, planned} and "ann" in done.left_out[pulled]
    assert len(team.bucket.objects) == 1


def test_runs_of_one_id_stay_beside_each_other(team: Team) -> None:
    ann, bob, cem = team.ann, team.bob, team.cem
    run_id = ann.made("compile")
    ann.push()
    cem.made("fp32", run_id=run_id)
    cem.push()
    bob.made("bf16", run_id=run_id)
    submission = bob.runs()[run_id].submission_id
    first, second = bob.pull().new
    assert bob.pull() == sharing.Transfer(known=[first, second])
    runs = bob.runs()
    assert [(run.owner, run.recipe) for run in runs.values()] == [
        *((None, "bf16"), ("ann", "compile"), ("cem", "fp32"))
    ]
    assert len({run.submission_id for run in runs.values()}) == 3
    assert runs[run_id].submission_id == submission
    # What is named is one's own.
    assert bob.ledger.get(run_id[-4:]).id == run_id
    # Neither does an import replace them, nor join them.
    bob.ledger.add_imported([(summary_of(runs[first]), None)], submission_id=submission, run_ids=[second])
    assert bob.runs()[second] == runs[second]
    # Among runs of one name one's own counts, then what was shared first.
    for chosen, own in ((list(runs.values()), run_id), ([runs[first], runs[second]], first)):
        joined, _ = measured_runs(chosen, "us-east-1", with_shared=True)
        assert [run.run_id for run in joined] == [own]


def test_no_id_of_a_sender_joins_a_submission(team: Team) -> None:
    """A sender who knows ids of others gives them as those of the own run's submission and session."""
    ann, bob, eve = team.ann, team.bob, team.cem
    of_bob = bob.made()
    submission = bob.runs()[of_bob].submission_id
    for person in (ann, eve):
        run_id = person.made(session=submission)
        run = replace(person.runs()[run_id], submission_id=submission)
        sharing.push([run], team.folder, owner=person.name, account=lambda run: ACCOUNTS["ann"])
    bob.pull()
    stored = bob.runs().values()
    assert len({run.submission_id for run in stored}) == 3
    kept, _ = measured_runs(list(stored), "us-east-1", with_shared=True)
    assert len({time.session for run in kept for time in run_times(Group(runs=[run], measure=STEP), 0)}) == 3


def test_whose_a_run_is_says_the_folder(team: Team) -> None:
    ann, bob = team.ann, team.bob
    ann.made()
    ann.push()
    bucket = team.bucket
    ((key, body),) = bucket.objects.items()
    bucket.objects.clear()
    for place in (key.replace("ann/", "eve/"), key.replace("ann/", ""), key.replace("ann/", "../")):
        bucket.put_object("us-east-1", "team", place, body)
    done = bob.pull()
    ((name, why),) = done.left_out.items()
    assert name.startswith("eve/") and "eve" in why and bob.runs() == {}


@pytest.mark.parametrize("name", ["..", ".", "a/b", "", "ann*", "\u0430nn", "ann\n"])
def test_a_name_that_is_no_folder_shares_nothing(team: Team, name: str) -> None:
    ann = team.ann
    ann.made()
    with pytest.raises(UserError):
        sharing.push(ann.ledger.select(), team.folder, owner=name, account=lambda run: None)
    assert team.bucket.objects == {}


@pytest.mark.parametrize("name", ["a+n=n,@b.c_d-e", "AROAEXAMPLE:ann@acme.com", "...", "123456789012"])
def test_every_name_of_iam_is_a_folder(team: Team, name: str) -> None:
    ann, bob = team.ann, team.bob
    ann.made()
    sharing.push(ann.ledger.select(), team.folder, owner=name, account=lambda run: None)
    bob.pull()
    assert [run.owner for run in bob.runs().values()] == [name]


SECRET, VARIED = "sesame-0pen", ("amp", "bf16")


def made_script(person: Person, *words: str) -> str:
    """Return the id of a script's run that ended with its words in its message."""
    run_id = person.ledger.new_run_id()
    folder = person.home / "runs" / run_id
    script = Script(command=("/home/ann/bin/python", "train.py", "--amp", "{amp}", *words), variant=(VARIED,))
    recipe = {"name": "script", "label": script.label, "precision": "unknown"}
    header = {"recipe": recipe, "script": {"command": [*script.argv], "variant": dict([VARIED])}}
    workload = {
        "name": "train.py",
        "sample_unit": "samples",
        "flops_per_sample": None,
        "num_parameters": None,
    }
    header |= {"workload": workload, "warnings": [f"no {words[-1]}"], "data": "script"}
    write_run(
        folder,
        steps=40,
        run_id=run_id,
        message=f"cannot read {words[-1]}",
        status="interrupted",
        header=header,
    )
    spec = Job(
        workload="train.py", recipe=SCRIPT_RECIPE, script=script, batch_size=None, steps=None, num_gpus=1
    )
    person.ledger.add_run(
        person.ledger.add_submission("fastlaunch submit"),
        run_id,
        spec=spec.to_json(),
        plan=None,
        workload="train.py",
        recipe=script.label,
        backend="local",
        directory=folder,
    )
    person.ledger.set_state(run_id, RunState.RUNNING)
    person.ledger.set_summary(run_id, find_runs([folder]).runs[run_id].summary)
    person.ledger.set_state(run_id, RunState.INTERRUPTED, f"cannot read {words[-1]}")
    return run_id


def test_a_scripts_words_stay_unless_they_are_asked_for(team: Team) -> None:
    ann, bob = team.ann, team.bob
    run_ids = [
        made_script(ann, f"--token={SECRET}", "--data", f"/home/ann/{n}")
        for n in ("private", "other", "private")
    ]
    assert len(ann.push().new) == 3
    for body in team.bucket.objects.values():
        for name, data in content(body).items():
            text = (lzma.decompress(data) if name.endswith(".xz") else data).decode()
            assert SECRET not in text and "/home/ann" not in text and "amp=bf16" in text
    assert len(bob.pull().new) == 3
    # The same command is the same row, and another one another.
    kept, _ = measured_runs(bob.ledger.select(), "us-east-1", with_shared=False)
    assert sorted(len(group.runs) for group in pool(kept)[0]) == [1, 2]
    # Bob's own run of that command joins it, if that is asked for.
    own = made_script(bob, f"--token={SECRET}", "--data", "/home/ann/private")
    for with_shared, sizes in ((False, [1, 1, 2]), (True, [1, 3])):
        kept, _ = measured_runs(bob.ledger.select(), "us-east-1", with_shared=with_shared)
        assert sorted(len(group.runs) for group in pool(kept)[0]) == sizes
    assert bob.runs()[own].script is not None
    sharing.push(
        [ann.runs()[run_ids[0]]], team.folder, owner="ann", account=lambda run: None, with_words=True
    )
    assert SECRET in content([*team.bucket.objects.values()][-1])[f"{run_ids[0]}/run.json"].decode()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (f"--db=postgres://ann:{SECRET}@host/db", f"login failed: {SECRET}"),
        (f'{{"key": "{SECRET}"}}', f"no such key: {SECRET}"),
        (f"--hosts=first,{SECRET}", f"no host {SECRET}"),
        (f"C:\\{SECRET}\\x", repr(f"C:\\{SECRET}\\x")),
        (f"{SECRET}'s", repr([f"{SECRET}'s \""])),
        (SECRET, SECRET.upper()),
    ],
)
def test_no_piece_of_a_word_is_left_in_a_message(word: str, message: str) -> None:
    words = Words.of("train.py", Script(command=("python", "train.py", word), variant=()))
    line = words.hidden_in_line(json.dumps({"kind": "end", "message": message}).encode()).decode()
    assert not any(part in line.lower() for part in SECRET.split("-"))


@pytest.mark.parametrize("verb", ["push", "pull"])
def test_after_a_lost_network_the_rest_is_done(team: Team, verb: str) -> None:
    ann, bob = team.ann, team.bob
    runs = [ann.made() for _ in range(3)]
    bucket = team.bucket
    if verb == "pull":
        ann.push()
        bucket.calls.clear()
    bucket.fails_after = 2
    transfer = ann.push if verb == "push" else bob.pull
    with pytest.raises(CloudRefused):
        transfer()
    bucket.fails_after = None
    assert len(transfer().known) == 2
    assert len(bucket.calls) == 3
    bob.pull()
    assert bob.origins().keys() == set(runs)


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
    "too long a line": lambda files, run_id: packed(
        {**files, f"{run_id}/rank-00001-attempt-1.jsonl.xz": lzma.compress(b" " * 2**24)}
    ),
    "several runs": lambda files, run_id: packed(
        {
            **files,
            f"{run_id}/rank-00001-attempt-1.jsonl.xz": lzma.compress(
                lzma.decompress(files[f"{run_id}/rank-00000-attempt-1.jsonl.xz"]).replace(
                    run_id.encode(), b"another"
                )
            ),
        }
    ),
    "another schema": lambda files, run_id: packed(
        {**files, f"{run_id}/run.json": files[f"{run_id}/run.json"].replace(b"-run/1", b"-run/99")}
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_is_not_a_shared_run_is_left_out_and_the_others_come(
    team: Team, tmp_path: Path, kind: str
) -> None:
    ann, bob = team.ann, team.bob
    bad, good = ann.made(), ann.made()
    ann.push()
    bucket = team.bucket
    key = next(key for key in bucket.objects if bad in key)
    bucket.objects[key] = HOSTILE[kind](content(bucket.objects[key]), bad)
    before = {path for path in tmp_path.rglob("*") if bob.home not in (path, *path.parents)}
    done = bob.pull()
    assert (len(done.new), [f"runs/{name}" for name in done.left_out]) == (1, [key])
    assert bob.origins().keys() == {good}
    assert {path for path in tmp_path.rglob("*") if bob.home not in (path, *path.parents)} == before
    # Repaired, it comes.
    del bucket.objects[key]
    ann.push()
    bob.pull()
    assert bob.origins().keys() == {good, bad}


@pytest.mark.parametrize(
    ("module", "limit", "value"), [(sharing, "MAX_PACKED_BYTES", 100), (importer, "MAX_UNPACKED_BYTES", 1000)]
)
def test_a_run_that_is_too_large_is_left_out(
    team: Team, monkeypatch: pytest.MonkeyPatch, module: object, limit: str, value: int
) -> None:
    ann, bob = team.ann, team.bob
    ann.made()
    ann.push()
    monkeypatch.setattr(module, limit, value)
    assert [f"runs/{name}" for name in bob.pull().left_out] == list(team.bucket.objects)
    assert bob.runs() == {}


def test_other_objects_and_one_that_is_gone(team: Team) -> None:
    ann, bob = team.ann, team.bob
    ann.made()
    ann.push()
    bucket = team.bucket
    (key,) = bucket.objects
    for name in ("notes.txt", "../x.0123456789abcdef.tar.xz", "b.0123456789abcdef.tar.xz", "a/x.tar.xz"):
        bucket.put_object("us-east-1", "team", f"runs/{name}", b"")
    assert len(bob.pull(dry_run=True).new) == 1
    bucket.download = lambda *args, **kwargs: False  # type: ignore[method-assign]
    assert [f"runs/{name}" for name in bob.pull().left_out] == [key]
    assert key in bucket.objects


STEPS = st.lists(
    st.tuples(st.sampled_from(["make", "push", "pull"]), st.integers(0, 2)), min_size=3, max_size=10
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_in_any_order_ledgers_merge_into_the_union_without_a_double(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    team = Team(tmp_path_factory.mktemp("team"), ACCOUNTS)
    people = team.people
    made: dict[str, str] = {}
    try:
        for verb, index in steps:
            person = people[index]
            if verb == "make":
                made[person.made()] = person.name
            else:
                getattr(person, verb)()
        for verb in ("push", "pull"):
            for person in people:
                assert getattr(person, verb)().left_out == {}
        for person in people:
            runs = person.origins()
            assert len(runs) == len(person.runs())
            assert {run.recorded_id: run.owner or person.name for run in runs.values()} == made
            again = person.pull()
            assert (again.new, again.updated) == ([], [])
        assert len(team.bucket.objects) == len(made)
    finally:
        team.close()

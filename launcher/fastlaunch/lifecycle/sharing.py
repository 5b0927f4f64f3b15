"""Share runs through a folder in S3: `push` uploads the user's runs, `pull` adds others' runs to the ledger.

A run is one object, `OWNER/RUN.DIGEST.tar.xz`, an export: S3 stores it whole or not at all. The digest is of
its contents, so a run is sent only once, and a damaged one is not read. The policies let users write only to
the folder of their name, so the owner of a run follows from its folder, never from its contents.
"""

import hashlib
import io
import json
import re
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fastlaunch.aws.types import StoredObject
from fastlaunch.backends.s3_sync import Store, write_whole
from fastlaunch.core.errors import BadFile, UserError
from fastlaunch.ledger.ids import shared_id
from fastlaunch.ledger.ledger import IMPORT, Ledger, Run
from fastlaunch.lifecycle.describe import measured_to_dict
from fastlaunch.lifecycle.export import Words, compress, plain_name, record_files, without_words
from fastlaunch.lifecycle.importer import RUN_FILE, RUN_SCHEMA, ImportedRun, find_runs, unpacked
from fastlaunch.measure.record_files import RecordError, open_unpacked, read_header

#: The most bytes of one run.
MAX_PACKED_BYTES = 2**28
_CHUNK_BYTES = 2**20
#: How many archives come at a time, and how many before they are read.
_NUM_DOWNLOADS, _NUM_AHEAD = 8, 64
_SUFFIX = ".tar.xz"
#: IAM's names of users, and ids of roles with session names; never a parent folder.
_OWNER = r"(?!\.{1,2}(?:/|$))[\w+=,.@:-]{1,100}"
_NAME = re.compile(
    rf"({_OWNER})/([a-zA-Z0-9][a-zA-Z0-9_-]{{0,99}})\.([0-9a-f]{{16}}){re.escape(_SUFFIX)}", re.ASCII
)
#: Fields that are not shared, since they are paths on this machine.
_PRIVATE = ("directory", "model")


class SharedStore(Store, Protocol):
    """The calls of `Aws` that this takes."""

    def put_object(
        self, region: str, bucket: str, key: str, body: bytes, *, only_new: bool = False
    ) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class SharedFolder:
    """A folder of S3 with shared runs."""

    store: SharedStore
    region: str
    bucket: str
    #: The prefix of its keys; empty, or with a slash at its end.
    prefix: str

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"

    def copies(self, *, owner: str | None = None) -> list["SharedRun"]:
        """Return the shared copies of this owner, or of everybody, oldest first."""
        copies = []
        prefix = f"{self.prefix}{owner}/" if owner else self.prefix
        for stored in self.store.list_objects(self.region, self.bucket, prefix):
            if name := _NAME.fullmatch(stored.key.removeprefix(self.prefix)):
                sender, run_id, digest = name.groups()
                copies.append(SharedRun(owner=sender, run_id=run_id, digest=digest, stored=stored))
        return sorted(copies, key=lambda copy: (copy.modified_s, copy.name))


@dataclass(frozen=True, kw_only=True)
class SharedRun:
    """A copy of a run in a shared folder."""

    owner: str
    run_id: str
    digest: str
    stored: StoredObject

    @property
    def modified_s(self) -> float:
        return self.stored.modified_at.timestamp() if self.stored.modified_at else 0.0

    @property
    def name(self) -> str:
        return f"{self.owner}/{self.run_id}.{self.digest}{_SUFFIX}"

    @property
    def id(self) -> str:
        """The id of this copy in the ledger of a user who pulls it."""
        return shared_id(self.run_id, self.owner, self.digest)

    def archive(self, archives: Path) -> Path:
        """Return where what was fetched lies in the folder of archives."""
        return archives / f"{self.id}{_SUFFIX}"


@dataclass(kw_only=True)
class Transfer:
    """The result of a push or a pull, or of its dry run, by the runs' ids in this ledger."""

    new: list[str] = field(default_factory=list)
    #: Pushed again with changed records; earlier copies stay.
    updated: list[str] = field(default_factory=list)
    #: Present already, there or here.
    known: list[str] = field(default_factory=list)
    #: By new run, the run here with the same name; both stay.
    beside: dict[str, str] = field(default_factory=dict)
    #: The reason for each run that was left out. Pulled runs go by object names, which begin with owners.
    left_out: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def push(
    runs: Sequence[Run],
    folder: SharedFolder,
    *,
    owner: str,
    account: Callable[[Run], str | None],
    with_words: bool = False,
    dry_run: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Transfer:
    """Add runs that were started here to the owner's folder, unless an equal copy is there.

    owner: `Identity.owner_key`. account: the AWS account of a run. with_words: also send the words after `--`
    of scripts; otherwise a digest of them.

    Raises UserError for an owner whose name cannot be a folder, and the errors of `Aws`. Runs sent by then
    stay, and the next push goes on from there.
    """
    if not re.fullmatch(_OWNER, owner, re.ASCII):
        raise UserError(f"the name {owner!r} can be no folder", "log in to AWS as another user or role")
    done = Transfer()
    there = {copy.run_id: copy for copy in folder.copies(owner=owner)}
    for number, run in enumerate(runs):
        progress(number, len(runs))
        if why := _unshareable(run):
            done.left_out[run.id] = why
            continue
        words = None if with_words or run.script is None else Words.of(run.workload, run.script)
        run_file = _run_file(run, owner=owner, account=account(run), words=words)
        with record_files(run) as kept, without_words(kept, words) as files:
            digest = _digest(run_file, files)
            if run.id in there and there[run.id].digest == digest:
                done.known.append(run.id)
                continue
            if not dry_run:
                body = _packed(run.id, run_file, files)
                if len(body) > MAX_PACKED_BYTES:
                    done.left_out[run.id] = f"its records take {len(body) / 2**20:,.0f} MiB packed"
                    continue
                key = f"{folder.prefix}{owner}/{run.id}.{digest}{_SUFFIX}"
                folder.store.put_object(folder.region, folder.bucket, key, body)
        (done.updated if run.id in there else done.new).append(run.id)
    return done


def pull(
    ledger: Ledger,
    folder: SharedFolder,
    archives: Path,
    *,
    owner: str | None = None,
    dry_run: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Transfer:
    """Add the folder's runs to the ledger, except the user's runs that were started here.

    Every copy becomes a separate run, and replaces neither a run of the same name nor one of another owner.
    owner: the user's key, by which their folder is named. archives: a local folder that keeps what was
    fetched.

    Raises what `Aws` raises, and UserError if the disk is full; what was fetched by then is kept.
    """
    done, there = Transfer(), folder.copies()
    known, made_here = ledger.recorded_ids(), ledger.made_here()
    last = {recorded_id: run_id for run_id, recorded_id in known.items()}
    new = []
    for copy in there:
        is_made_here = copy.owner == owner and copy.run_id in made_here
        if is_made_here or copy.id in known:
            done.known.append(copy.run_id if is_made_here else copy.id)
        else:
            new.append(copy)
    for at in range(0, len(new), _NUM_AHEAD):
        copies = new[at : at + _NUM_AHEAD]
        errors, refusal = {} if dry_run else _fetch_all(folder, copies, archives), None
        for number, copy in enumerate(copies, len(there) - len(new) + at):
            progress(number, len(there))
            error = errors.get(copy.id)
            if error is not None and not isinstance(error, BadFile):
                refusal = error
                continue
            try:
                if error is not None:
                    raise error
                if not dry_run:
                    _add(ledger, copy, archives)
            except BadFile as error:
                copy.archive(archives).unlink(missing_ok=True)
                done.left_out[copy.name] = error.problem
                continue
            done.new.append(copy.id)
            if copy.run_id in last:
                done.beside[copy.id] = last[copy.run_id]
            last[copy.run_id] = copy.id
        if refusal is not None:
            raise refusal
    return done


def _fetch_all(folder: SharedFolder, copies: Sequence[SharedRun], archives: Path) -> dict[str, UserError]:
    """Bring the archives that are not here, several at a time; return the errors by id.

    After an error of AWS or the disk no more are fetched, and all others have it.
    """
    errors: dict[str, UserError] = {}

    def fetch(copy: SharedRun) -> None:
        if copy.archive(archives).exists():
            return
        if earlier := next((error for error in [*errors.values()] if not isinstance(error, BadFile)), None):
            errors[copy.id] = earlier
            return
        try:
            write_whole(copy.archive(archives), _fetched(folder, copy))
        except UserError as error:
            errors[copy.id] = error

    with ThreadPoolExecutor(max_workers=_NUM_DOWNLOADS) as pool:
        try:
            list(pool.map(fetch, copies))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return errors


def _add(ledger: Ledger, copy: SharedRun, archives: Path) -> None:
    """Add the run in the archive to the ledger. Raises BadFile unless it is the run of the archive's name."""
    archive = copy.archive(archives)
    imported = _read(archive, copy)
    run_file = imported.run_file
    assert run_file.submission is not None
    ledger.add_shared(
        copy.id,
        imported.summary,
        archive,
        origin_id=copy.run_id,
        owner=copy.owner,
        account=run_file.account,
        submission_id=run_file.submission,
        price=run_file.price,
    )


def _unshareable(run: Run) -> str | None:
    if not run.state.is_final:
        return f"it is {run.state}: push it when it has ended"
    if run.summary is None:
        return f"it is {run.state} and recorded nothing"
    if run.backend == IMPORT:
        return f"it is {run.owner}'s, not yours" if run.owner else "it was imported, not made here"
    return None


def _run_file(run: Run, *, owner: str, account: str | None, words: Words | None) -> bytes:
    """Return the run file, without the plan, the attempts and the typed command, which hold private names."""
    assert run.summary is not None
    facts = {name: value for name, value in measured_to_dict(run).items() if name not in _PRIVATE}
    shared = {
        "schema": RUN_SCHEMA,
        **facts,
        "owner": owner,
        "account": account,
        "price": run.price.to_json() if run.price else None,
        "spec": run.spec,
    }
    shared = words.hidden_in_run(shared) if words else shared
    return json.dumps(shared, indent=2, sort_keys=True).encode() + b"\n"


def _digest(run_file: bytes, files: Iterable[Path]) -> str:
    """Return a digest of the uncompressed contents of a run's files."""
    whole = hashlib.sha256(run_file)
    for file in sorted(files, key=plain_name):
        with open_unpacked(file) as source:
            digest = hashlib.sha256()
            while chunk := source.read(_CHUNK_BYTES):
                digest.update(chunk)
        whole.update(f"\n{plain_name(file)} {digest.hexdigest()}".encode())
    return whole.hexdigest()[:16]


def _packed(run_id: str, run_file: bytes, files: Iterable[Path]) -> bytes:
    packed = io.BytesIO()
    with tempfile.TemporaryDirectory(prefix="fastlaunch-") as temporary:
        folder = Path(temporary, run_id)
        folder.mkdir()
        for file in files:
            compress(file, folder)
        Path(folder, RUN_FILE).write_bytes(run_file)
        with tarfile.open(fileobj=packed, mode="w:xz", preset=0) as archive:
            archive.add(folder, arcname=run_id, filter=_anonymous)
    return packed.getvalue()


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def _fetched(folder: SharedFolder, copy: SharedRun) -> bytes:
    """Return the object. Raises BadFile if it is too large, gone or unreadable."""
    uri = folder.uri + copy.name
    if copy.stored.size > MAX_PACKED_BYTES:
        raise BadFile(uri, f"it has {copy.stored.size / 2**20:,.0f} MiB")
    body = io.BytesIO()
    if not folder.store.download(
        folder.region, folder.bucket, copy.stored.key, body, max_bytes=MAX_PACKED_BYTES
    ):
        raise BadFile(uri, "it is gone, or s3:GetObject is denied")
    return body.getvalue()


def _read(archive: Path, copy: SharedRun) -> ImportedRun:
    """Return the run in the archive. Raises BadFile unless it is the run of the archive's name."""
    with unpacked(archive) as root:
        folder = root / copy.run_id
        try:
            files = [path for path in sorted(folder.iterdir()) if path.name != RUN_FILE]
            # Stop here if the records are of many runs, since the limits of a read hold per run.
            if len({read_header(path)["run_id"] for path in files}) > 1:
                raise BadFile(archive, "it is of several runs")
            imports = find_runs([folder])
            imported = imports.runs.get(copy.run_id)
            if imports.skipped or imported is None or list(imports.runs) != [copy.run_id]:
                problem = imports.skipped[0].problem if imports.skipped else "it is of another run"
                raise BadFile(archive, problem)
            run_file = Path(folder, RUN_FILE).read_bytes()
            if {*imported.files} != {*files} or _digest(run_file, files) != copy.digest:
                raise BadFile(archive, "what is in it is not what was shared")
        except RecordError as error:
            raise BadFile(archive, error.problem) from None
        except OSError as error:
            raise BadFile(archive, f"is not a shared run: {error.strerror or error}") from None
        except BadFile as error:
            raise BadFile(archive, error.problem) from None
        except UserError as error:
            raise BadFile(archive, error.message) from None
    owner = imported.run_file.owner
    if owner != copy.owner or imported.run_file.submission is None:
        whose = f"says that it is {owner}'s" if owner else "does not say whose it is"
        raise BadFile(archive, f"it lies in the folder of {copy.owner} and {whose}")
    return imported

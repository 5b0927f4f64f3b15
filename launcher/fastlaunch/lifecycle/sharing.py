"""Runs shared through a folder of S3: `push` adds one's own, `pull` brings those of others into the ledger.

A run is one object, `RUN.DIGEST.tar.xz`, an export with its owner: S3 stores it whole or not at all. The
digest is of what is in it, so what is there already is not sent again, and what was damaged is not read.
"""

import hashlib
import io
import json
import lzma
import re
import tarfile
import tempfile
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from fastlaunch.aws.types import StoredObject
from fastlaunch.backends.s3_sync import Store, write_whole
from fastlaunch.core.errors import BadFile, UserError
from fastlaunch.ledger.ledger import IMPORT, Ledger, Run
from fastlaunch.lifecycle.collect import run_facts
from fastlaunch.lifecycle.export import compress, open_record, plain_name, record_files
from fastlaunch.lifecycle.importer import RUN_FILE, RUN_SCHEMA, ImportedRun, find_runs, unpacked

#: Of one run: packed, and with everything in it.
MAX_PACKED_BYTES = 2**28
MAX_UNPACKED_BYTES = 2**32
_CHUNK_BYTES = 2**20
_SUFFIX = ".tar.xz"
_NAME = re.compile(rf"([a-zA-Z0-9][a-zA-Z0-9_-]{{0,99}})\.([0-9a-f]{{16}}){re.escape(_SUFFIX)}")
#: What of a run is not shared: paths of this machine.
_PRIVATE = ("directory",)


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
    #: Of its keys; empty, or with a slash at its end.
    prefix: str

    @property
    def uri(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"

    def newest(self) -> dict[str, "SharedRun"]:
        """Return the newest copy of each run, by its id."""
        found: dict[str, list[SharedRun]] = {}
        for stored in self.store.list_objects(self.region, self.bucket, self.prefix):
            if name := _NAME.fullmatch(stored.key.removeprefix(self.prefix)):
                run_id, digest = name.groups()
                found.setdefault(run_id, []).append(SharedRun(run_id=run_id, digest=digest, stored=stored))
        return {
            run_id: max(copies, key=lambda copy: (_age_key(copy.stored), copy.digest))
            for run_id, copies in found.items()
        }


@dataclass(frozen=True, kw_only=True)
class SharedRun:
    """A copy of a run in a shared folder."""

    run_id: str
    digest: str
    stored: StoredObject

    @property
    def name(self) -> str:
        return f"{self.run_id}.{self.digest}{_SUFFIX}"


@dataclass(kw_only=True)
class Transfer:
    """What a push or a pull did, or would do, by the ids of runs."""

    new: list[str] = field(default_factory=list)
    updated: list[str] = field(default_factory=list)
    #: There, or here, already.
    known: list[str] = field(default_factory=list)
    #: Why they were not.
    left_out: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return dict(vars(self))


def push(
    runs: Sequence[Run],
    folder: SharedFolder,
    *,
    owner: str,
    account: Callable[[Run], str | None],
    dry_run: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Transfer:
    """Add the runs, which were started here, to the folder, unless they are there as they are here.

    account: the AWS account of a run.

    Raises what `Aws` raises; what was sent by then stays, and the next push goes on from there.
    """
    done, there = Transfer(), folder.newest()
    for number, run in enumerate(runs):
        progress(number, len(runs))
        if why := _unshareable(run):
            done.left_out[run.id] = why
            continue
        run_file = _run_file(run, owner=owner, account=account(run))
        with record_files(run) as files:
            digest = _digest(run_file, files)
            if run.id in there and there[run.id].digest == digest:
                done.known.append(run.id)
                continue
            if not dry_run:
                body = _packed(run.id, run_file, files)
                if len(body) > MAX_PACKED_BYTES:
                    done.left_out[run.id] = f"its records take {len(body) / 2**20:,.0f} MiB packed"
                    continue
                key = f"{folder.prefix}{run.id}.{digest}{_SUFFIX}"
                folder.store.put_object(folder.region, folder.bucket, key, body)
        (done.updated if run.id in there else done.new).append(run.id)
    return done


def pull(
    ledger: Ledger,
    folder: SharedFolder,
    archives: Path,
    *,
    dry_run: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Transfer:
    """Add the folder's runs to the ledger, but for those that were started here.

    archives: a folder of this machine that keeps what was fetched.

    Raises what `Aws` raises, and UserError if the disk is full; what was fetched by then is kept.
    """
    done, there = Transfer(), folder.newest()
    here = {run.id: run for run in ledger.fetch_comparable(all_runs=True) if run.id in there}
    for number, copy in enumerate(there.values()):
        progress(number, len(there))
        run, archive = here.get(copy.run_id), archives / copy.name
        if run and (run.backend != IMPORT or run.directory == archive):
            done.known.append(copy.run_id)
            continue
        if not dry_run:
            try:
                if not archive.exists():
                    write_whole(archive, _fetched(folder, copy))
                imported = _read(archive, copy)
                assert imported.owner is not None and imported.submission is not None
                ledger.add_shared(
                    imported.run_id,
                    imported.summary,
                    archive,
                    owner=imported.owner,
                    account=imported.account,
                    submission_id=imported.submission,
                    price=imported.price,
                )
            except BadFile as error:
                archive.unlink(missing_ok=True)
                done.left_out[copy.run_id] = error.problem
                continue
            if run and run.directory and run.directory.parent == archives:
                run.directory.unlink(missing_ok=True)
        (done.updated if run else done.new).append(copy.run_id)
    return done


def _unshareable(run: Run) -> str | None:
    if not run.state.is_final:
        return f"it is {run.state}: push it when it has ended"
    if run.summary is None:
        return f"it is {run.state} and recorded nothing"
    if run.backend == IMPORT:
        return f"it is {run.owner}'s, not yours" if run.owner else "it was imported, not made here"
    return None


def _run_file(run: Run, *, owner: str, account: str | None) -> bytes:
    """Return the run file. Plan, attempts and the command as typed stay here: they name what is private."""
    assert run.summary is not None
    facts = {name: value for name, value in run_facts(run).items() if name not in _PRIVATE}
    shared = {
        "schema": RUN_SCHEMA,
        **facts,
        "owner": owner,
        "account": account,
        "created_at": run.created_at,
        "price": run.price.to_json() if run.price else None,
        "spec": run.spec,
        "summary": run.summary.to_json(),
    }
    return json.dumps(shared, indent=2, sort_keys=True).encode() + b"\n"


def _digest(run_file: bytes, files: Iterable[Path]) -> str:
    """Return a digest of a run's files, however they are compressed."""
    whole = hashlib.sha256(run_file)
    for file in sorted(files, key=plain_name):
        with open_record(file) as source:
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
    """Return the object. Raises BadFile for one that is too large, or gone, or that may not be read."""
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
    """Return the run in the archive. Raises BadFile unless it is the very one that its name says."""
    _check_size(archive)
    with unpacked(archive) as root:
        folder = root / copy.run_id
        try:
            run_file = Path(folder, RUN_FILE).read_bytes()
            files = [path for path in sorted(folder.iterdir()) if path.name != RUN_FILE]
            digest = _digest(run_file, files)
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            raise BadFile(archive, f"is not a shared run: {error}") from None
        if digest != copy.digest:
            raise BadFile(archive, "what is in it is not what was shared")
        try:
            found = find_runs([folder])
        except UserError as error:
            raise BadFile(archive, error.message) from None
    imported = found.runs.get(copy.run_id)
    if found.skipped or imported is None or list(found.runs) != [copy.run_id]:
        problem = found.skipped[0].problem if found.skipped else "it is of another run"
        raise BadFile(archive, problem)
    if imported.owner is None or imported.submission is None:
        raise BadFile(archive, "it does not say whose it is")
    return imported


def _check_size(archive: Path) -> None:
    """Raise BadFile for an archive that unpacks to more than a run's records can be, or is none."""
    total = 0
    try:
        with tarfile.open(archive) as file:
            for member in file:
                total += member.size
                if total > MAX_UNPACKED_BYTES:
                    raise BadFile(archive, f"unpacks to more than {MAX_UNPACKED_BYTES / 2**30:,.0f} GiB")
    except (tarfile.TarError, lzma.LZMAError, OSError, EOFError, ValueError) as error:
        raise BadFile(archive, f"cannot be unpacked: {error}") from None


def _age_key(stored: StoredObject) -> float:
    return stored.modified_at.timestamp() if stored.modified_at else 0.0

"""The ledger's file: opened, read and written by several processes at once."""

import functools
import os
import shlex
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from fastlaunch.core.errors import BadFile, UserError
from fastlaunch.core.home import ANOTHER_HOME, private

#: Marks an SQLite file as a fastlaunch ledger ("flrl").
APPLICATION_ID = 0x666C726C
#: Raise it with every change of the schema: a ledger of another version is refused.
VERSION = 13
# Large columns come last: SQLite then reads the columns before them without touching their pages.
_SCHEMA: tuple[str, ...] = (
    # `directory`: where it was typed.
    """
    CREATE TABLE sweeps (
        id TEXT NOT NULL PRIMARY KEY, created_at TEXT NOT NULL,
        arguments TEXT NOT NULL, directory TEXT NOT NULL
    )
    """,
    # `adds_to`: the submission to whose runs it adds more. `part`: what it is of its sweep. `sites`: where
    # its runs may be carried out, for attempts that come later.
    """
    CREATE TABLE submissions (
        id TEXT NOT NULL PRIMARY KEY, created_at TEXT NOT NULL, command TEXT NOT NULL,
        adds_to TEXT, sweep_id TEXT REFERENCES sweeps (id), part TEXT,
        sites TEXT
    )
    """,
    # `goes_on`: how a run that nobody follows is gone on with, if EC2 takes its spot machine.
    """
    CREATE TABLE runs (
        id TEXT NOT NULL PRIMARY KEY, submission_id TEXT NOT NULL REFERENCES submissions (id),
        created_at TEXT NOT NULL, backend TEXT NOT NULL, state TEXT NOT NULL, ending TEXT, reason TEXT,
        workload TEXT NOT NULL, recipe TEXT NOT NULL, instance TEXT, directory TEXT,
        owner TEXT, account TEXT, origin_id TEXT, goes_on TEXT,
        price TEXT, summary TEXT, spec TEXT, plan TEXT
    )
    """,
    "CREATE INDEX runs_by_submission ON runs (submission_id)",
    "CREATE INDEX runs_by_state ON runs (state)",
    "CREATE INDEX runs_that_go_on ON runs (state) WHERE goes_on IS NOT NULL",
    """
    CREATE TABLE run_events (
        run_id TEXT NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
        at TEXT NOT NULL, state TEXT NOT NULL, reason TEXT
    )
    """,
    "CREATE INDEX run_events_by_run ON run_events (run_id)",
    """
    CREATE TABLE attempts (
        id INTEGER PRIMARY KEY, token TEXT NOT NULL UNIQUE, n INTEGER NOT NULL, backend TEXT NOT NULL,
        account TEXT, partition TEXT, region TEXT, zone TEXT, instance TEXT, num_nodes INTEGER NOT NULL,
        state TEXT NOT NULL, ending TEXT, reason TEXT,
        started_at TEXT NOT NULL, launched_at TEXT, ended_at TEXT, max_minutes INTEGER,
        output TEXT, handle TEXT, schedule TEXT, absences TEXT,
        usd_per_hour REAL, sunk_usd REAL, lived_s REAL, billed_seconds REAL, billing TEXT,
        plan TEXT
    )
    """,
    "CREATE INDEX attempts_by_end ON attempts (backend, ended_at)",
    """
    CREATE TABLE attempt_runs (
        attempt_id INTEGER NOT NULL REFERENCES attempts (id) ON DELETE CASCADE,
        run_id TEXT NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
        position INTEGER NOT NULL,
        PRIMARY KEY (attempt_id, run_id)
    )
    """,
    "CREATE INDEX attempt_runs_by_run ON attempt_runs (run_id)",
    f"PRAGMA application_id = {APPLICATION_ID}",
    f"PRAGMA user_version = {VERSION}",
)
#: What to do with a ledger that cannot be used.
MOVE_ASIDE = (
    "move it aside; a new one is made, and `fastlaunch runs import` on the `runs` folder beside it "
    "brings back every run that left records"
)

#: How long to wait for another launcher's transaction, which lasts milliseconds.
BUSY_TIMEOUT_S = 30.0
_RETRY_INTERVAL_S = 0.01


class LedgerFile:
    """An open ledger file, made if there is none.

    Raises UserError for a disk that is full or read-only, and for a ledger of another version; BadFile for a
    file that is damaged or foreign. Such a file stays as it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # What SQLite puts beside the file gets its mode. Never opened here if it exists: closing it would
        # release the locks that SQLite holds in this process.
        with suppress(OSError):
            os.close(private(str(path), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC))
        with _explained(path):
            self._database = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
            try:
                self._database.execute("PRAGMA foreign_keys = ON")
                # What is committed survives a power cut: it may be all that is known of a rented machine.
                self._database.execute("PRAGMA synchronous = FULL")
                # Outside a transaction of its own a reader may see another launcher's tables half made.
                with self._within("BEGIN"):
                    is_new = self._is_new()
                if is_new:
                    with self._within("BEGIN IMMEDIATE"):
                        # Another launcher may have made the tables while this one waited for its turn.
                        for statement in _SCHEMA if self._is_new() else ():
                            self._database.execute(statement)
                # After the checks, so that a foreign file stays as it is.
                self._let_readers_go_on()
            except BaseException:
                self._database.close()
                raise

    def close(self) -> None:
        self._database.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit what is written within at its end, all or nothing. May be nested: the outermost counts."""
        if self._database.in_transaction:
            yield
            return
        # Immediate: a transaction that begins by reading may find, when it writes, that it is too late.
        with _explained(self.path), self._within("BEGIN IMMEDIATE"):
            yield

    @contextmanager
    def _within(self, begin: str) -> Iterator[None]:
        self._database.execute(begin)
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:
            # SQLite has done so by itself after some errors, such as a full disk.
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise

    def _is_new(self) -> bool:
        """Return whether the file is empty. Raises UserError or BadFile unless it is that or a ledger."""
        (version,) = self._database.execute("PRAGMA user_version").fetchone()
        (application,) = self._database.execute("PRAGMA application_id").fetchone()
        columns = _columns(self._database)
        if (application, version) == (0, 0) and not columns:
            return True
        is_whole = _own_columns() <= columns
        if (application, version) == (APPLICATION_ID, VERSION):
            if not is_whole:
                tables = ", ".join(sorted({table for table, *_ in _own_columns() - columns}))
                raise damaged(self.path, f"columns are missing in its tables {tables}")
            return False
        if is_whole and version in (0, VERSION):
            pragmas = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {VERSION}"
            repair = f"sqlite3 {shlex.quote(str(self.path))} '{pragmas}'"
            raise damaged(self.path, "its marks are gone, as in a restored dump", repair=repair)
        if application != APPLICATION_ID:
            raise BadFile(self.path, "is an SQLite file, but not a fastlaunch ledger", hint=MOVE_ASIDE)
        raise UserError(
            f"{self.path} is a ledger of another fastlaunch (version {version}; this one has {VERSION})",
            "open it with that fastlaunch, or make sure by `fastlaunch reap` that nothing of yours runs, and "
            + MOVE_ASIDE,
        )

    def _let_readers_go_on(self) -> None:
        """Switch the file, for good, to write-ahead logging: readers do not wait for a writer."""
        deadline_s = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            try:
                self._database.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                # For this statement SQLite does not wait by itself when another process makes the ledger too.
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline_s:
                    raise
                time.sleep(_RETRY_INTERVAL_S)

    def all(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        """Return the rows of the query."""
        with _explained(self.path):
            return self._database.execute(query, values).fetchall()

    def one(self, query: str, values: Sequence[Any] = ()) -> Any:
        """Return the first row of the query; None if there is none."""
        with _explained(self.path):
            return self._database.execute(query, values).fetchone()

    def rows(self, query: str, values: Sequence[Any] = ()) -> Iterator[Any]:
        """Yield the rows of the query: they are never all in memory."""
        with _explained(self.path):
            yield from self._database.execute(query, values)

    def insert(self, table: str, **columns: Any) -> int:
        """Insert a row; return its number."""
        names, marks = ", ".join(columns), ", ".join("?" * len(columns))
        cursor = self.write(f"INSERT INTO {table} ({names}) VALUES ({marks})", list(columns.values()))
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def update(self, table: str, row_id: str | int, condition: str = "1", /, **columns: Any) -> bool:
        """Set columns of the row with this id if it fits the SQL condition; return whether it did."""
        settings = ", ".join(f"{name} = ?" for name in columns)
        cursor = self.write(
            f"UPDATE {table} SET {settings} WHERE id = ? AND {condition}", [*columns.values(), row_id]
        )
        return cursor.rowcount == 1

    def write(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        """Carry out a statement, within a transaction; return its cursor."""
        with self.transaction():
            # JSON may hold halves of characters, which SQLite does not take.
            storable = [
                value.encode(errors="replace").decode() if isinstance(value, str) else value
                for value in values
            ]
            return self._database.execute(statement, storable)


def _columns(database: sqlite3.Connection) -> frozenset[tuple[Any, ...]]:
    """Return the columns of all tables: table, name, type, whether it is never NULL, place in the key."""
    query = (
        'SELECT t.name, c.name, c.type, c."notnull", c.pk FROM sqlite_master t, pragma_table_info(t.name) c'
        " WHERE t.type = 'table'"
    )
    return frozenset(database.execute(query))


@functools.cache
def _own_columns() -> frozenset[tuple[Any, ...]]:
    with closing(sqlite3.connect(":memory:")) as database:
        for statement in _SCHEMA:
            database.execute(statement)
        return _columns(database)


def damaged(path: Path, problem: str, *, repair: str | None = None) -> BadFile:
    """Return the error for a ledger that SQLite, or a reader of its rows, finds damaged.

    repair: the command that may mend it.
    """
    first = f"{repair}\n  if that does not help: " if repair else ""
    return BadFile(path, f"the ledger is damaged: {problem}", hint=first + MOVE_ASIDE)


@contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Turn an error in reading a stored value into one that names it. what: names the value."""
    try:
        yield
    except (ValueError, TypeError, UserError) as error:
        raise damaged(path, f"{what}: {error}") from None


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn SQLite's errors about the file into errors that say what to do; our own mistakes stay."""
    try:
        yield
    except sqlite3.Error as error:
        # The lowest byte of an extended code is the kind.
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        # Python finds text that is none, and gives no code; JSON that is none has no code of its own.
        is_cell = "decode" in str(error) or str(error) == "malformed JSON"
        if is_cell or code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise damaged(path, str(error)) from None
        if code in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            hint = f"free some space, or {ANOTHER_HOME}"
            raise UserError(f"{path} cannot be written: {error}", hint) from None
        if code == sqlite3.SQLITE_READONLY:
            raise UserError(f"{path} cannot be written: {error}", ANOTHER_HOME) from None
        if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
            raise UserError(f"{path} cannot be opened: {error}", ANOTHER_HOME) from None
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise UserError(
                f"{path} has been in use by another process for {BUSY_TIMEOUT_S:.0f} s",
                "end the fastlaunch that hangs, then try again",
            ) from None
        raise

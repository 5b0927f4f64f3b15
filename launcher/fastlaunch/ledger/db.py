"""The ledger's file: opened, read and written by several processes at once."""

import functools
import itertools
import os
import shlex
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from fastlaunch.core.errors import BadFile, UserError
from fastlaunch.core.home import private

#: Marks an SQLite file as a fastlaunch ledger ("flrl").
APPLICATION_ID = 0x666C726C
MIGRATIONS: tuple[tuple[str, ...], ...] = (
    (
        """
        CREATE TABLE submissions (
            id TEXT NOT NULL PRIMARY KEY,
            created_at TEXT NOT NULL,
            command TEXT NOT NULL
        )
        """,
        # `spec` and `plan` come last: SQLite then reads the columns before them without touching their pages.
        """
        CREATE TABLE runs (
            id TEXT NOT NULL PRIMARY KEY,
            submission_id TEXT NOT NULL REFERENCES submissions (id),
            created_at TEXT NOT NULL,
            backend TEXT NOT NULL,
            state TEXT NOT NULL,
            reason TEXT,
            workload TEXT NOT NULL,
            recipe TEXT NOT NULL,
            instance TEXT,
            directory TEXT,
            price TEXT,
            summary TEXT,
            spec TEXT,
            plan TEXT
        )
        """,
        "CREATE INDEX runs_by_submission ON runs (submission_id)",
        "CREATE INDEX runs_by_state ON runs (state)",
        """
        CREATE TABLE run_events (
            run_id TEXT NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
            at TEXT NOT NULL,
            state TEXT NOT NULL,
            reason TEXT
        )
        """,
        "CREATE INDEX run_events_by_run ON run_events (run_id)",
        """
        CREATE TABLE attempts (
            id INTEGER PRIMARY KEY,
            token TEXT NOT NULL UNIQUE,
            n INTEGER NOT NULL,
            backend TEXT NOT NULL,
            region TEXT,
            handle TEXT,
            state TEXT NOT NULL,
            started_at TEXT NOT NULL,
            ended_at TEXT,
            billed_seconds REAL
        )
        """,
        """
        CREATE TABLE attempt_runs (
            attempt_id INTEGER NOT NULL REFERENCES attempts (id) ON DELETE CASCADE,
            run_id TEXT NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
            position INTEGER NOT NULL,
            PRIMARY KEY (attempt_id, run_id)
        )
        """,
        "CREATE INDEX attempt_runs_by_run ON attempt_runs (run_id)",
    ),
    # Attempts that cost. `plan` is the request as it was sent; it comes last, being as large as a page.
    (
        "ALTER TABLE attempts ADD COLUMN reason TEXT",
        "ALTER TABLE attempts ADD COLUMN instance TEXT",
        "ALTER TABLE attempts ADD COLUMN zone TEXT",
        "ALTER TABLE attempts ADD COLUMN output TEXT",
        "ALTER TABLE attempts ADD COLUMN max_minutes INTEGER",
        "ALTER TABLE attempts ADD COLUMN usd_per_hour REAL",
        "ALTER TABLE attempts ADD COLUMN launched_at TEXT",
        "ALTER TABLE attempts ADD COLUMN lived_s REAL",
        "ALTER TABLE attempts ADD COLUMN billing TEXT",
        "ALTER TABLE attempts ADD COLUMN plan TEXT",
        "CREATE INDEX attempts_by_end ON attempts (backend, ended_at)",
        # Where the runs of a submission may be carried out, for attempts that come later.
        "ALTER TABLE submissions ADD COLUMN sites TEXT",
    ),
    # Several nodes, and the schedule in the account that ends a detached attempt's machines; what was paid
    # before for a capacity block, and for how long a warm pool may be kept after the job.
    (
        "ALTER TABLE attempts ADD COLUMN num_nodes INTEGER NOT NULL DEFAULT 1",
        "ALTER TABLE attempts ADD COLUMN schedule TEXT",
        "ALTER TABLE attempts ADD COLUMN sunk_usd REAL",
        "ALTER TABLE attempts ADD COLUMN idle_minutes INTEGER NOT NULL DEFAULT 0",
    ),
    # Whose account the request went to, and the looks at which AWS showed none of what it had started.
    (
        "ALTER TABLE attempts ADD COLUMN account TEXT",
        "ALTER TABLE attempts ADD COLUMN partition TEXT",
        "ALTER TABLE attempts ADD COLUMN absences TEXT",
    ),
    # How a run that nobody follows is gone on with, if EC2 takes its spot machine.
    (
        "ALTER TABLE runs ADD COLUMN goes_on TEXT",
        "CREATE INDEX runs_that_go_on ON runs (state) WHERE goes_on IS NOT NULL",
    ),
    # The submission to whose runs it adds more.
    ("ALTER TABLE submissions ADD COLUMN adds_to TEXT",),
    # Sweeps: the words of the command and its folder, to go on with it; which part of it a submission is.
    (
        """
        CREATE TABLE sweeps (
            id TEXT NOT NULL PRIMARY KEY,
            created_at TEXT NOT NULL,
            argv TEXT NOT NULL,
            directory TEXT NOT NULL
        )
        """,
        "ALTER TABLE submissions ADD COLUMN sweep_id TEXT REFERENCES sweeps (id)",
        "ALTER TABLE submissions ADD COLUMN part TEXT",
    ),
    # Its options by name.
    ("ALTER TABLE sweeps ADD COLUMN arguments TEXT",),
    # For runs that somebody else shared: who, and from which AWS account.
    (
        "ALTER TABLE runs ADD COLUMN owner TEXT",
        "ALTER TABLE runs ADD COLUMN account TEXT",
    ),
    # And its id where it was made, which is not its own here.
    ("ALTER TABLE runs ADD COLUMN origin_id TEXT",),
    # What runs and attempts ended by; until then only their reasons told.
    (
        "ALTER TABLE runs ADD COLUMN ending TEXT",
        "ALTER TABLE attempts ADD COLUMN ending TEXT",
        """
        UPDATE runs SET ending = CASE
            WHEN state = 'cancelled' AND reason LIKE 'not needed: %' THEN 'not-needed'
            WHEN state = 'cancelled' AND reason LIKE 'an earlier run of this %' THEN 'earlier-failed'
            WHEN reason LIKE '%fastlaunch cancel%' OR reason = 'cancelled before it started' THEN 'cancelled'
        END
        """,
        """
        UPDATE attempts SET ending = CASE
            WHEN reason LIKE 'stopped by fastlaunch cancel%' THEN 'cancelled'
            WHEN reason LIKE 'stopped by %' THEN 'stopped'
            WHEN reason LIKE 'EC2 took %' THEN 'reclaimed'
            WHEN reason LIKE '% is faulty: %' THEN 'faulty-gpu'
            WHEN reason LIKE '%InsufficientInstanceCapacity%' THEN 'no-capacity'
        END
        """,
    ),
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
    """An open ledger file, brought to the newest version.

    Raises UserError for a disk that is full or read-only, and for a ledger of a newer fastlaunch; BadFile for
    a file that is damaged or foreign.
    """

    def __init__(self, path: Path, *, migrations: tuple[tuple[str, ...], ...] = MIGRATIONS) -> None:
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
                    version = self._version(migrations)
                    self._check_columns(version, migrations)
                if version < len(migrations):
                    with self._within("BEGIN IMMEDIATE"):
                        self._migrate(migrations)
                # After migrating, so that a foreign file stays as it is.
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

    def _version(self, migrations: tuple[tuple[str, ...], ...]) -> int:
        (version,) = self._database.execute("PRAGMA user_version").fetchone()
        (application,) = self._database.execute("PRAGMA application_id").fetchone()
        if application != APPLICATION_ID:
            if _columns_of(migrations) <= _columns(self._database):
                raise damaged(self.path, "its mark is gone, as in a restored dump", is_whole=True)
            if version or self._database.execute("SELECT 1 FROM sqlite_master").fetchone():
                raise BadFile(self.path, "is an SQLite file, but not a fastlaunch ledger", hint=MOVE_ASIDE)
            return 0
        if version > len(migrations):
            raise UserError(
                f"{self.path} was written by a newer fastlaunch (ledger version {version}, "
                f"this one knows up to {len(migrations)})",
                "upgrade fastlaunch, or set FASTLAUNCH_HOME to another folder",
            )
        # SQLite keeps any number.
        return max(0, int(version))

    def _check_columns(self, version: int, migrations: tuple[tuple[str, ...], ...]) -> None:
        """Raise BadFile if the tables are not those of the version, as a restore may leave them."""
        columns = _columns(self._database)
        own, newest = _columns_of(migrations[:version]), _columns_of(migrations)
        if wrong := (own - columns) | ((newest - own) & columns):
            tables = ", ".join(sorted({table for table, *_ in wrong}))
            problem = f"it says version {version}, which is not that of its tables {tables}"
            raise damaged(self.path, problem, is_whole=newest <= columns)

    def _migrate(self, migrations: tuple[tuple[str, ...], ...]) -> None:
        # Looked up again: another launcher may have migrated it while this one waited for its turn.
        for statements in migrations[self._version(migrations) :]:
            for statement in statements:
                self._database.execute(statement)
        self._database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        self._database.execute(f"PRAGMA user_version = {len(migrations)}")

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
            return self._database.execute(statement, list(map(_storable, values)))


def _columns(database: sqlite3.Connection) -> frozenset[tuple[Any, ...]]:
    """Return the columns of all tables: table, name, type, whether it is never NULL, place in the key."""
    query = (
        'SELECT t.name, c.name, c.type, c."notnull", c.pk FROM sqlite_master t, pragma_table_info(t.name) c'
        " WHERE t.type = 'table'"
    )
    return frozenset(database.execute(query))


@functools.cache
def _columns_of(migrations: tuple[tuple[str, ...], ...]) -> frozenset[tuple[Any, ...]]:
    """Return the columns that the migrations make."""
    with closing(sqlite3.connect(":memory:")) as database:
        for statement in itertools.chain.from_iterable(migrations):
            database.execute(statement)
        return _columns(database)


def _storable(value: Any) -> Any:
    """Return the value without halves of characters, which JSON may hold and SQLite does not take."""
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def damaged(path: Path, problem: str, *, is_whole: bool = False) -> BadFile:
    """Return the error for a ledger that SQLite, or a reader of its rows, finds damaged.

    is_whole: it has all tables of the newest version, and only does not say so.
    """
    pragmas = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {len(MIGRATIONS)}"
    repair = f"sqlite3 {shlex.quote(str(path))} '{pragmas}'\n  if that does not help: "
    return BadFile(
        path, f"the ledger is damaged: {problem}", hint=f"{repair if is_whole else ''}{MOVE_ASIDE}"
    )


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn what SQLite says of the file into what the user can do; our own mistakes stay as they are."""
    try:
        yield
    except sqlite3.Error as error:
        # The lowest byte of an extended code is the kind.
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        elsewhere = "free some space, or set FASTLAUNCH_HOME to a folder that can be written"
        # Python finds text that is none, and gives no code; JSON that is none has no code of its own.
        is_cell = "decode" in str(error) or str(error) == "malformed JSON"
        if is_cell or code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
            raise damaged(path, str(error)) from None
        if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
            raise UserError(f"{path} cannot be written: {error}", elsewhere) from None
        if code in (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
            raise UserError(f"{path} cannot be opened: {error}", elsewhere) from None
        if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
            raise UserError(
                f"{path} has been in use by another process for {BUSY_TIMEOUT_S:.0f} s",
                "end the fastlaunch that hangs, then try again",
            ) from None
        raise

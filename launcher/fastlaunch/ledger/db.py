"""The ledger's tables, as numbered migrations: entry n takes a ledger from version n to n + 1.

A migration that was released is never edited; a change to the tables is a new entry at the end.
"""

import sqlite3
from pathlib import Path

from fastlaunch.core.errors import BadFile, UserError

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
)


def migrate(
    database: sqlite3.Connection, path: Path, migrations: tuple[tuple[str, ...], ...] = MIGRATIONS
) -> None:
    """Bring the open ledger to the newest version, all or nothing.

    Raises BadFile for an SQLite file that is no ledger, UserError for a ledger of a newer fastlaunch.
    """
    # One transaction, so that what is read is of one moment: another launcher may be making the tables.
    database.execute("BEGIN")
    try:
        if _version(database, path, migrations) == len(migrations):
            return
    finally:
        _roll_back(database)
    database.execute("BEGIN IMMEDIATE")
    try:
        # Looked up again: another launcher may have migrated it while this one waited for its turn.
        for statements in migrations[_version(database, path, migrations) :]:
            for statement in statements:
                database.execute(statement)
        database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        database.execute(f"PRAGMA user_version = {len(migrations)}")
        database.execute("COMMIT")
    except BaseException:
        _roll_back(database)
        raise


def _roll_back(database: sqlite3.Connection) -> None:
    # SQLite has done so by itself after some errors.
    if database.in_transaction:
        database.execute("ROLLBACK")


def _version(database: sqlite3.Connection, path: Path, migrations: tuple[tuple[str, ...], ...]) -> int:
    version = int(database.execute("PRAGMA user_version").fetchone()[0])
    application = database.execute("PRAGMA application_id").fetchone()[0]
    if application != APPLICATION_ID:
        if version or database.execute("SELECT 1 FROM sqlite_master").fetchone():
            raise BadFile(path, "is an SQLite file, but not a fastlaunch ledger", hint=MOVE_ASIDE)
        return 0
    if version > len(migrations):
        raise UserError(
            f"{path} was written by a newer fastlaunch (ledger version {version}, "
            f"this one knows up to {len(migrations)})",
            "upgrade fastlaunch, or set FASTLAUNCH_HOME to another folder",
        )
    return version


#: What to do with a ledger that cannot be used.
MOVE_ASIDE = (
    "move it aside; a new one is made, and `fastlaunch runs import` on the `runs` folder beside it "
    "brings back every run that left records"
)

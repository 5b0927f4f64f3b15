"""The ledger's file: opened, read and written by several processes at once."""

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fastlaunch.core.errors import BadFile, UserError
from fastlaunch.ledger.db import MIGRATIONS, MOVE_ASIDE, migrate

#: How long one launcher waits for another's transaction; theirs last milliseconds.
BUSY_TIMEOUT_S = 30.0
_RETRY_INTERVAL_S = 0.01


class LedgerFile:
    """An open ledger file, brought to the newest version.

    Raises UserError for a disk that is full or read-only, BadFile for a file that is damaged.
    """

    def __init__(self, path: Path, *, migrations: tuple[tuple[str, ...], ...] = MIGRATIONS) -> None:
        self.path = path
        with _telling(path):
            self._database = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
            try:
                self._database.execute("PRAGMA foreign_keys = ON")
                # What is committed survives a power cut: it may be all that is known of a rented machine.
                self._database.execute("PRAGMA synchronous = FULL")
                migrate(self._database, path, migrations)
                # After migrating, so that a foreign file stays as it is.
                self._let_readers_go_on()
            except BaseException:
                self._database.close()
                raise

    def close(self) -> None:
        self._database.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commits what is written within at its end, all or nothing. May be nested: the outermost counts."""
        if self._database.in_transaction:
            yield
            return
        with _telling(self.path):
            # Immediate: a transaction that begins by reading may find, when it writes, that it is too late.
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._database.execute("COMMIT")
            except BaseException:
                self._roll_back()
                raise

    def _let_readers_go_on(self) -> None:
        """Switch the file to write-ahead logging, where readers do not wait for a writer. It stays so."""
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

    def _roll_back(self) -> None:
        # SQLite has done so by itself after some errors, such as a full disk.
        if self._database.in_transaction:
            self._database.execute("ROLLBACK")

    def all(self, query: str, values: Sequence[Any] = ()) -> list[Any]:
        """Rows of the query."""
        with _telling(self.path):
            return self._database.execute(query, values).fetchall()

    def one(self, query: str, values: Sequence[Any] = ()) -> Any:
        """The first row of the query; None if there is none."""
        with _telling(self.path):
            return self._database.execute(query, values).fetchone()

    def rows(self, query: str, values: Sequence[Any] = ()) -> Iterator[Any]:
        """Rows of the query, one after another, so that they are never all in memory."""
        with _telling(self.path):
            yield from self._database.execute(query, values)

    def write(self, statement: str, values: Sequence[Any] = ()) -> sqlite3.Cursor:
        """Cursor of a statement that was carried out within a transaction."""
        assert self._database.in_transaction
        return self._database.execute(statement, values)


def damaged(path: Path, problem: str) -> BadFile:
    """The error for a ledger that SQLite, or whoever reads its rows, finds damaged."""
    return BadFile(path, f"the ledger is damaged: {problem}", hint=MOVE_ASIDE)


@contextmanager
def _telling(path: Path) -> Iterator[None]:
    """Turns what SQLite says of the file into what the user can do; our own mistakes stay as they are."""
    try:
        yield
    except sqlite3.Error as error:
        # Of an extended code, the lowest byte is the kind.
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        elsewhere = "free some space, or set FASTLAUNCH_HOME to a folder that can be written"
        # Text that is none is found by Python, which gives no code.
        if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB) or "decode" in str(error):
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

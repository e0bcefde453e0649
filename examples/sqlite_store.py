"""
A lock store in one SQLite file: locks between the processes of one machine.

    with Lock("invoices", store=SQLiteStore("sqlite:///var/lib/shop/locks")):
        ...
"""

import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

from celery_distlock import clock
from celery_distlock.errors import StoreError, StoreUnavailableError
from celery_distlock.stores import (
    Ability,
    AcquireRequest,
    Finding,
    KeyState,
    Ownership,
    Release,
    ReleaseRequest,
    RenewOutcome,
    Reply,
    Status,
    Store,
)

COLUMNS = "owner TEXT, token INTEGER, run TEXT, since REAL, until REAL"
TABLE = f"CREATE TABLE IF NOT EXISTS locks (name BLOB PRIMARY KEY, {COLUMNS})"
INDEX = "CREATE INDEX IF NOT EXISTS locks_by_end ON locks (until)"
PATIENCE = 5.0  # seconds, for the transactions of others to end
MEMORY = 3600.0  # seconds until a free key's last token is forgotten: the time is above it then


class Record(NamedTuple):
    owner: str = ""  # empty: the key is free, or its lease has ended
    token: int = 0
    run: str = ""
    since: float = 0.0
    until: float = 0.0


class SQLiteStore(Store):
    """Opens the file for each request, so that threads and forked processes may share it."""

    abilities = frozenset({Ability.SHARE})

    def __init__(self, url: str, prefix: str = "distlock") -> None:
        self._path = Path(unquote(urlsplit(url).path)).resolve()
        self._prefix = prefix
        self.address = f"sqlite://{self._path}"
        self.identity = f"{self.address}#{prefix}"

    # What it ignores of a request goes with abilities that it does not have.
    def acquire(self, request: AcquireRequest) -> Reply:
        key, owner, run = request.key, request.owner, request.run
        self.check_want(key, request.want)
        asked_at = clock.monotonic()
        with self._transaction() as db:
            now, held = time.time(), self._find(db, key)
            if not held.owner:
                token = max(held.token + 1, int(now * 1e6))
                held = Record(owner, token, run, now)
                db.execute("DELETE FROM locks WHERE until < ?", [now - MEMORY])
            elif held.owner not in {owner, f"parked:{run}"}:
                left = held.until - now
                return Reply(Status.BUSY, asked_at, held.token, held.owner, held.run, left)
            self._write(
                db, key, held._replace(owner=owner, run=run or held.run, until=now + request.lease)
            )
            return Reply(Status.GRANTED, asked_at, held.token)

    def renew(self, holds: Sequence[Ownership], timeout: float) -> list[tuple[RenewOutcome, float]]:
        asked_at = clock.monotonic()
        try:
            with self._transaction(timeout) as db:
                return [(self._renew(db, hold), asked_at) for hold in holds]
        except StoreError:
            return [(RenewOutcome.UNKNOWN, asked_at)] * len(holds)

    def _renew(self, db: sqlite3.Connection, hold: Ownership) -> RenewOutcome:
        held = self._find(db, hold.key)
        if held.owner != hold.owner:
            return RenewOutcome.HELD if held.owner else RenewOutcome.LOST
        until = max(held.until, time.time() + hold.lease)
        self._write(db, hold.key, held._replace(until=until))
        return RenewOutcome.RENEWED

    def release(self, request: ReleaseRequest) -> Release:
        with self._transaction() as db:
            now, held = time.time(), self._find(db, request.key)
            if held.owner != request.owner:
                return Release(False)
            heir, seconds = request.keep_for or ("", 0.0)
            left = Record(heir and f"parked:{heir}", held.token, heir, held.since, now + seconds)
            self._write(db, request.key, left)
            return Release(True)

    def inspect(self, key: str, timeout: float | None = None) -> KeyState:
        with self._transaction(timeout or PATIENCE) as db:
            held = self._find(db, key)
            if not held.owner:
                return KeyState("", 0, "", 0.0, 0.0, 0)
            left = held.until - time.time()
            return KeyState(held.owner, held.token, held.run, held.since, left, 0)

    def check(self) -> list[Finding]:
        with self._transaction():
            return []

    def close(self) -> None:
        """Nothing to give back: every request has closed what it opened."""

    @contextmanager
    def _transaction(self, timeout: float = PATIENCE) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self._path, timeout=timeout, isolation_level=None)) as db:
                db.execute("BEGIN IMMEDIATE")  # one process after the other, from here to the end
                db.execute(TABLE)
                db.execute(INDEX)
                yield db
                db.execute("COMMIT")
        except sqlite3.OperationalError as error:  # locked for too long, a full disk
            raise StoreUnavailableError(f"{self._path} cannot be used: {error}") from error
        except sqlite3.Error as error:
            raise StoreError(f"{self._path} is no place for locks: {error}") from error

    def _find(self, db: sqlite3.Connection, key: str) -> Record:
        columns = ", ".join(Record._fields)
        query = f"SELECT {columns} FROM locks WHERE name = ?"
        row = db.execute(query, [self._name(key)]).fetchone()
        found = Record(*row) if row else Record()
        return found if found.until > time.time() else Record(token=found.token)

    def _write(self, db: sqlite3.Connection, key: str, record: Record) -> None:
        db.execute("REPLACE INTO locks VALUES (?, ?, ?, ?, ?, ?)", [self._name(key), *record])

    def _name(self, key: str) -> bytes:
        return f"{self._prefix}:{key}".encode("utf-8", "surrogatepass")  # a key may be any text

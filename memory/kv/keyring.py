"""The keys that chunk files are encrypted with, one for each owner, and how they are destroyed.

    master key   from the environment or a file only its user can read; never in the folder of the chunks
    tenant key   HKDF-SHA256 of the master key and the tenant's secret; upkeep key: the same, without a tenant
    owner's key  random, kept wrapped (AES-256-GCM) in `keys.db`: once by the tenant key, for serving, and once by the
                 upkeep key, for the background work that knows no tenants

Invariants:
- A destroyed key is gone from the file and stays gone through a power cut once `destroy` returns, and its owner never
  gets another: what is still on its way to a tier cannot become readable again.
- Keys wrapped under another master key are left alone; they are simply not here.
Methods raise `sqlite3.Error` and `OSError` where the file fails.
"""

from __future__ import annotations

import base64
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from memory.files import write_atomic
from memory.kv.identity import frame

MASTER_VARIABLE = "KVLOOP_KV_KEY"
KEY_BYTES = 32
KEY_ID_BYTES = 8
NONCE_BYTES = 12
CACHED_KEYS = 4096
BUSY_SECONDS, NEWS_SECONDS = 5.0, 0.25
SCHEMA = """
CREATE TABLE IF NOT EXISTS keys (
    owner BLOB NOT NULL,
    master BLOB NOT NULL,
    for_tenant BLOB NOT NULL,
    for_upkeep BLOB NOT NULL,
    created REAL NOT NULL,
    PRIMARY KEY (owner, master)
);
CREATE TABLE IF NOT EXISTS destroyed (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    owner BLOB NOT NULL UNIQUE,
    at REAL NOT NULL
);
"""


class KeyringError(ValueError):
    """The master key cannot be used as it is; the message says what to do."""


class OwnerForgotten(Exception):
    """The owner's key was destroyed: nothing is stored on its behalf any more."""


def master_key(path: Path, environment: Mapping[str, str] = os.environ) -> bytes:
    """The master key: from `KVLOOP_KV_KEY`, else from the file at `path`, which is made where there is none.

    Raises `KeyringError` for a key of another form and for a file that others may read, `OSError` where the file
    cannot be read or made.
    """
    given = environment.get(MASTER_VARIABLE)
    if given:
        return _decoded(given, f"the environment's {MASTER_VARIABLE}")
    try:
        return _read_master(path)
    except FileNotFoundError:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        made = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.new")
        write_atomic(made, base64.b64encode(secrets.token_bytes(KEY_BYTES)) + b"\n", mode=0o600)
        try:
            os.link(made, path)  # of several processes that make it at once, one wins
        except FileExistsError:
            pass
        finally:
            made.unlink()
        return _read_master(path)


def _read_master(path: Path) -> bytes:
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        if status.st_mode & 0o077:
            raise KeyringError(f"others may read the keyring {path}: run `chmod 600 {path}`, and rotate it if they did")
        if status.st_uid not in (os.geteuid(), 0):
            raise KeyringError(f"the keyring {path} belongs to another user: `chown` it to the one that runs this")
        return _decoded(file.read(1024).decode("ascii", "replace"), f"the keyring {path}")


def _decoded(text: str, where: str) -> bytes:
    try:
        key = base64.b64decode(text.strip(), validate=True)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise KeyringError(f"{where} does not hold base64 of {KEY_BYTES} bytes: `openssl rand -base64 32` makes one")
    return key


@dataclass(frozen=True, slots=True)
class OwnerKey:
    """One owner's key, ready for use."""

    id: bytes
    """`KEY_ID_BYTES` that tell it from other keys of the same owner: those under another master key, or lost ones."""
    cipher: AESGCM = field(repr=False)

    @classmethod
    def of(cls, key: bytes) -> OwnerKey:
        """That of 32 secret bytes."""
        return cls(blake3(frame("kvloop key id", key)).digest(KEY_ID_BYTES), AESGCM(key))


class Keyring:
    """The keys of one folder. Thread-safe; many processes may use the file."""

    def __init__(self, path: Path, master: bytes) -> None:
        self._path = path
        self._master = master
        self._master_id = _derive(master, "kvloop keyring id")[:16]
        self._upkeep = AESGCM(_derive(master, "kvloop upkeep key"))
        self._lock = threading.RLock()
        self._keys: dict[bytes, OwnerKey] = {}
        self._seen = 0  # number of the last deletion that was noticed
        self._news: list[bytes] = []
        self._version = -1
        self._inode = -1
        self._database: sqlite3.Connection | None = None

    def close(self) -> None:
        """Forgets what it holds in memory, and closes the file."""
        with self._lock:
            self._keys.clear()
            if self._database is not None:
                self._database.close()
                self._database = None

    def to_write(self, owner: bytes, tenant_secret: str) -> OwnerKey:
        """The owner's key; one is made, durably, where there is none. Raises `OwnerForgotten`."""
        with self._lock:
            self._look()
            if owner not in self._keys:
                self._make(owner, tenant_secret)
            return self._keys[owner]

    def to_read(self, owner: bytes, tenant_secret: str) -> OwnerKey | None:
        """The owner's key for a tenant, or None where it has no key here."""
        with self._lock:
            if owner not in self._keys:
                wrapped = self._wrapped(owner)
                key = _unwrapped(self._tenant(tenant_secret), wrapped[0], owner) if wrapped else None
                if key is None:
                    return None
                self._remember(owner, key)
            return self._keys[owner]

    def for_upkeep(self, owner: bytes) -> OwnerKey | None:
        """The owner's key for background work, or None where it has no key here."""
        with self._lock:
            if owner in self._keys:
                return self._keys[owner]
            wrapped = self._wrapped(owner)
        key = _unwrapped(self._upkeep, wrapped[1], owner) if wrapped else None
        return OwnerKey.of(key) if key else None

    def destroy(self, owners: Iterable[bytes]) -> int:
        """Destroys the keys of these owners for ever, durably; returns how many owners had one."""
        wanted = list(dict.fromkeys(owners))
        with self._lock:
            for owner in wanted:
                self._keys.pop(owner, None)
            database = self._open()
            with _transaction(database):
                gone = 0
                for owner in wanted:
                    gone += database.execute("DELETE FROM keys WHERE owner = ?", (owner,)).rowcount > 0
                    database.execute("INSERT OR IGNORE INTO destroyed (owner, at) VALUES (?, ?)", (owner, time.time()))
            return gone

    def is_destroyed(self, owner: bytes) -> bool:
        """Whether the owner was forgotten, by any process."""
        with self._lock:
            return bool(self._open().execute("SELECT 1 FROM destroyed WHERE owner = ?", (owner,)).fetchall())

    def news(self) -> list[bytes]:
        """Owners forgotten since the last call, by any process; their keys leave memory. Cheap where there are none.

        Waits no longer than `NEWS_SECONDS` for who is changing the file: then they are told the next time.
        """
        if not self._lock.acquire(timeout=NEWS_SECONDS):
            return []
        try:
            with _impatient(self._open()):
                self._look()
            news, self._news = self._news, []
            return news
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                raise
            return []
        finally:
            self._lock.release()

    def _look(self) -> None:
        database = self._open()
        version = database.execute("PRAGMA data_version").fetchone()[0]
        if version == self._version:
            return
        query = "SELECT number, owner FROM destroyed WHERE number > ? ORDER BY number"
        for number, owner in database.execute(query, (self._seen,)).fetchall():
            self._seen = number
            self._news.append(owner)
            self._keys.pop(owner, None)
        self._version = version

    def _make(self, owner: bytes, tenant_secret: str) -> None:
        tenant = self._tenant(tenant_secret)
        key = secrets.token_bytes(KEY_BYTES)
        values = (owner, self._master_id, _wrapped(tenant, key, owner), _wrapped(self._upkeep, key, owner), time.time())
        database = self._open()
        with _transaction(database):
            if database.execute("SELECT 1 FROM destroyed WHERE owner = ?", (owner,)).fetchall():
                raise OwnerForgotten("the owner was forgotten; nothing more is stored for it")
            database.execute("INSERT OR IGNORE INTO keys VALUES (?, ?, ?, ?, ?)", values)
        if self.to_read(owner, tenant_secret) is None:
            raise KeyringError("a key of the keyring cannot be unwrapped: its file was changed")

    def _wrapped(self, owner: bytes) -> tuple[bytes, bytes] | None:
        query = "SELECT for_tenant, for_upkeep FROM keys WHERE owner = ? AND master = ?"
        found: list[tuple[bytes, bytes]] = self._open().execute(query, (owner, self._master_id)).fetchall()
        return found[0] if found else None

    def _tenant(self, tenant_secret: str) -> AESGCM:
        return AESGCM(_derive(self._master, "kvloop tenant key", tenant_secret))

    def _remember(self, owner: bytes, key: bytes) -> None:
        while len(self._keys) >= CACHED_KEYS:
            del self._keys[next(iter(self._keys))]
        self._keys[owner] = OwnerKey.of(key)

    def _open(self) -> sqlite3.Connection:
        """The database; opened anew where someone replaced its file or damaged it."""
        if self._database is not None and _inode(self._path) == self._inode and _is_whole(self._database):
            return self._database
        self.close()
        database = _connect(self._path)
        self._database, self._inode, self._version = database, _inode(self._path), -1
        self._seen = database.execute("SELECT COALESCE(MAX(number), 0) FROM destroyed").fetchone()[0]
        return database


def _is_whole(database: sqlite3.Connection) -> bool:
    """Whether the file is a database still, as far as its beginning shows; whoever uses it hears of other trouble."""
    try:
        database.execute("SELECT 1 FROM keys LIMIT 1").fetchall()
    except sqlite3.OperationalError:
        return True
    except sqlite3.DatabaseError:
        return False
    return True


def _connect(path: Path) -> sqlite3.Connection:
    """Opens or makes the file; read-only where it cannot be written to. A damaged one is put aside first."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError:
        return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", BUSY_SECONDS, 0, None, False, uri=True)
    for attempt in range(2):
        database = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            database.execute("PRAGMA synchronous = EXTRA")  # a rolled-back deletion would bring a key back
            database.execute("PRAGMA secure_delete = ON")
            database.executescript(SCHEMA)
            database.execute("SELECT owner, master, for_tenant, for_upkeep FROM keys LIMIT 1").fetchall()
            return database
        except sqlite3.DatabaseError as error:
            database.close()
            if attempt or isinstance(error, sqlite3.OperationalError):
                raise
            path.replace(path.with_name(f"{path.name}.damaged"))
    raise AssertionError("unreachable")


@contextmanager
def _transaction(database: sqlite3.Connection) -> Iterator[None]:
    """A write that is durable when it ends, or did not happen."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


@contextmanager
def _impatient(database: sqlite3.Connection) -> Iterator[None]:
    """Waits `NEWS_SECONDS` for others at most."""
    database.execute(f"PRAGMA busy_timeout = {int(NEWS_SECONDS * 1000)}")
    try:
        yield
    finally:
        database.execute(f"PRAGMA busy_timeout = {int(BUSY_SECONDS * 1000)}")


def _derive(master: bytes, purpose: str, of: str = "") -> bytes:
    return HKDF(algorithm=SHA256(), length=KEY_BYTES, salt=None, info=frame(purpose, of)).derive(master)


def _wrapped(by: AESGCM, key: bytes, owner: bytes) -> bytes:
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + by.encrypt(nonce, key, owner)


def _unwrapped(by: AESGCM, wrapped: bytes, owner: bytes) -> bytes | None:
    try:
        return by.decrypt(wrapped[:NONCE_BYTES], wrapped[NONCE_BYTES:], owner)
    except (InvalidTag, ValueError):
        return None


def _inode(path: Path) -> int:
    try:
        return path.stat().st_ino
    except OSError:
        return -1

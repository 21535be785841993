"""The keyring of a folder: opened where it can be, done without where it cannot.

Invariants:
- A keyring that is lost, or fails, makes misses; it raises on no serving path.
- With encryption switched on, nothing is written without a key.
"""

from __future__ import annotations

import logging
import secrets
import sqlite3
from collections.abc import Sequence

from memory.kv.chunk import NONCE_BYTES
from memory.kv.keyring import Keyring, OwnerKey, master_key
from memory.kv.settings import KVSettings
from memory.kv.tiers.folder import ChunkFolder

logger = logging.getLogger(__name__)


class FolderKeys:
    """Thread-safe. `open` it before use; until that succeeds no key is there."""

    def __init__(self, settings: KVSettings, folder: ChunkFolder) -> None:
        self._encrypts = settings.encryption
        self._master_path = settings.keyring or folder.root.with_name(f"{folder.root.name}.key")
        self._path = folder.keys
        self._keyring: Keyring | None = None

    def open(self) -> None:
        """Opens the keyring, if it is not open. Raises `OSError` where it cannot be, `KeyringError` where it must not.

        Without encryption there is a keyring too: it remembers who was forgotten, and reads older files.
        """
        if self._keyring is None:
            self._keyring = Keyring(self._path, master_key(self._master_path))

    def close(self) -> None:
        """Forgets every key."""
        if self._keyring is not None:
            self._keyring.close()

    def to_write(self, owner: bytes, tenant_secret: str) -> OwnerKey | None:
        """The key for new files of an owner; None where they are not encrypted.

        Raises `OwnerForgotten`, `KeyringError`, `OSError` and `sqlite3.Error`.
        """
        return self._ready().to_write(owner, tenant_secret) if self._encrypts else None

    def to_read(self, owner: bytes, tenant_secret: str) -> OwnerKey | None:
        """The key for files of an owner, or None. Raises `OSError` where the keyring fails."""
        if self._keyring is None:
            return None
        try:
            return self._keyring.to_read(owner, tenant_secret)
        except sqlite3.Error as error:
            raise OSError(f"the keyring {self._path} fails: {error}") from error

    def for_upkeep(self, owner: bytes) -> OwnerKey | None:
        """As `to_read`, for work that knows no tenants."""
        if self._keyring is None:
            return None
        try:
            return self._keyring.for_upkeep(owner)
        except sqlite3.Error as error:
            raise OSError(f"the keyring {self._path} fails: {error}") from error

    def nonce(self) -> bytes:
        """A nonce that was never used."""
        return secrets.token_bytes(NONCE_BYTES)

    def destroy(self, owners: Sequence[bytes]) -> int:
        """See `Keyring.destroy`. Raises `OSError` where there is no keyring to destroy them in."""
        return self._ready().destroy(owners)

    def is_destroyed(self, owner: bytes) -> bool:
        """See `Keyring.is_destroyed`."""
        return self._ready().is_destroyed(owner)

    def news(self) -> list[bytes]:
        """See `Keyring.news`; nothing where the keyring fails."""
        try:
            return self._keyring.news() if self._keyring is not None else []
        except (OSError, sqlite3.Error) as error:
            logger.warning("the keyring of KV memory fails: %s", error)
            return []

    def _ready(self) -> Keyring:
        if self._keyring is None:
            self.open()
        assert self._keyring is not None
        return self._keyring

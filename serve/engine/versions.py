"""The versions that can serve: the base and its resident adapters.

A version is never changed after it was added. It is dropped when it was retired and its last request has ended.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from serve.engine.errors import AdapterError, VersionNotFound
from serve.engine.model import Decoder


@dataclass(frozen=True)
class Version:
    """One set of weights under a name. `compute_format` says how they compute, for KV identities.

    An adapter names its `base`, and how many layers from the bottom it leaves as they are there.
    """

    name: str
    path: Path
    weights_id: str
    compute_format: str
    decoder: Decoder
    base: Version | None = None
    untouched_layers: int = 0

    def below(self, layer: int) -> Version:
        """The version whose weights this one has in all layers below `layer`: the base, or itself."""
        return self.base if self.base is not None and self.untouched_layers >= layer else self


@dataclass
class _Resident:
    version: Version
    in_flight: int = 0
    retired: bool = False


class Versions:
    """Thread-safe table of resident versions, counting the requests in flight on each."""

    def __init__(self, base: Version, max_adapters: int) -> None:
        self.base = base
        self._max_adapters = max_adapters
        self._lock = threading.Lock()
        self._loading = threading.Lock()
        self._residents = {base.name: _Resident(base)}

    def list(self) -> list[Version]:
        """Versions that take new requests, the base first."""
        with self._lock:
            return [resident.version for resident in self._residents.values() if not resident.retired]

    def find(self, name: str) -> Version | None:
        """The resident version of that name, if there is one that takes requests."""
        with self._lock:
            resident = self._residents.get(name)
            return None if resident is None or resident.retired else resident.version

    def acquire(self, name: str) -> Version:
        """Counts a request in and returns its version. Raises `VersionNotFound`."""
        with self._lock:
            resident = self._residents.get(name)
            if resident is None or resident.retired:
                raise VersionNotFound(f"no model {name!r} is loaded here: load its adapter first, or see /v1/models")
            resident.in_flight += 1
            return resident.version

    def release(self, version: Version) -> None:
        """Counts a request out; a retired version goes with its last one."""
        with self._lock:
            resident = self._residents[version.name]
            resident.in_flight -= 1
            if resident.retired and not resident.in_flight:
                del self._residents[version.name]

    def add(self, name: str, weights_id: str, load: Callable[[], Version]) -> Version:
        """Makes a version resident, loading it with `load` unless this very content is there already.

        Loads are one at a time, so that the limit holds. Raises `AdapterError`.
        """
        with self._loading:
            with self._lock:
                resident = self._residents.get(name)
                if resident is not None:
                    if resident.version.weights_id != weights_id:
                        raise AdapterError(f"the name {name!r} is in use for other weights: choose a new name")
                    resident.retired = False
                    return resident.version
                if len(self._residents) - 1 >= self._max_adapters:
                    raise AdapterError(f"{self._max_adapters} adapters are resident already: unload one first")
            version = load()
            with self._lock:
                self._residents[name] = _Resident(version)
            return version

    def retire(self, name: str) -> int:
        """Takes a version out of service and returns how many requests still run on it. Raises `VersionNotFound`."""
        with self._lock:
            resident = self._residents.get(name)
            if resident is None or resident.retired:
                raise VersionNotFound(f"no adapter {name!r} is loaded here")
            if name == self.base.name:
                raise AdapterError("the base model cannot be unloaded")
            if resident.in_flight:
                resident.retired = True
            else:
                del self._residents[name]
            return resident.in_flight

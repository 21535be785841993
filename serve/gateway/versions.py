"""Which weights answer, and how that changes without dropping a request.

Invariants: a version is loaded and proven on every worker that is up before it serves, and proven again where a worker
that restarted loads it again; the journal knows of the flip before the first request sees it, so a restarted gateway
goes on with the same version; a request ends on the version it began with; a version is unloaded only at zero in
flight, and the one served before stays for an instant rollback.
Lives in the gateway's event loop; changes are serialised by a lock, requests never wait for it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from memory.journal.journal import Journal
from serve.backends.base import ModelNotFound, Overloaded, WorkerError, WorkerRejected, WorkerUnavailable
from serve.backends.router import Router, Worker
from serve.gateway.bodies import ActivateBody
from serve.gateway.errors import ApiError, conflict, not_found, unavailable
from serve.gateway.fingerprint import Fingerprint, compare
from serve.gateway.logs import event
from serve.gateway.metrics import Metrics
from serve.gateway.threads import Threads

BASE = "base"
_PAUSE = 0.05


@dataclass(frozen=True)
class Policy:
    """How long sessions stay on their version, and whether the next may use its KV."""

    pin_seconds: float = 600.0
    reuse: bool = False
    reuse_max_kl: float = 0.0

    def may_reuse(self, stale_kl: float | None) -> bool:
        """Whether KV of the version before may be used, by what was measured of it."""
        return self.reuse and stale_kl is not None and stale_kl < self.reuse_max_kl


@dataclass
class Version:
    """Weights a worker can run under `name`. `path` is None for the base model."""

    name: str
    path: str | None
    version: str | None
    weights_id: str
    fingerprint: dict[str, Any] | None = None
    in_flight: int = 0
    proven: set[str] = field(default_factory=set)
    """URLs of the workers on which the fingerprint was seen to hold since they started."""

    @property
    def system_fingerprint(self) -> str:
        """Short form of the weights id, the same on every machine."""
        return fingerprint_of(self.weights_id)

    def record(self) -> dict[str, Any]:
        """What the journal needs to bring this version back."""
        return {
            "name": self.name, "path": self.path, "version": self.version, "weights_id": self.weights_id,
            "fingerprint": self.fingerprint,
        }  # fmt: skip


class Versions:
    """The resident versions. `restore` must have run before the first request."""

    def __init__(
        self, journal: Journal, threads: Threads, router: Router, metrics: Metrics, served_name: str,
        policy: Policy | None = None,
    ) -> None:  # fmt: skip
        self.served_name = served_name
        self.news = asyncio.Event()
        """Set at each change of the serving version and when other background work comes; its reader clears it."""
        self.flipped_at = 0.0
        """When the serving version changed last, in UTC seconds since 1970."""
        self._policy = Policy() if policy is None else policy
        self._stale_kl: float | None = None
        self.since = int(time.time())
        self._journal = journal
        self._threads = threads
        self._router = router
        self._metrics = metrics
        self._base: Version | None = None
        self.context_length: int | None = None
        self._resident: dict[str, Version] = {}
        self._serving: str = BASE
        self._previous: str | None = None
        self._draining: dict[str, Version] = {}
        self._lock = asyncio.Lock()
        self._loading: dict[str, asyncio.Lock] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def restore(self) -> None:
        """Takes up the serving state the journal holds; workers are brought along by `keep`."""
        state = await self._threads.run(self._journal.get_serving)
        if state is None:
            return
        kept = state.fingerprint or {}
        if state.path is not None:
            version = Version(state.name, state.path, state.version, state.weights_id, kept.get("fingerprint"))
            self._resident[state.name] = version
            self._serving = state.name
            self._metrics.now_serving(version.name, version.weights_id)
        self.flipped_at = float(kept.get("flipped_at") or state.since)
        self._stale_kl = kept.get("stale_kl")
        previous = kept.get("previous")
        if previous is not None:
            self._previous = previous["name"]
            if previous["path"] is not None:
                self._resident[previous["name"]] = Version(**previous)

    async def base(self) -> Version:
        """The base model, under the name the workers give it. The first time it waits for a worker, as long as a
        request may; raises `WorkerError` when none tells."""
        deadline = self._router.deadline()
        while self._base is None:
            worker = await self._router.choose(deadline=deadline)
            try:
                self._base = await self._ask_base(worker)
            except WorkerUnavailable:
                if time.monotonic() >= deadline:
                    raise
                worker.up = False  # `choose` waits for it, or for another
                await asyncio.sleep(_PAUSE)
        return self._base

    async def _ask_base(self, worker: Worker) -> Version:
        root = next(model for model in await worker.client.models() if model.parent is None)
        weights_id = root.weights_id or root.id
        self.context_length = (await worker.client.health()).context_length
        if self._serving == BASE:
            self._metrics.now_serving(root.id, weights_id)
        return Version(root.id, None, None, weights_id)

    async def resolve(self, model: str) -> Version:
        """The version a request for `model` runs on; `context_length` is known afterwards.

        Raises `ApiError`: 404 for a name nobody serves, 503 when no worker tells what it holds.
        """
        try:
            base = await self.base()
        except WorkerError as error:
            raise unavailable(f"No worker answers: {error}.") from error
        if model == self.served_name:
            model = self._serving
        if model in self._resident:
            return self._resident[model]
        if model in (BASE, base.name):
            return base
        known = ", ".join(self.names())
        raise not_found(f"The model '{model}' does not exist. Models: {known}.", "model", "model_not_found")

    def key(self, version: Version) -> str:
        """The name under which sessions remember a version: the base is `base`, however its worker calls it."""
        return BASE if version.path is None else version.name

    async def current(self) -> Version:
        """The version that serves. Raises as `resolve`."""
        return await self.resolve(self.served_name)

    def known(self) -> Version | None:
        """The version that serves, as far as it is known without asking a worker."""
        return self._base if self._serving == BASE else self._resident.get(self._serving)

    def stays(self, key: str | None, used_at: float) -> Version | None:
        """The version that a session at `key`, last used at `used_at`, stays on; None where it goes to what serves.

        It stays if it was in use when the served version changed, for a limited time, while its version is resident.
        """
        if key is None or key == self._serving or self._reused() is not None:
            return None
        held = self._policy.pin_seconds
        if used_at < self.flipped_at - held or time.time() >= self.flipped_at + held:
            return None
        return self._base if key == BASE else self._resident.get(key)

    def reuse_for(self, version: Version) -> str | None:
        """The name of a resident version whose KV may be used in this one's place; None where there is none."""
        other = self._reused() if self.key(version) == self._serving else None
        return None if other is None else other.name

    def _reused(self) -> Version | None:
        if self._previous is None or not self._policy.may_reuse(self._stale_kl):
            return None
        return self._base if self._previous == BASE else self._resident.get(self._previous)

    @contextmanager
    def pinned(self, version: Version) -> Iterator[Version]:
        """Keeps a version resident while a request runs on it."""
        version.in_flight += 1
        self._metrics.in_flight.labels(version.name).inc()
        try:
            yield version
        finally:
            version.in_flight -= 1
            self._metrics.in_flight.labels(version.name).dec()
            if version.in_flight == 0 and self._draining.get(version.name) is version:
                self._start(self._unload(version))

    async def activate(self, wanted: ActivateBody) -> dict[str, Any]:
        """Makes a version serve. Repeating it changes nothing. Raises `ApiError`: 409 when the proof fails or the name
        is taken by other weights, 503 when no worker answers; whatever served before goes on serving then."""
        async with self._lock:
            started = time.monotonic()
            try:
                target = await self._target(wanted)
                before = self._serving
                if self.key(target) != before:
                    await self._prepare(target)
                    await self._flip(target, wanted, time.monotonic() - started)
            except WorkerError as error:
                self._metrics.swaps.labels("failed").inc()
                raise unavailable(f"The version could not be loaded: {error}") from error
            except ApiError as error:
                self._metrics.swaps.labels("refused" if error.status == 409 else "failed").inc()
                raise
            return {
                "name": self._serving, "weights_id": target.weights_id, "changed": before != self._serving,
                "previous": self._previous, "system_fingerprint": target.system_fingerprint,
                "seconds": time.monotonic() - started,
            }  # fmt: skip

    async def ensure(self, worker: Worker, version: Version) -> None:
        """Returns at once where the worker holds the version, proven since it loaded it; else as `reload`."""
        if version.path is not None and worker.url not in version.proven:
            await self.reload(worker, version)

    async def reload(self, worker: Worker, version: Version) -> None:
        """Brings a version back to a worker that lost it, and proves it there again. Raises `WorkerError` when that
        fails; the worker does not keep a version that was not proven."""
        if version.path is None:
            return
        async with self._loading.setdefault(worker.url, asyncio.Lock()):
            await self._load(worker, version)
            try:
                await self._prove(worker, version)
            except ApiError as error:
                await self._unload_from(worker, version)
                raise WorkerRejected(error.status, error.message) from error

    async def keep(self, pause: float) -> None:
        """Runs for ever: looks after the workers, and reloads what one lost when it restarted."""
        boots: dict[str, str | None] = {}
        trouble: dict[str, str] = {}
        while True:
            for worker in self._router.workers:
                try:
                    health = await worker.client.health()
                    if boots.get(worker.url, "") != health.boot_id:
                        self._base = None  # it may have come back with another model
                        for version in list(self._resident.values()):
                            version.proven.discard(worker.url)
                            await self.reload(worker, version)
                        boots[worker.url] = health.boot_id
                    worker.up = True
                    await self.base()
                except WorkerUnavailable:
                    worker.up = False
                except WorkerError as error:
                    if trouble.get(worker.url) != str(error):  # said once, not every second
                        trouble[worker.url] = str(error)
                        event("reload failed", level=logging.ERROR, worker=worker.url, reason=str(error))
            await asyncio.sleep(pause)

    def status(self) -> dict[str, Any]:
        """What serves, what is resident, and how much runs on each."""
        resident = [*([self._base] if self._base else []), *self._resident.values(), *self._draining.values()]
        return {
            "served_name": self.served_name,
            "serving": self._serving,
            "previous": self._previous,
            "stale_kl": self._stale_kl,
            "reuses": None if (reused := self._reused()) is None else reused.name,
            "versions": [
                {**version.record(), "fingerprint": None, "in_flight": version.in_flight,
                 "system_fingerprint": version.system_fingerprint, "draining": version.name in self._draining}
                for version in resident
            ],
        }  # fmt: skip

    def names(self) -> list[str]:
        """Every model name a request may use now."""
        base = [] if self._base is None else [self._base.name]
        return [self.served_name, *base, *sorted(self._resident)]

    async def close(self) -> None:
        """Waits for unloads that are under way."""
        for task in list(self._tasks):
            await task

    async def _target(self, wanted: ActivateBody) -> Version:
        base = await self.base()
        if wanted.path is None:
            if wanted.name not in (BASE, base.name):
                raise conflict(f"'{wanted.name}' needs the path of its adapter folder.", "path_missing")
            return base
        manifest = await self._threads.run(_read_manifest, Path(wanted.path))
        weights_id = wanted.weights_id or _manifest_weights_id(manifest)
        if weights_id is None:
            raise conflict("No weights_id was given and the adapter has no manifest.", "weights_id_missing")
        if len(base.weights_id) == 64 and not weights_id.startswith(base.weights_id + "+"):
            raise conflict(
                f"The adapter was trained on other base weights ({weights_id[:12]}) than are served "
                f"({base.weights_id[:12]}).", "base_mismatch",
            )  # fmt: skip
        known = self._resident.get(wanted.name) or self._draining.get(wanted.name)
        if known is not None and known.weights_id != weights_id:
            raise conflict(f"'{wanted.name}' is in use for other weights; give new weights a new name.", "name_in_use")
        if wanted.name in (BASE, base.name, self.served_name):
            raise conflict(f"'{wanted.name}' cannot name an adapter.", "name_in_use")
        if known is not None:
            await self._note_path(known, wanted.path)
            return known
        version = None if wanted.version is None else str(wanted.version)
        return Version(wanted.name, wanted.path, version, weights_id, wanted.fingerprint or manifest.get("fingerprint"))

    async def _note_path(self, version: Version, path: str) -> None:
        """After a home was moved, the same weights lie elsewhere; the serving row must not point at the old place."""
        if version.path == path:
            return
        version.path = path
        if version.name == self._serving:
            before = self._resident.get(self._previous or "") or await self.base()
            state = self._state(version, before, self._previous or BASE, self.flipped_at, self._stale_kl)
            await self._threads.run(
                self._journal.set_serving, version.name, path, version.version, version.weights_id, state
            )

    async def _prepare(self, target: Version) -> None:
        """Loads and proves a version on every worker that is up; at least one must be."""
        if target.path is None:
            return
        await self._router.choose()
        new = target.name not in self._resident
        try:
            for worker in [worker for worker in self._router.workers if worker.up]:
                async with self._loading.setdefault(worker.url, asyncio.Lock()):
                    await self._load(worker, target)
                    await self._prove(worker, target)
        except (WorkerRejected, ModelNotFound) as error:
            await self._forget(target, new)
            raise conflict(f"A worker refused '{target.name}': {error}", "adapter_refused") from error
        except (ApiError, WorkerError):
            await self._forget(target, new)
            raise

    async def _load(self, worker: Worker, version: Version) -> None:
        loaded = {model.id: model for model in await worker.client.models()}
        if version.name not in loaded:
            version.proven.discard(worker.url)
            await worker.client.load_adapter(version.name, version.path or "")
            loaded = {model.id: model for model in await worker.client.models()}
            event("adapter loaded", worker=worker.url, version=version.name)
        told = loaded[version.name].weights_id if version.name in loaded else None
        if told is not None and told != version.weights_id:
            raise WorkerRejected(409, f"it holds other weights ({told[-12:]}) under the name {version.name}")

    async def _prove(self, worker: Worker, version: Version) -> None:
        if worker.url in version.proven:
            return
        if version.fingerprint is None:
            raise conflict(f"'{version.name}' has no fingerprint, so nothing proves what is served.", "no_fingerprint")
        try:
            fingerprint = Fingerprint.read(version.fingerprint)
        except ValueError as error:
            raise conflict(f"'{version.name}': {error}", "no_fingerprint") from error
        measured = await worker.client.prompt_logprobs(version.name, [probe.token_ids for probe in fingerprint.probes])
        proof = compare(fingerprint, measured)
        event("fingerprint", worker=worker.url, version=version.name, holds=proof.holds, to_adapter=proof.to_adapter,
              to_base=proof.to_base)  # fmt: skip
        if not proof.holds:
            raise conflict(
                f"The fingerprint of '{version.name}' does not hold: {proof.reason}.", "fingerprint_mismatch"
            )
        version.proven.add(worker.url)

    async def _flip(self, target: Version, wanted: ActivateBody, seconds: float) -> None:
        key, before, flipped_at = self.key(target), self._serving, time.time()
        old = self._resident.get(before) or await self.base()
        action = wanted.action or ("rollback" if key == self._previous else "promote")
        state = self._state(target, old, before, flipped_at, wanted.stale_kl)

        def write() -> None:
            self._journal.set_serving(key, target.path, target.version, target.weights_id, state)
            self._journal.add_promotion(
                who=wanted.who, action=action, from_version=before, to_version=key, reason=wanted.reason,
                report=wanted.report, seconds=seconds,
            )  # fmt: skip

        await self._threads.run(write)
        if target.path is not None:
            self._draining.pop(target.name, None)
            self._resident[target.name] = target
        self._previous, self._serving = before, key
        self.flipped_at, self._stale_kl = flipped_at, wanted.stale_kl
        self.news.set()
        self._metrics.swaps.labels("done").inc()
        self._metrics.swap_seconds.observe(seconds)
        self._metrics.now_serving(target.name, target.weights_id)
        event("now serving", version=key, before=before, action=action, who=wanted.who, seconds=round(seconds, 3))
        for version in list(self._resident.values()):
            if version.name not in (self._serving, self._previous):
                self._draining[version.name] = self._resident.pop(version.name)
                if version.in_flight == 0:
                    self._start(self._unload(version))

    def _state(
        self, version: Version, before: Version, previous: str, flipped_at: float, stale_kl: float | None
    ) -> dict[str, Any]:
        """What the serving row keeps beside the version itself."""
        return {
            "fingerprint": version.fingerprint, "previous": before.record() | {"name": previous},
            "flipped_at": flipped_at, "stale_kl": stale_kl,
        }  # fmt: skip

    async def _forget(self, target: Version, new: bool) -> None:
        if new and target.name not in self._draining:
            await self._unload_everywhere(target)

    async def _unload(self, version: Version) -> None:
        async with self._lock:
            # It may have been chosen again, or a request may have come, while the lock was held elsewhere.
            if self._draining.get(version.name) is not version or version.in_flight:
                return
            del self._draining[version.name]
            await self._unload_everywhere(version)

    async def _unload_everywhere(self, version: Version) -> None:
        version.proven.clear()
        for worker in self._router.workers:
            await self._unload_from(worker, version)

    async def _unload_from(self, worker: Worker, version: Version) -> None:
        try:
            await worker.client.unload_adapter(version.name)
        except ModelNotFound:
            return
        except (WorkerUnavailable, WorkerRejected, Overloaded) as error:
            event("unload failed", level=logging.WARNING, worker=worker.url, version=version.name, reason=str(error))

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def fingerprint_of(weights_id: str) -> str:
    """Short form of a weights id: the beginnings of the base's and the adapter's digests."""
    return "fp_" + "_".join(digest[:12] for digest in weights_id.split("+"))


def _read_manifest(folder: Path) -> dict[str, Any]:
    file = folder / "manifest.json"
    if not folder.is_dir():
        raise conflict(f"There is no adapter folder {folder}.", "adapter_missing")
    try:
        manifest = json.loads(file.read_text()) if file.exists() else {}
    except ValueError as error:
        raise conflict(f"{file} is not valid JSON: {error}", "manifest_invalid") from error
    return manifest if isinstance(manifest, dict) else {}


def _manifest_weights_id(manifest: dict[str, Any]) -> str | None:
    base, adapter = manifest.get("base_weights_id"), manifest.get("adapter_digest")
    return f"{base}+{adapter}" if isinstance(base, str) and isinstance(adapter, str) else None

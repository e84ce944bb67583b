"""``LarderL2Adapter``: LMCache's calls. No call of its controllers waits for the disk,
or raises.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import Counter
from typing import Any, Callable, Iterable, Optional, Sequence

import torch  # noqa: F401  LMCache's native module needs its libraries.
from larder_kv import logs, weights
from larder_kv.lmcache import tokens
from larder_kv.lmcache.lanes import LEFT_OUT, Lane, LoadTask, Part, Task
from larder_kv.lmcache.ledger import Entry, Ledger, Page
from larder_kv.lmcache.locks import Locks
from larder_kv.lmcache.settings import LarderL2AdapterConfig
from larder_kv.lmcache.spaces import KEY_BYTES, Layout, Place, Space, Spaces, page_key
from larder_kv.store import Queue, Region, Status, StoreError
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import KeyEntry, KeyListPage, MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2AdapterListener, L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.base import logger as lmcaches_logger
from lmcache.v1.memory_management import MemoryObj

logger = logging.getLogger(__name__)

#: Statuses of a chunk that was left out on purpose or for want of room: no failures.
_LEFT_OUT = {
    LEFT_OUT,
    Status.NO_SPACE,
    Status.BUSY,
    Status.TOO_LARGE,
    Status.UNREACHABLE,
    Status.EXHAUSTED,
    Status.NOT_ADMITTED,
    Status.BUDGET,
    Status.QUOTA,
    Status.ERASED,
    Status.KEYRING_FULL,
}

#: Reads after which the store does not have the chunk any more.
_GONE = {Status.ABSENT, Status.DAMAGED, Status.UNFINISHED}

#: Seconds between two lines about jobs that the disk holds while the adapter closes, and how long a
#: close takes at most.
_CLOSE_STEP, _CLOSE_PATIENCE = 10.0, 60.0

#: Seconds between two looks at the files of the models.
_WATCH_PERIOD = 5.0

#: The chunk that a store is created for if its size is not configured.
_CHUNK_BYTES = 64 << 20

#: Jobs of a lane that are not handed out.
_JOBS_MAX = 1 << 16

#: The part of the store that locks may hold.
_LOCKED_SHARE = 4

#: Most evicted pages that wait for the task that may yet enter them: as many as the store
#: remembers.
_EARLY_MAX = 1 << 16


def _locked_out(fallback: Any) -> Callable[[Callable], Callable]:
    """A call that never raises into LMCache's controllers: errors are logged and answered
    by ``fallback``.
    """

    def decorate(call: Callable) -> Callable:
        @functools.wraps(call)
        def safe(self: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                return call(self, *args, **kwargs)
            except Exception:
                # runbook: a call of the adapter failed
                logger.exception("larder: %s failed", call.__name__)
                return fallback

        return safe

    return decorate


class LarderL2Adapter(L2AdapterInterface):
    """Keeps LMCache's chunks in a Larder store, which evicts by itself.

    Buffers of a task belong to it until the task is handed out; no I/O writes them afterwards.
    LMCache cannot reuse the buffers of a load before, although its reservation lapses
    (:class:`~larder_kv.lmcache.lanes.LoadTask`).
    """

    def __init__(
        self, config: LarderL2AdapterConfig, l1_memory_desc: Optional[L1MemoryDesc] = None
    ) -> None:
        """Attaches to the store; creates it if there is none. Raises ``larder_kv.StoreError``,
        ValueError.
        """
        # LMCache gives each of its loggers a handler, and the root none: ours would be silent.
        logs.follow(lmcaches_logger)
        is_named = config.chunk_bytes is not None
        self._store = config.store.attach(config.chunk_bytes or _CHUNK_BYTES, must_fit=is_named)
        self._stats = self._store.stats()
        super().__init__(int(self._stats["usable_bytes"]))
        self._config = config
        self._timeout = config.store.timeout
        self._spaces = Spaces(self._store, config)
        self._locks = Locks(self._max_capacity_bytes // _LOCKED_SHARE)
        self._counts: Counter[str] = Counter()
        self._said: set[str] = set()
        self._arena, self._row_bytes = self._registered(l1_memory_desc)
        self._stores = Lane(self._store.queue(threads=2, jobs=_JOBS_MAX))
        self._lookups = Lane(self._store.queue(threads=1, jobs=_JOBS_MAX))
        self._loads = Lane(self._store.queue(threads=4, jobs=_JOBS_MAX))
        # The file has whole keys and salts in clear.
        self._ledger = Ledger(None if self._store.is_encrypted else config.ledger)
        self._ledger.load(
            self._spaces.find, lambda place, chunk_hash: ObjectKey(chunk_hash, *place)
        )
        #: The store's number of the last eviction that was read.
        self._since = self._store.evictions().next
        #: Evicted pages that are read and not struck out: the chunk may be entered yet.
        self._early: list[Page] = []
        #: Held during a deletion.
        self._deleting = threading.Lock()
        #: Pages that this adapter has deleted, and that others have.
        self._deleted, self._deleted_by_others = 0, self._stats["deleted_pages"]
        self._is_astray = False
        self._compare(is_start=True)
        self._restore_usage()
        for model, fields in config.told.items():
            tag = config.weights_tags[model]
            server, is_encrypted = f"LMCache, model {model}", self._store.is_encrypted
            weights.compare(self._store.path, server, tag, fields, is_encrypted)
        self._is_closed = False
        self._closer: Optional[threading.Thread] = None
        self._stop = threading.Event()
        self._keeper = threading.Thread(target=self._keep, name="larder-lmcache", daemon=True)
        self._keeper.start()
        if config.model_dirs:
            watch = threading.Thread(target=self._watch, name="larder-weights", daemon=True)
            watch.start()
        logger.info(
            "larder: %d chunks of this configuration are known, arena: %s",
            len(self._ledger),
            "none" if self._arena is None else self._arena.described,
        )

    def _registered(self, memory: Optional[L1MemoryDesc]) -> tuple[Optional[Region], int]:
        if memory is None or not memory.size:
            return None, 0
        # LMCache unmaps it after `close`, while the process goes on.
        region = self._store.register(memory.ptr, memory.size, memory.align_bytes)
        region.move_to_huge_pages()
        return region, memory.align_bytes

    def _restore_usage(self) -> None:
        """Usage begins with the content of the store. LMCache's base class counts from zero."""
        with self._usage_lock:
            self._bytes_by_cache_salt.update(self._ledger.usage())
            self._total_bytes_used = sum(self._bytes_by_cache_salt.values())

    # --- eventfds, which the store's queues signal

    def get_store_event_fd(self) -> int:
        return self._stores.event_fd()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.event_fd()

    def get_load_event_fd(self) -> int:
        return self._loads.event_fd()

    # --- stores

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        return self._transfer(self._stores, Task, keys, objects, self._put)

    def _put(self, queue: Queue, part: _Buffers) -> int:
        wait = self._timeout / 2
        return queue.submit_put(
            part.space.namespace,
            b"".join(part.keys),
            part.region,
            part.rows,
            chain=False,
            timeout=self._timeout,
            wait=wait,
            recall=True,
        )

    @_locked_out({})
    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        return {task.id: self._stored(task) for task in self._stores.finished()}

    def _stored(self, task: Task) -> L2StoreResult:
        try:
            counts = Counter(task.statuses)
            self._count("store", counts)
            for kind in (Status.OK, Status.DUPLICATE):
                kept = [
                    (task.keys[slot], task.spaces[slot])
                    for slot, status in enumerate(task.statuses)
                    if status == kind
                ]
                self._notify_stored(self._ledger.add(kept, is_written=kind == Status.OK))
            written = sum(
                task.spaces[slot].bytes
                for slot, status in enumerate(task.statuses)
                if status == Status.OK
            )
            return L2StoreResult(
                all(status <= Status.DUPLICATE or status in _LEFT_OUT for status in counts), written
            )
        except Exception:
            logger.exception("larder: the result of a store is not known")
            return L2StoreResult(False, 0)

    # --- lookups and locks

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> int:
        parts: dict[int, Part] = {}
        left_out: list[int] = []
        try:
            layouts = {
                group: Layout.of(desc.shapes, desc.dtypes)
                for group, desc in group_layout_descs.items()
            }
            spaces = {
                place: self._candidates(place, layouts.get(place.group))
                for place in set(map(Place.of, keys))
            }
            for slot, key in enumerate(keys):
                for space in spaces[Place.of(key)]:
                    part = parts.setdefault(id(space), Part(space))
                    part.slots.append(slot)
                    part.keys.append(page_key(key.chunk_hash))
                if not spaces[Place.of(key)]:
                    left_out.append(slot)
        except Exception:
            logger.exception("larder: a lookup of %d keys failed", len(keys))
            parts.clear()

        def ask(queue: Queue, part: Part) -> int:
            return queue.submit_lookup(
                part.space.namespace, b"".join(part.keys), timeout=self._timeout
            )

        mark = self._ledger.mark()
        return self._lookups.submit(
            lambda number: Task(number, keys, mark, left_out=left_out), list(parts.values()), ask
        )

    def _candidates(self, place: Place, layout: Optional[Layout]) -> list[Space]:
        """Where a chunk may be: LMCache's layouts are hints, which it may leave out."""
        if layout is None:
            return self._spaces.at(place)
        space = self._spaces.find(place, layout)
        return [] if space is None else [space]

    @_locked_out(None)
    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        task = self._lookups.take(task_id)
        if task is None:
            return None
        bitmap = Bitmap(len(task.keys))
        found, absent = [], []
        for slot, (key, status) in enumerate(zip(task.keys, task.statuses)):
            if status == Status.ABSENT:
                absent.append(key)
            elif status == Status.OK:
                found.append((key, task.spaces[slot]))
                if self._locks.grant(key, task.spaces[slot].bytes):
                    bitmap.set(slot)
                else:
                    self._say(
                        "locks",
                        "locks hold a quarter of the store: further ones are not granted "
                        "(counted in `locks_refused`)",
                    )
        self._count("lookup", Counter(task.statuses))
        tokens.count_asked(task)
        self._notify_stored(self._ledger.add(found))
        self._notify_gone(self._ledger.remove(absent, before=task.mark))
        return bitmap

    @_locked_out(None)
    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        self._locks.release(keys)

    # --- loads

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> int:
        return self._transfer(self._loads, LoadTask, keys, objects, self._get)

    def _get(self, queue: Queue, part: _Buffers) -> int:
        return queue.submit_get(
            part.space.namespace, b"".join(part.keys), part.region, part.rows, timeout=self._timeout
        )

    @_locked_out(None)
    def query_load_result(self, task_id: int) -> Bitmap | None:
        task = self._loads.take(task_id)
        if task is None:
            return None
        bitmap = Bitmap(len(task.keys))
        loaded, gone = [], []
        for slot, (key, status) in enumerate(zip(task.keys, task.statuses)):
            if status == Status.OK:
                bitmap.set(slot)
                loaded.append((key, task.spaces[slot]))
            elif status in _GONE:
                gone.append(key)
        self._count("load", Counter(task.statuses))
        tokens.count_served(task, self._config.store.prefill_rate)
        self._notify_stored(self._ledger.add(loaded))
        self._notify_gone(self._ledger.remove(gone, before=task.mark))
        if loaded:
            self._notify_keys_accessed([key for key, _ in loaded])
        return bitmap

    # --- both

    def _transfer(
        self,
        lane: Lane,
        kind: type[Task],
        keys: Sequence[ObjectKey],
        objects: Sequence[MemoryObj],
        call: Callable[[Queue, Any], int],
    ) -> int:
        parts: dict[tuple[int, bool], _Buffers] = {}
        left_out: list[int] = []
        try:
            for slot, (key, memory) in enumerate(zip(keys, objects, strict=True)):
                space = self._spaces.find(Place.of(key), Layout.of_object(memory))
                if space is None:
                    left_out.append(slot)
                    continue
                row = self._row(memory)
                part = parts.setdefault((id(space), row is None), _Buffers(space, self._arena))
                part.slots.append(slot)
                part.keys.append(page_key(key.chunk_hash))
                part.rows.append(memory.data_ptr if row is None else row)
            for (_, is_outside), part in parts.items():
                if is_outside:
                    self._enclose(part, [objects[slot] for slot in part.slots])
        except Exception:
            logger.exception("larder: a task of %d keys failed", len(keys))
            parts.clear()
        mark = self._ledger.mark()
        return lane.submit(
            lambda number: kind(number, keys, mark, objects, left_out), list(parts.values()), call
        )

    def _row(self, memory: MemoryObj) -> Optional[int]:
        """The row of a buffer in the arena; None for a buffer elsewhere."""
        if self._arena is None:
            return None
        offset = memory.data_ptr - self._arena.address
        row, rest = divmod(offset, self._row_bytes)
        is_inside = row >= 0 and not rest and offset + memory.get_size() <= self._arena.length
        return row if is_inside else None

    def _enclose(self, part: _Buffers, objects: list[MemoryObj]) -> None:
        """Gives buffers outside of the arena a region, from the first to the last. Bytes between
        them are not touched.
        """
        first = min(part.rows)
        part.region = self._store.register(
            first, max(part.rows) + part.space.bytes - first, 1, owner=objects
        )
        part.rows = [address - first for address in part.rows]

    def _count(self, verb: str, statuses: Counter[int]) -> None:
        for status, count in statuses.items():
            name = "left_out" if status == LEFT_OUT else Status(status).name.lower()
            self._counts[f"{verb}_{name}"] += count
            is_expected = status in (Status.OK, Status.DUPLICATE, Status.ABSENT, LEFT_OUT)
            if not is_expected:
                self._say(
                    f"{verb} {name}",
                    f"a chunk of a {verb} ended as {name} (counted in `{verb}_{name}`)",
                )

    def _say(self, topic: str, line: str) -> None:
        """A line for each topic, once."""
        if topic not in self._said:
            self._said.add(topic)
            logger.warning("larder: %s", line)

    # --- the content of the store

    def register_listener(self, listener: L2AdapterListener) -> None:
        """Registers a listener, and names to it the chunks that are stored already."""
        super().register_listener(listener)
        entries = self._ledger.after(-1)
        if entries:
            listener.on_l2_keys_stored(
                [entry.key for entry in entries], [entry.space.bytes for entry in entries]
            )

    def _notify_stored(self, entries: list[Entry]) -> None:
        if entries:
            self._notify_keys_stored(
                [entry.key for entry in entries], [entry.space.bytes for entry in entries]
            )

    def _notify_gone(self, entries: list[Entry]) -> None:
        if entries:
            self._notify_keys_deleted(
                [entry.key for entry in entries], [entry.space.bytes for entry in entries]
            )

    def delete(self, keys: list[ObjectKey]) -> None:
        """Deletes chunks durably. May wait for the disk."""
        try:
            with self._deleting:
                for space, some in self._by_space(keys):
                    names = b"".join(page_key(key.chunk_hash) for key in some)
                    self._deleted += space.namespace.delete(names)
        except StoreError as error:
            logger.warning("larder: %d chunks were not deleted: %s", len(keys), error)
            return
        self._notify_gone(self._ledger.remove(keys))

    def _by_space(self, keys: Iterable[ObjectKey]) -> list[tuple[Space, list[ObjectKey]]]:
        """The keys in each space where they may be."""
        found: dict[int, tuple[Space, list[ObjectKey]]] = {}
        for key in keys:
            for space in self._spaces.at(Place.of(key)):
                found.setdefault(id(space), (space, []))[1].append(key)
        return list(found.values())

    def list_l2_keys(
        self, model_name: Optional[str] = None, page_size: int = 500, cursor: Optional[str] = None
    ) -> KeyListPage:
        if page_size <= 0:
            raise ValueError(f"page_size is {page_size}; it must be above 0")
        try:
            number = -1 if cursor is None else int(cursor)
        except ValueError:
            raise ValueError(f"malformed cursor {cursor!r}") from None
        entries = self._ledger.after(number)
        if model_name is not None:
            entries = [entry for entry in entries if entry.key.model_name == model_name]
        page = entries[:page_size]
        return KeyListPage(
            tuple(KeyEntry(entry.key.to_encoded_object_key(), entry.space.bytes) for entry in page),
            str(page[-1].number) if len(entries) > page_size else None,
        )

    def report_status(self) -> dict:
        """Counters and sizes. Of the store, as they were a second ago."""
        stats, part = self._stats, self._store.part
        lanes = {"store": self._stores, "lookup": self._lookups, "load": self._loads}
        return {
            "is_healthy": part in ("owner", "client") and not stats.get("read_only_volumes"),
            "type": type(self).__name__,
            "path": self._store.path,
            "part": part,
            "stored_object_count": len(self._ledger),
            "used_bytes": sum(self._ledger.usage().values()),
            "max_capacity_bytes": self._max_capacity_bytes,
            "locked_key_count": len(self._locks),
            "locked_bytes": self._locks.bytes,
            "locks_refused": self._locks.refused,
            "locks_lapsed": self._locks.lapsed,
            "pending_jobs": {name: lane.pending for name, lane in lanes.items()},
            "stuck_jobs": sum(lane.stuck for lane in lanes.values()),
            "refused_jobs": sum(lane.refused for lane in lanes.values()),
            "chunks": dict(self._counts),
            "store": {name: stats[name] for name in _SHOWN if name in stats},
        }

    # --- the thread for work that may wait

    def _keep(self) -> None:
        """Renews leases, follows evictions, writes the ledger."""
        period = min(1.0, self._config.store.lease / 3)
        due, has_failed = 0.0, False
        while not self._stop.is_set():
            try:
                if self._ledger.changed.wait(period):
                    self._ledger.write()
                if (now := time.monotonic()) < due:
                    continue
                due = now + period
                self._renew()
                self._measure()
                self._follow()
            except StoreError:
                # The owner may be gone; a later turn shows it.
                logger.debug("larder: the store was not looked after", exc_info=True)
                self._stop.wait(period)
            except Exception:
                level = logging.DEBUG if has_failed else logging.ERROR
                has_failed = True
                logger.log(level, "larder: a fault of larder_kv.lmcache, logged once", exc_info=True)
                self._stop.wait(period)

    def _watch(self) -> None:
        """Looks for models with changed files, in a thread of its own: their file system may hang,
        and no other thread waits for it.
        """
        while not self._stop.wait(_WATCH_PERIOD):
            for model in self._config.find_changed():
                self._spaces.drop(model)
                logger.warning(
                    "larder: the files of model %s are not those of the start: its chunks are not "
                    "kept any more. Restart LMCache's server, whose own memory has KV of the "
                    "weights before",
                    model,
                )

    def _renew(self) -> None:
        for space, keys in self._by_space(self._locks.keys()):
            space.namespace.contains([page_key(key.chunk_hash) for key in keys])

    def _measure(self) -> None:
        """Reads the store's statistics. Deletions by others are not among the evictions."""
        if not self._deleting.acquire(blocking=False):
            return
        try:
            self._stats = self._store.stats()
            by_others = self._stats.get("deleted_pages", 0) - self._deleted
        finally:
            self._deleting.release()
        if by_others != self._deleted_by_others:
            self._deleted_by_others, self._is_astray = by_others, True

    def _follow(self) -> None:
        """Strikes out the chunks that the store has evicted since the last call."""
        # A chunk that is evicted before its task is handed out is entered afterwards.
        is_quiet = all(lane.is_quiet for lane in (self._stores, self._lookups, self._loads))
        known = len(self._early)
        while True:
            found = self._store.evictions(self._since)
            self._is_astray |= found.missed
            self._since = found.next
            self._early += found.pages
            if not found.pages:
                break
        entries, early = [], []
        for at, page in enumerate(self._early):
            if (entry := self._ledger.of(page)) is not None:
                entries.append(entry)
            elif at >= known or not is_quiet:
                early.append(page)
        self._is_astray |= not self._strike(entries)
        # Not before: after an error the next call goes on with the same pages.
        self._early = early[-_EARLY_MAX:]
        if self._is_astray:
            self._compare()

    def _compare(self, is_start: bool = False) -> None:
        """Strikes out chunks that the store does not have, by its own lists: after a start, and if
        its evictions are unknown. At a start it also enters chunks that were stored just before a
        kill. Raises ``larder_kv.StoreError``.
        """
        is_done = True
        held = {row.digest: row.pages for row in self._store.usage()}
        for digest, entries in self._ledger.by_space().items():
            count = held.get(digest, 0)
            if count == len(entries):
                continue
            listed = self._listed(entries[0].space) if count else set()
            # A page that moves during the listing may be left out.
            missing = [entry for entry in entries if entry.page[1] not in listed]
            is_done &= self._strike(missing)
            # Shorter hashes cannot be derived from the store's keys.
            if is_start and all(len(entry.key.chunk_hash) == KEY_BYTES for entry in entries):
                space = entries[0].space
                self._ledger.add((ObjectKey(key, *space.place), space) for key in listed)
        self._is_astray = not is_done

    @staticmethod
    def _listed(space: Space) -> set[bytes]:
        found: set[bytes] = set()
        cursor: Optional[int] = None
        while True:
            some, cursor = space.namespace.list(cursor)
            found.update(some[at : at + KEY_BYTES] for at in range(0, len(some), KEY_BYTES))
            if cursor is None:
                return found

    def _strike(self, entries: Iterable[Entry]) -> bool:
        """Strikes out entries of chunks that the store does not have: a chunk may have been stored
        again. False without an owner, since only an owner answers.
        """
        is_answered = True
        mark = self._ledger.mark()
        by_space: dict[int, tuple[Space, list[Entry]]] = {}
        for entry in entries:
            by_space.setdefault(id(entry.space), (entry.space, []))[1].append(entry)
        for space, some in by_space.values():
            statuses = space.namespace.contains([entry.page[1] for entry in some])
            gone = [one.key for one, status in zip(some, statuses) if status == Status.ABSENT]
            self._notify_gone(self._ledger.remove(gone, before=mark))
            is_answered &= Status.CLOSED not in statuses
        return is_answered

    # --- the end

    def close(self) -> None:
        """Leaves the store. A second call does nothing. LMCache may unmap its arena afterwards.

        Raises RuntimeError if that takes longer than a minute, for all steps together: then the
        disk may still hold a transfer, and the arena must stay mapped. The close goes on in the
        background, and another call waits for it again.
        """
        if self._is_closed:
            return
        if self._closer is None or not self._closer.is_alive():
            self._closer = threading.Thread(target=self._leave, name="larder-close", daemon=True)
            self._closer.start()
        self._wait_for(self._closer)
        if not self._is_closed:
            raise RuntimeError("larder: the adapter was not closed: the log says why")

    def _wait_for(self, closer: threading.Thread) -> None:
        """Waits for the end of a close. Raises RuntimeError when the patience is over."""
        until = time.monotonic() + _CLOSE_PATIENCE
        while (left := until - time.monotonic()) > 0:
            closer.join(min(left, _CLOSE_STEP))
            if not closer.is_alive():
                return
            pending = sum(lane.pending for lane in (self._lookups, self._stores, self._loads))
            logger.warning("larder: the end waits for the disk: %d jobs are on it", pending)
        raise RuntimeError(
            f"larder: the disk has not answered for {_CLOSE_PATIENCE:.0f} s: LMCache's memory must "
            "stay mapped. End the server, and the next start recovers the store; or close again "
            "once the disk answers"
        )

    @_locked_out(None)
    def _leave(self) -> None:
        """Ends all tasks, then closes the store. Each step may wait for the disk without end."""
        self._stop.set()
        self._ledger.changed.set()
        for lane in (self._lookups, self._stores, self._loads):
            lane.close()
        self._keeper.join()
        try:
            self._store.close()
        except StoreError as error:
            logger.warning(
                "larder: the store was not closed cleanly, and is recovered at the next start: %s",
                error,
            )
        # Stores without a call for their result are finished nevertheless.
        self.pop_completed_store_tasks()
        self._ledger.close()
        self._is_closed = True
        logger.info(
            "larder: closed: %s",
            ", ".join(f"{name} {count}" for name, count in sorted(self._counts.items())),
        )


class _Buffers(Part):
    """Keys of a task with their buffers."""

    def __init__(self, space: Space, region: Optional[Region]) -> None:
        super().__init__(space)
        self.region = region


#: Fields of the store in the status.
_SHOWN = (
    "pages",
    "live_bytes",
    "usable_bytes",
    "capacity_bytes",
    "pages_hit",
    "pages_missed",
    "evicted_pages",
    "damaged_pages",
    "failed_pages",
    "refused_pages",
    "bytes_put",
    "bytes_written",
    "bytes_read",
    "disk",
    "read_only_volumes",
)

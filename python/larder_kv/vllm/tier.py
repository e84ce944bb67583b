"""``LarderTier``: a Larder store below vLLM's CPU tier.

vLLM calls a tier from its scheduler's step: a call that waits delays every request, and a call that
raises ends the engine. So no call here waits for the disk or for another process, and none raises
once the tier is made; errors are counted, logged, and answered by a miss or a failed job.

Lookups: the store's owner answers from memory in the call. A client answers RETRY and sends one
message to the owner at the end of the step.

Rows: vLLM reuses a row of its CPU tier as soon as the row's job is reported. A job is therefore
reported when the store's queue reports it: no I/O touches its rows after that. A load that has not
started by its deadline fails then; a load in the kernel is reported once the kernel is done.

Salts: with ``salt_is_tenant`` a request with a salt has namespaces of its own, which another thread
makes. Until then its lookups wait, for a short time, and its stores are held.

Failed keys: after a failed load its key is a miss for that request until the request ends.
Otherwise vLLM would load it again and again.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, Optional

from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from larder_kv import logs
from larder_kv.store import Status
from larder_kv.config import Config
from larder_kv.vllm import metrics
from larder_kv.vllm.chains import Chain
from larder_kv.vllm.jobs import Job, Jobs, result
from larder_kv.vllm.keeper import Keeper
from larder_kv.vllm.link import Link
from larder_kv.vllm.lookups import Lookups
from larder_kv.vllm.outcomes import KEYLESS, LEFT_OUT, LOADS, STORES
from larder_kv.vllm.packing import UNTOLD, Packing
from larder_kv.vllm.salts import Salt, Salts
from larder_kv.vllm.settings import Settings
from larder_kv.vllm.spaces import GROUP_BYTES, KEY_BYTES, Marks, Space
from larder_kv.vllm.tokens import Tokens

logger = logging.getLogger(__name__)

_HIT, _MISS, _RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY

#: In the `kv_transfer_params` of a request: for how many seconds its chunks are pinned.
PIN_KEY = "larder_pin_s"

#: Longest wait of a store for room, in seconds.
_ROOM_PATIENCE = 1.0

#: Seconds between two log lines of a kind.
_SELDOM, _ONCE = 60.0, float("inf")

#: Seconds that a shutdown waits for the disk. Then vLLM keeps its CPU tier's memory.
_CLOSE_PATIENCE = 16.0


class _Piece(NamedTuple):
    """Chunks that the store takes as one job."""

    space: Space
    keys: list[bytes]
    rows: list[int]
    is_chain: bool
    #: The store's key of the chunk before the first; None if unknown.
    before: Optional[bytes] = None
    depth: int = 0


class _Held(NamedTuple):
    """A store whose namespaces are being made."""

    job: Job
    metadata: TransferJob
    #: Then it fails.
    due: float


class LarderTier(SecondaryTierManager):
    """Keeps vLLM's chunks in a Larder store."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        **config: Any,
    ) -> None:
        """Attaches to the store that the tier's configuration names.

        Raises ValueError for a wrong configuration, and with ``on_error`` ``"fail"``
        ``larder_kv.StoreError`` for a store that cannot be attached.
        """
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        # vLLM sets up its own logger alone: without this, our lines below a warning are lost.
        logs.follow(logging.getLogger("vllm"))
        settings = Settings.parse(config)
        self.locality = Locality(settings.locality) if settings.locality is not None else None
        parsed = Config.parse(settings.store)
        self._timeout: float = parsed.timeout
        self._is_fresh_after_reset = settings.is_fresh_after_reset
        self._meters = metrics.Meters(tier_type)
        self._jobs = Jobs()
        self._lookups = Lookups()
        self._tokens = Tokens(parsed.prefill_rate)
        #: None if salts are no tenants.
        self._salts = Salts(self._refuse) if settings.salt_is_tenant else None
        self._held: list[_Held] = []
        #: By request: keys of failed loads.
        self._failed: dict[str, set[bytes]] = {}
        #: By request that has not ended: its chunks' places.
        self._chains: dict[str, Chain] = {}
        #: Bytes of vLLM's block hashes, once a chunk was stored.
        self._hash_bytes = KEY_BYTES
        #: Stored chunks without an event yet; None without events.
        self._stored: Optional[list[bytes]] = None
        if settings.has_events and offloading_spec.kv_events_config.enable_kv_cache_events:
            self._stored = []
        elif settings.has_events:
            logger.warning(
                "larder: `enable_kv_events` has no effect: vLLM's KV events are off (`--kv-events-config`)"
            )
        self._said: dict[str, float] = {}
        self._is_shut = False

        def attach(marks: Marks) -> Link:
            return Link(settings, offloading_spec.config, primary_kv_view, marks)

        self._weights = settings.server.weights
        marks = Marks(None if settings.server.tells_packing else UNTOLD)
        self._keeper = Keeper(self._meters, attach, marks, parsed.retry, self._stored is not None)
        link = None
        try:
            link = attach(marks)
            if link.spaces:
                logger.info("larder: weights %s, %s", self._weights, link.describe())
        except ValueError:
            raise
        except Exception as error:
            if parsed.on_error == "fail":
                raise
            logger.warning(
                "larder: serving without a store: all lookups miss until there is one; tried again in %.0f s "
                '(`on_error` is "miss"): %s',
                parsed.retry,
                error,
            )
        self._keeper.start(link)

    def tell_packing(self, packing: Packing) -> None:
        """How pages are packed. The connector calls it before the first request, inside a
        ``MultiConnector`` after the first step, and with the same packing after each sleep.
        """
        try:
            if packing == self._keeper.marks.packing:
                return
            self._lookups.clear()
            self._keeper.tell_packing(packing)
            link = self._keeper.link
            if link is not None and link.spaces:
                logger.info("larder: weights %s, %s", self._weights, link.describe())
        except Exception:
            self._caught("tell_packing")

    # --- errors

    def _caught(self, call: str) -> None:
        """Counts an exception, and logs it seldom."""
        self._meters.add("errors")
        if self._is_due(f"errors of {call}"):
            logger.exception("larder: %s failed; it counts as a miss or a failed job", call)

    def _is_due(self, kind: str, pause: float = _SELDOM) -> bool:
        now = time.monotonic()
        if now - self._said.get(kind, -_ONCE) < pause:
            return False
        self._said[kind] = now
        return True

    # --- tenants

    def tell_salt(self, request: str, salt: Optional[str]) -> None:
        """The salt of a request. The connector calls it before ``on_new_request``."""
        if self._salts is not None:
            self._salts.tell(request, salt)

    def _refuse(self, why: str) -> None:
        if self._is_due(f"salts: {why}", _ONCE):
            logger.warning(
                "larder: %s: their chunks are not stored (counted in `keyless_chunks`; logged once)",
                why,
            )

    def _spaces(self, link: Link, request: ReqContext) -> Optional[Mapping[bytes, Space]]:
        """The namespaces of a request's tenant. None while they are made; empty if none of its
        chunks is kept.
        """
        salt = None if self._salts is None else request.get_state(Salt)
        if salt is None:
            return link.spaces
        if salt.name is None or not link.spaces:
            return {}
        found = link.salts.get(salt.name)
        if found is None:
            self._keeper.want(salt.name)
        return found

    # --- lookups

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """HIT or MISS at once from the store's owner; from a client RETRY first."""
        try:
            if self._failed and key in self._failed.get(req_context.req_id, ()):
                return _MISS
            link = self._keeper.link
            spaces = self._spaces(link, req_context) if link is not None else {}
            if spaces is None:
                return self._unmade(req_context)
            space = spaces.get(key[-GROUP_BYTES:])
            if space is None:
                return _MISS
            name = key[:-GROUP_BYTES]
            if len(name) != KEY_BYTES or space.mask:
                name = space.name(key)
            found = space.namespace.holds(name)
            if found is None:
                found = self._lookups.answer(key, req_context.req_id, space)
                if found is None:
                    return _RETRY
            if self._tokens.counts(spaces, key[-GROUP_BYTES:]):
                self._tokens.answered(key, found, req_context, space)
            return _HIT if found else _MISS
        except Exception:
            self._caught("lookup")
            return _MISS

    def _unmade(self, request: ReqContext) -> LookupResult:
        """The answer while the namespaces are made."""
        salt = request.get_state(Salt)
        if salt is not None and salt.waits():
            return _RETRY
        self._lookups.late += 1
        return _MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Sends the lookups of the step."""
        try:
            link = self._keeper.link
            if link is not None:
                self._lookups.send(link.queue)
                for request in context.new_req_ids:
                    self._tokens.scheduled(request)
            if self._lookups.late:
                self._meters.add("late_lookups", self._lookups.late)
                self._lookups.late = 0
                if self._is_due("late lookups"):
                    logger.warning(
                        "larder: the store's owner did not answer lookups in time: they are misses"
                    )
        except Exception:
            self._caught("on_schedule_end")

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Marks chunks as used, so that they stay. Dropped if the store is busy."""
        try:
            link = self._keeper.link
            spaces = self._spaces(link, req_context) if link is not None else None
            if link is None or not spaces:
                return
            by_group: dict[bytes, list[bytes]] = {}
            for key in keys:
                by_group.setdefault(key[-GROUP_BYTES:], []).append(key)
            for group, some in by_group.items():
                if (space := spaces.get(group)) is not None:
                    link.queue.submit_touch(space.namespace, space.names(some))
            self._pin(list(keys), spaces, self._pin_until(req_context))
        except Exception:
            self._caught("touch")

    # --- pins

    def _pin_until(self, request: ReqContext) -> Optional[float]:
        """Until when a request asks for its chunks to be pinned."""
        seconds = (request.kv_transfer_params or {}).get(PIN_KEY)
        if seconds is None:
            return None
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds > 0:
            if self._is_due("pin"):
                logger.warning(
                    "larder: larder_pin_s of a request is not a number of seconds: %r", seconds
                )
            return None
        return time.time() + seconds

    def _pin(
        self, keys: list[bytes], spaces: Mapping[bytes, Space], until: Optional[float]
    ) -> None:
        """Pins stored chunks of a request. Dropped if the store is busy."""
        link = self._keeper.link
        if until is None or link is None or not keys:
            return
        for group in {key[-GROUP_BYTES:] for key in keys}:
            mine = [key for key in keys if key[-GROUP_BYTES:] == group]
            if (space := spaces.get(group)) is not None:
                link.queue.submit_pin(space.namespace, space.names(mine), until)

    # --- transfers

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Queues the chunks of a job to be stored."""
        self._submit(job_metadata, is_load=False)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Queues the chunks of a job to be loaded."""
        self._submit(job_metadata, is_load=True)

    def _submit(self, metadata: TransferJob, is_load: bool) -> None:
        # In the order of their chains.
        self._submit_held()
        job = Job(metadata.job_id, metadata.req_context.req_id, is_load)
        try:
            job.pin_until = self._pin_until(metadata.req_context)
            link = self._keeper.link
            if not is_load and link is not None:
                if self._spaces(link, metadata.req_context) is None:
                    due = time.monotonic() + self._timeout
                    self._held.append(_Held(job, metadata, due))
                    return
        except Exception:
            self._caught("submit")
        self._submit_now(job, metadata)

    def _submit_held(self, is_over: bool = False) -> None:
        """Submits the stores whose namespaces are made. The others fail when their time, or all,
        is over.
        """
        held, self._held = self._held, []
        link, now = self._keeper.link, time.monotonic()
        for one in held:
            is_late = is_over or link is None or now >= one.due
            if is_late or self._spaces(link, one.metadata.req_context) is not None:
                self._submit_now(one.job, one.metadata)
            else:
                self._held.append(one)

    def _submit_now(self, job: Job, metadata: TransferJob) -> None:
        is_load = job.is_load
        keys: list[bytes] = []
        pieces: list[_Piece] = []
        try:
            keys = list(metadata.keys)
            rows = metadata.chunk_ids.tolist()
            if len(rows) != len(keys):
                raise ValueError(f"{len(rows)} rows for {len(keys)} keys")
            link = self._keeper.link
            if link is None:
                raise RuntimeError("no store is attached")
            spaces = self._spaces(link, metadata.req_context)
            if spaces is None:
                raise RuntimeError("no namespaces for the salt of its request yet")
            job.spaces = spaces
            if not is_load and self._is_refused(metadata.req_context):
                job.good += keys
                self._meters.add("keyless_chunks", len(keys))
            else:
                pieces = self._pieces(spaces, keys, rows, metadata.req_context, is_load)
            for piece in pieces:
                self._jobs.add(self._queued(link, piece, is_load), job, piece.keys)
        except Exception as error:
            # Jobs that were not accepted have failed.
            left = [key for piece in pieces[job.left - 1 :] for key in piece.keys] or keys
            job.bad += left
            job.is_broken = True
            self._meters.add("failed_chunks", len(left))
            if self._is_due(f"not queued {is_load}"):
                logger.warning(
                    "larder: %d chunks were not queued to be %s: %s",
                    len(left),
                    _verb(is_load),
                    error,
                )
        self._jobs.end(job)

    def _is_refused(self, request: ReqContext) -> bool:
        """Whether no chunk of a request is kept because of its salt."""
        salt = None if self._salts is None else request.get_state(Salt)
        return salt is not None and salt.name is None

    def _pieces(
        self,
        spaces: Mapping[bytes, Space],
        keys: list[bytes],
        rows: list[int],
        request: ReqContext,
        is_load: bool,
    ) -> list[_Piece]:
        """The chunks of a job by cache group and, of those to be stored, by run of a prefix."""
        groups = {key[-GROUP_BYTES:] for key in keys}
        pieces = []
        for group in groups:
            mine, held = keys, rows
            if len(groups) > 1:
                chosen = [at for at, key in enumerate(keys) if key[-GROUP_BYTES:] == group]
                mine, held = [keys[at] for at in chosen], [rows[at] for at in chosen]
            space = spaces.get(group)
            if space is None:
                raise ValueError("no namespace for its cache group")
            chain = self._chains.get(request.req_id)
            if is_load or not space.is_chain:
                pieces.append(_Piece(space, mine, held, is_chain=False))
                if space.is_chain and chain is not None:
                    chain.note(group, mine[-1], request)
                continue
            runs = (chain or Chain()).runs(group, space.chunk_tokens, mine, held, request)
            for run in runs:
                before = None if run.before is None else space.name(run.before)
                pieces.append(_Piece(space, run.keys, run.rows, True, before, run.depth))
        return pieces

    def _queued(self, link: Link, piece: _Piece, is_load: bool) -> int:
        """Hands a piece to the store's queue. Returns its number."""
        namespace, names = piece.space.namespace, piece.space.names(piece.keys)
        if is_load:
            return link.queue.submit_get(
                namespace, names, link.region, piece.rows, timeout=self._timeout
            )
        return link.queue.submit_put(
            namespace,
            names,
            link.region,
            piece.rows,
            before=piece.before,
            depth=piece.depth,
            chain=piece.is_chain,
            timeout=self._timeout,
            wait=min(self._timeout, _ROOM_PATIENCE),
        )

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """The jobs that have finished since the last call: each once."""
        try:
            if self._held:
                self._submit_held()
            link = self._keeper.link
            if link is not None:
                for number, statuses, seconds, transferred in link.queue.poll():
                    self._take(number, statuses, seconds, transferred)
        except Exception:
            self._caught("get_finished_jobs")
        return [self._report(job) for job in self._jobs.reported()]

    def _take(self, number: int, statuses: bytes, seconds: float, transferred: int) -> None:
        """Notes a finished job of the store."""
        if self._lookups.take(number, statuses, Status.DEADLINE):
            return
        part = self._jobs.take(number)
        if part is None:
            return
        job, keys = part
        try:
            job.seconds = max(job.seconds, seconds)
            job.bytes += transferred
            self._sort(job, keys, statuses)
            stored = zip(keys, statuses)
            good = [key for key, status in stored if status <= Status.DUPLICATE]
            self._pin(good, job.spaces, job.pin_until)
        except Exception:
            self._caught("get_finished_jobs")
        finally:
            # Each key is in one of the two, also after an error.
            known = set(job.good).union(job.bad)
            job.bad += [key for key in keys if key not in known]
            self._jobs.end(job)

    def _sort(self, job: Job, keys: list[bytes], statuses: bytes) -> None:
        names = LOADS if job.is_load else STORES
        if job.is_load:
            self._count_served(job, keys, statuses)
        bad: Counter[int] = Counter()
        for status, count in Counter(statuses).items():
            self._meters.add(names.get(Status(status), "failed_chunks"), count)
            if status > Status.DUPLICATE:
                bad[status] = count
        if not bad:
            job.good += keys
        else:
            for key, status in zip(keys, statuses):
                (job.good if status <= Status.DUPLICATE or status in LEFT_OUT else job.bad).append(
                    key
                )
            kinds = ", ".join(
                f"{count} {Status(status).name.lower()}" for status, count in bad.items()
            )
            pause = _ONCE if set(bad) <= set(KEYLESS) else _SELDOM
            if self._is_due(f"not {_verb(job.is_load)}: {sorted(bad)}", pause):
                logger.warning(
                    "larder: of %d chunks were not %s: %s", len(keys), _verb(job.is_load), kinds
                )
        if self._stored is not None and not job.is_load:
            self._hash_bytes = len(keys[0]) - GROUP_BYTES
            job.stored += [key for key, status in zip(keys, statuses) if status == Status.OK]

    def _count_served(self, job: Job, keys: list[bytes], statuses: bytes) -> None:
        group = keys[0][-GROUP_BYTES:]
        if self._tokens.counts(job.spaces, group):
            self._tokens.served(statuses.count(Status.OK), job.spaces[group])

    def _report(self, job: Job) -> JobResult:
        try:
            if job.is_load and job.bad and job.request in self._chains:
                self._failed.setdefault(job.request, set()).update(job.bad)
            if self._stored is not None:
                self._stored += job.stored
            return result(job, JobResult)
        except Exception:
            self._caught("get_finished_jobs")
            return JobResult(job_id=job.id, success=False)

    # --- requests

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Chunks are offered as they are computed."""
        try:
            self._chains[req_context.req_id] = Chain()
            salt = None if self._salts is None else self._salts.begin(req_context)
            link = self._keeper.link
            # They are made while the request waits to be scheduled.
            if salt is not None and link is not None:
                self._spaces(link, req_context)
        except Exception:
            self._caught("on_new_request")
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forgets a request: pages that failed for it may be tried for the next."""
        try:
            # Inside a `MultiConnector` it is unknown before the first step.
            if self._keeper.marks.packing is None and self._is_due("packing"):
                logger.warning(
                    "larder: vLLM's workers have not said how pages are packed: nothing is found "
                    "and nothing is stored until they do"
                )
            self._chains.pop(req_context.req_id, None)
            self._failed.pop(req_context.req_id, None)
            self._lookups.forget(req_context.req_id)
            self._tokens.ended(req_context.req_id)
        except Exception:
            self._caught("on_request_finished")

    # --- resets and the end

    def drain_jobs(self) -> None:
        """Waits until no job touches vLLM's CPU tier. vLLM calls it for each reset of its caches
        alone.

        A reset may mean that the weights have changed: with ``on_reset`` ``"fresh"`` this server
        no longer finds its earlier chunks. They are not deleted: other servers may still have the
        old weights.
        """
        try:
            self._meters.add("resets")
            self._submit_held(is_over=True)
            link = self._keeper.link
            if link is not None:
                while not link.queue.drain(timeout=10.0):
                    logger.warning(
                        "larder: a reset waits for the disk: %d jobs are on it", link.queue.pending
                    )
            if not self._is_fresh_after_reset:
                return
            self._lookups.clear()
            logger.warning(
                "larder: vLLM's caches were reset: chunks from before are not found, "
                "and later ones by this server alone until it is restarted "
                '(`on_reset` is "fresh"; "keep" is for resets without new weights)'
            )
            self._keeper.reset()
        except Exception:
            self._caught("drain_jobs")

    def shutdown(self) -> None:
        """Leaves the store. A second call does nothing.

        Raises RuntimeError while the disk still holds a transfer: then vLLM keeps the memory
        mapped.
        """
        if self._is_shut:
            return
        link = self._keeper.stop()
        self._submit_held(is_over=True)
        if link is not None:
            logger.info(
                "larder: %s",
                ", ".join(
                    f"{name} {count}" for name, count in self._meters.totals.items() if count
                ),
            )
            if not _close(link):
                raise RuntimeError(
                    f"larder: the disk has not answered for {_CLOSE_PATIENCE:.0f} s: vLLM's CPU tier stays mapped"
                )
            for done in link.queue.poll():
                self._take(*done)
        self._jobs.abandon()
        self._is_shut, self._keeper.link = True, None

    # --- metrics and events

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]:
        """vLLM's definitions of this tier's metrics."""
        return metrics.definitions()

    def get_stats(self) -> Any:
        """The counts since the last call."""
        try:
            return self._meters.take()
        except Exception:
            self._caught("get_stats")
            return None

    def take_events(self) -> Iterable[OffloadingEvent]:
        """The chunks that were stored and evicted since the last call."""
        try:
            return self._events() if self._stored is not None else ()
        except Exception:
            self._caught("take_events")
            return ()

    def _events(self) -> list[OffloadingEvent]:
        stored, self._stored = self._stored, []
        # A chunk in both was evicted, then stored again.
        both = ((self._evicted(), True), (stored, False))
        return [
            OffloadingEvent(
                keys=keys, medium=self.medium, removed=is_removed, locality=self.locality
            )
            for keys, is_removed in both
            if keys
        ]

    def _evicted(self) -> list[bytes]:
        """vLLM's keys of the evicted pages of this server's namespaces."""
        found, link = self._keeper.evicted, self._keeper.link
        if not found or link is None:
            return []
        groups = link.by_digest()
        keys = []
        for _ in range(len(found)):
            digest, key = found.popleft()
            if (known := groups.get(digest)) is not None:
                group, space = known
                keys.append(space.masked(key)[: self._hash_bytes] + group)
        return keys


def _verb(is_load: bool) -> str:
    return "loaded" if is_load else "stored"


def _close(link: Link) -> bool:
    """Closes the store, within the patience. Whether that is done."""
    import threading

    def close() -> None:
        try:
            link.store.close()
        except Exception as error:
            logger.warning(
                "larder: the store was not closed cleanly, and is recovered at the next start: %s",
                error,
            )

    thread = threading.Thread(target=close, name="larder-close", daemon=True)
    thread.start()
    thread.join(timeout=_CLOSE_PATIENCE)
    return not thread.is_alive()

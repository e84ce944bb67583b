"""The threads for work that may wait: attaching later, new namespaces, statistics, evictions. vLLM's
step waits for none of it. Namespaces of salts have a thread of their own: requests wait for them.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from typing import Any, Callable, Optional

from larder_kv.store import Status, StoreError
from larder_kv.vllm.link import Link
from larder_kv.vllm.metrics import Meters
from larder_kv.vllm.packing import Packing
from larder_kv.vllm.spaces import Marks

logger = logging.getLogger(__name__)

#: Seconds between two looks at the store.
_PERIOD = 1.0

#: Longest pause between two attempts to attach, in seconds.
_RETRY_MAX = 600.0

#: Most evicted keys that wait for vLLM to take them.
_EVICTED_MAX = 1 << 16


class Keeper:
    """Maintains the link of a tier.

    Invariant: a published link has the namespaces of the marks, or none.
    """

    def __init__(
        self,
        meters: Meters,
        attach: Callable[[Marks], Link],
        marks: Marks,
        retry: float,
        has_events: bool,
    ) -> None:
        """``attach`` makes a link with namespaces of the marks; it may raise. ``retry`` is the
        pause after that, in seconds.
        """
        self._meters = meters
        self._attach = attach
        self._pause = retry
        self._left = retry
        self._has_events = has_events
        self._has_failed = False
        self._has_refused = False
        self._since: Optional[int] = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="larder-vllm", daemon=True)
        #: Salts that want namespaces; None ends the thread.
        self._asks: queue.SimpleQueue[Optional[str]] = queue.SimpleQueue()
        #: Those that are in the queue, or are being made.
        self._asked: set[str] = set()
        self._maker = threading.Thread(target=self._make_salts, name="larder-salts", daemon=True)
        #: Guards the invariant. Never held during a call of the store.
        self._lock = threading.Lock()
        #: The marks of the namespaces.
        self.marks = marks
        #: The attached store.
        self.link: Optional[Link] = None
        #: (group's namespace digest, page key) of evicted pages.
        self.evicted: deque[tuple[bytes, bytes]] = deque(maxlen=_EVICTED_MAX)

    def start(self, link: Optional[Link]) -> None:
        self.link = link
        self._thread.start()
        self._maker.start()

    def want(self, salt: str) -> None:
        """Has the namespaces of a salt made."""
        if salt not in self._asked:
            self._asked.add(salt)
            self._asks.put(salt)

    def reset(self) -> None:
        """Earlier chunks are no longer found."""
        self._mark(self.marks.after_reset())

    def tell_packing(self, packing: Packing) -> None:
        """Chunks of another packing are not found."""
        self._mark(self.marks._replace(packing=packing))

    def _mark(self, marks: Marks) -> None:
        """The new namespaces are made at once if the store answers, else later."""
        with self._lock:
            self.marks = marks
            link = self.link
            if link is None:
                return
            link.spaces, link.salts, link.marks = {}, {}, None
        try:
            self._renew(link)
        except Exception as error:
            logger.warning(
                "larder: the store gives no new namespaces yet: all lookups miss until then: %s",
                error,
            )

    def _renew(self, link: Link) -> None:
        """Gives a link its namespaces, unless they change meanwhile. Raises
        ``larder_kv.StoreError``.
        """
        marks = self.marks
        spaces = link.own_spaces(marks)
        with self._lock:
            if marks == self.marks:
                link.spaces, link.marks = spaces, marks

    def _make_salts(self) -> None:
        while (salt := self._asks.get()) is not None:
            try:
                self._make_salt(salt)
            except Exception as error:
                if not self._has_refused:
                    self._has_refused = True
                    logger.warning(
                        "larder: the store gives no namespaces for a cache salt: its chunks are neither found nor stored meanwhile "
                        "(logged once): %s",
                        error,
                    )
                # It is asked for again with each lookup.
                self._stop.wait(_PERIOD)
            finally:
                self._asked.discard(salt)

    def _make_salt(self, salt: str) -> None:
        """Raises ``larder_kv.StoreError``."""
        link, marks = self.link, self.marks
        if link is None or link.marks != marks:
            return
        spaces = link.spaces_of(marks, salt)
        with self._lock:
            if marks == self.marks:
                link.salts[salt] = spaces

    def stop(self) -> Optional[Link]:
        """Ends the threads. Returns the link. A link that is made later is closed."""
        self._stop.set()
        self._asks.put(None)
        for thread in (self._thread, self._maker):
            if thread.is_alive():
                thread.join(timeout=5.0)
        with self._lock:
            return self.link

    def _run(self) -> None:
        while not self._stop.wait(_PERIOD):
            try:
                self._look()
            except StoreError:
                # The store's owner may be gone; the next look shows it.
                logger.debug("larder: the store was not looked at", exc_info=True)
            except Exception:
                level = logging.DEBUG if self._has_failed else logging.ERROR
                self._has_failed = True
                logger.log(level, "larder: a fault of larder_kv.vllm, logged once", exc_info=True)

    def _look(self) -> None:
        link = self.link
        if link is None:
            self._meters.measured({"attached": 0})
            self._attach_later()
            return
        if not link.spaces:
            self._renew(link)
        self._measure(link)
        if self._has_events:
            self._follow(link)

    def _attach_later(self) -> None:
        self._left -= _PERIOD
        if self._left > 0:
            return
        try:
            link = self._attach(self.marks)
        except Exception as error:
            self._pause = min(self._pause * 2, _RETRY_MAX)
            self._left = self._pause
            logger.warning(
                "larder: still without a store, tried again in %.0f s: %s", self._pause, error
            )
            return
        with self._lock:
            if link.marks != self.marks:
                link.spaces = {}
            if not self._stop.is_set():
                self.link = link
        if self.link is not link:
            link.store.close()
            return
        logger.info("larder: attached: %s", link.describe())

    def _measure(self, link: Link) -> None:
        stats = link.store.stats()
        gauges: dict[str, Any] = {
            "attached": 1,
            "owner": int(link.store.part == "owner"),
            "stuck_jobs": link.queue.stuck,
        }
        names = {
            "capacity_bytes": "capacity_bytes",
            "live_bytes": "used_bytes",
            "pages": "pages",
            "evicted_pages": "evicted_pages",
        }
        gauges |= {ours: stats[theirs] for theirs, ours in names.items() if theirs in stats}
        self._meters.measured(gauges)

    def _follow(self, link: Link) -> None:
        if self._since is None:
            self._since = link.store.evictions().next
            return
        while not self._stop.is_set():
            found = link.store.evictions(self._since)
            self._since = found.next
            if found.missed:
                logger.warning(
                    "larder: more pages were evicted than are remembered: some KV events are missing"
                )
            self.evicted.extend(_gone(link, found.pages))
            if not found.pages:
                break


def _gone(link: Link, pages: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The evicted pages of this server that were not stored again meanwhile."""
    spaces = link.by_digest()
    by_digest: dict[bytes, list[bytes]] = {}
    for digest, name in pages:
        if digest in spaces:
            by_digest.setdefault(digest, []).append(name)
    gone = []
    for digest, names in by_digest.items():
        statuses = spaces[digest][1].namespace.contains(names)
        gone += [(digest, name) for name, status in zip(names, statuses) if status != Status.OK]
    return gone

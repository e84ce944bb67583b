"""Chunks that LMCache is about to read: the store's leases on them are renewed until they are
unlocked.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Callable, Iterable

#: Seconds after which a lock lapses if it is not returned: the time of LMCache's locks on its L1.
TTL = 300.0


class Locks:
    """Locks with a count a key. Together they hold at most ``limit`` bytes; beyond that none is
    granted.
    """

    def __init__(
        self, limit: int, ttl: float = TTL, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = limit
        self._ttl = ttl
        self._now = now
        self._guard = threading.Lock()
        #: By key: count, bytes, when it lapses.
        self._held: dict[Any, tuple[int, int, float]] = {}
        self._bytes = 0
        #: Locks that were not granted.
        self.refused = 0
        #: Locks that lapsed.
        self.lapsed = 0

    @property
    def bytes(self) -> int:
        """Of the locked chunks."""
        return self._bytes

    def __len__(self) -> int:
        return len(self._held)

    def grant(self, key: Any, size: int) -> bool:
        """Locks a key once more. False: over the limit."""
        until = self._now() + self._ttl
        with self._guard:
            count, held, _ = self._held.get(key, (0, 0, 0.0))
            if not count:
                if self._bytes + size > self._limit:
                    self.refused += 1
                    return False
                held = size
                self._bytes += size
            self._held[key] = (count + 1, held, until)
            return True

    def release(self, keys: Iterable[Any]) -> None:
        """Returns one lock of each key; keys without one are ignored."""
        with self._guard:
            for key in keys:
                if (entry := self._held.get(key)) is None:
                    continue
                count, size, until = entry
                if count > 1:
                    self._held[key] = (count - 1, size, until)
                else:
                    self._drop(key, size)

    def keys(self) -> list[Any]:
        """The locked keys, without the lapsed ones."""
        now = self._now()
        with self._guard:
            for key, (_, size, until) in list(self._held.items()):
                if until <= now:
                    self._drop(key, size)
                    self.lapsed += 1
            return list(self._held)

    def _drop(self, key: Any, size: int) -> None:
        del self._held[key]
        self._bytes -= size

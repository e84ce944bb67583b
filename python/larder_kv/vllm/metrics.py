"""Counters and gauges, in vLLM's form."""

from __future__ import annotations

from typing import Any, Optional

_PREFIX = "vllm:kv_offload_larder_"

#: Counters by name: each grows by one a chunk unless its text states another unit.
COUNTERS = {
    "loaded_chunks": "Chunks read from the store, each verified by its checksum.",
    "absent_chunks": "Chunks that a lookup found and a load did not: evicted or deleted in between.",
    "damaged_chunks": "Chunks whose bytes failed their checksum: not served, and forgotten.",
    "late_chunks": "Chunks not loaded or not stored since the disk did not answer by the deadline (`timeout`).",
    "failed_chunks": "Chunks not loaded or not stored for another reason, such as an error of the disk.",
    "stored_chunks": "Chunks written to the store.",
    "duplicate_chunks": "Chunks that were to be stored and were in the store already.",
    "refused_chunks": "Chunks not stored since the store had no room for them.",
    "keyless_chunks": "Chunks not stored since their tenant has no key and gets none: see docs/security.md.",
    "late_lookups": "Keys that the store's owner did not answer for in time: misses.",
    "resets": "Resets of vLLM's caches.",
    "errors": "Calls of vLLM that failed inside the tier and were answered by a miss or a failed job.",
}

#: Measurements by name.
GAUGES = {
    "attached": "1 while a store is attached, else 0.",
    "owner": "1 while this process is the store's owner, 0 while it is a client.",
    "capacity_bytes": "Bytes of the store.",
    "used_bytes": "Bytes of all pages in the store, of every engine and model.",
    "pages": "Pages in the store, of every engine and model.",
    "evicted_pages": "Pages evicted since the store was opened by its owner.",
    "stuck_jobs": "Jobs that the disk holds beyond their deadline, now.",
}


def definitions() -> dict[str, Any]:
    """vLLM's definitions of all metrics."""
    from vllm.v1.kv_offload.base import OffloadingCounterMetadata, OffloadingGaugeMetadata

    made: dict[str, Any] = {}
    for name, documentation in COUNTERS.items():
        made[_PREFIX + name] = OffloadingCounterMetadata(
            documentation=documentation, labelnames=("tier",)
        )
    for name, documentation in GAUGES.items():
        made[_PREFIX + name] = OffloadingGaugeMetadata(
            documentation=documentation, labelnames=("tier",)
        )
    return made


class Meters:
    """Counts since the last report, and totals."""

    def __init__(self, tier: str) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
            OffloadingConnectorStats,
        )

        self._stats = OffloadingConnectorStats
        self._label = (tier,)
        self._new: dict[str, int] = {}
        self._gauges: Optional[dict[str, float]] = None
        #: Counts since the tier was made.
        self.totals: dict[str, int] = dict.fromkeys(COUNTERS, 0)

    def add(self, name: str, count: int = 1) -> None:
        if count:
            self.totals[name] += count
            self._new[name] = self._new.get(name, 0) + count

    def measured(self, gauges: dict[str, float]) -> None:
        """The last measurements of the keeper's thread."""
        self._gauges = gauges

    def take(self) -> Any:
        """vLLM's statistics since the last call; None if there are none."""
        new, gauges = self._new, self._gauges
        if not new and gauges is None:
            return None
        self._new, self._gauges = {}, None
        stats = self._stats()
        for name, count in new.items():
            stats.increase_counter(_PREFIX + name, count, self._label)
        for name, value in (gauges or {}).items():
            stats.set_gauge(_PREFIX + name, value, self._label)
        return stats

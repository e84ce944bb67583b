"""Statuses of chunks: how a load or a store of each ended."""

from __future__ import annotations

from larder_kv.store import Status

#: By status of a page: the counter that it counts for, of a load and of a store.
LOADS = {
    Status.OK: "loaded_chunks",
    Status.ABSENT: "absent_chunks",
    Status.DAMAGED: "damaged_chunks",
    Status.UNFINISHED: "damaged_chunks",
    Status.DEADLINE: "late_chunks",
    Status.HUNG: "late_chunks",
}
STORES = {
    Status.OK: "stored_chunks",
    Status.DUPLICATE: "duplicate_chunks",
    Status.DEADLINE: "late_chunks",
    Status.NO_SPACE: "refused_chunks",
    Status.BUSY: "refused_chunks",
    Status.UNREACHABLE: "refused_chunks",
    Status.READ_ONLY_SERVICE: "refused_chunks",
    Status.NOT_ADMITTED: "refused_chunks",
    Status.BUDGET: "refused_chunks",
    Status.QUOTA: "refused_chunks",
    Status.ERASED: "keyless_chunks",
    Status.KEYRING_FULL: "keyless_chunks",
}

#: Not stored since the tenant has no key.
KEYLESS = (Status.ERASED, Status.KEYRING_FULL)

#: Not stored on purpose: fewer stores would not help.
LEFT_OUT = (
    Status.UNREACHABLE,
    Status.NOT_ADMITTED,
    Status.BUDGET,
    Status.QUOTA,
    *KEYLESS,
)

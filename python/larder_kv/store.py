"""A page store on NVMe, for any engine: :class:`Store`, :class:`Namespace`, :class:`Region`,
:class:`Queue`.

See docs/python.md. Signatures and their documentation are in ``_larder.pyi``.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from larder_kv._larder import Namespace, Queue, QueueFull, Region, Store, StoreError

__all__ = [
    "Done",
    "Evictions",
    "Hint",
    "Listing",
    "Namespace",
    "PageClass",
    "Queue",
    "QueueFull",
    "Region",
    "Status",
    "Store",
    "StoreError",
    "Usage",
]


class Status(enum.IntEnum):
    """The status of a page. A call for n pages answers n bytes, one status each. 0 and 1 are
    success.
    """

    #: Read and verified, stored, found, or leased.
    OK = 0
    #: put: stored before. The stored bytes stay.
    DUPLICATE = 1
    #: Not in the store.
    ABSENT = 2
    #: get: the bytes failed their checksum.
    DAMAGED = 3
    #: get: the last crash cut the write of the page short.
    UNFINISHED = 4
    #: get: the device failed the read.
    READ_ERROR = 5
    #: get, jobs: the timeout passed first.
    DEADLINE = 6
    #: get: the volume has not answered for longer than ``hang_limit``.
    HUNG = 7
    #: get: a read-only store read it while its segment was reused.
    STALE = 8
    #: get, put: the sizes differ from the parts of the namespace.
    WRONG_SHAPE = 9
    #: The store or the queue is closed, or the store has no owner at present.
    CLOSED = 10
    #: put: no room at present. ``wait`` waits for it.
    NO_SPACE = 11
    #: put: too many bytes of writes are in flight. ``wait`` waits for their end.
    BUSY = 12
    #: put: the page fits no segment of the store.
    TOO_LARGE = 13
    #: put: the page and all pages before it are more than the store keeps.
    UNREACHABLE = 14
    #: put: the store was opened with ``read_only``.
    READ_ONLY = 15
    #: put: the serial numbers since the open are used up. Open the store again.
    EXHAUSTED = 16
    #: put: the devices of all volumes refuse writes.
    READ_ONLY_SERVICE = 17
    #: put: the device failed the write.
    WRITE_FAILED = 18
    #: put: the device failed the sync.
    SYNC_FAILED = 19
    #: lease: the leased pages take their quarter of the store. pin: pinned pages and the minima of
    #: quotas take their half of it.
    REFUSED = 20
    #: put: a reason without a name in this release.
    OTHER = 21
    #: put: the owner's policy of admission does not take the page, or a page before it.
    NOT_ADMITTED = 22
    #: put: the owner's budget of writes does not take the page, or a page before it.
    BUDGET = 23
    #: put: the group of the namespace is at the maximum of its quota, and none of its pages can go.
    QUOTA = 24
    #: put: the tenant of the namespace is being erased. A later put stores the page.
    ERASED = 25
    #: put: the tenant of the namespace is new, and the keyring of the store takes no more tenants.
    KEYRING_FULL = 26


class PageClass(enum.IntEnum):
    """The kind of the tokens of a page. 32 to 63 are free for engines."""

    UNKNOWN = 0
    SYSTEM = 1
    USER = 2
    ANSWER = 3
    TOOL = 4
    REASONING = 5
    SPECULATIVE = 6
    DOCUMENT = 7


class Hint(NamedTuple):
    """A caller's knowledge of pages, for the policies of a store's owner. Kept in memory, not on
    disk.
    """

    #: A :class:`PageClass`, or 32 to 63.
    page_class: int = PageClass.UNKNOWN
    #: 0 to 15.
    priority: int = 0
    #: The name of a session. The store keeps 22 bits of its hash.
    session: bytes | None = None


class Done(NamedTuple):
    """A finished job."""

    #: Its number.
    job: int
    #: One :class:`Status` a page, in the order of the keys.
    statuses: bytes
    #: From submit to finish.
    seconds: float
    #: Of the pages that were read or written.
    bytes: int


class Listing(NamedTuple):
    """Some pages of a namespace."""

    #: 32 bytes a key.
    keys: bytes
    #: For the next call; None at the end. There may be more pages when ``keys`` is empty.
    cursor: int | None


class Evictions(NamedTuple):
    """Pages that the store dropped by itself, in order."""

    #: For the next call.
    next: int
    #: Some are not among them: too many since the last call, their keys are lost, or another
    #: process owns the store.
    missed: bool
    #: (digest of the namespace, key) of each.
    pages: list[tuple[bytes, bytes]]


class Usage(NamedTuple):
    """The pages of a namespace."""

    #: Of the namespace.
    digest: bytes
    pages: int
    #: On the device.
    bytes: int
    #: Without a codec.
    plain_bytes: int

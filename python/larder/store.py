"""A page store on NVMe, for any engine: :class:`Store`, :class:`Namespace`, :class:`Region`, :class:`Queue`.

See docs/python.md. Signatures and their documentation are in ``_larder.pyi``.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from larder._larder import Namespace, Queue, QueueFull, Region, Store, StoreError

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
    """The status of a page. A call for n pages answers n bytes, one status each. 0 and 1 are success."""

    OK = 0
    DUPLICATE = 1
    ABSENT = 2
    DAMAGED = 3
    UNFINISHED = 4
    READ_ERROR = 5
    DEADLINE = 6
    HUNG = 7
    STALE = 8
    WRONG_SHAPE = 9
    CLOSED = 10
    NO_SPACE = 11
    BUSY = 12
    TOO_LARGE = 13
    UNREACHABLE = 14
    READ_ONLY = 15
    EXHAUSTED = 16
    READ_ONLY_SERVICE = 17
    WRITE_FAILED = 18
    SYNC_FAILED = 19
    REFUSED = 20
    OTHER = 21
    NOT_ADMITTED = 22


class PageClass(enum.IntEnum):
    """What the tokens of a page are. 32 to 63 are an engine's own."""

    UNKNOWN = 0
    SYSTEM = 1
    USER = 2
    ANSWER = 3
    TOOL = 4
    REASONING = 5
    SPECULATIVE = 6
    DOCUMENT = 7


class Hint(NamedTuple):
    """What a caller knows of pages, for the policies of a store's owner. Kept in memory, not on disk."""

    #: A :class:`PageClass`, or 32 to 63.
    page_class: int = PageClass.UNKNOWN
    #: 0 to 15.
    priority: int = 0
    #: The name of a session, of which 22 bits of a hash are kept.
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
    #: Some are not among them: too many since the last call, their keys are lost, or another process owns the store.
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

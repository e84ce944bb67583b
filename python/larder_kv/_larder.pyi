"""Rust's side of the calls."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal

from typing_extensions import Buffer as _Buffer

from larder_kv.store import Done, Evictions, Hint, Listing, Usage

__version__: str

class StoreError(RuntimeError):
    """The store cannot be opened or used. The message names the fault, its place, and the
    remedy."""

class QueueFull(StoreError):
    """The queue has no room for the job. Nothing of it was accepted."""

STATUSES: list[str]
"""The names of ``larder_kv.store.Status``, in the order of the codes."""

Keys = _Buffer | Sequence[bytes]
"""One contiguous buffer of 32 bytes a key, or a sequence of ``bytes`` of 32 each. A key is a hash.
The store distinguishes keys by their first 12 bytes: of two keys that agree in them, the page of
the second is refused as a duplicate, and the key misses."""

Pages = _Buffer | Sequence[tuple[int, int]] | Sequence[_Buffer]
"""The memory of some pages, in the order of their keys: one contiguous buffer with page after page,
or for each page one (address, length) or one buffer. The parts of a page lie one after the other.
Memory and parts that are multiples of 4096 bytes go directly to the device; other memory is copied
on the way. The caller promises that memory given by address stays valid during the call."""

Rows = _Buffer | Sequence[int]
"""Rows of a region: a buffer of int32 or int64 such as a numpy array, or integers."""

class Store:
    """Pages kept on NVMe. Use it as a context manager, or close it.

    All calls may come from any thread. Calls that can wait release the interpreter's lock. A child
    process that was forked after the open cannot use the store: its pages miss, and the other calls
    raise StoreError."""

    @staticmethod
    def attach(
        path: str | PathLike[str],
        *,
        size: int | str | None = None,
        page_bytes: int | None = None,
        must_fit: bool = True,
        create: bool = True,
        sync: Literal["interval", "relaxed", "always"] = "interval",
        lease: float = 10.0,
        hang_limit: float = 10.0,
        prewrite: bool = False,
        codec: Literal["off", "bf16", "auto"] = "auto",
        disk: str = "auto",
        policy: Literal["lru", "learned"] = "learned",
        write_budget: str = "off",
        l4: Mapping[str, Any] | None = None,
        key_file: str | PathLike[str] | None = None,
        key_command: str | None = None,
        key_credential: bool = False,
    ) -> Store:
        """Uses a store together with other processes. The first is the owner, the others are its
        clients; when the owner goes, a client takes over.

        ``path`` is a directory, in which the store is the file ``larder.store``; or a block device.
        A store that does not exist is created if ``create``, with ``size`` bytes (a number or a
        text such as ``512GiB``) and with segments that suit pages of ``page_bytes``. An existing
        store is refused if its segments hold no page of that size, unless ``must_fit`` is False;
        ``remarks`` has a line if such pages leave much of its room unused. ``lease``: seconds that
        a lookup protects the pages it finds. ``hang_limit``: seconds after which a silent volume's
        pages miss at once. ``policy``: the order in which a full store evicts pages
        (docs/retention.md). ``codec``: whether puts encode pages without loss, so that more of them
        fit (docs/codec.md). ``write_budget``: how much the store writes, as ``3TB/day`` or
        ``0.5DWPD`` (docs/retention.md#a-budget-of-writes). ``l4``: the keys of the remotes beneath the store, by their names in
        docs/remote.md; they work in the process that owns the store. ``key_file``, ``key_command``,
        ``key_credential``: where the key of an encrypted store is (docs/security.md); a store that
        is created with a key is encrypted. The owner's ``sync``,
        ``lease``, ``prewrite``, ``codec``, ``policy`` and ``write_budget`` hold.

        Raises ValueError for a wrong argument, StoreError for a store that cannot be attached."""

    @staticmethod
    def open(
        path: str | PathLike[str],
        *,
        size: int | str | None = None,
        page_bytes: int | None = None,
        must_fit: bool = True,
        create: bool = True,
        read_only: bool = False,
        sync: Literal["interval", "relaxed", "always"] = "interval",
        lease: float = 10.0,
        hang_limit: float = 10.0,
        prewrite: bool = False,
        codec: Literal["off", "bf16", "auto"] = "auto",
        disk: str = "auto",
        policy: Literal["lru", "learned"] = "learned",
        write_budget: str = "off",
        l4: Mapping[str, Any] | None = None,
        key_file: str | PathLike[str] | None = None,
        key_command: str | None = None,
        key_credential: bool = False,
    ) -> Store:
        """As :meth:`attach`, for this process alone. ``read_only`` takes no lock and writes
        nothing."""

    def namespace(
        self,
        *,
        model: str,
        weights: str,
        dtype: str,
        layout: str,
        page_tokens: int,
        parts: Sequence[int],
        tp: tuple[int, int] = (0, 1),
        pp: tuple[int, int] = (0, 1),
        cp: tuple[int, int] = (0, 1),
        pool: str = "kv",
        extra: Mapping[str, str] = ...,
    ) -> Namespace:
        """A namespace: everything that decides the bytes of a page besides its key. Pages of
        different namespaces never mix.

        ``parts``: bytes of each part of a page, 1 to 8 of them. ``tp``, ``pp``, ``cp``: (rank,
        size) where the bytes depend on it. Raises ValueError for wrong fields, StoreError when the
        store takes no more namespaces."""

    def fit(self, page_bytes: int) -> str | None:
        """A remark if pages of this size leave much of the store's room unused. Raises StoreError
        if the store can keep none: the error names the command that makes a suitable store."""

    def register(
        self, address: int, length: int, stride: int, *, owner: object = None, pinned: bool = False
    ) -> Region:
        """Memory of this process, with pages named by row: row r begins at
        ``address + r * stride``.

        A page lies in one piece from the start of its row, its parts one after the other. It may be
        shorter than the stride, or longer: in an arena whose buffers begin at multiples of the
        stride. ``owner`` is kept as long as the region is in use: without it memory that Python
        frees is read and written all the same. With ``pinned`` the memory stays mapped until the
        process ends, and is registered with the kernel too, which makes small reads faster. The
        caller answers for the memory, as in ctypes.

        Raises ValueError for impossible numbers, StoreError when the store is closed."""

    def queue(self, *, threads: int = 2, jobs: int = 1024, bytes: int | None = None) -> Queue:
        """Jobs with an eventfd of their own; a store may have several. ``threads`` for reads and as
        many for writes, started when they are needed. At most ``jobs`` unreported jobs, and
        ``bytes`` of their pages. Raises StoreError when the store is closed."""

    def flush(self) -> None:
        """Returns when all earlier puts and deletions survive a power loss. Raises StoreError."""

    def evictions(self, since: int = 0) -> Evictions:
        """The pages that the store evicted, or dropped as damaged, since a number: ``next`` of the
        last call, or 0 to begin. Nothing is recorded before the first call. At most 4,096 a call,
        so call until there are none, about once a second: the last 65,536 are kept. Deletions by
        callers are not among them.

        Whole keys are read from the descriptors on disk, when this is called or when reclaim reads
        them anyway. May wait for the device and the owner. Raises StoreError without an owner."""

    def usage(self) -> list[Usage]:
        """The pages of each namespace that has some. May wait for the owner. Raises StoreError
        without one."""

    def stats(self) -> dict[str, Any]:
        """Counters and sizes: the fields of docs/json.md's statistics, and ``refused_leases`` of
        this process. May wait for the owner. Raises StoreError when the store is closed."""

    def close(self, timeout: float | None = None) -> bool:
        """Ends all queues, then closes the store. Idempotent. False when ``timeout`` passed first:
        then rows of running jobs are still theirs, and another call waits again. Raises StoreError,
        in each call, when not all could be made durable."""

    @property
    def is_encrypted(self) -> bool:
        """Whether the store is encrypted: then nothing that is written beside it may name models,
        tenants or keys. In doubt it is."""

    @property
    def part(self) -> Literal["owner", "client", "nobody", "closed"]:
        """The role of this process now. Never waits."""

    @property
    def path(self) -> str:
        """The store's first volume."""

    @property
    def remarks(self) -> list[str]:
        """Warnings of the open."""

    def __enter__(self) -> Store: ...
    def __exit__(self, *error: object) -> None: ...

class Namespace:
    """A namespace of an open store, which it keeps alive. Page calls answer one
    ``larder_kv.store.Status`` a page, as ``bytes``, and never raise for a fault of the store or the
    disk. Wrong arguments are a ValueError or TypeError."""

    @property
    def store(self) -> Store: ...
    @property
    def parts(self) -> tuple[int, ...]:
        """Bytes of each part of a page."""

    @property
    def page_bytes(self) -> int:
        """Their sum."""

    @property
    def digest(self) -> bytes:
        """16 bytes that name it in :meth:`Store.usage` and :meth:`Store.evictions`."""

    def put(
        self,
        keys: Keys,
        pages: Pages,
        *,
        before: bytes | None = None,
        depth: int = 0,
        chain: bool = True,
        wait: float = 0.0,
        hint: Hint | None = None,
        pin_until: float | None = None,
    ) -> bytes:
        """Stores pages. The keys are a chain, each the parent of the next; ``before`` is the key
        before the first, and ``depth`` the number of pages before it. Without ``chain`` no page has
        a parent. A page that finds no room waits for it up to ``wait`` seconds. ``hint`` is for the
        policies of the store's owner. With ``pin_until`` the pages are pinned, as by
        :meth:`pin`, but a pin that is refused is only logged.

        A key that is stored is a DUPLICATE: its stored bytes stay, and these are not compared with
        them. To replace a page, delete it first. A page behind a page that was not stored is stored
        too, but no lookup finds it: stop the chain at the first status above DUPLICATE."""

    def get(self, keys: Keys, pages: Pages, *, timeout: float | None = None) -> bytes:
        """Reads pages. The memory of a page that is not OK has no particular content. No read
        starts after ``timeout``."""

    def longest_prefix(self, keys: Keys) -> int:
        """How many keys, a chain from its head, are stored without a gap; 0 when the store is
        closed or has no owner.

        The pages found are leased for the store's ``lease`` seconds. These leases cover at most a
        quarter of the store's segments; beyond that the oldest end early."""

    def count_tokens(
        self,
        *,
        asked: int | None = None,
        found: int = 0,
        served: int = 0,
        prefill_rate: float | None = None,
    ) -> None:
        """Counts tokens of a request for the metrics, which the store cannot do: it does not know
        requests. Once a request: the tokens that it ``asked`` for, and of these the first ``found``,
        which the store had. After its reads: the tokens that were ``served`` from the store, and the
        engine's ``prefill_rate`` in tokens a second if it is known."""

    def contains(self, keys: Keys) -> bytes:
        """OK for each page that is stored, which is leased for the store's ``lease`` seconds; else
        ABSENT, or CLOSED without an owner. These leases cover at most a quarter of the store's
        segments; beyond that the oldest end early."""

    def holds(self, key: bytes) -> bool | None:
        """Whether one page is stored, from memory: None if this process is not the owner. Never
        waits for the device or another process, and keeps the interpreter's lock."""

    def touch(
        self, keys: Keys, *, hint: Hint | None = None, pin_until: float | None = None
    ) -> None:
        """Marks pages as used, so that they stay. ``hint`` replaces the hints that they have. With
        ``pin_until`` those that are stored are pinned, as by :meth:`pin`, but a pin that is refused
        is only logged. A client sends a message, which may wait: see Queue.submit_touch."""

    def lease(self, keys: Keys) -> bytes:
        """Takes a lease of each page that is stored: the store does not evict it before ``unlease``
        was called as often. OK, ABSENT, REFUSED (all leased pages take at most a quarter of the
        store's segments), or CLOSED. A lease ends with its page, when that is deleted or found
        damaged; with this process; and with the owner of the store. When a store has no room to
        move pages, it evicts leased pages too."""

    def unlease(self, keys: Keys) -> None:
        """Returns leases of this process; other keys are ignored. A client sends a message: see
        Queue.submit_unlease."""

    def pin(self, keys: Keys, until: float) -> bytes:
        """Keeps stored pages until a time, in seconds since 1970 as of ``time.time()``, in place of
        their former pins: no eviction takes them, nor the pages before them in their chains. OK,
        ABSENT, or REFUSED (pinned pages and the minima of quotas take half of the store). Pins
        survive a restart and a crash; after a flush, a power loss too. A pin ends with its page,
        when that is deleted, too old for its quota, or found damaged. Raises StoreError."""

    def unpin(self, keys: Keys) -> int:
        """Takes pins back; how many of these pages were pinned. Raises StoreError."""

    def list(self, cursor: int | None = None) -> Listing:
        """Some pages of the namespace, at most 4,096, in no particular order; ``cursor`` comes from
        the last call. Reads descriptors from the device. Pages that are stored, evicted or moved
        between two calls may be listed, or twice, or not. Raises StoreError."""

    def delete(self, keys: Keys) -> int:
        """Deletes pages, durably; how many there were. Raises StoreError."""

    def limit(self, limits: str) -> None:
        """Sets the quota of this namespace, as ``min=1TiB,max=2TiB,max-age=30d``, each part as far as
        wanted, in place of its former one (docs/operations.md#quotas). Raises StoreError."""

    def clear(self) -> int:
        """Deletes all pages of the namespace. Raises StoreError."""

class Region:
    """Memory with pages named by row: see :meth:`Store.register`."""

    @property
    def rows(self) -> int: ...
    @property
    def stride(self) -> int: ...
    @property
    def address(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def described(self) -> str:
        """Whether the kernel has it registered."""

    def move_to_huge_pages(self) -> None:
        """Moves the memory to huge pages, on a thread of its own: reads and writes are faster on
        them. For memory that lives long and has been touched. Pinned memory, and all memory on a
        kernel before 6.1, stays as it is. A line of the log gives the amount."""

    @property
    def huge_bytes(self) -> int | None:
        """Bytes on huge pages after move_to_huge_pages; None until it has ended."""

class Queue:
    """Jobs on a store, done by threads of their own. Only ``wait``, ``drain`` and ``close`` wait;
    the other calls keep the interpreter's lock, and take microseconds.

    The rows of a job belong to it from its submit until ``poll`` has returned it. A job that has
    not started by its timeout is reported then, all its pages DEADLINE. A job that the device holds
    is reported when the device has answered, and counts as ``stuck`` meanwhile; so no I/O touches a
    row after its job was reported (except ``recall`` of submit_put)."""

    def event_fd(self) -> int:
        """Readable while there are finished jobs that ``poll`` has not returned. It belongs to the
        queue: do not close it. The caller may read it (8 bytes)."""

    def submit_put(
        self,
        namespace: Namespace,
        keys: Keys,
        region: Region,
        rows: Rows,
        *,
        before: bytes | None = None,
        depth: int = 0,
        chain: bool = True,
        timeout: float | None = None,
        wait: float = 0.0,
        recall: bool = False,
    ) -> int:
        """Queues a put of the pages at these rows (see Namespace.put). Returns the job's number.
        ``recall``: a put that still runs at its timeout is reported as HUNG. Then the rows may be
        changed, and must stay mapped until ``pending`` has counted it no more; a page that was not
        written by then is never stored.

        Raises QueueFull, StoreError when the queue is closed, ValueError for rows outside the
        region, for a job with more bytes than the queue's ``bytes``, or for a namespace of another
        Store. Then nothing was accepted."""

    def submit_get(
        self,
        namespace: Namespace,
        keys: Keys,
        region: Region,
        rows: Rows,
        *,
        timeout: float | None = None,
    ) -> int:
        """Queues a read into these rows, which do not overlap. Returns and raises as submit_put."""

    def submit_lookup(
        self, namespace: Namespace, keys: Keys, *, lease: bool = False, timeout: float | None = None
    ) -> int:
        """Queues Namespace.contains, or Namespace.lease. An owner answers in this call, from
        memory. A client sends one message; without an answer by ``timeout`` all keys are DEADLINE,
        and leases that it brings later are returned."""

    def submit_unlease(self, namespace: Namespace, keys: Keys) -> bool:
        """Queues Namespace.unlease, which is not reported. False when the queue is full: nothing is
        returned."""

    def submit_touch(self, namespace: Namespace, keys: Keys) -> bool:
        """Queues Namespace.touch, which is not reported. False when the queue is full: it is
        dropped."""

    def submit_pin(self, namespace: Namespace, keys: Keys, until: float) -> bool:
        """Queues Namespace.pin, which is not reported. False when the queue is full: it is
        dropped."""

    def poll(self, limit: int | None = None) -> list[Done]:
        """Finished jobs, each exactly once."""

    def wait(self, timeout: float | None = None) -> bool:
        """Until ``poll`` has something to return; False when ``timeout`` passed first."""

    def drain(self, timeout: float | None = None) -> bool:
        """Until no job waits or runs; finished jobs stay to be polled. False when ``timeout``
        passed first."""

    @property
    def pending(self) -> int:
        """Jobs accepted and not finished."""

    @property
    def stuck(self) -> int:
        """Jobs that the device holds beyond their timeout, now."""

    def counters(self) -> dict[str, int]:
        """submitted, refused, dropped_touches, late, stuck: counts since the queue was made."""

    def close(self, timeout: float | None = None) -> bool:
        """Refuses further jobs, finishes waiting jobs as CLOSED, and waits for running jobs and for
        the return of leases. False when ``timeout`` passed first. Finished jobs stay to be
        polled."""

class Backend:
    """A storage backend over a shared store. Lookups, reads and writes release the interpreter's
    lock and never raise for a fault of the store or the disk: the answer is a miss."""

    def __init__(self, config: str, server: str) -> None:
        """Attaches to the store that ``config`` names, for the server that ``server`` describes;
        both are JSON.

        Raises ValueError for a wrong configuration, RuntimeError for a store that cannot be
        attached."""

    @property
    def volume(self) -> str: ...
    @property
    def remarks(self) -> list[str]: ...
    def register(
        self,
        facts: str,
        buffers: Sequence[tuple[int, int, int]],
        parts: Sequence[Sequence[int]],
        pages: int,
    ) -> str: ...
    def register_flat(self, facts: str, page_bytes: int) -> str: ...
    def exists(
        self,
        pool: str,
        keys: Sequence[str],
        before: str | None = None,
        depth: int = 0,
        request: tuple[bool, int] | None = None,
    ) -> int: ...
    def exists_in(
        self,
        anchor: str,
        keys: Sequence[str],
        pools: Sequence[tuple[str, str, int, int]],
        before: str | None = None,
        depth: int = 0,
        request: tuple[bool, int] | None = None,
    ) -> tuple[int, int, list[int], list[int]]: ...
    def get(self, pool: str, keys: Sequence[str], address: int, count: int) -> list[bool]: ...
    def set(
        self,
        pool: str,
        keys: Sequence[str],
        address: int,
        count: int,
        before: str | None = None,
        depth: int = 0,
        is_chain: bool = True,
    ) -> list[bool]: ...
    def get_flat(
        self, pool: str, keys: Sequence[str], buffers: Sequence[tuple[int, int]]
    ) -> list[bool]: ...
    def set_flat(
        self,
        pool: str,
        keys: Sequence[str],
        buffers: Sequence[tuple[int, int]],
        before: str | None = None,
        depth: int = 0,
        is_chain: bool = True,
    ) -> list[bool]: ...
    def clear(self) -> int: ...
    def has_remote(self) -> bool: ...
    def drain(self) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]: ...
    def counters(self) -> dict[str, int | str]: ...
    def describe(self) -> list[str]: ...
    def make(self) -> str | None: ...
    def is_made(self) -> bool: ...
    def settings(self) -> str | None: ...
    def try_again(self) -> bool: ...
    def close(self) -> bool: ...

class DeviceError(RuntimeError):
    """A device failed."""

class Unavailable(DeviceError):
    """There is no such device."""

class Busy(DeviceError):
    """Too much is in flight."""

class Device:
    """The device of L1 and of the copies: ``larder_kv.device`` makes all calls."""

    def __init__(self, kind: str, ordinal: int, cache: str | PathLike[str] | None) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def is_host(self) -> bool: ...
    @property
    def why_host(self) -> str | None: ...
    def pool(
        self,
        parts: int,
        row_bytes: int,
        page_tokens: int,
        pages: int,
        tensors: Sequence[tuple[int, int]],
        owner: object,
    ) -> DevicePool: ...

class DevicePool:
    @property
    def pages(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    def host_pool(
        self, layout: str, pages: int, buffer: tuple[int, int] | None, is_locked: bool, owner: object
    ) -> HostPool: ...
    def load(
        self,
        host: HostPool,
        host_pages: Sequence[int],
        device_pages: Sequence[int],
        stream: int | None,
        copying: Copying | None,
    ) -> Copying: ...
    def store(
        self,
        host: HostPool,
        host_pages: Sequence[int],
        device_pages: Sequence[int],
        stream: int | None,
        copying: Copying | None,
    ) -> Copying: ...

class HostPool:
    @property
    def pages(self) -> int: ...
    @property
    def layout(self) -> str: ...
    @property
    def address(self) -> int: ...

class Copying:
    @property
    def layers(self) -> int: ...
    def done(self, layer: int | None) -> bool: ...
    def wait(self, layer: int | None) -> None: ...
    def hold(self, stream: int, layer: int | None) -> None: ...

def weights_tag(fields: Mapping[str, str]) -> str: ...
def weights_files(places: Sequence[str]) -> str: ...
def log_lines() -> int | None:
    """Begins the log, and returns the socket that receives its lines; ``larder_kv.logs`` is its face.
    """

def main(program: str, leading: Sequence[str], arguments: Sequence[str]) -> int: ...
def parse_config(config: str) -> str:
    """Reads a configuration of Larder's keys, JSON, and returns it with every key;
    ``larder_kv.config`` is its face.

    Raises ValueError with the name of the wrong key."""

def check_config(config: str, page_bytes: str | None = None, *, derives: bool = True) -> int: ...
def check_sglang_config(config: str, page_bytes: str | None = None) -> int: ...

"""LMCache's calls on an adapter, and LMCache's own StorageManager over one, without an engine."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import mmap
import select
import time

import torch
from larder_kv.lmcache import LarderL2Adapter, LarderL2AdapterConfig
from lmcache.v1.distributed.api import (
    FULL_ATTENTION_WINDOW_CHUNKS,
    GroupedObjectKeys,
    MemoryLayoutDesc,
    ObjectKey,
    PrefetchLockMode,
    PrefetchTaskSpec,
)
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.internal_api import L1MemoryDesc, L2AdapterListener
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

#: About the smallest store that keeps chunks of a MiB.
SIZE = "128MiB"

#: Seconds after which a wait of a test has failed.
PATIENCE = 60

LAYOUT = MemoryLayoutDesc(shapes=[torch.Size([2, 4, 64, 256])], dtypes=[torch.bfloat16])
CHUNK = 256 << 10


def parameters(path, **more):
    """The `adapter_params` of a test."""
    return {
        "path": str(path),
        "size": SIZE,
        "weights_tag": "test",
        "chunk_bytes": 1 << 20,
        "disk": "threads",
    } | more


@contextlib.contextmanager
def opened(path, arena=None, **more):
    """An adapter, which is closed at the end."""
    adapter = LarderL2Adapter(
        LarderL2AdapterConfig(**parameters(path, **more)),
        l1_memory_desc=None if arena is None else arena.described,
    )
    try:
        yield adapter
    finally:
        adapter.close()


def keys(count, seed="chain", **fields):
    """So many keys, by default of one model, rank and group."""
    facts = {"model_name": "model", "kv_rank": 0x01000100} | fields
    return [
        ObjectKey(chunk_hash=hashlib.sha256(f"{seed} {at}".encode()).digest(), **facts)
        for at in range(count)
    ]


class Arena:
    """Memory as LMCache's L1 is: buffers at multiples of 4096, handed out in order."""

    def __init__(self, chunks=64):
        self._memory = mmap.mmap(-1, chunks * CHUNK)
        self._tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._next = 0
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.described = L1MemoryDesc(ptr=address, size=len(self._memory), align_bytes=4096)

    def objects(self, count, layout=LAYOUT, fill=None):
        """Buffers of a layout. With `fill` each has other bytes, which that number decides."""
        size = sum(
            shape.numel() * dtype.itemsize for shape, dtype in zip(layout.shapes, layout.dtypes)
        )
        made = []
        for at in range(count):
            start = self._next
            self._next += -(-size // 4096) * 4096
            raw = self._tensor[start : start + size]
            metadata = MemoryObjMetadata(
                shape=layout.shapes[0],
                dtype=layout.dtypes[0],
                address=start,
                phy_size=-(-size // 4096) * 4096,
                ref_count=1,
                fmt=MemoryFormat.KV_2LTD,
                shapes=layout.shapes,
                dtypes=layout.dtypes,
            )
            made.append(TensorMemoryObj(raw, metadata, parent_allocator=None))
            raw[:] = 0 if fill is None else content(fill, at, size)
        return made


def content(fill, at, size=CHUNK):
    """Bytes that no other chunk of a test has."""
    seed = hashlib.sha256(f"content {fill} {at}".encode()).digest()
    return torch.frombuffer(
        bytearray(hashlib.shake_128(seed).digest(4096) * (size // 4096) + bytes(size % 4096)),
        dtype=torch.uint8,
    )


def same(objects, fill, first=0):
    """How many of these buffers have the bytes of that number."""
    return sum(
        torch.equal(one.raw_data, content(fill, first + at, one.get_size()))
        for at, one in enumerate(objects)
    )


def settled(fd, ready):
    """What `ready` returns once it is not None; it is asked again whenever the eventfd is
    readable.
    """
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    until = time.monotonic() + PATIENCE
    while (answer := ready()) is None:
        assert time.monotonic() < until, "no answer"
        poll.poll(1000)
    return answer


def store(adapter, some, objects):
    """The result of a store."""
    task, found = adapter.submit_store_task(some, objects), {}

    def ready():
        found.update(adapter.pop_completed_store_tasks())
        return found.get(task)

    return settled(adapter.get_store_event_fd(), ready)


def lookup(adapter, some, layout=LAYOUT):
    """Which keys are there, and locked."""
    descriptions = {key.object_group_id: layout for key in some} if layout else {}
    task = adapter.submit_lookup_and_lock_task(some, descriptions)
    bitmap = settled(
        adapter.get_lookup_and_lock_event_fd(), lambda: adapter.query_lookup_and_lock_result(task)
    )
    return bits(bitmap, some)


def load(adapter, some, objects):
    """Which keys were loaded."""
    task = adapter.submit_load_task(some, objects)
    return bits(settled(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task)), some)


def bits(bitmap, some):
    return [bitmap.test(at) for at in range(len(some))]


def listed(adapter, page_size=3, **more):
    """All keys that the adapter lists, page by page."""
    found, cursor = [], None
    while True:
        page = adapter.list_l2_keys(page_size=page_size, cursor=cursor, **more)
        found += [(entry.key.to_object_key(), entry.size_bytes) for entry in page.entries]
        cursor = page.next_page_token
        if cursor is None:
            return found


class Listener(L2AdapterListener):
    """What an adapter tells its listeners."""

    def __init__(self):
        self.there = {}
        self.accessed = []

    def on_l2_keys_stored(self, keys, sizes):
        self.there.update(zip(keys, sizes))

    def on_l2_keys_accessed(self, keys):
        self.accessed += keys

    def on_l2_keys_deleted(self, keys):
        for key in keys:
            del self.there[key]


# --- LMCache's own StorageManager


def plugin(path, **more):
    """The configuration that `--l2-adapter` makes."""
    return PluginL2AdapterConfig("larder_kv.lmcache", "LarderL2Adapter", parameters(path, **more))


@contextlib.contextmanager
def manager(*adapters, l1=64 << 20, write_ttl=600):
    memory = L1MemoryManagerConfig(
        size_in_bytes=l1, use_lazy=False, init_size_in_bytes=l1, align_bytes=4096
    )
    made = StorageManager(
        StorageManagerConfig(
            l1_manager_config=L1ManagerConfig(
                memory_config=memory, write_ttl_seconds=write_ttl, read_ttl_seconds=300
            ),
            eviction_config=EvictionConfig(eviction_policy="LRU"),
            l2_adapter_config=L2AdaptersConfig(adapters=list(adapters)),
        )
    )
    try:
        yield made
    finally:
        made.close()


def offer(storage, some, fill, first=0):
    """Writes chunks to L1, from where LMCache stores them. Chunks that are there stay."""
    reserved = storage.reserve_write(some, LAYOUT)
    for at, key in enumerate(some):
        if key in reserved:
            reserved[key].raw_data[:CHUNK] = content(fill, first + at)
    storage.finish_write(list(reserved))


def until(condition):
    """Waits for a condition of a program that goes on by itself."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not come to be"
        time.sleep(0.002)


def is_quiet(storage):
    """Whether no store is on its way."""
    return all(
        one["is_healthy"] and not one["in_flight_task_count"]
        for one in storage.report_status()["store_controllers"].values()
    )


def begin(storage, some):
    """Begins to prefetch chunks."""
    row = GroupedObjectKeys(
        keys=some,
        object_group_id=0,
        layout_desc=LAYOUT,
        sliding_window_size=FULL_ATTENTION_WINDOW_CHUNKS,
    )
    spec = PrefetchTaskSpec(
        key_groups=[row],
        num_kv_readers=1,
        fetching_policy="prefix",
        lock_mode=PrefetchLockMode.LOCK,
    )
    return storage.submit_prefetch_task(spec)


def fetch(storage, some, fill, first=0):
    """Prefetches chunks: (how many were found, how many of those have their bytes)."""
    handle = begin(storage, some)
    assert storage.wait_prefetch_status(handle, timeout=PATIENCE)
    found = storage.query_prefetch_status(handle).hit_cells[0].popcount()
    if not found:
        return 0, 0
    with storage.read_prefetched_results(some[:found]) as objects:
        good = sum(
            torch.equal(one.raw_data[:CHUNK], content(fill, first + at))
            for at, one in enumerate(objects)
        )
    storage.finish_read_prefetched(some[:found])
    return found, good

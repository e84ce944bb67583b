"""A peer's reader beside its writer: the program that scripts/bench-mixed runs for each peer.

    INTERPRETER scripts/mixed_peer.py PEER DIRECTORY PAGE_BYTES READ_BATCH WRITE_BATCH SECONDS

PEER is `raw_block` (LMCache, O_DIRECT and io_uring), `fs` (vLLM's tier) or `HiCacheFile` (SGLang).
INTERPRETER is of the environment that python/tests/prepare makes. Reader and writer are two threads of
one process, as in each of the three engines, with one call in flight each, called as the engine
calls it. Prints the JSON lines of engine/examples/mixed_speed.rs: the reader alone, the writer
alone, both.

The pages to read lie on the disk, not in the page cache, and none is read twice in a part. A part
ends after SECONDS, or when one of the two has no pages left. The time of the writer includes a
closing sync: two of the peers write to the page cache.
"""

import hashlib
import itertools
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "python/tests"))

MIB, GIB = 1 << 20, 1 << 30
READ_BYTES = 2 * GIB
WRITE_BYTES = 2 * GIB
#: Seconds for a call.
PATIENCE = 120


class RawBlock:
    """LMCache's `raw_block`. Its file has been written once before."""

    def __init__(self, place, page_bytes, batch):
        import ctypes
        import mmap

        import torch
        from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
        from lmcache.v1.distributed.internal_api import L1MemoryDesc
        from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
        from lmcache.v1.distributed.l2_adapters.factory import create_l2_adapter_from_registry
        from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

        self.key = lambda name: ObjectKey(hashlib.sha256(name.encode()).digest(), "model", 0x01000100)
        rows = 2 * batch
        self.memory = mmap.mmap(-1, rows * page_bytes)
        tensor = torch.frombuffer(self.memory, dtype=torch.uint8).view(rows, page_bytes)
        tensor.fill_(0xA5)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        layout = MemoryLayoutDesc(shapes=[torch.Size([2, page_bytes // 4])], dtypes=[torch.bfloat16])

        def row(at):
            of = MemoryObjMetadata(
                shape=layout.shapes[0], dtype=layout.dtypes[0], address=at * page_bytes, phy_size=page_bytes, ref_count=1,
                fmt=MemoryFormat.KV_2LTD, shapes=layout.shapes, dtypes=layout.dtypes,
            )
            return TensorMemoryObj(tensor[at], of, parent_allocator=None)

        made = [row(at) for at in range(rows)]
        self.to_read, self.to_write = made[:batch], made[batch:]
        slot = page_bytes + 4096
        size = 64 * MIB + ((READ_BYTES + 2 * WRITE_BYTES) // page_bytes + 64) * slot
        path = place / "raw"
        with open(path, "wb") as file:
            for _ in range(-(-size // (16 * MIB))):
                file.write(bytes(16 * MIB))
            os.fsync(file.fileno())
        config = {
            "type": "raw_block", "device_path": str(path), "slot_bytes": slot, "meta_total_bytes": 64 * MIB, "use_odirect": True,
            "io_engine": "io_uring",
        }
        described = L1MemoryDesc(address, len(self.memory), 4096, len(self.memory))
        self.adapter = create_l2_adapter_from_registry(get_l2_adapter_config_class("raw_block").from_dict(config), described)

    def read(self, names):
        task = self.adapter.submit_load_task([self.key(name) for name in names], self.to_read[: len(names)])
        return self._result(self.adapter.get_load_event_fd(), lambda: self.adapter.query_load_result(task)).popcount()

    def write(self, names):
        self.adapter.submit_store_task([self.key(name) for name in names], self.to_write[: len(names)])
        done = self._result(self.adapter.get_store_event_fd(), self.adapter.pop_completed_store_tasks)
        return len(names) if all(one.is_successful() for one in done.values()) else 0

    @staticmethod
    def _result(event, ask):
        import select

        poll = select.poll()
        poll.register(event, select.POLLIN)
        end = time.monotonic() + PATIENCE
        while not (result := ask()):
            if time.monotonic() > end:
                raise TimeoutError("a task of raw_block has not ended")
            poll.poll(100)
            try:
                os.eventfd_read(event)
            except BlockingIOError:
                pass
        return result

    def close(self):
        self.adapter.close()


class Fs:
    """vLLM's `fs` tier, whose ends of jobs are polled as in the scheduler's steps."""

    def __init__(self, place, page_bytes, batch):
        import numpy
        from support.vllm import Steps
        from vllm.v1.kv_offload.base import ReqContext, make_offload_key
        from vllm.v1.kv_offload.tiering.base import TransferJob

        self.key = lambda name: make_offload_key(hashlib.sha256(name.encode()).digest(), 0)
        self.steps = Steps({"type": "fs", "root_dir": str(place / "fs")}, row_bytes=page_bytes, rows=2 * batch)
        self.steps.view[:] = 0x5A
        self.rows = {True: range(batch), False: range(batch, 2 * batch)}
        self.numbers, self.ends, self.lock = itertools.count(1 << 40), {}, threading.Lock()

        def job(keys, is_load):
            request = ReqContext(req_id="bench")
            Steps.place(request, keys)
            rows = numpy.array(self.rows[is_load][: len(keys)], dtype=numpy.int32)
            return TransferJob(job_id=next(self.numbers), keys=keys, chunk_ids=rows, is_promotion=is_load, req_context=request)

        self.job = job

    def read(self, names):
        return self._transfer(names, True)

    def write(self, names):
        return self._transfer(names, False)

    def _transfer(self, names, is_load):
        job = self.job([self.key(name) for name in names], is_load)
        tier = self.steps.tier
        with self.lock:
            (tier.submit_load if is_load else tier.submit_store)(job)
        end = time.monotonic() + PATIENCE
        while True:
            with self.lock:
                self.ends.update((report.job_id, report.success) for report in tier.get_finished_jobs())
                if job.job_id in self.ends:
                    return len(names) if self.ends.pop(job.job_id) else 0
            if time.monotonic() > end:
                raise TimeoutError("a job of fs has not ended")
            time.sleep(0.0002)

    def close(self):
        self.steps.close()


class File:
    """SGLang's HiCacheFile, called as its controller's threads call it."""

    def __init__(self, place, page_bytes, batch):
        import support.cpu  # noqa: F401
        import torch
        from sglang.srt.environ import envs
        from sglang.srt.mem_cache.hicache_storage import HiCacheFile
        from support.backend import config

        with envs.SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR.override(str(place)):
            self.backend = HiCacheFile(config(place, extra_config={}), str(place))
        self.empty = lambda: torch.zeros(page_bytes, dtype=torch.uint8)
        self.to_read = [self.empty() for _ in range(batch)]
        self.to_write = [self.empty().fill_(0xA5) for _ in range(batch)]

    def read(self, names):
        return sum(page is not None for page in self.backend.batch_get(names, self.to_read[: len(names)]))

    def write(self, names):
        return len(names) if self.backend.batch_set(names, self.to_write[: len(names)]) else 0

    def close(self):
        pass


PEERS = {"raw_block": RawBlock, "fs": Fs, "HiCacheFile": File}


class Side:
    """The calls of a reader or a writer in one part."""

    def __init__(self, call, batches, page_bytes):
        self.call, self.batches, self.page_bytes = call, batches, page_bytes
        self.moved = self.missed = 0
        self.times, self.seconds = [], 0.0
        self.trouble = None

    def run(self, end, over, is_writer):
        begin = time.perf_counter()
        try:
            for batch in self.batches:
                called = time.perf_counter()
                if called >= end or over.is_set():
                    break
                good = self.call(batch)
                self.times.append((time.perf_counter() - called) * 1e6)
                self.moved += good
                self.missed += len(batch) - good
        except Exception as error:
            self.trouble = error
        over.set()
        if is_writer:
            os.sync()
        self.seconds = time.perf_counter() - begin

    def line(self, part, role, cpu):
        if self.trouble:
            raise self.trouble
        calls = sorted(self.times)
        return {
            "part": part, "role": role, "bytes_per_second": self.moved * self.page_bytes / self.seconds,
            "call_p50_us": statistics.median(calls), "call_p99_us": calls[len(calls) * 99 // 100], "calls": len(calls),
            "missed_pages": self.missed, "cpu_seconds": cpu, "wait_p99_us": 0, "pacing": "none",
        }


def cut(names, batch):
    return [names[at : at + batch] for at in range(0, len(names), batch)]


def cpu_seconds():
    used = os.times()
    return used.user + used.system


def measure(peer, page_bytes, read_batch, write_batch, seconds):
    there = [f"read {at}" for at in range(READ_BYTES // page_bytes)]
    for batch in cut(there, min(read_batch, write_batch)):
        if peer.write(batch) != len(batch):
            raise OSError("the pages to read were not stored")
    for part in ("read", "write", "both"):
        os.sync()
        Path("/proc/sys/vm/drop_caches").write_text("3")
        random.shuffle(there)
        new = [f"{part} {at}" for at in range(WRITE_BYTES // page_bytes)]
        sides = {"reader": Side(peer.read, cut(there, read_batch), page_bytes)} if part != "write" else {}
        sides |= {"writer": Side(peer.write, cut(new, write_batch), page_bytes)} if part != "read" else {}
        over, used, end = threading.Event(), cpu_seconds(), time.perf_counter() + seconds
        threads = [threading.Thread(target=side.run, args=(end, over, role == "writer")) for role, side in sides.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # Of the process, and so of the first role alone.
        used = cpu_seconds() - used
        for number, (role, side) in enumerate(sides.items()):
            print(json.dumps(side.line(part, role, 0.0 if number else used)), flush=True)


def main():
    name, directory, *numbers = sys.argv[1:]
    page_bytes, read_batch, write_batch, seconds = map(int, numbers)
    place = Path(tempfile.mkdtemp(prefix="peer-", dir=directory))
    try:
        peer = PEERS[name](place, page_bytes, max(read_batch, write_batch))
        try:
            measure(peer, page_bytes, read_batch, write_batch, seconds)
        finally:
            peer.close()
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    main()

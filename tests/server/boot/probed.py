"""The backend with a window into the server's KV pool, for the tests alone.

`POST /hicache/storage-backend/clear` calls `clear` on the scheduler's thread of each rank. Where
the folder LARDER_PROBE holds a command, `clear` runs it instead and writes an answer for its rank.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
from array import array
from pathlib import Path

import torch
from larder_kv.sglang import LarderHiCache

COMMAND = "command.json"


def layers(pool):
    """Every layer's rows of a device pool: of MHA keys and values, of MLA the one."""
    if hasattr(pool, "k_buffer"):
        return [*pool.k_buffer, *pool.v_buffer]
    return list(pool.kv_buffer)


class Probed(LarderHiCache):
    def __init__(self, storage_config, kwargs=None):
        super().__init__(storage_config, kwargs)
        self.rank = storage_config.tp_rank
        self.last = 0

    def clear(self):
        place = Path(os.environ["LARDER_PROBE"])
        command = json.loads((place / COMMAND).read_text())
        if command["number"] == self.last:
            # A command is run once; other calls are the server's.
            return super().clear()
        self.last = command["number"]
        answer = getattr(self, f"do_{command['do']}")(command)
        written = place / f"{command['number']}-{self.rank}.tmp"
        written.write_text(json.dumps(answer))
        written.rename(written.with_suffix(".json"))
        return True

    def tree(self):
        """SGLang's tree, which calls `clear` through its attachment."""
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        frame = sys._getframe()
        while not isinstance(frame.f_locals.get("self"), UnifiedRadixCache):
            frame = frame.f_back
        return frame.f_locals["self"]

    def rows(self, command):
        """The pools' layers, and the slots of the prefix of `tokens` that the device holds."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        tree = self.tree()
        key = RadixKey(array("q", command["tokens"]), command.get("extra_key"))
        match = tree.match_prefix(MatchPrefixParams(key=key))
        slots = tree.path_device_indices(match.last_device_node).long()
        pool = tree.token_to_kv_pool_allocator.get_kvcache()
        return layers(getattr(pool, "full_kv_pool", pool)), slots

    def do_pages(self, command):
        """A hash of each page of the prefix, over all layers."""
        buffers, slots = self.rows(command)
        size = self.mem_pool_host.page_size
        hashes = []
        for page in slots.split(size):
            digest = hashlib.sha256()
            for buffer in buffers:
                digest.update(buffer[page].contiguous().view(torch.uint8).numpy().tobytes())
            hashes.append(digest.hexdigest())
        return {"pages": hashes, "tokens": slots.numel()}

    def do_heads(self, command):
        """The first bytes of each page of the prefix, which it has in the store too."""
        buffers, slots = self.rows(command)
        pages = slots.split(self.mem_pool_host.page_size)
        rows = [buffers[0][page].contiguous().view(torch.uint8).flatten() for page in pages]
        return {"heads": [bytes(row[: command["bytes"]].tolist()).hex() for row in rows]}

    def do_bytes(self, command):
        """The rows of one page in the first layer, as they lie in the pool and in the store."""
        buffers, slots = self.rows(command)
        page = slots.split(self.mem_pool_host.page_size)[command["page"]]
        rows = buffers[0][page].contiguous().view(torch.uint8).numpy().tobytes()
        return {"bytes": base64.b64encode(rows).decode()}

    def do_spoil(self, command):
        """Changes the prefix where it lies in the pool: bits of the low byte of each number."""
        buffers, slots = self.rows(command)
        for buffer in buffers:
            rows = buffer[slots].contiguous()
            rows.view(torch.uint8).view(-1)[::2].bitwise_xor_(command.get("bits", 21))
            buffer[slots] = rows
        return {"tokens": slots.numel()}

    def do_counters(self, command):
        return self.counters()


class Instant(Probed):
    """Answers reads at once, without reading: the time of a hit is SGLang's own part."""

    def batch_get_v1(self, keys, host_indices, extra_info=None):
        return [True] * len(keys)

    def batch_get_v2(self, transfers, extra_info=None):
        return {transfer.name: [True] * len(transfer.keys or []) for transfer in transfers}

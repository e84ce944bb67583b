"""vLLM's own tiering manager and CPU tier over a tier from a configuration, without an engine:
the calls of a scheduler's step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
import time
import uuid

import numpy as np
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

#: The smallest store that there can be is a few segments.
SIZE = "144MiB"

#: Tokens of a block.
BLOCK = 16

ROW = 64 << 10

_numbers = itertools.count()


def tier(path, /, **more):
    """A tier's configuration."""
    return {
        "type": "LarderTier",
        "module_path": "larder_kv.vllm",
        "path": str(path),
        "size": SIZE,
        "prewrite": False,
        "weights_tag": "test",
    } | more


def _known(kind, **values):
    """A configuration of vLLM's without the fields that this release lacks."""
    names = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: value for name, value in values.items() if name in names})


def config(
    tiers,
    *,
    rows=32,
    row_bytes=ROW,
    groups=1,
    windows=(),
    model="test/model",
    dtype="bfloat16",
    layout="LBHNC",
    blocks_per_chunk=1,
    block=BLOCK,
    parallel=None,
    canonical=False,
    replicated=False,
    events=False,
    extra=None,
):
    """The configuration that vLLM hands to a spec."""
    sizes = {
        "rank": 0,
        "world_size": 1,
        "tp_size": 1,
        "pp_size": 1,
        "pcp_size": 1,
        "dcp_size": 1,
        "data_parallel_index": 0,
    }
    sizes |= {
        "data_parallel_size": 1,
        "data_parallel_rank_local": None,
        "is_parallelism_agnostic": False,
    } | (parallel or {})
    return _known(
        OffloadingConfig,
        groups=tuple(
            _known(
                OffloadingGroupConfig,
                tokens_per_block=block,
                layer_names=(f"layers.{number}",),
                group_id=number,
                sliding_window_size_in_chunks=4 if number in windows else None,
            )
            for number in range(groups)
        ),
        worker_kv_bytes_per_block=row_bytes // blocks_per_chunk // sizes["world_size"],
        enable_kv_cache_events=events,
        extra_config={"cpu_bytes_to_use": rows * row_bytes, "secondary_tiers": list(tiers)}
        | (extra or {}),
        engine_id=f"larder-test-{os.getpid()}-{uuid.uuid4()}",
        model=_known(OffloadingModelConfig, name=model, dtype=dtype, max_model_len=4096),
        cache=OffloadingCacheConfig(tokens_per_hash=block, blocks_per_chunk=blocks_per_chunk),
        parallel=OffloadingParallelConfig(**sizes),
        canonical_layout=canonical,
        replicated_layout=replicated,
        kv_cache_layout=layout,
    )


def keys(count, seed="chain", group=0, hash_bytes=32):
    """A prefix's keys, in vLLM's form."""
    digest = seed.encode()
    made = []
    for _ in range(count):
        digest = hashlib.sha256(digest).digest()
        made.append(make_offload_key(digest[:hash_bytes], group))
    return made


def hashed(count, block=BLOCK):
    """The keys of a prompt, hashed by vLLM itself as after a start with this environment."""
    kv_cache_utils.init_none_hash(sha256)
    made, parent = [], None
    for at in range(count):
        tokens = range(at * block, (at + 1) * block)
        parent = kv_cache_utils.hash_block_tokens(sha256, parent, tokens)
        made.append(make_offload_key(parent, 0))
    return made


def content(key, row_bytes=ROW):
    """The bytes of a chunk, by its key: no two blocks of 4 KiB are equal."""
    return np.frombuffer(hashlib.shake_128(key).digest(row_bytes), dtype=np.int8)


class Steps:
    """A manager of vLLM's with its tiers, driven as the scheduler drives it."""

    def __init__(self, *tiers, **more):
        self.config = config(tiers, **more)
        self.spec = TieringOffloadingSpec(self.config)
        self.manager = self.spec.get_manager()
        self.view = np.asarray(self.manager.primary_tier.get_kv_memoryview())
        self.row_bytes = self.view.shape[1]

    @property
    def tier(self):
        return self.manager.secondary_tiers[0]

    def request(self, of=(), chunk_tokens=BLOCK, params=None, salt=None):
        """A new request with these chunks, each group's in order."""
        context = ReqContext(req_id=f"request-{next(_numbers)}", kv_transfer_params=params)
        # As the connector does.
        for tier in self.manager.secondary_tiers:
            tier.tell_salt(context.req_id, salt)
        self.manager.on_new_request(context)
        self.place(context, of, chunk_tokens)
        return context

    @staticmethod
    def place(context, of, chunk_tokens=BLOCK):
        ends = {}
        for key in of:
            group = key[-4:]
            ends[group] = ends.get(group, 0) + chunk_tokens
            context.set_offload_key_position(key, ends[group])

    def finish(self, context):
        self.manager.on_request_finished(context)
        self.end_step()

    def end_step(self):
        self.manager.on_schedule_end(ScheduleEndContext((), ()))
        self.manager.get_stats()

    def settle(self, limit=60.0):
        """Steps until no job is out."""
        until = time.monotonic() + limit
        while self.manager.has_pending_work():
            self.end_step()
            assert time.monotonic() < until, "a job was never reported"
            time.sleep(0.001)

    def offer(self, of, context=None):
        """Chunks computed by the GPU arrive in the CPU tier and are handed on. Returns the
        request, without waiting.
        """
        context = context or self.request(of)
        output = self.manager.prepare_store(list(of), context)
        assert output is not None, "the CPU tier is full"
        rows = output.store_spec.chunk_ids
        for key, row in zip(output.keys_to_store, rows, strict=True):
            self.view[row] = content(key, self.row_bytes)
        if output.keys_to_store:
            # As in the scheduler: a set, in no order.
            self.manager.complete_store(set(output.keys_to_store), context)
        return context

    def store(self, of, salt=None):
        """Stores chunks and waits until that is done. Returns how many reached the tier, by its
        own counters.
        """
        before = self.stored()
        self.finish(self.offer(of, self.request(of, salt=salt)))
        self.settle()
        return self.stored() - before

    def stored(self):
        return self.tier._meters.totals["stored_chunks"]

    def forget(self):
        """Empties the CPU tier alone, as new prompts do."""
        self.settle()
        self.manager.primary_tier.reset_cache()

    def find(self, of, context, limit=60.0):
        """Looks chunks up as the scheduler does for full attention, over as many steps as it
        takes: how many are hits.
        """
        until = time.monotonic() + limit
        for step in itertools.count(1):
            hits, deferred = 0, False
            for key in of:
                answer = self.manager.lookup(key, context)
                if answer is LookupResult.MISS:
                    break
                deferred |= answer is not LookupResult.HIT
                hits += answer is not LookupResult.RETRY
            self.end_step()
            if not deferred:
                return hits, step
            assert time.monotonic() < until, "a request was never served"
            time.sleep(0.001)

    def load(self, of, context=None, salt=None):
        """(hits, how many of them have the right bytes) of a request for these chunks, in order."""
        request = context or self.request(of, salt=salt)
        hits, _ = self.find(of, request)
        good = self.good(of[:hits], request)
        if context is None:
            self.finish(request)
        return hits, good

    def good(self, of, context):
        """How many of these chunks of the CPU tier have the right bytes."""
        if not of:
            return 0
        rows = self.manager.prepare_load(list(of), context).chunk_ids
        good = sum(
            np.array_equal(self.view[row], content(key, self.row_bytes))
            for key, row in zip(of, rows, strict=True)
        )
        self.manager.complete_load(list(of), context)
        return int(good)

    def close(self):
        self.view = None
        self.manager.shutdown()


@contextlib.contextmanager
def steps(*tiers, **more):
    """Steps that are shut down at the end."""
    made = Steps(*tiers, **more)
    try:
        yield made
    finally:
        made.close()


def volume(path):
    """The store's file below a directory."""
    return next(path.rglob("*.store"))

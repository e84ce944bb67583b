"""SGLang's tree, controller and storage threads over this backend, in the shape that SGLang's own test fixtures have."""

from __future__ import annotations

import json
import unittest
from array import array
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from unittest import mock

import torch
from sglang.kernels.ops.attention.fla.chunk_delta_h import CHUNK_SIZE
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, HybridLinearKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.test.kits.unified_radix_cache import fixtures
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.fixtures import (
    build_fixture,
    drop_hicache_atexit_pin,
    match_prefix,
    node_device_value,
)
from sglang.test.kits.unified_radix_cache.storage import UnifiedRadixCacheStorageFixtures
from support.backend import extra

FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA

CONFIGS = {
    "mha": CacheConfig(page_size=16, num_layers=4),
    "mha-64": CacheConfig(page_size=64, num_layers=4, kv_size=1024, max_context_len=1024),
    "swa": CacheConfig(
        page_size=16,
        components=(FULL, SWA),
        num_layers=6,
        full_attention_layer_ids=(2, 5),
        sliding_window_size=16,
        kv_size=512,
    ),
    "mla": CacheConfig(page_size=16, num_layers=4),
    "dsa": CacheConfig(page_size=64, num_layers=4, kv_size=1024, max_context_len=1024),
    "mamba": CacheConfig(
        page_size=64,
        components=(FULL, MAMBA),
        num_layers=6,
        full_attention_layer_ids=(2, 5),
        enable_mamba_extra_buffer=True,
        mamba_cache_size=60,
        kv_size=1024,
        max_context_len=1024,
    ),
}
CONFIGS["mla+mamba"] = replace(CONFIGS["mamba"], mamba_cache_size=61)


class Trees(UnifiedRadixCacheStorageFixtures, unittest.TestCase):
    """SGLang's fixtures, with this backend wherever they ask for one."""

    #: Layout of the host pools.
    layout = "page_first"
    #: More for the extra config.
    more: dict = {}
    #: Tensor-parallel rank and size.
    tp = (0, 1)

    def _init_hicache(
        self,
        cache,
        *,
        write_policy="write_through",
        storage_backend=None,
        storage_dir=None,
        prefetch_threshold=None,
        prefetch_policy="wait_complete",
        host_memory_mode="cache",
        storage_extra=None,
        context_length=None,
    ):
        config = None
        if storage_backend is not None:
            rank, size = self.tp
            ranks = get_parallel().override(
                tp_rank=rank,
                tp_size=size,
                attn_tp_rank=rank,
                attn_tp_size=size,
                moe_tp_size=size,
                pp_rank=0,
                pp_size=1,
            )
            ranks.__enter__()
            self.addCleanup(ranks.__exit__, None, None, None)
            table = extra(storage_dir) | self.more | (storage_extra or {})
            if prefetch_threshold is not None:
                table["prefetch_threshold"] = prefetch_threshold
            config = json.dumps(table)
        args = ServerArgs(
            model_path="dummy",
            page_size=self.cfg.page_size,
            hicache_io_backend="direct" if self.layout == "page_first_direct" else "kernel",
            hicache_mem_layout=self.layout,
            hicache_write_policy=write_policy,
            hicache_storage_backend="dynamic" if config else None,
            hicache_storage_backend_extra_config=config,
            hicache_storage_prefetch_policy=prefetch_policy,
            hicache_host_memory_mode=host_memory_mode,
            context_length=context_length,
        )
        args._mamba_cache_chunk_size = max(CHUNK_SIZE, self.cfg.page_size)
        set_global_server_args_for_scheduler(args)
        cache.init_hicache(args, cache.cache_init_params)
        self.addCleanup(drop_hicache_atexit_pin, cache)
        self.addCleanup(cache.release_host_resources)
        cache.write_through_threshold = 1 << 30
        cache.load_back_threshold = 0
        if config:
            controller = cache.cache_controller
            # Host and device pools of equal size leave no room for prefetches.
            controller.prefetch_capacity_limit = max(
                controller.prefetch_capacity_limit, controller.mem_pool_host.size
            )
            self.addCleanup(self._leave, cache)

    @staticmethod
    def _leave(cache):
        controller = cache.cache_controller
        controller._stop_storage_threads()
        if controller.storage_backend is not None:
            controller.storage_backend.close()

    @staticmethod
    def backend(cache):
        return cache.cache_controller.storage_backend


def _group(tp):
    """Fixtures whose ranks agree among each other, where there are several."""
    if tp[1] == 1:
        return nullcontext()
    params = partial(fixtures.CacheInitParams, tp_cache_group=torch.distributed.group.WORLD)
    return mock.patch.object(fixtures, "CacheInitParams", params)


def _mla(cfg):
    """Fixtures with an MLA pool where the configuration is one for that."""
    ranks = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    if cfg is CONFIGS["mla"]:

        def pool(*, head_num, head_dim, **more):
            return MLATokenToKVPool(**ranks, **more)

        return mock.patch.object(fixtures, "MHATokenToKVPool", pool)
    if cfg is CONFIGS["dsa"]:

        def pool(*, head_num, head_dim, **more):
            with get_parallel().override(attn_dcp_size=1):
                return DSATokenToKVPool(index_head_dim=128, kv_cache_dim=576, **ranks, **more)

        return mock.patch.object(fixtures, "MHATokenToKVPool", pool)
    if cfg is CONFIGS["mla+mamba"]:
        pool = partial(HybridLinearKVPool, use_mla=True, **ranks)
        return mock.patch.object(fixtures, "HybridLinearKVPool", pool)
    return nullcontext()


def layers(pool):
    """Every layer's buffers of a device pool: of MHA keys and values, of MLA the one."""
    if hasattr(pool, "k_buffer"):
        return [*pool.k_buffer, *pool.v_buffer]
    return list(pool.kv_buffer)


def scribble(buffers, seed):
    """Fills buffers with random bytes that are numbers."""
    generator = torch.Generator().manual_seed(seed)
    for buffer in buffers:
        buffer.copy_(torch.randn(buffer.shape, generator=generator).to(buffer.dtype))


def rows(buffers, slots):
    return [buffer[slots.long()].view(torch.uint8).clone() for buffer in buffers]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other))


class Engine:
    """A tree with its pools, and the bytes that a sequence has in them."""

    def __init__(self, test, storage_dir, **init):
        self.test = test
        with _group(test.tp), _mla(test.cfg):
            self.cache, self.allocator, self.requests = build_fixture(test.cfg)
        test._init_hicache(
            self.cache, storage_backend="dynamic", storage_dir=storage_dir, prefetch_threshold=1, **init
        )
        pool = self.allocator.get_kvcache()
        self.kv = getattr(pool, "full_kv_pool", pool)
        self.full = layers(self.kv)
        self.index = list(getattr(pool, "index_k_with_scale_buffer", []))
        self.swa = layers(pool.swa_kv_pool) if test.cfg.has_swa else []
        self.mamba = []
        if test.cfg.has_mamba:
            states = self.requests.mamba_pool.mamba_cache
            # Layer by layer, slots first.
            self.mamba = [layer for state in (states.temporal, *states.conv) for layer in state]

    def scribble(self, seed, rank=0):
        """Random bytes everywhere: in KV those of the seed, in states and in heads of its own those of the rank too."""
        replicated = "kv_lora_rank" in vars(self.kv)
        scribble(self.full + self.swa, seed if replicated else seed + rank)
        scribble(self.mamba, seed + rank)
        for at, buffer in enumerate(self.index):
            buffer.random_(0, 256, generator=torch.Generator().manual_seed(seed + at))

    def bytes_of(self, seq):
        """What the device holds for a sequence: KV of every page; of a window its last page; the state at its end."""
        match = match_prefix(self.cache, seq)
        assert match.device_prefix_len == len(seq), (match.device_prefix_len, len(seq))
        node = match.last_device_node
        slots = self.cache.path_device_indices(node)
        found = rows(self.full, slots)
        found += rows(self.index, slots[:: self.test.cfg.page_size] // self.test.cfg.page_size)
        if self.swa:
            mapping = self.allocator.full_to_swa_index_mapping[slots[-self.test.cfg.page_size :]]
            assert bool((mapping > 0).all())
            found += rows(self.swa, mapping)
        if self.mamba:
            found += rows(self.mamba, node_device_value(self.cache, node, MAMBA))
        return found

    def insert(self, seq):
        self.test._insert(self.cache, self.allocator, self.requests, seq)
        return match_prefix(self.cache, seq).last_device_node

    def store(self, seq):
        """L1 -> L2 -> L3."""
        node = self.insert(seq)
        self.test._backup_node(self.cache, node)
        self.test._write_path_to_l3(self.cache, node)
        self.test._flush_l3_backups(self.cache)

    def prefetch(self, seq, name="r"):
        """L3 -> L2; how many tokens the host holds of the sequence then."""
        handle = CacheRequestHandle(name, 0)
        self.cache.prefetch_from_storage(handle, self.cache.root_node_handle(), array("q", seq), None, None)
        self.test._run_prefetch_to_completion(self.cache, handle)
        match = match_prefix(self.cache, seq)
        return match.device_prefix_len + match.host_hit_length

    def load(self, seq):
        """L2 -> L1."""
        match = match_prefix(self.cache, seq)
        request = mock.Mock()
        if self.mamba:
            request = self.test._make_req(self.requests)
            self.test._apply_match_to_req(request, match)
        self.test._load_back_node(self.cache, match.last_host_node, req=request)

"""Host pools of the real classes, on the CPU, with bytes that say where they are from."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host import base
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost, make_dsa_indexer_pool_decl
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.runtime_context import get_parallel

# SGLang leaves 10 GiB of the host's memory free, which other processes may have taken here.
base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0

#: Pools whose device half must live as long as they do.
_KEPT = []


def _host(pool_class, device, page, host_tokens, layout, **more):
    _KEPT.append(device)
    return pool_class(
        device.get_device_pool_infos()[0].buffer_info,
        0,
        0,
        page,
        layout,
        pin_memory=False,
        device="cpu",
        allocator_type="default",
        device_capacity_tokens=device.size,
        start_layer=device.start_layer,
        end_layer=device.end_layer,
        host_token_capacity=host_tokens,
        **more,
    )


def mha(layers=4, heads=2, dim=64, page=16, pages=32, layout="page_first", dtype=torch.bfloat16):
    device = MHATokenToKVPool(
        size=page,
        page_size=page,
        dtype=dtype,
        head_num=heads,
        head_dim=dim,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )
    return _host(MHATokenToKVPoolHost, device, page, pages * page, layout)


def mla(layers=4, lora=512, rope=64, page=16, pages=32, layout="page_first", dtype=torch.bfloat16):
    device = MLATokenToKVPool(
        size=page,
        page_size=page,
        dtype=dtype,
        kv_lora_rank=lora,
        qk_rope_head_dim=rope,
        layer_num=layers,
        device="cpu",
        enable_memory_saver=False,
    )
    return _host(MLATokenToKVPoolHost, device, page, pages * page, layout, target_layer_num=layers)


def dsa(layers=3, pages=8, layout="page_first", skip_topk_layers=None):
    """An MLA pool and the indexer's beside it, with index keys of the layers that do not share another's."""
    page = 64
    with get_parallel().override(attn_dcp_size=1):
        device = DSATokenToKVPool(
            size=page,
            page_size=page,
            kv_lora_rank=512,
            dtype=torch.bfloat16,
            qk_rope_head_dim=64,
            layer_num=layers,
            device="cpu",
            index_head_dim=128,
            enable_memory_saver=False,
            kv_cache_dim=576,
            skip_topk_layers=skip_topk_layers,
        )
    kv = _host(MLATokenToKVPoolHost, device, page, pages * page, layout, target_layer_num=layers)
    return kv, DSAIndexerPoolHost(make_dsa_indexer_pool_decl(device), kv, pin_memory=False)


def fill(pool, seed=0):
    """Fills a pool with bytes that no two places share for long."""
    flat = _buffer(pool).view(torch.uint8).reshape(-1)
    generator = torch.Generator().manual_seed(seed)
    flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=generator))


def wipe(pool):
    _buffer(pool).view(torch.uint8).zero_()


def _buffer(pool):
    return pool.index_k_with_scale_buffer if isinstance(pool, DSAIndexerPoolHost) else pool.kv_buffer


def page_bytes(pool, page):
    """A page as SGLang flattens it."""
    return pool.get_data_page(page * pool.page_size, flat=True).contiguous().view(torch.uint8).clone()


def indices(pool, pages):
    """Host indices of pages, as SGLang gives them."""
    start = torch.tensor(pages, dtype=torch.int64)[:, None] * pool.page_size
    return (start + torch.arange(pool.page_size, dtype=torch.int64)).flatten()

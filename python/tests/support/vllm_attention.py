"""Attention for vLLM's engine on a processor without AVX-512.

vLLM's kernel is scalar code there: 6,000 tokens of a small model take minutes. Torch's own
attention takes its place, with a plain order of elements in the blocks of the cache. Scheduler,
blocks, prefix cache and connectors are vLLM's.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl


def is_needed():
    return not torch.cpu._is_avx512_supported()


@lru_cache(maxsize=1)
def mask(new, length, groups):
    """Which positions each of the last `new` tokens sees, once for each query head of a group."""
    seen = torch.arange(length) <= torch.arange(length - new, length)[:, None]
    return torch.zeros(seen.shape).masked_fill(~seen, -torch.inf).repeat(groups, 1)


def update(self, layer, key, value, kv_cache, slot_mapping):
    size = kv_cache.shape[2]
    kv_cache[slot_mapping // size, :, slot_mapping % size] = torch.cat((key, value), -1)


def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, **scales):
    if attn_metadata is None:
        return output
    heads, size, width = kv_cache.shape[1:]
    groups, dim = query.shape[1] // heads, width // 2
    starts, lengths = attn_metadata.query_start_loc.tolist(), attn_metadata.seq_lens.tolist()
    for row, (first, end, length) in enumerate(zip(starts, starts[1:], lengths)):
        blocks = attn_metadata.block_table[row, : -(-length // size)]
        pages = kv_cache[blocks].transpose(0, 1).reshape(heads, -1, width)[None, :, :length]
        new = end - first
        asked = query[first:end].view(new, heads, groups, dim).permute(1, 2, 0, 3)
        made = torch.nn.functional.scaled_dot_product_attention(
            asked.reshape(1, heads, groups * new, dim),
            *pages.chunk(2, -1),
            attn_mask=None if new == 1 else mask(new, length, groups).to(query.dtype),
            scale=self.scale,
        )
        made = made.view(heads, groups, new, dim).permute(2, 0, 1, 3)
        output[first:end] = made.reshape(output[first:end].shape)
    return output


def replace():
    CPUAttentionBackendImpl.forward = forward
    CPUAttentionBackendImpl.do_kv_cache_update = update

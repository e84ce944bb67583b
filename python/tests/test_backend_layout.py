"""How the device arranges a page: of equal pages in another order, the backend finds none."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool, LogicalHostPool
from support import pools
from support.backend import keys


@pytest.fixture
def platform(monkeypatch):
    """Names the platform that SGLang has found."""
    from larder_kv import sglang_layout

    def name(platform):
        found = SimpleNamespace(device_name=platform)
        monkeypatch.setattr(sglang_layout, "current_platform", found)

    name("cuda")
    return name


@pytest.fixture
def arranged(monkeypatch):
    """Makes a pool of an arrangement: of equal pages, in another order."""

    def make_(layout):
        from sglang.srt.mem_cache import memory_pool

        with monkeypatch.context() as patch:
            if layout == "hnd":
                patch.setenv("SGLANG_USE_HND_KVCACHE", "1")
            if layout == "vectorized_5d":
                patch.setattr(memory_pool, "_use_aiter", True)
                patch.setenv("SGLANG_AITER_KV_CACHE_LAYOUT", layout)
            return pools.mha()

    return make_


def c4_pool():
    """A pool of DeepSeek-V4, which holds plain bytes."""
    buffers = [torch.zeros(4, 1000, dtype=torch.uint8) for _ in range(3)]
    return DeepSeekV4PagedHostPool(
        "c4", buffers, 1000, num_host_pages=8, slot_page_size=16, pin_memory=False
    )


@pytest.mark.parametrize("layout", ["hnd", "vectorized_5d"])
def test_pages_of_another_arrangement_on_the_device_are_missed(opened, arranged, layout):
    chain, usual = keys(2), arranged("nhd")
    other, indices = arranged(layout), pools.indices(usual, range(2))
    backend = opened(usual)
    assert backend.batch_set_v1(chain, indices) == [True] * 2
    assert other.kv_buffer.shape == usual.kv_buffer.shape and other.dtype == usual.dtype
    rearranged = opened(other)
    assert rearranged.batch_exists(chain) == 0
    assert rearranged.batch_get_v1(chain, indices) == [False] * 2
    assert opened(arranged("nhd")).batch_exists(chain) == 2


def had_pages(backend, name, pool, indices):
    """Whether the store had two pages of a pool. Then it has them."""
    backend.register_mem_host_pool_v2(pool, name)
    transfer = PoolTransfer(name=name, keys=keys(2), host_indices=indices)
    pages = backend.batch_get_v2([transfer])[name]
    backend.batch_set_v2([transfer])
    return all(pages)


@pytest.mark.parametrize(
    "name, value",
    [
        ("SGLANG_DSV4_KV_LAYOUT", "v41"),
        ("SGLANG_DSV4_KV_LAYOUT", "v41_new"),
        ("SGLANG_DSV4_COMPRESSED_KV_LAYOUT", "fp4"),
        ("SGLANG_DSV4_UNIFIED_KV_FP8", "1"),
    ],
)
def test_pages_of_another_arrangement_of_deepseek_v4_are_missed(opened, monkeypatch, name, value):
    def found():
        backend, pool = opened(LogicalHostPool(128, 16), is_mla=True), c4_pool()
        return had_pages(backend, PoolName.DEEPSEEK_V4_C4, pool, pools.indices(pool, range(2)))

    assert not found() and found()
    monkeypatch.setenv(name, value)
    assert not found() and found()
    monkeypatch.delenv(name)
    assert found()


@pytest.mark.parametrize(
    "name",
    [
        "SGLANG_DISABLE_DSA_INDEXER_FUSION",
        "SGLANG_DISABLE_AITER_FUSED_FP8_DSA_INDEXER",
        "SGLANG_DSA_HIP_DISABLE_PRESHUFFLE",
        "SGLANG_USE_AITER",
    ],
)
def test_index_keys_of_other_kernels_are_missed(opened, monkeypatch, name):
    def found():
        kv, indexer = pools.dsa()
        backend = opened(kv, is_mla=True)
        return had_pages(backend, PoolName.INDEXER, indexer, pools.indices(kv, range(2)))

    assert not found() and found()
    monkeypatch.setenv(name, "1")
    assert not found() and found()
    monkeypatch.setenv(name, "0")
    assert found()


def test_pages_of_stages_with_other_layers_are_missed(opened, monkeypatch):
    chain, divided = keys(2), "SGLANG_PP_LAYER_PARTITION"

    def found(**more):
        pool = c4_pool()
        backend = opened(LogicalHostPool(128, 16), is_mla=True, **more)
        backend.register_mem_host_pool_v2(pool, PoolName.DEEPSEEK_V4_C4)
        transfer = PoolTransfer(
            name=PoolName.DEEPSEEK_V4_C4, keys=chain, host_indices=pools.indices(pool, range(2))
        )
        pages = backend.batch_get_v2([transfer])[PoolName.DEEPSEEK_V4_C4]
        backend.batch_set_v2([transfer])
        return all(pages)

    middle = {"pp": (1, 4)}
    assert not found() and not found(**middle) and found(**middle)
    # The second stage has as many layers in each case, but not the same ones.
    for layers in ("2,3,3,4", "4,3,2,3"):
        monkeypatch.setenv(divided, layers)
        assert not found(**middle) and found(**middle)
    # Without stages it has no effect.
    assert found()
    monkeypatch.delenv(divided)
    assert found(**middle)


def test_usual_arrangements_add_nothing_to_a_namespace(platform, monkeypatch):
    from larder_kv.sglang_layout import facts_of

    # As they are, in other words.
    monkeypatch.setenv("SGLANG_DSV4_KV_LAYOUT", "V4")
    monkeypatch.setenv("SGLANG_DSV4_UNIFIED_KV_FP8", "0")
    # Without effect on these pools, or on this platform.
    monkeypatch.setenv("SGLANG_HIP_DSV41_INDEX_K_PAGE8", "1")
    for pool in (pools.mha(), pools.mla(), *pools.dsa(), c4_pool(), LogicalHostPool(128, 16)):
        assert facts_of(pool) == {}
    platform("rocm")
    assert facts_of(pools.mla())["platform"] == "rocm"


@pytest.mark.parametrize("has_kernel", [True, False])
def test_the_index_keys_of_deepseek_v4_are_arranged_as_the_kernels_of_aiter_allow(
    platform, monkeypatch, has_kernel
):
    from larder_kv.sglang_layout import facts_of

    kernels = ModuleType("fp4_indexer_hip")
    kernels.aiter_has_fp4_rowgroup = lambda: has_kernel
    monkeypatch.setitem(sys.modules, "sglang.kernels.ops.attention.dsv4.fp4_indexer_hip", kernels)
    platform("rocm")
    assert "index_k" not in facts_of(c4_pool())
    monkeypatch.setenv("SGLANG_HIP_DSV41_INDEX_K_PAGE8", "1")
    assert ("index_k" in facts_of(c4_pool())) == has_kernel


def test_a_pool_that_does_not_tell_its_arrangement_is_refused(opened):
    pool = pools.mha()
    del pool._buffer_infos
    with pytest.raises(RuntimeError, match="how its pages are arranged"):
        opened(pool)

"""The backend through SGLang's factory, over SGLang's own host pools."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool, LogicalHostPool
from support import pools
from support.backend import config, keys, make

LAYOUTS = ("page_first", "page_first_direct", "layer_first")
MAKERS = {"mha": pools.mha, "mla": pools.mla}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", MAKERS)
def test_pages_come_back_bit_exact_in_other_slots(opened, kind, layout):
    pool = MAKERS[kind](layout=layout)
    pools.fill(pool)
    backend = opened(pool, is_mla=kind == "mla")
    chain, slots = keys(8), [3, 9, 1, 30, 17, 31, 0, 5]
    written = [pools.page_bytes(pool, page) for page in slots]
    assert backend.batch_exists(chain) == 0
    assert backend.batch_set_v1(chain, pools.indices(pool, slots)) == [True] * 8
    assert backend.batch_exists(chain) == 8
    pools.wipe(pool)
    others = [10, 11, 30, 2, 29, 7, 8, 6]
    assert backend.batch_get_v1(chain, pools.indices(pool, others)) == [True] * 8
    for page, expected in zip(others, written):
        assert torch.equal(pools.page_bytes(pool, page), expected)
    assert not pools.page_bytes(pool, 3).any()


@pytest.mark.parametrize("kind", MAKERS)
def test_layer_first_pages_are_those_of_page_first_direct(opened, tmp_path, kind):
    scattered = MAKERS[kind](layout="layer_first")
    pools.fill(scattered)
    chain = keys(4)
    expected = [pools.page_bytes(scattered, page) for page in range(4)]
    opened(scattered, is_mla=kind == "mla").batch_set_v1(chain, pools.indices(scattered, range(4)))
    whole = MAKERS[kind](layout="page_first_direct")
    backend = opened(whole, is_mla=kind == "mla")
    assert backend.batch_get_v1(chain, pools.indices(whole, range(4))) == [True] * 4
    for page in range(4):
        assert torch.equal(pools.page_bytes(whole, page), expected[page])


@pytest.mark.parametrize("transfer", ["direct", "bounce"])
def test_both_ways_to_the_pool_move_the_same_bytes_and_are_counted(opened, transfer):
    pool = pools.mha(heads=4, dim=128)
    pools.fill(pool)
    backend = opened(pool, transfer=transfer)
    chain = keys(4)
    written = [pools.page_bytes(pool, page) for page in range(4)]
    assert all(backend.batch_set_v1(chain, pools.indices(pool, range(4))))
    pools.wipe(pool)
    assert all(backend.batch_get_v1(chain, pools.indices(pool, range(4, 8))))
    assert all(torch.equal(pools.page_bytes(pool, 4 + at), written[at]) for at in range(4))
    counters = backend.counters()
    assert (counters["rank_direct_pages"], counters["rank_bounced_pages"]) == ((8, 0) if transfer == "direct" else (0, 8))
    # Aligned parts are never copied by the engine itself.
    assert counters["bounced_pages"] == 0


def test_parts_that_are_no_multiple_of_a_block_come_back_exact(opened):
    pool = pools.mla(layers=3, lora=100, rope=12, page=1, layout="page_first")
    pools.fill(pool)
    backend = opened(pool, is_mla=True)
    chain = keys(16)
    written = [pools.page_bytes(pool, page) for page in range(16)]
    assert all(backend.batch_set_v1(chain, pools.indices(pool, range(16))))
    pools.wipe(pool)
    assert all(backend.batch_get_v1(chain, pools.indices(pool, range(16, 32))))
    assert all(torch.equal(pools.page_bytes(pool, 16 + at), written[at]) for at in range(16))
    assert not pools.page_bytes(pool, 15).any()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_generic_interface_reads_what_the_other_one_wrote(opened, layout):
    pool = pools.mha(layout=layout)
    pools.fill(pool)
    backend = opened(pool)
    chain = keys(3)
    assert all(backend.batch_set_v1(chain[:2], pools.indices(pool, [4, 5])))
    assert backend.batch_set(chain[2:], [pool.get_data_page(6 * pool.page_size)])
    targets = [pool.get_dummy_flat_data_page() for _ in range(3)]
    read = backend.batch_get(chain, targets)
    for at, page in enumerate(read):
        assert torch.equal(page.view(torch.uint8), pools.page_bytes(pool, 4 + at))
    assert backend.exists(chain[0]) and not backend.exists(keys(1, "other")[0])
    assert backend.get(keys(1, "other")[0], targets[0]) is None
    assert backend.set(keys(1, "third")[0], pool.get_data_page(0)) is True


def test_what_is_stored_already_is_not_written_again(opened):
    pool = pools.mha()
    backend = opened(pool)
    chain = keys(4)
    for _ in range(2):
        assert backend.batch_set_v1(chain, pools.indices(pool, range(4))) == [True] * 4
    counters = backend.counters()
    assert (counters["stored"], counters["duplicate"]) == (4, 4)


def test_pages_survive_a_restart(opened, tmp_path):
    pool = pools.mha()
    pools.fill(pool)
    chain = keys(4)
    expected = pools.page_bytes(pool, 2)
    first = opened(pool)
    first.batch_set_v1(chain, pools.indices(pool, range(4)))
    first.close()
    pools.wipe(pool)
    second = opened(pool)
    assert second.batch_exists(chain) == 4
    assert all(second.batch_get_v1(chain, pools.indices(pool, range(4))))
    assert torch.equal(pools.page_bytes(pool, 2), expected)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other/model"},
        {"weights_tag": "other"},
        {"tp": (1, 2)},
        {"pool": {"dtype": torch.float16}},
        {"pool": {"layout": "page_first_direct"}},
        {"pool": {"page": 8}},
        {"pool": {"layers": 5}},
        {"pool": {"heads": 1, "dim": 128}},
    ],
    ids=lambda change: "-".join(change) + "-" + "-".join(map(str, change.get("pool", {}))),
)
def test_whatever_changes_a_pages_bytes_makes_it_a_miss(opened, change):
    chain = keys(2)
    first = pools.mha()
    opened(first).batch_set_v1(chain, pools.indices(first, range(2)))
    change = dict(change)
    second = pools.mha(**change.pop("pool", {}))
    backend = opened(second, **change)
    assert backend.batch_exists(chain) == 0
    assert backend.batch_get_v1(chain, pools.indices(second, range(2))) == [False] * 2


def test_ranks_of_mla_share_and_ranks_of_mha_do_not(opened):
    chain = keys(2)
    shared = pools.mla()
    opened(shared, is_mla=True, tp=(0, 2)).batch_set_v1(chain, pools.indices(shared, range(2)))
    assert opened(pools.mla(), is_mla=True, tp=(1, 2)).batch_exists(chain) == 2
    own = pools.mha()
    opened(own, tp=(0, 2)).batch_set_v1(chain, pools.indices(own, range(2)))
    assert opened(pools.mha(), tp=(1, 2)).batch_exists(chain) == 0


def test_a_draft_with_heads_of_its_own_is_never_shared_by_ranks(opened):
    chain, draft = keys(1), pools.mha()
    writers = [opened(pools.mla(), is_mla=True, tp=(rank, 2)) for rank in range(2)]
    for writer in writers:
        writer.register_mem_host_pool_v2(draft, PoolName.DRAFT)
    transfer = PoolTransfer(name=PoolName.DRAFT, keys=chain, host_indices=pools.indices(draft, [0]))
    assert writers[0].batch_set_v2([transfer]) == {PoolName.DRAFT: [True]}
    assert writers[1].batch_get_v2([transfer]) == {PoolName.DRAFT: [False]}
    assert writers[0].batch_get_v2([transfer]) == {PoolName.DRAFT: [True]}


def test_a_draft_that_no_rank_but_the_first_will_ever_find_is_warned_of(opened, caplog):
    for is_mla, draft, tp, warns in (
        (True, pools.mha, (1, 2), True),
        (True, pools.mla, (1, 2), False),
        (True, pools.mha, (0, 1), False),
        (False, pools.mha, (1, 2), False),
    ):
        caplog.clear()
        backend = opened(pools.mla() if is_mla else pools.mha(), is_mla=is_mla, tp=tp)
        backend.register_mem_host_pool_v2(draft(), PoolName.DRAFT)
        assert ("on rank 0 only" in caplog.text) == warns, (is_mla, draft, tp)


def test_context_parallel_ranks_that_find_nothing_are_warned_of(tmp_path, caplog):
    from larder_kv.sglang import LarderHiCache

    for is_mla, ranks, warns in ((True, 2, True), (True, 1, False), (False, 2, False)):
        caplog.clear()
        given = config(tmp_path, is_mla=is_mla, tp=(0, 2))
        given.attn_cp_size = ranks
        LarderHiCache(given, {}).close()
        assert ("attn_cp_size" in caplog.text) == warns, (is_mla, ranks)


def test_a_gap_ends_the_hit_and_the_pages_behind_it_are_still_read(opened):
    pool = pools.mha()
    backend = opened(pool)
    chain = keys(4)
    backend.batch_set_v1([chain[0], chain[1], chain[3]], pools.indices(pool, [0, 1, 3]))
    assert backend.batch_exists(chain) == 2
    assert backend.batch_get_v1(chain, pools.indices(pool, range(4, 8))) == [True, True, False, True]


def test_prefix_keys_say_what_came_before(opened):
    pool = pools.mha()
    backend = opened(pool)
    chain = keys(6)
    info = HiCacheStorageExtraInfo(prefix_keys=chain[:3])
    assert all(backend.batch_set_v1(chain[:3], pools.indices(pool, range(3)), None))
    assert all(backend.batch_set_v1(chain[3:], pools.indices(pool, range(3, 6)), info))
    assert backend.batch_exists(chain[3:], info) == 3
    assert backend.batch_exists(chain) == 6


def test_what_makes_no_sense_is_a_miss_and_never_an_exception(opened):
    pool = pools.mha()
    backend = opened(pool)
    chain = keys(2)
    good = pools.indices(pool, range(2))
    assert backend.batch_set_v1(chain, good[:-1]) == [False] * 2
    assert backend.batch_set_v1(chain, good + 1) == [False] * 2
    assert backend.batch_get_v1(chain, good + 10**9) == [False] * 2
    assert backend.batch_get_v1(chain, pools.indices(pool, [1, 1])) == [False] * 2
    assert backend.batch_set_v1(["not a key", chain[0]], good) == [False] * 2
    assert backend.batch_set_v1([chain[0], "not a key"], good) == [True, False]
    assert backend.batch_exists(["not a key"]) == 0
    assert backend.batch_exists([7]) == 0
    assert backend.batch_get_v1(chain, None) == [False] * 2
    assert backend.batch_set_v1(chain, "nonsense") == [False] * 2
    assert backend.batch_get(chain, [torch.zeros(3)] * 2) == [None] * 2
    unknown = PoolTransfer(name=PoolName.SWA, keys=chain, host_indices=good)
    assert backend.batch_get_v2([unknown]) == {PoolName.SWA: [False] * 2}
    assert backend.batch_set_v2([unknown]) == {PoolName.SWA: [False] * 2}
    assert backend.batch_exists_v2(chain, [unknown]).kv_hit_pages == 0


def test_clear_takes_this_servers_pages_and_no_others(opened):
    pool = pools.mha()
    chain = keys(3)
    mine, other = opened(pool), opened(pool, model="other/model")
    for backend in (mine, other):
        backend.batch_set_v1(chain, pools.indices(pool, range(3)))
    assert mine.clear() is True
    assert (mine.batch_exists(chain), other.batch_exists(chain)) == (0, 3)
    assert all(mine.batch_set_v1(chain, pools.indices(pool, range(3))))


def test_a_clear_fails_where_a_remote_brings_the_pages_back(opened, tmp_path, caplog):
    place, pool, chain = tmp_path / "remote", pools.mha(), keys(4)
    (place / "v1").mkdir(parents=True)
    remote = {"l4": f"file://{place}", "l4_unsigned": True, "l4_admission": "through", "l4_run_tokens": 4 * pool.page_size}
    owner = opened(pool, path=tmp_path / "store", **remote)
    # Remotes are the owner's: a process without their keys uses them too.
    client = opened(pool, path=tmp_path / "store")
    for backend in (owner, client):
        backend.batch_set_v1(chain, pools.indices(pool, range(4)))
        assert backend.batch_exists(chain) == 4
        caplog.clear()
        assert backend.clear() is False
        assert "use another `weights_tag`" in caplog.text
        assert backend.counters()["pages"] == 0


def test_after_close_everything_misses_and_a_second_close_is_nothing(opened):
    pool = pools.mha()
    backend = opened(pool)
    chain = keys(2)
    backend.close()
    backend.close()
    assert backend.batch_exists(chain) == 0
    assert backend.batch_set_v1(chain, pools.indices(pool, range(2))) == [False] * 2
    assert backend.batch_get_v1(chain, pools.indices(pool, range(2))) == [False] * 2
    assert backend.get_stats() is None
    assert backend.clear() is False


def test_stats_tell_each_batch_once(opened):
    pool = pools.mha()
    backend = opened(pool, metrics=True)
    chain = keys(3)
    backend.batch_set_v1(chain, pools.indices(pool, range(3)))
    backend.batch_get_v1(chain, pools.indices(pool, range(3)))
    stats = backend.get_stats()
    assert (stats.backup_pgs, stats.prefetch_pgs) == ([3], [3])
    assert len(stats.backup_bandwidth) == len(stats.prefetch_bandwidth) == 1
    again = backend.get_stats()
    assert again.backup_pgs == again.prefetch_pgs == []


def test_pages_that_come_while_blocks_are_written_beforehand_are_there(opened):
    pool = pools.mha(layers=8, heads=8, dim=128, page=16, pages=32)
    pools.fill(pool)
    expected = [pools.page_bytes(pool, page) for page in range(32)]
    backend = opened(pool, size="512MiB", prewrite=True)
    chains = [keys(32, f"chain {at}") for at in range(10)]
    indices = pools.indices(pool, range(32))
    for chain in chains:
        assert all(backend.batch_set_v1(chain, indices))
    for chain in chains:
        pools.wipe(pool)
        assert all(backend.batch_get_v1(chain, indices))
        assert all(torch.equal(pools.page_bytes(pool, page), expected[page]) for page in range(32))


def test_a_store_that_is_full_leaves_out_old_pages_and_refuses_nothing(opened):
    pool = pools.mha(layers=8, heads=8, dim=128, page=64, pages=4)
    backend = opened(pool)
    for at in range(200):
        assert all(backend.batch_set_v1(keys(4, f"chain {at}"), pools.indices(pool, range(4))))
    counters = backend.counters()
    assert counters["live_bytes"] <= counters["usable_bytes"] < counters["capacity_bytes"]
    assert counters["evicted_pages"] + counters["dropped"] > 0
    assert counters["failed"] == 0


@pytest.mark.parametrize(
    "name, window",
    [
        (PoolName.MAMBA, 1),
        (PoolName.SWA, 2),
        (PoolName.DRAFT_SWA, 2),
        (PoolName.DEEPSEEK_V4_C4_STATE, 2),
        (PoolName.DEEPSEEK_V4_C4_INDEXER_STATE, 2),
        (PoolName.DEEPSEEK_V4_C128_STATE, 1),
    ],
)
def test_windows_and_states_of_long_prompts_are_stored_in_a_full_store_too(opened, name, window):
    """The store would refuse a page that does not fit together with 200 others before it."""
    kv = pools.mha(layers=1, heads=1, page=64, pages=20)
    pool = pools.mha(layers=8, heads=8, dim=128, page=64, pages=4)
    backend = opened()
    for each, named in ((kv, PoolName.KV), (pool, name)):
        pools.fill(each)
        backend.register_mem_host_pool_v2(each, named)
    backend.on_host_pools_registered()

    def transfer(pages, **more):
        return PoolTransfer(name=name, keys=pages, hit_policy=PoolHitPolicy.TRAILING_PAGES, **more)

    full = {"host_indices": pools.indices(pool, range(4))}
    for at in range(50):
        backend.batch_set_v2([transfer(keys(4, f"chain {at}"), **full)])
    assert backend.counters()["evicted_pages"] > 0
    prompt = keys(200, "long")
    last = {"host_indices": pools.indices(pool, range(window))}

    def store():
        """As SGLang does: node by node, and of each node the last pages."""
        for end in range(20, 201, 20):
            node = prompt[end - 20 : end]
            before = HiCacheStorageExtraInfo(prefix_keys=prompt[: end - window])
            backend.batch_set_v2([transfer(node[-window:], **last)], before)
            before = HiCacheStorageExtraInfo(prefix_keys=prompt[: end - 20])
            backend.batch_set_v1(node, pools.indices(kv, range(20)), before)

    def restorable():
        asked = transfer(["__placeholder__"] * window)
        return backend.batch_exists_v2(prompt, [asked]).restorable_prefix_pages

    # A slow disk has no room at times, and then has it.
    for _ in range(20):
        store()
        if restorable() == list(range(20, 201, 20)):
            break
    assert restorable() == list(range(20, 201, 20))
    assert backend.batch_get_v2([transfer(prompt[-window:], **last)]) == {name: [True] * window}


@pytest.mark.parametrize(
    "name", [PoolName.SWA, PoolName.MAMBA, PoolName.DEEPSEEK_V4_C128_STATE], ids=lambda name: name.value
)
@pytest.mark.parametrize("whose", ["its own", "the owner's"])
def test_a_remote_beneath_windows_or_states_is_refused(opened, tmp_path, name, whose):
    place = tmp_path / "remote"
    (place / "v1").mkdir(parents=True)
    remote = {"l4": f"file://{place}", "l4_unsigned": True}
    dense = opened(pools.mha(), **remote)
    assert dense.counters()["part"] == "owner"
    backend = opened(pools.mha(layers=3), **(remote if whose == "its own" else {}))
    with pytest.raises(ValueError, match=f"{name.value}.*`l4`"):
        backend.register_mem_host_pool_v2(pools.mha(layers=2), name)
    # Pools that follow each page of the model are not.
    opened(pools.mha(layers=3)).register_mem_host_pool_v2(pools.mha(layers=2), PoolName.DRAFT)


# --- pools beside the KV


def beside(opened, policy, **more):
    """A backend with a pool beside the KV, a chain of 6 whose KV is stored, and how to store and ask for the other pool."""
    kv, other = pools.mha(), pools.mha(layers=2)
    backend = opened(kv, **more)
    backend.register_mem_host_pool_v2(other, PoolName.SWA)
    chain = keys(6)
    backend.batch_set_v1(chain, pools.indices(kv, range(6)))

    def store(pages):
        transfer = PoolTransfer(
            name=PoolName.SWA, keys=[chain[page] for page in pages], host_indices=pools.indices(other, pages)
        )
        assert backend.batch_set_v2([transfer]) == {PoolName.SWA: [True] * len(pages)}

    def ask(window=1, **geometry):
        transfer = PoolTransfer(
            name=PoolName.SWA, keys=["__placeholder__"] * window, hit_policy=policy, **geometry
        )
        return backend.batch_exists_v2(chain, [transfer])

    return store, ask


def test_a_pool_of_all_pages_limits_the_hit(opened):
    store, ask = beside(opened, PoolHitPolicy.ALL_PAGES)
    store([0, 1, 2, 4])
    result = ask()
    assert (result.kv_hit_pages, result.restorable_prefix_pages) == (3, [1, 2, 3])
    assert result.extra_pool_hit_pages == {PoolName.KV: 6, PoolName.SWA: 3}


def test_a_pool_of_trailing_pages_leaves_gaps_in_what_can_be_restored(opened):
    store, ask = beside(opened, PoolHitPolicy.TRAILING_PAGES)
    store([1, 2, 4])
    assert ask(1).restorable_prefix_pages == [2, 3, 5]
    assert ask(1).kv_hit_pages == 5
    assert ask(2).restorable_prefix_pages == [3]
    assert ask(3).restorable_prefix_pages == []
    assert ask(3).kv_hit_pages == 0


def test_a_pool_of_groups_reports_and_limits_nothing(opened):
    store, ask = beside(opened, PoolHitPolicy.BLOCK_GROUPS)
    store([1, 3])
    result = ask(block_pages=2, group_pages=1)
    assert result.kv_hit_pages == 6
    assert result.extra_pool_hit_pages[PoolName.SWA] == 4


def test_an_anchor_without_bytes_leaves_the_hit_to_the_pools_beside_it(opened):
    anchor, pool = LogicalHostPool(512, 16), pools.mla()
    pools.fill(pool)
    backend = opened(anchor, is_mla=True)
    backend.register_mem_host_pool_v2(pool, PoolName.DEEPSEEK_V4_C4)
    chain = keys(4)
    kv = pools.indices(pool, range(4))
    assert backend.batch_set_v1(chain, kv) == backend.batch_get_v1(chain, kv) == [True] * 4
    c4 = PoolTransfer(name=PoolName.DEEPSEEK_V4_C4, keys=chain[:2], host_indices=kv[:32])
    assert backend.batch_set_v2([c4]) == {PoolName.DEEPSEEK_V4_C4: [True] * 2}
    assert backend.batch_exists_v2(chain, [c4]).kv_hit_pages == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pools_of_deepseek_v4_come_back_bit_exact(opened, layout):
    pool = DeepSeekV4PagedHostPool(
        "c4",
        device_buffers=[torch.zeros(4, 1000, dtype=torch.uint8) for _ in range(3)],
        item_bytes=1000,
        num_host_pages=8,
        slot_page_size=16,
        layout=layout,
        pin_memory=False,
    )
    for at, buffer in enumerate(pool.kv_buffer):
        buffer.random_(0, 256, generator=torch.Generator().manual_seed(at))
    backend = opened(LogicalHostPool(128, 16), is_mla=True)
    backend.register_mem_host_pool_v2(pool, PoolName.DEEPSEEK_V4_C4)
    chain, written = keys(3), [pools.page_bytes(pool, page) for page in range(3)]

    def transfer(pages):
        return PoolTransfer(name=PoolName.DEEPSEEK_V4_C4, keys=chain, host_indices=pools.indices(pool, pages))

    assert backend.batch_set_v2([transfer([0, 1, 2])]) == {PoolName.DEEPSEEK_V4_C4: [True] * 3}
    assert backend.batch_get_v2([transfer([7, 5, 6])]) == {PoolName.DEEPSEEK_V4_C4: [True] * 3}
    for page, expected in zip([7, 5, 6], written):
        assert torch.equal(pools.page_bytes(pool, page), expected)


@pytest.mark.parametrize("skip", [None, [False, True, False]], ids=["all layers", "layers that share"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_indexer_of_sparse_attention_comes_back_with_its_kv(opened, layout, skip):
    kv, indexer = pools.dsa(layout=layout, skip_topk_layers=skip)
    backend = opened(kv, is_mla=True)
    backend.register_mem_host_pool_v2(indexer, PoolName.INDEXER)
    for at, pool in enumerate((kv, indexer)):
        pools.fill(pool, seed=at)
    chain = keys(4)
    written = [[pools.page_bytes(pool, page) for page in range(4)] for pool in (kv, indexer)]

    def transfer(pages):
        host_indices = pools.indices(kv, pages)
        return PoolTransfer(
            name=PoolName.INDEXER, keys=chain[: len(pages)], host_indices=host_indices, indices_from_pool=PoolName.KV
        )

    assert backend.batch_set_v1(chain, pools.indices(kv, range(4))) == [True] * 4
    assert backend.batch_set_v2([transfer([0, 1, 2])]) == {PoolName.INDEXER: [True] * 3}
    # A page whose index keys are missing is of no use.
    found = backend.batch_exists_v2(chain, [transfer([0, 1, 2])])
    assert (found.kv_hit_pages, found.extra_pool_hit_pages[PoolName.INDEXER]) == (3, 3)
    others = [7, 5, 6, 4]
    for pool in (kv, indexer):
        pools.wipe(pool)
    assert backend.batch_get_v1(chain, pools.indices(kv, others)) == [True] * 4
    assert backend.batch_get_v2([transfer(others)]) == {PoolName.INDEXER: [True] * 3 + [False]}
    for at, page in enumerate(others):
        assert torch.equal(pools.page_bytes(kv, page), written[0][at])
        if at < 3:
            assert torch.equal(pools.page_bytes(indexer, page), written[1][at])


@pytest.mark.parametrize("refusal", [NotImplementedError, ValueError])
def test_a_pool_that_tells_no_addresses_is_copied_page_by_page(opened, refusal):
    pool = pools.mha()
    pools.fill(pool)
    pool.get_page_buffer_meta = mock.Mock(side_effect=refusal("no addresses"))
    backend = opened(pool)
    chain, written = keys(3), [pools.page_bytes(pool, page) for page in range(3)]
    assert backend.batch_set_v1(chain, pools.indices(pool, range(3))) == [True] * 3
    pools.wipe(pool)
    assert backend.batch_get_v1(chain + keys(1, "other"), pools.indices(pool, range(4, 8))) == [True] * 3 + [False]
    for at, expected in enumerate(written):
        assert torch.equal(pools.page_bytes(pool, 4 + at), expected)


def test_two_transfers_of_one_pool_in_one_call_are_answered_in_order(opened):
    pool = pools.mha()
    backend = opened(pool)
    chain = keys(3)

    def transfer(pages):
        return PoolTransfer(
            name=PoolName.KV, keys=[chain[page] for page in pages], host_indices=pools.indices(pool, pages)
        )

    backend.batch_set_v2([transfer([0]), transfer([2])])
    assert backend.batch_get_v2([transfer([0, 1]), transfer([2])]) == {PoolName.KV: [True, False, True]}


# --- what goes wrong on the disk


def store_file(path) -> Path:
    return Path(path) / "larder.store"


def test_a_flipped_byte_costs_its_page_and_the_next_set_repairs_it(opened, tmp_path):
    pool = pools.mha()
    pools.fill(pool)
    backend = opened(pool)
    chain = keys(3)
    indices = pools.indices(pool, range(3))
    backend.batch_set_v1(chain, indices)
    needle = pools.page_bytes(pool, 1).numpy().tobytes()[:4096]
    with open(store_file(tmp_path), "r+b") as file:
        at = file.read(64 << 20).find(needle)
        assert at > 0
        file.seek(at + 100)
        file.write(bytes([needle[100] ^ 1]))
        file.flush()
        os.fsync(file.fileno())
    assert backend.batch_get_v1(chain, indices) == [True, False, True]
    assert backend.batch_exists(chain) == 1
    pools.fill(pool)
    assert backend.batch_set_v1(chain, indices) == [True] * 3
    pools.wipe(pool)
    assert backend.batch_get_v1(chain, indices) == [True] * 3
    assert pools.page_bytes(pool, 1).numpy().tobytes()[:4096] == needle
    assert backend.counters()["rank_damaged_pages"] == 1


def test_a_directory_that_vanishes_does_not_stop_the_server(opened, tmp_path):
    pool = pools.mha()
    backend = opened(pool)
    chain = keys(2)
    for file in tmp_path.iterdir():
        file.unlink()
    tmp_path.rmdir()
    assert len(backend.batch_set_v1(chain, pools.indices(pool, range(2)))) == 2
    backend.batch_exists(chain)
    backend.close()
    tmp_path.mkdir()


def test_a_truncated_store_is_refused_with_the_reason_or_missed_if_so_configured(opened, tmp_path):
    opened(pools.mha()).close()
    os.truncate(store_file(tmp_path), 64 << 20)
    with pytest.raises(RuntimeError, match="truncated"):
        opened(pools.mha())
    pool = pools.mha()
    backend = opened(pool, on_error="miss")
    chain = keys(2)
    assert backend.batch_exists(chain) == 0
    assert backend.batch_set_v1(chain, pools.indices(pool, range(2))) == [False] * 2
    assert backend.batch_get_v1(chain, pools.indices(pool, range(2))) == [False] * 2


def test_a_store_that_was_not_to_be_had_at_the_start_is_used_once_it_is(opened, tmp_path):
    chain, pool, path = keys(2), pools.mha(), tmp_path / "store"
    path.write_text("in the way")
    backend = opened(pool, path=path, on_error="miss")
    assert "tried again" in backend._backend.remarks[0]
    assert backend.batch_set_v1(chain, pools.indices(pool, range(2))) == [False] * 2
    assert not backend._backend.try_again()
    path.unlink()
    assert backend._backend.try_again()
    assert backend.batch_set_v1(chain, pools.indices(pool, range(2))) == [True] * 2
    assert backend.batch_get_v1(chain, pools.indices(pool, range(2))) == [True] * 2
    assert backend.counters()["part"] == "owner"


def test_a_clear_without_a_store_is_owed_until_there_is_one(opened, tmp_path, caplog):
    chain, pool, path, aside = keys(2), pools.mha(), tmp_path / "store", tmp_path / "aside"
    before = opened(pool, path=path)
    before.batch_set_v1(chain, pools.indices(pool, range(2)))
    before.close()
    path.rename(aside)
    path.write_text("in the way")
    backend = opened(pool, path=path, on_error="miss")
    assert backend.clear() is False
    assert "if it ends first, clear again" in caplog.text
    path.unlink()
    aside.rename(path)
    assert backend._backend.try_again()
    assert backend.batch_exists(chain) == 0
    assert backend.clear() is True


def test_a_store_does_not_grow_beyond_what_is_free(tmp_path):
    with pytest.raises(RuntimeError, match="no space"):
        make(tmp_path, size="8000TiB")
    assert list(tmp_path.glob("*.store*")) == []


# --- pages and segments


def large_pages():
    """A pool with pages of 20 MiB."""
    return pools.mha(layers=20, heads=8, dim=128, page=256, pages=3)


def test_a_new_store_has_segments_for_the_pages_of_its_pools(opened, caplog):
    caplog.set_level("INFO", logger="larder_kv.sglang")
    pool = large_pages()
    pools.fill(pool)
    backend = opened(pool, size="300MiB")
    assert "is created when the pools are registered" in caplog.text and "attached to" in caplog.text
    chain = keys(2)
    assert backend.batch_set_v1(chain, pools.indices(pool, [0, 1])) == [True] * 2
    assert backend.batch_exists(chain) == 2


def test_pages_that_do_not_fit_the_segments_are_refused_at_the_start_with_the_command_that_mends_it(
    opened, tmp_path, caplog
):
    opened(pools.mha()).close()
    command = f"larder create {store_file(tmp_path)} --size .* --page-bytes .* --force"
    with pytest.raises(RuntimeError, match=command):
        opened(large_pages())
    pool = large_pages()
    caplog.set_level("INFO", logger="larder_kv.sglang")
    # Encoded, a page may fit all the same.
    backend = opened(pool, on_error="miss", codec="off")
    assert "none can ever be stored" in caplog.text
    assert backend.batch_set_v1(keys(1), pools.indices(pool, [0])) == [False]


def test_a_relative_path_is_shown_absolute(opened, tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    backend = opened(pools.mha(), path="here")
    assert backend._backend.volume == str(tmp_path / "here" / "larder.store")
    assert "is relative" in caplog.text


def test_the_settings_of_the_owner_are_logged(opened, caplog):
    caplog.set_level("INFO", logger="larder_kv.sglang")
    opened(pools.mha(), sync="always", lease="9s")
    assert "sync always, lease 9s, prewrite false" in caplog.text

"""End to end with SGLang's own tree, controller and threads: what one engine computed another one reads, bit for bit."""

from __future__ import annotations

import json
import os
from array import array
from unittest import mock

import pytest
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.runtime_context import get_context
from support import pools
from support.backend import extra, keys, make
from support.cpu import STUBS
from support.trees import CONFIGS, Engine, Trees, same
from sglang.test.kits.unified_radix_cache.fixtures import match_prefix


@pytest.fixture
def trees(request):
    """SGLang's fixtures, cleaned up at the end."""
    made = []

    def make(cfg, layout="page_first", **more):
        test = Trees("run")
        test.cfg, test.layout, test.more = CONFIGS[cfg], layout, more
        made.append(test)
        return test

    yield make
    for test in reversed(made):
        test.doCleanups()


def sequence(test, pages=4):
    return test._make_seq(1, pages)


@pytest.mark.parametrize(
    "cfg, layout",
    [
        ("mha", "page_first"),
        ("mha", "page_first_direct"),
        ("mha", "layer_first"),
        ("mha-64", "page_first"),
        ("swa", "page_first"),
        ("mamba", "page_first"),
        ("dsa", "page_first"),
        ("dsa", "layer_first"),
    ],
)
def test_a_new_engine_has_the_bytes_of_the_one_before(trees, tmp_path, cfg, layout):
    test = trees(cfg, layout)
    seq = sequence(test)
    first = Engine(test, tmp_path)
    first.scribble(1)
    first.store(seq)
    expected = first.bytes_of(seq)
    test._leave(first.cache)
    second = Engine(test, tmp_path)
    second.scribble(2)
    assert second.prefetch(seq) == len(seq)
    second.load(seq)
    assert same(second.bytes_of(seq), expected)
    second.cache.sanity_check()


def test_models_with_windows_states_and_indexers_share_a_store_with_a_dense_one(trees, tmp_path):
    """The same tokens in all of them, so the same keys in models of the same page size."""
    stored = {}
    for at, cfg in enumerate(("mha", "swa", "mamba", "dsa", "mha-64")):
        test = trees(cfg)
        seq = sequence(test)
        engine = Engine(test, tmp_path)
        assert engine.prefetch(seq, "before") == 0, f"{cfg} finds pages of another model"
        engine.scribble(at)
        engine.store(seq)
        stored[cfg] = (test, seq, engine.bytes_of(seq))
        test._leave(engine.cache)
    for at, (cfg, (test, seq, expected)) in enumerate(stored.items()):
        engine = Engine(test, tmp_path)
        engine.scribble(100 + at)
        assert engine.prefetch(seq, cfg) == len(seq), cfg
        engine.load(seq)
        assert same(engine.bytes_of(seq), expected), cfg
        test._leave(engine.cache)


@pytest.mark.parametrize("cfg", ["swa", "mamba"])
def test_a_prompt_of_20_windows_in_a_full_store_keeps_its_last_one(trees, tmp_path, cfg):
    test = trees(cfg)
    windows = 20 if cfg == "swa" else 12
    seq = sequence(test, windows)
    filler, pool = None, pools.mha(layers=8, heads=8, dim=128, page=64, pages=4)
    pools.fill(pool)
    first = Engine(test, tmp_path)
    filler = make(tmp_path, pool, model="test/filler")

    def fill(chains):
        for chain in chains:
            filler.batch_set_v1(keys(4, f"chain {chain}"), pools.indices(pool, range(4)))

    fill(range(60))
    assert filler.counters()["evicted_pages"] > 0
    first.scribble(1)
    first.store(seq)
    expected = first.bytes_of(seq)
    # Less than the store holds.
    fill(range(100, 105))
    filler.close()
    test._leave(first.cache)
    second = Engine(test, tmp_path)
    second.scribble(2)
    assert second.prefetch(seq) == len(seq)
    second.load(seq)
    assert same(second.bytes_of(seq), expected)


def test_engines_that_run_at_once_share_what_each_of_them_stores(trees, tmp_path):
    test = trees("mha")
    one, other = Engine(test, tmp_path), Engine(test, tmp_path)
    parts = {test.backend(engine.cache).counters()["part"] for engine in (one, other)}
    assert parts == {"owner", "client"}
    for at, (writer, reader) in enumerate([(one, other), (other, one)]):
        seq = test._make_seq(1000 * (at + 1), 3)
        writer.scribble(at)
        writer.store(seq)
        assert reader.prefetch(seq, f"r{at}") == len(seq)
        reader.load(seq)
        assert same(reader.bytes_of(seq), writer.bytes_of(seq))


def test_service_goes_on_when_the_owner_goes(trees, tmp_path):
    test = trees("mha")
    owner, client = Engine(test, tmp_path), Engine(test, tmp_path)
    seq = sequence(test)
    owner.scribble(1)
    owner.store(seq)
    expected = owner.bytes_of(seq)
    test._leave(owner.cache)
    assert client.prefetch(seq) == len(seq)
    client.load(seq)
    assert same(client.bytes_of(seq), expected)
    assert test.backend(client.cache).counters()["part"] == "owner"


@pytest.mark.parametrize("cfg", ["mha", "swa"])
def test_buffer_only_mode_stores_and_restores(trees, tmp_path, cfg):
    test = trees(cfg)
    seq = test._buffer_swa_seq()
    _, (keys, values) = test._produce_buffer_l3(str(tmp_path), seq, marker=9)
    cache, allocator, _ = test._build_buffer_hicache_fixture(str(tmp_path))
    handle = CacheRequestHandle("buffer", 0)
    cache.prefetch_from_storage(handle, cache.root_node_handle(), array("q", seq), None, None)
    test._run_prefetch_to_completion(cache, handle)
    match = match_prefix(cache, seq)
    assert match.device_prefix_len == len(seq)
    restored = test._snapshot_full_kv(allocator, cache.path_device_indices(match.last_device_node))
    assert same(restored, (keys, values))
    cache.sanity_check()


@pytest.mark.parametrize("cfg", ["mha", "swa", "mamba"])
def test_what_was_never_stored_is_not_found(trees, tmp_path, cfg):
    test = trees(cfg)
    engine = Engine(test, tmp_path)
    engine.store(sequence(test))
    # Another engine, so that nothing is in its own tiers.
    other = Engine(test, tmp_path)
    assert other.prefetch(test._make_seq(5000, 4)) == 0
    other.cache.sanity_check()


def test_prefix_keys_go_all_the_way(trees, tmp_path):
    test = trees("mha", hicache_storage_pass_prefix_keys=True)
    engine = Engine(test, tmp_path)
    head, seq = sequence(test, 2), sequence(test, 5)
    engine.store(head)
    engine.store(seq)
    other = Engine(test, tmp_path)
    assert other.prefetch(seq) == len(seq)


def test_flush_and_reset_leave_the_store_alone(trees, tmp_path):
    test = trees("mha")
    engine = Engine(test, tmp_path)
    seq = sequence(test)
    engine.scribble(1)
    engine.store(seq)
    expected = engine.bytes_of(seq)
    engine.cache.reset()
    engine.scribble(2)
    assert engine.prefetch(seq) == len(seq)
    engine.load(seq)
    assert same(engine.bytes_of(seq), expected)


def test_the_backend_is_detached_and_attached_while_the_engine_runs(trees, tmp_path):
    test = trees("mha")
    engine = Engine(test, tmp_path)
    seq, more = sequence(test), test._make_seq(2000, 3)
    engine.scribble(1)
    engine.store(seq)
    expected = engine.bytes_of(seq)
    done, why = engine.cache.detach_storage_backend()
    assert done, why
    table = extra(tmp_path) | {"prefetch_threshold": 1}
    done, why = engine.cache.attach_storage_backend("dynamic", json.dumps(table | {"sise": 1}))
    assert not done and "`sise`" in why
    # As SGLang's scheduler notes the detach.
    get_context().override("test", hicache_storage_backend=None)
    untagged = {key: value for key, value in table.items() if key != "weights_tag"}
    done, why = engine.cache.attach_storage_backend("dynamic", json.dumps(untagged))
    assert not done and "a running server" in why and "`weights_tag`" in why
    done, why = engine.cache.attach_storage_backend("dynamic", json.dumps(table), hicache_storage_prefetch_policy="wait_complete")
    assert done, why
    engine.store(more)
    engine.cache.reset()
    engine.scribble(2)
    assert engine.prefetch(more, "more") == len(more)
    assert engine.prefetch(seq, "seq") == len(seq)
    engine.load(seq)
    assert same(engine.bytes_of(seq), expected)


def test_a_failed_attach_leaves_the_store_and_after_a_detach_another_one_works(trees, tmp_path):
    test = trees("swa")
    engine = Engine(test, tmp_path)
    assert engine.cache.detach_storage_backend()[0]
    table = json.dumps(extra(tmp_path) | {"prefetch_threshold": 1})
    # SGLang registers the first pool itself, and cleans up after a failure only there.
    facts = mock.Mock(side_effect=[{}, RuntimeError("no arrangement")])
    with mock.patch("larder_kv.sglang_layout.facts_of", facts):
        done, why = engine.cache.attach_storage_backend("dynamic", table)
    assert not done and "no arrangement" in why
    assert "part" not in test.backend(engine.cache).counters()
    done, why = engine.cache.attach_storage_backend("dynamic", table)
    assert not done and "already attached" in why
    assert engine.cache.detach_storage_backend()[0]
    done, why = engine.cache.attach_storage_backend("dynamic", table)
    assert done, why


def test_clearing_the_backend_empties_what_this_server_stored(trees, tmp_path):
    test = trees("mha")
    engine = Engine(test, tmp_path)
    seq = sequence(test)
    engine.store(seq)
    assert engine.cache.cache_controller.clear_storage_backend() is True
    assert Engine(test, tmp_path).prefetch(seq) == 0


@pytest.mark.parametrize("cfg", ["mha", "swa"])
def test_failures_that_sglang_injects_cost_hits_and_nothing_else(trees, tmp_path, cfg):
    test = trees(cfg)
    seq = sequence(test)
    faults = {
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3",
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "1",
    }
    with mock.patch.dict(os.environ, faults):
        first = Engine(test, tmp_path)
        first.scribble(1)
        first.store(seq)
        expected = first.bytes_of(seq)
        for at in range(6):
            engine = Engine(test, tmp_path)
            engine.scribble(2 + at)
            found = engine.prefetch(seq, f"r{at}")
            assert found in range(0, len(seq) + 1, test.cfg.page_size)
            engine.cache.sanity_check()
            if found == len(seq):
                engine.load(seq)
                assert same(engine.bytes_of(seq), expected)
    healthy = Engine(test, tmp_path)
    healthy.store(seq)
    assert Engine(test, tmp_path).prefetch(seq, "healthy") == len(seq)


@pytest.mark.parametrize("when", ["submitted", "waited"])
@pytest.mark.parametrize("layout", ["page_first", "page_first_direct"])
def test_a_page_whose_copy_to_the_host_failed_is_never_stored(trees, tmp_path, when, layout):
    test = trees("mha", layout=layout)
    seq = sequence(test)
    engine = Engine(test, tmp_path)
    engine.scribble(1)
    host = MHATokenToKVPoolHost
    copy = host.backup_from_device_all_layer_physical

    def fail(*_, **__):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def copy_and_fail(pool, device_pool, host_indices, device_indices, *more, **named):
        half = len(host_indices) // 2
        copy(pool, device_pool, host_indices[:half], device_indices[:half], *more, **named)
        fail()

    failing = {
        "submitted": mock.patch.object(host, "backup_from_device_all_layer_physical", copy_and_fail),
        "waited": mock.patch.multiple(STUBS.Event, query=fail, synchronize=fail),
    }
    with failing[when], pytest.raises(RuntimeError, match="illegal memory access"):
        engine.store(seq)
    assert Engine(test, tmp_path).prefetch(seq) == 0, "bytes that never came were stored"

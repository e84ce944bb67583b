"""The tier's contract with vLLM, against vLLM's own manager and CPU tier: what is stored is
found, whole, and nothing else.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import pytest
from support.child import Child
from support.tokens import tokens
from support.vllm import BLOCK, ROW, Steps, content, hashed, keys, steps, tier, volume
from support.waiting import eventually
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext

CHAIN = keys(24)


def test_chunks_are_found_again_after_a_restart(tmp_path):
    with steps(tier(tmp_path)) as first:
        assert first.store(CHAIN) == len(CHAIN)
        first.forget()
        assert first.load(CHAIN) == (24, 24)
    with steps(tier(tmp_path)) as second:
        assert second.load(CHAIN) == (24, 24)
        assert second.load(keys(4, "other")) == (0, 0)
        totals = second.tier._meters.totals
        assert totals["loaded_chunks"] == 24 and totals["errors"] == 0


def test_an_owner_answers_in_the_step_that_asks(tmp_path):
    with steps(tier(tmp_path)) as engine:
        request = engine.request(CHAIN)
        assert engine.tier.lookup(CHAIN[0], request) is LookupResult.MISS
        engine.store(CHAIN[:1])
        assert engine.tier.lookup(CHAIN[0], request) is LookupResult.HIT
        assert engine.tier.lookup(CHAIN[1], request) is LookupResult.MISS


def test_tokens_are_counted_once_a_request(tmp_path):
    with steps(tier(tmp_path, prefill_rate=1000)) as engine:
        engine.store(CHAIN[:16])
        engine.forget()
        request = engine.request(CHAIN)
        assert engine.find(CHAIN, request)[0] == 16
        # vLLM schedules it.
        engine.manager.on_schedule_end(ScheduleEndContext((request.req_id,), ()))
        counted = (1, 16 * BLOCK, 8 * BLOCK, 16 * BLOCK, 16 * BLOCK)
        assert tokens(tmp_path) == counted
        # It was preempted: its chunks are looked up again.
        engine.forget()
        engine.find(CHAIN, request)
        engine.manager.on_schedule_end(ScheduleEndContext((request.req_id,), ()))
        engine.finish(request)
        assert tokens(tmp_path)[:3] == counted[:3]
        # A request that ends before it is scheduled.
        gone = engine.request(CHAIN[20:])
        engine.find(CHAIN[20:], gone)
        engine.finish(gone)
        assert tokens(tmp_path)[:3] == (2, 16 * BLOCK, 12 * BLOCK)


def test_what_is_stored_twice_is_written_once(tmp_path):
    with steps(tier(tmp_path)) as engine:
        engine.store(CHAIN)
        engine.forget()
        assert engine.store(CHAIN) == 0
        assert engine.tier._meters.totals["duplicate_chunks"] == len(CHAIN)


def flip(file, of):
    """Flips one bit in each stored chunk, wherever it lies."""
    found = 0
    with open(file, "r+b") as opened:
        whole = opened.read()
        for key in of:
            at = whole.find(content(key).tobytes()[:4096])
            assert at >= 0
            opened.seek(at + 1234)
            opened.write(bytes([whole[at + 1234] ^ 1]))
            found += 1
    return found


def test_with_one_bit_flipped_in_each_chunk_there_is_no_hit(tmp_path):
    with steps(tier(tmp_path)) as engine:
        engine.store(CHAIN)
    assert flip(volume(tmp_path), CHAIN) == len(CHAIN)
    with steps(tier(tmp_path)) as engine:
        hits = [engine.load([key]) for key in CHAIN]
        assert hits == [(0, 0)] * len(CHAIN)
        totals = engine.tier._meters.totals
        assert totals["damaged_chunks"] == len(CHAIN) and totals["loaded_chunks"] == 0


def test_a_load_that_fails_in_part_keeps_the_rest_and_ends(tmp_path):
    with steps(tier(tmp_path)) as engine:
        engine.store(CHAIN)
    flip(volume(tmp_path), CHAIN[12:])
    with steps(tier(tmp_path)) as engine:
        request = engine.request(CHAIN)
        hits, taken = engine.find(CHAIN, request)
        assert hits == 12 and engine.good(CHAIN[:12], request) == 12
        # The keys that failed are misses for this request until it ends.
        again = [engine.manager.lookup(key, request) for key in CHAIN[12:]]
        assert again == [LookupResult.MISS] * 12
        engine.store(CHAIN[12:])
        engine.forget()
        assert engine.tier.lookup(CHAIN[12], request) is LookupResult.MISS
        engine.finish(request)
        assert engine.load(CHAIN) == (24, 24)


def stores(said, path):
    engine = Steps(tier(path))
    for number in range(1000):
        engine.store(keys(8, f"chain {number}"))
        engine.forget()
        said.write(f"{number} {engine.stored()}\n")


def test_what_was_stored_before_a_kill_is_there_after_it(tmp_path):
    writer = Child(stores, tmp_path)
    try:
        said = [writer.says.readline().split() for _ in range(10)]
    finally:
        writer.kill()
    said += [line.split() for line in writer.says]
    assert int(said[9][1]) == 80
    acknowledged = int(said[-1][0]) + 1
    with steps(tier(tmp_path)) as engine:
        for number in range(acknowledged):
            assert engine.load(keys(8, f"chain {number}")) == (8, 8)
        # The chain that was being stored may be there in part, and what is there is right.
        hits, good = engine.load(keys(8, f"chain {acknowledged}"))
        assert hits == good


def test_every_fact_that_decides_bytes_separates_and_the_same_facts_share(tmp_path):
    chain = keys(4)
    halves = {"world_size": 2, "tp_size": 2}
    agnostic = {"is_parallelism_agnostic": True}
    with steps(tier(tmp_path)) as engine:
        engine.store(chain)
    with steps(tier(tmp_path), canonical=True, parallel=agnostic) as engine:
        assert engine.load(chain) == (0, 0)
        engine.store(chain)
    others = [
        ({"weights_tag": "other"}, {}),
        ({}, {"dtype": "fp8_e4m3"}),
        ({}, {"model": "other/model"}),
        ({}, {"layout": "BLHNC"}),
        ({}, {"block": 32}),
        ({}, {"blocks_per_chunk": 2}),
        ({}, {"groups": 2}),
        ({}, {"parallel": halves}),
        ({}, {"parallel": {"world_size": 2, "pp_size": 2}}),
        ({}, {"canonical": True}),
        # As with MLA, of which all ranks have the same bytes.
        ({}, {"replicated": True}),
        ({"larder_server": {"weights": "test", "prefix_hash": "sha256_cbor"}}, {}),
        # Divided otherwise, a row has other bytes unless it is canonical.
        ({}, {"parallel": halves | agnostic}),
    ]
    for own, facts in others:
        with steps(tier(tmp_path, **own), **facts) as engine:
            assert engine.load(chain) == (0, 0), (own, facts)
    for facts in ({}, {"canonical": True, "parallel": agnostic | halves}, {"windows": (0,)}):
        with steps(tier(tmp_path), **facts) as engine:
            assert engine.load(chain) == (4, 4), facts


def test_a_hash_seed_separates_and_the_default_is_the_same_in_each_process(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with steps(tier(tmp_path)) as engine:
        chain = hashed(4)
        engine.store(chain)
        engine.forget()
        with monkeypatch.context() as seeded:
            seeded.setenv("PYTHONHASHSEED", "7")
            assert engine.load(hashed(4)) == (0, 0)
        assert hashed(4) == chain and engine.load(hashed(4)) == (4, 4)


def test_groups_do_not_mix_and_windows_keep_single_chunks(tmp_path):
    full, window = keys(16), keys(16, group=1)
    assert [key[:-4] for key in full] == [key[:-4] for key in window]
    facts = {"larder_server": {"weights": "test", "full_groups": [0]}}
    with steps(tier(tmp_path, **facts), groups=2, windows=(1,), rows=64) as engine:
        # Of the window its last chunks alone, as vLLM does.
        assert engine.store(full + window[12:]) == 20
    with steps(tier(tmp_path, **facts), groups=2, windows=(1,), rows=64) as engine:
        request = engine.request(full + window)
        assert engine.find(full, request)[0] == 16
        assert engine.good(full, request) == 16
        backwards = [engine.tier.lookup(key, request) for key in reversed(window)]
        assert backwards == [LookupResult.HIT] * 4 + [LookupResult.MISS] * 12
        assert engine.load(window[12:]) == (4, 4)
        assert engine.tier._keeper.link.spaces[full[0][-4:]].is_chain
        assert not engine.tier._keeper.link.spaces[window[0][-4:]].is_chain


def test_a_remote_beneath_windows_is_refused(tmp_path):
    remote = {"l4": f"file://{tmp_path}", "l4_unsigned": True}
    with pytest.raises(ValueError, match="windows or states.*`l4`"), steps(
        tier(tmp_path / "store", **remote), groups=2, windows=(1,)
    ):
        pass


def test_short_block_hashes_are_keys_too(tmp_path):
    short = keys(8, hash_bytes=16)
    with steps(tier(tmp_path)) as engine:
        assert engine.store(short) == 8
        engine.forget()
        assert engine.load(short) == (8, 8)


@pytest.mark.once
def test_a_small_store_takes_ten_times_its_size_and_keeps_heads(tmp_path):
    with steps(tier(tmp_path, size="112MiB"), row_bytes=1 << 20, rows=16) as engine:
        size = volume(tmp_path).stat().st_size
        for number in range(80):
            engine.store(keys(8, f"chain {number}"))
            engine.forget()
        assert volume(tmp_path).stat().st_size == size
        found = {number: engine.load(keys(8, f"chain {number}")) for number in range(80)}
        assert all(hits == good for hits, good in found.values())
        assert sum(hits for hits, _ in found.values()) >= 16
        assert found[0] == (0, 0), "the oldest went first"
        # A prefix is evicted from its tail: no chunk is there without the chunk before it.
        for number in range(80):
            request = engine.request()
            there = [
                engine.tier.lookup(key, request) is LookupResult.HIT
                for key in keys(8, f"chain {number}")
            ]
            assert there == sorted(there, reverse=True), (number, there)
            engine.finish(request)
        assert engine.tier._meters.totals["errors"] == 0


def test_a_request_pins_its_chunks(tmp_path, caplog):
    with steps(tier(tmp_path, size="112MiB"), row_bytes=1 << 20, rows=16) as engine:
        pinned, others = keys(4, "pinned"), keys(4, "others")
        for of, seconds in ((pinned, 3600), (others, "long")):
            engine.finish(engine.offer(of, engine.request(of, params={"larder_pin_s": seconds})))
            engine.settle()
        assert engine.tier._keeper.link.queue.drain(60)
        engine.forget()
        for number in range(40):
            engine.store(keys(8, f"chain {number}"))
            engine.forget()
        assert engine.load(pinned) == (4, 4)
        assert engine.load(others) == (0, 0)
        assert "larder_pin_s of a request is not a number of seconds: 'long'" in caplog.text
        assert engine.tier._meters.totals["errors"] == 0


def test_a_server_takes_no_more_than_its_quota(tmp_path):
    with steps(
        tier(tmp_path, size="112MiB", codec="off", quota="max=16MiB"), row_bytes=1 << 20, rows=16
    ) as engine:
        for number in range(6):
            engine.store(keys(8, f"chain {number}"))
            engine.forget()
        found = [engine.load(keys(8, f"chain {number}"))[0] for number in range(6)]
        assert 8 <= sum(found) <= 16, found
        assert engine.tier._meters.totals["errors"] == 0


def test_parents_are_known_across_jobs_and_behind_the_gpus_own_hits(tmp_path):
    from larder_kv.vllm.chains import Chain

    chain = keys(6)
    request = ReqContext(req_id="r")
    Steps.place(request, chain)
    group, made = chain[0][-4:], Chain()

    def runs(*at, of=chain):
        return made.runs(group, BLOCK, [of[row] for row in at], list(at), request)

    (first,) = runs(1, 0)
    assert first == (chain[:2], [0, 1], None, 0)
    # The next job of the request goes on where the last one ended; the fourth chunk is in the GPU's
    # cache alone.
    assert runs(4, 2) == [([chain[2]], [2], chain[1], 2), ([chain[4]], [4], chain[3], 4)]
    # A partial last chunk follows the whole chunk before it.
    partial = keys(1, "partial")
    request.set_offload_key_position(partial[0], 5 * BLOCK + 4)
    assert runs(0, of=partial) == [(partial, [0], chain[4], 5)]
    (both,) = runs(0, 1, of=[partial[0], chain[4]])
    assert both.keys == [chain[4], partial[0]]
    # Without a place there is no parent.
    lost = keys(2, "lost")
    assert [run[2:] for run in runs(0, 1, of=lost)] == [(None, 0)] * 2
    assert [run.keys for run in runs(0, 1, of=[lost[0], chain[0]])] == [[lost[0]], [chain[0]]]


def test_a_reset_starts_new_namespaces_and_deletes_nothing(tmp_path):
    with steps(tier(tmp_path)) as engine:
        engine.store(CHAIN)
        engine.manager.reset_cache()
        getattr(engine.manager, "on_reset_flushed", lambda: None)()
        assert engine.load(CHAIN) == (0, 0)
        # What is stored after it is found by this server.
        assert engine.store(CHAIN) == len(CHAIN)
        engine.forget()
        assert engine.load(CHAIN) == (24, 24)
        engine.manager.reset_cache()
        getattr(engine.manager, "on_reset_flushed", lambda: None)()
        assert engine.load(CHAIN) == (0, 0)
    with steps(tier(tmp_path)) as engine:
        assert engine.load(CHAIN) == (24, 24), "other servers may have the old weights"


@pytest.mark.parametrize("hash_bytes", [32, 16])
def test_all_resets_of_a_server_need_one_namespace(tmp_path, hash_bytes):
    from larder_kv import Store

    chain = keys(8, hash_bytes=hash_bytes)
    with steps(tier(tmp_path, enable_kv_events=True), events=True) as engine:
        for _ in range(4):
            assert engine.load(chain) == (0, 0)
            assert engine.store(chain) == len(chain)
            engine.forget()
            assert engine.load(chain) == (8, 8)
            assert follow(engine) == (set(chain), set())
            engine.manager.reset_cache()
            getattr(engine.manager, "on_reset_flushed", lambda: None)()
        assert engine.load(chain) == (0, 0)
    with Store.open(tmp_path, disk="threads") as store:
        assert sorted(row.pages for row in store.usage()) == [8, 24]


def test_a_reset_without_new_weights_keeps_what_is_stored(tmp_path):
    with steps(tier(tmp_path, on_reset="keep")) as engine:
        engine.store(CHAIN)
        engine.manager.reset_cache()
        getattr(engine.manager, "on_reset_flushed", lambda: None)()
        assert engine.load(CHAIN) == (24, 24)


@pytest.mark.parametrize(
    "wrong, named",
    [
        ({"sise": "1GiB"}, "`sise`"),
        ({"size": "much"}, "`size`"),
        ({"path": ""}, "`path`"),
        ({"weights_tag": None}, "`weights_tag`"),
        ({"on_reset": "clear"}, "`on_reset`"),
        ({"enable_kv_events": "yes"}, "`enable_kv_events`"),
        ({"locality": "here"}, "`locality`"),
        ({"timeout": -1}, "`timeout`"),
    ],
    ids=str,
)
def test_a_wrong_configuration_is_refused_by_its_key(tmp_path, wrong, named):
    with pytest.raises(ValueError, match=named):
        Steps(tier(tmp_path / "store", **wrong))
    assert not (tmp_path / "store").exists()


def test_rows_that_fit_no_segment_stop_the_start(tmp_path):
    """Without a refusal each store would end without a page."""
    with steps(tier(tmp_path)) as engine:
        assert engine.store(CHAIN) == 24
    large = 20 << 20
    with pytest.raises(RuntimeError, match=f"{large} bytes.*at most [0-9]+: .*larder create"):
        Steps(tier(tmp_path), row_bytes=large, rows=2)
    # Without `fail` it serves without the store, and says why.
    with steps(tier(tmp_path, on_error="miss"), row_bytes=large, rows=2) as engine:
        assert engine.tier._keeper.link is None
    with steps(tier(tmp_path)) as engine:
        assert engine.load(CHAIN) == (24, 24), "the store is as it was"


def test_rows_above_half_a_segment_are_a_warning(tmp_path, caplog):
    with steps(tier(tmp_path)):
        assert "half a segment" not in caplog.text
    with steps(tier(tmp_path), row_bytes=10 << 20, rows=2):
        eventually(lambda: "a page has 10 MiB, more than half a segment" in caplog.text)


def test_the_log_names_the_settings_that_changed_since_the_last_start(tmp_path, caplog):
    def started(tag, **fields):
        caplog.clear()
        server = {"weights": tag, "fields": fields, "prefix_hash": "sha256"}
        with steps(tier(tmp_path, larder_server=server)):
            pass
        lines = [line.message for line in caplog.records]
        return [line for line in lines if "is not that of the last" in line]

    assert started("a", max_model_len="4096", dtype='"bf16"') == []
    assert started("a", max_model_len="4096", dtype='"bf16"') == []
    (line,) = started("b", max_model_len="8192", dtype='"bf16"')
    assert "max_model_len: 4096 -> 8192" in line and "dtype" not in line
    assert "vLLM, model test/model" in line


def test_without_a_store_a_server_starts_only_if_it_may(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("no directory")
    with pytest.raises(RuntimeError, match="file"):
        Steps(tier(blocked))
    with steps(tier(blocked, on_error="miss", retry="1s")) as engine:
        assert engine.load(CHAIN) == (0, 0)
        assert engine.store(CHAIN) == 0
        assert engine.load(CHAIN) == (24, 24), "vLLM's own CPU tier goes on"
        blocked.unlink()
        until = time.monotonic() + 60
        while engine.tier._keeper.link is None:
            assert time.monotonic() < until, "it did not try again"
            time.sleep(0.05)
        engine.forget()
        assert engine.store(CHAIN) == 24


def test_metrics_have_vllms_form(tmp_path):
    from larder_kv.vllm.tier import LarderTier

    definitions = LarderTier.build_metric_definitions({})
    with steps(tier(tmp_path)) as engine:
        engine.offer(CHAIN)
        while engine.manager._jobs:
            engine.manager.on_schedule_end(ScheduleEndContext((), ()))
            time.sleep(0.001)
        reduced = engine.tier.get_stats().reduce()
        assert reduced["vllm:kv_offload_larder_stored_chunks:('LarderTier',)"] == 24
        until = time.monotonic() + 60
        gauges = {}
        while not gauges.get("vllm:kv_offload_larder_capacity_bytes:('LarderTier',)"):
            assert time.monotonic() < until
            stats = engine.tier.get_stats()
            gauges = stats.reduce() if stats is not None else {}
            time.sleep(0.02)
        assert gauges["vllm:kv_offload_larder_owner:('LarderTier',)"] == 1
        assert gauges["vllm:kv_offload_larder_used_bytes:('LarderTier',)"] >= 24 * ROW
        assert engine.tier.get_stats() is None, "each count is reported once"
    names = {name.partition(":('")[0] for name in [*reduced, *gauges]}
    assert names <= set(definitions)


def follow(engine):
    """(stored, removed) keys of the events since the last call."""
    stored, removed = set(), set()
    for event in engine.tier.take_events():
        assert event.medium is engine.tier.medium
        (removed if event.removed else stored).update(event.keys)
    return stored, removed


def test_events_name_what_was_stored(tmp_path):
    with steps(tier(tmp_path, enable_kv_events=True), events=True) as engine:
        engine.store(CHAIN)
        assert follow(engine) == (set(CHAIN), set())
        assert follow(engine) == (set(), set())
        # What was there before is not stored again.
        engine.forget()
        engine.store(CHAIN)
        assert follow(engine) == (set(), set())
    with steps(tier(tmp_path, enable_kv_events=True)) as engine:
        engine.store(keys(4, "other"))
        assert follow(engine) == (set(), set()), "vLLM's events are off"


@pytest.mark.once
def test_events_name_what_was_evicted_after_a_reset(tmp_path):
    events = tier(tmp_path, size="112MiB", enable_kv_events=True)
    with steps(events, row_bytes=1 << 20, rows=16, events=True) as engine:
        engine.manager.reset_cache()
        getattr(engine.manager, "on_reset_flushed", lambda: None)()
        all_stored, removed, number = set(), set(), 0
        until = time.monotonic() + 60
        while not removed:
            assert time.monotonic() < until, "no eviction was reported"
            engine.store(keys(8, f"chain {number}"))
            engine.forget()
            stored, removed = follow(engine)
            all_stored |= stored
            number += 1
        assert removed <= all_stored


@pytest.mark.once
def test_events_leave_a_chunk_that_was_evicted_and_stored_again(tmp_path, monkeypatch):
    events = tier(tmp_path, size="112MiB", enable_kv_events=True, lease="20ms")
    with steps(events, row_bytes=1 << 20, rows=16, events=True) as engine:
        keeper, known, end = engine.tier._keeper, set(), time.monotonic() + 60

        def are_there(some):
            namespace = keeper.link.spaces[some[0][-4:]].namespace
            return [namespace.holds(key[:-4]) for key in some]

        def evictions():
            return keeper.link.store.stats()["evicted_pages"]

        def read_events():
            assert time.monotonic() < end, "an event did not come"
            for event in engine.tier.take_events():
                (known.difference_update if event.removed else known.update)(event.keys)
            time.sleep(0.01)

        def evict(seed):
            """Stores chunks until others are evicted. Returns those."""
            stored, gone, evicted = [], [], evictions()
            while not gone:
                engine.store(some := keys(8, f"{seed} {time.monotonic_ns()}"))
                engine.forget()
                read_events()
                # The store refuses chunks while it has no room.
                stored += [key for key in some if key in known]
                # A look leases the chunks, so that none could leave while looks follow each other.
                if evictions() > evicted:
                    evicted = evictions()
                    there = zip(stored, are_there(stored))
                    gone = [key for key, is_there in there if not is_there]
            return gone

        def store_again(some):
            for key in some:
                while not all(are_there([key])):
                    engine.store([key])
                    engine.forget()

        while keeper._since is None:
            read_events()
        # The keeper looks at the evictions when the chunks are there again,
        with monkeypatch.context() as patch:
            patch.setattr(keeper, "_follow", lambda link: None)
            gone = evict("a")
            back, rest = gone[:1], gone[1:]
            store_again(back)
            read_events()
            assert known >= set(gone)
        store = keeper.link.store
        while known & set(rest) or keeper._since < store.evictions(keeper._since).next:
            read_events()
        assert are_there(back) == [True] and known >= set(back)
        # or before; and both events are read at once.
        gone = evict("b")
        while not keeper.evicted and gone[0] in known:
            assert time.monotonic() < end, "an eviction was not seen"
            time.sleep(0.01)
        store_again(gone[:1])
        read_events()
        assert are_there(gone[:1]) == [True] and known >= set(gone[:1])


def imports(said):
    """Imports what vLLM imports of Larder: the seconds of CPU that takes."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "larder_kv"]:
        del sys.modules[name]
    files, threads = set(os.listdir("/proc/self/fd")), threading.active_count()
    start = time.process_time()
    import larder_kv.vllm

    larder_kv.vllm.register()
    larder_kv.vllm.register()
    from larder_kv.vllm import LarderTier

    spent = time.process_time() - start
    # Files of tests before may have been closed by the garbage collection.
    assert set(os.listdir("/proc/self/fd")) <= files and threading.active_count() <= threads
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    assert SecondaryTierFactory.get_tier_class({"type": "larder"}) is LarderTier
    said.write(f"{spent}\n")


def test_the_module_imports_fast_and_opens_nothing():
    spent = []
    # The quickest of some: other processes take caches away. An import of one of the large packages takes seconds, this one
    # 0.02 to 0.06 on slow machines.
    for _ in range(5):
        process = Child(imports)
        spent.append(float(process.says.read()))
        process.kill()
    assert min(spent) < 0.5


def test_the_plugin_is_an_entry_point():
    from importlib.metadata import entry_points

    (plugin,) = entry_points(group="vllm.general_plugins", name="larder")
    plugin.load()()
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    assert "larder" in SecondaryTierFactory._registry

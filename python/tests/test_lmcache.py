"""The adapter's contract with LMCache: its calls one by one, and below LMCache's own
StorageManager.
"""

from __future__ import annotations

import json
import os
import threading
import traceback

import pytest
import torch
from larder_kv import Store, StoreError
from larder_kv.lmcache import LarderL2AdapterConfig, spaces
from larder_kv.lmcache import adapter as adapter_module
from larder_kv.lmcache.locks import Locks
from lmcache.v1.distributed.api import MemoryLayoutDesc
from support.child import Child
from support.lmcache import (
    CHUNK,
    LAYOUT,
    PATIENCE,
    Arena,
    Listener,
    content,
    fetch,
    is_quiet,
    keys,
    listed,
    load,
    lookup,
    manager,
    offer,
    opened,
    parameters,
    plugin,
    same,
    store,
    until,
)
from support.tokens import tokens


@pytest.fixture
def arena():
    return Arena()


@pytest.fixture
def adapter(tmp_path, arena):
    with opened(tmp_path, arena) as adapter:
        yield adapter


# --- tasks


def test_chunks_come_back_as_they_were_stored(adapter, arena):
    some = keys(8)
    result = store(adapter, some, arena.objects(8, fill="a"))
    assert result.is_successful() and result.bytes_transferred() == 8 * CHUNK
    assert lookup(adapter, some + keys(1, "other")) == [True] * 8 + [False]
    into = arena.objects(8)
    assert load(adapter, some, into) == [True] * 8
    assert same(into, "a") == 8
    adapter.submit_unlock(some)
    assert adapter.report_status()["locked_key_count"] == 0
    again = store(adapter, some, arena.objects(8, fill="a"))
    assert again.is_successful() and again.bytes_transferred() == 0


def test_tokens_are_counted_once_a_request(tmp_path, arena):
    with opened(tmp_path, arena, prefill_rate=1000) as adapter:
        some, chunk = keys(8), LAYOUT.shapes[0][2]
        store(adapter, some[:5], arena.objects(5, fill="a"))
        # Both ranks of a prompt are one request.
        lookup(adapter, some + keys(8, kv_rank=0x01000101))
        assert load(adapter, some[:5], arena.objects(5)) == [True] * 5
        assert tokens(tmp_path) == (1, 5 * chunk, 3 * chunk, 5 * chunk, 5 * chunk)


def test_the_store_reads_and_writes_the_arena_without_a_copy(adapter, arena):
    store(adapter, keys(4), arena.objects(4, fill="a"))
    load(adapter, keys(4), arena.objects(4))
    stats = adapter._store.stats()
    assert (stats["direct_pages"], stats["bounced_pages"]) == (8, 0)


def test_memory_outside_of_the_arena_works_too(adapter):
    elsewhere = Arena()
    some = keys(3)
    assert store(adapter, some, elsewhere.objects(3, fill="a")).is_successful()
    into = elsewhere.objects(3)
    assert load(adapter, some, into) == [True] * 3 and same(into, "a") == 3


def test_eventfds_are_distinct_and_each_result_is_handed_out_once(adapter, arena):
    fds = {
        adapter.get_store_event_fd(),
        adapter.get_lookup_and_lock_event_fd(),
        adapter.get_load_event_fd(),
    }
    assert len(fds) == 3 and all(fd >= 0 for fd in fds)
    some = keys(2)
    task = adapter.submit_store_task(some, arena.objects(2, fill="a"))
    found = {}
    until(lambda: found.update(adapter.pop_completed_store_tasks()) or found)
    assert list(found) == [task] and adapter.pop_completed_store_tasks() == {}
    for submit, query in (
        (
            lambda: adapter.submit_lookup_and_lock_task(some, {0: LAYOUT}),
            adapter.query_lookup_and_lock_result,
        ),
        (lambda: adapter.submit_load_task(some, arena.objects(2)), adapter.query_load_result),
    ):
        first, second = submit(), submit()
        for task in (second, first):
            until(lambda: query(task) is not None)
            assert query(task) is None
        assert query(1000) is None


def test_a_task_that_waits_for_its_event_is_woken_although_another_took_the_poll(adapter, arena):
    """The prefetch controller asks only for the tasks of the eventfd's wake-up."""
    some = keys(2)
    store(adapter, some, arena.objects(2, fill="a"))
    first, second = (adapter.submit_lookup_and_lock_task(some, {0: LAYOUT}) for _ in range(2))
    fd = adapter.get_lookup_and_lock_event_fd()
    assert adapter.query_lookup_and_lock_result(first) is not None
    assert os.eventfd_read(fd) > 0
    assert adapter.query_lookup_and_lock_result(second) is not None


def test_empty_tasks_complete(adapter):
    assert store(adapter, [], []).is_successful()
    assert lookup(adapter, []) == [] and load(adapter, [], []) == []


def test_wrong_tasks_fail_and_raise_nothing(adapter, arena):
    some = keys(2)
    assert not store(adapter, some, arena.objects(1, fill="a")).is_successful()
    assert load(adapter, some, arena.objects(1)) == [False, False]
    assert lookup(adapter, some) == [False, False]


def test_chunks_of_several_groups_are_one_task(adapter, arena):
    other = MemoryLayoutDesc(
        shapes=[torch.Size([2, 1, 64, 100]), torch.Size([64, 3])],
        dtypes=[torch.float16, torch.uint8],
    )
    some = [keys(1)[0], keys(1, object_group_id=1)[0]]
    objects = arena.objects(1, fill="a") + arena.objects(1, other, fill="b")
    assert store(adapter, some, objects).is_successful()
    task = adapter.submit_lookup_and_lock_task(some, {0: LAYOUT, 1: other})
    found = []
    until(
        lambda: (
            (bitmap := adapter.query_lookup_and_lock_result(task)) is not None
            and (found.append(bitmap) or True)
        )
    )
    assert found[0].popcount() == 2
    into = arena.objects(1) + arena.objects(1, other)
    assert load(adapter, some, into) == [True, True]
    assert same(into[:1], "a") == 1 and same(into[1:], "b") == 1


def test_layouts_that_lmcache_leaves_out_are_those_of_the_process(adapter, arena):
    store(adapter, keys(2), arena.objects(2, fill="a"))
    assert lookup(adapter, keys(2), layout=None) == [True, True]


# --- what tells chunks apart (check 9)


@pytest.mark.parametrize(
    "change",
    [
        {"cache_salt": "bob"},
        {"kv_rank": 0x02010201},
        {"object_group_id": 1},
        {"model_name": "other"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_keys_that_differ_in_a_field_are_apart(adapter, arena, change):
    some, others = keys(2), keys(2, **change)
    store(adapter, some, arena.objects(2, fill="a"))
    assert lookup(adapter, others) == [False, False]
    assert load(adapter, others, arena.objects(2)) == [False, False]
    store(adapter, others, arena.objects(2, fill="b"))
    into = arena.objects(4)
    assert load(adapter, some, into[:2]) == load(adapter, others, into[2:]) == [True, True]
    assert same(into[:2], "a") == same(into[2:], "b") == 2


@pytest.mark.parametrize(
    "layout",
    [
        MemoryLayoutDesc(shapes=[torch.Size([2, 4, 64, 256])], dtypes=[torch.float16]),
        MemoryLayoutDesc(shapes=[torch.Size([2, 4, 256, 64])], dtypes=[torch.bfloat16]),
        MemoryLayoutDesc(shapes=[torch.Size([2, 4, 32, 256])], dtypes=[torch.bfloat16]),
    ],
    ids=["dtype", "shape", "chunk size"],
)
def test_layouts_are_apart(adapter, arena, layout):
    store(adapter, keys(2), arena.objects(2, fill="a"))
    assert lookup(adapter, keys(2), layout) == [False, False]
    assert load(adapter, keys(2), arena.objects(2, layout)) == [False, False]


def test_weights_are_apart(tmp_path, arena):
    with opened(tmp_path, arena) as adapter:
        store(adapter, keys(2), arena.objects(2, fill="a"))
    with opened(tmp_path, arena, weights_tag="other") as adapter:
        assert lookup(adapter, keys(2)) == [False, False]
        assert listed(adapter) == [] and adapter.get_usage().total_bytes_used == 0
    with opened(tmp_path, arena, weights_tags={"model": "test"}, weights_tag="other") as adapter:
        assert lookup(adapter, keys(2)) == [True, True]


def test_a_models_directory_gives_its_tag(tmp_path, arena):
    place = tmp_path / "weights"
    place.mkdir()
    (place / "config.json").write_text("{}")
    (place / "model.safetensors").write_bytes(bytes(100))
    with opened(
        tmp_path / "store", arena, weights_tag=None, model_dirs={"model": str(place)}
    ) as adapter:
        store(adapter, keys(1), arena.objects(1, fill="a"))
        assert lookup(adapter, keys(1)) == [True]
    (place / "model.safetensors").write_bytes(bytes(99) + b"1")
    with opened(
        tmp_path / "store", arena, weights_tag=None, model_dirs={"model": str(place)}
    ) as adapter:
        assert lookup(adapter, keys(1)) == [False]


def test_a_model_whose_files_change_is_not_kept_until_the_next_start(
    tmp_path, arena, caplog, monkeypatch
):
    monkeypatch.setattr(adapter_module, "_WATCH_PERIOD", 0.01)
    places = {name: tmp_path / name for name in ("model", "other")}
    for place in places.values():
        place.mkdir()
        (place / "model.safetensors").write_bytes(bytes(100))
    dirs = {name: str(place) for name, place in places.items()}
    other = keys(1, model_name="other")
    # The general tag is not for a model with files.
    with opened(tmp_path / "store", arena, model_dirs=dirs) as adapter:
        for some in (keys(1), other):
            store(adapter, some, arena.objects(1, fill="a"))
            assert lookup(adapter, some) == [True]
        # Files that are on their way say nothing.
        (places["model"] / "model.safetensors").unlink()
        assert lookup(adapter, keys(1)) == [True]
        (places["model"] / "model.safetensors").write_bytes(bytes(101))
        until(lambda: any("are not those of the start" in one.message for one in caplog.records))
        assert lookup(adapter, keys(1)) == lookup(adapter, keys(1), layout=None) == [False]
        assert load(adapter, keys(1), arena.objects(1)) == [False]
        result = store(adapter, keys(1, "new"), arena.objects(1, fill="b"))
        assert result.is_successful() and result.bytes_transferred() == 0
        assert lookup(adapter, other) == [True]
        assert [one.levelname for one in caplog.records if "of model model" in one.message] == [
            "WARNING"
        ]
    with opened(tmp_path / "store", arena, model_dirs=dirs) as adapter:
        assert lookup(adapter, keys(1)) == [False]
        store(adapter, keys(1), arena.objects(1, fill="b"))
        assert lookup(adapter, keys(1)) == lookup(adapter, other) == [True]


def test_a_model_without_a_tag_is_not_kept_and_the_log_says_so_once(tmp_path, arena, caplog):
    with opened(tmp_path, arena, weights_tag=None, weights_tags={"model": "w"}) as adapter:
        untagged = keys(2, model_name="untagged")
        for _ in range(2):
            result = store(adapter, untagged, arena.objects(2, fill="a"))
            assert result.is_successful() and result.bytes_transferred() == 0
        assert lookup(adapter, untagged) == [False, False]
        assert adapter.report_status()["chunks"]["store_left_out"] == 4
        assert sum("model untagged" in record.message for record in caplog.records) == 1
        assert store(adapter, keys(1), arena.objects(1, fill="a")).bytes_transferred() == CHUNK


def test_chunks_that_fit_no_segment_stop_the_start_if_their_size_is_configured(tmp_path, caplog):
    large = 20 << 20
    layout = MemoryLayoutDesc(shapes=[torch.Size([large // 2])], dtypes=[torch.bfloat16])
    with opened(tmp_path):
        pass
    with pytest.raises(StoreError, match=f"{large} bytes.*at most [0-9]+: .*larder create"):
        with opened(tmp_path, chunk_bytes=large):
            pass
    # LMCache tells no sizes at a start.
    arena = Arena(chunks=256)
    with opened(tmp_path, arena, chunk_bytes=None) as adapter:
        for _ in range(2):
            result = store(adapter, keys(1), arena.objects(1, layout, fill="a"))
            assert result.bytes_transferred() == 0
        assert adapter.report_status()["chunks"]["store_left_out"] == 2
        lines = [line.message for line in caplog.records if "bytes are not kept" in line.message]
        assert len(lines) == 1 and str(large) in lines[0] and "larder create" in lines[0]
        assert store(adapter, keys(1), arena.objects(1, fill="a")).bytes_transferred() == CHUNK


def test_chunks_above_half_a_segment_are_a_warning(tmp_path, caplog):
    with opened(tmp_path):
        assert "half a segment" not in caplog.text
    with opened(tmp_path, chunk_bytes=10 << 20):
        until(lambda: "a page has 10 MiB, more than half a segment" in caplog.text)


def test_too_many_salts_are_misses(adapter, arena, caplog, monkeypatch):
    monkeypatch.setattr(spaces, "SALTS_MAX", 3)
    for number in range(5):
        some = keys(1, cache_salt=f"salt {number}")
        assert store(adapter, some, arena.objects(1, fill=number)).is_successful()
        assert lookup(adapter, some) == [number < 3]
    assert sum("cache salts" in record.message for record in caplog.records) == 1


# --- locks


def test_locks_are_counted_by_key(adapter, arena):
    some = keys(2)
    store(adapter, some, arena.objects(2, fill="a"))
    assert lookup(adapter, some) == lookup(adapter, some) == [True, True]
    status = adapter.report_status()
    assert (status["locked_key_count"], status["locked_bytes"]) == (2, 2 * CHUNK)
    adapter.submit_unlock(some)
    assert adapter.report_status()["locked_key_count"] == 2
    adapter.submit_unlock(some + keys(3, "other"))
    adapter.submit_unlock(some)
    assert adapter.report_status()["locked_key_count"] == 0


def test_locks_hold_at_most_a_quarter_of_the_store(adapter, arena, caplog):
    quarter = adapter.get_usage().total_capacity_bytes // 4 // CHUNK
    count = 0
    while count <= quarter:
        some = keys(16, f"batch {count}")
        store(adapter, some, (objects := Arena(16)).objects(16, fill=count))
        del objects
        granted = sum(lookup(adapter, some))
        count += 16
    assert granted < 16
    status = adapter.report_status()
    assert status["locked_bytes"] <= adapter.get_usage().total_capacity_bytes // 4
    assert status["locks_refused"] == 16 - granted
    assert sum("quarter of the store" in record.message for record in caplog.records) == 1


def test_a_lock_that_is_never_returned_lapses():
    now = [0.0]
    locks = Locks(100, ttl=10, now=lambda: now[0])
    assert locks.grant("a", 60) and not locks.grant("b", 60)
    now[0] = 11
    assert locks.keys() == [] and locks.grant("b", 60)
    assert (locks.refused, locks.lapsed, locks.bytes) == (1, 1, 60)


# --- usage, lists, deletions (check 7)


def test_usage_lists_and_deletions_agree_with_the_store(tmp_path, arena):
    alice, bob = keys(5, cache_salt="alice"), keys(3, model_name="other", cache_salt="bob")
    listener = Listener()
    with opened(tmp_path, arena) as adapter:
        adapter.register_listener(listener)
        store(adapter, alice, arena.objects(5, fill="a"))
        store(adapter, bob, arena.objects(3, fill="b"))
        for _ in range(2):
            usage = adapter.get_usage()
            assert usage.bytes_by_cache_salt == {"alice": 5 * CHUNK, "bob": 3 * CHUNK}
            assert usage.total_bytes_used == 8 * CHUNK and 0 < usage.usage_fraction < 1
            assert listed(adapter) == [(key, CHUNK) for key in alice + bob]
            assert listed(adapter, model_name="other") == [(key, CHUNK) for key in bob]
        adapter.delete(alice[:2] + keys(1, "never stored"))
        assert listener.there == {key: CHUNK for key in alice[2:] + bob}
    again = Listener()
    with opened(tmp_path, arena) as adapter:
        adapter.register_listener(again)
        assert again.there == listener.there
        assert adapter.get_usage().bytes_by_cache_salt == {"alice": 3 * CHUNK, "bob": 3 * CHUNK}
        assert sorted(map(str, listed(adapter))) == sorted(
            str((key, CHUNK)) for key in alice[2:] + bob
        )
        assert adapter._store.stats()["pages"] == 6
        assert lookup(adapter, alice) == [False] * 2 + [True] * 3
        adapter.delete(alice + bob)
        usage = adapter.get_usage()
        assert (usage.total_bytes_used, dict(usage.bytes_by_cache_salt), again.there) == (0, {}, {})
        assert adapter._store.stats()["pages"] == 0


@pytest.mark.parametrize("wrong", [{"page_size": 0}, {"cursor": "x"}], ids=str)
def test_wrong_lists_are_refused(adapter, wrong):
    with pytest.raises(ValueError):
        adapter.list_l2_keys(**wrong)


# --- damage (checks 4 and 8)


def test_one_flipped_bit_in_every_chunk_leaves_no_hit(tmp_path, arena):
    some = keys(16)
    with opened(tmp_path, arena) as adapter:
        store(adapter, some, arena.objects(16, fill="a"))
        adapter._store.flush()
    volume = tmp_path / "larder.store"
    data = volume.read_bytes()
    with open(volume, "r+b") as file:
        for at in range(16):
            place = data.index(content("a", at).numpy().tobytes()[:CHUNK])
            file.seek(place + at * 1000)
            file.write(bytes([data[place + at * 1000] ^ 1]))
    del data
    with opened(tmp_path, arena) as adapter:
        assert load(adapter, some, arena.objects(16)) == [False] * 16
        assert lookup(adapter, some) == [False] * 16
        assert adapter.get_usage().total_bytes_used == 0


# --- the configuration


@pytest.mark.parametrize(
    "wrong, name",
    [
        ({"path": None}, "path"),
        ({"sizes": 1}, "sizes"),
        ({"timeout": "soon"}, "timeout"),
        ({"prewrite": 1}, "prewrite"),
        ({"on_error": "miss"}, "on_error"),
        ({"chunk_bytes": 0}, "chunk_bytes"),
        ({"weights_tags": "w"}, "weights_tags"),
        ({"weights_tags": {"m": 1}}, "weights_tags"),
        ({"model_dirs": {"m": "/does/not/exist"}}, "model_dirs"),
        ({"retry": "30s"}, "retry"),
        ({"transfer": "direct"}, "transfer"),
        ({"lease": "999ms"}, "lease"),
        ({"prefill_rate": 0}, "prefill_rate"),
    ],
    ids=str,
)
def test_a_wrong_key_or_value_is_refused_by_its_name(tmp_path, wrong, name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        LarderL2AdapterConfig.from_dict(parameters(tmp_path) | wrong)


def test_a_key_that_merged_ranks_of_unlike_bytes_is_refused(tmp_path):
    with pytest.raises(ValueError, match="`mla`: .*bytes of its ranks differ: remove it"):
        LarderL2AdapterConfig.from_dict(parameters(tmp_path, mla="shared"))


def test_closing_is_final_and_repeatable(tmp_path, arena):
    with opened(tmp_path, arena) as adapter:
        store(adapter, keys(1), arena.objects(1, fill="a"))
    adapter.close()
    adapter.submit_unlock(keys(1))
    task = adapter.submit_load_task(keys(1), arena.objects(1))
    assert adapter.query_load_result(task).popcount() == 0
    with Store.open(tmp_path, disk="threads") as opened_alone:
        assert opened_alone.stats()["pages"] == 1


class Hung:
    """An object of which one call waits until it is let go."""

    def __init__(self, whole, call):
        self._whole, self._call = whole, call
        self.is_over = threading.Event()

    def __getattr__(self, name):
        found = getattr(self._whole, name)
        if name != self._call:
            return found
        return lambda *arguments: self.is_over.wait() and found(*arguments)


@pytest.mark.parametrize(
    "part, call", [("_loads", "close"), ("_ledger", "write"), ("_store", "close")]
)
def test_a_close_ends_within_its_patience_whichever_step_hangs(
    tmp_path, arena, monkeypatch, part, call
):
    monkeypatch.setattr(adapter_module, "_CLOSE_PATIENCE", 0.5)
    with opened(tmp_path, arena) as adapter:
        hung = Hung(getattr(adapter, part), call)
        setattr(adapter, part, hung)
        # The thread for work that may wait is in the hung part too.
        store(adapter, keys(1), arena.objects(1, fill="a"))
        said = []

        def close():
            try:
                adapter.close()
            except RuntimeError as error:
                said.append(str(error))

        closer = threading.Thread(target=close, daemon=True)
        try:
            closer.start()
            closer.join(PATIENCE / 4)
            assert not closer.is_alive(), "the close hangs"
            assert "memory must stay mapped" in said[0] and "End the server" in said[0]
        finally:
            hung.is_over.set()
        until(lambda: not adapter._closer.is_alive())
        adapter.close()
        assert adapter._is_closed and len(said) == 1


# --- below LMCache's own StorageManager (checks 1, 2, 3, 10)


def test_a_storage_manager_gets_its_chunks_back(tmp_path):
    some = keys(16)
    with manager(plugin(tmp_path)) as storage:
        offer(storage, some, "a")
        [(_, adapter)] = storage.l2_adapters()
        until(lambda: adapter.get_usage().total_bytes_used == 16 * CHUNK and is_quiet(storage))
        storage.clear()
        assert fetch(storage, some, "a") == (16, 16)
        until(lambda: adapter.report_status()["locked_key_count"] == 0)
        assert storage.report_status()["is_healthy"]


def stores(said, path):
    """Stores batch after batch, each acknowledged by a line once it is in the store."""
    # A forked process has none of torch's threads.
    torch.set_num_threads(1)
    with manager(plugin(path)) as storage:
        [(_, adapter)] = storage.l2_adapters()
        for number in range(100):
            offer(storage, keys(4, f"batch {number}"), number)
            until(lambda: adapter.get_usage().total_bytes_used >= 4 * (number + 1) * CHUNK)
            storage.clear()
            said.write(f"{number}\n")


def test_a_killed_process_loses_nothing_that_was_acknowledged(tmp_path):
    writer = Child(stores, tmp_path)
    try:
        acknowledged = [writer.says.readline() for _ in range(6)]
    finally:
        writer.kill()
    assert acknowledged == [f"{number}\n" for number in range(6)]
    with manager(plugin(tmp_path)) as storage:
        [(_, adapter)] = storage.l2_adapters()
        # The ledger is written behind: at an early kill it is empty.
        known, pages = len(listed(adapter)), adapter._store.stats()["pages"]
        assert known in (0, pages) and pages >= 4 * 6
        assert adapter.get_usage().total_bytes_used == known * CHUNK
        fetched = [fetch(storage, keys(4, f"batch {number}"), number) for number in range(8)]
    assert fetched[:6] == [(4, 4)] * 6
    assert all(found == good for found, good in fetched)


def test_adapters_come_and_go_under_load(tmp_path):
    """LMCache adds and removes adapters while requests are under way."""
    stop, wrong = threading.Event(), []

    def work(storage):
        number = 0
        while not stop.is_set():
            number += 1
            some = keys(4, f"load {number % 8}")
            try:
                if number % 2:
                    offer(storage, some, number % 8)
                else:
                    found, good = fetch(
                        storage, keys(4, f"load {(number - 1) % 8}"), (number - 1) % 8
                    )
                    if found != good:
                        wrong.append((number, found, good))
            except Exception:
                wrong.append(traceback.format_exc())
                return

    with manager(plugin(tmp_path / "a"), plugin(tmp_path / "b")) as storage:
        thread = threading.Thread(target=work, args=(storage,))
        thread.start()
        for _ in range(3):
            last = max(description.index for description, _ in storage.l2_adapters())
            storage.delete_l2_adapter(last)
            storage.add_l2_adapter(plugin(tmp_path / "b"))
        stop.set()
        thread.join(PATIENCE)
        assert not wrong
        assert len(storage.l2_adapters()) == 2 and storage.report_status()["is_healthy"]


# --- the doctor


def examined(path, adapter=(), **more):
    from larder_kv.lmcache import doctor

    given = doctor.NAMES | {"adapter_params": parameters(path, **more)} | dict(adapter)
    return [(level, name) for level, name, _ in doctor.examine(given) if level != "ok"]


@pytest.mark.parametrize(
    "adapter, more, facts",
    [
        ({}, {}, []),
        ({"type": "fs"}, {}, [("fail", "LMCache")]),
        ({"adapter_params": None}, {}, [("fail", "adapter")]),
        ({"serde": {"type": "fp8"}}, {}, [("warn", "LMCache")]),
        ({}, {"mla": "shared"}, [("fail", "adapter")]),
        ({}, {"weights_tag": None}, [("fail", "weights")]),
        ({}, {"weights_tag": None, "weights_tags": {"m": "w"}}, []),
    ],
    ids=str,
)
def test_the_doctor_finds_what_is_wrong(tmp_path, adapter, more, facts):
    assert examined(tmp_path, adapter, **more) == facts
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_is_part_of_the_command_line(tmp_path, capfd):
    from larder_kv.__main__ import main
    from larder_kv.lmcache.doctor import NAMES

    config = json.dumps(NAMES | {"adapter_params": parameters(tmp_path / "store")})
    assert main(["doctor", "--lmcache", config, "--page-bytes", "256KiB"]) in (0, 1)
    said = capfd.readouterr().out
    assert "all other models: test" in said and "every key is known" in said
    tagged = parameters(tmp_path / "store", weights_tag=None, weights_tags={"m": "w"})
    main(["doctor", "--lmcache", json.dumps(NAMES | {"adapter_params": tagged})])
    said = capfd.readouterr().out
    assert "m: w" in said and "are not kept: name the model there" in said
    assert "derived" not in said, "LMCache's server knows no configuration of the engines"
    assert main(["doctor", "--lmcache", "{"]) == 2
    assert main(["doctor", "--lmcache", config, "--prefix-caching-hash-algo", "sha256"]) == 2

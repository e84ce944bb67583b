"""What the adapter knows of the chunks in the store: its ledger, usage and lists, through evictions,
deletions by others and restarts.
"""

from __future__ import annotations

import hashlib
import shutil

import pytest
from larder_kv.lmcache import spaces
from larder_kv.lmcache.spaces import Place, page_key
from larder_kv.store import Status, StoreError
from support.lmcache import (
    CHUNK,
    Arena,
    Listener,
    content,
    keys,
    listed,
    lookup,
    opened,
    store,
    until,
)


@pytest.fixture
def arena():
    return Arena()


@pytest.fixture
def adapter(tmp_path, arena):
    with opened(tmp_path, arena) as adapter:
        yield adapter


def test_what_the_store_evicts_is_told(adapter):
    """The store is smaller than what is stored: listeners, usage and lists know the rest."""
    listener = Listener()
    adapter.register_listener(listener)
    capacity = adapter.get_usage().total_capacity_bytes
    stored = []
    memory = Arena(16)
    objects = memory.objects(16)
    for number in range(2 * capacity // CHUNK // 16):
        some = keys(16, f"batch {number}")
        for at, one in enumerate(objects):
            one.raw_data[:] = content(number, at)
        assert store(adapter, some, objects).is_successful()
        stored += some
    stats = adapter._store.stats()
    assert stats["evicted_pages"] > 0
    until(lambda: len(listener.there) == adapter._store.stats()["pages"])
    assert adapter.get_usage().total_bytes_used == len(listener.there) * CHUNK <= capacity
    assert {key for key, _ in listed(adapter, 500)} == set(listener.there)
    for start in range(0, len(stored), 16):
        some = stored[start : start + 16]
        assert lookup(adapter, some) == [key in listener.there for key in some]
        adapter.submit_unlock(some)


def test_evictions_are_known_whichever_chunks_the_store_chooses(adapter, arena):
    """Another user of the store fills it, and has made the oldest chunks the hottest."""
    listener, some = Listener(), keys(16)
    adapter.register_listener(listener)
    store(adapter, some, arena.objects(16, fill="a"))
    [space] = adapter._spaces.at(Place.of(some[0]))
    names = [page_key(key.chunk_hash) for key in some]
    others = adapter._store.namespace(
        model="other", weights="w", dtype="u8", layout="flat", page_tokens=1, parts=[CHUNK]
    )
    page, number = bytes(CHUNK), 0
    while (there := pages_of(adapter, space)) == 16:
        space.namespace.touch(names[:8])
        key = hashlib.sha256(b"%d" % number).digest()
        assert max(others.put([key], page, chain=False, wait=10.0)) <= Status.DUPLICATE
        number += 1
    assert 0 < there
    until(lambda: len(listener.there) == pages_of(adapter, space))
    assert set(some[:8]) <= set(listener.there)
    assert adapter.get_usage().bytes_by_cache_salt == {"": len(listener.there) * CHUNK}
    assert lookup(adapter, some) == [key in listener.there for key in some]


def test_evictions_are_known_although_the_store_fails_while_they_are_read(
    adapter, arena, monkeypatch
):
    listener, some, failed = Listener(), keys(16), []
    adapter.register_listener(listener)
    store(adapter, some, arena.objects(16, fill="a"))
    [space] = adapter._spaces.at(Place.of(some[0]))
    real, last = adapter._store, []

    class Failing:
        """Fails once after a call that has named chunks of the adapter."""

        def __getattr__(self, name):
            return getattr(real, name)

        def evictions(self, since):
            if last and not failed:
                failed.append(since)
                raise StoreError("no owner")
            found = real.evictions(since)
            last.extend(page for page in found.pages if page[0] == space.namespace.digest)
            return found

    monkeypatch.setattr(adapter, "_store", Failing())
    others = real.namespace(
        model="other", weights="w", dtype="u8", layout="flat", page_tokens=1, parts=[CHUNK]
    )
    page, number = bytes(CHUNK), 0
    while pages_of(adapter, space) == 16:
        key = hashlib.sha256(b"%d" % number).digest()
        assert max(others.put([key], page, chain=False, wait=10.0)) <= Status.DUPLICATE
        number += 1
    until(lambda: failed)
    until(lambda: len(listener.there) == pages_of(adapter, space))
    assert adapter.get_usage().total_bytes_used == len(listener.there) * CHUNK


def pages_of(adapter, space):
    """How many chunks the store holds in a space."""
    usage = {row.digest: row.pages for row in adapter._store.usage()}
    return usage.get(space.namespace.digest, 0)


def test_chunks_that_others_delete_are_struck_out_by_comparison(tmp_path, arena):
    listener, some = Listener(), keys(6)
    with opened(tmp_path, arena) as adapter:
        adapter.register_listener(listener)
        store(adapter, some, arena.objects(6, fill="a"))
        [space] = adapter._spaces.at(Place.of(some[0]))
        assert space.namespace.delete([page_key(key.chunk_hash) for key in some[:2]]) == 2
        until(lambda: set(listener.there) == set(some[2:]))
        assert adapter.get_usage().total_bytes_used == 4 * CHUNK
        adapter.delete(some[2:3])
    # Behind the back of a ledger that is not in use.
    shutil.copy(tmp_path / "larder.lmcache", tmp_path / "copy")
    with opened(tmp_path, arena) as adapter:
        adapter.delete(some[3:4])
    with opened(tmp_path, arena, ledger=str(tmp_path / "copy")) as adapter:
        assert adapter.get_usage().total_bytes_used == 2 * CHUNK
        assert {key for key, _ in listed(adapter)} == set(some[4:])


def test_a_damaged_ledger_is_set_aside_and_filled_by_lookups(tmp_path, arena, caplog):
    with opened(tmp_path, arena) as adapter:
        store(adapter, keys(3), arena.objects(3, fill="a"))
    (tmp_path / "larder.lmcache").write_bytes(b"no database" * 1000)
    for rest in ("-wal", "-shm"):
        (tmp_path / f"larder.lmcache{rest}").unlink(missing_ok=True)
    with opened(tmp_path, arena) as adapter:
        assert any("set aside" in record.message for record in caplog.records)
        assert listed(adapter) == []
        assert lookup(adapter, keys(3)) == [True] * 3
        assert len(listed(adapter)) == 3 and adapter.get_usage().total_bytes_used == 3 * CHUNK


def test_salts_without_chunks_do_not_count_after_a_restart(tmp_path, arena, monkeypatch):
    monkeypatch.setattr(spaces, "SALTS_MAX", 3)
    salted = [keys(1, cache_salt=f"salt {number}") for number in range(4)]
    with opened(tmp_path, arena) as adapter:
        for some in salted[:3]:
            store(adapter, some, arena.objects(1, fill="a"))
        adapter.delete(salted[0] + salted[1])
    with opened(tmp_path, arena) as adapter:
        for some in salted[2:]:
            store(adapter, some, arena.objects(1, fill="b"))
            assert lookup(adapter, some) == [True]

"""LMCache's adapter with an encrypted store: the key, and salts as tenants."""

from __future__ import annotations

import pytest
from larder_kv.store import StoreError
from support.lmcache import Arena, keys, load, lookup, opened, same, store
from support.sealed import erase, has, key_file, served


@pytest.fixture
def key(tmp_path):
    return key_file(tmp_path)


@pytest.fixture
def place(tmp_path):
    return tmp_path / "store"


def there(adapter, arena, some):
    """How many chunks are found, and come back with their bytes."""
    found = lookup(adapter, some)
    into = arena.objects(len(some))
    assert load(adapter, some, into) == found
    adapter.submit_unlock([key for key, is_there in zip(some, found) if is_there])
    assert same(into, "a") == sum(found)
    return sum(found)


def test_the_chunks_of_a_salt_are_erased_while_the_adapter_runs(tmp_path, place, key):
    arena = Arena(256)
    of = {salt: keys(4, cache_salt=salt) for salt in ("salt of one", "salt of another", "")}
    with opened(place, arena, key_file=key, tenant="own") as adapter:
        for some in of.values():
            assert store(adapter, some, arena.objects(4, fill="a")).is_successful()
        assert [there(adapter, arena, some) for some in of.values()] == [4, 4, 4]
        # It is a salt too, and finds no chunk of requests without one.
        assert there(adapter, arena, keys(4, cache_salt="own")) == 0
        assert erase(place, "salt of one") == 4
        assert [there(adapter, arena, some) for some in of.values()] == [0, 4, 4]
        assert erase(place, "own") == 4
        assert [there(adapter, arena, some) for some in of.values()] == [0, 4, 0]
        assert store(adapter, of["salt of one"], arena.objects(4, fill="a")).is_successful()
        assert there(adapter, arena, of["salt of one"]) == 4
    with opened(place, arena, key_file=key, tenant="own") as adapter:
        assert [there(adapter, arena, some) for some in of.values()] == [4, 4, 0]
    assert has(place, "salt of one", "salt of another") == []
    # The ledger has whole keys and salts: an encrypted store has no such file.
    assert not list(place.glob("larder.lmcache*"))


def test_a_wrong_or_missing_key_stops_the_start(tmp_path, place, key):
    arena = Arena()
    with opened(place, arena, key_file=key) as adapter:
        assert store(adapter, keys(4), arena.objects(4, fill="a")).is_successful()
    for more, why in (
        ({}, "encrypted"),
        ({"key_file": key_file(tmp_path, "5b", "another")}, "not a key of this store"),
        ({"key_file": str(tmp_path / "none")}, "none"),
    ):
        with pytest.raises(StoreError, match=why), opened(place, arena, **more):
            pass
    with opened(place, arena, key_file=key) as adapter:
        assert there(adapter, arena, keys(4)) == 4


def test_an_adapter_needs_no_key_of_a_served_store(place, key):
    arena = Arena(128)
    with opened(place, arena, key_file=key):
        pass
    with served(place, "--key-file", key), opened(place, arena) as adapter:
        assert adapter.report_status()["part"] == "client"
        some = {salt: keys(4, cache_salt=salt) for salt in ("one", "two")}
        for of in some.values():
            assert store(adapter, of, arena.objects(4, fill="a")).is_successful()
        assert erase(place, "one") == 4
        assert [there(adapter, arena, of) for of in some.values()] == [0, 4]
    assert not list(place.glob("larder.lmcache*"))

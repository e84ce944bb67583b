"""Encrypted stores by `larder_kv.Store`: the key, and the tenants."""

from __future__ import annotations

import multiprocessing

import pytest
from larder_kv.store import Status, Store, StoreError
from support.sealed import erase, has, key_file, served
from test_store import ABSENT, DUPLICATE, OK, PAGE, content, keys, make, name

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def key(tmp_path):
    return key_file(tmp_path)


@pytest.fixture
def place(tmp_path):
    return tmp_path / "store"


def read(pages, count):
    made = bytearray(count * PAGE)
    return pages.get(keys(count), made), made


def of(store, tenant=None):
    return name(store, extra={} if tenant is None else {"tenant": tenant})


def test_a_store_that_is_created_with_a_key_opens_with_it_alone(tmp_path, place, key):
    made = content(8)
    with make(place, key_file=key) as store:
        assert of(store, "a tenant by name").put(keys(8), made) == OK * 8
        assert name(store, model="a model by name").put(keys(8), made) == OK * 8
    assert has(place, "a tenant by name", "a model by name") == []
    for wrong, why in (
        ({}, "encrypted"),
        ({"key_file": key_file(tmp_path, "5b", "another")}, "not a key of this store"),
        ({"key_file": str(tmp_path / "none")}, "none"),
        ({"key_command": "false"}, "command failed"),
    ):
        for opens in (make, lambda path, **more: Store.open(path, disk="threads", **more)):
            with pytest.raises(StoreError, match=why):
                opens(place, **wrong)
    with pytest.raises(ValueError, match="key_file"):
        make(place, key_file=key, key_command="true")
    with make(place, key_command=f"cat {key}") as store:
        assert read(of(store, "a tenant by name"), 8) == (OK * 8, made)
        # A namespace is of one tenant.
        assert read(of(store), 8)[0] == ABSENT * 8


def test_a_key_that_others_can_read_is_refused(tmp_path, place, key):
    (tmp_path / "key").chmod(0o444)
    with pytest.raises(StoreError, match="mode|0400"):
        make(place, key_file=key)
    assert not list(place.rglob("*.store"))


def test_a_key_for_a_plain_store_is_refused(place, key):
    make(place).close()
    with pytest.raises(StoreError, match="encrypted"):
        make(place, key_file=key)


def test_a_tenant_is_erased_while_its_pages_are_in_use(place, key):
    made = content(8)
    with make(place, key_file=key) as store:
        one, other, none = (of(store, tenant) for tenant in ("one", "other", None))
        for pages in (one, other, none):
            assert pages.put(keys(8), made) == OK * 8
        assert erase(place, "one") == 8
        assert one.longest_prefix(keys(8)) == 0 and read(one, 8)[0] == ABSENT * 8
        assert erase(place, "one") == 0
        for pages in (other, none):
            assert read(pages, 8) == (OK * 8, made)
        # A later put has another key.
        assert one.put(keys(2), made[: 2 * PAGE]) == OK * 2
    # The owner has gone: the command needs the key.
    assert erase(place, "other", "--key-file", key) == 8
    with make(place, key_file=key) as store:
        assert read(of(store, "other"), 8)[0] == ABSENT * 8
        assert read(of(store, "one"), 2) == (OK * 2, made[: 2 * PAGE])
        assert read(of(store), 8) == (OK * 8, made)


def test_clients_of_a_served_store_need_no_key_and_lose_an_erased_tenant(tmp_path, place, key):
    made = content(8)
    make(place, key_file=key).close()
    with served(place, "--key-file", key):
        with pytest.raises(StoreError, match="not a key of this store"):
            make(place, key_file=key_file(tmp_path, "5b", "another"))
        with make(place) as client, make(place, key_file=key) as other:
            assert client.part == other.part == "client"
            for store in (client, other):
                assert of(store, "one").put(keys(8), made) in (OK * 8, DUPLICATE * 8)
                assert of(store, "two").put(keys(8), made) in (OK * 8, DUPLICATE * 8)
            assert erase(place, "one") == 8
            for store in (client, other):
                assert read(of(store, "one"), 8)[0] == ABSENT * 8
                assert read(of(store, "two"), 8) == (OK * 8, made)
            assert of(client, "one").put(keys(2), made[: 2 * PAGE]) == OK * 2
            assert read(of(other, "one"), 2)[0] == OK * 2


@pytest.mark.parametrize("is_client", [False, True], ids=["owner", "client"])
def test_the_first_pages_of_many_tenants_at_once_are_all_stored(place, key, is_client):
    """Their keys are made durable one after the other."""
    import threading

    made, statuses, start = content(1), {}, threading.Barrier(12)
    with make(place, key_file=key) as owner, make(place) as client:
        assert client.part == "client"
        spaces = [of(client if is_client else owner, f"tenant {at}") for at in range(12)]

        def put(at):
            start.wait()
            statuses[at] = spaces[at].put(keys(1), made, wait=60.0)

        threads = [threading.Thread(target=put, args=(at,)) for at in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert statuses == {at: OK for at in range(12)}
        for pages in spaces:
            assert read(pages, 1) == (OK, made)
    assert Status.BUSY not in (status[0] for status in statuses.values())

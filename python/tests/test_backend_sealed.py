"""SGLang's backend with an encrypted store: the key, and the tenant of a server."""

from __future__ import annotations

import logging

import pytest
import torch
from support import pools
from support.backend import keys, make
from support.sealed import erase, has, key_file, served

CHAIN = keys(8)


@pytest.fixture
def key(tmp_path):
    return key_file(tmp_path)


class Server:
    """A backend over a store, with a filled pool of eight pages."""

    def __init__(self, place, **more):
        self.pool = pools.mha()
        pools.fill(self.pool)
        self.backend = make(place, self.pool, **more)
        self.slots = pools.indices(self.pool, range(8))

    def store(self):
        return self.backend.batch_set_v1(CHAIN, self.slots)

    def load(self):
        """Which pages come back, with their bytes."""
        expected = [pools.page_bytes(self.pool, page) for page in range(8)]
        if self.backend.batch_exists(CHAIN) == 0:
            return [False] * 8
        pools.wipe(self.pool)
        found = self.backend.batch_get_v1(CHAIN, self.slots)
        for page, bytes in enumerate(expected):
            assert not found[page] or torch.equal(pools.page_bytes(self.pool, page), bytes)
        return found


@pytest.fixture
def server(tmp_path):
    made = []

    def begin(**more):
        made.append(Server(tmp_path / "store", **more))
        return made[-1]

    yield begin
    for one in made:
        one.backend.close()


def test_a_server_has_a_tenant_that_is_erased_while_it_runs(tmp_path, server, key, caplog):
    caplog.set_level(logging.INFO)
    one = server(key_file=key, tenant="a tenant by name")
    other, none = (server(key_file=key, **more) for more in ({"tenant": "other"}, {}))
    for each in (one, other, none):
        assert each.load() == [False] * 8
        assert each.store() == [True] * 8
        assert each.load() == [True] * 8
    assert erase(tmp_path / "store", "a tenant by name") == 8
    assert one.load() == [False] * 8
    for each in (other, none):
        assert each.load() == [True] * 8
    pools.fill(one.pool)
    assert one.store() == [True] * 8 and one.load() == [True] * 8
    assert "pool kv" in caplog.text and "a tenant by name" not in caplog.text
    for each in (one, other, none):
        each.backend.close()
    assert has(tmp_path / "store", "a tenant by name", "test/model") == []


def test_a_wrong_or_missing_key_stops_the_start_or_is_a_miss(tmp_path, server, key):
    first = server(key_file=key)
    assert first.store() == [True] * 8
    first.backend.close()
    wrong = key_file(tmp_path, "5b", "another")
    for more, why in (
        ({}, "encrypted"),
        ({"key_file": wrong}, "not a key of this store"),
        ({"key_file": str(tmp_path / "none")}, "none"),
    ):
        with pytest.raises(RuntimeError, match=why):
            server(**more)
        without = server(on_error="miss", **more)
        assert without.load() == [False] * 8 and without.store() == [False] * 8
    again = server(key_file=key)
    assert again.load() == [True] * 8


def test_a_server_needs_no_key_of_a_served_store(tmp_path, server, key):
    server(key_file=key).backend.close()
    with served(tmp_path / "store", "--key-file", key):
        one = server(tenant="one")
        assert one.store() == [True] * 8 and one.load() == [True] * 8
        assert erase(tmp_path / "store", "one") == 8
        assert one.load() == [False] * 8
        one.backend.close()


@pytest.mark.parametrize("wrong", [7, "", "a\nb", "a" * 2000], ids=["number", "empty", "control", "long"])
def test_a_wrong_tenant_is_refused_by_its_key(tmp_path, wrong):
    with pytest.raises(ValueError, match="`tenant`"):
        make(tmp_path / "store", tenant=wrong)

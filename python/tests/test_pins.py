"""Pins and quotas of `larder_kv.Store`: pages that stay, and namespaces that take no more."""

from __future__ import annotations

import time

import pytest
from larder_kv.config import Config
from larder_kv.store import Status, StoreError
from test_store import OK, PAGE, PATIENCE, SIZE, content, keys, make, name


def test_pinned_pages_stay_until_they_are_unpinned(tmp_path):
    with make(tmp_path) as store:
        pages = name(store)
        assert pages.put(keys(4), content(4)) == OK * 4
        until = time.time() + 3600
        assert pages.pin(keys(3)[64:], until) == OK
        assert pages.pin(keys(1, first=99), until) == bytes([Status.ABSENT])
        with pytest.raises(ValueError, match="1970"):
            pages.pin(keys(1), float("nan"))
        for scan in range(1, 2 * SIZE // (16 * PAGE)):
            first = 1000 * scan
            assert set(pages.put(keys(16, first=first), content(16), wait=PATIENCE)) == set(OK)
        assert store.stats()["pinned_pages"] == 1
        assert pages.longest_prefix(keys(4)) == 3
        assert pages.unpin(keys(4)) == 1
        assert store.stats()["pinned_pages"] == 0


def test_a_namespace_takes_no_more_than_its_quota(tmp_path):
    with make(tmp_path) as store:
        pages = name(store)
        pages.limit("min=1MiB,max=2MiB,max-age=1d")
        for first in range(0, 256, 16):
            pages.put(keys(16, first=first), content(16), wait=PATIENCE)
        # Content of 64 KiB in the least a codec makes of it: a block.
        assert 0 < pages.contains(keys(256)).count(Status.OK) <= (2 << 20) // 4096
        for limits, said in (("min=1TiB", "half"), ("min", "max-age"), ("min=0", "quota")):
            with pytest.raises(StoreError, match=said):
                pages.limit(limits)


def test_the_key_of_engines_is_checked_before_a_store_is_opened(tmp_path):
    keys = {"path": str(tmp_path), "size": "144MiB", "weights_tag": "w"}
    assert Config.parse(keys | {"quota": "max=1GiB"}).quota == "max=1GiB"
    assert Config.parse(keys).quota is None
    with pytest.raises(ValueError, match="`quota`.*max-age="):
        Config.parse(keys | {"quota": "all of it"})


def test_a_put_and_a_touch_can_pin(tmp_path):
    with make(tmp_path) as store:
        pages = name(store)
        until = time.time() + 3600
        assert pages.put(keys(2), content(2), pin_until=until) == OK * 2
        assert store.stats()["pinned_pages"] == 2
        assert pages.put(keys(3), content(3)) == bytes([Status.DUPLICATE] * 2) + OK
        pages.touch(keys(4)[64:], pin_until=until)
        assert store.stats()["pinned_pages"] == 3
        with pytest.raises(ValueError, match="1970"):
            pages.touch(keys(1), pin_until=0)
        assert pages.unpin(keys(4)) == 3

"""Pins of `larder_kv.Store`: pages that stay until a time."""

from __future__ import annotations

import time

import pytest
from larder_kv.store import Status
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

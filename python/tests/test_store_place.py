"""Where a store is, and whether pages suit it: the refusals of `larder_kv.Store`, and their words."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest
from larder_kv.__main__ import main
from larder_kv.store import Status, Store, StoreError
from support.waiting import eventually

SIZE = 144 << 20
MIB = 1 << 20


def attach(path, **options):
    return Store.attach(path, **{"size": SIZE, "disk": "threads"} | options)


@pytest.mark.parametrize("way", [Store.attach, Store.open])
def test_a_store_whose_segments_hold_no_page_is_refused_with_the_command_that_helps(tmp_path, way):
    attach(tmp_path, page_bytes=64 << 10).close()
    large = 20 * MIB
    with pytest.raises(StoreError, match=f"{large} bytes.*at most [0-9]+: ") as refused:
        way(tmp_path, page_bytes=large)
    # It is closed: others can open it.
    Store.open(tmp_path, page_bytes=64 << 10).close()
    command = re.search(r"larder (create .* --force)", str(refused.value))
    assert main(shlex.split(command[1])) == 0
    with way(tmp_path, page_bytes=large, disk="threads") as store:
        assert store.remarks == [] and store.fit(large) is None
        facts = {"model": "m", "weights": "w", "dtype": "u8", "layout": "flat", "page_tokens": 1}
        pages = store.namespace(**facts, parts=[large])
        assert pages.put([bytes(32)], bytearray(large)) == bytes([Status.OK])


def test_a_client_is_refused_too_and_the_owner_goes_on(tmp_path):
    with attach(tmp_path, page_bytes=64 << 10) as owner:
        with pytest.raises(StoreError, match="at most"):
            attach(tmp_path, page_bytes=20 * MIB)
        assert owner.part == "owner" and owner.stats()["segment_bytes"] == 16 * MIB


def test_pages_that_waste_room_are_a_remark_and_a_guess_refuses_nothing(tmp_path):
    attach(tmp_path).close()
    with attach(tmp_path, page_bytes=10 * MIB) as store:
        (remark,) = store.remarks
        assert "10 MiB" in remark and "half a segment" in remark and "larder create" in remark
    with attach(tmp_path, page_bytes=20 * MIB, must_fit=False) as store:
        assert store.remarks == []
        assert store.fit(MIB) is None and "half a segment" in store.fit(10 * MIB)
        with pytest.raises(StoreError, match=f"{20 * MIB} bytes"):
            store.fit(20 * MIB)


def test_another_size_than_that_of_the_store_is_warned_of(tmp_path, caplog):
    attach(tmp_path).close()
    with attach(tmp_path, size=2 * SIZE) as store:
        (remark,) = store.remarks
        assert "to enlarge it" in remark
        eventually(lambda: remark in caplog.text)


def on_the_root(tmp_path):
    """A directory on the file system of `/`."""
    root = os.stat("/").st_dev
    for place in (tmp_path, Path("/var/tmp"), Path.home()):
        if os.stat(place).st_dev == root and os.access(place, os.W_OK):
            return place
    pytest.skip("no directory on the file system of `/` can be written")


def test_a_new_store_on_the_file_system_of_the_root_is_a_warning(tmp_path, caplog):
    """The disk that it is meant for may not be mounted."""
    import tempfile

    with tempfile.TemporaryDirectory(dir=on_the_root(tmp_path)) as place:
        caplog.set_level("INFO", logger="larder_kv")
        attach(place).close()
        eventually(lambda: "no disk is mounted where the store was created" in caplog.text)
        said = caplog.text
        space = os.statvfs(place)
        found = re.search(r"the file system of / \((\S+), ([0-9.]+) ([KMGTP]iB)\)", said)
        unit = 1 << 10 * ("KMGTP".index(found[3][0]) + 1)
        total = space.f_blocks * space.f_frsize
        assert abs(float(found[2]) * unit - total) <= unit, "its size"
        caplog.clear()
        attach(place).close()
        # The line of the open comes behind those of a creation.
        eventually(lambda: "eviction follows the LRU order" in caplog.text)
        assert "no disk is mounted" not in caplog.text, "it exists"

"""Where a store is created: what the log says about the place."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from larder.store import Store

SIZE = 144 << 20


def attach(path, **options):
    return Store.attach(path, **{"size": SIZE, "disk": "threads"} | options)


def on_the_root(tmp_path):
    """A directory on the file system of `/`."""
    root = os.stat("/").st_dev
    for place in (tmp_path, Path("/var/tmp"), Path.home()):
        if os.stat(place).st_dev == root and os.access(place, os.W_OK):
            return place
    pytest.skip("no directory on the file system of `/` can be written")


def test_a_new_store_on_the_file_system_of_the_root_is_a_warning(tmp_path, capfd):
    """The disk that it is meant for may not be mounted."""
    import tempfile

    with tempfile.TemporaryDirectory(dir=on_the_root(tmp_path)) as place:
        attach(place).close()
        said = capfd.readouterr().err
        space = os.statvfs(place)
        assert "no disk is mounted where the store was created" in said
        found = re.search(r"the file system of / \((\S+), ([0-9.]+) ([KMGTP]iB)\)", said)
        unit = 1 << 10 * ("KMGTP".index(found[3][0]) + 1)
        total = space.f_blocks * space.f_frsize
        assert abs(float(found[2]) * unit - total) <= unit, "its size"
        attach(place).close()
        assert "no disk is mounted" not in capfd.readouterr().err, "it exists"

"""A Python that a supervisor starts without some of the standard descriptors."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap

import pytest

#: How long a test waits for its processes.
PATIENCE = 120

CHILD = textwrap.dedent(
    """
    import hashlib, os, sys
    from larder_kv.store import Store

    path, disk = sys.argv[1:]
    facts = {"model": "m", "weights": "w", "dtype": "bf16", "layout": "any", "page_tokens": 64, "parts": [65536]}
    keys = b"".join(hashlib.sha256(b"%d" % at).digest() for at in range(8))
    stores = [Store.attach(path, size=128 << 20, disk=disk) for _ in range(2)]
    spaces = [store.namespace(**facts) for store in stores]
    queues = [store.queue() for store in stores]
    assert not any(spaces[1].put(keys, bytes(range(256)) * 2048))
    got = bytearray(8 << 16)
    assert not any(spaces[0].get(keys, got)) and got == bytes(range(256)) * 2048
    with open(path + ".report", "w") as report:
        for fd in range(3):
            try:
                print(fd, os.readlink(f"/proc/self/fd/{fd}"), file=report)
            except OSError:
                print(fd, "closed", file=report)
    for store in reversed(stores):
        store.close()
    """
)


@pytest.mark.parametrize("disk", ["uring", "threads"])
@pytest.mark.parametrize("closed", [c for n in (1, 2, 3) for c in itertools.combinations(range(3), n)])
def test_no_file_of_a_store_has_the_number_of_a_closed_standard_descriptor(tmp_path, closed, disk):
    path = str(tmp_path / "store")
    ends = " ".join(f"{fd}>&-" for fd in closed)
    command = ["bash", "-c", f'exec "$@" {ends}', "-", sys.executable, "-c", CHILD, path, disk]
    ended = subprocess.run(command, capture_output=True, timeout=PATIENCE, check=False)
    assert ended.returncode == 0, ended
    found = dict(line.split(" ", 1) for line in (tmp_path / "store.report").read_text().splitlines())
    assert all(found[str(fd)] == "/dev/null" for fd in closed), found

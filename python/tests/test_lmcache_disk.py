"""What the adapter does while the disk does not answer, or refuses writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

#: Reads of a store's file wait while the file HANG_WHILE exists. Writes to it fail while FAIL_WHILE
#: exists.
BAD_DISK = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>
static int is_so(const char *name) {
    const char *flag = getenv(name);
    return flag && access(flag, F_OK) == 0;
}
static int is_store(int file) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    return length >= 6 && memcmp(path + length - 6, ".store", 6) == 0;
}
ssize_t preadv(int file, const struct iovec *pieces, int count, off_t offset) {
    ssize_t (*real)(int, const struct iovec *, int, off_t) = dlsym(RTLD_NEXT, "preadv");
    while (is_store(file) && is_so("HANG_WHILE")) usleep(2000);
    return real(file, pieces, count, offset);
}
ssize_t pwritev(int file, const struct iovec *pieces, int count, off_t offset) {
    ssize_t (*real)(int, const struct iovec *, int, off_t) = dlsym(RTLD_NEXT, "pwritev");
    if (is_store(file) && is_so("FAIL_WHILE")) { errno = EIO; return -1; }
    return real(file, pieces, count, offset);
}
ssize_t preadv64(int file, const struct iovec *pieces, int count, off_t offset) { return preadv(file, pieces, count, offset); }
ssize_t pwritev64(int file, const struct iovec *pieces, int count, off_t offset) { return pwritev(file, pieces, count, offset); }
"""

BEGIN = """
import json, os, sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from support.lmcache import *
arena, said = Arena(), {}
"""

HANGS = (
    BEGIN
    + """
flag = Path(os.environ["HANG_WHILE"])
with opened(sys.argv[1], arena, timeout="1s") as adapter:
    chains = [keys(2, f"chain {number}") for number in range(6)]
    for number, chain in enumerate(chains):
        assert store(adapter, chain, arena.objects(2, fill=number)).is_successful()
    into = [arena.objects(2) for _ in chains]
    flag.touch()
    longest, tasks = 0.0, []
    for number, chain in enumerate(chains):
        start = time.perf_counter()
        tasks.append(adapter.submit_load_task(chain, into[number]))
        longest = max(longest, time.perf_counter() - start)
        # All four threads for reads hold a load that the kernel has, before the fifth is queued.
        until(lambda: number != 3 or adapter.report_status()["stuck_jobs"] == 4)
    start = time.monotonic()
    said["late"] = [settled(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task)).popcount() for task in tasks[4:]]
    said["took"] = time.monotonic() - start
    said["early"] = [adapter.query_load_result(task) for task in tasks[:4]]
    start = time.monotonic()
    said["locked"] = lookup(adapter, chains[0])
    adapter.submit_unlock(chains[0])
    said["lookup"] = time.monotonic() - start
    for one in into[4] + into[5]:
        one.raw_data[:] = 85
    flag.unlink()
    said["good"] = []
    for number, task in enumerate(tasks[:4]):
        bitmap = settled(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
        said["good"].append((bitmap.popcount(), same(into[number], number)))
    said["poisoned"] = sum(bool((one.raw_data == 85).all()) for one in into[4] + into[5])
    said["again"] = load(adapter, chains[5], arena.objects(2))
    said["longest"] = longest
print(json.dumps(said))
"""
)

FAILS = (
    BEGIN
    + """
flag = Path(os.environ["FAIL_WHILE"])
with opened(sys.argv[1], arena, timeout="5s") as adapter:
    assert store(adapter, keys(2, "before"), arena.objects(2, fill="a")).is_successful()
    flag.touch()
    result = store(adapter, keys(2), arena.objects(2, fill="b"))
    said["failed"] = [result.is_successful(), result.bytes_transferred()]
    said["there"] = lookup(adapter, keys(2)), load(adapter, keys(2), arena.objects(2))
    said["listed"] = len(listed(adapter)), adapter.get_usage().total_bytes_used // CHUNK
    flag.unlink()
print(json.dumps(said))
"""
)


@pytest.fixture(scope="module")
def bad_disk(tmp_path_factory):
    place = tmp_path_factory.mktemp("disk")
    (place / "disk.c").write_text(BAD_DISK)
    made = place / "disk.so"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-O1", "-o", made, place / "disk.c", "-ldl"], check=True
    )
    return made


def run(script, path, disk):
    environment = os.environ | {
        "LD_PRELOAD": str(disk),
        "HANG_WHILE": str(path / "hangs"),
        "FAIL_WHILE": str(path / "fails"),
    }
    command = [sys.executable, "-c", script, path / "store", os.path.dirname(__file__)]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_buffers_are_reported_when_the_disk_is_done_with_them_and_not_before(tmp_path, bad_disk):
    said = run(HANGS, tmp_path, bad_disk)
    # Loads that did not start end by their deadline.
    assert said["late"] == [0, 0] and said["took"] < 30
    # Those that had reached the kernel are reported when it has answered, and right.
    assert said["early"] == [None] * 4
    assert said["good"] == [[2, 2]] * 4
    assert said["poisoned"] == 4, "a buffer was written after its task had been reported"
    # Lookups are answered from memory.
    assert said["locked"] == [True, True] and said["lookup"] < 0.5
    assert said["again"] == [True, True]
    assert said["longest"] < 0.5, "a call waited for the disk"


def test_a_store_that_fails_is_never_visible(tmp_path, bad_disk):
    said = run(FAILS, tmp_path, bad_disk)
    assert said["failed"] == [False, 0]
    assert said["there"] == [[False, False], [False, False]]
    assert said["listed"] == [2, 2]

"""A disk that hangs or refuses writes, for a process of its own: calls on a store's file are intercepted before the kernel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

#: While a file named by the variable exists: HANG_READS and HANG_WRITES make calls wait, FAIL_WRITES makes them fail.
SOURCE = r"""
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
    while (is_store(file) && is_so("HANG_READS")) usleep(2000);
    return real(file, pieces, count, offset);
}
ssize_t pwritev(int file, const struct iovec *pieces, int count, off_t offset) {
    ssize_t (*real)(int, const struct iovec *, int, off_t) = dlsym(RTLD_NEXT, "pwritev");
    while (is_store(file) && is_so("HANG_WRITES")) usleep(2000);
    if (is_store(file) && is_so("FAIL_WRITES")) { errno = EIO; return -1; }
    return real(file, pieces, count, offset);
}
ssize_t preadv64(int file, const struct iovec *pieces, int count, off_t offset) { return preadv(file, pieces, count, offset); }
ssize_t pwritev64(int file, const struct iovec *pieces, int count, off_t offset) { return pwritev(file, pieces, count, offset); }
"""

#: The first lines of a script: `place`, for its store, and the flags.
BEGIN = """
import json, os, sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
place = Path(sys.argv[1])
hang_reads, hang_writes, fail_writes = (Path(os.environ[name]) for name in ("HANG_READS", "HANG_WRITES", "FAIL_WRITES"))
"""


def build(place: Path) -> Path:
    """The library to be loaded before others."""
    (place / "disk.c").write_text(SOURCE)
    made = place / "disk.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", made, place / "disk.c", "-ldl"], check=True)
    return made


def run(script: str, path: Path, library: Path) -> dict:
    """The last line, JSON, of a script that begins with `BEGIN`."""
    flags = {name: str(path / name) for name in ("HANG_READS", "HANG_WRITES", "FAIL_WRITES")}
    command = [sys.executable, "-P", "-c", BEGIN + script, path / "store", Path(__file__).parent.parent]
    done = subprocess.run(
        command,
        env=os.environ | {"LD_PRELOAD": str(library)} | flags,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])

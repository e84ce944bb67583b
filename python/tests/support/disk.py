"""A disk that hangs, refuses writes or is slow, for a process of its own: calls on a store's file are intercepted before the kernel.

The store uses these calls with `disk` set to `threads`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

#: Variables that name a file. While it exists: HANG_READS and HANG_WRITES make calls wait, FAIL_WRITES makes them fail, SLOW_READS and
#: SLOW_WRITES let through as many bytes a second as the file says.
FLAGS = ("HANG_READS", "HANG_WRITES", "FAIL_WRITES", "SLOW_READS", "SLOW_WRITES")

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
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
static int held;
/* Reads that wait for the end of HANG_READS, now. */
int held_reads(void) { return __atomic_load_n(&held, __ATOMIC_SEQ_CST); }
static void hang_read(int file) {
    if (!is_store(file) || !is_so("HANG_READS")) return;
    __atomic_add_fetch(&held, 1, __ATOMIC_SEQ_CST);
    while (is_so("HANG_READS")) usleep(2000);
    __atomic_sub_fetch(&held, 1, __ATOMIC_SEQ_CST);
}
static pthread_mutex_t clock_lock = PTHREAD_MUTEX_INITIALIZER;
static double free_at[2];
static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}
/* Waits until a device of that speed has done this call after all earlier ones. */
static void slow_down(const char *name, int which, const struct iovec *pieces, int count) {
    const char *flag = getenv(name);
    FILE *said = flag ? fopen(flag, "r") : NULL;
    double rate = 0, bytes = 0;
    if (!said) return;
    if (fscanf(said, "%lf", &rate) != 1) rate = 0;
    fclose(said);
    if (rate <= 0) return;
    for (int at = 0; at < count; at++) bytes += pieces[at].iov_len;
    pthread_mutex_lock(&clock_lock);
    double start = now();
    if (free_at[which] > start) start = free_at[which];
    double end = free_at[which] = start + bytes / rate;
    pthread_mutex_unlock(&clock_lock);
    for (double left; (left = end - now()) > 0;) usleep(left * 1e6 < 1e5 ? left * 1e6 : 1e5);
}
ssize_t preadv(int file, const struct iovec *pieces, int count, off_t offset) {
    ssize_t (*real)(int, const struct iovec *, int, off_t) = dlsym(RTLD_NEXT, "preadv");
    hang_read(file);
    if (is_store(file)) slow_down("SLOW_READS", 0, pieces, count);
    return real(file, pieces, count, offset);
}
ssize_t pwritev(int file, const struct iovec *pieces, int count, off_t offset) {
    ssize_t (*real)(int, const struct iovec *, int, off_t) = dlsym(RTLD_NEXT, "pwritev");
    while (is_store(file) && is_so("HANG_WRITES")) usleep(2000);
    if (is_store(file) && is_so("FAIL_WRITES")) { errno = EIO; return -1; }
    if (is_store(file)) slow_down("SLOW_WRITES", 1, pieces, count);
    return real(file, pieces, count, offset);
}
ssize_t preadv64(int file, const struct iovec *pieces, int count, off_t offset) { return preadv(file, pieces, count, offset); }
ssize_t pwritev64(int file, const struct iovec *pieces, int count, off_t offset) { return pwritev(file, pieces, count, offset); }
"""

#: The first lines of a script: `place`, for its store, the flags, and `held_reads()`, which counts the reads that HANG_READS holds.
BEGIN = """
import ctypes, json, os, sys, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
place = Path(sys.argv[1])
hang_reads, hang_writes, fail_writes = (Path(os.environ[name]) for name in ("HANG_READS", "HANG_WRITES", "FAIL_WRITES"))
held_reads = ctypes.CDLL(os.environ["LD_PRELOAD"]).held_reads
def show(*raised):
    # Reads that hang would keep the process from its end.
    for flag in (hang_reads, hang_writes, fail_writes):
        flag.unlink(missing_ok=True)
    sys.__excepthook__(*raised)
sys.excepthook = show
"""


def build(place: Path) -> Path:
    """The library to be loaded before others."""
    (place / "disk.c").write_text(SOURCE)
    made = place / "disk.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", made, place / "disk.c", "-ldl", "-lpthread"], check=True)
    return made


def run(script: str, path: Path, library: Path) -> dict:
    """The last line, JSON, of a script that begins with `BEGIN`."""
    flags = {name: str(path / name) for name in FLAGS}
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

"""Processes that fork while they have a store open, as `multiprocessing` does on Linux before Python 3.14."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time

import pytest
from support import anew, pools
from support.backend import keys, make

FORK = multiprocessing.get_context("fork")

#: How long a test waits for its processes.
PATIENCE = 60

#: How long a child may take for calls that touch nothing, and for its end.
AT_ONCE = 10


def in_child(work):
    """Calls `work` in a forked child that ends as a program does; how it ended."""
    process = FORK.Process(target=work, daemon=True)
    begun = time.monotonic()
    process.start()
    process.join(PATIENCE)
    assert time.monotonic() - begun < AT_ONCE
    return process.exitcode


@pytest.mark.parametrize("part", ["owner", "client"])
def test_in_a_child_every_call_misses_at_once_and_the_parent_goes_on(tmp_path, part, capfd):
    other = make(tmp_path, pools.mha()) if part == "client" else None
    pool = pools.mha()
    pools.fill(pool, seed=1)
    backend = make(tmp_path, pool)
    assert backend.counters()["part"] == part
    chain, indices = keys(8), pools.indices(pool, range(8))
    assert backend.batch_set_v1(chain, indices) == [True] * 8

    def child():
        assert backend.batch_exists(chain) == 0
        assert backend.batch_get_v1(chain, indices) == [False] * 8
        assert backend.batch_set_v1(keys(4, "child"), pools.indices(pool, range(4))) == [False] * 4
        assert backend.clear() is False
        assert backend.counters() == {}
        with pytest.raises(RuntimeError, match="before a fork"):
            backend.register_mem_host_pool_v2(pools.mha(), "other")
        backend.close()
        # With Python's finalization, which drops the backend.
        sys.exit(0)

    assert in_child(child) == 0
    assert "panicked" not in capfd.readouterr().err
    assert backend.batch_exists(chain) == 8
    assert backend.batch_get_v1(chain, indices) == [True] * 8
    assert backend.batch_exists(keys(4, "child")) == 0
    assert backend.batch_set_v1(keys(4, "later"), pools.indices(pool, range(4))) == [True] * 4
    begun = time.monotonic()
    backend.close()
    assert time.monotonic() - begun < AT_ONCE
    if other is not None:
        other.close()


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_child_opens_the_store_anew_as_client_of_its_parent_and_as_owner(tmp_path, method):
    context = multiprocessing.get_context(method)
    parent = make(tmp_path, pools.mha())
    for part in ("client", "owner"):
        heard, said = context.Pipe(duplex=False)
        chain = keys(3, f"{method} {part}")
        process = context.Process(target=anew.use, args=(tmp_path, chain, said), daemon=True)
        process.start()
        assert heard.poll(PATIENCE), "the child says nothing"
        assert heard.recv() == (part, 3, 3)
        process.join(PATIENCE)
        assert process.exitcode == 0
        # The next child finds no owner.
        parent.close()


def own_and_fork(path, said):
    """Owns a store and forks a child that stays when this process is killed."""
    pool = pools.mha()
    backend = make(path, pool)
    assert all(backend.batch_set_v1(keys(8), pools.indices(pool, range(8))))
    child = os.fork()
    if child == 0:
        signal.pause()
    said.send(child)
    signal.pause()


def test_a_child_that_outlives_an_owner_holds_nothing(tmp_path):
    heard, said = FORK.Pipe(duplex=False)
    owner = FORK.Process(target=own_and_fork, args=(tmp_path, said), daemon=True)
    owner.start()
    assert heard.poll(PATIENCE), "the owner says nothing"
    child = heard.recv()
    try:
        os.kill(owner.pid, signal.SIGKILL)
        owner.join()
        backend = make(tmp_path, pools.mha())
        assert backend.counters()["part"] == "owner"
        assert backend.batch_exists(keys(8)) == 8
        backend.close()
    finally:
        os.kill(child, signal.SIGKILL)

"""Several processes on one store: ranks that agree over gloo, replicas, and processes that are killed."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import queue
import signal
import time
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.utils import rank_consensus_checker
from support.backend import keys, make
from support import pools
from support.trees import CONFIGS, Engine, Trees, same

#: Tests fork: SGLang takes ten seconds to import.
FORK = multiprocessing.get_context("fork")

#: Seconds between two looks whether the processes that a test waits for still run.
LOOK = 1

#: Seconds without an answer after which processes hang: each wait of a backend ends within two
#: minutes. A slow machine is no failure.
HANG = 600


def threads(pid):
    """The threads of a process as the kernel shows them: name, state, and the place of a wait."""
    for task in sorted(Path(f"/proc/{pid}/task").iterdir()):
        shown = []
        for name in ("comm", "stat", "wchan", "syscall", "stack"):
            try:
                shown.append((task / name).read_text().strip())
            except OSError as error:
                shown.append(str(error))
        yield "\n  ".join(shown)


def stacks(pid, file):
    """The stacks of a process that hangs, by `faulthandler` and by the kernel."""
    os.kill(pid, signal.SIGUSR1)
    until = time.monotonic() + 10
    while "most recent call first" not in file.read_text() and time.monotonic() < until:
        os.sched_yield()
    return "\n".join([f"process {pid}", file.read_text(), *threads(pid)])


def together(count, work, *arguments):
    """Runs `work(rank, count, *arguments)` in so many processes; what each returned, by rank. The last
    argument is the directory of the test.
    """
    answers = FORK.Queue()
    dumps = [arguments[-1] / f"stacks {rank}" for rank in range(count)]

    def run(rank):
        dump = dumps[rank].open("w")
        faulthandler.register(signal.SIGUSR1, file=dump)
        try:
            answers.put((rank, work(rank, count, *arguments), None))
        except BaseException:
            answers.put((rank, None, traceback.format_exc()))

    processes = [FORK.Process(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for process in processes:
        process.start()
    found = {}
    heard = time.monotonic()
    try:
        while len(found) < count:
            ended = [rank for rank in range(count) if not processes[rank].is_alive()]
            gone = [rank for rank in ended if rank not in found]
            try:
                rank, answer, error = answers.get(timeout=LOOK)
            except queue.Empty:
                assert not gone, f"ranks {gone} ended without an answer"
                if time.monotonic() - heard > HANG:
                    left = [rank for rank in range(count) if rank not in found]
                    pytest.fail("\n".join(stacks(processes[rank].pid, dumps[rank]) for rank in left))
                continue
            assert error is None, f"rank {rank}: {error}"
            found[rank] = answer
            heard = time.monotonic()
    finally:
        for process in processes:
            process.join(timeout=10)
            process.kill()
    return [found[rank] for rank in range(count)]


def meet(rank, count, path):
    """Nobody leaves before all have come: when the owner of a store goes, it is another's for a moment, and nobody's."""
    (path / f"come {rank}").touch()
    while len(list(path.glob("come *"))) < count:
        os.sched_yield()


def trees(cfg, tp):
    test = Trees("run")
    test.cfg, test.tp = CONFIGS[cfg], tp
    return test


def join_group(rank, count, path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=count)
    # SGLang's own check that ranks decide the same: it ends a process that does not.
    rank_consensus_checker.configure([SimpleNamespace(cpu_group=torch.distributed.group.WORLD)])


def store_and_restore(rank, count, cfg, path):
    """Stores as one server and restores as the next; how many tokens were found, and whether they were this rank's."""
    join_group(rank, count, path / "group")
    test = trees(cfg, (rank, count))
    seq = test._make_seq(1, 4)
    first = Engine(test, path)
    first.scribble(1, rank)
    first.store(seq)
    expected = first.bytes_of(seq)
    torch.distributed.barrier()
    test._leave(first.cache)
    torch.distributed.barrier()
    second = Engine(test, path)
    second.scribble(100 + rank)
    found = second.prefetch(seq)
    if found == len(seq):
        second.load(seq)
    right = found == len(seq) and same(second.bytes_of(seq), expected)
    second.cache.sanity_check()
    counters = test.backend(second.cache).counters()
    rank_consensus_checker.shutdown()
    torch.distributed.barrier()
    test._leave(second.cache)
    return found, right, counters["read"], counters["part"]


@pytest.mark.parametrize("cfg", ["mha", "mla", "mamba", "mla+mamba"])
def test_ranks_restore_after_a_restart_what_they_stored(tmp_path, cfg):
    answers = together(2, store_and_restore, cfg, tmp_path)
    found = {answer[0] for answer in answers}
    assert found == {4 * CONFIGS[cfg].page_size}
    assert all(right for _, right, _, _ in answers)
    assert sorted(part for *_, part in answers) == ["client", "owner"]


def replica(rank, count, path):
    """One of several servers of the same model: they store the same pages, and each restores them."""
    test = trees("mha", (0, 1))
    seq = test._make_seq(1, 4)
    engine = Engine(test, path)
    engine.scribble(1)
    engine.store(seq)
    expected = engine.bytes_of(seq)
    engine.cache.reset()
    engine.scribble(2 + rank)
    assert engine.prefetch(seq) == len(seq)
    engine.load(seq)
    assert same(engine.bytes_of(seq), expected)
    counters = test.backend(engine.cache).counters()
    meet(rank, count, path)
    return counters["pages"], counters["failed"] + counters["dropped"]


def test_replicas_store_each_page_once_and_all_restore_it(tmp_path):
    assert together(3, replica, tmp_path) == [(4, 0)] * 3


def first_use(rank, count, path):
    backend = make(path, pools.mha())
    part = backend.counters()["part"]
    meet(rank, count, path)
    backend.close()
    return part


def test_of_ranks_that_start_at_once_one_creates_the_store(tmp_path):
    parts = together(4, first_use, tmp_path)
    assert sorted(parts) == ["client", "client", "client", "owner"]


def store_until_killed(said, path):
    """Stores chains, one after another, and says which are acknowledged."""
    pool = pools.mha()
    backend = make(path, pool)
    at = 0
    while True:
        pools.fill(pool, seed=at)
        assert all(backend.batch_set_v1(keys(8, f"chain {at}"), pools.indices(pool, range(8))))
        said.send(at)
        at += 1


def hear(heard, process):
    begun = time.monotonic()
    while not heard.poll(LOOK):
        assert process.is_alive(), "nothing is acknowledged any more"
        if time.monotonic() - begun > HANG:
            pytest.fail("\n".join(threads(process.pid)))
    return heard.recv()


@pytest.mark.parametrize("has_survivor", [False, True], ids=["alone", "beside a client"])
def test_what_was_acknowledged_survives_a_kill(tmp_path, has_survivor):
    heard, said = FORK.Pipe(duplex=False)
    process = FORK.Process(target=store_until_killed, args=(said, tmp_path), daemon=True)
    process.start()
    said.close()
    acknowledged = [hear(heard, process)]
    pool = pools.mha()
    survivor = make(tmp_path, pool) if has_survivor else None
    while len(acknowledged) < 20:
        acknowledged.append(hear(heard, process))
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    while heard.poll():
        try:
            acknowledged.append(heard.recv())
        except EOFError:
            break
    backend = survivor or make(tmp_path, pool)
    expected = pools.mha()
    for at in acknowledged:
        pools.fill(expected, seed=at)
        pools.wipe(pool)
        chain = keys(8, f"chain {at}")
        assert backend.batch_exists(chain) == 8
        assert backend.batch_get_v1(chain, pools.indices(pool, range(8))) == [True] * 8
        assert all(
            torch.equal(pools.page_bytes(pool, page), pools.page_bytes(expected, page)) for page in range(8)
        )
    assert backend.counters()["part"] == "owner"
    backend.close()

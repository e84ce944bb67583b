"""`larder_kv.Store`: pages of any engine, by calls and by jobs."""

from __future__ import annotations

import gc
import hashlib
import mmap
import multiprocessing
import os
import re
import select
import signal
import sys
import time
from pathlib import Path

import larder_kv
import pytest
from larder_kv import _larder
from larder_kv.store import Done, Hint, PageClass, QueueFull, Status, Store, StoreError
from support import disk

FORK = multiprocessing.get_context("fork")

SIZE = 128 << 20
PAGE = 64 << 10

#: Seconds after which a wait of a test has failed.
PATIENCE = 60

OK, DUPLICATE, ABSENT = bytes([Status.OK]), bytes([Status.DUPLICATE]), bytes([Status.ABSENT])


def make(path, **options):
    return Store.attach(path, **{"size": SIZE, "disk": "threads"} | options)


def name(store, **fields):
    facts = {"model": "m", "weights": "w", "dtype": "bf16", "layout": "any", "page_tokens": 64, "parts": [PAGE]}
    return store.namespace(**facts | fields)


def keys(count, first=0):
    return b"".join(hashlib.sha256(b"%d" % (first + at)).digest() for at in range(count))


def content(count, seed=0):
    return bytearray(b"".join(bytes([(at + seed) % 251]) * PAGE for at in range(count)))


def memory(rows, stride=PAGE):
    """(mapped memory on its own pages, its address)"""
    import ctypes

    mapped = mmap.mmap(-1, rows * stride)
    return mapped, ctypes.addressof(ctypes.c_char.from_buffer(mapped))


def finished(queue, count):
    """So many finished jobs, by number."""
    done = []
    while len(done) < count:
        assert queue.wait(PATIENCE)
        done += queue.poll()
    assert len(done) == count
    return {one.job: one for one in done}


@pytest.fixture
def store(tmp_path):
    with make(tmp_path) as store:
        yield store


def test_pages_are_read_as_they_were_put(store):
    pages = name(store)
    made = content(8)
    assert pages.put(keys(8), made) == OK * 8
    assert pages.put(keys(8), made) == DUPLICATE * 8
    assert pages.longest_prefix(keys(10)) == 8
    assert pages.contains(keys(10)) == OK * 8 + ABSENT * 2
    assert pages.holds(keys(1)) is True and pages.holds(keys(1, first=9)) is False
    read = bytearray(9 * PAGE)
    assert pages.get(keys(9), read) == OK * 8 + ABSENT
    assert read[: 8 * PAGE] == made
    pages.touch(keys(8))
    assert pages.delete(keys(2)) == 2
    assert pages.contains(keys(3)) == ABSENT * 2 + OK
    assert pages.clear() == 6
    store.flush()
    stats = store.stats()
    assert (stats["pages"], stats["deleted_pages"], stats["pages_put"]) == (0, 8, 8)
    assert store.part == "owner" and store.path.startswith("/") and store.remarks == []


def test_a_hint_has_a_class_a_priority_and_a_session(store):
    pages = name(store)
    hint = Hint(PageClass.TOOL, priority=3, session=b"agent 7")
    assert pages.put(keys(2), content(2), hint=hint) == OK * 2
    pages.touch(keys(2), hint=Hint(63))
    with pytest.raises(ValueError, match="class 64 is not below 64"):
        pages.put(keys(2), content(2), hint=Hint(64))
    for wrong in (Hint(-1), Hint(priority=256), ("tool", 0, None), 4):
        with pytest.raises((TypeError, ValueError, OverflowError)):
            pages.touch(keys(2), hint=wrong)


def test_the_policy_of_eviction_is_the_learned_one_unless_another_is_named(tmp_path):
    for opening in (make, Store.open):
        for policy, order in (({}, "lru: the store has fewer than 160 segments"), ({"policy": "lru"}, "lru")):
            with opening(tmp_path, **policy) as store:
                assert store.stats()["eviction"] == order


def test_pages_survive_a_close(tmp_path):
    with make(tmp_path) as store:
        assert name(store).put(keys(4), content(4)) == OK * 4
    for opening in (lambda: make(tmp_path, create=False), lambda: Store.open(tmp_path, disk="threads")):
        with opening() as opened:
            read = bytearray(4 * PAGE)
            assert name(opened).get(keys(4), read) == OK * 4
            assert read == content(4)
    with Store.open(tmp_path, read_only=True, disk="threads") as store:
        assert set(name(store).put(keys(1, first=9), content(1))) == {Status.READ_ONLY}


def test_memory_in_every_form_has_the_same_bytes(store):
    pages = name(store, parts=[PAGE // 2, PAGE // 2])
    made = content(3)
    mapped, address = memory(3)
    mapped[:] = made
    forms = [made, bytes(made), memoryview(made), mapped, [made[at * PAGE : (at + 1) * PAGE] for at in range(3)]]
    forms.append([(address + at * PAGE, PAGE) for at in range(3)])
    for at, form in enumerate(forms):
        chain = keys(3, first=100 * at)
        assert pages.put([chain[:32], chain[32:64], bytearray(chain[64:])], form) == OK * 3
        read = bytearray(3 * PAGE)
        assert pages.get(bytearray(chain), memoryview(read)) == OK * 3
        assert read == made
        into = [bytearray(PAGE) for _ in range(3)]
        assert pages.get(chain, into) == OK * 3
        assert b"".join(into) == made


def test_namespaces_are_apart(store):
    first = name(store)
    assert first.put(keys(1), content(1)) == OK
    others = [{"model": "n"}, {"weights": "v"}, {"dtype": "fp8"}, {"layout": "other"}, {"page_tokens": 32}, {"tp": (1, 2)}]
    others += [{"pp": (0, 2)}, {"cp": (1, 2)}, {"pool": "swa"}, {"extra": {"window": "128"}}, {"parts": [PAGE // 2] * 2}]
    for fields in others:
        other = name(store, **fields)
        assert other.contains(keys(1)) == ABSENT, fields
        assert other.digest != first.digest
    same = name(store)
    assert same.contains(keys(1)) == OK and same.digest == first.digest
    assert same.page_bytes == PAGE and same.parts == (PAGE,) and same.store is store


def test_wrong_arguments_are_named(tmp_path, store):
    pages = name(store)
    with pytest.raises(ValueError, match="no multiple"):
        pages.contains(b"short")
    with pytest.raises(ValueError, match="32 bytes, not 5"):
        pages.contains([b"short"])
    with pytest.raises(TypeError):
        pages.contains([1])
    with pytest.raises(ValueError, match="for 2 pages"):
        pages.put(keys(2), content(1))
    with pytest.raises(ValueError, match="1 pages for 2 keys"):
        pages.put(keys(2), [content(1)])
    with pytest.raises(ValueError, match=f"{2 * PAGE} are needed"):
        pages.put(keys(2), content(1))
    with pytest.raises(ValueError, match=f"page 1: 5 bytes at .* for a page of {PAGE} bytes"):
        pages.get(keys(2), [bytearray(PAGE), bytearray(5)])
    with pytest.raises(ValueError, match="read-only"):
        pages.get(keys(1), bytes(PAGE))
    same = bytearray(PAGE)
    with pytest.raises(ValueError, match="two pages"):
        pages.get(keys(2), [same, same])
    with pytest.raises(ValueError, match="neither `before` nor `depth`"):
        pages.put(keys(1), content(1), depth=1, chain=False)
    for wrong in ({"parts": []}, {"parts": [1] * 9}, {"tp": (2, 2)}, {"model": ""}, {"page_tokens": 0}):
        with pytest.raises(ValueError):
            name(store, **wrong)
    for size in (-1, 2**64):
        with pytest.raises(ValueError, match=f"`size`: {size} is no number of bytes"):
            make(tmp_path / "other", size=size)
    for wrong in ({"size": "much"}, {"sync": "often"}, {"lease": -1.0}, {"disk": "tape"}, {"policy": "mru"}):
        with pytest.raises(ValueError):
            make(tmp_path / "other", **wrong)
    nan = float("nan")
    for wrong in ({"lease": nan}, {"hang_limit": nan}):
        with pytest.raises(ValueError, match="NaN is no number of seconds"):
            make(tmp_path / "other", **wrong)
    with pytest.raises(ValueError, match="NaN is no number of seconds"):
        pages.get(keys(1), bytearray(PAGE), timeout=nan)
    with pytest.raises(StoreError, match="`size` is missing"):
        Store.attach(tmp_path / "other")
    with pytest.raises(StoreError, match="nothing"):
        Store.attach(tmp_path / "nothing", create=False)
    with pytest.raises(StoreError, match="give its directory"):
        Store.attach(store.path)
    for address, length, stride in ((0, 10, 1), (4096, 0, 1), (4096, 10, 0), (4096, 10, 11)):
        with pytest.raises(ValueError):
            store.register(address, length, stride)


def test_a_closed_store_misses_and_refuses(tmp_path):
    store = make(tmp_path)
    pages, queue = name(store), store.queue()
    mapped, address = memory(1)
    region = store.register(address, PAGE, PAGE, owner=mapped)
    assert store.close() is True and store.close() is True
    assert store.part == "closed"
    closed = bytes([Status.CLOSED])
    assert pages.put(keys(1), content(1)) == closed
    assert pages.get(keys(1), bytearray(PAGE)) == closed
    assert pages.contains(keys(1)) == closed
    assert pages.longest_prefix(keys(1)) == 0 and pages.holds(keys(1)) is None
    for call in (lambda: pages.delete(keys(1)), pages.clear, store.flush, lambda: name(store)):
        with pytest.raises(StoreError, match="closed"):
            call()
    for call in (lambda: store.register(address, PAGE, PAGE, owner=mapped), store.queue, store.stats):
        with pytest.raises(StoreError, match="closed"):
            call()
    with pytest.raises(StoreError, match="closed"):
        queue.submit_get(pages, keys(1), region, [0])
    assert queue.poll() == []


def huge_kib(address):
    """KiB on huge pages of the mapping that begins at an address."""
    text = Path("/proc/self/smaps").read_text()
    mapping = text[text.index(f"{address:x}-") :]
    return int(re.search(r"^ShmemPmdMapped: +(\d+) kB$", mapping, re.M)[1])


def test_a_region_moves_to_huge_pages_while_jobs_use_it(store):
    pages, queue = name(store), store.queue()
    mapped, address = memory(1024)
    mapped[:] = content(16) * 64
    region = store.register(address, len(mapped), PAGE, owner=mapped)
    put = queue.submit_put(pages, keys(16, 16), region, range(16))
    assert finished(queue, 1)[put].statuses == OK * 16
    assert region.huge_bytes is None
    region.move_to_huge_pages()
    is_over, row = False, 0
    while not is_over:
        is_over = region.huge_bytes is not None
        row = (row + 16) % 1024
        mapped[row * PAGE : (row + 16) * PAGE] = bytes(16 * PAGE)
        got = queue.submit_get(pages, keys(16, 16), region, range(row, row + 16))
        assert finished(queue, 1)[got].statuses == OK * 16
    assert mapped[:] == content(16) * 64
    if not region.huge_bytes:
        pytest.skip("this kernel moved no memory to huge pages")
    assert huge_kib(address) == region.huge_bytes >> 10


def test_jobs_move_rows_and_are_reported_once(store):
    pages, queue = name(store), store.queue()
    mapped, address = memory(16)
    mapped[:] = content(16)
    region = store.register(address, len(mapped), PAGE, owner=mapped)
    assert (region.rows, region.stride, region.address) == (16, PAGE, address)
    assert queue.poll() == [] and not readable(queue)
    put = queue.submit_put(pages, keys(8), region, range(8))
    done = finished(queue, 1)[put]
    assert isinstance(done, Done) and done.statuses == OK * 8 and done.bytes == 8 * PAGE and done.seconds > 0
    assert not readable(queue)
    # In another order, into other rows.
    import array

    get = queue.submit_get(pages, keys(9), region, array.array("i", [15, 14, 13, 12, 11, 10, 9, 8, 0]), timeout=PATIENCE)
    assert select.select([queue.event_fd()], [], [], PATIENCE)[0]
    assert finished(queue, 1)[get].statuses == OK * 8 + ABSENT
    for at in range(8):
        assert mapped[(15 - at) * PAGE] == at
    lookup = queue.submit_lookup(pages, keys(9), timeout=PATIENCE)
    assert finished(queue, 1)[lookup].statuses == OK * 8 + ABSENT
    assert queue.submit_touch(pages, keys(8)) is True
    assert queue.drain(PATIENCE) and queue.pending == 0 and queue.stuck == 0
    assert queue.poll() == [] and len({put, get, lookup}) == 3


def readable(queue):
    return bool(select.select([queue.event_fd()], [], [], 0)[0])


def test_queues_have_events_of_their_own(store):
    pages = name(store)
    mapped, address = memory(1)
    region = store.register(address, PAGE, PAGE, owner=mapped)
    queues = [store.queue(threads=1) for _ in range(3)]
    assert len({queue.event_fd() for queue in queues}) == 3
    queues[1].submit_put(pages, keys(1), region, [0])
    assert queues[1].wait(PATIENCE)
    assert [readable(queue) for queue in queues] == [False, True, False]
    # A caller may read the event itself; the job is still there to be polled.
    os.read(queues[1].event_fd(), 8)
    assert len(queues[1].poll()) == 1 and not readable(queues[1])


def test_rows_that_are_no_memory_of_the_region_are_refused(store):
    pages, queue = name(store), store.queue()
    mapped, address = memory(2)
    region = store.register(address, len(mapped), PAGE // 2, owner=mapped)
    for rows in ([4], [3], [-1], [2**62]):
        with pytest.raises(ValueError, match="not inside"):
            queue.submit_get(pages, keys(1), region, rows)
    for rows in ([0, 0], [0, 1], [2, 1]):
        with pytest.raises(ValueError, match="two pages"):
            queue.submit_get(pages, keys(2), region, rows)
    with pytest.raises(ValueError, match="1 rows for 2 keys"):
        queue.submit_get(pages, keys(2), region, [0])
    with pytest.raises(TypeError):
        queue.submit_get(pages, keys(1), region, b"\0\0\0\0")
    # A page may reach over several rows, and a store may read one row twice.
    put = queue.submit_put(pages, keys(2), region, [1, 1])
    assert finished(queue, 1)[put].statuses == OK * 2


def test_a_full_queue_accepts_nothing_of_a_job(store):
    pages, queue = name(store), store.queue(jobs=2, bytes=3 * PAGE)
    mapped, address = memory(4)
    region = store.register(address, len(mapped), PAGE, owner=mapped)
    # A job that not even an empty queue takes.
    with pytest.raises(ValueError, match=f"{4 * PAGE} bytes, and the queue takes at most {3 * PAGE}"):
        queue.submit_put(pages, keys(4), region, range(4))
    assert queue.submit_put(pages, keys(3), region, range(3)) >= 0
    with pytest.raises(QueueFull):
        queue.submit_put(pages, keys(1), region, [0])
    # Finished jobs count until they are polled.
    assert queue.drain(PATIENCE)
    with pytest.raises(QueueFull):
        queue.submit_put(pages, keys(1), region, [0])
    assert len(queue.poll()) == 1
    for _ in range(2):
        queue.submit_lookup(pages, keys(1))
    assert queue.submit_touch(pages, keys(1)) is False
    counters = queue.counters()
    assert (counters["refused"], counters["dropped_touches"], counters["submitted"]) == (2, 1, 3)


def test_a_queue_refuses_the_namespace_of_another_store(tmp_path, store):
    mapped, address = memory(1)
    region = store.register(address, len(mapped), PAGE, owner=mapped)
    queue = store.queue()
    with make(tmp_path / "other") as other:
        pages = name(other)
        for call in (
            lambda: queue.submit_put(pages, keys(1), region, [0]),
            lambda: queue.submit_get(pages, keys(1), region, [0]),
            lambda: queue.submit_lookup(pages, keys(1)),
            lambda: queue.submit_touch(pages, keys(1)),
            lambda: queue.submit_unlease(pages, keys(1)),
        ):
            with pytest.raises(ValueError, match="of another store"):
                call()
    assert queue.counters()["submitted"] == 0


def test_a_page_behind_a_gap_is_stored_and_found_by_no_prefix(store):
    pages, chain = name(store), keys(3)
    assert pages.put(chain[:32], content(1)) == OK
    assert pages.put(chain[64:], content(1), before=chain[32:64], depth=2) == OK
    assert pages.longest_prefix(chain) == 1
    assert pages.put(chain[64:], content(1, seed=9), before=chain[32:64], depth=2) == DUPLICATE
    read = bytearray(PAGE)
    assert pages.get(chain[64:], read) == OK and read == content(1)


def until_unleased(store):
    end = time.monotonic() + PATIENCE
    while store.stats()["leased_bytes"]:
        assert time.monotonic() < end, "a lease was not returned"
        time.sleep(0.01)


def test_a_lookup_that_is_refused_takes_no_leases(tmp_path):
    with make(tmp_path, lease=0.02) as store:
        pages = name(store)
        assert pages.put(keys(4), content(4)) == OK * 4
        full, closed = store.queue(jobs=1), store.queue()
        full.submit_lookup(pages, keys(1))
        assert closed.close() is True
        for queue, error in ((full, QueueFull), (closed, StoreError)):
            with pytest.raises(error):
                queue.submit_lookup(pages, keys(4), lease=True)
        until_unleased(store)
        [lookup] = full.poll()
        job = full.submit_lookup(pages, keys(4), lease=True)
        assert lookup.statuses == OK and full.poll()[0][:2] == (job, OK * 4)


def test_leases_are_returned_although_the_queue_is_closed(tmp_path):
    with make(tmp_path, lease=0.02) as store:
        pages = name(store)
        assert pages.put(keys(4), content(4)) == OK * 4
        for _ in range(100):
            assert pages.lease(keys(4)) == OK * 4
            queue = store.queue()
            assert all(queue.submit_unlease(pages, keys(1, first=at)) for at in range(4))
            assert queue.close() is True and queue.pending == 0
        until_unleased(store)


def test_a_poll_that_a_signal_interrupts_loses_no_job(store, monkeypatch):
    class Stop(Exception):
        """Of a handler."""

    def stop(*_):
        raise Stop

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        pages, queue = name(store), store.queue(jobs=5)
        jobs = [queue.submit_lookup(pages, keys(1)) for _ in range(5)]
        make_done = Done.__new__

        def interrupted(kind, job, *fields):
            if job == jobs[2]:
                signal.raise_signal(signal.SIGUSR1)
            return make_done(kind, job, *fields)

        monkeypatch.setattr(Done, "__new__", interrupted)
        with pytest.raises(Stop):
            queue.poll()
        monkeypatch.undo()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert select.select([queue.event_fd()], [], [], 0)[0]
    with pytest.raises(QueueFull):
        queue.submit_lookup(pages, keys(1))
    assert [done.job for done in queue.poll()] == jobs
    assert queue.poll() == [] and not select.select([queue.event_fd()], [], [], 0)[0]
    queue.submit_lookup(pages, keys(1))


def test_a_job_that_has_not_started_by_its_deadline_is_reported_late(store):
    pages, queue = name(store), store.queue()
    mapped, address = memory(1)
    region = store.register(address, len(mapped), PAGE, owner=mapped)
    assert pages.put(keys(1), content(1)) == OK
    late = queue.submit_get(pages, keys(1), region, [0], timeout=0.0)
    assert finished(queue, 1)[late].statuses == bytes([Status.DEADLINE])
    assert mapped[:] == bytes(PAGE)


def test_a_queue_that_is_closed_reports_every_job(store):
    pages, queue = name(store), store.queue(threads=1)
    mapped, address = memory(8)
    region = store.register(address, len(mapped), PAGE, owner=mapped)
    jobs = {queue.submit_put(pages, keys(8, first=8 * at), region, range(8)) for at in range(32)}
    assert queue.close(PATIENCE) is True
    done = queue.poll()
    assert {one.job for one in done} == jobs and len(done) == len(jobs)
    assert {one.statuses for one in done} <= {OK * 8, bytes([Status.CLOSED]) * 8}
    with pytest.raises(StoreError, match="closed"):
        queue.submit_lookup(pages, keys(1))


def test_a_store_that_is_dropped_with_jobs_in_flight_stays_until_they_end(tmp_path):
    store = make(tmp_path)
    pages, queue = name(store), store.queue()
    mapped, address = memory(8)
    mapped[:] = content(8)
    region = store.register(address, len(mapped), PAGE, owner=mapped)
    queue.submit_put(pages, keys(8), region, range(8))
    del store, pages, queue, region, mapped
    gc.collect()


def in_child(work):
    process = FORK.Process(target=work, daemon=True)
    process.start()
    process.join(PATIENCE)
    return process.exitcode


def test_a_forked_child_gets_misses_and_errors_and_ends(store):
    pages, queue = name(store), store.queue()
    assert pages.put(keys(1), content(1)) == OK
    mapped, address = memory(1)
    region = store.register(address, len(mapped), PAGE, owner=mapped)
    queue.submit_get(pages, keys(1), region, [0])
    assert queue.wait(PATIENCE)

    def child():
        assert pages.get(keys(1), bytearray(PAGE)) == bytes([Status.CLOSED])
        assert pages.contains(keys(1)) == bytes([Status.CLOSED]) and pages.holds(keys(1)) is None
        assert set(pages.put(keys(1), content(1))) == {Status.CLOSED}
        assert queue.poll() == [] and queue.pending == 0 and queue.wait(0) is False
        for call in (store.queue, store.close, store.stats, lambda: queue.submit_get(pages, keys(1), region, [0])):
            with pytest.raises(StoreError, match="before a fork"):
                call()
        assert store.part == "nobody"
        sys.exit(0)

    assert in_child(child) == 0
    assert len(queue.poll()) == 1 and pages.get(keys(1), bytearray(PAGE)) == OK


def test_two_processes_share_pages_and_one_goes_on_when_the_owner_is_killed(tmp_path):
    begun, end = FORK.Pipe(), FORK.Pipe()

    def owner():
        store = make(tmp_path)
        assert name(store).put(keys(4), content(4)) == OK * 4
        begun[1].send(store.part)
        end[0].recv()

    process = FORK.Process(target=owner, daemon=True)
    process.start()
    assert begun[0].poll(PATIENCE) and begun[0].recv() == "owner"
    with make(tmp_path) as store:
        pages, queue = name(store), store.queue()
        assert store.part == "client" and pages.holds(keys(1)) is None
        lookup = queue.submit_lookup(pages, keys(5), timeout=PATIENCE)
        assert finished(queue, 1)[lookup].statuses == OK * 4 + ABSENT
        assert pages.put(keys(2, first=4), content(2)) == OK * 2
        os.kill(process.pid, signal.SIGKILL)
        process.join(PATIENCE)
        read = bytearray(6 * PAGE)
        while pages.get(keys(6), read) != OK * 6:
            os.sched_yield()
        assert store.part == "owner" and read == content(4) + content(2)
        assert pages.holds(keys(1)) is True


def test_larder_exports_all_of_its_store():
    assert set(larder_kv.__all__) == {*larder_kv.store.__all__, "__version__"}
    assert all(getattr(larder_kv, public) is getattr(larder_kv.store, public) for public in larder_kv.store.__all__)


def test_a_put_with_a_recall_ends_at_its_timeout_and_is_not_stored_later(tmp_path):
    begun = FORK.Pipe()

    def owner():
        store = make(tmp_path)
        begun[1].send(store.part)
        signal.pause()

    process = FORK.Process(target=owner, daemon=True)
    process.start()
    assert begun[0].poll(PATIENCE) and begun[0].recv() == "owner"
    mapped, address = memory(1)
    try:
        with make(tmp_path) as store:
            pages, queue = name(store), store.queue()
            region = store.register(address, len(mapped), PAGE, owner=mapped)
            os.kill(process.pid, signal.SIGSTOP)
            # All its threads have stopped when this returns.
            assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
            put = queue.submit_put(pages, keys(1), region, [0], timeout=0.1, recall=True)
            assert finished(queue, 1)[put].statuses == bytes([Status.HUNG])
            # The rows are the caller's again.
            mapped[:] = content(1)
            os.kill(process.pid, signal.SIGCONT)
            assert queue.drain(PATIENCE) and queue.poll() == [] and queue.stuck == 0
            while (found := pages.contains(keys(1))) == bytes([Status.CLOSED]):
                os.sched_yield()
            assert found == ABSENT
    finally:
        process.kill()
        process.join(PATIENCE)


WRITES_HANG = """
from test_store import *
mapped, address = memory(4)
mapped[:] = content(4)
with make(place) as store:
    pages, queue = name(store), store.queue()
    region = store.register(address, len(mapped), PAGE, owner=mapped)
    hang_writes.touch()
    recalled = queue.submit_put(pages, keys(2), region, [0, 1], timeout=0.5, recall=True)
    kept = queue.submit_put(pages, keys(2, first=2), region, [2, 3], timeout=0.5)
    done = finished(queue, 1)
    said = {"recalled": done[recalled].statuses == bytes([Status.HUNG]) * 2, "pending": queue.pending}
    # The rows are the caller's again, while the disk still has them.
    mapped[: 2 * PAGE] = content(2, seed=7)
    said["hidden"] = pages.contains(keys(2)) == ABSENT * 2
    hang_writes.unlink()
    said["kept"] = finished(queue, 1)[kept].statuses == OK * 2
    assert queue.drain(PATIENCE) and queue.poll() == []
    said["never"] = pages.contains(keys(2)) == ABSENT * 2
    said["anew"] = pages.put(keys(2), content(2)) == OK * 2
with make(place) as store:
    read = bytearray(4 * PAGE)
    said["read"] = name(store).get(keys(4), read) == OK * 4 and read == content(4)
print(json.dumps(said))
"""


def test_a_put_with_a_recall_ends_while_the_disk_has_its_rows(tmp_path, bad_disk):
    assert disk.run(WRITES_HANG, tmp_path, bad_disk) == {
        "recalled": True,
        # It and the put without a recall, which is reported when the disk has answered.
        "pending": 2,
        "hidden": True,
        "kept": True,
        "never": True,
        "anew": True,
        "read": True,
    }


CLOSE_HANGS = """
from test_store import *
with make(place) as store:
    pages = name(store)
    assert pages.put(keys(2), content(2)) == OK * 2
    # Nothing but the end of the store writes now.
    hang_writes.touch()
    start = time.monotonic()
    said = {"closed": [store.close(timeout=patience) for patience in (1, 0.5, *[0] * 20)]}
    said["in time"] = 1.4 < time.monotonic() - start < 20
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    said["threads"] = names.count("larder-close\\n")
    hang_writes.unlink()
    said["in the end"] = [store.close(timeout=PATIENCE), store.close(timeout=0), store.close()]
with make(place) as store:
    said["kept"] = name(store).contains(keys(2)) == OK * 2
print(json.dumps(said))
"""


def test_a_close_with_a_timeout_ends_by_it_although_the_disk_hangs(tmp_path, bad_disk):
    said = {"closed": [False] * 22, "in time": True, "threads": 1, "in the end": [True] * 3, "kept": True}
    assert disk.run(CLOSE_HANGS, tmp_path, bad_disk) == said


CLOSE_FAILS = """
from test_store import *
store = make(place, hang_limit=PATIENCE)
assert name(store).put(keys(2), content(2)) == OK * 2
hang_writes.touch()
said = [store.close(timeout=0.5)]
fail_writes.touch()
hang_writes.unlink()
for timeout in (PATIENCE, PATIENCE, None):
    try:
        said.append(store.close(timeout=timeout))
    except StoreError as error:
        said.append(str(error))
print(json.dumps(said))
"""


def test_an_error_of_a_close_reaches_each_later_call(tmp_path, bad_disk):
    first, *later = disk.run(CLOSE_FAILS, tmp_path, bad_disk)
    assert first is False and len(set(later)) == 1 and "Input/output error" in str(later[0]), later


def test_the_statuses_of_python_are_those_of_rust():
    assert [status.name for status in Status] == _larder.STATUSES
    assert [status.value for status in Status] == list(range(len(_larder.STATUSES)))


def test_leased_pages_stay_and_the_books_name_the_others(tmp_path):
    page = 1 << 20
    with make(tmp_path, codec="off") as store:
        pages = name(store, parts=[page])
        begun = store.evictions()
        assert begun.pages == [] and begun.missed is False
        kept, memory = keys(4), bytes(page)
        for at in range(4):
            assert pages.put(kept[32 * at : 32 * at + 32], memory) == OK
        assert pages.lease(kept + keys(1, first=99)) == OK * 4 + ABSENT
        assert pages.lease(kept[:32]) == OK
        put, gone, since = set(), set(), begun.next
        while len(gone) < 40:
            key = keys(1, first=1000 + len(put))
            assert pages.put(key, memory, chain=False, wait=PATIENCE) == OK
            put.add(key)
            evictions = store.evictions(since)
            assert not evictions.missed and {digest for digest, _ in evictions.pages} <= {pages.digest}
            gone |= {key for _, key in evictions.pages}
            since = evictions.next
        assert pages.contains(kept) == OK * 4
        assert gone < put and {key for key in put if pages.contains(key) == ABSENT} == gone
        listed, cursor = b"", 0
        while cursor is not None:
            some, cursor = pages.list(cursor)
            listed += some
        assert {listed[at : at + 32] for at in range(0, len(listed), 32)} == put - gone | {kept[at : at + 32] for at in range(0, 128, 32)}
        [usage] = store.usage()
        bytes_ = len(listed) // 32 * page
        assert usage == (pages.digest, len(listed) // 32, bytes_, bytes_)
        queue = store.queue()
        assert queue.submit_unlease(pages, kept) is True
        lookup = queue.submit_lookup(pages, kept, lease=True)
        assert finished(queue, 1)[lookup].statuses == OK * 4
        assert queue.drain(PATIENCE)
        pages.unlease(kept)
        everything = b"".join(put - gone)
        assert pages.lease(everything).count(Status.REFUSED) == store.stats()["refused_leases"] > 0

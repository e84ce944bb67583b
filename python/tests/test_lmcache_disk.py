"""What the adapter does while the disk does not answer, or refuses writes."""

from __future__ import annotations

from support import disk

SCRIPT = """
from support.lmcache import *
arena, said, longest = Arena(), {}, 0.0

def timed(call, *arguments):
    global longest
    start = time.perf_counter()
    answer = call(*arguments)
    longest = max(longest, time.perf_counter() - start)
    return answer

with opened(place, arena, timeout="1s") as adapter:
    chains = [keys(2, f"chain {number}") for number in range(6)]
    for number, chain in enumerate(chains):
        assert store(adapter, chain, arena.objects(2, fill=number)).is_successful()

    # The disk refuses writes.
    fail_writes.touch()
    result = store(adapter, keys(2, "refused"), arena.objects(2, fill="b"))
    said["refused"] = [result.is_successful(), result.bytes_transferred()]
    said["there"] = lookup(adapter, keys(2, "refused")), load(adapter, keys(2, "refused"), arena.objects(2))
    said["listed"] = len(listed(adapter)), adapter.get_usage().total_bytes_used // CHUNK
    fail_writes.unlink()
    # It is probed once a second, and takes no writes until then.
    objects = arena.objects(1, fill="back")
    until(lambda: store(adapter, keys(1, "back"), objects).is_successful())
    said["kept"] = sum(sum(lookup(adapter, chain)) for chain in chains)

    # Writes hang.
    hang_writes.touch()
    written, objects = keys(2, "written"), arena.objects(2, fill="w")
    start = time.monotonic()
    task = timed(adapter.submit_store_task, written, objects)
    stores = {}
    settled(adapter.get_store_event_fd(), lambda: stores.update(adapter.pop_completed_store_tasks()) or stores.get(task))
    said["store"] = [stores[task].is_successful(), stores[task].bytes_transferred(), time.monotonic() - start]
    said["held"] = adapter.report_status()["stuck_jobs"]
    # LMCache's memory again, while the disk may still read it.
    for one in objects:
        one.raw_data[:] = 85
    said["hidden"] = lookup(adapter, written)
    hang_writes.unlink()
    until(lambda: not adapter.report_status()["pending_jobs"]["store"])
    said["never"] = lookup(adapter, written), load(adapter, written, arena.objects(2))
    objects = arena.objects(2, fill="w")
    until(lambda: store(adapter, written, objects).is_successful() and all(lookup(adapter, written)))
    into = arena.objects(2)
    said["anew"] = load(adapter, written, into), same(into, "w")

    # Reads hang.
    into = [arena.objects(2) for _ in chains]
    hang_reads.touch()
    begin = lambda number: timed(adapter.submit_load_task, chains[number], into[number])
    tasks = [begin(number) for number in range(4)]
    def are_held():
        # Whether the kernel has them. A load that did not start by its deadline, on a busy machine, begins again.
        for number, task in enumerate(tasks):
            if timed(adapter.query_load_result, task) is not None:
                tasks[number] = begin(number)
        # A load is one read, or two if its chunks are not neighbours on the disk.
        return held_reads() >= 4 and adapter.report_status()["stuck_jobs"] == 4
    until(are_held)
    # All four threads for reads have a load.
    tasks += [begin(number) for number in (4, 5)]
    start = time.monotonic()
    said["late"] = [settled(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task)).popcount() for task in tasks[4:]]
    said["took"] = time.monotonic() - start
    said["early"] = [timed(adapter.query_load_result, task) for task in tasks[:4]]
    start = time.monotonic()
    said["locked"] = lookup(adapter, chains[0])
    adapter.submit_unlock(chains[0])
    said["lookup"] = time.monotonic() - start
    for one in into[4] + into[5]:
        one.raw_data[:] = 85
    hang_reads.unlink()
    said["good"] = []
    for number, task in enumerate(tasks[:4]):
        bitmap = settled(adapter.get_load_event_fd(), lambda: adapter.query_load_result(task))
        said["good"].append((bitmap.popcount(), same(into[number], number)))
    said["poisoned"] = sum(bool((one.raw_data == 85).all()) for one in into[4] + into[5])
    said["again"] = load(adapter, chains[5], arena.objects(2))
    said["longest"] = longest
print(json.dumps(said))
"""


def test_each_task_ends_by_its_deadline_but_loads_that_the_disk_has_and_no_failed_store_is_visible(
    tmp_path, bad_disk
):
    said = disk.run(SCRIPT, tmp_path, bad_disk)
    # A refused store.
    assert said["refused"] == [False, 0]
    assert said["there"] == [[False, False], [False, False]]
    assert said["listed"] == [12, 12]
    assert said["kept"] == 12, "the chunks stored before are gone"
    # A store on a disk that hangs has failed by its deadline, and is not visible later either.
    good, transferred, seconds = said["store"]
    assert not good and not transferred and 0.9 <= seconds < 30
    assert said["held"] == 1
    assert said["hidden"] == [False, False]
    assert said["never"] == [[False, False], [False, False]]
    assert said["anew"] == [[True, True], 2]
    # Loads that did not start end by their deadline.
    assert said["late"] == [0, 0] and said["took"] < 30
    # Operations that had reached the kernel are reported when it has answered, with right results.
    assert said["early"] == [None] * 4
    assert said["good"] == [[2, 2]] * 4
    assert said["poisoned"] == 4, "a buffer was written after its task had been reported"
    # Lookups are answered from memory.
    assert said["locked"] == [True, True] and said["lookup"] < 0.5
    assert said["again"] == [True, True]
    assert said["longest"] < 0.5, "a call waited for the disk"


CLOSING = """
from larder_kv.lmcache import adapter as module
from support.lmcache import *
arena, said = Arena(), {}
module._CLOSE_PATIENCE = 2.0
with opened(place, arena) as adapter:
    assert store(adapter, keys(2), arena.objects(2, fill="a")).is_successful()
    # Nothing but the end of the store writes now.
    hang_writes.touch()
    start = time.monotonic()
    try:
        adapter.close()
    except RuntimeError as error:
        said["error"] = str(error)
    said["took"] = time.monotonic() - start
    hang_writes.unlink()
with opened(place, arena) as adapter:
    said["kept"] = lookup(adapter, keys(2))
print(json.dumps(said))
"""


def test_a_close_does_not_wait_for_a_hung_disk_without_end(tmp_path, bad_disk):
    said = disk.run(CLOSING, tmp_path, bad_disk)
    assert "the disk has not answered" in said["error"] and 1.9 <= said["took"] < 20
    assert said["kept"] == [True, True]


FREED = """
from support.lmcache import *
said = {}

def fill(storage, seed):
    # Gives all of L1 to other chunks.
    some = keys(64, seed)
    for at in range(64):
        offer(storage, some[at : at + 1], seed, at)
    return some

def wrong(l1, some, seed):
    there = {at: one for at, key in enumerate(some) if (one := l1.reserve_read([key])[key][1]) is not None}
    said[seed] = len(there)
    return sum(not torch.equal(one.raw_data[:CHUNK], content(seed, at)) for at, one in there.items())

# The reservations of L1 lapse after a second.
with manager(plugin(place, timeout="1s"), l1=16 << 20, write_ttl=1) as storage:
    [l1] = storage._l1_managers_by_id.values()
    [adapter] = storage._l2_adapters.values()
    old = keys(4, "old")
    offer(storage, old, "old")
    until(lambda: len(adapter._ledger) == 4 and is_quiet(storage))
    for seed, is_forced in (("lapsed", False), ("cleared", True)):
        storage.clear(force=True)
        hang_reads.touch()
        handle = begin(storage, old)
        until(lambda: held_reads() > 0)
        # LMCache frees the buffers of the load.
        until(lambda: (storage.clear(force=is_forced), l1.get_staging_memory_usage() == 0)[1])
        some = fill(storage, seed)
        hang_reads.unlink()
        assert storage.wait_prefetch_status(handle, timeout=PATIENCE)
        said["wrong " + seed] = wrong(l1, some, seed)
    # LMCache gets all of its memory back, and loads as before.
    until(lambda: is_quiet(storage))
    storage.clear(force=True)
    said["left"] = l1.get_memory_usage()[0]
    said["again"] = fetch(storage, old, "old")
print(json.dumps(said))
"""


def test_lmcache_reuses_no_buffer_of_a_load_that_the_disk_has(tmp_path, bad_disk):
    said = disk.run(FREED, tmp_path, bad_disk)
    assert said["lapsed"] >= 32 and said["cleared"] >= 32, "L1 was not filled"
    assert said["wrong lapsed"] == said["wrong cleared"] == 0, "another chunk was overwritten"
    assert said["left"] == 0 and said["again"] == [4, 4]

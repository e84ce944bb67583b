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

    # Reads hang.
    into = [arena.objects(2) for _ in chains]
    hang_reads.touch()
    tasks = []
    for number, chain in enumerate(chains):
        tasks.append(timed(adapter.submit_load_task, chain, into[number]))
        # All four threads for reads hold a load that the kernel has, before the fifth is queued.
        until(lambda: number != 3 or adapter.report_status()["stuck_jobs"] == 4)
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


def test_loads_are_reported_when_the_disk_is_done_with_them_and_no_failed_store_is_visible(
    tmp_path, bad_disk
):
    said = disk.run(SCRIPT, tmp_path, bad_disk)
    # A refused store.
    assert said["refused"] == [False, 0]
    assert said["there"] == [[False, False], [False, False]]
    assert said["listed"] == [12, 12]
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

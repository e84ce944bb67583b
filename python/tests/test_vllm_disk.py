"""What the tier does while the disk, or the store's owner, does not answer: vLLM's step waits
for neither.
"""

from __future__ import annotations

import signal
import time

import pytest
from larder_kv.vllm import lookups
from support import disk
from support.child import Child
from support.vllm import Steps, keys, steps, tier
from vllm.v1.kv_offload.base import LookupResult

CHAIN = keys(12)

HANGS = """
import numpy as np
from support.vllm import Steps, content, keys, tier
from vllm.v1.kv_offload.base import LookupResult
# One row more than the stuck loads hold is left for the request that ends meanwhile.
engine = Steps(tier(place, disk="threads", timeout="1s"), rows=32)
chains = [keys(8, f"chain {number}") for number in range(3)]
for chain in chains:
    engine.store(chain)
    engine.forget()
hang_reads.touch()
said, longest = {}, 0.0
def timed(call, *arguments):
    global longest
    start = time.perf_counter()
    answer = call(*arguments)
    longest = max(longest, time.perf_counter() - start)
    return answer
requests, rows = [], {}
queue = engine.tier._keeper.link.queue
def look(number):
    return [timed(engine.manager.lookup, key, requests[number]) for key in chains[number]]
def begin(number):
    requests[number:] = [engine.request(chains[number])]
    assert set(look(number)) == {LookupResult.HIT_PENDING}
    pending = engine.manager._pending_load_submissions[0][requests[number].req_id]
    rows[number] = list(pending.chunk_ids)
    timed(engine.end_step)
def wait_for(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, "it did not come to be"
        time.sleep(0.001)
def is_held(number):
    # Whether the kernel has it. A load that did not start by its deadline, on a busy machine, begins again.
    if LookupResult.MISS in look(number):
        engine.finish(requests[number])
        begin(number)
    timed(engine.end_step)
    return held_reads() > number
for number in range(2):
    begin(number)
    wait_for(lambda: is_held(number))
wait_for(lambda: queue.stuck == 2)
# Both threads for reads have a load.
begin(2)
start = time.monotonic()
while LookupResult.HIT_PENDING in look(2):
    timed(engine.end_step)
    time.sleep(0.001)
said["third"] = time.monotonic() - start
said["answer"] = [answer.name for answer in look(2)]
# The third load never started: its rows are vLLM's again, and nothing writes them any more.
poison = np.full(engine.row_bytes, 85, dtype=np.int8)
for row in rows[2]:
    engine.view[row] = poison
said["stuck"] = queue.stuck
said["early"] = [answer.name for number in range(2) for answer in look(number)]
timed(engine.end_step)
hang_reads.unlink()
engine.settle()
said["late"] = [engine.good(chains[number], requests[number]) for number in range(2)]
said["poisoned"] = sum(np.array_equal(engine.view[row], poison) for row in rows[2])
said["errors"] = engine.tier._meters.totals["errors"]
said["longest"] = longest
for request in requests:
    engine.finish(request)
engine.forget()
said["again"] = engine.load(chains[2])
engine.close()
print(json.dumps(said))
"""


@pytest.mark.once
def test_rows_are_reported_when_the_disk_is_done_with_them_and_not_before(tmp_path, bad_disk):
    said = disk.run(HANGS, tmp_path, bad_disk)
    # A load that did not start ends by its deadline, and its keys are misses until the request
    # ends.
    assert said["answer"] == ["MISS"] * 8 and said["third"] >= 0.9
    # Two that had reached the kernel are reported by it alone: late, and right.
    assert said["stuck"] == 2 and said["early"] == ["HIT_PENDING"] * 16
    assert said["late"] == [8, 8]
    assert said["poisoned"] == 8, "a row was written after its job had been reported"
    assert said["again"] == [8, 8]
    assert said["errors"] == 0
    assert said["longest"] < 0.5, "a call waited for the disk"


def owns(said, path):
    engine = Steps(tier(path))
    engine.store(CHAIN)
    said.write("ready\n")
    while True:
        signal.pause()


@pytest.fixture
def owner(tmp_path):
    """Another process that owns the store and has stored a chain."""
    process = Child(owns, tmp_path)
    assert process.says.readline() == "ready\n"
    yield process
    process.kill()


@pytest.fixture
def patient(monkeypatch):
    """A busy machine may take longer to answer a lookup than a tier waits."""
    monkeypatch.setattr(lookups, "PATIENCE", 30.0)


def test_a_client_asks_with_one_message_and_answers_in_the_next_step(tmp_path, owner, patient):
    with steps(tier(tmp_path)) as engine:
        request = engine.request(CHAIN)
        assert [engine.tier.lookup(key, request) for key in CHAIN] == [LookupResult.RETRY] * 12
        before = engine.tier._keeper.link.queue.counters()["submitted"]
        engine.end_step()
        assert engine.tier._keeper.link.queue.counters()["submitted"] == before + 1
        assert engine.load(CHAIN) == (12, 12)
        assert engine.load(keys(3, "other")) == (0, 0)
        engine.forget()
        assert engine.store(keys(4, "of the client")) == 4
        engine.forget()
        assert engine.load(keys(4, "of the client")) == (4, 4)


def test_a_client_finds_after_a_reset_what_was_stored_after_it(tmp_path, owner, patient):
    with steps(tier(tmp_path)) as engine:
        for _ in range(3):
            engine.manager.reset_cache()
            getattr(engine.manager, "on_reset_flushed", lambda: None)()
            assert engine.load(CHAIN) == (0, 0)
            assert engine.store(CHAIN) == 12
            engine.forget()
            assert engine.load(CHAIN) == (12, 12)


@pytest.mark.once
def test_while_the_owner_is_stopped_no_call_waits_and_every_request_ends(
    tmp_path, owner, monkeypatch
):
    with steps(tier(tmp_path, timeout="1s")) as engine:
        with monkeypatch.context() as patient:
            patient.setattr(lookups, "PATIENCE", 30.0)
            assert engine.load(CHAIN) == (12, 12)
        engine.forget()
        owner.send(signal.SIGSTOP)
        try:
            longest, number = 0.0, 0
            until = time.monotonic() + 10.0

            def timed(call, *arguments):
                nonlocal longest
                began = time.perf_counter()
                answer = call(*arguments)
                longest = max(longest, time.perf_counter() - began)
                return answer

            while time.monotonic() < until:
                number += 1
                request = engine.request(CHAIN)
                timed(engine.manager.lookup, CHAIN[number % 12], request)
                timed(engine.tier.touch, CHAIN, request)
                if len(engine.manager._jobs) < 8:
                    engine.finish(timed(engine.offer, keys(2, f"while stopped {number}")))
                timed(engine.end_step)
                engine.finish(request)
                time.sleep(0.002)
            # A new request is a miss after the lookups' patience.
            request = engine.request(CHAIN)
            began = time.monotonic()
            assert engine.find(CHAIN, request)[0] == 0
            assert time.monotonic() - began < 5.0
            assert longest < 0.5, "a call waited for the owner"
        finally:
            owner.send(signal.SIGCONT)
        engine.settle()
        engine.forget()
        until = time.monotonic() + 60
        while engine.load(CHAIN) != (12, 12):
            assert time.monotonic() < until, "it does not go on"
            engine.forget()
        totals = engine.tier._meters.totals
        assert totals["errors"] == 0 and totals["late_lookups"] > 0


def test_when_the_owner_is_killed_another_engine_goes_on(tmp_path, owner, patient, monkeypatch):
    with steps(tier(tmp_path)) as engine:
        assert engine.load(CHAIN) == (12, 12)
        monkeypatch.undo()
        owner.kill()
        engine.forget()
        until = time.monotonic() + 60
        while engine.load(CHAIN) != (12, 12):
            assert time.monotonic() < until, "it does not go on"
            engine.forget()
        until = time.monotonic() + 60
        while engine.store(keys(4, f"after {time.monotonic()}")) != 4:
            assert time.monotonic() < until, "nothing is stored any more"
            engine.forget()
        assert engine.tier._keeper.link.store.part == "owner"
        assert engine.tier._meters.totals["errors"] == 0

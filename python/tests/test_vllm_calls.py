"""Every call of vLLM's, whatever state the store is in: none raises, and each job is reported
exactly once.
"""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from support.vllm import ROW, Steps, keys, steps, tier
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.tiering.base import TransferJob

CHAIN = keys(8)

numbers = itertools.count(1_000_000)


def job(of, rows, request, is_load):
    return TransferJob(
        job_id=next(numbers),
        keys=of,
        chunk_ids=np.array(rows, dtype=np.int32),
        is_promotion=is_load,
        req_context=request,
    )


def reports(tier, wanted):
    """The reports of these jobs, once no other can come."""
    tier._keeper.link and tier._keeper.link.queue.drain(60)
    found = list(tier.get_finished_jobs())
    assert sorted(report.job_id for report in found) == sorted(wanted)
    assert list(tier.get_finished_jobs()) == []
    return {report.job_id: report for report in found}


def call_all(tier, request):
    """Each call with what vLLM gives and with what it never does. Returns the jobs that must be
    reported.
    """
    wrong = [b"", b"\0" * 4, b"\0" * 20, b"\0" * 40, CHAIN[0][:-4] + b"\0\0\0\7"]
    for key in [*CHAIN, *wrong]:
        assert tier.lookup(key, request) in (
            LookupResult.HIT,
            LookupResult.MISS,
            LookupResult.RETRY,
        )
    jobs = []
    for is_load in (False, True):
        submit = tier.submit_load if is_load else tier.submit_store
        for of, rows in (
            (CHAIN, range(8)),
            (set(CHAIN), range(8)),
            (CHAIN[:2], [3, 3]),
            (CHAIN[:2], [-1, 0]),
            (CHAIN[:2], [0, 10_000]),
            (CHAIN[:2], [0]),
            (CHAIN[:1] + wrong[:1], [0, 1]),
            (CHAIN[:1] + wrong[4:], [0, 1]),
            ([], []),
        ):
            made = job(of, rows, request, is_load)
            submit(made)
            jobs.append(made.job_id)
    tier.touch(CHAIN, request)
    tier.touch(wrong, request)
    tier.on_schedule_end(ScheduleEndContext((), ()))
    tier.has_pending_work()
    tier.get_stats()
    list(tier.take_events())
    return jobs


def unknown():
    request = ReqContext(req_id="unknown")
    Steps.place(request, CHAIN)
    return request


@pytest.mark.parametrize(
    "state",
    ["open", "closed", "none", "shut down", pytest.param("full", marks=pytest.mark.once)],
)
def test_no_call_raises_and_each_job_is_reported_once(tmp_path, state):
    blocked = tmp_path / "file"
    blocked.write_text("")
    made = (
        tier(blocked, on_error="miss")
        if state == "none"
        else tier(tmp_path / "store", enable_kv_events=True)
    )
    with steps(made, events=True) as engine:
        if state == "closed":
            engine.tier._keeper.link.store.close()
        if state == "shut down":
            engine.tier.shutdown()
            engine.tier.shutdown()
        if state == "full":
            # Everything is leased: no room is made.
            for number in range(200):
                engine.store(keys(8, f"chain {number}"))
                engine.forget()
        for request in (engine.request(CHAIN), unknown()):
            jobs = call_all(engine.tier, request)
            found = reports(engine.tier, jobs)
            if state in ("closed", "none", "shut down"):
                done = [report for report in found.values() if report.success]
                # The empty jobs alone.
                assert len(done) <= 2
            engine.tier.on_request_finished(request)
            engine.tier.on_request_finished(request)
        engine.tier.drain_jobs()
        engine.tier.get_finished_jobs()


def test_reports_are_exact_whatever_order_calls_come_in(tmp_path):
    """Random stores, loads, resets and request ends: what vLLM asserts of reports is asserted
    here by vLLM's own manager.
    """
    chosen = random.Random(7)
    with steps(tier(tmp_path, on_reset="keep"), rows=24) as engine:
        live = []
        for step in range(300):
            action = chosen.randrange(8)
            chain = keys(chosen.randrange(1, 8), f"chain {chosen.randrange(12)}")
            if action < 3 and len(engine.manager._jobs) < 3:
                if (
                    engine.manager.primary_tier._num_chunks
                    - len(engine.manager.primary_tier._policy.chunks)
                    < 8
                ):
                    engine.forget()
                live.append(engine.offer(chain))
            elif action < 6:
                request = engine.request(chain)
                for key in chain:
                    if engine.manager.lookup(key, request) is LookupResult.MISS:
                        break
                live.append(request)
            elif action == 6 and live:
                engine.manager.on_request_finished(live.pop(chosen.randrange(len(live))))
            elif step % 25 == 0:
                engine.manager.reset_cache()
                getattr(engine.manager, "on_reset_flushed", lambda: None)()
                assert not engine.manager._jobs
            engine.end_step()
        engine.settle()
        assert not engine.tier._jobs and engine.tier._meters.totals["errors"] == 0
        for request in live:
            engine.manager.on_request_finished(request)
        assert (
            not engine.tier._chains
            and not engine.tier._failed
            and not engine.tier._lookups._answers
        )


def test_after_a_drain_nothing_writes_vllms_memory(tmp_path):
    with steps(tier(tmp_path), rows=24) as engine:
        engine.store(CHAIN)
        engine.forget()
        for _ in range(20):
            request = engine.request(CHAIN)
            rows = list(range(8, 16))
            made = job(CHAIN, rows, request, True)
            engine.tier.submit_load(made)
            engine.tier._is_fresh_after_reset = False
            engine.tier.drain_jobs()
            engine.view[8:16] = 85
            (report,) = engine.tier.get_finished_jobs()
            assert report.job_id == made.job_id
            assert (engine.view[8:16] == 85).all()
            engine.tier.on_request_finished(request)
        assert engine.row_bytes == ROW

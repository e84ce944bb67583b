"""Salts of requests as tenants: each has chunks of its own, in encrypted stores with a key of its
own, and is erased by itself. Other tenants of an encrypted store of vLLM's.
"""

from __future__ import annotations

import time

import pytest
from larder_kv.store import Status
from larder_kv.vllm import salts
from support.sealed import erase, has, key_file, served
from support.vllm import keys, steps, tier
from test_vllm_calls import call_all, reports
from vllm.v1.kv_offload.base import LookupResult

CHAIN = keys(8)

#: As the connector tells it: a tier by itself sees no salts.
SERVER = {"weights": "test", "fields": {"dtype": "bf16"}, "prefix_hash": "sha256"}


def salted(path, **more):
    """A tier's configuration."""
    return tier(path, salt_is_tenant=True, larder_server=SERVER, **more)


@pytest.fixture
def key(tmp_path):
    return key_file(tmp_path)


@pytest.fixture
def place(tmp_path):
    return tmp_path / "store"


def loads(engine, *of):
    """The hits of a request for the chain, by salt."""
    found = []
    for salt in of:
        # The CPU tier knows no tenants.
        engine.forget()
        found.append(engine.load(CHAIN, salt=salt))
    engine.forget()
    assert all(hits == good for hits, good in found)
    return [hits for hits, _ in found]


def stores(engine, *of):
    """How many chunks are written of the chain, by salt."""
    written = []
    for salt in of:
        engine.forget()
        written.append(engine.store(CHAIN, salt=salt))
    return written


def test_the_chunks_of_a_salt_are_found_with_it_alone_and_erased_by_themselves(place, key):
    """The keys of the chunks are equal here, which they are not in vLLM."""
    of = ("salt of one", "salt of another", None)
    with steps(salted(place, key_file=key)) as engine:
        for at in range(3):
            assert stores(engine, of[at]) == [8]
            assert loads(engine, *of) == [8] * (at + 1) + [0] * (2 - at)
    with steps(salted(place, key_file=key)) as engine:
        assert loads(engine, *of) == [8] * 3
        assert erase(place, of[0]) == 8
        assert loads(engine, *of) == [0, 8, 8]
        # A later put has another key.
        assert stores(engine, of[0]) == [8]
        assert loads(engine, *of) == [8] * 3
        totals = engine.tier._meters.totals
        assert totals["errors"] == totals["keyless_chunks"] == totals["failed_chunks"] == 0
    assert has(place, *of[:2], "test/model") == []
    # Without the option, salts are a part of vLLM's keys alone.
    with steps(tier(place, key_file=key, larder_server=SERVER)) as engine:
        assert loads(engine, of[0], None) == [8, 8]
        assert erase(place, of[0]) == 8
        assert loads(engine, of[0], None) == [8, 8]


def test_a_server_has_a_tenant_for_requests_without_a_salt(place, key):
    with steps(salted(place, key_file=key, tenant="own")) as engine:
        assert stores(engine, None, "salt") == [8, 8]
        assert erase(place, "own") == 8
        assert loads(engine, None, "salt") == [0, 8]
        # No tenant is a tenant too.
        assert stores(engine, None) == [8]
    with steps(tier(place, key_file=key)) as engine:
        assert loads(engine, None) == [0]


def test_groups_and_resets_have_the_tenant_too(place, key):
    full, window = keys(8), keys(8, group=1)
    facts = {"larder_server": SERVER | {"full_groups": [0]}}
    with steps(salted(place, key_file=key) | facts, groups=2, windows=(1,)) as engine:
        for _ in range(2):
            assert engine.store(full + window[6:], salt="one") == 10
            assert engine.store(full + window[6:]) == 0, "the CPU tier has them"
            engine.forget()
            assert engine.store(full + window[6:]) == 10
            engine.forget()
            assert engine.load(full, salt="one") == (8, 8)
            assert engine.load(window[6:], salt="one") == (2, 2)
            engine.settle()
            engine.manager.reset_cache()
            getattr(engine.manager, "on_reset_flushed", lambda: None)()
            assert engine.load(full, salt="one") == (0, 0)
        assert erase(place, "one") == 20
        assert engine.tier._meters.totals["errors"] == 0


def test_the_first_chunks_of_many_salts_at_once_are_all_stored(place, key):
    """The keys of the tenants are made durable one after the other."""
    chains = {f"salt {at}": keys(2, f"chain {at}") for at in range(16)}
    with steps(salted(place, key_file=key), rows=64) as engine:
        for salt, chain in chains.items():
            engine.finish(engine.offer(chain, engine.request(chain, salt=salt)))
        engine.settle()
        engine.forget()
        found = [engine.load(chain, salt=salt) for salt, chain in chains.items()]
        assert found == [(2, 2)] * 16
        assert engine.tier._meters.totals["stored_chunks"] == 32


def test_salts_that_are_not_kept_are_counted_and_logged_once(place, key, monkeypatch, caplog):
    monkeypatch.setattr(salts, "SALTS_MAX", 1)
    wrong = ["another", "one more", "a\nb", "a" * 2000, "\ud800"]
    with steps(salted(place, key_file=key)) as engine:
        assert stores(engine, "one", *wrong) == [8, 0, 0, 0, 0, 0]
        assert loads(engine, "one", *wrong) == [8, 0, 0, 0, 0, 0]
        # None of it is among the chunks of requests without a salt.
        assert loads(engine, None) == [0]
        totals = engine.tier._meters.totals
        assert totals["keyless_chunks"] == 8 * len(wrong)
        assert totals["errors"] == totals["failed_chunks"] == 0
    lines = [line.message for line in caplog.records if "their chunks are not stored" in line.message]
    assert len(lines) == 2 and not any("another" in line or "aaa" in line for line in lines)


class Refusing:
    """A queue of the store whose puts are refused."""

    def __init__(self, queue, status):
        self._queue, self._status, self._puts = queue, status, set()

    def __getattr__(self, name):
        return getattr(self._queue, name)

    def submit_put(self, *arguments, **more):
        number = self._queue.submit_put(*arguments, **more)
        self._puts.add(number)
        return number

    def poll(self):
        for done in self._queue.poll():
            refused = bytes([self._status] * len(done.statuses))
            yield done._replace(statuses=refused) if done.job in self._puts else done


@pytest.mark.parametrize("status", [Status.KEYRING_FULL, Status.ERASED], ids=["full", "erased"])
def test_chunks_of_a_tenant_without_a_key_are_counted_and_logged_once(place, status, caplog):
    with steps(salted(place)) as engine:
        link = engine.tier._keeper.link
        link.queue = Refusing(link.queue, status)
        for at in range(3):
            assert engine.store(keys(4, f"chain {at}"), salt="one") == 0
        totals = engine.tier._meters.totals
        assert totals["keyless_chunks"] == 12 and totals["refused_chunks"] == 0
        assert totals["errors"] == totals["failed_chunks"] == 0
        assert len([line for line in caplog.records if status.name.lower() in line.message]) == 1


def test_a_request_does_not_wait_long_for_its_namespaces_and_its_stores_are_held(
    place, monkeypatch
):
    with steps(salted(place)) as engine:
        keeper = engine.tier._keeper
        with monkeypatch.context() as patch:
            patch.setattr(keeper, "want", lambda salt: None)
            request = engine.request(CHAIN, salt="one")
            assert engine.tier.lookup(CHAIN[0], request) is LookupResult.RETRY
            # As a lookup without an answer, it is a miss soon.
            assert engine.find(CHAIN, request)[0] == 0
            assert engine.tier._meters.totals["late_lookups"] > 0
            engine.offer(CHAIN, request)
            engine.end_step()
            assert engine.manager.has_pending_work() and engine.stored() == 0
        engine.settle()
        assert engine.stored() == 8
        engine.finish(request)
        assert loads(engine, "one") == [8]


@pytest.mark.parametrize("end", ["late", "reset", "shutdown"])
def test_a_held_store_fails_if_its_namespaces_are_not_made(place, monkeypatch, end):
    timeout = "50ms" if end == "late" else "8s"
    with steps(salted(place, timeout=timeout, on_reset="keep")) as engine:
        monkeypatch.setattr(engine.tier._keeper, "want", lambda salt: None)
        begun = time.monotonic()
        engine.finish(engine.offer(CHAIN, engine.request(CHAIN, salt="one")))
        if end == "reset":
            engine.manager.reset_cache()
        if end == "shutdown":
            engine.tier.shutdown()
            assert [report.success for report in engine.tier.get_finished_jobs()] == [False]
            return
        engine.settle()
        assert end == "late" or time.monotonic() - begun < 8
        assert engine.tier._meters.totals["failed_chunks"] == 8
        assert engine.stored() == 0 and not engine.tier._held


@pytest.mark.parametrize("state", ["open", "closed", "none", "shut down"])
def test_no_call_raises_for_a_request_with_a_salt(tmp_path, place, state):
    blocked = tmp_path / "file"
    blocked.write_text("")
    made = salted(blocked, on_error="miss") if state == "none" else salted(place)
    with steps(made) as engine:
        if state == "closed":
            engine.tier._keeper.link.store.close()
        if state == "shut down":
            engine.tier.shutdown()
        request = engine.request(CHAIN, salt="one")
        jobs = call_all(engine.tier, request)
        engine.tier.drain_jobs()
        reports(engine.tier, jobs)
        engine.tier.on_request_finished(request)


def test_clients_of_a_served_store_need_no_key_and_lose_an_erased_salt(tmp_path, place, key):
    with steps(tier(place, key_file=key)):
        pass
    with served(place, "--key-file", key):
        with steps(salted(place)) as engine:
            assert engine.tier._keeper.link.store.part == "client"
            assert stores(engine, "one", "two", None) == [8] * 3
            assert loads(engine, "one", "two", None) == [8] * 3
            assert erase(place, "one") == 8
            assert loads(engine, "one", "two", None) == [0, 8, 8]
            assert stores(engine, "one") == [8]
            assert loads(engine, "one") == [8]
            assert engine.tier._meters.totals["errors"] == 0


def test_a_wrong_or_missing_key_stops_the_start_or_is_a_miss(tmp_path, place, key):
    with steps(tier(place, key_file=key)) as engine:
        assert stores(engine, None) == [8]
    another = key_file(tmp_path, "5b", "another")
    for more, why in (
        ({}, "encrypted"),
        ({"key_file": another}, "not a key of this store"),
        ({"key_file": str(tmp_path / "none")}, "none"),
    ):
        with pytest.raises(RuntimeError, match=why), steps(tier(place, **more)):
            pass
        with steps(tier(place, on_error="miss", **more)) as engine:
            assert engine.load(CHAIN) == (0, 0) and engine.store(CHAIN) == 0
    with steps(tier(place, key_file=key)) as engine:
        assert loads(engine, None) == [8]


@pytest.mark.parametrize(
    "wrong, named",
    [
        ({"salt_is_tenant": "yes"}, "`salt_is_tenant` must be true or false"),
        ({"larder_server": None}, "LarderOffloadingConnector"),
        ({"tenant": ""}, "`tenant`"),
        ({"tenant": "a" * 2000}, "`tenant`"),
    ],
    ids=str,
)
def test_a_wrong_configuration_is_refused_by_its_key(place, wrong, named):
    with pytest.raises(ValueError, match=named), steps(salted(place) | wrong):
        pass
    assert not place.exists()

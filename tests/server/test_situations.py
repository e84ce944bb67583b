"""One model after another goes through the situations of a server's life, in this order.

Right is an answer with the tokens and the log-probabilities of an answer from L1, bit by bit, over
the same bytes of KV. The controls show that this comparison can fail.
"""

from __future__ import annotations

import signal
import threading

import pytest
from known import (
    PROMPT_TOKENS,
    attach,
    check,
    check_either,
    is_right,
    learn,
    learn_new,
    send_until_the_end,
)
from serving import PAGE_TOKENS, THREADS, Site, prompt, wait_for, whole_pages

#: By name: the kind of model (`engines/models.py`) and its tensor-parallel size.
CELLS = {"gqa": ("full", 1), "gqa-tp2": ("full", 2), "window": ("hybrid", 1)}

#: Bytes per second of its writes: a prompt is written within the backend's time limit, and many of
#: them take longer than a look at the store.
SLOW = 1 << 18


class Scene:
    """The servers of one model, and what is known of its prompts."""

    def __init__(self, site):
        self.site = site
        self.server = None
        self.first = None
        self.client = None


@pytest.fixture(scope="module", params=CELLS)
def scene(request, model, library, tmp_path_factory):
    place = tmp_path_factory.mktemp(request.param)
    kind, tp = CELLS[request.param]
    # An attach needs a tag.
    site = Site(place, model(kind), library, tp=tp, weights_tag="own")
    yield Scene(site)
    site.close()


def test_cold_and_from_l1(scene):
    scene.server = scene.site.start()
    scene.first = learn_new(scene.server, prompt(1, PROMPT_TOKENS))


def test_from_l3_after_a_flush(scene):
    scene.server.flush()
    check(scene.server, scene.first)


def test_the_comparison_notices_spoilt_kv(scene):
    """The negative control: KV is changed in the pool after it has been loaded from L3."""
    server, known = scene.server, scene.first
    server.ask("spoil", tokens=known.tokens[: known.whole])
    answer = server.generate(known.tokens)
    assert (answer.cached, answer.storage) == (known.whole, 0)
    assert not answer.same(known.from_l1)
    kv = server.kv(known.tokens[: known.whole])
    for rank, pages in zip(known.kv, kv):
        assert len(rank) == len(pages) and not set(rank) & set(pages)
    assert not is_right(server, answer, known)
    server.flush()
    check(server, known)


def test_the_next_turn_reads_what_was_decoded(scene):
    server, before = scene.server, scene.site.pages()
    first = server.generate(prompt(5, PROMPT_TOKENS), new=130)
    tokens = prompt(5, PROMPT_TOKENS) + first.tokens + prompt(6, 40)
    whole = whole_pages(PROMPT_TOKENS + len(first.tokens))
    assert whole > whole_pages(PROMPT_TOKENS)
    known = learn(server, tokens, is_cold=False)
    assert known.computed.cached == known.whole == whole
    server.settle(before + whole // PAGE_TOKENS * scene.site.tp)
    server.flush()
    check(server, known)


def test_pages_of_an_adapter_are_its_own(scene):
    """SGLang marks the requests of a LoRA adapter by an `extra_key`, as any request may be."""
    server, site, known = scene.server, scene.site, scene.first
    server.flush()
    before = site.pages()
    marked = server.generate(known.tokens, extra_key="adapter")
    assert marked.cached == 0 and marked.same(known.computed)
    server.settle(before + len(known.kv[0]) * site.tp)
    server.flush()
    again = server.generate(known.tokens, extra_key="adapter")
    assert (again.storage, again.cached) == (known.whole, known.whole)
    assert again.same(known.from_l1)
    check(server, known)


def test_bytes_spoilt_in_the_store(scene):
    server, site = scene.server, scene.site
    head = 8 * PAGE_TOKENS
    tokens = scene.first.tokens[:head] + prompt(2, PROMPT_TOKENS - head)
    server.flush()
    # The head comes from L3, the rest is computed: what is expected of a page spoilt behind it.
    whole = site.pages()
    check(server, scene.first)
    expected = server.generate(tokens)
    assert (expected.cached, expected.storage) == (head, 0)
    known = learn(server, tokens, is_cold=False)
    behind = (known.whole - head) // PAGE_TOKENS * site.tp
    server.settle(whole + behind)
    bytes_of_page = server.page_bytes(tokens[: known.whole], head // PAGE_TOKENS)[0]
    server.flush()
    assert site.spoil(bytes_of_page) >= 1
    answer = server.generate(tokens)
    assert (answer.cached, answer.storage) == (head, head)
    assert answer.same(expected)
    assert server.counters()[0]["rank_damaged_pages"] == 1
    # The page is stored again.
    server.settle(whole + behind)
    again = learn(server, tokens, is_cold=False)
    assert [rank[: head // PAGE_TOKENS] for rank in again.kv] == [
        rank[: head // PAGE_TOKENS] for rank in known.kv
    ]
    server.flush()
    check(server, again)


def test_detach_and_attach_with_another_weights_tag(scene):
    server, known = scene.server, scene.first
    attach(server, weights_tag="other")
    server.flush()
    answer = server.generate(known.tokens)
    assert answer.cached == 0 and answer.same(known.computed)
    attach(server)
    server.flush()
    check(server, known)


def test_from_l3_after_sigterm(scene):
    scene.server.stop()
    scene.server = scene.site.start(**THREADS)
    check(scene.server, scene.first)


def test_from_l3_after_sigkill_while_pages_are_written(scene):
    site, server = scene.site, scene.server
    prompts = [prompt(seed, PROMPT_TOKENS) for seed in range(10, 22)]
    # What is right is learnt under another tag, so that these pages are not in the store.
    attach(server, weights_tag="reference", **THREADS)
    knowns = [learn_new(server, tokens) for tokens in prompts]
    attach(server, **THREADS)
    server.flush()
    before = site.pages()
    site.flags["SLOW_WRITES"].write_text(str(SLOW))
    sender = threading.Thread(target=send_until_the_end, args=(server, prompts))
    sender.start()
    wait_for("pages of them in the store", lambda: site.pages() > before, pause=0)
    server.kill()
    sender.join()
    site.flags["SLOW_WRITES"].unlink()
    scene.server = server = site.start()
    stored = site.pages() - before
    assert 0 < stored < sum(len(rank) for known in knowns for rank in known.kv), stored
    check(server, scene.first)
    found = 0
    for known in knowns:
        answer = server.generate(known.tokens)
        assert answer.cached == answer.storage
        head = answer.cached // PAGE_TOKENS
        found += head
        kv = server.kv(known.tokens[: answer.cached]) if head else [[]] * site.tp
        assert kv == [rank[:head] for rank in known.kv]
        if answer.cached == known.whole:
            assert answer.same(known.from_l1)
        if answer.cached == 0:
            assert answer.same(known.computed)
    assert found > 0


def test_an_owner_that_is_stopped(scene):
    """A second server is a client of the first one, which is stopped for a while."""
    site, owner, known = scene.site, scene.server, scene.first
    scene.client = client = site.start(**THREADS)
    assert {rank["part"] for rank in client.counters()} == {"client"}
    check(client, known)
    owner.send(signal.SIGSTOP)
    check_either(client, known)
    owner.send(signal.SIGCONT)
    wait_for("a hit after the owner went on", lambda: check_either(client, known))


def test_an_owner_that_is_killed(scene):
    client, known = scene.client, scene.first
    scene.server.kill()
    wait_for("a hit after the owner's end", lambda: check_either(client, known))
    assert "owner" in {rank["part"] for rank in client.counters()}
    client.flush()
    later = learn_new(client, prompt(3, PROMPT_TOKENS))
    client.flush()
    check(client, later)


def test_a_disk_that_refuses_writes(scene):
    site, server = scene.site, scene.client
    site.flags["FAIL_WRITES"].touch()
    known = learn(server, prompt(4, PROMPT_TOKENS))

    def are_refused():
        counts = server.counters()
        return all(rank["failed"] + rank["dropped"] > 0 for rank in counts)

    wait_for("pages that were not stored", are_refused)
    server.flush()
    answer = server.generate(known.tokens)
    assert answer.cached == 0 and answer.same(known.computed)
    check(server, scene.first)

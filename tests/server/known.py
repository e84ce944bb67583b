"""Prompts whose right answers are known, and the comparison with them."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from http.client import HTTPException

from serving import PAGE_TOKENS, Answer, wait_for, whole_pages

#: Sixteen pages and a part of one.
PROMPT_TOKENS = 16 * PAGE_TOKENS + 6


@dataclass
class Known:
    """A prompt, its answers when it was computed and when it was read from L1, and its KV."""

    tokens: list[int]
    computed: Answer
    from_l1: Answer
    kv: list[list[str]]
    #: Fields of the request besides the prompt.
    more: dict = field(default_factory=dict)

    def ask(self, server):
        return server.generate(self.tokens, **self.more)

    @property
    def whole(self):
        return whole_pages(len(self.tokens))


def learn(server, tokens, is_cold=True, **more):
    """Computes a prompt, and reads it from L1."""
    whole = whole_pages(len(tokens))
    computed = server.generate(tokens, **more)
    assert not is_cold or computed.cached == 0, computed.cached
    from_l1 = server.generate(tokens, **more)
    assert (from_l1.cached, from_l1.storage) == (whole, 0)
    kv = server.kv(tokens[:whole])
    assert {len(pages) for pages in kv} == {whole // PAGE_TOKENS}
    return Known(tokens, computed, from_l1, kv, more)


def learn_new(server, tokens):
    """The same for a new prompt, which lies in the store at the end."""
    before = server.site.pages()
    known = learn(server, tokens)
    server.settle(before + len(known.kv[0]) * server.site.tp)
    return known


def is_right(server, answer, known):
    """Whether an answer from L3 has every bit of the answer from L1, and the same KV below it."""
    return answer.same(known.from_l1) and server.kv(known.tokens[: known.whole]) == known.kv


def check(server, known):
    """The prompt comes from L3, whole and right."""
    answer = known.ask(server)
    assert (answer.cached, answer.storage) == (known.whole, known.whole)
    assert is_right(server, answer, known)
    return answer


def check_either(server, known):
    """The prompt comes from L3 or is computed, and is right. Returns whether it came from L3."""
    server.flush()
    answer = server.generate(known.tokens)
    if answer.cached == known.whole:
        assert answer.storage == known.whole
        assert is_right(server, answer, known)
        return True
    assert answer.cached == 0, answer.cached
    assert answer.same(known.computed)
    return False


def send_until_the_end(server, prompts):
    """One prompt after another, as they were learnt, until the server is killed."""
    with contextlib.suppress(OSError, HTTPException, AssertionError):
        for tokens in prompts:
            server.generate(tokens, new=1)


def attach(server, **more):
    """Detaches the backend, and attaches it with another configuration."""
    path = "/hicache/storage-backend"
    body = {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config_json": json.dumps(server.site.extra(**more)),
        "hicache_storage_prefetch_policy": "wait_complete",
    }
    # SGLang refuses both while it still works.
    wait_for("a detach", lambda: server.http("DELETE", path)[0] == 200)
    wait_for("an attach", lambda: server.http("PUT", path, body)[0] == 200)

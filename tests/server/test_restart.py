"""The shortest proof: one model, one restart. `tests/run` has it where a server is installed."""

from __future__ import annotations

import pytest
from known import PROMPT_TOKENS, check, is_right, learn_new
from serving import Site, prompt

pytestmark = pytest.mark.short


def test_a_restarted_server_answers_from_l3_bit_by_bit(model, library, tmp_path):
    site = Site(tmp_path, model("full"), library)
    try:
        server = site.start()
        known = learn_new(server, prompt(1, PROMPT_TOKENS))
        server.flush()
        check(server, known)
        server.stop()
        server = site.start()
        check(server, known)
        server.ask("spoil", tokens=known.tokens[: known.whole])
        assert not is_right(server, server.generate(known.tokens), known)
        shared = server.shared()
        assert any(path.name.startswith("sem.") for path in shared)
        server.kill()
        assert not any(path.exists() for path in shared)
    finally:
        site.close()

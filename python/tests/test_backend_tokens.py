"""Tokens of requests, counted by the backend under the query of SGLang's own controller."""

from __future__ import annotations

from unittest import mock

from sglang.srt.managers.cache_controller import (
    HiCacheController,
    PrefetchOperation,
    get_storage_hash_str,
)
from support import pools
from support.tokens import tokens


def test_tokens_are_counted_once_a_request(opened, tmp_path):
    # The query asks for 128 pages at once.
    pool = pools.mha(pages=160)
    backend = opened(pool)
    page = pool.page_size
    prompt = list(range(300 * page))
    chain = get_storage_hash_str(prompt, None, page_size=page)
    assert all(backend.batch_set_v1(chain[:130], pools.indices(pool, range(130))))
    controller = mock.Mock(page_size=page, storage_backend=backend)

    def ask(request, pages):
        return HiCacheController._storage_hit_query(controller, PrefetchOperation(request, prompt[: pages * page]))

    assert all(backend.batch_get_v1(chain[:4], pools.indices(pool, range(4))))
    assert tokens(tmp_path) == (0, 0, 0, 4 * page, 0)
    assert ask("a", 300)[1] == 130 * page
    assert tokens(tmp_path)[:3] == (1, 130 * page, 170 * page)
    ask("a", 300)
    assert tokens(tmp_path)[:3] == (1, 130 * page, 170 * page)
    ask("b", 100)
    assert tokens(tmp_path)[:3] == (2, 230 * page, 170 * page)
    # Another rank asks for the same requests.
    backend.close()
    other = opened(pool, tp=(1, 2))
    controller.storage_backend = other
    ask("c", 100)
    assert tokens(tmp_path) == (0, 0, 0, 0, 0)

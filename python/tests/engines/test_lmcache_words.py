"""LMCache's server with a real model in vLLM's engine: its answers are words, and come from the
store.
"""

from __future__ import annotations

import pytest

pytest.importorskip("lmcache")
pytest.importorskip("vllm")
pytest.register_assert_rewrite("situations")

from lmcache_site import Site  # noqa: E402
from situations import *  # noqa: E402, F403
from support import real  # noqa: E402


@pytest.fixture(scope="module")
def site(tmp_path_factory, words):
    return Site(tmp_path_factory.mktemp("words"), real.model_folder())

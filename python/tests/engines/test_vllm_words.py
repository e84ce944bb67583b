"""vLLM with a real model: its answers are words, and come from the store."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not in this environment")
pytest.register_assert_rewrite("situations")

from situations import *  # noqa: E402, F403
from support import real  # noqa: E402
from vllm_site import Site  # noqa: E402


@pytest.fixture(scope="module")
def site(tmp_path_factory, words):
    return Site(tmp_path_factory.mktemp("words"), real.model_folder())

"""LMCache's server below vLLM's engine for the CPU, with Larder below the server."""

from __future__ import annotations

# Finds what lies beside the tests.
from words import vllm  # isort: skip

import lmcache_site


class Engine(vllm.Engine):
    NAME = "LMCache with vLLM"
    SITE = lmcache_site.Site
    UNIT = SITE.UNIT
    COPIES = ""

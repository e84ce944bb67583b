"""Larder: a local L3 for LLM serving.

:class:`Store` keeps pages on NVMe, for any engine (docs/python.md). SGLang loads
``larder_kv.sglang.LarderHiCache``. ``python -m larder_kv`` is the command line.
``larder_kv.device`` copies between an engine's tensors and host memory.
"""

from larder_kv._larder import __version__
from larder_kv import store as _store
from larder_kv.store import *

__all__ = ["__version__", *_store.__all__]

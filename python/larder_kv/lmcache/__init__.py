"""LMCache's L2: chunks of its L1 arena kept in a Larder store.

LMCache loads :class:`LarderL2Adapter` and :class:`LarderL2AdapterConfig` as an adapter of type
``plugin``.

============  ==========================================================================
module        contents
============  ==========================================================================
``adapter``   ``LarderL2Adapter``: LMCache's calls, none of which waits or raises
``settings``  ``LarderL2AdapterConfig``: the keys of ``adapter_params``, weights tags
``spaces``    the namespace of a key: everything that decides the bytes of a chunk
``lanes``     LMCache's tasks and the store's jobs that each consists of
``locks``     chunks that LMCache is about to read, which the store must keep
``ledger``    the whole keys of the stored chunks, for lists, usage and evictions
``doctor``    checks before a start
============  ==========================================================================

Importing this package imports nothing of LMCache's and opens nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_CLASSES = {
    "LarderL2Adapter": "larder_kv.lmcache.adapter",
    "LarderL2AdapterConfig": "larder_kv.lmcache.settings",
}


def __getattr__(name: str) -> Any:
    module = _CLASSES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)

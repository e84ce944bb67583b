"""vLLM's secondary tier: chunks of its CPU tier kept in a Larder store.

vLLM loads :class:`LarderTier` below its own ``TieringOffloadingSpec``, by ``module_path`` or by the
short name ``larder``. :class:`LarderOffloadingConnector` is vLLM's ``OffloadingConnector``; besides
it derives the weights tag and the packing of pages, facts that vLLM does not pass to a tier.

==============  ==========================================================================
module          contents
==============  ==========================================================================
``tier``        ``LarderTier``: vLLM's calls, each answered without waiting and without raising
``link``        an attached store: queue, registered rows, a namespace for each cache group
``jobs``        vLLM's jobs and the store's jobs that each consists of
``outcomes``    statuses of chunks: how a load or a store ended
``lookups``     answers of the store that come with a message
``chains``      the chunk before a chunk in its prefix
``keeper``      the thread that may wait: attaching, statistics, evictions
``packing``     the order of elements in a page, from vLLM's workers
``spaces``      the namespaces: everything that decides the bytes of a chunk
``salts``       the salts of requests, where each is a tenant
``settings``    the keys of a tier's configuration
``metrics``     counters and gauges in vLLM's form
``connector``   ``LarderOffloadingConnector``
``weights``     the weights tag, from vLLM's configuration
``doctor``      checks before a start
==============  ==========================================================================

Importing this package imports nothing of vLLM's and opens nothing: vLLM does so in processes that
serve no requests.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

#: The class names that vLLM loads, and their modules.
_CLASSES = {"LarderTier": "larder_kv.vllm.tier", "LarderOffloadingConnector": "larder_kv.vllm.connector"}

#: vLLM's short name for the tier.
SHORT_NAME = "larder"


def __getattr__(name: str) -> Any:
    module = _CLASSES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(module), name)


def register() -> None:
    """Registers the short name: the plug-in that vLLM runs in each of its processes, perhaps more
    than once.
    """
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    if SHORT_NAME not in SecondaryTierFactory._registry:
        SecondaryTierFactory.register_tier(SHORT_NAME, "larder_kv.vllm", "LarderTier")

"""Backends made the way SGLang makes them: by its factory, from an extra config."""

from __future__ import annotations

import hashlib

from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

#: The smallest store that there can be is a few segments.
SIZE = "144MiB"


def extra(path, **more):
    return {
        "backend_name": "larder",
        "module_path": "larder_kv.sglang",
        "class_name": "LarderHiCache",
        "interface_v1": 1,
        "path": str(path),
        "size": SIZE,
        "prewrite": False,
        "weights_tag": "test",
    } | more


def config(path, *, tp=(0, 1), pp=(0, 1), is_mla=False, model="test/model", metrics=False, extra_config=None, **more):
    return HiCacheStorageConfig(
        tp_rank=tp[0],
        tp_size=tp[1],
        pp_rank=pp[0],
        pp_size=pp[1],
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=is_mla,
        enable_storage_metrics=metrics,
        is_page_first_layout=True,
        model_name=model,
        extra_config=extra(path, **more) if extra_config is None else extra_config,
    )


def make(path, pool=None, **more):
    """A backend over the store below `path`, with a pool registered as the KV's."""
    backend = StorageBackendFactory.create_backend("dynamic", config(path, **more), None)
    if pool is not None:
        backend.register_mem_pool_host(pool)
        backend.register_mem_host_pool_v2(pool, "kv")
        backend.on_host_pools_registered()
    return backend


def keys(count, seed="chain"):
    """A chain's keys, in SGLang's form."""
    digest = seed.encode()
    made = []
    for _ in range(count):
        digest = hashlib.sha256(digest).digest()
        made.append(digest.hex())
    return made

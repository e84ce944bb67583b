"""SGLang's own HiCacheFile where no memory can be pinned, for scripts/bench-server on a CPU.

HiCacheFile reads into a temporary page of pinned memory. Here this page is not pinned. The rest is
SGLang's.
"""

from __future__ import annotations

from sglang.srt.mem_cache.hicache_storage import HiCacheFile


class UnpinnedFile(HiCacheFile):
    def __init__(self, storage_config, kwargs=None):
        super().__init__(storage_config)

    def register_mem_pool_host(self, mem_pool_host):
        mem_pool_host.pin_memory = False
        super().register_mem_pool_host(mem_pool_host)

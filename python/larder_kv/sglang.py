"""SGLang's HiCache storage backend: reads SGLang's objects and makes one call into Rust a batch.

SGLang loads it with ``--hicache-storage-backend dynamic`` and an extra config that names this
module and :class:`LarderHiCache`. No decision is made here: layouts and addresses are read from the
pools once, at registration.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
from collections import OrderedDict
from types import FrameType
from typing import Any, Callable, Optional, Sequence

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from larder_kv import _larder, sglang_layout, sglang_weights, weights

logger = logging.getLogger(__name__)

#: Forks between the first process that imported this module and this one.
_forks = 0


def _note_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_note_fork)

#: Most buffers of a page that are stored as parts of their own; more are joined into one.
_PARTS_MAX = 8

#: Attributes of a pool that decide the bytes of a page.
_SHAPES = (
    "layer_num",
    "target_layer_num",
    "start_layer",
    "end_layer",
    "head_num",
    "head_dim",
    "v_head_dim",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "kv_cache_dim",
    "storage_format_tag",
    "indexer_page_stride_size",
    "indexer_dtype",
    "item_bytes",
    "num_mamba_layers",
    "temporal_dtype",
    "temporal_state_elem_size",
    "conv_dtype",
    "conv_state_elem_sizes",
)


#: Pools of which rank 0 alone writes the pages if the model's own KV is replicated
#: (`should_backup` of SGLang's hybrid cache controller), for any content of these pools.
_NEVER_WRITTEN_BY_OTHERS = (PoolName.DRAFT.value, PoolName.DRAFT_SWA.value)


#: Pools of windows and of states: a prefix needs their last pages alone. A draft model's windows are
#: left out: beside full attention they have all pages, and beside windows there is such a pool anyway.
_WINDOWS_AND_STATES = (
    PoolName.SWA.value,
    PoolName.AUXILIARY_SWA.value,
    PoolName.MAMBA.value,
    PoolName.DEEPSEEK_V4_C4_STATE.value,
    PoolName.DEEPSEEK_V4_C4_INDEXER_STATE.value,
    PoolName.DEEPSEEK_V4_C128_STATE.value,
)


def _answers(fallback: Callable[..., Any]) -> Callable:
    """A call that never raises into SGLang's threads: errors are logged and answered by
    ``fallback``.
    """

    def decorate(call: Callable) -> Callable:
        @functools.wraps(call)
        def safe(self, *args, **kwargs):
            if self._is_inherited():
                return fallback(*args, **kwargs)
            try:
                return call(self, *args, **kwargs)
            except Exception:
                logger.exception("larder: %s failed; it counts as a miss", call.__name__)
                return fallback(*args, **kwargs)

        return safe

    return decorate


def _closes_if_it_fails(call: Callable) -> Callable:
    """A part of an attach. After a failed attach SGLang may keep the backend, which would still
    hold the store.
    """

    @functools.wraps(call)
    def closing(self, *args, **kwargs):
        try:
            return call(self, *args, **kwargs)
        except Exception:
            self.close()
            raise

    return closing


def _prefetch_limit() -> Optional[tuple[float, float]]:
    """The longest wait of this server for a read: seconds, and seconds for each requested token.
    None if it waits for its end.

    From the server's arguments: it does not pass these keys on. A backend that is attached later
    may have others.
    """
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
    from sglang.srt.runtime_context import get_server_args

    args = get_server_args()
    if args.hicache_storage_prefetch_policy != "timeout":
        return None
    parse = HybridCacheController.parse_storage_backend_extra_config
    _, _, base, per_ki_token, _ = parse(args.hicache_storage_backend_extra_config)
    return base, per_ki_token / 1024


def _all_false(keys: Sequence[str], *_: Any, **__: Any) -> list[bool]:
    return [False] * len(keys)


def _by_pool(transfers: Sequence[PoolTransfer], move: Callable[..., list[bool]]) -> dict:
    """The answers of a call for each transfer, by pool."""
    answers: dict = {}
    for transfer in transfers:
        answer = move(transfer, str(transfer.name), transfer.keys or [], transfer.host_indices)
        answers.setdefault(transfer.name, []).extend(answer)
    return answers


def _chain(extra_info: Optional[HiCacheStorageExtraInfo]) -> tuple[Optional[str], int]:
    """The key before a batch, and the number of keys before it."""
    before = extra_info.prefix_keys if extra_info is not None else None
    return (before[-1], len(before)) if before else (None, 0)


class _Requests:
    """The requests behind lookups, for the counters of tokens.

    SGLang asks in batches and stops at the first missing page, and does not say how long the request
    is. The query that asks knows it: it is read from its frame. Where SGLang has no such query, a
    batch counts as a request.
    """

    _QUERY = "_storage_hit_query"
    #: Frames between a lookup and the query.
    _DEPTH = 6
    #: Requests that are remembered: a request may be asked for again after it was put back.
    _KEPT = 4096

    def __init__(self) -> None:
        self._counted: OrderedDict[str, None] = OrderedDict()
        #: The request of the last lookup, if it was counted before.
        self._repeated: Optional[str] = None

    def of(self, keys: Sequence[str]) -> Optional[tuple[bool, int]]:
        """Whether a lookup is the first one of its request, and the request's pages from the first
        key on. None for a request that was counted before.
        """
        frame: Optional[FrameType] = sys._getframe(1)
        for _ in range(self._DEPTH):
            if frame is None or frame.f_code.co_name == self._QUERY:
                break
            frame = frame.f_back
        else:
            frame = None
        operation = frame.f_locals.get("operation") if frame is not None else None
        request, pages = getattr(operation, "request_id", None), getattr(operation, "all_hash_values", None)
        if not keys or request is None or not pages or keys[0] not in pages:
            return True, len(keys)
        first = pages.index(keys[0])
        if first == 0:
            self._repeated = request if request in self._counted else None
            self._counted[request] = None
            if len(self._counted) > self._KEPT:
                self._counted.popitem(last=False)
        return None if request == self._repeated else (first == 0, len(pages) - first)


def _place(
    transfer: PoolTransfer, extra_info: Optional[HiCacheStorageExtraInfo]
) -> tuple[Optional[str], int, bool]:
    """Where pages to store stand in their chain, and whether they are a chain.

    Pages of sliding windows and of states (`swa`, `mamba`, DeepSeek-V4's states) are no chain, by
    SGLang's own policy: a prefix needs its last pages alone, and of a long prompt SGLang has no
    others. A full store refuses a page of a chain that does not fit together with all pages before
    it, stored or not, and keeps each page of a chain as long as a page behind it.
    """
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        return None, 0, False
    return *_chain(extra_info), True


def _indices(host_indices: torch.Tensor) -> torch.Tensor:
    return host_indices.to(device="cpu", dtype=torch.int64).contiguous()


def _starts(pool: Any, keys: Sequence[str], indices: torch.Tensor) -> list[int]:
    """The first slot of each key's page."""
    if indices.numel() != len(keys) * pool.page_size:
        raise ValueError(f"{indices.numel()} host indices for {len(keys)} pages of {pool.page_size} tokens")
    return indices[:: pool.page_size].tolist()


def _is_sharded(pool: Any, name: str) -> bool:
    """Whether tensor-parallel ranks hold different bytes in this pool even if the model's KV is
    replicated.
    """
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    return name == PoolName.MAMBA.value or isinstance(pool, MHATokenToKVPoolHost)


def _page_pieces(pool: Any, page: int) -> list[tuple[int, int]]:
    """(address, bytes) of each buffer of a page."""
    start = page * pool.page_size
    indices = torch.arange(start, start + pool.page_size, dtype=torch.int64)
    addresses, sizes = pool.get_page_buffer_meta(indices)
    return list(zip(addresses, sizes, strict=True))


def _buffers(pool: Any, pages: int) -> list[tuple[int, int, int]]:
    """(base, stride, bytes) of each buffer of a pool, from where its first and last pages lie."""
    first = _page_pieces(pool, 0)
    second = _page_pieces(pool, 1) if pages > 1 else first
    last = _page_pieces(pool, pages - 1)
    buffers = []
    for (base, size), (next_base, next_size), (end, end_size) in zip(first, second, last, strict=True):
        stride = next_base - base if pages > 1 else size
        if end != base + stride * (pages - 1) or not size == next_size == end_size:
            raise ValueError("its pages do not lie at equal distances")
        buffers.append((base, stride, size))
    return buffers


def _parts(pool: Any, buffers: int) -> tuple[list[list[int]], str]:
    """The buffers of each part of a page, and the resulting order of its bytes."""
    layers = getattr(pool, "layer_num", 0)
    if pool.layout == "layer_first":
        # Layer by layer in the pool, but one piece a part in the store: the order of
        # page_first_direct.
        if buffers == 2 * layers:
            return [list(range(0, buffers, 2)), list(range(1, buffers, 2))], "page_first_direct"
        if buffers == layers:
            return [list(range(buffers))], "page_first_direct"
    if buffers <= _PARTS_MAX:
        return [[at] for at in range(buffers)], pool.layout
    return [list(range(buffers))], f"{pool.layout}_joined"


class LarderHiCache(HiCacheStorage):
    """Keeps HiCache's pages in a Larder store.

    A child process that was forked after this was made has no use of it: there every call misses.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Optional[dict] = None):
        self._forks = _forks
        extra = dict(storage_config.extra_config or {})
        if storage_config.dcp_size > 1:
            raise ValueError("larder: decode context parallelism (dcp_size) is not supported")
        if storage_config.should_split_heads:
            raise ValueError("larder: `tp_lcm_size` above the tensor-parallel size is not supported: leave it out")
        config = json.dumps(extra, default=str)
        own = extra.get("weights_tag")
        # A tag of the wrong type is refused, by its key, with the rest of the configuration.
        told = sglang_weights.derived() if own is None else sglang_weights.of_own(str(own))
        weights.warn_of_untold(told.fields)
        server = {
            "model": storage_config.model_name or "unnamed",
            "weights": told.tag,
            "tp": (storage_config.tp_rank, storage_config.tp_size),
            "pp": (storage_config.pp_rank, storage_config.pp_size),
            "cp": (storage_config.attn_cp_rank, storage_config.attn_cp_size),
            "replicated": storage_config.is_mla_model,
            "prefetch_limit": _prefetch_limit() if "prefill_rate" in extra else None,
        }
        self._stages = sglang_layout.layers_of_stages(storage_config.pp_size)
        self._metrics = storage_config.enable_storage_metrics
        #: Rank 0 writes for all.
        self._one_writes = storage_config.is_mla_model and storage_config.tp_size > 1
        self._backend = _larder.Backend(config, json.dumps(server))
        #: By name: pools, kept so that their memory outlives the addresses.
        self._pools: dict[str, Any] = {}
        self._requests = _Requests()
        #: Names of pools with pages that are handed over one by one.
        self._flat: set[str] = set()
        for remark in self._backend.remarks:
            logger.warning("larder: %s", remark)
        if self._one_writes and storage_config.attn_cp_size > 1:
            logger.warning(
                "larder: SGLang stores pages on rank 0 only, but with context parallelism (attn_cp_size %s) each rank needs its own: "
                "no prefix is restored",
                storage_config.attn_cp_size,
            )
        self._weights = server["weights"]
        #: The fields of the weights tag, until the tag is compared with that of the last start.
        self._told = {}
        if storage_config.tp_rank == storage_config.pp_rank == storage_config.attn_cp_rank == 0:
            self._told = told.fields
        self._model = server["model"]
        if self._backend.is_made():
            self._say_attached()
        else:
            logger.info(
                "larder: no store at %s yet; it is created when the pools are registered",
                self._backend.volume,
            )

    def _say_attached(self) -> None:
        counters = self._backend.counters()
        logger.info(
            "larder: attached to %s as %s, %s pages found, weights %s, disk %s: %s, "
            "%.1f MiB of RAM for the index, %s",
            self._backend.volume,
            counters.get("part", "nobody"),
            counters.get("pages", 0),
            self._weights,
            counters.get("disk", "none"),
            counters.get("disk_reason", "no store yet"),
            int(counters.get("index_bytes", 0)) / 2**20,
            self._backend.settings() or "no owner",
        )
        if self._told:
            name = f"SGLang, model {self._model}"
            is_encrypted = self._backend.is_encrypted()
            weights.compare(self._backend.volume, name, self._weights, self._told, is_encrypted)
            self._told = {}

    def _is_inherited(self) -> bool:
        """Whether this is a forked child of the process that made this; logs it once."""
        if self._forks == _forks:
            return False
        if self._forks >= 0:
            self._forks = -1
            logger.warning(
                "larder: the store was opened before a fork: all lookups miss in process %s; create the backend after the fork",
                os.getpid(),
            )
        return True

    # --- pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(mem_pool_host, PoolName.KV)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool, host_pool_name)

    @_closes_if_it_fails
    def on_host_pools_registered(self) -> None:
        """Creates the store where there is none: its segments depend on the pools' pages.

        Raises where that fails.
        """
        super().on_host_pools_registered()
        if self._backend.is_made():
            return
        remark = self._backend.make()
        if remark is not None:
            logger.warning("larder: %s", remark)
        self._say_attached()
        for name in self._pools:
            self._refuse_remote_beneath(name)

    def _refuse_remote_beneath(self, name: str) -> None:
        """Refuses a pool whose pages a remote never gets, so that each of its reads from there would
        be of no use: no prefix can be restored without them.
        """
        if name in _WINDOWS_AND_STATES and self._backend.has_remote():
            raise ValueError(
                f"larder: pool {name} of this model holds windows or states, and a remote (`l4`) gets whole runs of pages alone, so no "
                "prefix could be restored from it: leave out `l4`, or if the owner of the store has it, use another store (`path`)"
            )

    @_closes_if_it_fails
    def _register(self, pool: Any, name: Any) -> None:
        name = str(name)
        if self._is_inherited():
            raise RuntimeError("larder: the store was opened before a fork: make the backend after the fork")
        if self._pools.get(name) is pool:
            return
        self._refuse_remote_beneath(name)
        shapes = {key: getattr(pool, key, None) for key in _SHAPES}
        facts = {
            "name": name,
            "dtype": str(pool.dtype),
            "layout": pool.layout,
            "page_tokens": pool.page_size,
            "sharded": _is_sharded(pool, name),
            "extra": {key: str(value) for key, value in shapes.items() if value is not None}
            | {"class": type(pool).__name__}
            | sglang_layout.facts_of(pool)
            | self._stages,
        }
        self._flat.discard(name)
        if pool.size_per_token == 0:
            # An anchor of slots alone: DeepSeek-V4.
            line = self._backend.register_flat(json.dumps(facts), 0)
        else:
            line = self._register_pages(pool, name, facts)
        self._pools[name] = pool
        logger.info("larder: %s", line)
        if facts["sharded"] and self._one_writes and name in _NEVER_WRITTEN_BY_OTHERS:
            logger.warning(
                "larder: SGLang stores pool %s on rank 0 only, but each rank needs its own pages: no prefix is restored. "
                "A draft model with MLA, or one rank (--tp-size 1), works",
                name,
            )

    def _register_pages(self, pool: Any, name: str, facts: dict) -> str:
        pages = pool.size // pool.page_size
        try:
            buffers = _buffers(pool, pages)
        except (ValueError, NotImplementedError, AttributeError) as reason:
            logger.info("larder: pool %s is copied page by page: %s", name, reason)
            page = pool.get_dummy_flat_data_page()
            self._flat.add(name)
            facts["layout"] = f"{pool.layout}_flat"
            return self._backend.register_flat(json.dumps(facts), page.numel() * page.element_size())
        parts, facts["layout"] = _parts(pool, len(buffers))
        return self._backend.register(json.dumps(facts), buffers, parts, pages)

    # --- lookups

    @_answers(lambda *_, **__: 0)
    def batch_exists(self, keys: list[str], extra_info: Optional[HiCacheStorageExtraInfo] = None) -> int:
        return self._backend.exists("kv", keys, *_chain(extra_info), self._requests.of(keys))

    @_answers(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        return self._backend.exists("kv", [key]) == 1

    @_answers(lambda *_, **__: PoolTransferResult(0, {}, []))
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: Optional[list[PoolTransfer]] = None,
        extra_info: Optional[HiCacheStorageExtraInfo] = None,
    ) -> PoolTransferResult:
        transfers = pool_transfers or []
        before, depth = _chain(extra_info)
        asked = [_policy(transfer) for transfer in transfers]
        request = self._requests.of(keys)
        pages, anchor, reaches, restorable = self._backend.exists_in("kv", keys, asked, before, depth, request)
        hits: dict = {PoolName.KV: anchor}
        hits.update({transfer.name: reach for transfer, reach in zip(transfers, reaches)})
        return PoolTransferResult(pages, {name: reach for name, reach in hits.items() if reach}, restorable)

    # --- reads

    @_answers(_all_false)
    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: Optional[HiCacheStorageExtraInfo] = None,
    ) -> list[bool]:
        return self._read("kv", keys, host_indices)

    @_answers(lambda transfers, *_, **__: {transfer.name: _all_false(transfer.keys or []) for transfer in transfers})
    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: Optional[HiCacheStorageExtraInfo] = None,
    ) -> dict[str, list[bool]]:
        return _by_pool(transfers, lambda _, *pages: self._read(*pages))

    def _read(self, name: str, keys: list[str], host_indices: Optional[torch.Tensor]) -> list[bool]:
        if not keys or host_indices is None:
            return [False] * len(keys)
        indices = _indices(host_indices)
        if name not in self._flat:
            return self._backend.get(name, keys, indices.data_ptr(), indices.numel())
        pool = self._pools[name]
        starts = _starts(pool, keys, indices)
        pages = [pool.get_dummy_flat_data_page().contiguous() for _ in keys]
        read = self._backend.get_flat(name, keys, [_memory(page) for page in pages])
        for start, page, is_read in zip(starts, pages, read):
            if is_read:
                pool.set_from_flat_data_page(start, page)
        return read

    # --- writes

    @_answers(_all_false)
    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: Optional[HiCacheStorageExtraInfo] = None,
    ) -> list[bool]:
        return self._write("kv", keys, host_indices, *_chain(extra_info))

    @_answers(lambda transfers, *_, **__: {transfer.name: _all_false(transfer.keys or []) for transfer in transfers})
    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: Optional[HiCacheStorageExtraInfo] = None,
    ) -> dict[str, list[bool]]:
        def write(transfer: PoolTransfer, *pages: Any) -> list[bool]:
            return self._write(*pages, *_place(transfer, extra_info))

        return _by_pool(transfers, write)

    def _write(
        self,
        name: str,
        keys: list[str],
        host_indices: Optional[torch.Tensor],
        before: Optional[str],
        depth: int,
        is_chain: bool = True,
    ) -> list[bool]:
        if not keys or host_indices is None:
            return [False] * len(keys)
        indices = _indices(host_indices)
        if name not in self._flat:
            place = (indices.data_ptr(), indices.numel(), before, depth, is_chain)
            return self._backend.set(name, keys, *place)
        pool = self._pools[name]
        starts = _starts(pool, keys, indices)
        pages = [pool.get_data_page(start, flat=True).contiguous() for start in starts]
        buffers = [_memory(page) for page in pages]
        return self._backend.set_flat(name, keys, buffers, before, depth, is_chain)

    # --- the generic interface, for configurations without interface_v1

    @_answers(lambda keys, *_, **__: [None] * len(keys))
    def batch_get(
        self,
        keys: list[str],
        target_locations: Optional[Any] = None,
        target_sizes: Optional[Any] = None,
    ) -> list[Optional[torch.Tensor]]:
        targets = list(target_locations or [])
        if len(targets) != len(keys) or not all(target.is_contiguous() for target in targets):
            return [None] * len(keys)
        read = self._backend.get_flat("kv", keys, [_memory(target) for target in targets])
        return [target if is_read else None for target, is_read in zip(targets, read)]

    @_answers(lambda *_, **__: None)
    def get(
        self,
        key: str,
        target_location: Optional[Any] = None,
        target_sizes: Optional[Any] = None,
    ) -> Optional[torch.Tensor]:
        return self.batch_get([key], [target_location])[0] if target_location is not None else None

    @_answers(lambda *_, **__: False)
    def batch_set(
        self,
        keys: list[str],
        values: Optional[Any] = None,
        target_locations: Optional[Any] = None,
        target_sizes: Optional[Any] = None,
    ) -> bool:
        pages = [value.contiguous() for value in values or []]
        return len(pages) == len(keys) and all(
            self._backend.set_flat("kv", keys, [_memory(page) for page in pages])
        )

    @_answers(lambda *_, **__: False)
    def set(
        self,
        key: str,
        value: Optional[Any] = None,
        target_location: Optional[Any] = None,
        target_sizes: Optional[Any] = None,
    ) -> bool:
        return value is not None and self.batch_set([key], [value])

    # --- the rest

    @_answers(lambda *_, **__: False)
    def clear(self) -> bool:
        """Deletes the pages of this server's pools; pages of other models stay. No page is served
        before the deletion is done.

        False while it is not done: this process alone tries it again. False also with a remote,
        which keeps the pages.
        """
        pages = self._backend.clear()
        if pages < 0:
            logger.error("larder: clear not finished: all lookups miss until then, in this process: if it ends first, clear again")
        if self._backend.has_remote():
            logger.error("larder: a clear does not reach the remote (`l4`), and its pages are fetched again: use another `weights_tag`")
            return False
        if pages >= 0:
            logger.info("larder: cleared %d pages", pages)
        return pages >= 0

    @_answers(lambda *_, **__: None)
    def get_stats(self):
        gets, sets = self._backend.drain()
        if not self._metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in gets],
            backup_pgs=[pages for pages, _ in sets],
            prefetch_bandwidth=[rate for _, rate in gets],
            backup_bandwidth=[rate for _, rate in sets],
        )

    @_answers(lambda *_, **__: {})
    def counters(self) -> dict:
        """Everything that is counted: this rank's pages, and the store as a whole."""
        return self._backend.counters()

    @_answers(lambda *_, **__: None)
    def close(self) -> None:
        """Leaves the store. A second call does nothing."""
        for line in self._backend.describe():
            logger.info("larder: %s", line)
        if not self._backend.close():
            logger.warning("larder: the store is still being closed; it recovers if this process ends first")
        self._pools.clear()


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def _policy(transfer: PoolTransfer) -> tuple[str, str, int, int]:
    """A pool and its needs of a prefix, as Rust takes them."""
    name = str(transfer.name)
    if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
        # During prefetch the keys are placeholders: their number is the window.
        return name, "trailing", max(1, len(transfer.keys or ())), 0
    if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
        return name, "groups", transfer.block_pages, transfer.group_pages
    return name, "all", 0, 0

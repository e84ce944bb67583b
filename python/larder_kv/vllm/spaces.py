"""The namespaces of a server's chunks, one for each cache group.

vLLM's keys name tokens only. Everything else that decides the bytes of a chunk is in its namespace.
In doubt two servers do not share: a miss is only slow.

After a reset of vLLM's caches a server has namespaces of its own. All its resets share them, since
a store has a limited number of namespaces: there the store's key is vLLM's key, xor a mask that
each reset chooses at random. Keys are hashes, so chunks from before a reset are not found.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

from larder_kv.vllm.packing import Packing

if TYPE_CHECKING:
    from larder_kv.store import Namespace, Store
    from larder_kv.vllm.settings import Server

#: Bytes of a page key in the store.
KEY_BYTES = 32

#: Bytes of the group's index at the end of vLLM's key.
GROUP_BYTES = 4


class Marks(NamedTuple):
    """The facts for the namespaces of a server that come or change after its start."""

    #: None while it is unknown: then there are no namespaces.
    packing: Optional[Packing]
    #: A text of this process alone, for chunks that no other server may find.
    anew: Optional[str] = None
    #: See the module; empty before the first reset.
    mask: bytes = b""

    def after_reset(self) -> Marks:
        """New marks, with which no earlier chunk is found."""
        return self._replace(anew=self.anew or new_name(), mask=secrets.token_bytes(KEY_BYTES))


class Space(NamedTuple):
    """The chunks of a cache group."""

    namespace: Namespace
    #: Tokens of a chunk.
    chunk_tokens: int
    #: Whether a chunk is of use only with all chunks before it: then the store evicts a prefix
    #: from its tail.
    is_chain: bool
    #: Of the store's keys; empty without one.
    mask: bytes = b""

    def name(self, key: bytes) -> bytes:
        """The store's key for vLLM's."""
        return self.masked(page_key(key))

    def names(self, keys: list[bytes]) -> bytes:
        """The store's keys for vLLM's, one after the other."""
        return self.masked(page_keys(keys))

    def masked(self, names: bytes) -> bytes:
        """Puts the mask on keys, or takes it off."""
        if not self.mask:
            return names
        mask = int.from_bytes(self.mask * (len(names) // KEY_BYTES), "big")
        return (int.from_bytes(names, "big") ^ mask).to_bytes(len(names), "big")


def new_name() -> str:
    """A text that no other process has."""
    return secrets.token_hex(8)


def page_key(key: bytes) -> bytes:
    """The store's key for vLLM's, without a mask. Short hashes are filled up: their algorithm is
    part of the namespace.
    """
    name = key[:-GROUP_BYTES]
    if len(name) != KEY_BYTES:
        if not 0 < len(name) < KEY_BYTES:
            raise ValueError(
                f"a block hash of {len(name)} bytes: at most {KEY_BYTES} are supported"
            )
        name = name.ljust(KEY_BYTES, b"\0")
    return name


def page_keys(keys: list[bytes]) -> bytes:
    """The store's keys for vLLM's, without a mask."""
    if set(map(len, keys)) == {KEY_BYTES + GROUP_BYTES}:
        return b"".join([key[:-GROUP_BYTES] for key in keys])
    return b"".join(map(page_key, keys))


def _is_chain(group: Any, groups: int, server: Server) -> bool:
    if server.full_groups is not None:
        return group.group_id in server.full_groups
    # vLLM 0.33 states it for each group. With 0.32, the only group of a model is nearly always of
    # full attention.
    window = getattr(group, "sliding_window_size_in_chunks", None)
    return groups == 1 and window is None


def has_single_chunks(config: Any, server: Server) -> bool:
    """Whether a group's chunks are no chain: those of windows and states."""
    groups = config.groups
    return not all(_is_chain(group, len(groups), server) for group in groups)


def _layout(config: Any) -> str:
    words = [str(config.kv_cache_layout or "unknown")]
    words += ["canonical"] if config.canonical_layout else []
    words += ["replicated"] if config.replicated_layout else []
    return "+".join(words)


def _extra(config: Any, server: Server, packing: Packing, anew: Optional[str]) -> dict[str, str]:
    """The settings that decide the bytes of a row, besides the fields that every namespace has."""
    parallel = config.parallel
    groups = [
        [group.group_id, group.tokens_per_block, *group.layer_names] for group in config.groups
    ]
    extra = {
        "engine": "vllm",
        "blocks_per_chunk": str(config.cache.blocks_per_chunk),
        "tokens_per_hash": str(config.cache.tokens_per_hash),
        "groups": hashlib.sha256(json.dumps(groups).encode()).hexdigest()[:32],
        "prefix_hash": server.prefix_hash,
        "packing": packing.kinds,
    }
    # A canonical row has the same bytes however its model is divided.
    if not (config.canonical_layout and parallel.is_parallelism_agnostic):
        extra["pages"] = packing.pages
        names = ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")
        extra |= {name: str(getattr(parallel, name)) for name in names}
    if anew is not None:
        extra["anew"] = anew
    return {name: value for name, value in extra.items() if value}


def spaces(
    store: Store,
    config: Any,
    row_bytes: int,
    server: Server,
    marks: Marks,
    tenant: Optional[str],
) -> dict[bytes, Space]:
    """The spaces of a tenant on a server with this ``OffloadingConfig``, by the last bytes of
    vLLM's keys.
    """
    found: dict[bytes, Space] = {}
    if marks.packing is None:
        return found
    for group in config.groups:
        chunk_tokens = group.tokens_per_block * config.cache.blocks_per_chunk
        namespace = store.namespace(
            model=config.model.name,
            weights=server.weights,
            dtype=config.model.dtype,
            layout=_layout(config),
            page_tokens=chunk_tokens,
            parts=[row_bytes],
            pool=f"group{group.group_id}",
            extra=_extra(config, server, marks.packing, marks.anew)
            | ({} if tenant is None else {"tenant": tenant}),
        )
        index = group.group_id.to_bytes(GROUP_BYTES, "big")
        is_chain = _is_chain(group, len(config.groups), server)
        found[index] = Space(namespace, chunk_tokens, is_chain, marks.mask)
    return found

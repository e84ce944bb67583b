"""The keys of a tier's configuration: vLLM hands them over as keyword arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Mapping, Optional, Sequence

#: The key of the server's facts that the connector hands over and vLLM does not pass to a tier.
SERVER_KEY = "larder_server"

_NO_SALTS = (
    "`salt_is_tenant`: a tier cannot see the salts of requests. Use the connector "
    "`LarderOffloadingConnector` (`kv_connector_module_path`: `larder_kv.vllm`), which tells them"
)

_NO_TAG = (
    "`weights_tag` is missing: a tier cannot see which weights the server has loaded. Use the connector "
    "`LarderOffloadingConnector` (`kv_connector_module_path`: `larder_kv.vllm`), which derives it, or set `weights_tag` to a text "
    "that changes with the weights"
)


@dataclass(frozen=True)
class Server:
    """Facts of the server, from the connector."""

    #: Names the weights, and the other settings that decide the bytes of a chunk.
    weights: str
    #: The description with this tag. Empty if no other start can have the same tag.
    fields: Mapping[str, str] = field(default_factory=dict)
    #: The hash algorithm of vLLM's prefix cache.
    prefix_hash: str = ""
    #: Ids of the cache groups with layers that look back to the first token; None if unknown.
    full_groups: Optional[tuple[int, ...]] = None
    #: Whether the connector reports the packing of pages later: no chunk is found before.
    tells_packing: bool = False

    def as_config(self) -> dict[str, Any]:
        groups = None if self.full_groups is None else list(self.full_groups)
        return {
            "weights": self.weights,
            "fields": dict(self.fields),
            "prefix_hash": self.prefix_hash,
            "full_groups": groups,
            "tells_packing": self.tells_packing,
        }

    @classmethod
    def of_config(cls, config: Mapping[str, Any]) -> Server:
        groups: Optional[Sequence[int]] = config.get("full_groups")
        return cls(
            weights=str(config["weights"]),
            fields=dict(config.get("fields") or {}),
            prefix_hash=str(config.get("prefix_hash") or ""),
            full_groups=None if groups is None else tuple(groups),
            tells_packing=bool(config.get("tells_packing")),
        )


@dataclass(frozen=True)
class Settings:
    """A tier's configuration."""

    #: The keys that all engines share: the store's.
    store: dict[str, Any]
    server: Server
    #: Whether chunks from before a reset of vLLM's caches are not found after it.
    is_fresh_after_reset: bool
    #: Whether vLLM's KV events name the chunks that this tier stores and evicts.
    has_events: bool
    locality: Optional[str]
    #: Whether the salt of a request is the tenant of its chunks.
    salt_is_tenant: bool

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> Settings:
        """Reads the keys. The store's own are read by the store, which refuses an unknown one by
        its name.

        Raises ValueError for a wrong value and for a missing weights tag.
        """
        rest = dict(config)
        on_reset = rest.pop("on_reset", "fresh")
        if on_reset not in ("fresh", "keep"):
            raise ValueError(f"larder: `on_reset`: `{on_reset}` is not one of fresh, keep")
        has_events = _flag(rest, "enable_kv_events")
        salt_is_tenant = _flag(rest, "salt_is_tenant")
        locality = rest.pop("locality", None)
        if locality not in (None, "LOCAL", "REMOTE"):
            raise ValueError(f"larder: `locality`: `{locality}` is not one of LOCAL, REMOTE")
        server = rest.pop(SERVER_KEY, None)
        own = rest.get("weights_tag")
        if server is None and not own:
            raise ValueError(f"larder: {_NO_TAG}")
        if server is None and salt_is_tenant:
            raise ValueError(f"larder: {_NO_SALTS}")
        return cls(
            store=rest,
            server=Server(str(own)) if server is None else Server.of_config(server),
            is_fresh_after_reset=on_reset == "fresh",
            has_events=has_events,
            locality=locality,
            salt_is_tenant=salt_is_tenant,
        )


def _flag(keys: dict[str, Any], key: str) -> bool:
    value = keys.pop(key, False)
    if not isinstance(value, bool):
        raise ValueError(f"larder: `{key}` must be true or false")
    return value

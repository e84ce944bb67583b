"""vLLM's ``OffloadingConnector`` with the facts of the server that a tier cannot see: above all,
which weights it has loaded.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import FullAttentionSpec

from larder.vllm import weights
from larder.vllm.doctor import is_larder
from larder.vllm.settings import SERVER_KEY, Server


class LarderOffloadingConnector(OffloadingConnector):
    """Hands the weights tag and the kinds of cache groups to each ``LarderTier`` of its
    configuration.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises ValueError where nothing tells the weights from others and ``weights_tag`` is
        not set.
        """
        if role == KVConnectorRole.SCHEDULER:
            _inform(vllm_config, kv_cache_config)
        super().__init__(vllm_config, role, kv_cache_config)


def _inform(vllm_config: Any, kv_cache_config: Any) -> None:
    tiers = vllm_config.kv_transfer_config.kv_connector_extra_config.get("secondary_tiers")
    if not isinstance(tiers, list):
        return
    for tier in filter(is_larder, tiers):
        tag = weights.tag(vllm_config, tier.get("weights_tag"))
        tier[SERVER_KEY] = Server(
            weights=tag,
            prefix_hash=str(vllm_config.cache_config.prefix_caching_hash_algo),
            full_groups=_full_groups(kv_cache_config),
        ).as_config()


def _full_groups(kv_cache_config: Any) -> tuple[int, ...]:
    """The groups all of whose layers look back to the first token."""

    def is_full(spec: Any) -> bool:
        # A group of layers that differ in size has the specification of each.
        layers = getattr(spec, "kv_cache_specs", None)
        return all(map(is_full, layers.values())) if layers else isinstance(spec, FullAttentionSpec)

    groups = enumerate(kv_cache_config.kv_cache_groups)
    return tuple(number for number, group in groups if is_full(group.kv_cache_spec))

"""vLLM's ``OffloadingConnector`` with the facts of the server that vLLM does not pass to a tier:
above all, its loaded weights, the packing of its pages and the salts of requests.

The workers describe the packing in vLLM's handshake, before the first request. A ``MultiConnector``
hands the first answer of its connectors to all of them. Inside a ``MultiConnector`` the packing is
therefore part of the report of each connector's workers after a step of the model. That report
comes after the first requests.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, Optional

import vllm
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import FullAttentionSpec

from larder_kv import logs
from larder_kv.vllm import packing, weights
from larder_kv.vllm.doctor import is_larder
from larder_kv.vllm.settings import SERVER_KEY, Server
from larder_kv.vllm.spaces import new_name
from larder_kv.weights import warn_of_untold

logger = logging.getLogger(__name__)

#: The name of the connector below, also in configurations.
_NAME = "LarderOffloadingConnector"


@dataclass(frozen=True)
class Pages(KVConnectorHandshakeMetadata):
    """The message of a worker to the scheduler."""

    #: None if unknown to the worker.
    described: Optional[packing.Described]


@dataclass
class Report(KVConnectorWorkerMetadata):
    """The report of workers inside a ``MultiConnector`` after a step."""

    #: The report of vLLM's connector.
    of_vllm: Optional[KVConnectorWorkerMetadata]
    #: By rank: pages that were not reported before.
    pages: dict[int, Pages] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Report:
        assert isinstance(other, Report)
        of_vllm = self.of_vllm or other.of_vllm
        if self.of_vllm and other.of_vllm:
            of_vllm = self.of_vllm.aggregate(other.of_vllm)
        return Report(of_vllm, self.pages | other.pages)


class LarderOffloadingConnector(OffloadingConnector):
    """Hands the weights tag, the kinds of cache groups, the packing of pages and the salts of
    requests to each ``LarderTier`` of its configuration.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Raises ValueError if the weights cannot be distinguished from others and ``weights_tag``
        is not set.
        """
        # vLLM sets up its own logger alone: without this, our lines below a warning are lost.
        logs.follow(logging.getLogger("vllm"))
        if role == KVConnectorRole.SCHEDULER:
            _inform(vllm_config, kv_cache_config)
        super().__init__(vllm_config, role, kv_cache_config)
        self._pages: Optional[Pages] = None
        #: Whether a report has the pages.
        self._has_reported = False
        #: By rank: the pages of reports.
        self._reported: dict[int, Pages] = {}

    # --- in a worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Describes the pages too: only now has each layer its backend and its views."""
        super().register_kv_caches(kv_caches)
        self._pages = Pages(
            packing.describe(
                vllm.__version__,
                self._vllm_config.compilation_config.static_forward_context,
                {name: kv_caches[name] for name in self._layers()},
                self._kv_cache_config.num_blocks,
            )
        )
        self._has_reported = False

    def _layers(self) -> list[str]:
        """The layers with offloaded pages."""
        groups = self.connector_worker.spec.config.groups
        return [name for group in groups for name in group.layer_names]

    def get_handshake_metadata(self) -> Optional[KVConnectorHandshakeMetadata]:
        """The pages. None inside a ``MultiConnector``: the answer of another connector would be
        lost.
        """
        return None if self._is_inside() else self._pages

    def build_connector_worker_meta(self) -> Optional[KVConnectorWorkerMetadata]:
        """The report of vLLM's connector; inside a ``MultiConnector`` the first one has the pages
        too.
        """
        of_vllm = super().build_connector_worker_meta()
        if not self._is_inside():
            return of_vllm
        pages = {}
        if self._pages is not None and not self._has_reported:
            pages[self._vllm_config.parallel_config.rank] = self._pages
            self._has_reported = True
        return Report(of_vllm, pages) if of_vllm or pages else None

    def _is_inside(self) -> bool:
        """Whether the worker's connector is another one, which has this one."""
        return has_kv_transfer_group() and get_kv_transfer_group() is not self

    # --- in the scheduler

    def on_new_request(self, request: Any) -> None:
        """Tells the tiers the salt too, which vLLM's context of a request lacks."""
        for tier in getattr(self.connector_scheduler.manager, "secondary_tiers", ()):
            if hasattr(tier, "tell_salt"):
                tier.tell_salt(request.request_id, request.cache_salt)
        super().on_new_request(request)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Hands over the messages of the workers, before the first request."""
        if metadata and all(isinstance(told, Pages) for told in metadata.values()):
            self._hand_over(metadata)

    def update_connector_output(self, connector_output: Any) -> None:
        """Hands over the pages of reports, once all workers have reported."""
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, Report):
            connector_output.kv_connector_worker_meta = report.of_vllm
            self._reported |= report.pages
            workers = self._vllm_config.parallel_config.world_size
            if report.pages and len(self._reported) == workers:
                self._hand_over(self._reported)
        super().update_connector_output(connector_output)

    def _hand_over(self, ranks: dict[Any, Pages]) -> None:
        told = _packing({rank: pages.described for rank, pages in ranks.items()})
        for tier in self.connector_scheduler.manager.secondary_tiers:
            if hasattr(tier, "tell_packing"):
                tier.tell_packing(told)


# A `MultiConnector` finds the statistics of its connectors by their registered names.
if _NAME not in KVConnectorFactory._registry:
    KVConnectorFactory.register_connector(_NAME, "larder_kv.vllm", _NAME)


def _packing(ranks: dict[Any, Optional[packing.Described]]) -> packing.Packing:
    known = {rank: described for rank, described in ranks.items() if described is not None}
    if len(known) == len(ranks):
        return packing.merged(known)
    logger.warning(
        "larder: nothing says which kernels use the pages of some layers: what this server stores "
        "is found by itself alone, until it ends"
    )
    return packing.Packing(new_name(), "")


def _inform(vllm_config: Any, kv_cache_config: Any) -> None:
    tiers = vllm_config.kv_transfer_config.kv_connector_extra_config.get("secondary_tiers")
    if not isinstance(tiers, list):
        return
    for tier in filter(is_larder, tiers):
        description = weights.describe(vllm_config, tier.get("weights_tag"))
        warn_of_untold(description.fields)
        tag, fields = description.tag, description.fields
        if (why := weights.may_change(vllm_config)) is not None:
            logger.warning(
                "larder: %s: weights may change while this server runs, so what it stores is found "
                "by itself alone, until it ends",
                why,
            )
            tag, fields = f"{tag}+{new_name()}", {}
        tier[SERVER_KEY] = Server(
            weights=tag,
            fields=fields,
            prefix_hash=str(vllm_config.cache_config.prefix_caching_hash_algo),
            full_groups=_full_groups(kv_cache_config),
            tells_packing=True,
        ).as_config()


def _full_groups(kv_cache_config: Any) -> tuple[int, ...]:
    """The groups in which all layers look back to the first token."""

    def is_full(spec: Any) -> bool:
        # A group of layers that differ in size has the specification of each.
        layers = getattr(spec, "kv_cache_specs", None)
        return all(map(is_full, layers.values())) if layers else isinstance(spec, FullAttentionSpec)

    groups = enumerate(kv_cache_config.kv_cache_groups)
    return tuple(number for number, group in groups if is_full(group.kv_cache_spec))

"""The keys of a store that all engines share: `path`, `size`, `weights_tag`, `on_error`, ...
(README.md).
"""

from __future__ import annotations

import json
import logging
from typing import Any, Mapping, NamedTuple, Optional

from larder_kv import _larder
from larder_kv.store import Store

logger = logging.getLogger(__name__)


class Config(NamedTuple):
    """A configuration. Times are in seconds, sizes in bytes."""

    path: str
    size: Optional[int]
    weights_tag: Optional[str]
    #: `fail` or `miss`: the start of a server without a store fails, or all its lookups miss.
    on_error: str
    #: Pause before the next attempt to attach.
    retry: float
    prewrite: bool
    #: `off`, `bf16` or `auto`.
    codec: str
    disk: str
    sync: str
    lease: float
    #: `learned` or `lru`.
    policy: str
    #: `off`, bytes a day as `3TB/day`, or drive writes a day as `0.5DWPD`.
    write_budget: str
    #: The quota of each namespace: `min=1TiB,max=2TiB,max-age=30d`, each part as far as wanted.
    quota: Optional[str]
    #: The tenant of pages, as far as their engine names no other.
    tenant: Optional[str]
    #: Where the key of an encrypted store is: at most one of these (docs/security.md).
    key_file: Optional[str]
    key_command: Optional[str]
    key_credential: bool
    #: Longest wait until a read or write has started.
    timeout: float
    #: Tokens that the engine computes in a second.
    prefill_rate: Optional[int]
    #: The keys of the remotes beneath the store, as they were given (docs/remote.md).
    l4: dict[str, Any]

    @classmethod
    def parse(cls, keys: Mapping[str, Any]) -> Config:
        """Raises ValueError naming the key that is unknown, missing or wrong."""
        try:
            return cls(**json.loads(_larder.parse_config(json.dumps(dict(keys), default=str))))
        except ValueError as error:
            raise ValueError(f"larder: {error}") from None

    def attach(self, page_bytes: int, must_fit: bool = True) -> Store:
        """Attaches to the store, for pages of at most this size, and logs it; creates the store if
        there is none. ``must_fit``: refuses a store that keeps no page of this size.

        Raises `larder_kv.StoreError`.
        """
        store = Store.attach(
            self.path,
            size=self.size,
            page_bytes=page_bytes,
            must_fit=must_fit,
            sync=self.sync,
            lease=self.lease,
            hang_limit=self.timeout,
            prewrite=self.prewrite,
            codec=self.codec,
            disk=self.disk,
            policy=self.policy,
            write_budget=self.write_budget,
            l4=self.l4,
            key_file=self.key_file,
            key_command=self.key_command,
            key_credential=self.key_credential,
        )
        stats = store.stats()
        logger.info(
            "larder: attached to %s as %s, %s pages found, disk %s, %.1f MiB of RAM for the index",
            store.path,
            store.part,
            stats.get("pages", 0),
            stats.get("disk", "none"),
            stats.get("index_bytes", 0) / 2**20,
        )
        return store

    def limit(self, namespace: Any) -> None:
        """Sets the quota of a namespace, if the configuration has one."""
        if self.quota is None:
            return
        try:
            namespace.limit(self.quota)
        except Exception as error:
            logger.warning("larder: the quota of a namespace is not set: %s", error)

"""An attached store, and this server's place in it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, Optional

import numpy as np

from larder_kv import weights
from larder_kv.config import Config
from larder_kv.store import Store
from larder_kv.vllm.settings import Settings
from larder_kv.vllm.spaces import Marks, Space, has_single_chunks, spaces

if TYPE_CHECKING:
    from larder_kv.store import Queue, Region

logger = logging.getLogger(__name__)

#: Jobs of the store that are not reported yet. vLLM's own limit is its CPU tier: each job holds
#: rows of it.
_JOBS_MAX = 4096


class Link:
    """A store, a queue of jobs on it, the registered rows of vLLM's CPU tier, and the namespaces
    of its cache groups.
    """

    def __init__(self, settings: Settings, config: Any, view: memoryview, marks: Marks) -> None:
        """Attaches. May wait.

        Raises ValueError for a wrong configuration, ``larder_kv.StoreError`` for a store that cannot
        be attached.
        """
        rows = np.asarray(view)
        count, row_bytes = rows.shape
        if not rows.flags.c_contiguous or rows.itemsize != 1:
            raise ValueError(
                f"larder: vLLM's CPU tier is not one piece of memory: {rows.shape} {rows.strides} {rows.dtype}"
            )
        self._config = Config.parse(settings.store)
        if self._config.l4 and has_single_chunks(config, settings.server):
            raise ValueError(
                "larder: this model has windows or states, and a remote (`l4`) gets whole runs of chunks alone, so no prefix could be "
                "restored from it: leave out `l4`"
            )
        self.store: Store = self._config.attach(row_bytes)
        try:
            # The array keeps the mapping: vLLM does not unmap it as long as this exists.
            self.region: Region = self.store.register(
                rows.ctypes.data, count * row_bytes, row_bytes, owner=rows
            )
            self.region.move_to_huge_pages()
            self.queue: Queue = self.store.queue(jobs=_JOBS_MAX)
            self._server = (config, row_bytes, settings.server)
            #: By the last bytes of vLLM's keys. Empty while the spaces of ``marks`` are not made.
            self.spaces: dict[bytes, Space] = self.own_spaces(marks)
            #: By salt that is a tenant, as far as they are made: the same.
            self.salts: dict[str, dict[bytes, Space]] = {}
            #: The marks of these spaces; None if they are not made.
            self.marks: Optional[Marks] = marks
            server = settings.server
            if server.fields:
                name = f"vLLM, model {config.model.name}"
                told = (server.weights, server.fields)
                weights.compare(self.store.path, name, *told, self.store.is_encrypted)
        except BaseException:
            self.store.close()
            raise

    def own_spaces(self, marks: Marks) -> dict[bytes, Space]:
        """The namespaces of requests without a salt, as ``spaces_of``."""
        return self.spaces_of(marks, self._config.tenant)

    def spaces_of(self, marks: Marks, tenant: Optional[str]) -> dict[bytes, Space]:
        """The namespaces of a tenant with these marks. May wait. Raises
        ``larder_kv.StoreError``.
        """
        found = spaces(self.store, *self._server, marks, tenant)
        for space in found.values():
            self._config.limit(space.namespace)
        return found

    def by_digest(self) -> dict[bytes, tuple[bytes, Space]]:
        """The groups and namespaces of all tenants, by the digest of the namespace."""
        tenants = [self.spaces, *list(self.salts.values())]
        return {
            space.namespace.digest: (group, space)
            for of in tenants
            for group, space in of.items()
        }

    def describe(self) -> str:
        groups = ", ".join(
            f"{space.namespace.digest.hex()[:8]} ({'prefixes' if space.is_chain else 'single chunks'})"
            for space in self.spaces.values()
        )
        return f"rows of {self.region.stride} bytes x {self.region.rows}: {self.region.described}; namespaces {groups}"

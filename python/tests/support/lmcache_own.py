"""A plug-in of pytest for LMCache's own tests: they get `LarderL2Adapter` where they ask for
LMCache's `MockL2Adapter`.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import lmcache
from lmcache.v1.distributed.l2_adapters import mock_l2_adapter

sys.path.insert(0, str(Path(__file__).parent.parent))

from larder_kv.lmcache import LarderL2Adapter, LarderL2AdapterConfig  # noqa: E402
from larder_kv.lmcache.spaces import Place, page_key  # noqa: E402
from larder_kv.store import Status  # noqa: E402
from support.lmcache import parameters  # noqa: E402


class InPlace(LarderL2Adapter):
    """An adapter over a store of its own, with the calls that the tests make on the mock
    besides.
    """

    def __init__(self, config, l1_memory_desc=None):
        self._place = tempfile.mkdtemp(prefix="larder-lmcache-")
        super().__init__(LarderL2AdapterConfig(**parameters(self._place)), l1_memory_desc)

    def close(self):
        super().close()
        shutil.rmtree(self._place, ignore_errors=True)

    def report_status(self):
        return super().report_status() | {"type": "MockL2Adapter"}

    def debug_get_stored_object_count(self):
        return self._store.stats()["pages"]

    def debug_get_locked_key_count(self):
        return self.report_status()["locked_key_count"]

    def debug_has_key(self, key):
        return any(
            space.namespace.contains(page_key(key.chunk_hash)) == bytes([Status.OK])
            for space in self._spaces.at(Place.of(key))
        )


# LMCache's factory asks its module for the class when it makes an adapter.
mock_l2_adapter.MockL2Adapter = InPlace
mock_l2_adapter._create_mock_adapter.__globals__["MockL2Adapter"] = InPlace
# The tests of the controllers use no device, and skip where there is none.
lmcache.torch_dev.is_available = lambda: True

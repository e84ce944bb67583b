"""A process that opens a store by itself, without SGLang, which takes long to import."""

from __future__ import annotations

import ctypes
import json

from larder_kv import _larder

PAGE_BYTES = 8192

SERVER = {
    "model": "anew",
    "weights": "anew",
    "tp": (0, 1),
    "pp": (0, 1),
    "cp": (0, 1),
    "replicated": False,
}

POOL = {"name": "kv", "dtype": "uint8", "layout": "flat", "page_tokens": 1, "sharded": False, "extra": {}}


def use(path, keys, said):
    """Stores pages and looks them up; sends what this process was, and how many were stored and found."""
    backend = _larder.Backend(json.dumps({"path": str(path), "weights_tag": "anew"}), json.dumps(SERVER))
    backend.register_flat(json.dumps(POOL), PAGE_BYTES)
    page = ctypes.create_string_buffer(PAGE_BYTES)
    stored = backend.set_flat("kv", keys, [(ctypes.addressof(page), PAGE_BYTES)] * len(keys))
    said.send((backend.counters()["part"], sum(stored), backend.exists("kv", keys)))
    backend.close()

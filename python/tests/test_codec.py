"""`codec` of `larder.Store`."""

from __future__ import annotations

import hashlib

import pytest
from larder_kv.store import Status, Store

OK = bytes([Status.OK]) * 4
KEYS = b"".join(hashlib.sha256(b"%d" % number).digest() for number in range(4))


def test_a_codec_makes_pages_smaller_and_gives_their_bytes_back(tmp_path):
    page = 1 << 20
    # Values in bf16 with neighbouring exponents.
    values = bytearray(b"".join(bytes([at % 256, 0x3C + at % 3]) for at in range(page // 2)) * 4)
    with Store.attach(tmp_path, size=128 << 20, codec="bf16") as store:
        pages = store.namespace(model="m", weights="w", dtype="bf16", layout="any", page_tokens=64, parts=[page])
        assert pages.put(KEYS, values) == OK
        into = bytearray(len(values))
        assert pages.get(KEYS, into) == OK and into == values
        [usage] = store.usage()
        assert usage.plain_bytes == 4 * page and usage.bytes < usage.plain_bytes * 3 // 4 + 65536
        assert store.stats()["live_bytes"] == usage.bytes
    with pytest.raises(ValueError, match="codec.*off, bf16 or auto"):
        Store.attach(tmp_path, codec="zstd")

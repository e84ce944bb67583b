"""Stores eight pages and reads them back: python first_hit.py DIRECTORY"""

import hashlib
import sys

import larder_kv

if len(sys.argv) != 2:
    sys.exit(__doc__)
with larder_kv.Store.attach(sys.argv[1], size="256MiB") as store:
    pages = store.namespace(
        model="demo", weights="1", dtype="uint8", layout="rows", page_tokens=16, parts=[65536]
    )
    keys = b"".join(hashlib.sha256(b"page %d" % at).digest() for at in range(8))
    data = b"".join(bytes([at]) * 65536 for at in range(8))
    put = pages.put(keys, data)
    read = bytearray(len(data))
    got = pages.get(keys, read)
assert max(put) <= larder_kv.Status.DUPLICATE and not any(got) and read == data, (put, got)
print("stored" if not any(put) else "was stored before", "and read back: 8 pages, 524288 bytes")

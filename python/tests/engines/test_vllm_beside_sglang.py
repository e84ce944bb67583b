"""SGLang's backend and vLLM's tier on one store at once, each in its own namespaces."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not in this environment")

TESTS = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(TESTS))

from support.vllm import keys, steps, tier  # noqa: E402

#: SGLang's environment lies beside vLLM's.
SGLANG = Path(sys.prefix).parent.parent / "venv/bin/python"

SGLANG_SERVER = """
import sys
sys.path.insert(0, sys.argv[2])
import support.cpu
import torch
from support import pools
from support.backend import make
pool = pools.mha()
pools.fill(pool)
backend = make(sys.argv[1], pool)
names = sys.argv[3].split(",")
pages = list(range(len(names)))
wanted = [pools.page_bytes(pool, page) for page in pages]
print("before", backend.batch_exists(names), flush=True)
assert all(backend.batch_set_v1(names, pools.indices(pool, pages)))
print("stored", flush=True)
sys.stdin.readline()
pools.wipe(pool)
read = backend.batch_get_v1(names, pools.indices(pool, pages))
print("read", sum(read), sum(torch.equal(pools.page_bytes(pool, page), wanted[page]) for page in pages), flush=True)
backend.close()
"""


@pytest.mark.skipif(not SGLANG.exists(), reason="SGLang is not installed beside vLLM")
def test_sglang_and_vllm_use_one_store_and_find_their_own_pages_alone(tmp_path):
    chain = keys(8)
    names = ",".join(key[:-4].hex() for key in chain)
    with steps(tier(tmp_path)) as engine:
        # The same keys in both: namespaces alone tell them apart.
        engine.store(chain)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [SGLANG, "-P", "-c", SGLANG_SERVER, tmp_path, TESTS, names]
        other = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        assert other.stdout.readline().split() == ["before", "0"]
        assert other.stdout.readline() == "stored\n"
        engine.forget()
        assert engine.load(chain) == (8, 8)
        said, _ = other.communicate("\n", timeout=300)
        word, read, good = said.split()
        assert (word, read, good) == ("read", "8", "8")
        assert other.returncode == 0
        engine.forget()
        assert engine.load(chain) == (8, 8)

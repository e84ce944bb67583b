"""SGLang's whole server, over HTTP."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests/server"))

import torch  # noqa: E402
from benching import Trouble  # noqa: E402
from serving import CPU, PAGE_TOKENS, REAL, Server, cpu_environment, wait_for, whole_pages  # noqa: E402
from support import real  # noqa: E402
from words import Asked  # noqa: E402

L1_TOKENS = 2 * real.CONTEXT
L2_RATIO = 2
STORE_SIZE = "1GiB"


def has_bf16():
    """Whether the processor computes in bf16. Others need four times as long for it as for float32."""
    flags = Path("/proc/cpuinfo").read_text().split()
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)


class Running:
    """A server that answers."""

    def __init__(self, server):
        self.server = server
        self.written = 0

    def ask(self, prompt, tokens):
        answer = self.server.generate(prompt, new=tokens)
        return Asked(answer.ttft, answer.storage, answer.tokens, answer.cached)

    def stored(self, tokens):
        self.written += whole_pages(tokens)
        wait_for("pages in the store", lambda: self.backed_up() >= self.written)

    def backed_up(self):
        """Tokens that SGLang has written to L3."""
        _, text = self.server.http("GET", "/metrics")
        lines = [line for line in text.splitlines() if line.startswith("sglang:backuped_tokens_total{")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


class Engine:
    NAME = "SGLang"
    UNIT = PAGE_TOKENS

    def __init__(self, place, model):
        self.place, self.model = place, model
        self.on_cpu = not torch.cuda.is_available()
        self.servers = 0

    def replaced(self):
        if not self.on_cpu:
            return ""
        computing = "bf16" if has_bf16() else "float32, since this CPU has no bf16"
        return (
            f"On the CPU, computing in {computing}, KV in bf16: kernels and copies are replaced as "
            "tests/server/boot/sitecustomize.py lists."
        )

    def settings(self):
        return (
            f"L1 of {L1_TOKENS:,} tokens, L2 of {L2_RATIO * L1_TOKENS:,} tokens, store of {STORE_SIZE}, "
            f"pages of {PAGE_TOKENS} tokens"
        )

    @contextlib.contextmanager
    def started(self, with_store):
        self.servers += 1
        arguments = ["--page-size", PAGE_TOKENS, "--context-length", real.CONTEXT, "--chunked-prefill-size", 4096]
        arguments += ["--enable-hierarchical-cache", "--hicache-ratio", L2_RATIO, "--max-total-tokens", L1_TOKENS]
        arguments += ["--hicache-storage-prefetch-policy", "wait_complete"]
        environment = {}
        if self.on_cpu:
            arguments += CPU if has_bf16() else [*CPU, *REAL]
            environment = cpu_environment() | {"OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
        else:
            arguments += ["--hicache-mem-layout", "page_first_direct", "--hicache-io-backend", "direct"]
        if with_store:
            config = {
                "backend_name": "larder",
                "module_path": "larder_kv.sglang",
                "class_name": "LarderHiCache",
                "interface_v1": 1,
                "hicache_storage_pass_prefix_keys": True,
                "path": str(self.place / "store"),
                "size": STORE_SIZE,
            }
            arguments += ["--hicache-storage-backend", "dynamic"]
            arguments += ["--hicache-storage-backend-extra-config", json.dumps(config)]
        server = Server(self.place / f"server-{self.servers}.log", self.model, arguments, environment)
        try:
            yield Running(server.ready())
            server.stop()
        except AssertionError as error:
            raise Trouble(f"a server: {error}") from error
        finally:
            server.kill()

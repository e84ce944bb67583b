"""LMCache's server below vLLM's engine with a real model, and Larder below the server."""

from __future__ import annotations

import contextlib
import time

from lmcache_server import PATIENCE, adapter_of, server
from started import Engine
from support import real
from vllm_site import TOKEN_BYTES

CHUNK_TOKENS = 256

#: Tokens for which LMCache's L1 has room. It evicts once a second, when more than half is used: two
#: documents fit.
L1_TOKENS = 14000
EVICTION = ("--eviction-trigger-watermark", "0.5", "--eviction-ratio", "0.5")


class Served:
    """An engine and the server that it uses, or an engine without a store."""

    def __init__(self, engine, status, stop):
        self.engine, self.status, self.stop = engine, status, stop
        #: The beginnings of prompts that are whole chunks.
        self.chunks = set()

    def adapter(self):
        return adapter_of(self.status())

    def answer(self, ids, tokens):
        return self.engine.ask("answer", ids, tokens)

    def settle(self, ids):
        """Waits for the chunks of a prompt that was just asked."""
        if self.status is None:
            return
        ends = range(CHUNK_TOKENS, len(ids) + 1, CHUNK_TOKENS)
        self.chunks |= {tuple(ids[:end]) for end in ends}
        self.until(lambda adapter: adapter["stored_object_count"] >= len(self.chunks))

    def until(self, is_reached):
        end = time.monotonic() + PATIENCE
        while not is_reached(adapter := self.adapter()):
            assert time.monotonic() < end, adapter
            time.sleep(0.05)

    def keep(self, ids, tokens):
        self.engine.ask("keep", ids, tokens)

    def forget(self):
        self.engine.ask("forget")

    def damage(self, ids):
        assert self.engine.ask("damage", ids)["blocks"] > 0

    def killed(self, ids):
        """Kills both while the chunks of a prompt are stored."""
        before = self.adapter()["stored_object_count"]
        self.engine.start("answer", ids, 1)
        self.until(lambda adapter: adapter["stored_object_count"] > before)
        self.kill()

    def kill(self):
        self.stop()
        self.engine.kill()

    def part(self):
        return self.adapter()["part"]

    def loaded(self):
        return self.adapter()["chunks"].get("load_ok", 0) if self.status else 0

    def damaged(self):
        return self.adapter()["chunks"].get("load_damaged", 0)


class Site:
    UNIT = CHUNK_TOKENS

    def __init__(self, place, model, size="2GiB"):
        self.place, self.model, self.size = place, model, size
        self.ends = contextlib.ExitStack()

    def start(self, name, blocks, has_store=True):
        ends = self.ends.enter_context(contextlib.ExitStack())
        port = status = None
        if has_store:
            port, status = ends.enter_context(
                server(
                    self.place / "store",
                    self.place / f"{name}.server",
                    CHUNK_TOKENS,
                    L1_TOKENS * TOKEN_BYTES / 2**30,
                    EVICTION,
                    size=self.size,
                    chunk_bytes=CHUNK_TOKENS * TOKEN_BYTES,
                    prewrite=False,
                )
            )
        engine = Engine(
            self.place / f"{name}.log",
            self.model,
            None,
            context=real.CONTEXT,
            step=1024,
            blocks=blocks,
            lmcache=port,
            is_real=True,
        )
        ends.callback(engine.kill)
        return Served(engine.ready(), status, ends.close)

    def kill(self):
        self.ends.close()

    def close(self):
        self.kill()
        for store in self.place.rglob("*.store"):
            store.unlink()

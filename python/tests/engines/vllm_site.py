"""vLLM with a real model, and Larder as its secondary tier."""

from __future__ import annotations

from started import Engine
from support import real, vllm_attention

#: Tokens for which the tier of CPU memory has room.
TIER_TOKENS = 6400

#: Bytes of KV of a token: 30 layers, keys and values of 3 heads of 64 numbers.
TOKEN_BYTES = 30 * 2 * 3 * 64 * (4 if vllm_attention.is_needed() else 2)


class Served:
    """An engine with Larder as a secondary tier, or without a store."""

    def __init__(self, engine, has_store):
        self.engine, self.has_store = engine, has_store

    def answer(self, ids, tokens):
        return self.engine.ask("answer", ids, tokens)

    def settle(self, ids):
        if self.has_store:
            self.engine.ask("settle")

    def keep(self, ids, tokens):
        self.engine.ask("keep", ids, tokens)

    def forget(self):
        self.engine.ask("forget")

    def damage(self, ids):
        assert self.engine.ask("damage", ids)["blocks"] > 0

    def killed(self, ids):
        """Kills the engine while the chunks of a prompt are stored."""
        self.engine.start("killed", ids)
        self.engine.process.wait()
        self.engine.kill()

    def kill(self):
        self.engine.kill()

    def part(self):
        return self.engine.ask("part")

    def loaded(self):
        return self.engine.ask("counts").get("loaded_chunks", 0) if self.has_store else 0

    def damaged(self):
        counts = self.engine.ask("counts")
        return counts.get("damaged_chunks", 0) + counts.get("errors", 0)


class Site:
    #: Tokens of a chunk.
    UNIT = 32

    def __init__(self, place, model, size="2GiB"):
        self.place, self.model, self.size = place, model, size
        self.made = []

    def start(self, name, blocks, has_store=True):
        tier = {"path": str(self.place / "store"), "size": self.size, "prewrite": False}
        engine = Engine(
            self.place / f"{name}.log",
            self.model,
            tier if has_store else None,
            context=real.CONTEXT,
            step=1024,
            blocks=blocks,
            tier_bytes=TIER_TOKENS * TOKEN_BYTES,
            is_real=True,
        )
        self.made.append(engine)
        return Served(engine.ready(), has_store)

    def kill(self):
        for engine in self.made:
            engine.kill()

    def close(self):
        self.kill()
        for store in self.place.rglob("*.store"):
            store.unlink()

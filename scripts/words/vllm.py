"""vLLM's engine for the CPU in a process of its own, with Larder as a secondary tier."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python/tests/engines"))

import vllm_site  # noqa: E402
from benching import Trouble  # noqa: E402
from support import vllm_attention  # noqa: E402
from words import Asked  # noqa: E402

#: Blocks of 32 tokens: the context.
BLOCKS = 270


class Running:
    """An engine that answers."""

    def __init__(self, served, unit):
        self.served, self.unit = served, unit
        self.last = []

    def ask(self, prompt, tokens):
        before = self.loaded()
        answer = self.served.answer(prompt, tokens)
        self.last = prompt
        return Asked(answer["seconds"], self.loaded() - before, answer["tokens"])

    def loaded(self):
        return self.served.loaded() * self.unit

    def stored(self, tokens):
        self.served.settle(self.last)


class Engine:
    NAME = "vLLM"
    SITE = vllm_site.Site
    UNIT = SITE.UNIT
    COPIES = "The copies between the engine's blocks and the tier of CPU memory are by memmove."

    def __init__(self, place, model):
        self.site = self.SITE(place, model, size="1GiB")
        self.engines = 0

    def replaced(self):
        attention = ""
        if vllm_attention.is_needed():
            attention = "Attention is torch's, in float32: the processor has no AVX-512."
        return " ".join(filter(None, [self.COPIES, attention]))

    @contextlib.contextmanager
    def started(self, with_store):
        self.engines += 1
        try:
            served = self.site.start(f"engine-{self.engines}", BLOCKS, has_store=with_store)
            yield Running(served, self.UNIT)
            served.kill()
        except AssertionError as error:
            raise Trouble(f"an engine: {error}") from error
        finally:
            self.site.kill()

"""Larder: a local L3 for LLM serving.

SGLang loads ``larder.sglang.LarderHiCache``; ``python -m larder`` is the command line; ``larder.device`` copies between an engine's
tensors and host memory.
"""

from larder._larder import __version__

__all__ = ["__version__"]

"""vLLM's OpenAI server, with torch's attention in place of a kernel that is slow without AVX-512: see `support.vllm_attention`."""

from __future__ import annotations

import runpy

from support import vllm_attention

# Also where vLLM starts its engine as a new process, which imports this file.
vllm_attention.replace()

if __name__ == "__main__":
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")

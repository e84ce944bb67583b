"""vLLM's own configuration of a small model, without an engine. Run as a program it prints the
weights tag of the arguments on its command line, JSON.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import sys
from pathlib import Path

#: Llama 4's text model: some layers without RoPE, whose queries are scaled by position.
LLAMA4 = {
    "architectures": ["Llama4ForCausalLM"],
    "model_type": "llama4_text",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "intermediate_size_mlp": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_local_experts": 2,
    "max_position_embeddings": 65536,
    "rope_theta": 500000.0,
    "no_rope_layers": [1, 1, 1, 0],
    "attn_scale": 0.1,
    "floor_scale": 4096,
    "attention_chunk_size": 4096,
    "torch_dtype": "bfloat16",
}


def model(place: Path, **more) -> Path:
    """Writes a model's configuration, and a file that stands for its weights."""
    place.mkdir(parents=True, exist_ok=True)
    (place / "config.json").write_text(json.dumps(LLAMA4 | more))
    (place / "model.safetensors").write_bytes(b"1")
    return place


@contextlib.contextmanager
def platform():
    """vLLM's CPU platform, which the Python files of a release without a build do not find."""
    from vllm import platforms
    from vllm.platforms.cpu import CpuPlatform

    before = platforms.current_platform
    if not before.is_unspecified():
        yield
        return
    # Modules have it under this name once they are imported.
    import vllm.engine.arg_utils  # noqa: F401

    def put(platform):
        for module in list(sys.modules.values()):
            if "current_platform" in vars(module):
                module.current_platform = platform

    put(CpuPlatform())
    try:
        yield
    finally:
        put(before)


def configured(place: Path, **arguments):
    """The configuration of a server with these arguments."""
    from vllm.engine.arg_utils import EngineArgs

    fixed = {"skip_tokenizer_init": True, "enforce_eager": True, "block_size": 32}
    with platform():
        return EngineArgs(model=str(place), **(fixed | arguments)).create_engine_config()


def changed(config, path, value):
    """The same configuration with one value changed, unchecked."""
    other = copy.deepcopy(config)
    *parts, last = path.split(".")
    at = other
    for part in parts:
        at = getattr(at, part)
    object.__setattr__(at, last, value)
    return other


def bare(kind):
    """An object of a configuration class with the defaults of its fields, unchecked."""
    made = object.__new__(kind)
    for field in dataclasses.fields(kind):
        value = None
        if field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            default = field.default
            factory = getattr(default, "default_factory", None)
            value = factory() if callable(factory) else getattr(default, "default", default)
        object.__setattr__(made, field.name, value)
    return made


if __name__ == "__main__":
    from larder_kv.vllm import weights

    place, arguments = sys.argv[1:]
    print("tag", weights.tag(configured(Path(place), **json.loads(arguments)), None))
    # vLLM's threads need not end in order.
    sys.stdout.flush()
    os._exit(0)

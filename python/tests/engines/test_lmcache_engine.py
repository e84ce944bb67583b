"""LMCache's own server over the adapter, with vLLM's own engine for the CPU: both are killed and
started again.
"""

from __future__ import annotations

import time

import pytest
import torch

pytest.importorskip("lmcache")
pytest.importorskip("vllm")

from lmcache_server import PATIENCE, adapter_of, server  # noqa: E402
from started import Engine, same  # noqa: E402

#: Tokens of a chunk, and chunks of a prompt that are full.
CHUNK_TOKENS, CHUNKS = 128, 7

@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A Llama of random weights, with a tokenizer of its own."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    place = tmp_path_factory.mktemp("model")
    words = {word: at for at, word in enumerate(["<unk>", "<s>", "</s>", *map(str, range(509))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    ).save_pretrained(place)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(place)
    return place


def asked(model, path, log):
    """The answers of an engine to three prompts; then it and the server are killed, once all chunks
    are stored.
    """
    with server(path, log.with_suffix(".server")) as (port, status):
        engine = Engine(log, model, None, blocks=200, lmcache=port)
        try:
            engine.ready()
            answers = [engine.ask("prompt", seed) for seed in range(3)]
            end = time.monotonic() + PATIENCE
            while (adapter := adapter_of(status()))["stored_object_count"] < 3 * CHUNKS:
                assert time.monotonic() < end, adapter
                time.sleep(0.2)
            assert list(engine.memory())
            return answers, adapter
        finally:
            engine.kill()
            assert not list(engine.memory())


def test_a_restart_of_server_and_engine_finds_all_chunks(model, tmp_path):
    first, _ = asked(model, tmp_path / "store", tmp_path / "first")
    assert [answer["cached"] for answer in first] == [0, 0, 0]
    second, adapter = asked(model, tmp_path / "store", tmp_path / "second")
    assert [answer["cached"] for answer in second] == [CHUNKS * CHUNK_TOKENS] * 3
    assert same(second, first)
    assert adapter["chunks"]["load_ok"] == 3 * CHUNKS and adapter["is_healthy"]

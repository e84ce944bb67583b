"""LMCache's own server over the adapter, with vLLM's own engine for the CPU: both are killed and
started again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
import torch

pytest.importorskip("lmcache")
pytest.importorskip("vllm")

from support.lmcache import parameters  # noqa: E402

#: Seconds for a start. Each process imports torch, LMCache or vLLM.
PATIENCE = 600

#: Tokens of a chunk, and chunks of a prompt that are full.
CHUNK_TOKENS, CHUNKS = 128, 7

ENGINE = """
import json, os, sys, time
from vllm import LLM, SamplingParams
from vllm.triton_utils import dispatcher
# It looks into the objects of all modules, and some have no dictionary there.
dispatcher.vars = lambda value: found if hasattr(found := value.__dict__, "get") else {}
def main():
    model, port = sys.argv[1:]
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": int(port), "lmcache.mp.mp_transfer_mode": "lmcache_driven"}
    transfer = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra,
                "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector"}
    engine = LLM(model=model, max_model_len=2048, enforce_eager=True, enable_prefix_caching=True, block_size=32, max_num_seqs=4,
                 num_gpu_blocks_override=200, kv_transfer_config=transfer)
    for number in range(3):
        tokens = [3 + at * (number + 7) % 500 for at in range(1000)]
        sampling = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=1)
        [made] = engine.generate([{"prompt_token_ids": tokens}], sampling)
        [output] = made.outputs
        logprobs = [one[token].logprob for one, token in zip(output.logprobs, output.token_ids)]
        print("SAID", json.dumps([made.num_cached_tokens, list(output.token_ids), logprobs]), flush=True)
    sys.stdin.read()
if __name__ == "__main__":
    main()
"""


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


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def killed(command, log, **more):
    """A process in a group of its own, which is killed at the end."""
    environment = os.environ | {
        "LMCACHE_TRACK_USAGE": "false",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            stderr=file,
            env=environment,
            text=True,
            start_new_session=True,
            **({"stdout": file} | more),
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def server(path, log):
    """LMCache's server; the port that engines connect to, and its status."""
    port, http = free_port(), free_port()
    adapter = {
        "type": "plugin",
        "module_path": "larder_kv.lmcache",
        "class_name": "LarderL2Adapter",
        "adapter_params": parameters(path),
    }
    command = [
        os.path.join(os.path.dirname(sys.executable), "lmcache"),
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    command += [
        "--http-port",
        str(http),
        "--eviction-policy",
        "LRU",
        "--l1-size-gb",
        "0.25",
        "--chunk-size",
        str(CHUNK_TOKENS),
        "--max-workers",
        "1",
    ]
    command += ["--l2-adapter", json.dumps(adapter)]
    with killed(command, log) as process:

        def status():
            import urllib.request

            with urllib.request.urlopen(f"http://127.0.0.1:{http}/status", timeout=30) as answer:
                return json.load(answer)

        end = time.monotonic() + PATIENCE
        while True:
            assert process.poll() is None and time.monotonic() < end, log.read_text()[-3000:]
            with contextlib.suppress(OSError):
                status()
                break
            time.sleep(0.5)
        yield port, status


def adapter_of(status):
    """The adapter's part of the server's status, wherever that has it."""
    if isinstance(status, dict):
        if status.get("type") == "LarderL2Adapter":
            return status
        status = list(status.values())
    if isinstance(status, list):
        return next(filter(None, map(adapter_of, status)), None)
    return None


def asked(model, path, log):
    """What an engine says to three prompts; then it and the server are killed, once all chunks are
    stored.
    """
    with server(path, log.with_suffix(".server")) as (port, status):
        command = [sys.executable, "-c", ENGINE, str(model), str(port)]
        with killed(command, log, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
            said = []
            for line in engine.stdout:
                if line.startswith("SAID"):
                    said.append(json.loads(line[5:]))
                if len(said) == 3:
                    break
            assert len(said) == 3, log.read_text()[-3000:]
            end = time.monotonic() + PATIENCE
            while (adapter := adapter_of(status()))["stored_object_count"] < 3 * CHUNKS:
                assert time.monotonic() < end, adapter
                time.sleep(0.2)
            return said, adapter


def test_a_restart_of_server_and_engine_finds_all_chunks(model, tmp_path):
    first, _ = asked(model, tmp_path / "store", tmp_path / "first")
    assert [cached for cached, *_ in first] == [0, 0, 0]
    second, adapter = asked(model, tmp_path / "store", tmp_path / "second")
    assert [cached for cached, *_ in second] == [CHUNKS * CHUNK_TOKENS] * 3
    assert [said[1:] for said in second] == [said[1:] for said in first]
    assert adapter["chunks"]["load_ok"] == 3 * CHUNKS and adapter["is_healthy"]

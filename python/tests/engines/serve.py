"""A real vLLM engine in this process. Reads commands from standard input, a JSON list a line, and
answers each with a line of JSON.

serve.py MODEL TIER [SHAPE]  TIER: the tier's configuration as JSON, or null for an engine without
                             offloading; with "inside" its connector is one of a MultiConnector's.
                             SHAPE: fields of `Shape` as JSON

["prompt", SEED]           generates after a prompt of 1,000 tokens: cached tokens, tokens, log-probabilities
["prompt", SEED, SALT]     the same, with a cache salt
["answer", IDS, TOKENS]    the same after this prompt, at most so many tokens, with the seconds to the first one
["killed", IDS]            is killed by SIGKILL when the first chunks of this prompt are stored
["keep", IDS, TOKENS]      leaves so many tokens of a prompt in the engine's own prefix cache
["forget"]                 empties that cache
["settle"]                 steps until nothing is being stored
["kv"]                     a hash of the KV of the last prompt's whole blocks, and how many of them there are
["spoil"]                  changes that KV where it lies on the "GPU"
["damage", IDS]            the same for this prompt, in any engine
["counts"]                 the tier's counters
["part"]                   whether this process is the store's owner
["reset"]                  resets the prefix caches, as after new weights
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "LMCACHE_TRACK_USAGE": "false",
    # A thread that waits for another one leaves the processor, of which a test has a part.
    "OMP_WAIT_POLICY": "passive",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # One process: importing vLLM takes most of a start.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}

TOKENS, BLOCK = 1000, 32

ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
# vLLM prints to standard output.
os.dup2(2, 1)


def say(answer):
    ANSWERS.write(json.dumps(answer) + "\n")


@dataclass
class Shape:
    """Sizes of an engine, by default those for the tiny models."""

    #: Tokens of a prompt with its answer, and of a step.
    context: int = 2048
    step: int = 256
    #: Blocks of the "GPU". By default less than three prompts: its own cache cannot answer for all.
    blocks: int = 80
    #: Bytes of the CPU tier.
    tier_bytes: int = 16 << 20
    #: The port of an LMCache server, instead of a tier.
    lmcache: int | None = None
    #: A real model, on whatever this processor is good at.
    is_real: bool = False


def tiering(tier, shape):
    is_inside = tier.pop("inside", False)
    transfer = {
        "kv_connector": "LarderOffloadingConnector",
        "kv_connector_module_path": "larder_kv.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuTieringSpec",
            "spec_module_path": "support.vllm_cpu",
            "cpu_bytes_to_use": shape.tier_bytes,
            "secondary_tiers": [{"type": "larder"} | tier],
        },
    }
    if is_inside:
        transfer = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [transfer]},
        }
    # Names its memory in /dev/shm, which a killed engine leaves behind.
    return transfer | {"engine_id": f"larder-test-{os.getpid()}"}


def lmcache(port):
    from vllm.triton_utils import dispatcher

    # It looks into the objects of all modules, and some have no dictionary there.
    dispatcher.vars = lambda value: found if hasattr(found := value.__dict__, "get") else {}
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": port,
            "lmcache.mp.mp_transfer_mode": "lmcache_driven",
        },
    }


def engine(model, tier, shape):
    from vllm import LLM

    more = {}
    if shape.is_real:
        from support import vllm_attention

        if vllm_attention.is_needed():
            vllm_attention.replace()
            # bf16 is slower there by a factor of four.
            more["dtype"] = "float32"
    transfer = None
    if tier is not None:
        transfer = tiering(tier, shape)
    if shape.lmcache is not None:
        transfer = lmcache(shape.lmcache)
    is_hybrid = "hybrid" in Path(model).name
    return LLM(
        model=model,
        max_model_len=shape.context,
        max_num_batched_tokens=shape.step,
        enforce_eager=True,
        enable_prefix_caching=True,
        block_size=BLOCK,
        max_num_seqs=4,
        num_gpu_blocks_override=(300 if is_hybrid else shape.blocks),
        distributed_executor_backend="uni",
        kv_transfer_config=transfer,
        disable_log_stats=False,
        **more,
    )


class Served:
    def __init__(self, model, tier, shape):
        self.llm = engine(model, tier, shape)
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.requests = []
        self.tier = None
        #: By prompt: the hashes of its blocks.
        self.hashes = {}
        add = self.core.scheduler.add_request

        def add_request(request):
            add(request)
            prompt = tuple(request.prompt_token_ids)
            self.hashes[prompt] = list(request.block_hashes)[: len(prompt) // BLOCK]

        self.core.scheduler.add_request = add_request
        if tier is not None:
            connector = self.core.scheduler.connector
            (connector,) = getattr(connector, "sub_connectors", [connector])
            self.manager = connector.connector_scheduler.manager
            self.tier = self.manager.secondary_tiers[0]
            inherited = self.tier.on_new_request

            def on_new_request(context):
                self.requests.append(context)
                return inherited(context)

            self.tier.on_new_request = on_new_request

    def prompt(self, seed, salt=None):
        tokens = [3 + (at * (seed + 7) + seed) % 500 for at in range(TOKENS)]
        return self.answer(tokens, 8, salt, ignore_eos=True)

    def answer(self, ids, tokens, salt=None, **more):
        from vllm import SamplingParams

        how = SamplingParams(max_tokens=tokens, temperature=0, logprobs=1, **more)
        prompt = {"prompt_token_ids": ids} | ({} if salt is None else {"cache_salt": salt})
        (done,) = self.llm.generate([prompt], how, use_tqdm=False)
        (output,) = done.outputs
        chosen = [step[token].logprob for step, token in zip(output.logprobs, output.token_ids)]
        return {
            "cached": done.num_cached_tokens,
            "tokens": list(output.token_ids),
            "logprobs": chosen,
            "seconds": done.metrics.first_token_latency,
        }

    def killed(self, ids):
        inherited = self.tier.get_finished_jobs

        def get_finished_jobs():
            for finished in inherited():
                os.kill(os.getpid(), signal.SIGKILL)
                yield finished

        self.tier.get_finished_jobs = get_finished_jobs
        self.answer(ids, 1)
        while True:
            self.step()

    def on_device(self, ids, first=0):
        """The "GPU's" blocks of a prompt, from this token on, as far as they are cached."""
        pool = self.core.scheduler.kv_cache_manager.block_pool
        hashes = self.hashes[tuple(ids)][first // BLOCK :]
        found = (pool.get_cached_block(one, [0]) for one in hashes)
        return [blocks[0].block_id for blocks in found if blocks]

    def keep(self, ids, tokens):
        pool = self.core.scheduler.kv_cache_manager.block_pool
        # Several blocks may have the same tokens.
        while blocks := self.on_device(ids, tokens):
            pool.evict_blocks(set(blocks))
        return {}

    def forget(self):
        # Also of blocks that a connector holds: a reset of the cache waits for them.
        pool = self.core.scheduler.kv_cache_manager.block_pool
        pool.evict_blocks(set(range(len(pool.blocks))))
        return {}

    def damage(self, ids):
        blocks = self.on_device(ids)
        for layer in self.core.model_executor.driver_worker.worker.model_runner.kv_caches:
            layer[blocks] = -layer[blocks]
        return {"blocks": len(blocks)}

    def step(self):
        """A short prompt makes steps: an idle engine makes none."""
        from vllm import SamplingParams

        how = SamplingParams(max_tokens=2, ignore_eos=True)
        self.llm.generate([{"prompt_token_ids": [3, 4, 5]}], how, use_tqdm=False)

    def settle(self):
        requests = list(self.requests)
        steps, before = 0, None
        while self.manager.has_pending_work() or before != self.counts():
            before = self.counts()
            self.step()
            steps += 1
        self.requests = requests
        return {"steps": steps}

    def blocks(self):
        """The GPU's blocks of the last prompt, in the order of its keys."""
        pool = self.core.scheduler.kv_cache_manager.block_pool
        positions = self.requests[-1]._offload_key_positions
        found = []
        for key, end in positions.items():
            group = int.from_bytes(key[-4:], "big")
            cached = pool.get_cached_block(key[:-4], [group]) if end <= TOKENS else None
            if cached:
                found.append((group, cached[0].block_id))
        return found

    def pieces(self):
        from support.vllm_cpu import WORKERS

        (worker,) = WORKERS
        for group, block in self.blocks():
            for ref in worker.refs[group]:
                yield worker.gpu[ref.tensor_idx][block]

    def kv(self):
        digest, count = hashlib.sha256(), 0
        for piece in self.pieces():
            digest.update(piece.numpy().tobytes())
            count += 1
        return {"hash": digest.hexdigest(), "pieces": count}

    def spoil(self):
        for piece in self.pieces():
            piece.numpy()[::2] ^= 21
        return {}

    def counts(self):
        return dict(self.tier._meters.totals)

    def part(self):
        return self.tier._keeper.link.store.part

    def reset(self):
        return {"done": bool(self.core.scheduler.reset_prefix_cache(reset_connector=True))}


def main():
    shape = Shape(**json.loads(sys.argv[3])) if len(sys.argv) > 3 else Shape()
    served = Served(sys.argv[1], json.loads(sys.argv[2]), shape)
    say({"ready": True})
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        say(getattr(served, command)(*arguments))


if __name__ == "__main__":
    main()

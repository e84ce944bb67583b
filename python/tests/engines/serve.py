"""A real vLLM engine in this process. Reads commands from standard input, a JSON list a line, and
answers each with a line of JSON.

serve.py MODEL TIER        TIER: the tier's configuration as JSON, or null for an engine without
                           offloading; with "inside" its connector is one of a MultiConnector's

["prompt", SEED]           generates after a prompt of 1,000 tokens: cached tokens, tokens, log-probabilities
["settle"]                 steps until nothing is being stored
["kv"]                     a hash of the KV of the last prompt's whole blocks, and how many of them there are
["spoil"]                  changes that KV where it lies on the "GPU"
["counts"]                 the tier's counters
["part"]                   whether this process is the store's owner
["reset"]                  resets the prefix caches, as after new weights
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # One process: importing vLLM takes most of a start.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}

TOKENS, BLOCK = 1000, 32

ANSWERS = os.fdopen(os.dup(1), "w", buffering=1)
# vLLM prints to standard output.
os.dup2(2, 1)


def say(answer):
    ANSWERS.write(json.dumps(answer) + "\n")


def engine(model, tier):
    from vllm import LLM

    transfer = None
    if tier is not None:
        is_inside = tier.pop("inside", False)
        transfer = {
            "kv_connector": "LarderOffloadingConnector",
            "kv_connector_module_path": "larder_kv.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "spec_name": "CpuTieringSpec",
                "spec_module_path": "support.vllm_cpu",
                "cpu_bytes_to_use": 16 << 20,
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
        transfer["engine_id"] = f"larder-test-{os.getpid()}"
    is_hybrid = "hybrid" in Path(model).name
    return LLM(
        model=model,
        max_model_len=2048,
        max_num_batched_tokens=256,
        enforce_eager=True,
        enable_prefix_caching=True,
        block_size=BLOCK,
        max_num_seqs=4,
        # Less than three prompts: the GPU's own cache cannot answer for all.
        num_gpu_blocks_override=(80 if not is_hybrid else 300),
        distributed_executor_backend="uni",
        kv_transfer_config=transfer,
        disable_log_stats=False,
    )


class Served:
    def __init__(self, model, tier):
        self.llm = engine(model, tier)
        self.core = self.llm.llm_engine.engine_core.engine_core
        self.requests = []
        self.tier = None
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

    def prompt(self, seed):
        from vllm import SamplingParams

        tokens = [3 + (at * (seed + 7) + seed) % 500 for at in range(TOKENS)]
        how = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=1)
        (done,) = self.llm.generate([{"prompt_token_ids": tokens}], how, use_tqdm=False)
        (output,) = done.outputs
        chosen = [step[token].logprob for step, token in zip(output.logprobs, output.token_ids)]
        return {
            "cached": done.num_cached_tokens,
            "tokens": list(output.token_ids),
            "logprobs": chosen,
        }

    def settle(self):
        """Short prompts make steps: an idle engine makes none."""
        from vllm import SamplingParams

        requests = list(self.requests)
        steps, before = 0, None
        while self.manager.has_pending_work() or before != self.counts():
            before = self.counts()
            self.llm.generate(
                [{"prompt_token_ids": [3, 4, 5]}],
                SamplingParams(max_tokens=2, ignore_eos=True),
                use_tqdm=False,
            )
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
    served = Served(sys.argv[1], json.loads(sys.argv[2]))
    say({"ready": True})
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        say(getattr(served, command)(*arguments))


if __name__ == "__main__":
    main()

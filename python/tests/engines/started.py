"""An engine in a process of its own (`serve.py`), and a store whose bytes are spoilt."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


class Engine:
    def __init__(self, log, model, tier, **more):
        self.log = open(log, "w")
        command = [sys.executable, HERE / "serve.py", str(model), *map(json.dumps, (tier, more))]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True
        )

    def read(self):
        line = self.process.stdout.readline()
        assert line, f"the engine ended: {Path(self.log.name).read_text()[-3000:]}"
        return json.loads(line)

    def ready(self):
        assert self.read() == {"ready": True}
        return self

    def start(self, *command):
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def ask(self, *command):
        self.start(*command)
        return self.read()

    def kill(self):
        self.process.kill()
        self.process.wait()
        for left in self.memory():
            left.unlink(missing_ok=True)
        self.log.close()

    def memory(self):
        """What a killed engine leaves in shared memory: vLLM's CPU tier, and the KV that LMCache's
        server has mapped.
        """
        pid = self.process.pid
        for name in (f"vllm_offload_larder-test-{pid}*", f"lmcache_kv_{pid}_*"):
            yield from Path("/dev/shm").glob(name)


def same(answers, others):
    """Whether tokens and log-probabilities are equal."""
    return [(one["tokens"], one["logprobs"]) for one in answers] == [
        (one["tokens"], one["logprobs"]) for one in others
    ]


def flip_all(file):
    """Flips a bit in each page of a store, in what a page of KV has: not in headers and
    descriptors, which have zeros.
    """
    flipped = 0
    with open(file, "r+b") as opened:
        while block := opened.read(4096):
            if len(set(block)) > 128:
                opened.seek(-2048, os.SEEK_CUR)
                opened.write(bytes([block[2048] ^ 1]))
                opened.seek(2047, os.SEEK_CUR)
                flipped += 1
    return flipped

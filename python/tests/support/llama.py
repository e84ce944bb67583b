"""The proxy of examples/llama-larder, and llama-server, as processes."""

import json
import os
import signal
import struct
import subprocess
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PROXY = ROOT / "examples/llama-larder/llama-larder"
CACHE = Path(os.environ.get("LARDER_PYTHON_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "larder/python")
#: Of `examples/llama-larder/fetch`.
LLAMA = Path(os.environ.get("LARDER_LLAMA") or CACHE.parent / "llama")


def post(url, path, body):
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def complete(url, tokens, words=4):
    return post(url, "/completion", {"prompt": tokens, "n_predict": words, "temperature": 0})


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


def gguf(path, **fields):
    """A model's file with these fields and no tensor."""
    values = b""
    for name, value in fields.items():
        kind = struct.pack("<I", 8) + text(value) if isinstance(value, str) else struct.pack("<II", 4, value)
        values += text(name) + kind
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, len(fields)) + values)
    return path


#: Processes that a failed test leaves.
STARTED = []


def end_all():
    while STARTED:
        process = STARTED.pop()
        process.kill()
        process.wait()


class Proxy:
    """The proxy, as a process."""

    def __init__(self, tmp_path, server, model, size="256MiB"):
        self.slots = tmp_path / "slots"
        self.slots.mkdir(exist_ok=True)
        words = ["--server", server, "--model", model, "--slots", self.slots, "--store", tmp_path / "store", "--size", size]
        self.process = subprocess.Popen(
            [sys.executable, PROXY, *words, "--listen", "127.0.0.1:0", "--build", "b11549"], stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL, text=True)
        STARTED.append(self.process)
        self.lines = []
        while not self.lines or "serving" not in self.lines[-1]:
            line = self.process.stderr.readline()
            assert line, self.lines
            self.lines.append(line)
        self.url = self.lines[-1].split()[-1]

    def end(self):
        """Ends it as Ctrl-C does. Returns its log."""
        self.process.send_signal(signal.SIGINT)
        _, rest = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, rest
        assert not any(self.slots.iterdir())
        return "".join(self.lines) + rest


class Llama:
    """The real llama-server, as a process."""

    def __init__(self, slots):
        slots.mkdir(exist_ok=True)
        words = [LLAMA / "venv/bin/python", Path(__file__).parent / "llama_server.py", LLAMA / "model.gguf", f"{slots}/", "4096"]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        STARTED.append(self.process)
        self.url = next(line.strip() for line in self.process.stdout if line.startswith("http"))

    def end(self):
        self.process.kill()
        self.process.wait()


def story(url, count):
    said = "".join(f"Rule {at}: the clerk on shift {at % 7} writes {at * 37 % 101} lines about topic {at * at % 89}. " for at in range(400))
    return post(url, "/tokenize", {"content": said, "add_special": True})["tokens"][:count]

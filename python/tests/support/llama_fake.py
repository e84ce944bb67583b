"""A server with llama-server's paths and one slot, whose words follow from its tokens and from the state of its slot.

Its state is made of its tokens; words that follow from another state are wrong. `counts` has the tokens that it computed."""

import hashlib
import json
import struct
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

#: Bytes of the state of a token.
STATE = 62 * 32
CONTEXT = 4096


def state_of(tokens, begin=0):
    """The state of the tokens from `begin` on."""
    digest = lambda at: hashlib.sha256(struct.pack("<2i", at, tokens[at])).digest()  # noqa: E731
    return b"".join(digest(at) * (STATE // 32) for at in range(begin, len(tokens)))


def word(tokens, state):
    """The word behind some tokens."""
    return hashlib.sha256(struct.pack(f"<{len(tokens)}i", *tokens) + hashlib.sha256(state).digest()).digest()[0]


class Fake(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, slots, total_slots=1):
        super().__init__(("127.0.0.1", 0), Handler)
        self.slots, self.total_slots = Path(slots), total_slots
        self.tokens, self.state, self.computed = [], b"", []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, body, status=200):
        text = json.dumps(body, separators=(",", ":")).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self):
        server = self.server
        if self.path == "/props":
            settings = {"n_ctx": CONTEXT}
            self.answer({"total_slots": server.total_slots, "build_info": "b1-fake", "default_generation_settings": settings})
        else:
            self.answer([])

    def do_POST(self):
        server = self.server
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            self.answer({"tokens": [int.from_bytes(word.encode()[:3], "little") for word in asked["content"].split()]})
        elif self.path == "/completion":
            self.answer(self.complete(asked))
        elif "action=save" in self.path:
            tokens = server.tokens
            words = [-1, 1, len(tokens), *tokens, 0]
            head = struct.pack(f"<4sII{len(words)}i", b"qsgg", 4, len(words), *words)
            (server.slots / asked["filename"]).write_bytes(head + server.state)
            self.answer({"n_saved": len(tokens)})
        else:
            file = (server.slots / asked["filename"]).read_bytes()
            count, = struct.unpack_from("<I", file, 8)
            words = struct.unpack_from(f"<{count}i", file, 12)
            # As llama-server: the bytes of the state are not checked.
            server.tokens, server.state = list(words[3:-1]), file[12 + 4 * count:]
            self.answer({"n_restored": len(server.tokens)})

    def complete(self, asked):
        server, tokens = self.server, list(asked["prompt"])
        same = (at for at, (a, b) in enumerate(zip(server.tokens, tokens)) if a != b)
        cached = min(next(same, len(server.tokens)), len(server.tokens), len(tokens) - 1)
        server.computed.append(len(tokens) - cached)
        server.state = server.state[:cached * STATE] + state_of(tokens, cached)
        words = []
        for _ in range(min(asked.get("n_predict", 1), 64)):
            words.append(word(tokens, server.state))
            tokens.append(words[-1])
            server.state += state_of(tokens, len(tokens) - 1)
        # The last word is not computed yet.
        server.tokens = tokens[:-1]
        server.state = server.state[:len(server.tokens) * STATE]
        timings = {"cache_n": cached, "prompt_n": len(asked["prompt"]) - cached, "predicted_n": len(words)}
        return {"content": " ".join(map(str, words)), "timings": timings}

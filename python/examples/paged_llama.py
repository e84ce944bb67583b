"""A small engine over ``larder_kv``: a Llama in torch, with paged KV in three tiers.

L1 is one tensor a layer on the device, L2 is page-locked host memory, L3 is a store on NVMe.
:class:`Engine` computes a prompt in chunks, writes its pages back beside the compute, and answers
greedily. A request whose first pages are stored computes only the rest: layer ``i`` begins when the
pages of layer ``i`` are there, and attention reads the pages of the pool, in any order of pages.

Needs torch 2.5 or later, and no other package. ``ttft.py`` measures it."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any, NamedTuple, Sequence

import torch
import torch.nn.functional as F
from larder_kv.device import Device, Tickets
from larder_kv.store import Status, Store
from torch.nn.attention.bias import causal_lower_right

#: Tokens of a page.
PAGE = 64
#: Pages of a job of the store: reads of one job are loaded to the device beside the reads of the next.
JOB = 16


class Shape(NamedTuple):
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    theta: float
    epsilon: float = 1e-5


SHAPES = {
    "tiny": Shape(3, 64, 4, 2, 16, 128, 512, 10_000.0),
    "8b": Shape(32, 4096, 32, 8, 128, 14_336, 128_256, 500_000.0),
}


class Layer(NamedTuple):
    norm: torch.Tensor
    #: The rows of Q, K and V.
    qkv: torch.Tensor
    out: torch.Tensor
    inner_norm: torch.Tensor
    #: The rows of gate and up.
    gate_up: torch.Tensor
    down: torch.Tensor


class Model:
    """Weights by the names that a Hugging Face folder of a Llama gives them, on the device."""

    def __init__(self, shape: Shape, weights: dict[str, torch.Tensor]):
        self.shape = shape
        self.embedding = weights["model.embed_tokens.weight"]
        self.norm = weights["model.norm.weight"]
        self.head = weights.get("lm_head.weight", self.embedding)
        self.layers = []
        for number in range(shape.layers):
            of = {name: weights.pop(f"model.layers.{number}.{name}.weight") for name in NAMES}
            together = lambda *names: torch.cat([of.pop(name) for name in names])
            self.layers.append(
                Layer(
                    of["input_layernorm"],
                    together("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                    of["self_attn.o_proj"],
                    of["post_attention_layernorm"],
                    together("mlp.gate_proj", "mlp.up_proj"),
                    of["mlp.down_proj"],
                )
            )

    @classmethod
    def random(cls, shape: Shape, where: str, dtype: torch.dtype = torch.bfloat16) -> Model:
        """The same weights in each process on the same kind of device."""
        generator = torch.Generator(where).manual_seed(1)
        noise = lambda *sizes: torch.empty(sizes, dtype=dtype, device=where).normal_(0, 0.02, generator=generator)
        ones = torch.ones(shape.hidden, dtype=dtype, device=where)
        rows, columns = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        sizes = {
            "self_attn.q_proj": (rows, shape.hidden),
            "self_attn.k_proj": (columns, shape.hidden),
            "self_attn.v_proj": (columns, shape.hidden),
            "self_attn.o_proj": (shape.hidden, rows),
            "mlp.gate_proj": (shape.inner, shape.hidden),
            "mlp.up_proj": (shape.inner, shape.hidden),
            "mlp.down_proj": (shape.hidden, shape.inner),
        }
        weights = {f"{name}.weight": noise(shape.vocabulary, shape.hidden) for name in ("model.embed_tokens", "lm_head")}
        weights["model.norm.weight"] = ones
        for number in range(shape.layers):
            for name in NAMES:
                made = noise(*sizes[name]) if name in sizes else ones
                weights[f"model.layers.{number}.{name}.weight"] = made
        return cls(shape, weights)

    @classmethod
    def packed(cls, index: dict[str, Any], blocks: bytes, where: str, dtype: torch.dtype = torch.bfloat16) -> Model:
        """The model that scripts/smollm2_parts.py has written."""
        config = index["config"]
        shape = Shape(
            config["num_hidden_layers"],
            config["hidden_size"],
            config["num_attention_heads"],
            config["num_key_value_heads"],
            config["head_dim"],
            config["intermediate_size"],
            config["vocab_size"],
            config["rope_theta"],
            config["rms_norm_eps"],
        )
        whole = torch.frombuffer(bytearray(blocks), dtype=torch.uint8)
        weights = {}
        for tensor in index["tensors"]:
            some = whole[tensor["at"] : tensor["at"] + tensor["bytes"]].to(where)
            values = dequantized(some, tensor["type"]).view(tensor["shape"])
            if tensor["interleaved"]:
                values = straight(values, tensor["interleaved"])
            weights[tensor["name"]] = values.to(dtype)
        return cls(shape, weights)


NAMES = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def dequantized(blocks: torch.Tensor, kind: str) -> torch.Tensor:
    """The values of a GGUF tensor, in float32: blocks of 32 values."""
    half = lambda rows: rows.contiguous().view(torch.float16).float()
    if kind == "F32":
        return blocks.view(torch.float32)
    if kind == "Q8_0":
        rows = blocks.view(-1, 34)
        return half(rows[:, :2]) * rows[:, 2:].contiguous().view(torch.int8).float()
    if kind == "Q4_1":
        rows = blocks.view(-1, 20)
        nibbles = torch.cat([rows[:, 4:] & 15, rows[:, 4:] >> 4], dim=1)
        return half(rows[:, :2]) * nibbles.float() + half(rows[:, 2:4])
    raise ValueError(f"no blocks of the kind {kind} are known")


def straight(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF has the rows of Q and K in the order of interleaved rotary embeddings."""
    return rows.view(heads, rows.shape[0] // heads // 2, 2, -1).transpose(1, 2).reshape(rows.shape)


def read_packed(folder: Path) -> tuple[dict[str, Any], bytes]:
    """Index and blocks of a packed model."""
    index = json.loads((folder / "smollm2.json").read_text(encoding="ascii"))
    blocks = b"".join((folder / name).read_bytes() for name in index["parts"])
    if hashlib.sha256(blocks).hexdigest() != index["sha256"]:
        raise ValueError(f"{folder}: the parts of the model are not those that were packed")
    return index, blocks


def keys_of(prompt: Sequence[int]) -> list[bytes]:
    """A key for each whole page, which names the tokens of the page and all before it."""
    keys, key = [], b""
    for begin in range(0, len(prompt) - PAGE + 1, PAGE):
        tokens = b"".join(token.to_bytes(4, "little") for token in prompt[begin : begin + PAGE])
        key = hashlib.sha256(key + tokens).digest()
        keys.append(key)
    return keys


class Held(NamedTuple):
    """The pages of a prompt that are in L1, or arrive there by these copies."""

    pages: int = 0
    copies: Sequence[Tickets] = ()


class Answer(NamedTuple):
    tokens: list[int]
    #: A row for each token.
    logits: torch.Tensor
    #: From the request to the first token.
    seconds: float
    #: Pages that were not computed.
    held: int


class Engine:
    """``pages`` of L1 and of L2, and a store with a namespace for the model's pages. KV is bf16;
    a model that computes in float32, as a CPU does best, has the same pages."""

    def __init__(self, model: Model, device: Device, pages: int, store: Store, name: str, chunk: int = 2048):
        shape, dtype = model.shape, torch.bfloat16
        self.model, self.where, self.chunk = model, model.embedding.device, chunk
        # K and V side by side: a page is one piece of L2, as rows of a region must be.
        sizes = (pages * PAGE, 2 * shape.kv_heads, shape.head_dim)
        self.kv = [torch.zeros(sizes, dtype=dtype, device=self.where) for _ in range(shape.layers)]
        self.pool = device.pool(kv=self.kv, page_tokens=PAGE)
        self.host = self.pool.host_pool(pages)
        self.stream = None
        if device.kind == "cuda":
            # All later work of this thread: the default stream would wait for other streams.
            torch.cuda.synchronize()
            self.stream = torch.cuda.Stream()
            torch.cuda.set_stream(self.stream)
        size = self.pool.page_bytes
        self.space = store.namespace(
            model=name, weights=name, dtype=str(dtype), layout="layer, token, KV", page_tokens=PAGE, parts=[size]
        )
        self.region = store.register(self.host.address, self.host.nbytes, size, owner=self.host, pinned=True)
        self.queue = store.queue()
        even = torch.arange(0, shape.head_dim, 2, device=self.where, dtype=torch.float32)
        self.frequencies = shape.theta ** -(even / shape.head_dim)

    def answer(self, prompt: Sequence[int], table: Sequence[int], begun: float, held: Held, steps: int) -> Answer:
        """Computes what is not held of a prompt, whose pages are those of ``table``, and answers
        ``steps`` tokens greedily."""
        pages = torch.tensor(table, device=self.where)
        logits = [self.prefill(prompt, pages, held)]
        tokens = [logits[0].argmax().view(1)]
        tokens[0].item()
        seconds = time.perf_counter() - begun
        for at in range(len(prompt), len(prompt) + steps - 1):
            logits.append(self.forward(tokens[-1], at, pages))
            tokens.append(logits[-1].argmax().view(1))
        return Answer(torch.cat(tokens).tolist(), torch.stack(logits).cpu(), seconds, held.pages)

    def prefill(
        self, prompt: Sequence[int], pages: torch.Tensor, held: Held, writer: Writer | None = None
    ) -> torch.Tensor:
        """The logits of the last token. ``pages`` is the table, on the device."""
        # One copy to the device: each waits for the stream.
        tokens, copies, logits = torch.tensor(prompt, device=self.where), held.copies, None
        for begin in range(held.pages * PAGE, len(prompt), self.chunk):
            end = min(begin + self.chunk, len(prompt))
            logits = self.forward(tokens[begin:end], begin, pages, copies)
            # Later work of the stream is behind its waits for all layers.
            copies = ()
            if writer is not None:
                writer.add(begin // PAGE, end // PAGE)
        return logits

    @torch.inference_mode()
    def forward(
        self, tokens: torch.Tensor, begin: int, table: torch.Tensor, copies: Sequence[Tickets] = ()
    ) -> torch.Tensor:
        """One chunk, which begins at the token ``begin`` of its sequence. Puts its KV into the pages
        of ``table``, and returns the logits of its last token."""
        shape, end = self.model.shape, begin + len(tokens)
        places = torch.arange(begin, end, device=self.where)
        slots = table[places // PAGE] * PAGE + places % PAGE
        used = table[: -(-end // PAGE)]
        angles = torch.outer(places.float(), self.frequencies).repeat(1, 2)
        turn = angles.cos()[:, None], angles.sin()[:, None]
        mask = self.mask(len(tokens), end)
        x = F.embedding(tokens, self.model.embedding)
        for number, layer in enumerate(self.model.layers):
            qkv = F.linear(normal(x, layer.norm, shape), layer.qkv).view(len(tokens), -1, shape.head_dim)
            q, k, v = qkv.split([shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
            for copy in copies:
                self.wait(copy, number)
            kv = self.kv[number]
            kv.index_copy_(0, slots, torch.cat([rotated(k, turn), v], dim=1).to(kv.dtype))
            # The pages of the pool, in the order of the sequence.
            there = kv.view(-1, PAGE, *kv.shape[1:])[used].view(-1, *kv.shape[1:])[:end].transpose(0, 1).to(x.dtype)
            k, v = there[None, : shape.kv_heads], there[None, shape.kv_heads :]
            q = rotated(q, turn).transpose(0, 1)[None]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
            x = x + F.linear(out[0].transpose(0, 1).reshape(len(tokens), -1), layer.out)
            gate, up = F.linear(normal(x, layer.inner_norm, shape), layer.gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, layer.down)
        return F.linear(normal(x[-1], self.model.norm, shape), self.model.head).float()

    def mask(self, tokens: int, end: int) -> Any:
        """Of attention: the last ``tokens`` of ``end``, each with all before it."""
        if tokens == 1:
            return None
        if self.stream is not None:
            return causal_lower_right(tokens, end)
        return torch.ones(tokens, end, dtype=torch.bool).tril(end - tokens)

    def wait(self, copy: Tickets, layer: int | None) -> None:
        if self.stream is None:
            copy.wait(layer)
        else:
            copy.wait_on_stream(layer, self.stream)

    def load(self, rows: Sequence[int], pages: Sequence[int]) -> Held:
        """From L2."""
        return Held(len(rows), [self.pool.load(self.host, rows, pages, after=self.stream)])

    def read(self, keys: Sequence[bytes], rows: Sequence[int], pages: Sequence[int]) -> Held:
        """From L3 by way of L2. A page that cannot be read ends the prefix; the rest is computed."""
        found = self.space.longest_prefix(keys)
        copies, good, jobs = [], found, {}
        for begin in range(0, found, JOB):
            some = slice(begin, min(begin + JOB, found))
            jobs[self.queue.submit_get(self.space, keys[some], self.region, rows[some])] = some
        while jobs:
            self.queue.wait()
            for done in self.queue.poll():
                some = jobs.pop(done.job)
                bad = [at for at, status in enumerate(done.statuses, some.start) if status != Status.OK]
                good = min([good, *bad])
                # Pages without content are loaded too: they are behind the prefix, and computed.
                copies.append(self.pool.load(self.host, rows[some], pages[some], after=self.stream))
        return Held(good, copies)

    def clear(self) -> None:
        """Makes all of L1 NaN: a page that does not arrive is noticed."""
        for kv in self.kv:
            kv.fill_(float("nan"))


class Writer:
    """Writes the pages of a prompt to L2 and L3, beside the compute of its next chunks."""

    def __init__(self, engine: Engine, keys: Sequence[bytes], rows: Sequence[int], pages: Sequence[int]):
        self.engine, self.keys, self.rows, self.pages = engine, keys, rows, pages
        self.copies: list[tuple[Tickets, slice]] = []

    def add(self, begin: int, end: int) -> None:
        """The pages from ``begin`` on are computed, or will be by earlier work of the stream."""
        engine, end = self.engine, min(end, len(self.keys))
        for at in range(begin, end, JOB):
            some = slice(at, min(at + JOB, end))
            copy = engine.pool.store(engine.host, self.rows[some], self.pages[some], after=engine.stream)
            self.copies.append((copy, some))
        self.submit(waits=False)

    def submit(self, waits: bool) -> None:
        """Gives the store the pages that are in L2, the head of the chain first."""
        while self.copies and (waits or self.copies[0][0].done()):
            copy, some = self.copies.pop(0)
            copy.wait()
            before = self.keys[some.start - 1] if some.start else None
            keys, rows = self.keys[some], self.rows[some]
            self.engine.queue.submit_put(
                self.engine.space, keys, self.engine.region, rows, before=before, depth=some.start, wait=60.0
            )

    def finish(self) -> None:
        """Until all pages are stored."""
        self.submit(waits=True)
        self.engine.queue.drain()
        statuses = {status for done in self.engine.queue.poll() for status in done.statuses}
        if statuses - {Status.OK, Status.DUPLICATE}:
            raise RuntimeError(f"the store did not take all pages: {[Status(status).name for status in statuses]}")


def normal(x: torch.Tensor, weight: torch.Tensor, shape: Shape) -> torch.Tensor:
    return F.rms_norm(x, (shape.hidden,), weight, shape.epsilon)


def rotated(x: torch.Tensor, turn: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    cosine, sine = turn
    wide = x.float()
    left, right = wide.chunk(2, dim=-1)
    return (wide * cosine + torch.cat([-right, left], dim=-1) * sine).to(x.dtype)

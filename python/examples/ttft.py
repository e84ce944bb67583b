#!/usr/bin/env python3
"""Time to the first token of a Llama, with the KV of its prompt computed, in L1, in L2, and in L3 after a restart.

    ttft.py --shape 8b|smollm2|tiny [--tokens 2048,8192] [--store DIR] [--device cpu|cuda] [--rounds 3] [--json FILE]

The engine is paged_llama.py. `8b` has the sizes of Llama-3.1-8B and random weights, made on the device; `smollm2` is a real model
(--model: the folder that scripts/smollm2_parts.py wrote); `tiny` is for tests. DIR gets a store while this runs.

A prompt of N tokens has all whole pages before its last token stored: these are loaded, the rest (1 to 64 tokens) is computed. A first
process computes, stores, and loads from L1 and L2; a new process for each round reads from L3, with the page cache of the store's files
dropped (--drop-caches: that of the whole machine, if this is allowed). Logits of all answered tokens are compared bit by bit with those
from L1, whose pages were computed by a prefill of as many tokens as are loaded. In a control one page gets the bytes of another: it has
to change the logits. All of L1 is NaN before each load, and pages are scattered.

Shares of TTFT: the time of a bare copy to the device (link) and of bare reads of a file in DIR (disk) of the same number of bytes in
the same run, divided by TTFT. Ends with 1 if logits differ, a control changes nothing, or pages are missing."""

import argparse
import concurrent.futures
import json
import math
import mmap
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOKENS = {"tiny": "512,2048", "8b": "2048,8192,32768", "smollm2": "1024,2048,8128"}
#: Bytes that a bare copy moves, and bare reads.
BARE, BARE_BLOCK, BARE_THREADS = 1 << 30, 4 << 20, 8
MIB = 1 << 20
NAMES = {"computed": "computed", "l1": "L1", "l2": "L2", "l3": "L3, cold"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(TOKENS), required=True)
    parser.add_argument("--tokens", help="lengths of prompts, with commas between")
    parser.add_argument("--store", metavar="DIR", help="on the disk to measure (default: a temporary directory)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--model", metavar="DIR", type=Path, default=HERE, help="of the parts of smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--answer", type=int, default=48, help="tokens that are answered")
    parser.add_argument("--chunk", type=int, help="tokens of a step of prefill (2048; on a CPU 512)")
    parser.add_argument("--drop-caches", action="store_true")
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("--part", choices=("compute", "read"), help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.tokens = [int(number) for number in (options.tokens or TOKENS[options.shape]).split(",")]
    if min(options.tokens) < 129:
        parser.error("a prompt has at least 129 tokens: two pages and a token")
    options.chunk = options.chunk or (2048 if options.device == "cuda" else 512)
    if options.part:
        found = {"compute": computed, "read": read}[options.part](Bench(options))
        (options.work / "found.json").write_text(json.dumps(found))
        return 0
    with tempfile.TemporaryDirectory(prefix="larder-ttft.", dir=options.store) as work:
        first = process("compute", work)
        rounds = [process("read", work) for _ in range(options.rounds)]
    result = merged(options, first, rounds)
    print(table(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    for fault in result["faults"]:
        print(f"ttft: {fault}", file=sys.stderr)
    return 1 if result["faults"] else 0


def process(part, work):
    """What a process of its own found."""
    subprocess.run([sys.executable, __file__, *sys.argv[1:], "--part", part, "--work", work], check=True)
    return json.loads((Path(work) / "found.json").read_text())


class Bench:
    """A model, a store, an engine, and prompts."""

    def __init__(self, options):
        # One algorithm for a product of matrices, in all streams and processes.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        import paged_llama
        import torch
        from larder_kv.device import Device
        from larder_kv.store import Store

        self.torch, self.options, self.llama = torch, options, paged_llama
        self.is_cuda = options.device == "cuda"
        device = Device("cuda" if self.is_cuda else "host")
        self.index = name = None
        dtype = torch.bfloat16 if self.is_cuda else torch.float32
        if options.shape == "smollm2":
            self.index, blocks = paged_llama.read_packed(options.model)
            name = self.index["sha256"]
            model = paged_llama.Model.packed(self.index, blocks, options.device, dtype)
        else:
            name = f"random {options.shape}"
            model = paged_llama.Model.random(paged_llama.SHAPES[options.shape], options.device, dtype)
        self.shape = model.shape
        self.page_bytes = paged_llama.PAGE * 2 * 2 * self.shape.layers * self.shape.kv_heads * self.shape.head_dim
        self.pages = math.ceil((max(options.tokens) + options.answer) / paged_llama.PAGE)
        stored = self.page_bytes * sum(map(self.held, options.tokens))
        size = 256 * MIB + stored + stored // 4
        self.store = Store.attach(options.work, size=size, page_bytes=self.page_bytes)
        self.engine = paged_llama.Engine(model, device, self.pages, self.store, name, options.chunk)
        on_cpu = f"{device.name}, {torch.get_num_threads()} threads, computes in float32"
        self.device_name = torch.cuda.get_device_name() if self.is_cuda else on_cpu

    def held(self, tokens):
        """Pages of a prompt that are stored: the last token is computed."""
        return (tokens - 1) // self.llama.PAGE

    def prompt(self, tokens, seed=0):
        if self.index is None or seed:
            numbers = random.Random(tokens + seed)
            return [numbers.randrange(self.shape.vocabulary) for _ in range(tokens)]
        parts = self.index["prompt"]
        context, document = self.index["config"]["max_position_embeddings"], tokens - len(parts["head"]) - len(parts["tail"])
        if tokens + self.options.answer > context or document > len(parts["document"]):
            sys.exit(f"ttft: {tokens} tokens and an answer are more than the model's context")
        return parts["head"] + parts["document"][:document] + parts["tail"]

    def words(self, tokens):
        """The text of an answer, to its end."""
        if self.index is None:
            return None
        end = self.index["config"]["eos_token_id"]
        tokens = tokens[: tokens.index(end)] if end in tokens else tokens
        return b"".join(self.index["vocabulary"][token].encode("latin-1") for token in tokens).decode("utf-8", "replace")

    def scattered(self, seed):
        """All pages of a pool, in an order of its own."""
        return random.Random(seed).sample(range(self.pages), self.pages)

    def answer(self, prompt, pages, fetch):
        """Fetches KV, and answers: timed together."""
        self.settle()
        begun = time.perf_counter()
        return self.engine.answer(prompt, pages, begun, fetch(), self.options.answer)

    def settle(self):
        if self.is_cuda:
            self.torch.cuda.synchronize()

    def warm(self, tokens):
        """The kernels of an answer with KV from L2, none of which is of a prompt that is measured."""
        held, pages = self.held(tokens), self.scattered(tokens)
        self.engine.clear()
        self.answer(self.prompt(tokens, seed=1), pages, lambda: self.engine.load(range(held), pages[:held]))
        self.settle()

    def spoil(self, row, by):
        """A page of L2 gets the bytes of another, which is its neighbour in the prompt."""
        memory = self.torch.frombuffer(self.engine.host.view(), dtype=self.torch.uint8).view(self.pages, self.page_bytes)
        kept = memory[row].clone()
        memory[row] = memory[by]
        return lambda: memory[row].copy_(kept)

    def different(self, answer, reference):
        """How the logits differ from those of L1, or None."""
        bits = lambda logits: logits.view(self.torch.int32)
        if self.torch.equal(bits(answer.logits), bits(reference["logits"])) and answer.tokens == reference["tokens"]:
            return None
        return f"logits differ by up to {float((answer.logits - reference['logits']).abs().max()):.3g}"

    def controlled(self, prompt, rows, pages, reference):
        """Whether a spoilt page changes the first logits."""
        middle = self.held(len(prompt)) // 2
        undo = self.spoil(rows[middle], rows[middle - 1])
        self.engine.clear()
        held = self.held(len(prompt))
        spoilt = self.answer(prompt, pages, lambda: self.engine.load(rows[:held], pages[:held]))
        undo()
        return not self.torch.equal(spoilt.logits[0], reference["logits"][0])


def computed(bench):
    """The part of the first process: computes and stores, then answers from L1 and L2."""
    engine, torch, found = bench.engine, bench.torch, {"prompts": []}
    for tokens in bench.options.tokens:
        prompt, held = bench.prompt(tokens), bench.held(tokens)
        pages, rows, others = (bench.scattered(tokens + seed) for seed in (1, 2, 3))
        bench.warm(tokens)
        if bench.is_cuda:
            bench.answer(bench.prompt(tokens, seed=1), pages, bench.llama.Held)
        nothing = [bench.answer(prompt, pages, bench.llama.Held) for _ in range(bench.options.rounds)]
        # The prefix alone, as a server has computed it whose next request is the whole prompt.
        bench.settle()
        begun = time.perf_counter()
        writer = bench.llama.Writer(engine, bench.llama.keys_of(prompt)[:held], rows[:held], pages[:held])
        device_table = torch.tensor(pages, device=engine.where)
        engine.prefill(prompt[: held * bench.llama.PAGE], device_table, bench.llama.Held(), writer)
        bench.settle()
        primed = time.perf_counter() - begun
        writer.finish()
        stored = time.perf_counter() - begun
        from_l1 = [bench.answer(prompt, pages, lambda: bench.llama.Held(held)) for _ in range(bench.options.rounds)]
        reference = {"logits": from_l1[0].logits, "tokens": from_l1[0].tokens}
        torch.save(reference, bench.options.work / f"{tokens}.reference")
        from_l2 = []
        for _ in range(bench.options.rounds):
            engine.clear()
            from_l2.append(bench.answer(prompt, others, lambda: engine.load(rows[:held], others[:held])))
        found["prompts"].append(
            {
                "tokens": tokens,
                "pages": held,
                "computed": [answer.seconds for answer in nothing],
                "primed": primed,
                "stored": stored,
                "l1": of_rounds(bench, from_l1, reference),
                "l2": of_rounds(bench, from_l2, reference)
                | {"control": bench.controlled(prompt, rows, others, reference)},
                "words": {"computed": bench.words(nothing[0].tokens), "l1": bench.words(from_l1[0].tokens)},
            }
        )
    found |= {"link": bare_copy(bench), "page_bytes": bench.page_bytes}
    found |= {"device": bench.device_name, "torch": torch.__version__}
    bench.store.flush()
    bench.store.close()
    return found


def of_rounds(bench, answers, reference):
    differences = [bench.different(answer, reference) for answer in answers]
    return {
        "seconds": [answer.seconds for answer in answers],
        "pages": min(answer.held for answer in answers),
        "difference": next(filter(None, differences), None),
    }


def read(bench):
    """The part of a new process: answers from L3."""
    engine, torch, found = bench.engine, bench.torch, {"prompts": []}
    for tokens in bench.options.tokens:
        prompt, held = bench.prompt(tokens), bench.held(tokens)
        pages, rows = bench.scattered(tokens + 4), bench.scattered(tokens + 5)
        reference = torch.load(bench.options.work / f"{tokens}.reference", weights_only=True)
        bench.warm(tokens)
        engine.clear()
        found["cache"] = cold(bench.options)
        keys = bench.llama.keys_of(prompt)[:held]
        answer = bench.answer(prompt, pages, lambda: engine.read(keys, rows, pages))
        found["prompts"].append(
            of_rounds(bench, [answer], reference)
            | {
                "control": bench.controlled(prompt, rows, pages, reference),
                "words": bench.words(answer.tokens),
            }
        )
    found["disk"] = bare_reads(bench, min(BARE, max(map(bench.held, bench.options.tokens)) * bench.page_bytes))
    bench.store.close()
    return found


def cold(options):
    """Drops the page cache of the machine or of the store's files; which it was."""
    if options.drop_caches:
        os.sync()
        try:
            Path("/proc/sys/vm/drop_caches").write_text("3")
            return "dropped"
        except OSError:
            pass
    for path in options.work.iterdir():
        forget(path)
    return "dropped for the store's files"


def forget(path):
    if path.is_file():
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def bare_copy(bench):
    """Bytes a second of copies from page-locked memory to the device, or in memory."""
    torch, size = bench.torch, min(BARE, max(map(bench.held, bench.options.tokens)) * bench.page_bytes)
    there = torch.ones(size, dtype=torch.uint8, pin_memory=bench.is_cuda)
    here = torch.zeros(size, dtype=torch.uint8, device=bench.options.device)
    rates = []
    for _ in range(6):
        bench.settle()
        begun = time.perf_counter()
        here.copy_(there, non_blocking=True)
        bench.settle()
        rates.append(size / (time.perf_counter() - begun))
    return statistics.median(rates[1:])


def bare_reads(bench, size):
    """Bytes a second of reads of a file, by some threads, past the page cache where the file system can."""
    block = min(BARE_BLOCK, size // mmap.PAGESIZE * mmap.PAGESIZE)
    size -= size % block
    path = bench.options.work / "bare"
    memory = mmap.mmap(-1, size)
    random.seed(1)
    for at in range(0, size, block):
        memory[at : at + block] = random.randbytes(block)
    path.write_bytes(memory)
    forget(path)
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        file = os.open(path, os.O_RDONLY)
    view = memoryview(memory)
    one = lambda at: os.preadv(file, [view[at : at + block]], at)
    with concurrent.futures.ThreadPoolExecutor(BARE_THREADS) as threads:
        list(threads.map(time.sleep, [0] * BARE_THREADS))
        begun = time.perf_counter()
        assert sum(threads.map(one, range(0, size, block))) == size
        rate = size / (time.perf_counter() - begun)
    os.close(file)
    path.unlink()
    return rate


def merged(options, first, rounds):
    """The result: a row for each prompt and source."""
    disk = statistics.median(one["disk"] for one in rounds)
    result = {
        "shape": options.shape,
        "device": first["device"],
        "machine": f"{os.cpu_count()} CPUs, Linux {platform.release()}",
        "torch": first["torch"],
        "date": time.strftime("%Y-%m-%d"),
        "page_bytes": first["page_bytes"],
        "chunk": options.chunk,
        "rounds": options.rounds,
        "page_cache": rounds[0]["cache"],
        "link_bytes_per_second": first["link"],
        "disk_bytes_per_second": disk,
        "rows": [],
        "answers": [],
        "faults": [],
    }
    for number, prompt in enumerate(first["prompts"]):
        cold_ones = [one["prompts"][number] for one in rounds]
        from_l3 = {
            "seconds": [second for one in cold_ones for second in one["seconds"]],
            "pages": min(one["pages"] for one in cold_ones),
            "difference": next(filter(None, (one["difference"] for one in cold_ones)), None),
            "control": all(one["control"] for one in cold_ones),
        }
        computing = statistics.median(prompt["computed"])
        row = {"tokens": prompt["tokens"], "from": "computed", "pages": 0, "seconds": prompt["computed"], "ttft": computing}
        result["rows"].append(row | {"primed": prompt["primed"], "stored": prompt["stored"]})
        for source, one, speeds in (
            ("l1", prompt["l1"], {}),
            ("l2", prompt["l2"], {"link": first["link"]}),
            ("l3", from_l3, {"link": first["link"], "disk": disk}),
        ):
            ttft, size = statistics.median(one["seconds"]), one["pages"] * first["page_bytes"]
            row = {"tokens": prompt["tokens"], "from": source, "bytes": size if speeds else 0, "ttft": ttft} | one
            row["ratio"] = ttft / computing
            row["shares"] = {name: size / speed / ttft for name, speed in speeds.items()}
            result["rows"].append(row)
            place = f"{prompt['tokens']} tokens from {NAMES[source]}"
            if one["difference"]:
                result["faults"].append(f"{place}: {one['difference']}")
            if one["pages"] != prompt["pages"]:
                result["faults"].append(f"{place}: {one['pages']} of {prompt['pages']} pages were there")
            if not one.get("control", True):
                result["faults"].append(f"{place}: a spoilt page changes no logit")
        if prompt["words"]["l1"] is not None:
            words = prompt["words"] | {"l3": cold_ones[0]["words"]}
            result["answers"].append({"tokens": prompt["tokens"]} | words)
    return result


def table(result):
    pages, link, disk = (result[name] for name in ("page_bytes", "link_bytes_per_second", "disk_bytes_per_second"))
    lines = [
        f"{result['shape']}: {result['device']}, {result['machine']}, torch {result['torch']}, {result['date']}",
        f"pages of {pages / MIB:.2f} MiB, steps of {result['chunk']} tokens, medians of {result['rounds']}",
        f"bare: link {link / 1e9:.2f} GB/s, disk {disk / 1e9:.2f} GB/s; page cache {result['page_cache']}",
        "",
        "| tokens | KV from | pages | MiB | TTFT, s | TTFT / computed | link | disk | logits | spoilt page |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        source, shares = row["from"], row.get("shares", {})
        cells = [f"{row['tokens']:,}", NAMES[source], str(row["pages"])]
        cells += [f"{row['bytes'] / MIB:,.0f}" if row.get("bytes") else "", f"{row['ttft']:.4f}", f"{row.get('ratio', 1):.3f}"]
        cells += [f"{shares[name]:.1%}" if name in shares else "" for name in ("link", "disk")]
        cells += [{"computed": "", "l1": "reference"}.get(source, row.get("difference") or "equal")]
        cells += [{True: "noticed", False: "NOT NOTICED", None: ""}[row.get("control")]]
        lines.append("| " + " | ".join(cells) + " |")
    lines.append("")
    for row in result["rows"]:
        if row["from"] == "computed":
            times = f"computed in {row['primed']:.3f} s beside their write, stored after {row['stored']:.3f} s"
            lines.append(f"pages of {row['tokens']:,} tokens: {times}")
    for answer in result["answers"]:
        lines += ["", *(f"{answer['tokens']:,} tokens, {NAMES[name]}: {answer[name]!r}" for name in ("computed", "l1", "l3"))]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())

"""Whole SGLang servers on this machine, requests to them, and the store below them."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
PYTHON_TESTS = HERE.parent.parent / "python/tests"
sys.path.insert(0, str(PYTHON_TESTS))

from support import disk  # noqa: E402

PAGE_TOKENS = 64
ADMIN = "admin-key"

#: Reads and writes by threads, which the slow and faulty disk of the tests sees.
THREADS = {"disk": "threads"}

#: Pages begin at multiples of this in a store's volume.
PLACE_BYTES = 4096

#: Seconds for a start or an answer: several processes import SGLang, on a machine that may be busy.
PATIENCE = 900

#: Shared memory of a server's processes, which they leave when they are killed: queues, states,
#: locks.
MEMORY = Path("/dev/shm")
SHARED = ("sgl_shm_", "sglang_loads_", "sem.mp-")


class Timeout(AssertionError):
    """No progress; the message says of what."""


def wait_for(what, condition, patience=PATIENCE, pause=0.1):
    """Polls until `condition` returns something true, which is returned."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        found = condition()
        if found:
            return found
        time.sleep(pause)
    raise Timeout(f"{what}: not within {patience} s")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def prompt(seed, tokens, vocabulary=500):
    """The tokens of a prompt, other ones for each seed from the first token on."""
    state = seed * 2654435761 % 2**32
    made = []
    for _ in range(tokens):
        state = (state * 1664525 + 1013904223) % 2**32
        made.append(3 + (state >> 16) % vocabulary)
    return made


def whole_pages(tokens):
    """Tokens of a prompt that a hit can cover: whole pages, and never the last token."""
    return (tokens - 1) // PAGE_TOKENS * PAGE_TOKENS


#: A server on the CPU.
CPU = [
    *("--device", "cpu", "--attention-backend", "torch_native", "--grammar-backend", "none"),
    *("--disable-overlap-schedule", "--skip-server-warmup", "--sleep-on-idle"),
    *("--hicache-mem-layout", "page_first_direct", "--hicache-io-backend", "direct"),
]


#: What the real language model needs besides. Few processors compute fast in bf16, and all do in
#: float32. KV stays in bf16.
REAL = ["--dtype", "float32", "--kv-cache-dtype", "bfloat16"]


def cpu_environment():
    path = [str(HERE / "boot"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "PATH": f"{sys.prefix}/bin:{os.environ['PATH']}",
        "SGLANG_USE_CPU_ENGINE": "1",
        # Every rank, and the tests' other processes, on the same few processors.
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TORCH_EXTENSIONS_DIR": f"{sys.prefix}/extensions",
    }


def die_with_parent():
    """No server outlives the tests, however they end; its other processes end with it."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Server:
    """`python -m sglang.launch_server`: its processes and its HTTP API."""

    def __init__(self, log, model, arguments, environment):
        self.log, self.port = Path(log), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", model]
        command += ["--host", "127.0.0.1", "--port", self.port, "--admin-api-key", ADMIN]
        command += ["--enable-cache-report", "--enable-metrics", *arguments]
        self.launch(command, environment)

    def launch(self, command, environment):
        """Starts the server's first process."""
        #: Files of shared memory to remove at the end.
        self.memory = set()
        with open(self.log, "w", encoding="utf-8") as file:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                env=os.environ | environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def said(self):
        return self.log.read_text(encoding="utf-8", errors="replace")

    def ready(self):
        def is_up():
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended: {self.log}\n{self.said()[-4000:]}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=30) as answer:
                    return answer.status == 200
            except OSError:
                return False

        wait_for(f"a server ({self.log})", is_up, pause=0.5)
        return self

    def tree(self):
        """The server's processes: those of its session, which outlive the first one."""
        found = []
        for pid in psutil.pids():
            with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
                if os.getsid(pid) == self.process.pid:
                    found.append(psutil.Process(pid))
        return found

    def shared(self):
        """The files of shared memory that the server's processes have in use."""
        used = set()
        for process in self.tree():
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
                # By inode: a lock is mapped under another name than it has later.
                used |= {int(line.split()[4]) for line in maps if f"{MEMORY}/" in line}
        return {
            MEMORY / entry.name
            for entry in os.scandir(MEMORY)
            if entry.name.startswith(SHARED) and entry.inode() in used
        }

    def schedulers(self):
        """The processes that hold the pools, and the store."""
        return [one for one in self.tree() if "scheduler" in " ".join(one.cmdline())]

    def send(self, number):
        for process in self.schedulers():
            process.send_signal(number)

    def stop(self):
        """SIGTERM, as a service manager sends it; waits for the end of every process."""
        tree = self.tree()
        self.memory |= self.shared()
        self.process.send_signal(signal.SIGTERM)
        _, left = psutil.wait_procs(tree, timeout=PATIENCE)
        self.kill()
        assert not left, f"processes outlive SIGTERM: {left}"

    def kill(self):
        """SIGKILL to every process at once. Then nobody uses what they shared."""
        tree = self.tree()
        self.memory |= self.shared()
        for process in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(tree, timeout=PATIENCE)
        self.process.wait()
        while self.memory:
            self.memory.pop().unlink(missing_ok=True)

    def http(self, method, path, body=None):
        """(status, text) of a call."""
        request = urllib.request.Request(
            self.url + path,
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN}"},
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def generate(self, tokens, new=8, **more):
        """The answer to one greedy request."""
        body = {
            "input_ids": tokens,
            "sampling_params": {"temperature": 0, "max_new_tokens": new, "ignore_eos": True},
            "return_logprob": True,
            "top_logprobs_num": 5,
            "stream": True,
        } | more
        request = urllib.request.Request(
            f"{self.url}/generate",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Bearer {ADMIN}"},
        )
        start, first, last = time.monotonic(), None, None
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            for line in answer:
                if line.startswith(b"data:") and b"[DONE]" not in line:
                    last = json.loads(line[5:])
                    first = first or time.monotonic() - start
        assert last is not None and "error" not in last, last
        return Answer(last, first)

    def flush(self):
        """Empties L1 and L2. SGLang refuses while it still works."""

        def is_flushed():
            return self.http("POST", "/flush_cache")[0] == 200

        wait_for("flush_cache", is_flushed)


class Answer:
    """Tokens of an answer with their log-probabilities, and what of the prompt was cached."""

    def __init__(self, last, first_seconds):
        meta = last["meta_info"]
        self.tokens = last["output_ids"]
        self.logprobs = [one[0] for one in meta["output_token_logprobs"]]
        self.top = [[(two[0], two[1]) for two in one] for one in meta["output_top_logprobs"]]
        self.cached = meta["cached_tokens"]
        #: Tokens found in each tier.
        details = meta.get("cached_tokens_details") or {}
        self.device, self.host = details.get("device", 0), details.get("host", 0)
        self.storage = details.get("storage", 0)
        self.ttft = first_seconds

    def same(self, other):
        """Bit by bit."""
        return (self.tokens, self.logprobs, self.top) == (other.tokens, other.logprobs, other.top)


class Probed(Server):
    """A server of a site, with a window into its KV pool: see `boot/probed.py`."""

    def __init__(self, site, number, arguments, extra):
        self.site = site
        self.probe = site.place / f"probe-{number}"
        self.probe.mkdir()
        self.commands = 0
        environment = cpu_environment() | {"LARDER_PROBE": str(self.probe)}
        if site.tp > 1:
            # A processor for each rank: SGLang would have a NUMA node for each.
            processors = sorted(os.sched_getaffinity(0))
            ranks = [str(processors[rank % len(processors)]) for rank in range(site.tp)]
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(ranks)
            # No NCCL: ranks speak by gloo. The library beside torch is a stub.
            environment["SGLANG_NCCL_SO_PATH"] = "/dev/null"
        if site.library is not None:
            environment |= {"LD_PRELOAD": str(site.library)}
            environment |= {name: str(path) for name, path in site.flags.items()}
        command = [*CPU, "--tp-size", site.tp, "--page-size", PAGE_TOKENS]
        command += ["--max-total-tokens", 20480, "--max-running-requests", 8]
        command += ["--context-length", 8448, "--chunked-prefill-size", 4096]
        command += ["--enable-hierarchical-cache", "--hicache-ratio", 2]
        command += ["--hicache-storage-prefetch-policy", "wait_complete"]
        command += ["--hicache-storage-backend", "dynamic"]
        command += ["--hicache-storage-backend-extra-config", json.dumps(extra)]
        log = site.place / f"server-{number}.log"
        super().__init__(log, site.model, [*command, *arguments], environment)

    def ask(self, do, **more):
        """A command to the probe of each rank: see `boot/probed.py`."""
        self.commands += 1
        command = {"do": do, "number": self.commands} | more
        written = self.probe / "command.tmp"
        written.write_text(json.dumps(command))
        written.rename(self.probe / "command.json")
        status, text = self.http("POST", "/hicache/storage-backend/clear")
        assert status == 200, text
        answers = [self.probe / f"{self.commands}-{rank}.json" for rank in range(self.site.tp)]
        wait_for(f"the probe's answer to {do}", lambda: all(path.exists() for path in answers))
        return [json.loads(path.read_text()) for path in answers]

    def kv(self, tokens):
        """Hashes of the pages that the device holds of a prompt, of each rank."""
        return [answer["pages"] for answer in self.ask("pages", tokens=tokens)]

    def page_bytes(self, tokens, page):
        """A part of a page as it lies in the pool, of each rank."""
        answers = self.ask("bytes", tokens=tokens, page=page)
        return [base64.b64decode(answer["bytes"]) for answer in answers]

    def counters(self):
        return self.ask("counters")

    def settle(self, pages):
        """Waits until the store holds this many pages."""
        return wait_for(f"{pages} pages in the store", lambda: self.site.pages() >= pages)


class Site:
    """A folder with a model, a store and the flags of its disk, for servers one after another."""

    def __init__(self, place, model, library=None, tp=1, **config):
        self.place, self.model, self.library = Path(place), model, library
        self.tp, self.config = tp, config
        self.store = self.place / "store"
        self.flags = {name: self.place / name.lower() for name in disk.FLAGS}
        self.servers = []

    def extra(self, **more):
        """The extra config of `--hicache-storage-backend-extra-config`."""
        return (
            {
                "backend_name": "larder",
                "module_path": "probed",
                "class_name": "Probed",
                "interface_v1": 1,
                "hicache_storage_pass_prefix_keys": True,
                "path": str(self.store),
                "size": "256MiB",
                "prewrite": False,
            }
            | self.config
            | more
        )

    def start(self, arguments=(), **more):
        server = Probed(self, len(self.servers), arguments, self.extra(**more))
        self.servers.append(server)
        return server.ready()

    def stat(self):
        """The document of `larder stat`; `None` while nobody serves the store."""
        command = [sys.executable, "-P", "-m", "larder_kv", "stat", "--json", self.volume]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return json.loads(done.stdout) if done.returncode == 0 else None

    @property
    def volume(self):
        return self.store / "larder.store"

    def pages(self):
        found = self.stat()
        return found["pages"] if found else 0

    def spoil(self, content):
        """Changes the bytes of a page where they lie on the disk; how many copies there were."""
        with open(self.volume, "r+b") as file:
            data, at, spoilt = file.read(), 0, 0
            while (at := data.find(content, at)) >= 0:
                file.seek(at + len(content) // 2)
                file.write(bytes(byte ^ 255 for byte in content[len(content) // 2 :][:8]))
                spoilt, at = spoilt + 1, at + len(content)
            file.flush()
            os.fsync(file.fileno())
            # The store's own reads go past the cache.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return spoilt

    def spoil_pages(self, heads):
        """Changes a byte of each page that begins with one of these; how many pages there were."""
        (length,) = {len(head) for head in heads}
        with open(self.volume, "r+b") as file, mmap.mmap(file.fileno(), 0) as data:
            places = range(0, len(data) - length, PLACE_BYTES)
            found = [at for at in places if data[at : at + length] in heads]
            for at in found:
                # Not in the piece by which the page is found.
                data[at + length] ^= 255
            data.flush()
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return len(found)

    def close(self):
        for server in self.servers:
            server.kill()
        self.volume.unlink(missing_ok=True)

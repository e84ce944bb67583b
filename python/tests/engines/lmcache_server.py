"""LMCache's server over the adapter."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request

from support.lmcache import parameters

#: Seconds for a start, which imports torch and LMCache.
PATIENCE = 600


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def killed(command, log):
    """A process in a group of its own, which is killed at the end."""
    environment = os.environ | {
        "LMCACHE_TRACK_USAGE": "false",
        "DO_NOT_TRACK": "1",
    }
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=file,
            env=environment,
            start_new_session=True,
        )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextlib.contextmanager
def server(path, log, chunk_tokens=128, l1_gb=0.25, arguments=(), **more):
    """LMCache's server; the port that engines connect to, and its status."""
    port, http = free_port(), free_port()
    adapter = {
        "type": "plugin",
        "module_path": "larder_kv.lmcache",
        "class_name": "LarderL2Adapter",
        "adapter_params": parameters(path, **more),
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
        str(l1_gb),
        "--chunk-size",
        str(chunk_tokens),
        "--max-workers",
        "1",
    ]
    command += ["--l2-adapter", json.dumps(adapter), *arguments]
    with killed(command, log) as process:

        def status():
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

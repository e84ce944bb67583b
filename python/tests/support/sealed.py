"""Encrypted stores: their keys, and the commands that erase and serve."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys


def key_file(place, byte="5a", name="key"):
    """A key of a store, in a file that its owner alone can use."""
    file = place / name
    file.write_text(byte * 32 + "\n")
    file.chmod(0o400)
    return str(file)


def command(*arguments):
    return [sys.executable, "-m", "larder_kv", *map(str, arguments)]


def erase(path, tenant, *more):
    """Erases a tenant: how many pages it had. Each process that uses the store has answered."""
    words = command("erase", path, "--tenant", tenant, "--wait", "60s", "--json", *more)
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout)["erased_pages"]


@contextlib.contextmanager
def served(path, *more):
    """A process that owns and serves the store."""
    words = command("serve", path, "--json", *more)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        lines = []
        while not lines or lines[-1].rstrip() not in ("}", ""):
            lines.append(process.stdout.readline())
        assert json.loads("".join(lines))["waiting"] is False
        yield process
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def has(path, *texts):
    """The texts that a byte search finds in a store's volume and in the files beside it."""
    files = [file.read_bytes() for file in path.rglob("*") if file.is_file()]
    assert any(len(whole) > 1 << 20 for whole in files)
    return [text for text in texts if any(text.encode() in whole for whole in files)]

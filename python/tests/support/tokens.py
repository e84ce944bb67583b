"""The tokens that a store has counted, as `larder stat` shows them."""

from __future__ import annotations

import json
import subprocess
import sys


def tokens(path):
    """(requests, found, not found, served, milliseconds saved) of the store below a directory."""
    stat = [sys.executable, "-m", "larder_kv", "stat", str(path), "--json"]
    counted = json.loads(subprocess.run(stat, check=True, stdout=subprocess.PIPE).stdout)
    of = counted["totals"]["tokens"]
    names = ("found_tokens", "not_found_tokens", "served_tokens", "saved_prefill_ms")
    return (of["requests"], *(of[name] for name in names))

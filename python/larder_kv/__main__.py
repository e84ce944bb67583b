"""The command line: ``python -m larder_kv``, the same as the ``larder`` binary, and ``doctor`` for an
engine's configuration.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import signal
import sys

from larder_kv import _larder

#: The release of SGLang that the tests run against.
SGLANG_TESTED = "0.5.23"

_DOCTOR_USAGE = (
    "usage: larder doctor --sglang CONFIG [--page-bytes SIZE]\n"
    "       larder doctor --vllm CONFIG [--page-bytes SIZE] [--prefix-caching-hash-algo NAME]\n"
    "       larder doctor --lmcache CONFIG [--page-bytes SIZE]\n"
    "CONFIG: of SGLang's --hicache-storage-backend-extra-config, vLLM's --kv-transfer-config or LMCache's --l2-adapter: JSON, or\n"
    "        @FILE.json, @FILE.toml, @FILE.yaml\n"
    "SIZE: of a page (SGLang) or chunk (vLLM, LMCache) of the server, such as 16MiB: the bytes of a token times the tokens of one"
)


def read_config(text: str) -> dict:
    """The configuration, parsed as SGLang parses --hicache-storage-backend-extra-config. The same
    for vLLM.
    """
    if not text.startswith("@"):
        if not text.lstrip().startswith("{"):
            raise ValueError(f"not JSON; a file is given as @{text}")
        config = json.loads(text)
    else:
        path = text[1:]
        ending = os.path.splitext(path)[1].lower()
        if ending == ".toml":
            try:
                import tomllib
            except ModuleNotFoundError as error:
                raise ValueError("TOML needs Python 3.11 or later; use JSON") from error
            with open(path, "rb") as file:
                config = tomllib.load(file)
        elif ending in (".yaml", ".yml"):
            import yaml

            with open(path, encoding="utf-8") as file:
                config = yaml.safe_load(file)
        elif ending == ".json":
            with open(path, encoding="utf-8") as file:
                config = json.load(file)
        else:
            raise ValueError(f"{path}: the formats are .json, .toml, .yaml and .yml")
    if not isinstance(config, dict):
        raise ValueError("the extra config is not a table of keys and values")
    return config


def _check(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    engine = parser.add_mutually_exclusive_group(required=True)
    engine.add_argument("--sglang")
    engine.add_argument("--vllm")
    engine.add_argument("--lmcache")
    parser.add_argument("--page-bytes")
    parser.add_argument("--prefix-caching-hash-algo")
    try:
        options = parser.parse_args(arguments)
        if options.vllm is None and options.prefix_caching_hash_algo is not None:
            raise argparse.ArgumentError(None, "--prefix-caching-hash-algo is vLLM's")
    except (argparse.ArgumentError, SystemExit):
        print(_DOCTOR_USAGE, file=sys.stderr)
        return 2
    given = options.sglang or options.vllm or options.lmcache
    try:
        config = read_config(given)
        if options.sglang is not None:
            _note_sglang()
            return _larder.check_sglang_config(json.dumps(config, default=str), options.page_bytes)
        if options.lmcache is not None:
            from larder_kv.lmcache.doctor import check

            return check(config, options.page_bytes)
        from larder_kv.vllm import doctor

        return doctor.check(config, options.page_bytes, options.prefix_caching_hash_algo or "sha256")
    except (OSError, ValueError, ImportError) as error:
        print(f"larder: {given}: {error}", file=sys.stderr)
        return 2


def _note_sglang() -> None:
    """Says that SGLang is not there, or is another release than the one of the tests."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        version = None
    if version == SGLANG_TESTED:
        return
    found = "not installed in this environment" if version is None else version
    what = f"{found}; the release tested is {SGLANG_TESTED}"
    print(f"warn  {'SGLang':<14}  {what}", flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line and returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["doctor"] and any(word.startswith(("--sglang", "--vllm", "--lmcache")) for word in arguments):
        return _check(arguments[1:])
    # The command line handles signals itself; the interpreter's handlers would run after its end.
    for number in (signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    return _larder.main(sys.executable, ["-m", "larder_kv"], arguments)


if __name__ == "__main__":
    sys.exit(main())

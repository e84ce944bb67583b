"""The command line: ``python -m larder``, the same as the ``larder`` binary, and ``doctor --sglang CONFIG``."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys

from larder import _larder

_DOCTOR_USAGE = (
    "usage: larder doctor --sglang CONFIG [--page-bytes SIZE]\n"
    "CONFIG: JSON, or @FILE.json, @FILE.toml, @FILE.yaml\n"
    "SIZE: of a page of the server, such as 16MiB: the bytes of a token times --page-size"
)


def read_config(text: str) -> dict:
    """What SGLang makes of --hicache-storage-backend-extra-config."""
    if not text.startswith("@"):
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
            raise ValueError(f"{path}: SGLang reads .json, .toml, .yaml and .yml")
    if not isinstance(config, dict):
        raise ValueError("the extra config is not a table of keys and values")
    return config


def _check(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--sglang", required=True)
    parser.add_argument("--page-bytes")
    try:
        options = parser.parse_args(arguments)
    except (argparse.ArgumentError, SystemExit):
        print(_DOCTOR_USAGE, file=sys.stderr)
        return 2
    try:
        config = read_config(options.sglang)
        return _larder.check_config(json.dumps(config, default=str), options.page_bytes)
    except (OSError, ValueError, ImportError) as error:
        print(f"larder: {options.sglang}: {error}", file=sys.stderr)
        return 2


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line and returns its exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["doctor"] and any(word.startswith("--sglang") for word in arguments):
        return _check(arguments[1:])
    # The command line has its own way with signals; the interpreter would only see them once it returned.
    for number in (signal.SIGINT, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    return _larder.main(sys.executable, ["-m", "larder"], arguments)


if __name__ == "__main__":
    sys.exit(main())

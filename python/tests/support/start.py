"""The first pages of the documentation: their commands, and the output that they promise."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

OUTPUT = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: The tag of weights, which depends on the times of files.
TAG = re.compile(r"\b[0-9a-f]{16}$")


def page(engine: str) -> str:
    return (ROOT / "docs/start" / f"{engine}.md").read_text(encoding="utf-8")


def promised(engine: str) -> list[str]:
    """The outputs that the page shows, in their order."""
    return OUTPUT.findall(page(engine))


def server_arguments(engine: str, place: Path) -> list[str]:
    """The arguments of the page's command that starts the server, as a shell in this directory passes them on."""
    text = page(engine).replace("\\\n", "")
    (command,) = re.findall(r"^    (python -m sglang\.launch_server|vllm serve|lmcache server) (.*)$", text, re.MULTILINE)
    shown = subprocess.run(
        ["bash", "-c", f'printf "%s\\0" {command[1]}'], cwd=place, capture_output=True, text=True, check=True
    )
    return shown.stdout.split("\0")[:-1]


def doctor_says_what_the_page_does(engine: str, file: str, place: Path, *changes: tuple[str, str]) -> None:
    """Runs the page's `larder doctor` with the page's file, after the changes that the page demands of the reader."""
    if shutil.disk_usage(place).free < 9 << 30:
        pytest.skip("the store of the first pages takes 8 GiB")
    text = (ROOT / "deploy/engines" / file).read_text(encoding="utf-8")
    for before, after in (("/nvme/larder", str(place / "larder")), *changes):
        assert before in text
        text = text.replace(before, after)
    (place / file).write_text(text, encoding="utf-8")
    (command,) = re.findall(r"^    larder (doctor .*)$", page(engine), re.MULTILINE)
    done = subprocess.run(
        [sys.executable, "-m", "larder_kv", *shlex.split(command)], cwd=place, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    facts = [line for line in done.stdout.splitlines() if re.match(r"(ok|warn|fail) ", line)]
    expected = promised(engine)[0].splitlines()
    assert [TAG.sub("TAG", line) for line in facts[: len(expected)]] == [TAG.sub("TAG", line) for line in expected]

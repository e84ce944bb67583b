"""The first pages of the documentation, for SGLang and for plain Python."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys

from sglang.srt.server_args import ServerArgs
from support import start


def test_the_page_for_sglang(tmp_path):
    start.doctor_says_what_the_page_does("sglang", "sglang.json", tmp_path)
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    given = parser.parse_args(start.server_arguments("sglang", tmp_path))
    assert given.hicache_storage_backend == "dynamic" and given.hicache_storage_backend_extra_config == "@sglang.json"


def test_the_page_for_python(tmp_path):
    for expected in start.promised("python"):
        program = [sys.executable, start.ROOT / "deploy/engines/first_hit.py", tmp_path / "pages"]
        done = subprocess.run(program, capture_output=True, text=True, check=True)
        assert done.stdout == expected


def test_the_demo_runs_from_the_wheel(tmp_path):
    demo = [sys.executable, "-m", "larder_kv", "demo", "--json", "--dir", tmp_path]
    done = subprocess.run(demo, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["survived_pages"] == said["acknowledged_pages"] > 0
    assert said["second_process_pages_hit"] > 0 and said["wrong_pages"] == 0

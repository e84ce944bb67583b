"""Runs the tests of the engine that this environment has: SGLang, on the CPU (see `support.cpu`), or vLLM."""

import sys
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest  # noqa: E402

if find_spec("sglang") is None:
    collect_ignore_glob = [name.name for name in Path(__file__).parent.glob("test_*.py") if not name.match("test_vllm*.py")]
else:
    collect_ignore_glob = ["test_vllm*.py"]
    import support.cpu  # noqa: E402,F401


@pytest.fixture(autouse=True)
def no_stores_left(tmp_path):
    """A store takes its size on disk: none outlives its test, whatever became of it."""
    yield
    for store in tmp_path.rglob("*.store"):
        store.unlink()

"""Runs the tests against the real SGLang package, on the CPU: see `support.cpu`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest  # noqa: E402
import support.cpu  # noqa: E402,F401


@pytest.fixture(autouse=True)
def no_stores_left(tmp_path):
    """A store takes its size on disk: none outlives its test, whatever became of it."""
    yield
    for store in tmp_path.rglob("*.store"):
        store.unlink()

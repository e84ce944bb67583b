"""Runs the tests against the real SGLang package, on the CPU: see `support.cpu`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import support.cpu  # noqa: E402,F401

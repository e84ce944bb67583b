"""Waits for what another thread or process does."""

import time

PATIENCE = 60


def eventually(condition):
    """Waits until the condition holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, f"not within {PATIENCE} s"
        time.sleep(0.01)

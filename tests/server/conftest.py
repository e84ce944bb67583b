"""Whole SGLang servers on the CPU over one store: `tests/run --server`."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "python/tests")]

import pytest  # noqa: E402
import report  # noqa: E402


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """A disk that a file can slow down or spoil: see `support.disk`."""
    from support import disk

    return disk.build(tmp_path_factory.mktemp("disk"))


def pytest_terminal_summary(terminalreporter):
    """The answers of the real language model, in its words."""
    if report.LINES:
        terminalreporter.section("answers in words")
        for line in report.LINES:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The folder of a tiny model, by its kind: see `engines/models.py`."""
    from engines import models

    made = {}

    def make(kind):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            models.make(kind, made[kind])
        return made[kind]

    return make

"""Lines of Larder in SGLang's log, as SGLang sets it up, and in the log of any program."""

import logging
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from support import pools
from support.waiting import eventually

#: A line of the extension: the store of a test has few segments.
OF_EXTENSION = "eviction follows the LRU order"


@pytest.fixture
def root():
    """The root of the loggers, without handlers."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers = []
    yield root
    root.handlers = handlers
    root.setLevel(level)


def test_the_log_of_sglang_has_the_lines_of_information(opened, root, capfd):
    common = pytest.importorskip("sglang.srt.utils.common")
    common.configure_logger(SimpleNamespace(log_level="info"), prefix=" TP0")
    opened(pools.mha())
    said = ""

    def has(text):
        nonlocal said
        said += capfd.readouterr().err
        return text in said

    eventually(lambda: has(OF_EXTENSION))
    for text in ("larder: attached to", OF_EXTENSION):
        (line,) = [line for line in said.splitlines() if text in line]
        assert line.startswith("[") and " TP0] " in line, "in SGLang's form, and once"


PROGRAM = """
import logging, sys
{setup}
import larder_kv
larder_kv.Store.attach(sys.argv[1], size=128 << 20).close()
"""


def said(tmp_path, setup, **environment):
    """The log of a program that ends at once."""
    command = [sys.executable, "-c", PROGRAM.format(setup=setup), str(tmp_path)]
    environment = {key: of for key, of in os.environ.items() if key != "LARDER_LOG"} | environment
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    (tmp_path / "larder.store").unlink()
    return done.stderr


def test_a_program_gets_the_lines_at_its_own_level_and_the_last_ones_at_its_exit(tmp_path):
    form = 'logging.basicConfig(level="{}", format="%(levelname)s of %(name)s: %(message)s")'
    line = "INFO of larder_kv.learned: eviction follows the LRU order"
    assert line in said(tmp_path, form.format("INFO"))
    assert OF_EXTENSION not in said(tmp_path, form.format("WARNING"))
    assert OF_EXTENSION not in said(tmp_path, "")
    # Standard error, in the form of the extension.
    assert " INFO larder_learned: eviction" in said(tmp_path, "", LARDER_LOG="info")

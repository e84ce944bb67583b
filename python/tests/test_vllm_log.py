"""Lines of Larder in vLLM's log, as vLLM sets it up."""

import io
import logging

import pytest
from larder_kv import logs
from support.vllm import keys, steps, tier
from support.waiting import eventually

vllms = pytest.importorskip("vllm.logger")

#: A line of the extension: the store of a test has few segments.
OF_EXTENSION = "eviction follows the LRU order"

#: A line of Python.
OF_PYTHON = "larder: attached to"


#: Before a fixture takes it away.
follow = logs.follow


@pytest.fixture
def ours(monkeypatch, log_as_it_is):
    """The logger of Larder as at the start of a process."""
    monkeypatch.setattr(logs, "follow", follow)
    logger = logging.getLogger("larder_kv")
    for name, value in {"handlers": [], "level": logging.NOTSET, "propagate": True}.items():
        monkeypatch.setattr(logger, name, value)


@pytest.fixture
def vllms_log(ours):
    """The text that vLLM's handler writes, once vLLM has set up its log as a server does."""
    from vllm.config.logging import LoggingConfig

    logger, text = logging.getLogger("vllm"), io.StringIO()
    before = logger.handlers[:], logger.level, logger.propagate
    vllms.configure_logging(LoggingConfig())
    (handler,) = (handler for handler in logger.handlers if handler.name == "vllm")
    handler.setStream(text)
    yield text
    logger.handlers, level, logger.propagate = before
    logger.setLevel(level)


def test_the_engines_log_has_the_lines_of_information(tmp_path, vllms_log):
    with steps(tier(tmp_path)) as engine:
        engine.store(keys(1))
        eventually(lambda: OF_EXTENSION in vllms_log.getvalue())
    lines = vllms_log.getvalue().splitlines()
    for text in (OF_PYTHON, OF_EXTENSION):
        (line,) = [line for line in lines if text in line]
        assert " INFO " in line, "in vLLM's form, and once"


def test_a_later_configuration_of_the_engine_counts(tmp_path, vllms_log):
    with steps(tier(tmp_path / "one")):
        eventually(lambda: OF_EXTENSION in vllms_log.getvalue())
    logging.getLogger("vllm").setLevel(logging.WARNING)
    before = vllms_log.getvalue()
    with steps(tier(tmp_path / "two")):
        logging.getLogger("larder_kv").warning("a warning of a test")
    said = vllms_log.getvalue().removeprefix(before)
    assert "a warning of a test" in said and OF_PYTHON not in said

"""The log: lines of the extension go to ``logging``, and all lines of Larder to the engine's log.

The extension sends its lines over a socket, since a thread of it that waited for the interpreter
could block a server. Here a thread receives them. Their loggers are below ``larder_kv``.
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import threading

from larder_kv import _larder

_LEVELS = {
    "ERROR": logging.ERROR,
    "WARN": logging.WARNING,
    "INFO": logging.INFO,
    "DEBUG": logging.DEBUG,
    "TRACE": logging.DEBUG,
}

#: Bytes of the longest line.
_LINE_MAX = 1 << 16

#: Wait at the exit for the lines that were sent before.
_EXIT_PATIENCE = 1.0


def start() -> None:
    """Begins to receive the lines of the extension, at the first call in a process. The extension
    calls it before it opens a store. With ``LARDER_LOG`` the lines go to stderr.
    """
    descriptor = _larder.log_lines()
    if descriptor is None:
        return
    lines = socket.socket(fileno=descriptor)
    # Whatever default of a timeout the program has set.
    lines.settimeout(None)
    receiver = threading.Thread(target=_receive, args=(lines,), name="larder-log", daemon=True)
    try:
        receiver.start()
    except RuntimeError as error:
        # Warnings go to stderr then.
        lines.close()
        logging.getLogger("larder_kv").warning("larder: no thread for the log: %s", error)
        return
    # A child of a fork has no thread that receives. Its lines go to the log of its parent.
    os.register_at_fork(after_in_child=lines.close)
    atexit.register(_end, lines, receiver, os.getpid())


def follow(engine: logging.Logger) -> None:
    """Sends the lines below ``larder_kv`` to the engine's logger, with the level and the handlers that
    it has at that time. Handlers of the user for ``larder_kv`` stay alone.
    """
    ours = logging.getLogger("larder_kv")
    if ours.handlers:
        return
    ours.addHandler(_Forward(engine))
    # The engine's level decides, unless the user has set one.
    if ours.level == logging.NOTSET:
        ours.setLevel(logging.DEBUG)
    # Else the handlers of the root would get a line twice.
    ours.propagate = False


class _Forward(logging.Handler):
    """Hands records to another logger."""

    def __init__(self, to: logging.Logger) -> None:
        super().__init__()
        self._to = to

    def handle(self, record: logging.LogRecord) -> bool:
        """Takes no lock of its own: the handlers of the other logger have theirs."""
        if self._to.isEnabledFor(record.levelno):
            self._to.handle(record)
        return True


def _receive(lines: socket.socket) -> None:
    while line := lines.recv(_LINE_MAX):
        _log(line.decode(errors="replace").rstrip("\n"))


def _log(line: str) -> None:
    """Logs a line of the form ``LEVEL target: text``."""
    level, _, rest = line.lstrip().partition(" ")
    target, _, text = rest.lstrip().partition(": ")
    name = target.removeprefix("larder_").replace("::", ".")
    logger = logging.getLogger(f"larder_kv.{name}")
    number = _LEVELS.get(level, logging.WARNING)
    if logger.isEnabledFor(number):
        logger.handle(logger.makeRecord(logger.name, number, target, 0, text, (), None))


def _end(lines: socket.socket, receiver: threading.Thread, process: int) -> None:
    """Logs the lines that were sent. Later ones go to stderr."""
    if os.getpid() == process:
        lines.shutdown(socket.SHUT_RD)
        receiver.join(_EXIT_PATIENCE)

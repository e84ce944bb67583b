"""A forked process: importing an engine anew would take most of a minute."""

from __future__ import annotations

import os
import signal
import traceback
from pathlib import Path


class Child:
    """A forked process that works and says lines."""

    def __init__(self, work, *arguments):
        read, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.close(read)
                with os.fdopen(write, "w", buffering=1) as said:
                    work(said, *arguments)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(write)
        self.says = os.fdopen(read)

    def send(self, number):
        os.kill(self.pid, number)

    def kill(self):
        """Ends it, and waits until it is gone."""
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            for left in Path("/dev/shm").glob(f"vllm_offload_larder-test-{self.pid}-*"):
                left.unlink()
            self.pid = 0

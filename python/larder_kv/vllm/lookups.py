"""Lookups of a process that is not the store's owner: sent in one message at the end of a step,
answered in a later step.

vLLM looks up key by key and has no deadline of its own: a lookup without an answer holds its
request for ever. So each has :data:`PATIENCE`, and a key without an answer by then is a miss until
its request ends.
"""

from __future__ import annotations

import time
from typing import Any, Optional, Union

from larder_kv.vllm.spaces import Space

#: Seconds until a lookup without an answer is a miss.
PATIENCE = 0.05

#: Whether a key is there; or the deadline of its lookup.
_Answer = Union[bool, float]

_NOT_SENT = float("inf")


class Lookups:
    """A request for lookups, and the answers of the store."""

    def __init__(self) -> None:
        #: By request and key.
        self._answers: dict[str, dict[bytes, _Answer]] = {}
        #: To be sent at the end of the step, by namespace: each with its request's answers.
        self._new: dict[bytes, tuple[Space, list[tuple[dict[bytes, _Answer], bytes]]]] = {}
        #: By the number of the store's job.
        self._asked: dict[int, list[tuple[dict[bytes, _Answer], bytes]]] = {}
        #: Keys that had no answer in time.
        self.late = 0

    def answer(self, key: bytes, request: str, space: Space) -> Optional[bool]:
        """Whether a key is in a space; None until there is an answer."""
        answers = self._answers.get(request)
        if answers is None:
            answers = self._answers[request] = {}
        answer = answers.get(key)
        if answer is None:
            answers[key] = _NOT_SENT
            self._new.setdefault(space.namespace.digest, (space, []))[1].append((answers, key))
            return None
        if isinstance(answer, bool):
            return answer
        if time.monotonic() < answer:
            return None
        answers[key] = False
        self.late += 1
        return False

    def send(self, queue: Any) -> None:
        """Sends the lookups of all new keys. Keys that cannot be sent are misses."""
        if not self._new:
            return
        new, self._new = self._new, {}
        due = time.monotonic() + PATIENCE
        for space, asked in new.values():
            try:
                keys = space.names([key for _, key in asked])
                number = queue.submit_lookup(space.namespace, keys, timeout=PATIENCE)
            except Exception:
                for answers, key in asked:
                    answers[key] = False
                self.late += len(asked)
                continue
            self._asked[number] = asked
            for answers, key in asked:
                answers[key] = due

    def take(self, number: int, statuses: bytes, late: int) -> bool:
        """Whether this job of the store was a lookup; then its answers are noted. ``late`` is
        the status of no answer in time.
        """
        asked = self._asked.pop(number, None)
        if asked is None:
            return False
        for (answers, key), status in zip(asked, statuses):
            if not isinstance(answers.get(key), bool):
                answers[key] = status == 0
                self.late += status == late
        return True

    def forget(self, request: str) -> None:
        """A request has ended."""
        self._answers.pop(request, None)

    def clear(self) -> None:
        """No answer holds any more: the namespaces are others."""
        self._answers.clear()
        self._new.clear()
        self._asked.clear()

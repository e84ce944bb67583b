"""Tokens of requests, for the store's counters: each request counts once.

vLLM asks for a prompt's chunks one by one, many times, and for none behind a missing one. So the
answers of a request are collected until vLLM schedules it. A chunk behind the first missing one
counts as not found. Cache groups with windows or states hold a part of a prompt: the first group of
prefixes counts for all.
"""

from __future__ import annotations

from typing import Any, Mapping, Optional

from larder_kv.vllm.spaces import GROUP_BYTES, Space

class Asked:
    """The answers of a request that is not scheduled yet."""

    def __init__(self, space: Space, end: int) -> None:
        self.space = space
        #: The end of the prompt's last whole chunk.
        self.end = end
        #: Ends of the chunks that were found.
        self.found: set[int] = set()
        #: End of the first missing chunk; after the prompt without one.
        self.missing = end + 1


class Tokens:
    """See the module."""

    def __init__(self, prefill_rate: Optional[float]) -> None:
        self._rate = prefill_rate
        #: None for a request that was counted.
        self._asked: dict[str, Optional[Asked]] = {}

    @staticmethod
    def counts(spaces: Mapping[bytes, Space], group: bytes) -> bool:
        """Whether this is the first cache group of prefixes."""
        return group == next((of for of, space in spaces.items() if space.is_chain), None)

    def answered(self, key: bytes, is_found: bool, request: Any, space: Space) -> None:
        """A chunk of the counted group was looked up in its space. ``request`` is vLLM's context
        of it.
        """
        end = request.get_offload_key_position(key)
        if end is None:
            return
        if request.req_id not in self._asked:
            self._asked[request.req_id] = Asked(space, _end(key[-GROUP_BYTES:], request))
        asked = self._asked[request.req_id]
        if asked is None:
            return
        if is_found:
            asked.found.add(end)
        else:
            asked.missing = min(asked.missing, end)

    def scheduled(self, request: str) -> None:
        """The answers of a request are complete."""
        asked = self._asked.get(request)
        if asked is None:
            return
        self._asked[request] = None
        size = asked.space.chunk_tokens
        found = sum(end < asked.missing for end in asked.found) * size
        rest = max(0, asked.end - asked.missing + size)
        asked.space.namespace.count_tokens(asked=found + rest, found=found)

    def served(self, chunks: int, space: Space) -> None:
        """Chunks of the counted group were loaded."""
        tokens = chunks * space.chunk_tokens
        space.namespace.count_tokens(served=tokens, prefill_rate=self._rate)

    def ended(self, request: str) -> None:
        """A request has ended, perhaps before vLLM scheduled it."""
        self.scheduled(request)
        self._asked.pop(request, None)


def _end(group: bytes, request: Any) -> int:
    """The end of a request's last chunk. vLLM has no call that answers for all chunks."""
    positions = getattr(request, "_offload_key_positions", {})
    ends = (end for key, end in positions.items() if key[-GROUP_BYTES:] == group)
    return max(ends, default=0)

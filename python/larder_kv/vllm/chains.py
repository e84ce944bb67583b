"""The chunk before a chunk in its prefix, by which the store evicts a prefix from its tail."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional

#: (group, end token): where a chunk lies in its request.
_Place = tuple[bytes, int]


def _depth(place: int, chunk_tokens: int) -> int:
    """Number of chunks before the chunk that ends here. The last of a request may be partial."""
    return max(0, -(-place // chunk_tokens) - 1)


class Run(NamedTuple):
    """Chunks of a group that follow one another."""

    keys: list[bytes]
    rows: list[int]
    #: vLLM's key of the chunk before the first; None if unknown.
    before: Optional[bytes]
    #: How many chunks lie before the first.
    depth: int


class Chain:
    """The chunks of a request, by their places."""

    def __init__(self) -> None:
        self._keys: dict[_Place, bytes] = {}

    def runs(
        self, group: bytes, chunk_tokens: int, keys: list[bytes], rows: list[int], request: Any
    ) -> list[Run]:
        """Chunks in the order of the prefix, apart where one is missing between two."""
        position = request.get_offload_key_position
        places = [position(key) or 0 for key in keys]
        order = sorted(range(len(keys)), key=places.__getitem__)
        keys, rows = [keys[at] for at in order], [rows[at] for at in order]
        places.sort()
        starts = self._starts(places, chunk_tokens)
        found = []
        for start, end in zip(starts, [*starts[1:], len(keys)]):
            depth = _depth(places[start], chunk_tokens)
            before = self._at((group, depth * chunk_tokens), request) if depth else None
            found.append(Run(keys[start:end], rows[start:end], before, depth))
        if keys:
            self._keys[group, places[-1]] = keys[-1]
        return found

    @staticmethod
    def _starts(places: list[int], chunk_tokens: int) -> list[int]:
        """Where runs begin among sorted places. A place of 0 is unknown."""
        if not places:
            return []
        first, count = places[0], len(places)
        if first and places == list(range(first, first + count * chunk_tokens, chunk_tokens)):
            return [0]
        follows = (
            before and _depth(place, chunk_tokens) * chunk_tokens == before
            for before, place in zip(places, places[1:])
        )
        return [0, *(at for at, is_next in enumerate(follows, 1) if not is_next)]

    def note(self, group: bytes, key: bytes, request: Any) -> None:
        """Remembers the last loaded chunk: the next stored chunk follows it."""
        self._keys[group, request.get_offload_key_position(key) or 0] = key

    def _at(self, place: _Place, request: Any) -> Optional[bytes]:
        if place not in self._keys:
            # Chunks that the GPU's own cache held were neither loaded nor stored. vLLM has no call
            # that answers for a place.
            positions = getattr(request, "_offload_key_positions", {})
            self._keys.update(((key[-4:], end), key) for key, end in positions.items())
        return self._keys.get(place)

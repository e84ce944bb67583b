"""Rust's side of the calls."""

from collections.abc import Mapping, Sequence

__version__: str

class Backend:
    """A storage backend over a shared store. Lookups, reads and writes release the interpreter's lock and never raise
    for what the store or the disk does: they answer that a page is not there."""

    def __init__(self, config: str, server: str) -> None:
        """Attaches to the store that ``config`` names, for the server that ``server`` describes; both are JSON.

        Raises ValueError for a configuration that is wrong, RuntimeError for a store that is not to be had."""

    @property
    def volume(self) -> str: ...
    @property
    def remarks(self) -> list[str]: ...
    def register(
        self,
        facts: str,
        buffers: Sequence[tuple[int, int, int]],
        parts: Sequence[Sequence[int]],
        pages: int,
    ) -> str: ...
    def register_flat(self, facts: str, page_bytes: int) -> str: ...
    def exists(
        self, pool: str, keys: Sequence[str], before: str | None = None, depth: int = 0
    ) -> int: ...
    def exists_in(
        self,
        anchor: str,
        keys: Sequence[str],
        pools: Sequence[tuple[str, str, int, int]],
        before: str | None = None,
        depth: int = 0,
    ) -> tuple[int, int, list[int], list[int]]: ...
    def get(self, pool: str, keys: Sequence[str], address: int, count: int) -> list[bool]: ...
    def set(
        self,
        pool: str,
        keys: Sequence[str],
        address: int,
        count: int,
        before: str | None = None,
        depth: int = 0,
    ) -> list[bool]: ...
    def get_flat(
        self, pool: str, keys: Sequence[str], buffers: Sequence[tuple[int, int]]
    ) -> list[bool]: ...
    def set_flat(
        self,
        pool: str,
        keys: Sequence[str],
        buffers: Sequence[tuple[int, int]],
        before: str | None = None,
        depth: int = 0,
    ) -> list[bool]: ...
    def clear(self) -> int: ...
    def drain(self) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]: ...
    def counters(self) -> dict[str, int | str]: ...
    def describe(self) -> list[str]: ...
    def try_again(self) -> bool: ...
    def close(self) -> bool: ...

def weights_tag(told: Mapping[str, str], places: Sequence[str]) -> str: ...
def main(program: str, leading: Sequence[str], arguments: Sequence[str]) -> int: ...
def check_config(config: str) -> int: ...

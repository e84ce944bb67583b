"""Rust's side of the calls."""

from collections.abc import Mapping, Sequence
from os import PathLike

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
    def make(self) -> str | None: ...
    def is_made(self) -> bool: ...
    def settings(self) -> str | None: ...
    def try_again(self) -> bool: ...
    def close(self) -> bool: ...

class DeviceError(RuntimeError):
    """A device failed."""

class Unavailable(DeviceError):
    """There is no such device."""

class Busy(DeviceError):
    """Too much is in flight."""

class Device:
    """What holds L1, and copies: ``larder.device`` makes all calls."""

    def __init__(self, kind: str, ordinal: int, cache: str | PathLike[str] | None) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def is_host(self) -> bool: ...
    @property
    def why_host(self) -> str | None: ...
    def pool(
        self,
        parts: int,
        row_bytes: int,
        page_tokens: int,
        pages: int,
        tensors: Sequence[tuple[int, int]],
        owner: object,
    ) -> DevicePool: ...

class DevicePool:
    @property
    def pages(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def page_bytes(self) -> int: ...
    def host_pool(
        self, layout: str, pages: int, buffer: tuple[int, int] | None, is_locked: bool, owner: object
    ) -> HostPool: ...
    def load(
        self,
        host: HostPool,
        host_pages: Sequence[int],
        device_pages: Sequence[int],
        stream: int | None,
        copying: Copying | None,
    ) -> Copying: ...
    def store(
        self,
        host: HostPool,
        host_pages: Sequence[int],
        device_pages: Sequence[int],
        stream: int | None,
        copying: Copying | None,
    ) -> Copying: ...

class HostPool:
    @property
    def pages(self) -> int: ...
    @property
    def layout(self) -> str: ...
    @property
    def address(self) -> int: ...

class Copying:
    @property
    def layers(self) -> int: ...
    def done(self, layer: int | None) -> bool: ...
    def wait(self, layer: int | None) -> None: ...
    def hold(self, stream: int, layer: int | None) -> None: ...

def weights_tag(told: Mapping[str, str], files: Sequence[Sequence[str]]) -> str: ...
def main(program: str, leading: Sequence[str], arguments: Sequence[str]) -> int: ...
def check_config(config: str, page_bytes: str | None = None) -> int: ...

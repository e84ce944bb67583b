"""The namespace of a key: everything that decides the bytes of a chunk besides its hash."""

from __future__ import annotations

import hashlib
import logging
import threading
from typing import Any, Iterable, NamedTuple, Optional

from larder_kv.lmcache.settings import LarderL2AdapterConfig
from larder_kv.store import Namespace, Store, StoreError

logger = logging.getLogger(__name__)

#: Most cache salts: each is a namespace for each model, rank and group.
SALTS_MAX = 1024

#: Bytes of the store's keys.
KEY_BYTES = 32


class Layout(NamedTuple):
    """The tensors of a chunk."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    bytes: int

    @classmethod
    def of(
        cls, shapes: Iterable[Any], dtypes: Iterable[Any], size: Optional[int] = None
    ) -> Optional[Layout]:
        """From torch's shapes and dtypes; None if there are none."""
        shapes, dtypes = list(shapes), list(dtypes)
        if not shapes:
            return None
        total = sum(
            shape.numel() * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)
        )
        return cls(
            tuple(tuple(shape) for shape in shapes),
            tuple(map(str, dtypes)),
            total if size is None else size,
        )

    @classmethod
    def of_object(cls, memory: Any) -> Layout:
        """Of one of LMCache's memory objects."""
        metadata = memory.metadata
        shapes = metadata.shapes or [metadata.shape]
        dtypes = metadata.dtypes or [metadata.dtype]
        layout = cls.of(shapes, dtypes, memory.get_size())
        assert layout is not None
        return layout


class Place(NamedTuple):
    """The fields of a key besides its hash."""

    model: str
    kv_rank: int
    group: int
    salt: str

    @classmethod
    def of(cls, key: Any) -> Place:
        return cls(key.model_name, key.kv_rank, key.object_group_id, key.cache_salt)


class Space(NamedTuple):
    """The chunks of one place and layout."""

    place: Place
    layout: Layout
    namespace: Namespace

    @property
    def bytes(self) -> int:
        """Of a chunk."""
        return self.layout.bytes

    @property
    def chunk_tokens(self) -> int:
        """0 if it is not known. LMCache's chunks of KV are (1 or 2, layers, tokens, width)."""
        shape = self.layout.shapes[0]
        return shape[2] if len(shape) == 4 else 0


class Spaces:
    """The namespaces of an adapter, made when they are needed. A model without a weights tag has
    none.
    """

    def __init__(self, store: Store, config: LarderL2AdapterConfig) -> None:
        self._store = store
        self._config = config
        self._lock = threading.Lock()
        self._spaces: dict[tuple[Place, Layout], Optional[Space]] = {}
        self._of_place: dict[Place, list[Space]] = {}
        self._salts: set[str] = set()
        self._said: set[str] = set()

    def at(self, place: Place) -> list[Space]:
        """The spaces of a place so far."""
        return self._of_place.get(place, [])

    def find(self, place: Place, layout: Layout) -> Optional[Space]:
        """The space of a place and layout; None, and a line in the log, if no chunk of it can be
        kept.
        """
        found = self._spaces.get((place, layout))
        if found is not None:
            return found
        with self._lock:
            return self._make(place, layout)

    def drop(self, model: str) -> None:
        """Keeps no further chunks of a model without a tag."""
        with self._lock:
            for place, layout in [key for key in self._spaces if key[0].model == model]:
                del self._spaces[place, layout]
                self._of_place.pop(place, None)
            self._said.add(f"model {model}")

    def _make(self, place: Place, layout: Layout) -> Optional[Space]:
        if (place, layout) in self._spaces:
            return self._spaces[place, layout]
        tag = self._config.tag_of(place.model)
        if tag is None:
            self._say(
                f"model {place.model}",
                f"the weights of model {place.model} cannot be distinguished from others of this name: "
                "its chunks are not kept. Set `weights_tags`, `model_dirs` or `weights_tag`",
            )
            return None
        if place.salt not in self._salts and len(self._salts) >= SALTS_MAX:
            self._say(
                "salts",
                f"more than {SALTS_MAX} cache salts: the chunks of further ones are not kept",
            )
            return None
        if not self._fits(layout.bytes):
            self._spaces[place, layout] = None
            return None
        namespace = self._store.namespace(
            model=place.model,
            weights=tag,
            dtype=",".join(layout.dtypes),
            layout="lmcache "
            + " ".join("x".join(map(str, shape)) or "scalar" for shape in layout.shapes),
            # Tokens are a dimension of the shapes; LMCache does not name it.
            page_tokens=1,
            parts=[layout.bytes],
            pool=f"group {place.group}",
            extra={
                "kv_rank": f"{place.kv_rank:08x}",
                **_tenant(place.salt, self._config.store.tenant),
            },
        )
        self._config.store.limit(namespace)
        space = Space(place, layout, namespace)
        self._salts.add(place.salt)
        self._of_place[place] = [*self.at(place), space]
        self._spaces[place, layout] = space
        return space

    def _fits(self, chunk_bytes: int) -> bool:
        """Whether the store keeps chunks of this size."""
        try:
            remark = self._store.fit(chunk_bytes)
        except StoreError as error:
            self._say(
                f"chunks of {chunk_bytes}", f"chunks of {chunk_bytes} bytes are not kept: {error}"
            )
            return False
        if remark is not None:
            self._say(
                f"chunks of {chunk_bytes}", f"chunks of {chunk_bytes} bytes waste room: {remark}"
            )
        return True

    def _say(self, topic: str, line: str) -> None:
        if topic not in self._said:
            self._said.add(topic)
            logger.warning("larder: %s", line)


def _tenant(salt: str, own: Optional[str]) -> dict[str, str]:
    """The fields of a namespace that say whose its chunks are. An encrypted store has a key for
    each tenant. ``own`` is the tenant of chunks without a salt.
    """
    if salt:
        return {"tenant": salt}
    # A salt with the text of the own tenant is of the same tenant, and finds none of its chunks.
    return {} if own is None else {"tenant": own, "salt": "none"}


def page_key(chunk_hash: bytes) -> bytes:
    """The store's key of a chunk: its hash, if that is as long. The store distinguishes keys by
    their first bytes.
    """
    return chunk_hash if len(chunk_hash) == KEY_BYTES else hashlib.sha256(chunk_hash).digest()

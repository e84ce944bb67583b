"""The whole keys of the chunks that the store holds for an adapter: the store keeps only the first
bytes of them in memory.

Lookups and loads do not depend on the ledger. It serves lists, usage by cache salt, and LMCache's
own eviction. It is kept in memory, and written behind to an SQLite file, so that a restart begins
with it. A kill of the process loses the last milliseconds: these chunks are entered again when they
are looked up.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sqlite3
import threading
from bisect import bisect_right
from collections import Counter
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Optional

from larder_kv.lmcache.spaces import Layout, Place, Space, page_key

logger = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS spaces (
    id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, place TEXT NOT NULL, layout TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS chunks (
    space INTEGER NOT NULL, hash BLOB NOT NULL, PRIMARY KEY (space, hash)
) WITHOUT ROWID;
"""


#: The store's name of a chunk: its namespace's digest, and its key.
Page = tuple[bytes, bytes]


class Entry(NamedTuple):
    """A stored chunk."""

    key: Any
    space: Space
    #: Grows from entry to entry, and is a new one when the chunk is written again.
    number: int

    @property
    def page(self) -> Page:
        return self.space.namespace.digest, page_key(self.key.chunk_hash)


class Ledger:
    """Entries by key."""

    def __init__(self, path: Optional[str]) -> None:
        """Opens the file. A file that is no ledger is set aside. Without ``path``, or a file, entries
        live in memory alone.
        """
        self._guard = threading.Lock()
        self._entries: dict[Any, Entry] = {}
        self._by_page: dict[Page, Any] = {}
        self._bytes: Counter[str] = Counter()
        self._next = 0
        #: Changes that are not in the file: (space, hash, whether it is there).
        self._changes: list[tuple[Space, bytes, bool]] = []
        self._written: dict[bytes, int] = {}
        #: Set while there are changes.
        self.changed = threading.Event()
        #: Held during the use of the file.
        self._file_guard = threading.Lock()
        self._file = None if path is None else _opened(path)

    def __len__(self) -> int:
        return len(self._entries)

    def usage(self) -> dict[str, int]:
        """Bytes by cache salt."""
        with self._guard:
            return {salt: held for salt, held in self._bytes.items() if held > 0}

    def get(self, key: Any) -> Optional[Entry]:
        return self._entries.get(key)

    def mark(self) -> int:
        """Entries of later calls have this number or a higher one."""
        return self._next

    def add(self, found: Iterable[tuple[Any, Space]], is_written: bool = False) -> list[Entry]:
        """Enters chunks. Returns the new ones. ``is_written``: they were not in the store
        before, so that earlier facts about them are out of date.
        """
        added = []
        with self._guard:
            for key, space in found:
                former = self._entries.get(key)
                if former is not None and not is_written:
                    continue
                if former is not None:
                    self._strike(former)
                entry = Entry(key, space, self._next)
                self._next += 1
                self._entries[key] = entry
                self._by_page[entry.page] = key
                self._bytes[key.cache_salt] += space.bytes
                if former is None or former.space is not space:
                    self._changes.append((space, key.chunk_hash, True))
                if former is None:
                    added.append(entry)
        if self._changes:
            self.changed.set()
        return added

    def remove(self, keys: Iterable[Any], before: Optional[int] = None) -> list[Entry]:
        """Strikes out chunks. Returns the entered ones. ``before``: a mark; later entries
        stay.
        """
        removed = []
        with self._guard:
            for key in keys:
                entry = self._entries.get(key)
                if entry is not None and (before is None or entry.number < before):
                    self._strike(entry)
                    self._changes.append((entry.space, key.chunk_hash, False))
                    removed.append(entry)
        if removed:
            self.changed.set()
        return removed

    def _strike(self, entry: Entry) -> None:
        del self._entries[entry.key]
        self._by_page.pop(entry.page, None)
        self._bytes[entry.key.cache_salt] -= entry.space.bytes

    def of(self, page: Page) -> Optional[Entry]:
        """The entry of a page of the store."""
        key = self._by_page.get(page)
        return None if key is None else self._entries.get(key)

    def by_space(self) -> dict[bytes, list[Entry]]:
        """All entries, by their namespaces' digests."""
        found: dict[bytes, list[Entry]] = {}
        for entry in self.after(-1):
            found.setdefault(entry.space.namespace.digest, []).append(entry)
        return found

    def after(self, number: int) -> list[Entry]:
        """The entries with higher numbers, in their order."""
        with self._guard:
            entries = list(self._entries.values())
        return entries[bisect_right(entries, number, key=lambda entry: entry.number) :]

    # --- the file

    def load(
        self,
        space_of: Callable[[Place, Layout], Optional[Space]],
        key_of: Callable[[Place, bytes], Any],
    ) -> None:
        """Enters the file's chunks of this configuration. Chunks of other weights are
        deleted.
        """
        if self._file is None:
            return
        try:
            with self._file_guard, self._file as file:
                # Spaces without chunks would count as cache salts in use.
                file.execute("DELETE FROM spaces WHERE id NOT IN (SELECT space FROM chunks)")
                for number, digest, place, layout in list(
                    file.execute("SELECT id, digest, place, layout FROM spaces")
                ):
                    space = _space(space_of, place, layout)
                    if space is None or space.namespace.digest != digest:
                        file.execute("DELETE FROM chunks WHERE space = ?", (number,))
                        file.execute("DELETE FROM spaces WHERE id = ?", (number,))
                        continue
                    self._written[digest] = number
                    hashes = file.execute("SELECT hash FROM chunks WHERE space = ?", (number,))
                    self.add((key_of(space.place, chunk_hash), space) for (chunk_hash,) in hashes)
        except sqlite3.Error as error:
            self._lose(error)
        with self._guard:
            self._changes.clear()

    def write(self) -> None:
        """Brings the file up to date."""
        self.changed.clear()
        with self._guard:
            changes, self._changes = self._changes, []
        if self._file is None or not changes:
            return
        try:
            with self._file_guard, self._file as file:
                for space, is_there, hashes in _runs(changes):
                    rows = [(self._number(file, space), one) for one in hashes]
                    verb = (
                        "INSERT OR IGNORE INTO chunks VALUES (?, ?)"
                        if is_there
                        else "DELETE FROM chunks WHERE space = ? AND hash = ?"
                    )
                    file.executemany(verb, rows)
        except sqlite3.Error as error:
            self._lose(error)

    def _number(self, file: sqlite3.Connection, space: Space) -> int:
        digest = space.namespace.digest
        if digest not in self._written:
            values = (digest, json.dumps(space.place), json.dumps(space.layout))
            file.execute(
                "INSERT OR IGNORE INTO spaces (digest, place, layout) VALUES (?, ?, ?)", values
            )
            [(self._written[digest],)] = file.execute(
                "SELECT id FROM spaces WHERE digest = ?", (digest,)
            )
        return self._written[digest]

    def _lose(self, error: sqlite3.Error) -> None:
        self._file = None
        logger.warning(
            "larder: the file of keys cannot be used (%s): after a restart, lists and usage show only "
            "chunks that have been looked up",
            error,
        )

    def close(self) -> None:
        self.write()
        if self._file is not None:
            self._file.close()
            self._file = None


def _opened(path: str) -> Optional[sqlite3.Connection]:
    for is_first in (True, False):
        try:
            file = sqlite3.connect(path, timeout=1.0, check_same_thread=False)
            # A crash of the machine may cost the last changes, never the file.
            file.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;" + _SCHEMA)
            return file
        except sqlite3.OperationalError as error:
            logger.warning(
                "larder: the file of keys %s cannot be opened (%s): "
                "lists and usage begin empty at each start",
                path,
                error,
            )
            return None
        except sqlite3.DatabaseError as error:
            if is_first:
                logger.warning(
                    "larder: %s is no file of keys (%s): it is set aside as %s.damaged",
                    path,
                    error,
                    path,
                )
                os.replace(path, f"{path}.damaged")
    return None


def _space(
    space_of: Callable[[Place, Layout], Optional[Space]], place: str, layout: str
) -> Optional[Space]:
    shapes, dtypes, size = json.loads(layout)
    return space_of(
        Place(*json.loads(place)), Layout(tuple(map(tuple, shapes)), tuple(dtypes), size)
    )


def _runs(changes: list[tuple[Space, bytes, bool]]) -> Iterator[tuple[Space, bool, list[bytes]]]:
    """Changes of the same kind that follow one another."""
    for (_, is_there), run in itertools.groupby(changes, lambda change: (id(change[0]), change[2])):
        listed = list(run)
        yield listed[0][0], is_there, [chunk_hash for _, chunk_hash, _ in listed]

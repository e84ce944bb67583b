"""Tokens of requests, for the store's counters. A lookup of LMCache is a request's.

Its keys are those of all ranks and groups: the rank and group of the first one count for all.
"""

from __future__ import annotations

from typing import Optional

from larder_kv.lmcache.lanes import Task
from larder_kv.lmcache.spaces import Place, Space
from larder_kv.store import Status


def count_asked(task: Task) -> None:
    """A lookup has ended. A chunk behind the first missing one counts as not found."""
    there, space = _counted(task)
    if space is not None:
        size, found = space.chunk_tokens, [*there, False].index(False)
        space.namespace.count_tokens(asked=len(there) * size, found=found * size)


def count_served(task: Task, prefill_rate: Optional[float]) -> None:
    """A load has ended."""
    there, space = _counted(task)
    if space is not None:
        served = sum(there) * space.chunk_tokens
        space.namespace.count_tokens(served=served, prefill_rate=prefill_rate)


def _counted(task: Task) -> tuple[list[bool], Optional[Space]]:
    """Whether each chunk that counts is there, and their space; None if nothing is known."""
    first = Place.of(task.keys[0]) if task.keys else None
    slots = [slot for slot, key in enumerate(task.keys) if Place.of(key) == first]
    space = next((task.spaces[slot] for slot in slots if slot in task.spaces), None)
    if space is None or not space.chunk_tokens:
        return [], None
    return [task.statuses[slot] == Status.OK for slot in slots], space

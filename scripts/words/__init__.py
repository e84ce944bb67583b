"""Engines for scripts/bench-words, a module for each.

A module has a class `Engine(place, model)`: `place` is a new folder for the store and the logs.

- NAME, and UNIT: tokens of a page or chunk.
- `replaced()`: a sentence about what is replaced on this machine; empty where nothing is.
- `settings()`: the sizes of the tiers, and of a page or chunk.
- `started(with_store)`: a context in which the engine runs, in new processes, which have ended at its
  end. It gives an object with `ask(prompt, tokens)`, which gives an `Asked`, and `stored(tokens)`,
  which waits until the store holds a prompt of this many tokens that was asked last.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Asked:
    """An answer: seconds to its first token, tokens of the prompt that were read from L3, and its tokens."""

    seconds: float
    read: int
    ids: list[int]
    #: Tokens of the prompt that were read from any tier.
    cached: int = 0

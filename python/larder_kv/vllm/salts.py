"""The salts of requests, where each is the tenant of its request's chunks.

vLLM's context of a request has no salt. The connector tells it before vLLM hands over the request,
and it is kept in that context.
"""

from __future__ import annotations

import time
import unicodedata
from dataclasses import dataclass
from typing import Any, Callable, Optional

from larder_kv.vllm.lookups import PATIENCE

#: Most salts of a server in one run: as many as a keyring has tenants. Each takes a namespace for
#: each cache group, and a store forgets no namespace while it is open.
SALTS_MAX = 2900

#: Most bytes of a salt: it is a text among others in the record of a namespace.
_BYTES_MAX = 1024


@dataclass
class Salt:
    """The salt of a request, in vLLM's context of it."""

    #: None: no chunk of it is kept.
    name: Optional[str]
    #: Until when its namespaces are waited for; None before the first lookup.
    _due: Optional[float] = None

    def waits(self) -> bool:
        """Whether a lookup waits until the namespaces are made."""
        if self._due is None:
            self._due = time.monotonic() + PATIENCE
        return time.monotonic() < self._due


class Salts:
    """The salts so far."""

    def __init__(self, refuse: Callable[[str], None]) -> None:
        """``refuse`` gets the reason if no chunk of a salt is kept."""
        self._refuse = refuse
        self._known: set[str] = set()
        #: The request that vLLM hands over next, and its salt.
        self._told: Optional[tuple[str, str]] = None

    def tell(self, request: str, salt: Optional[str]) -> None:
        """The salt of the request that vLLM hands over next."""
        self._told = (request, salt) if salt else None

    def begin(self, context: Any) -> Optional[Salt]:
        """Puts its salt into vLLM's context of a new request. Returns it; None without a salt."""
        told, self._told = self._told, None
        if told is None or told[0] != context.req_id:
            return None
        salt = Salt(self._kept(told[1]))
        context.set_state(salt)
        return salt

    def _kept(self, salt: str) -> Optional[str]:
        if salt in self._known:
            return salt
        if not _is_name(salt):
            self._refuse(
                f"cache salts are longer than {_BYTES_MAX} bytes or hold a control character"
            )
            return None
        if len(self._known) >= SALTS_MAX:
            self._refuse(f"requests have cache salts beyond the first {SALTS_MAX}")
            return None
        self._known.add(salt)
        return salt


def _is_name(salt: str) -> bool:
    """Whether the field of a namespace may have this text."""
    try:
        is_short = len(salt.encode()) <= _BYTES_MAX
    except UnicodeEncodeError:
        return False
    return is_short and all(unicodedata.category(char) != "Cc" for char in salt)

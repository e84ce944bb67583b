"""A description of a server's configuration: fields and their values, as texts that are the same in
each process with the same settings.

No value depends on the process: sets are sorted, objects are described by their attributes. A value
that differs from others by its address alone gets a new text at each start.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import re
import secrets
import sys
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Iterator

#: Keys of a model's `config.json` that do not describe the model.
_OF_LIBRARY = (
    # Its path, and its commit at the hub: the files of the model have fields of their own.
    "_name_or_path",
    "_commit_hash",
    # The release of the library that is installed.
    "transformers_version",
)

_ADDRESS = re.compile(r"\b0x[0-9a-f]{4,}")


#: The beginning of the text of a value that cannot be described.
UNTOLD = "of this start alone: "


class Untold(Exception):
    """A value differs from others by its address alone."""


def fields(name: str, value: Any, left_out: Mapping[str, frozenset[str]]) -> dict[str, str]:
    """The fields of a value, by their names below ``name``. ``left_out``: by class, the names of
    attributes that are left out.

    Raises nothing: a value that cannot be described has another text at each start.
    """
    return dict(_walk(name, value, left_out, ()))


def _walk(
    name: str, value: Any, left_out: Mapping[str, frozenset[str]], above: tuple[int, ...]
) -> Iterator[tuple[str, str]]:
    try:
        inner = _inside(value, left_out)
    except Exception:
        # An attribute of an unknown class: it counts as a value that cannot be described.
        inner = None
    if inner is None:
        yield name, _text(value)
    elif id(value) in above:
        yield name, '"(above)"'
    else:
        yield name, json.dumps(type(value).__name__)
        for key, part in inner.items():
            yield from _walk(f"{name}.{key}", part, left_out, (*above, id(value)))


def _inside(value: Any, left_out: Mapping[str, frozenset[str]]) -> dict[str, Any] | None:
    """The attributes of an object that is described by them; None for any other value."""
    found = _attributes(value)
    if found is None:
        return None
    out = left_out.get(type(value).__name__, frozenset())
    return {key: part for key, part in found.items() if key not in out}


def names(kind: type) -> list[str] | None:
    """The names of the fields that a class declares; None if it declares none."""
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    for declared in ("__struct_fields__", "model_fields"):
        if (found := getattr(kind, declared, None)) is not None:
            return list(found)
    return None


def _attributes(value: Any) -> dict[str, Any] | None:
    if isinstance(value, (type, enum.Enum, PurePath)) or callable(value):
        return None
    if callable(to_dict := getattr(value, "to_dict", None)):
        # A configuration of a model: its contents, after overrides.
        return {key: part for key, part in to_dict().items() if key not in _OF_LIBRARY}
    if (declared := names(type(value))) is not None:
        return {name: getattr(value, name) for name in declared if hasattr(value, name)}
    if isinstance(value, (Mapping, list, tuple, set, frozenset)):
        return None
    found = dict(getattr(value, "__dict__", {}))
    # An object without attributes, such as a tensor, is described by its text. An object of a
    # class in Python without a text of its own is described by its class.
    is_bare = hasattr(value, "__dict__") and type(value).__repr__ is object.__repr__
    return found if found or is_bare else None


def _text(value: Any) -> str:
    try:
        return json.dumps(_plain(value, ()), sort_keys=True)
    except Exception:
        # A value that cannot be described, or an error of an unknown class.
        return json.dumps(f"{UNTOLD}{secrets.token_hex(8)}")


def is_untold(text: str) -> bool:
    return text.startswith(f'"{UNTOLD}')


def _plain(value: Any, above: tuple[int, ...]) -> Any:
    """The value in terms of JSON. Raises Untold."""
    if value is None or isinstance(value, (bool, int, float, str)) and not _is_enum(value):
        return value
    if _is_enum(value):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, (bytes, bytearray)):
        return value.hex()
    if id(value) in above:
        return "(above)"
    deeper = (*above, id(value))
    if isinstance(value, (list, tuple)):
        return [_plain(part, deeper) for part in value]
    if isinstance(value, (set, frozenset)):
        return sorted(json.dumps(_plain(part, deeper), sort_keys=True) for part in value)
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, str) else json.dumps(_plain(key, deeper)): _plain(part, deeper)
            for key, part in value.items()
            if key not in _OF_LIBRARY
        }
    if isinstance(value, type) or callable(value):
        return _importable(value)
    if (inner := _attributes(value)) is not None:
        parts = {key: _plain(part, deeper) for key, part in inner.items()}
        return {"": type(value).__name__, **parts}
    text = str(value)
    if _ADDRESS.search(text):
        raise Untold
    return text


def _is_enum(value: Any) -> bool:
    return isinstance(value, enum.Enum)


def _importable(value: Any) -> str:
    """The name by which a class or function is imported. Raises Untold for one without a name."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    found: Any = sys.modules.get(module or "")
    for part in (name or "").split("."):
        found = getattr(found, part, None)
    if found is None or getattr(found, "__func__", found) is not getattr(value, "__func__", value):
        raise Untold
    return f"{module}.{name}"

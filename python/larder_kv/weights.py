"""The weights tag of a server's pages: the digest of a description of the server.

Pages of other weights must never be served, nor pages that the same weights make under other
settings. So a description has every field of the engine's configuration, except fields without an
effect: each engine lists the fields that are left out, with the reasons (`larder_kv.sglang_left_out`,
`larder_kv.vllm.left_out`). An unknown field is part of it. If the files cannot be distinguished from
others of the same name, there is no tag, and the server does not start without a tag from its
operator.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
from typing import Any, Mapping, NamedTuple, Optional, Sequence

from larder_kv import _larder, described

logger = logging.getLogger(__name__)

#: The end of an error about weights without a tag.
HELP = "so that these weights cannot be distinguished from others: set `weights_tag` in the extra config"

#: The file of the last descriptions, beside the file of the store.
NOTES = "larder.weights"

#: Longer values are noted by their digest.
_NOTED_MAX = 80

#: Most descriptions in the notes: the oldest leave.
_NOTES_MAX = 64

#: Most changed fields that a line of the log names.
_NAMED_MAX = 20


class Named(NamedTuple):
    """Files that a server loads."""

    #: Their role in the server, such as `model`.
    role: str
    #: Their path, or the name of a model of the hub.
    path: str
    revision: Optional[str] = None


class Description(NamedTuple):
    """The facts that, with the tokens, decide the bytes of a server's pages."""

    #: An operator's tag, which stands for the weights.
    own: Optional[str]
    fields: Mapping[str, str]

    @property
    def tag(self) -> str:
        tag = _larder.weights_tag(dict(self.fields))
        return tag if self.own is None else f"{self.own}+{tag}"


def files(named: Sequence[Named], download_dir: Optional[str] = None) -> dict[str, str]:
    """The fields of the files. Raises ValueError for files that are not on this machine."""
    return {
        f"files.{role}": json.dumps(_larder.weights_files(places(path, revision, download_dir)))
        for role, path, revision in named
    }


def warn_of_untold(fields: Mapping[str, str]) -> None:
    """Logs the fields that make this server share with no other start."""
    if found := [name for name, text in fields.items() if described.is_untold(text)]:
        logger.warning(
            "larder: the value of %s cannot be distinguished from others: pages of this server are "
            "found by itself alone, until it ends",
            ", ".join(found),
        )


def places(path: str, revision: Optional[str], download_dir: Optional[str]) -> list[str]:
    """Where a model's files may be on this machine, in the order in which engines look for them."""
    if os.path.exists(path):
        return [path]
    places = _snapshots(path, revision, download_dir)
    if not places:
        raise ValueError(f"the files of {path} are not on this machine, {HELP}")
    return places


def _snapshots(model: str, revision: Optional[str], download_dir: Optional[str]) -> list[str]:
    """The places of this revision in caches of the model hub, whole or in part: a cache may have
    its weights alone, or its configuration alone.

    By the cache's layout, as engines find them: the hub's library finds complete snapshots alone.
    """
    from huggingface_hub import constants

    found = []
    for cache in filter(None, (download_dir, constants.HF_HUB_CACHE)):
        folder = os.path.join(cache, constants.REPO_ID_SEPARATOR.join(["models", *model.split("/")]))
        commit = revision
        reference = os.path.join(folder, "refs", revision or "main")
        if os.path.isfile(reference):
            with open(reference) as file:
                commit = file.read().strip()
        if commit and os.path.isdir(snapshot := os.path.join(folder, "snapshots", commit)):
            found.append(snapshot)
    return found


def compare(
    volume: str, server: str, tag: str, fields: Mapping[str, str], is_encrypted: bool
) -> None:
    """Logs the fields that differ from the last description of a server of this name at this store,
    and notes the new description. May wait for the disk; a failure costs the log line alone.
    """
    if is_encrypted or not os.path.isfile(volume):
        # The notes have the names of models in clear. A block device has no place beside it.
        return
    path = os.path.join(os.path.dirname(volume), NOTES)
    try:
        notes = _read(path)
        before = notes.pop(server, None)
        noted = {"tag": tag, "fields": {name: _noted(text) for name, text in fields.items()}}
        if isinstance(before, dict) and before.get("tag") != tag:
            _say(server, before, noted)
        notes[server] = noted
        _write(path, dict(list(notes.items())[-_NOTES_MAX:]))
    except OSError as error:
        logger.info("larder: the weights tag is not compared with the last one: %s", error)


def _say(server: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    old, new = before.get("fields") or {}, now["fields"]
    changed = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
    lines = [f"{name}: {old.get(name, 'none')} -> {new.get(name, 'none')}" for name in changed]
    if len(lines) > _NAMED_MAX:
        lines[_NAMED_MAX:] = [f"{len(lines) - _NAMED_MAX} more"]
    logger.warning(
        "larder: the weights tag of %s is not that of the last start: %s, before %s; pages from "
        "before are not found. Changed: %s",
        server,
        now["tag"],
        before.get("tag"),
        "; ".join(lines) or "the operator's `weights_tag`",
    )


def _noted(text: str) -> str:
    """A value for the notes and the log. Only plain ones are shown: tables and addresses may have
    secrets.
    """
    if len(text) <= _NOTED_MAX and not any(mark in text for mark in "{[@"):
        return text
    return f"digest {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def _read(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write(path: str, notes: dict[str, Any]) -> None:
    """Replaces the notes as a whole: others may read them at any time."""
    handle, made = tempfile.mkstemp(prefix=f"{NOTES}.", dir=os.path.dirname(path))
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(notes, file)
        os.replace(made, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(made)
        raise

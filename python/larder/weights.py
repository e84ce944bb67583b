"""The weights tag of a server's pages: the loaded files, and the server's arguments.

Pages of other weights must never be served. If the files cannot be told from others of the same name, there is no tag, and the
server does not start without a tag from its operator. Each engine names its arguments and files: `larder.sglang_weights`,
`larder.vllm.weights`.
"""

from __future__ import annotations

import os
from typing import Mapping, Optional, Sequence

from larder import _larder

#: The end of an error about weights without a tag.
HELP = "so that nothing tells these weights from others: set `weights_tag` in the extra config"


def tag(told: Mapping[str, str], named: Sequence[tuple[str, Optional[str]]], download_dir: Optional[str] = None) -> str:
    """A tag of a server's arguments, by name, and of the files at these paths or of these models of the hub.

    ``named`` has (path or name, revision). Raises ValueError for files that are not on this machine.
    """
    return _larder.weights_tag(dict(told), [places(path, revision, download_dir) for path, revision in named])


def places(path: str, revision: Optional[str], download_dir: Optional[str]) -> list[str]:
    """Where a model's files may be on this machine, in the order in which engines look for them."""
    if os.path.exists(path):
        return [path]
    places = _snapshots(path, revision, download_dir)
    if not places:
        raise ValueError(f"the files of {path} are not on this machine, {HELP}")
    return places


def _snapshots(model: str, revision: Optional[str], download_dir: Optional[str]) -> list[str]:
    """Where caches of the model hub hold this revision, whole or (only weights were asked for, or only the configuration) in part.

    By the cache's layout, as engines find them: the hub's library answers for snapshots alone that hold every file of theirs.
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

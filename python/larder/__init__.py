"""Larder: a local L3 for LLM serving.

:class:`Store` keeps pages on NVMe, for any engine (docs/python.md). SGLang loads
``larder.sglang.LarderHiCache``. ``python -m larder`` is the command line. ``larder.device`` copies
between an engine's tensors and host memory.

The distribution is ``larder-kv``. A distribution ``larder`` of another project installs a module of
the same name.
"""

from importlib import metadata as _metadata
import warnings as _warnings

from larder._larder import __version__
from larder import store as _store
from larder.store import *

__all__ = ["__version__", *_store.__all__]


def _warn_of_clash() -> None:
    """Warns if the other distribution is installed: each may have replaced files of the other."""
    try:
        other = _metadata.distribution("larder")
    except _metadata.PackageNotFoundError:
        return
    _warnings.warn(
        f"the distribution `larder` {other.version} is installed beside `larder-kv`: it is another "
        "project with a module of the same name, and each may have replaced files of the other. "
        "Run `pip uninstall larder larder-kv`, then install Larder again",
        RuntimeWarning,
        stacklevel=3,
    )


_warn_of_clash()

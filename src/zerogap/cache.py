"""The only place that says where files are kept that can be made again: converted models, certificates."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/zerogap`, else `~/.cache/zerogap`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "zerogap"

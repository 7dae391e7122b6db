"""The sender of each transfer mode, for tests that run in every mode."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import pytest

from zerogap.weights.modes.broadcast import BroadcastSender
from zerogap.weights.modes.broadcast_packed import PackedSender
from zerogap.weights.modes.disk_delta import DiskDeltaSender
from zerogap.weights.modes.ipc import IpcSender
from zerogap.weights.modes.p2p import P2pSender

NO_NIXL = importlib.util.find_spec("nixl_cu13") is None


def _delta_sender(engine: Any, **options: Any) -> DiskDeltaSender:
    return DiskDeltaSender(engine, folder=Path(tempfile.mkdtemp()) / "weights", run="test", **options)


SENDERS: dict[str, Any] = {
    "broadcast": BroadcastSender,
    "broadcast_packed": PackedSender,
    "disk_delta": _delta_sender,
    "ipc": IpcSender,
    "p2p": P2pSender,
}
IN_EVERY_MODE = [
    pytest.param(mode, marks=pytest.mark.skipif(mode == "p2p" and NO_NIXL, reason="the package nixl-cu13 is missing"))
    for mode in sorted(SENDERS)
]
"""For `parametrize` and for a fixture's `params`."""

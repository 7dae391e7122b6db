"""The sender of each transfer mode, for tests that run in every mode."""

from __future__ import annotations

from typing import Any

from zerogap.weights.modes.broadcast import BroadcastSender
from zerogap.weights.modes.broadcast_packed import PackedSender
from zerogap.weights.modes.ipc import IpcSender

SENDERS: dict[str, Any] = {"broadcast": BroadcastSender, "broadcast_packed": PackedSender, "ipc": IpcSender}

"""The only list of transfer modes: which receiver an engine opens for a session of which mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from zerogap.errors import TransferFailed
from zerogap.weights.arrival import Destination
from zerogap.weights.modes.broadcast import BroadcastReceiver
from zerogap.weights.modes.broadcast_packed import PackedReceiver
from zerogap.weights.modes.disk_delta import DiskDeltaReceiver
from zerogap.weights.modes.ipc import IpcReceiver
from zerogap.weights.modes.p2p import P2pReceiver
from zerogap.weights.modes.shared import SharedReceiver
from zerogap.weights.transfer import WeightReceiver
from zerogap.wire.tensors import TransferMode

RECEIVERS: Mapping[TransferMode, Callable[[Destination], WeightReceiver]] = {
    "broadcast": BroadcastReceiver,
    "broadcast_packed": PackedReceiver,
    "disk_delta": DiskDeltaReceiver,
    "ipc": IpcReceiver,
    "p2p": P2pReceiver,
    "shared": SharedReceiver,
}


def open_receiver(mode: TransferMode, destination: Destination) -> WeightReceiver:
    """Raises TransferFailed for a mode that this engine does not receive by."""
    if mode not in RECEIVERS:
        raise TransferFailed(
            f"this engine does not receive weights by transfer mode {mode}",
            remedy=f"set refit.mode to one of {', '.join(sorted(RECEIVERS))}",
        )
    return RECEIVERS[mode](destination)

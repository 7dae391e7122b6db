"""The only place that makes the sender of a run's transfer mode."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from zerogap.config.rules import LOOPBACK
from zerogap.config.schema import RunConfig
from zerogap.errors import ConfigError
from zerogap.weights.groups import own_address
from zerogap.weights.modes.broadcast import BroadcastSender
from zerogap.weights.modes.broadcast_packed import PackedSender
from zerogap.weights.modes.disk_delta import DiskDeltaSender
from zerogap.weights.modes.ipc import IpcSender
from zerogap.weights.modes.p2p import P2pSender
from zerogap.weights.modes.shared import SharedSender
from zerogap.weights.modes.stock import StockBroadcastSender, StockCheckpointSender, StockPackedSender
from zerogap.weights.transfer import WeightSender
from zerogap.wire.api import RolloutEngine
from zerogap.wire.tensors import TransferMode

Make = Callable[..., WeightSender]


def open_sender(
    config: RunConfig, engine: RolloutEngine, fingerprint: str | None, *, run_folder: Path, stock: bool = False
) -> WeightSender:
    """`fingerprint` is the trainer's numerics certificate, or None to claim no parity; `stock`: the engines are
    SGLang's own. Raises ConfigError for a mode that those cannot receive in.
    """
    mode = config.refit.mode
    senders = STOCK_SENDERS if stock else SENDERS
    if mode not in senders:
        raise ConfigError(
            f"refit.mode={mode!r} with engine.urls={list(config.engine.urls)}: SGLang does not receive so",
            remedy=f"set refit.mode to one of {', '.join(STOCK_SENDERS)}, or attach engines of `zerogap serve`",
        )
    make = senders[mode](config)
    if mode == "disk_delta":
        make = partial(make, folder=delta_folder(config, run_folder), run=run_folder.name, keep=config.refit.keep)
    if mode == "disk_delta" and not stock:
        make = partial(make, snapshot_every=config.refit.snapshot_every)
    return make(engine, fingerprint=fingerprint, max_bucket_bytes=config.refit.max_bucket_bytes)


def delta_folder(config: RunConfig, run_folder: Path) -> Path:
    """Through which deltas travel: a folder of the run's own, so that two runs never meet."""
    if config.refit.folder is None:
        return (run_folder / "weights").resolve()
    return Path(config.refit.folder).resolve() / run_folder.name


def slow_choice(config: RunConfig) -> str | None:
    """What is known against the mode of this run, where it works and another is faster."""
    near = all(urlsplit(url).hostname in LOOPBACK for url in config.engine.urls)
    if config.refit.mode == "p2p" and near:
        return (
            "refit.mode='p2p' with every engine on this host: published measurements show it 69% to 72% slower there "
            "than a broadcast"
        )
    return None


def _in_group(cls: Make, config: RunConfig) -> Make:
    urls = [urlsplit(url) for url in config.engine.urls]
    far = [url for url in urls if url.hostname not in LOOPBACK]
    address = own_address(far[0].hostname or "", far[0].port or 80) if far else "127.0.0.1"
    return partial(cls, address=address, backend="nccl" if config.model.device == "cuda" else "gloo")


def _plain(cls: Make, config: RunConfig) -> Make:
    del config
    return cls


SENDERS: Mapping[TransferMode, Callable[[RunConfig], Any]] = {
    "broadcast": partial(_in_group, BroadcastSender),
    "broadcast_packed": partial(_in_group, PackedSender),
    "disk_delta": partial(_plain, DiskDeltaSender),
    "ipc": partial(_plain, IpcSender),
    "p2p": partial(_plain, P2pSender),
    "shared": partial(_plain, SharedSender),
}
STOCK_SENDERS: Mapping[TransferMode, Callable[[RunConfig], Any]] = {
    "broadcast": partial(_in_group, StockBroadcastSender),
    "broadcast_packed": partial(_in_group, StockPackedSender),
    "disk_delta": partial(_plain, StockCheckpointSender),
}

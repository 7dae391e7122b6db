"""Transfer mode `shared`: the engine runs in the trainer's process, and its weights are the trainer's own tensors.

No byte moves. A refit is still a session: the engine stops, digests what it holds, makes its serving copies anew and
takes the version. Between an optimizer step and the refit it must not generate: pause it before the step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from torch import Tensor

from zerogap.errors import ConfigError
from zerogap.weights.arrival import CheckedReceiver
from zerogap.weights.bucket import Bucket
from zerogap.weights.departure import BucketSender, digests_of
from zerogap.weights.manifest import Manifest, tensor_bytes
from zerogap.wire.tensors import BucketHeader, TransferPlan


class SharedSender(BucketSender[None]):
    """The trainer's half: says which bytes the engine must find in its own weights."""

    mode = "shared"
    moves = False

    async def connect(self, manifest: Manifest, *, deadline_seconds: float) -> TransferPlan:
        """Raises ConfigError for an engine in another process."""
        pid = (await self._engine.server_info()).pid
        if pid != os.getpid():
            raise ConfigError(
                f"transfer mode shared, and the engine is process {pid}, not the trainer's {os.getpid()}",
                remedy="make the engine in the trainer's process (EngineCore with `shares`), or use ipc",
            )
        return await super().connect(manifest, deadline_seconds=deadline_seconds)

    def _make(self, bucket: Bucket, start: int) -> tuple[BucketHeader, Sequence[Tensor]]:
        del start
        return self._header(bucket, digests_of(bucket, (tensor_bytes(slot.tensor) for slot in bucket.slots))), ()


class SharedReceiver(CheckedReceiver):
    """The engine's half: its weights have changed already."""

    modes = ("shared",)
    in_place = True

    def _views(self, header: BucketHeader) -> Iterator[Tensor]:
        for entry in header.entries:
            yield self._destination.tensors[entry.name]

"""Transfer mode `shared`: the engine runs in the trainer's process, and its weights are the trainer's own tensors.

No byte moves. A refit is still a session: the engine stops, digests what it holds, makes its serving copies anew and
takes the version. Between an optimizer step and the refit it must not generate: pause it before the step.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from zerogap.errors import ConfigError
from zerogap.weights.arrival import CheckedReceiver
from zerogap.weights.bucket import Bucket
from zerogap.weights.handshake import agree
from zerogap.weights.manifest import Manifest, tensor_bytes
from zerogap.weights.modes.broadcast import DEFAULT_MAX_BUCKET_BYTES, describe
from zerogap.wire.tensors import BucketHeader, TransferPlan

if TYPE_CHECKING:
    from zerogap.wire.api import RolloutEngine


class SharedSender:
    """The trainer's half: says which bytes the engine must find in its own weights."""

    def __init__(
        self, engine: RolloutEngine, *, fingerprint: str | None, max_bucket_bytes: int = DEFAULT_MAX_BUCKET_BYTES
    ) -> None:
        self.max_bucket_bytes = max_bucket_bytes
        self._engine, self._fingerprint, self._session_id = engine, fingerprint, ""

    async def connect(self, manifest: Manifest, *, deadline_seconds: float) -> TransferPlan:
        """Raises ConfigError for an engine in another process."""
        pid = (await self._engine.server_info()).pid
        if pid != os.getpid():
            raise ConfigError(
                f"transfer mode shared, and the engine is process {pid}, not the trainer's {os.getpid()}",
                remedy="make the engine in the trainer's process (EngineCore with `shares`), or use ipc",
            )
        plan = await agree(
            self._engine,
            manifest,
            mode="shared",
            fingerprint=self._fingerprint,
            max_bucket_bytes=self.max_bucket_bytes,
            deadline_seconds=deadline_seconds,
        )
        self._session_id = plan.session_id
        return plan

    async def send(self, bucket: Bucket) -> dict[str, str]:
        """Returns the digest of each tensor once the engine has found the same bytes in its own."""
        entries = describe(bucket, (tensor_bytes(slot.tensor) for slot in bucket.slots))
        header = BucketHeader(
            session_id=self._session_id, index=bucket.index, num_bytes=bucket.num_bytes, entries=entries
        )
        await self._engine.update_weights_from_tensor(header)
        return {entry.name: entry.digest for entry in entries}

    async def close(self) -> None:
        """There is nothing to give back."""


class SharedReceiver(CheckedReceiver):
    """The engine's half: its weights have changed already."""

    modes = ("shared",)
    in_place = True

    def _views(self, header: BucketHeader) -> Iterator[Tensor]:
        for entry in header.entries:
            yield self._destination.tensors[entry.name]

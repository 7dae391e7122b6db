"""Transfer mode `disk_delta`: what a step changed goes through a folder that trainer and engines see.

The engine pulls and checks a version while it still generates; the session then only loads the tensors that changed.
What counts as the base is what the engine really holds: before each version the sender asks for the engine's digests,
and where they are not those of its last version (a first refit, a late joiner, a resumed run) it writes a snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from zerogap.errors import TransferFailed
from zerogap.threads import in_daemon_thread
from zerogap.weights import delta_store
from zerogap.weights.arrival import CheckedReceiver, Destination
from zerogap.weights.bucket import Bucket
from zerogap.weights.departure import BucketSender
from zerogap.weights.manifest import tensor_digests
from zerogap.wire.tensors import BucketHeader, DeltaSource, TransferPlan

if TYPE_CHECKING:
    from zerogap.wire.api import RolloutEngine


class DiskDeltaSender(BucketSender[None]):
    """The trainer's half. Holds one copy of the last version in host memory, to tell what changed."""

    mode = "disk_delta"
    moves = False

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        fingerprint: str | None,
        max_bucket_bytes: int,
        folder: Path,
        run: str,
        snapshot_every: int = 16,
        keep: int = 4,
    ) -> None:
        super().__init__(engine, fingerprint=fingerprint, max_bucket_bytes=max_bucket_bytes)
        self._folder, self._run, self._snapshot_every, self._keep = folder.resolve(), run, snapshot_every, keep
        self._last: tuple[int, dict[str, Tensor]] | None = None
        self._last_digests: dict[str, str] = {}
        self._num_versions = 0
        self._index: delta_store.Index | None = None

    async def prepare(self, plan: TransferPlan, tensors: Mapping[str, Tensor], version: int) -> TransferPlan:
        """Writes the version and lets the engine pull it, while it generates."""
        base = self._last if await self._engine_holds_the_last() else None
        if self._num_versions % self._snapshot_every == 0:
            base = None
        host = {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
        index = await in_daemon_thread(
            lambda: delta_store.write(
                self._folder,
                host,
                None if base is None else base[1],
                run=self._run,
                version=version,
                base_version=None if base is None else base[0],
            ),
            name="disk-delta",
        )
        delta_store.retain(self._folder, self._keep)
        self._num_versions += 1
        self.wire_bytes = index.wire_bytes
        self._last, self._index, self._last_digests = (version, host), index, tensor_digests(tensors)
        await self._engine.pull_weights(str(self._folder), version)
        source = DeltaSource(
            folder=str(self._folder), run=self._run, version=version, wire_bytes=index.wire_bytes,
            changed_bytes=index.changed_bytes,
        )  # fmt: skip
        return plan.model_copy(update={"delta": source})

    async def send(self, bucket: Bucket) -> dict[str, str]:
        """Announces the tensors of the bucket. The engine has the bytes of those that the version changed."""
        return {name: self._last_digests[name] for name in await super().send(bucket)}

    def _make(self, bucket: Bucket, start: int) -> tuple[BucketHeader, Sequence[Tensor]]:
        """With the index's digests, which are those of host memory."""
        del start
        assert self._index is not None
        return self._header(bucket, {name: change.digest for name, change in self._index.tensors.items()}), ()

    async def _engine_holds_the_last(self) -> bool:
        if self._last is None:
            return False
        reply = await self._engine.weights_checker("checksum")
        return all(rank["checksums"] == self._last_digests for rank in reply.get("ranks", ()))


class DiskDeltaReceiver(CheckedReceiver):
    """The engine's half: loads what lies on the shelf. A weight that has not changed is held against its digest."""

    modes = ("disk_delta",)

    def __init__(self, destination: Destination) -> None:
        super().__init__(destination)
        self._pulled: dict[str, Tensor] = {}

    def prepare(self, plan: TransferPlan) -> None:
        super().prepare(plan)
        if plan.delta is None:
            self._plan = None
            raise TransferFailed("a plan of mode disk_delta names no version", remedy="give `delta` with the plan")
        self._pulled = self._destination.shelf.take(plan.delta.folder, plan.delta.version)

    def close(self) -> None:
        super().close()
        self._pulled = {}

    def _views(self, header: BucketHeader) -> Iterator[Tensor]:
        for entry in header.entries:
            yield self._pulled.get(entry.name, self._destination.tensors[entry.name])

    def _digests(self, views: Mapping[str, Tensor]) -> dict[str, str]:
        """In the words of the folder's index, which are those of host memory."""
        return super()._digests({name: view.cpu() for name, view in views.items()})

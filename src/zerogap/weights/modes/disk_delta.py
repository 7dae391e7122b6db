"""Transfer mode `disk_delta`: what a step changed goes through a folder that trainer and engines see.

The engine pulls and checks a version while it still generates; the session then only loads the tensors that changed.
What counts as the base is what the engine really holds: before each version the sender asks for the engine's digests,
and where they are not those of its last version (a first refit, a late joiner, a resumed run) it writes a snapshot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from zerogap.errors import TransferFailed
from zerogap.threads import in_daemon_thread
from zerogap.weights import delta_store
from zerogap.weights.arrival import CheckedReceiver, Destination
from zerogap.weights.bucket import Bucket
from zerogap.weights.handshake import agree
from zerogap.weights.manifest import Manifest, dtype_name, tensor_digests
from zerogap.wire.tensors import BucketHeader, DeltaSource, TensorEntry, TransferPlan

if TYPE_CHECKING:
    from zerogap.wire.api import RolloutEngine


class DiskDeltaSender:
    """The trainer's half. Holds one copy of the last version in host memory, to tell what changed."""

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
        self.max_bucket_bytes = max_bucket_bytes
        self._engine, self._fingerprint = engine, fingerprint
        self._folder, self._run, self._snapshot_every, self._keep = folder.resolve(), run, snapshot_every, keep
        self._last: tuple[int, dict[str, Tensor]] | None = None
        self._last_digests: dict[str, str] = {}
        self._num_versions = 0
        self._plan: TransferPlan | None = None
        self._index: delta_store.Index | None = None

    async def connect(self, manifest: Manifest, *, deadline_seconds: float) -> TransferPlan:
        return await agree(
            self._engine,
            manifest,
            mode="disk_delta",
            fingerprint=self._fingerprint,
            max_bucket_bytes=self.max_bucket_bytes,
            deadline_seconds=deadline_seconds,
        )

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
        self._last, self._index, self._last_digests = (version, host), index, tensor_digests(tensors)
        await self._engine.pull_weights(str(self._folder), version)
        source = DeltaSource(
            folder=str(self._folder), run=self._run, version=version, wire_bytes=index.wire_bytes,
            changed_bytes=index.changed_bytes,
        )  # fmt: skip
        self._plan = plan.model_copy(update={"delta": source})
        return self._plan

    async def send(self, bucket: Bucket) -> dict[str, str]:
        """Announces the tensors of the bucket that the version changed. The engine has their bytes."""
        assert self._plan is not None and self._index is not None
        entries = tuple(
            TensorEntry(
                name=slot.name, dtype=dtype_name(slot.tensor.dtype), shape=tuple(slot.tensor.shape), offset=slot.offset,
                num_bytes=slot.num_bytes, digest=self._index.tensors[slot.name].digest,
            )
            for slot in bucket.slots
        )  # fmt: skip
        header = BucketHeader(
            session_id=self._plan.session_id, index=bucket.index, num_bytes=bucket.num_bytes, entries=entries
        )
        await self._engine.update_weights_from_tensor(header)
        return {entry.name: self._last_digests[entry.name] for entry in entries}

    async def close(self) -> None:
        """Nothing is held outside of the folder."""
        self._plan = None

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

    def _check_digest(self, entry: TensorEntry, view: Tensor) -> None:
        """In the words of the folder's index, which are those of host memory."""
        super()._check_digest(entry, view.cpu())

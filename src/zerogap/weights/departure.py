"""The only place for what all senders share: the plan of a session, and making a bucket while the last one is loaded.

A transfer mode's sender is a `BucketSender` that knows one thing more: how the bytes of a bucket leave.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from zerogap.config.schema import MAX_BUCKET_BYTES
from zerogap.threads import in_daemon_thread
from zerogap.weights.bucket import Bucket
from zerogap.weights.handshake import agree, new_plan
from zerogap.weights.manifest import Manifest, copy_bytes, dtype_name, spec_bytes, tensor_digests
from zerogap.wire.tensors import ALIGNMENT_BYTES, BucketHeader, TensorEntry, TransferMode, TransferPlan

if TYPE_CHECKING:
    from zerogap.wire.api import RolloutEngine

Room = TypeVar("Room")


class BucketSender(ABC, Generic[Room]):
    """The trainer's half of a mode, all but the way of the bytes. Implements WeightSender.

    A mode whose bytes do not leave from where the trainer holds them has a room: memory for two buckets, or for the
    largest weight, that the sender keeps from one refit to the next (on a CPU fresh pages cost more than the copy).
    `fingerprint` is the trainer's numerics certificate, or None to claim no parity.
    """

    mode: ClassVar[TransferMode]
    settings: ClassVar[Sequence[str]] = ()
    """Environment variables that both sides must have alike."""
    moves: ClassVar[bool] = True
    """Whether the bytes of a bucket travel with it."""

    def __init__(
        self, engine: RolloutEngine, *, fingerprint: str | None, max_bucket_bytes: int = MAX_BUCKET_BYTES
    ) -> None:
        self.max_bucket_bytes, self.wire_bytes = max_bucket_bytes, 0
        self._engine, self._fingerprint = engine, fingerprint
        self._session_id, self._give_up = "", 0.0
        self._room: Room | None = None
        self._room_bytes = self._wanted_bytes = 0
        self._call: asyncio.Future[None] | None = None
        self._read: tuple[int, int] = (0, 0)
        """The part of the room that the call on its way reads."""

    @abstractmethod
    def _make(self, bucket: Bucket, start: int) -> tuple[BucketHeader, Sequence[Tensor]]:
        """Puts the bucket where it leaves from (from `start` of the room on) and describes it; the flat tensors that
        travel, if any do. Runs in a thread beside the event loop.
        """

    def _open_room(self, num_bytes: int, device: torch.device) -> Room:
        raise AssertionError(f"mode {self.mode} has no room")

    def _close_room(self, room: Room) -> None:
        """Gives back what else holds the room. The memory itself is dropped by the caller."""

    async def _agree(self, manifest: Manifest) -> None:
        await agree(self._engine, manifest, fingerprint=self._fingerprint, settings=self.settings)

    async def _deliver(self, header: BucketHeader, parts: Sequence[Tensor]) -> None:
        """Announces the bucket and returns once every engine rank has loaded it."""
        await self._engine.update_weights_from_tensor(header)

    async def connect(self, manifest: Manifest, *, deadline_seconds: float) -> TransferPlan:
        """Asks the engine who it is and refuses another manifest, fingerprint or setting, before anything moves."""
        self._give_up = time.monotonic() + deadline_seconds
        await self._agree(manifest)
        plan = new_plan(
            manifest,
            mode=self.mode,
            fingerprint=self._fingerprint,
            max_bucket_bytes=self.max_bucket_bytes,
            deadline_seconds=deadline_seconds,
        )
        self._session_id, self.wire_bytes = plan.session_id, 0
        everything = manifest.num_bytes + ALIGNMENT_BYTES * len(manifest.specs)
        largest = max((spec_bytes(spec) for spec in manifest.specs), default=0)
        self._wanted_bytes = max(1, min(everything, max(2 * self.max_bucket_bytes, largest)))
        return plan

    async def send(self, bucket: Bucket) -> dict[str, str]:
        """Sends the bucket on its way, once the one before has been loaded; returns the digest of each tensor."""
        start = await self._free_place(bucket.num_bytes)
        try:
            header, parts = await in_daemon_thread(lambda: self._make(bucket, start), name="make-bucket")
        except BaseException:
            self._forget_room()  # the thread may still write to it
            raise
        await self.settle()
        self._call = asyncio.ensure_future(self._deliver(header, parts))
        self._read = (start, start + bucket.num_bytes)
        self.wire_bytes += sum(entry.num_bytes for entry in header.entries) if self.moves else 0
        return {entry.name: entry.digest for entry in header.entries}

    async def settle(self) -> None:
        """Returns once every engine rank has loaded all that was sent. Raises why one did not."""
        call, self._call = self._call, None
        if call is not None:
            await call

    async def close(self) -> None:
        """Gives back everything the sender holds outside of its process. Safe after any failure, and twice."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)

    async def _free_place(self, num_bytes: int) -> int:
        """Where in the room a bucket can be made now; waits for the call on its way if it reads all there is."""
        first, end = self._read
        behind = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if self._call is None or num_bytes <= first:
            return 0
        if behind + num_bytes <= self._wanted_bytes:
            return behind
        await self.settle()
        return 0

    def _room_on(self, device: torch.device) -> Room:
        if self._room is None or self._room_bytes < self._wanted_bytes:
            self._forget_room()
            self._room, self._room_bytes = self._open_room(self._wanted_bytes, device), self._wanted_bytes
        assert self._room is not None
        return self._room

    def _forget_room(self) -> None:
        room, self._room = self._room, None
        if room is not None:
            self._close_room(room)

    def _header(self, bucket: Bucket, digests: Mapping[str, str], **where: object) -> BucketHeader:
        """`where` says what brings the bytes."""
        entries = tuple(
            TensorEntry(
                name=slot.name,
                dtype=dtype_name(slot.tensor.dtype),
                shape=tuple(slot.tensor.shape),
                offset=slot.offset,
                num_bytes=slot.num_bytes,
                digest=digests[slot.name],
            )
            for slot in bucket.slots
        )
        common = {"session_id": self._session_id, "index": bucket.index, "num_bytes": bucket.num_bytes}
        return BucketHeader.model_validate(common | {"entries": entries} | where)


def digests_of(bucket: Bucket, flats: Iterable[Tensor]) -> dict[str, str]:
    """`flats` are the bytes of the bucket's tensors. Each is digested as it is made, while the processor has it."""
    digests: dict[str, str] = {}
    on_gpu: dict[str, Tensor] = {}
    for slot, flat in zip(bucket.slots, flats, strict=True):
        if flat.is_cuda:
            on_gpu[slot.name] = flat
        else:
            digests |= tensor_digests({slot.name: flat})
    digests |= tensor_digests(on_gpu)  # together: the host waits once
    return digests


def pack(bucket: Bucket, room: Tensor, start: int) -> Iterator[Tensor]:
    """Copies each tensor to its place in the room, whatever its strides, when it is asked for; the bytes there."""
    for slot in bucket.slots:
        yield copy_bytes(room[start + slot.offset : start + slot.offset + slot.num_bytes], slot.tensor)

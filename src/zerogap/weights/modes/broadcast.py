"""Transfer modes `broadcast` and its like: the trainer is rank 0 of a group, every engine rank receives from it.

A group lives for one refit. It is joined in `connect`, while the engines still generate, so that it costs no pause, and
a rank that died yesterday is no part of today's. Announcing a bucket and broadcasting it happen at the same time: the
engine's answer to the call ends the wait when it refuses, the broken group ends it when a rank dies.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from zerogap.config.schema import MAX_BUCKET_BYTES
from zerogap.errors import ManifestMismatch, TransferFailed, ZerogapError
from zerogap.threads import in_daemon_thread
from zerogap.weights.arrival import CheckedReceiver, slice_bytes
from zerogap.weights.bucket import Bucket
from zerogap.weights.departure import BucketSender, digests_of
from zerogap.weights.groups import JOIN_SECONDS, Group, join, open_store
from zerogap.weights.handshake import SETTINGS
from zerogap.weights.manifest import Manifest, dtype_of, spec_bytes, tensor_bytes
from zerogap.wire.tensors import BucketHeader, TensorSpec, TransferPlan, UpdateGroup

if TYPE_CHECKING:
    from zerogap.wire.api import RolloutEngine

_POLL_SECONDS = 0.002
_LAST_WORD_SECONDS = 10.0
"""For the engines to say what broke on their side, and to leave the group."""
UNPLANNED_SECONDS = 60.0
"""For one broadcast of a client that gives no deadline."""


class BroadcastSender(BucketSender[Tensor]):
    """The trainer's half: one broadcast per tensor. `address` is where the engines reach this host."""

    mode = "broadcast"
    settings = SETTINGS

    def __init__(
        self,
        engine: RolloutEngine,
        *,
        fingerprint: str | None,
        max_bucket_bytes: int = MAX_BUCKET_BYTES,
        address: str = "127.0.0.1",
        backend: Literal["gloo", "nccl"] = "gloo",
    ) -> None:
        super().__init__(engine, fingerprint=fingerprint, max_bucket_bytes=max_bucket_bytes)
        self._address, self._backend = address, backend
        self._spec: UpdateGroup | None = None
        self._group: Group | None = None

    async def connect(self, manifest: Manifest, *, deadline_seconds: float) -> TransferPlan:
        """Compares the two sides, their communication settings too, and joins a new group with every engine rank."""
        plan = await super().connect(manifest, deadline_seconds=deadline_seconds)
        await self._join(min(deadline_seconds, JOIN_SECONDS))
        return plan

    async def close(self) -> None:
        """Leaves the group, and tells the engines to. Safe twice."""
        await super().close()
        spec, self._spec = self._spec, None
        group, self._group = self._group, None
        if group is not None:
            group.close()
        if spec is not None:
            with suppress(
                ZerogapError, TimeoutError
            ):  # an engine that cannot leave has died, or leaves at the next join
                async with asyncio.timeout(_LAST_WORD_SECONDS):
                    await self._engine.destroy_weights_update_group(spec.group_name)

    def _make(self, bucket: Bucket, start: int) -> tuple[BucketHeader, Sequence[Tensor]]:
        del start  # the tensors leave from where they lie
        spec, group = self._joined
        flats = [tensor_bytes(slot.tensor).to(group.device or "cpu") for slot in bucket.slots]
        return self._header(bucket, digests_of(bucket, flats), group_name=spec.group_name), flats

    async def _deliver(self, header: BucketHeader, parts: Sequence[Tensor]) -> None:
        """Announces the bucket and broadcasts it, at the same time."""
        _, group = self._joined
        call = asyncio.ensure_future(self._engine.update_weights_from_distributed(header))
        try:
            await self._broadcast(group, parts, call)
            await call
        except BaseException:
            call.cancel()
            raise

    @property
    def _joined(self) -> tuple[UpdateGroup, Group]:
        assert self._spec is not None and self._group is not None
        return self._spec, self._group

    async def _join(self, deadline_seconds: float) -> None:
        """All ranks at once: each waits for the others. The first error ends the wait for all."""
        num_ranks = 1 + self._engine.num_ranks
        store = open_store(self._address, num_ranks, deadline_seconds=deadline_seconds)
        spec = UpdateGroup(
            master_address=self._address, master_port=store.port, world_size=num_ranks, backend=self._backend
        )
        self._spec = spec
        engines = asyncio.ensure_future(self._engine.init_weights_update_group(spec, rank_offset=1))
        own = asyncio.ensure_future(
            in_daemon_thread(lambda: join(spec, 0, deadline_seconds=deadline_seconds, store=store), name="join-group")
        )
        try:
            await asyncio.wait({engines, own}, return_when=asyncio.FIRST_EXCEPTION)
            if engines.done():  # what an engine says about it tells more than our own wait for it
                engines.result()
            self._group = await own
            await engines
        finally:
            engines.cancel()
            own.cancel()

    async def _broadcast(self, group: Group, flats: Sequence[Tensor], call: asyncio.Future[None]) -> None:
        """Until every rank has the bytes, or one refused the bucket, or the group broke."""
        group.start(flats, deadline_seconds=self._give_up - time.monotonic())
        while not group.done:
            if call.done():
                call.result()
            await asyncio.sleep(_POLL_SECONDS)
        try:
            for _ in flats:
                group.wait_one()
        except TransferFailed:
            group.close()  # a rank that still waits for us must not
            await asyncio.wait({call}, timeout=_LAST_WORD_SECONDS)
            if call.done():
                call.result()
            raise


class BroadcastReceiver(CheckedReceiver):
    """The engine's half. Keeps memory for one bucket."""

    modes = ("broadcast",)
    _room: Tensor | None = None

    def _room_for(self, num_bytes: int, device: torch.device | None) -> Tensor:
        if self._room is None or self._room.numel() < num_bytes:
            self._room = None  # first: at most one is held
            self._room = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return self._room[:num_bytes]

    def _views(self, header: BucketHeader) -> Iterator[Tensor]:
        group = self._destination.groups.get(header.group_name)
        room = self._room_for(header.num_bytes, group.device)
        parts = [room[e.offset : e.offset + e.num_bytes] for e in header.entries]
        group.start(parts, deadline_seconds=self._seconds_left())
        for entry in header.entries:
            group.wait_one()
            yield slice_bytes(room, entry)


def check_known(specs: Sequence[TensorSpec], manifest: Manifest) -> None:
    """Raises ManifestMismatch for a tensor that is not one of the engine's: before a byte is received."""
    for spec in specs:
        expected = manifest.by_name.get(spec.name)
        if expected != spec:
            raise ManifestMismatch(
                f"{spec.name} is announced as {spec.describe()}; this engine has "
                f"{'no such weight' if expected is None else expected.describe()}",
                remedy="broadcast the engine's own names, dtypes and shapes: weights_checker lists them (manifest)",
            )


def receive_unplanned(
    group: Group, specs: Sequence[TensorSpec], *, flattened: bool
) -> Iterator[tuple[TensorSpec, Tensor]]:
    """As SGLang receives: a broadcast per tensor, or one of all bytes without gaps. The sender gives no digests."""
    sizes = [spec_bytes(spec) for spec in specs]
    parts = [torch.empty(size, dtype=torch.uint8, device=group.device) for size in sizes]
    if flattened:
        whole = torch.empty(sum(sizes), dtype=torch.uint8, device=group.device)
        group.start([whole], deadline_seconds=UNPLANNED_SECONDS)
        group.wait_one()
        for part, given in zip(parts, whole.split(sizes), strict=True):
            part.copy_(given)  # a place of its own: without gaps a tensor may start where it cannot be viewed
    else:
        group.start(parts, deadline_seconds=UNPLANNED_SECONDS)
        for _ in parts:
            group.wait_one()
    for spec, part in zip(specs, parts, strict=True):
        yield spec, part.view(dtype_of(spec.dtype)).view(spec.shape)

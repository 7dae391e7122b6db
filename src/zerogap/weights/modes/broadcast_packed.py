"""Transfer mode `broadcast_packed`: as `broadcast`, with one flat tensor per bucket instead of one message per weight.

Every weight starts at a multiple of ALIGNMENT_BYTES, so that it can be viewed in place; the gaps hold nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from zerogap.weights.arrival import slice_bytes
from zerogap.weights.bucket import Bucket
from zerogap.weights.manifest import tensor_bytes
from zerogap.weights.modes.broadcast import BroadcastReceiver, BroadcastSender, describe
from zerogap.wire.tensors import BucketHeader, TensorEntry

PIECE_BYTES = 8 << 20
"""A bucket is broadcast in pieces of this size, so that the first weights are checked while the last ones travel."""


class PackedSender(BroadcastSender):
    """The trainer's half. One bucket of memory is kept from the first bucket to the end of the session."""

    mode = "broadcast_packed"
    _room: Tensor | None = None

    async def close(self) -> None:
        self._room = None
        await super().close()

    def _flats(self, bucket: Bucket) -> tuple[list[Tensor], tuple[TensorEntry, ...]]:
        assert self._group is not None
        if self._room is None or self._room.numel() < bucket.num_bytes:
            self._room = None
            self._room = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self._group.device)
        room = self._room[: bucket.num_bytes]

        def packed() -> Iterator[Tensor]:
            for slot in bucket.slots:
                yield room[slot.offset : slot.offset + slot.num_bytes].copy_(tensor_bytes(slot.tensor))

        entries = describe(bucket, packed())  # each is digested while it is still in the processor's cache
        return list(room.split(PIECE_BYTES)), entries


class PackedReceiver(BroadcastReceiver):
    """The engine's half."""

    modes = ("broadcast_packed",)

    def _views(self, header: BucketHeader) -> Iterator[Tensor]:
        group = self._destination.groups.get(header.group_name)
        room = self._room_for(header.num_bytes, group.device)[: header.num_bytes]
        pieces = room.split(PIECE_BYTES)
        group.start(pieces, deadline_seconds=self._seconds_left())
        num_waited = 0
        for entry in header.entries:
            while num_waited * PIECE_BYTES < entry.offset + entry.num_bytes:
                group.wait_one()
                num_waited += 1
            yield slice_bytes(room, entry)
        for _ in pieces[num_waited:]:
            group.wait_one()

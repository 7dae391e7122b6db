"""Transfer mode `broadcast_packed`: as `broadcast`, with one flat tensor per bucket instead of one message per weight.

Every weight starts at a multiple of ALIGNMENT_BYTES, so that it can be viewed in place; the gaps hold nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from zerogap.weights.arrival import slice_bytes
from zerogap.weights.bucket import Bucket
from zerogap.weights.departure import digests_of, pack
from zerogap.weights.modes.broadcast import BroadcastReceiver, BroadcastSender
from zerogap.wire.tensors import BucketHeader

PIECE_BYTES = 8 << 20
"""A bucket is broadcast in pieces of this size, so that the first weights are checked while the last ones travel."""


class PackedSender(BroadcastSender):
    """The trainer's half."""

    mode = "broadcast_packed"

    def _make(self, bucket: Bucket, start: int) -> tuple[BucketHeader, Sequence[Tensor]]:
        spec, group = self._joined
        room = self._room_on(group.device or torch.device("cpu"))
        header = self._header(bucket, digests_of(bucket, pack(bucket, room, start)), group_name=spec.group_name)
        return header, room[start : start + bucket.num_bytes].split(PIECE_BYTES)

    def _open_room(self, num_bytes: int, device: torch.device) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=device)


class PackedReceiver(BroadcastReceiver):
    """The engine's half."""

    modes = ("broadcast_packed",)

    def _views(self, header: BucketHeader) -> Iterator[Tensor]:
        group = self._destination.groups.get(header.group_name)
        room = self._room_for(header.num_bytes, group.device)
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

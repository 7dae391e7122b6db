"""Transfer mode `p2p`: the trainer writes straight into the addresses that every engine rank publishes.

The engine takes no part while bytes arrive. A bucket's header, sent once they have, is the word that they are complete;
the engine digests them where they lie. From the begin on its own weights are therefore lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerogap.errors import TransferFailed
from zerogap.threads import in_daemon_thread
from zerogap.weights.arrival import CheckedReceiver
from zerogap.weights.bucket import Bucket
from zerogap.weights.departure import BucketSender, digests_of, pack
from zerogap.weights.handshake import SETTINGS
from zerogap.weights.manifest import Manifest
from zerogap.weights.nixl import Agent, Write, places_for
from zerogap.wire.tensors import BucketHeader, RankEndpoint, TransferPlan

_POLL_SECONDS = 0.002


class _Room(NamedTuple):
    flat: Tensor
    registered: Any
    """NIXL's handle of it."""


class P2pSender(BucketSender[_Room]):
    """The trainer's half. It keeps its NIXL agent from one refit to the next, and with it the connections: an engine
    does not notice that one has ended.
    """

    mode = "p2p"
    settings = SETTINGS
    _agent: Agent | None = None
    _endpoints: tuple[RankEndpoint, ...] = ()

    async def connect(self, manifest: Manifest, *, deadline_seconds: float) -> TransferPlan:
        """Compares the two sides, their communication settings too, and meets every engine rank."""
        plan = await super().connect(manifest, deadline_seconds=deadline_seconds)
        if self._agent is None:
            self._agent = await in_daemon_thread(Agent, name="open-agent")
        self._meet(self._agent, await self._engine.remote_instance_transfer_engine_info())
        return plan

    def _make(self, bucket: Bucket, start: int) -> tuple[BucketHeader, Sequence[Tensor]]:
        room = self._room_on(bucket.slots[0].tensor.device).flat
        header = self._header(bucket, digests_of(bucket, pack(bucket, room, start)))
        return header, [room[start + slot.offset : start + slot.offset + slot.num_bytes] for slot in bucket.slots]

    def _open_room(self, num_bytes: int, device: torch.device) -> _Room:
        assert self._agent is not None
        flat = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        return _Room(flat, self._agent.register([flat]))

    def _close_room(self, room: _Room) -> None:
        assert self._agent is not None
        self._agent.forget(room.registered)

    async def _deliver(self, header: BucketHeader, parts: Sequence[Tensor]) -> None:
        """Writes the bucket to every rank at once, then tells them that it is there."""
        assert self._agent is not None
        named = zip(header.entries, parts, strict=True)
        full = [(entry.name, part) for entry, part in named if part.numel()]
        if full:
            await self._write(self._agent, full)
        await super()._deliver(header, parts)

    def _meet(self, agent: Agent, endpoints: Sequence[RankEndpoint]) -> None:
        """Keeps who is known, parts from who is gone."""
        for known in self._endpoints:
            if known not in endpoints:
                agent.part(known.agent)
        for endpoint in endpoints:
            if endpoint not in self._endpoints:
                agent.meet(endpoint)
        self._endpoints = tuple(endpoints)

    async def _write(self, agent: Agent, full: list[tuple[str, Tensor]]) -> None:
        sizes = [(name, part.numel()) for name, part in full]
        source = [part for _, part in full]
        writes: list[Write] = []
        try:
            for endpoint in self._endpoints:
                writes.append(agent.write(source, endpoint, places_for(endpoint, sizes)))
            while not all(write.done for write in writes):
                if time.monotonic() > self._give_up:
                    raise TransferFailed(
                        f"the write of {full[0][0]} and {len(full) - 1} more to {len(writes)} engine ranks did not end "
                        "within the refit's deadline",
                        remedy="an engine is stuck, or the network is: see the engines' logs, then refit again",
                    )
                await asyncio.sleep(_POLL_SECONDS)
        except TransferFailed:
            self._meet(agent, ())  # the next refit makes new connections
            raise
        finally:
            for write in writes:
                write.release()


class P2pReceiver(CheckedReceiver):
    """The engine's half: the bytes are there when it is told of them."""

    modes = ("p2p",)
    in_place = True

    def _views(self, header: BucketHeader) -> Iterator[Tensor]:
        for entry in header.entries:
            yield self._destination.endpoint.landed(entry.name)

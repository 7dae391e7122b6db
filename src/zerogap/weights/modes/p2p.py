"""Transfer mode `p2p`: the trainer writes straight into the addresses that every engine rank publishes.

The engine takes no part while bytes arrive. A bucket's header, sent once they have, is the word that they are complete;
the engine digests them where they lie. From the begin on its own weights are therefore lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from zerogap.errors import TransferFailed
from zerogap.threads import in_daemon_thread
from zerogap.weights.arrival import CheckedReceiver
from zerogap.weights.bucket import Bucket
from zerogap.weights.handshake import SETTINGS, agree
from zerogap.weights.manifest import Manifest, tensor_bytes
from zerogap.weights.modes.broadcast import DEFAULT_MAX_BUCKET_BYTES, describe
from zerogap.weights.nixl import Agent, Write, places_for
from zerogap.wire.tensors import ALIGNMENT_BYTES, BucketHeader, RankEndpoint, TransferPlan

if TYPE_CHECKING:
    from zerogap.wire.api import RolloutEngine

_POLL_SECONDS = 0.0005


class P2pSender:
    """The trainer's half. It keeps its NIXL agent from one refit to the next, and one bucket of memory for each."""

    def __init__(
        self, engine: RolloutEngine, *, fingerprint: str | None, max_bucket_bytes: int = DEFAULT_MAX_BUCKET_BYTES
    ) -> None:
        self.max_bucket_bytes = max_bucket_bytes
        self._engine, self._fingerprint = engine, fingerprint
        self._session_id, self._give_up, self._room_bytes = "", 0.0, 1
        self._agent: Agent | None = None
        self._endpoints: tuple[RankEndpoint, ...] = ()
        self._room: Tensor | None = None
        self._registered: Any = None

    async def connect(self, manifest: Manifest, *, deadline_seconds: float) -> TransferPlan:
        """Compares the two sides, their communication settings too, and meets every engine rank."""
        self._give_up = time.monotonic() + deadline_seconds
        plan = await agree(
            self._engine,
            manifest,
            mode="p2p",
            fingerprint=self._fingerprint,
            max_bucket_bytes=self.max_bucket_bytes,
            deadline_seconds=deadline_seconds,
            settings=SETTINGS,
        )
        self._session_id = plan.session_id
        self._room_bytes = min(self.max_bucket_bytes, manifest.num_bytes + ALIGNMENT_BYTES * len(manifest.specs))
        if self._agent is None:
            self._agent = await in_daemon_thread(Agent, name="open-agent")
        self._meet(self._agent, await self._engine.remote_instance_transfer_engine_info())
        return plan

    async def send(self, bucket: Bucket) -> dict[str, str]:
        """Writes the bucket to every rank at once; returns the digest of each tensor once every rank has checked it."""
        assert self._agent is not None
        room = self._room_for(self._agent, bucket)
        parts = [room[slot.offset : slot.offset + slot.num_bytes] for slot in bucket.slots]

        def packed() -> Iterator[Tensor]:
            for slot, part in zip(bucket.slots, parts, strict=True):
                yield part.copy_(tensor_bytes(slot.tensor))

        entries = describe(bucket, packed())  # each is digested while it is still in the processor's cache
        full = [(slot.name, part) for slot, part in zip(bucket.slots, parts, strict=True) if part.numel()]
        if full:
            await self._write(self._agent, full)
        entries = describe(bucket, parts)
        header = BucketHeader(
            session_id=self._session_id, index=bucket.index, num_bytes=bucket.num_bytes, entries=entries
        )
        await self._engine.update_weights_from_tensor(header)
        return {entry.name: entry.digest for entry in entries}

    async def close(self) -> None:
        """Gives the bucket's memory back. Connections are kept: an engine does not notice that one has ended."""
        if self._agent is not None:
            self._forget_room(self._agent)

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

    def _room_for(self, agent: Agent, bucket: Bucket) -> Tensor:
        if self._room is None or self._room.numel() < bucket.num_bytes:
            self._forget_room(agent)
            first = bucket.slots[0].tensor
            size = max(bucket.num_bytes, self._room_bytes, 1)
            self._room = torch.empty(size, dtype=torch.uint8, device=first.device)
            self._registered = agent.register([self._room])
        return self._room

    def _forget_room(self, agent: Agent) -> None:
        if self._room is not None:
            agent.forget(self._registered)
            self._room = self._registered = None


class P2pReceiver(CheckedReceiver):
    """The engine's half: the bytes are there when it is told of them."""

    modes = ("p2p",)
    in_place = True

    def _views(self, header: BucketHeader) -> Iterator[Tensor]:
        for entry in header.entries:
            yield self._destination.endpoint.landed(entry.name)

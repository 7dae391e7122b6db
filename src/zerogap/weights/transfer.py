"""The only interface of a transfer mode: a sender beside the trainer, a receiver inside the engine.

A mode is one file in `weights/modes` that holds both halves. The order of the calls is `weights/session.py`'s.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol, runtime_checkable

from torch import Tensor

from zerogap.errors import TransferFailed
from zerogap.weights.bucket import Bucket
from zerogap.weights.manifest import Manifest
from zerogap.wire.tensors import BucketHeader, TransferPlan


class WeightSender(Protocol):
    """Trainer side, one per trainer rank."""

    max_bucket_bytes: int
    wire_bytes: int
    """What every engine rank was sent since `connect`."""

    async def connect(self, manifest: Manifest, *, deadline_seconds: float) -> TransferPlan:
        """Compares manifest and numerics fingerprint with the engine before anything moves.

        Raises ManifestMismatch or ParityError. Returns the plan that opens the session at the engine.
        """
        ...

    async def send(self, bucket: Bucket) -> dict[str, str]:
        """Sends one bucket on its way; returns the digest of each tensor as it was sent. The engine may still load it:
        a failure is raised by the next call.
        """
        ...

    async def settle(self) -> None:
        """Returns once every engine rank has loaded all that was sent. Raises why one did not."""
        ...

    async def close(self) -> None:
        """Gives back everything the sender holds outside its process. Safe after any failure, and twice."""
        ...


@runtime_checkable
class PreparesAhead(Protocol):
    """A sender with work that can be done while the engine still generates."""

    async def prepare(self, plan: TransferPlan, tensors: Mapping[str, Tensor], version: int) -> TransferPlan:
        """Called after `connect`, before the pause; returns the plan that opens the session."""
        ...


@runtime_checkable
class ProvesItself(Protocol):
    """A sender to engines that cannot digest their weights in our words."""

    async def prove(self, tensors: Mapping[str, Tensor]) -> None:
        """Called after the end, instead of the digest check. Raises TransferFailed naming what is wrong."""
        ...


@runtime_checkable
class TakesBack(Protocol):
    """Several engines as one, of which some may have been lost and be there again."""

    async def take_back(self) -> None:
        """Called when a refit begins, before anything is compared; who is there again is part of it."""
        ...


class WeightReceiver(Protocol):
    """Engine side, one per engine rank. Per session: prepare, then receive each bucket, then finish; close whatever
    happens.
    """

    in_place: bool
    """Whether bytes change in the engine's own weights before a bucket is received."""

    def prepare(self, plan: TransferPlan) -> None:
        """Opens a session. Raises ManifestMismatch, naming names, if the plan is not for this engine's weights."""
        ...

    def receive(self, header: BucketHeader) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor) with digests already checked. A tensor is valid only until the next one is asked for:
        copy it. Raises TransferFailed or ManifestMismatch, after which the session can only be closed.
        """
        ...

    def finish(self) -> None:
        """Raises TransferFailed that names the weights that never arrived. Call before the engine ends its session."""
        ...

    @property
    def failure(self) -> TransferFailed | None:
        """Why the open or last session cannot end well (a fault, or a sender silent past its deadline), else None."""
        ...

    def close(self) -> None:
        """Forgets the session. Safe twice."""
        ...

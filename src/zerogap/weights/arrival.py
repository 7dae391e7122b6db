"""The only place that holds what arrives in a session against the session's plan: order, names, places, digests.

A transfer mode's receiver is a `CheckedReceiver` that knows one thing more: how the bytes of a bucket get here.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from torch import Tensor

from zerogap.errors import TransferFailed
from zerogap.weights.groups import Groups
from zerogap.weights.manifest import Manifest, dtype_of, name_some, spec_bytes, tensor_digests
from zerogap.weights.nixl import Endpoint
from zerogap.weights.shelf import Shelf
from zerogap.wire.tensors import BucketHeader, TensorEntry, TransferMode, TransferPlan

_CHECKED_AT_ONCE_BYTES = 1 << 20
Arrival = tuple[TensorEntry, Tensor]
RESEND = "start the refit again; if it happens twice, suspect this host's memory"


@dataclass(frozen=True)
class Destination:
    """What a receiver fills: the weights of one engine rank. `manifest` is theirs: nothing else can arrive.

    `groups` are those that the rank has joined, and keeps from one session to the next; `shelf` is what it has pulled.
    """

    tensors: Mapping[str, Tensor]
    manifest: Manifest
    groups: Groups = field(default_factory=Groups)
    shelf: Shelf = field(default_factory=Shelf)

    @cached_property
    def endpoint(self) -> Endpoint:
        """Where these weights may be written from outside; made when it is first asked for, and kept."""
        return Endpoint(self.tensors)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Destination:
        return cls(tensors, Manifest.of(tensors))


class CheckedReceiver(ABC):
    """The engine's half of a mode, all but the way of the bytes. Implements WeightReceiver.

    One serves session after session. The memory through which buckets come may be kept between them: on a CPU fresh
    pages cost more than the copy.
    """

    modes: ClassVar[tuple[TransferMode, ...]]
    in_place: bool = False

    def __init__(self, destination: Destination) -> None:
        self._destination = destination
        self._plan: TransferPlan | None = None
        self._arrived: set[str] = set()
        self._num_buckets = 0
        self._started = 0.0
        self._fault: TransferFailed | None = None

    @abstractmethod
    def _views(self, header: BucketHeader) -> Iterator[Tensor]:
        """The tensors of a bucket, in the header's order. The header has been checked. Raises TransferFailed."""

    def prepare(self, plan: TransferPlan) -> None:
        """Opens a session. Raises ManifestMismatch, naming names, if the plan is not for this engine's weights."""
        self.close()
        if plan.mode not in self.modes:
            raise TransferFailed(
                f"the plan's transfer mode is {plan.mode}, this receiver's {' or '.join(self.modes)}",
                remedy="choose the receiver by the plan's mode",
            )
        Manifest.from_specs(plan.tensors).check_equal(self._destination.manifest)
        self._plan, self._started = plan, time.monotonic()
        self._arrived, self._num_buckets, self._fault = set(), 0, None

    def receive(self, header: BucketHeader) -> Iterator[tuple[str, Tensor]]:
        """Yields (name, tensor) with digests checked; a tensor is valid until the next is asked for. A failure, and an
        iteration that is given up half-way, leaves the session failed.
        """
        complete = False
        try:
            self._check_order(header)
            self._check_entries(header)
            for entry, view in self._checked(header):
                yield entry.name, view
                self._arrived.add(entry.name)
            self._num_buckets += 1
            complete = True
        except TransferFailed as error:
            self._fault = error
            raise
        finally:
            if not complete and self._fault is None:
                self._fault = TransferFailed(f"bucket {header.index} was not loaded to its end", remedy=RESEND)

    def finish(self) -> None:
        """Raises TransferFailed that names the weights that never arrived."""
        plan = self._open_plan("end")
        missing = [spec.name for spec in plan.tensors if spec.name not in self._arrived]
        if missing:
            self._fault = TransferFailed(
                f"{len(missing)} of {plan.num_tensors} weights never arrived: {name_some(missing)}",
                remedy="the sender must send every weight of its plan before it ends the session",
                missing=missing,
            )
            raise self._fault

    @property
    def failure(self) -> TransferFailed | None:
        """Why the session cannot end well: a fault, or a sender that is silent past the deadline of its plan."""
        plan = self._plan
        if self._fault is None and plan is not None and self._seconds_left() < 0:
            self._fault = TransferFailed(
                f"weight-update session {plan.session_id} is past its deadline of {plan.deadline_seconds:g} s: "
                f"{self._num_buckets} buckets and {len(self._arrived)} of {plan.num_tensors} weights arrived",
                remedy="the sender is dead or stuck: see the trainer's log, then refit again",
            )
        return self._fault

    def close(self) -> None:
        """Forgets the session; `failure` still says why it failed. Safe twice."""
        self._plan = None

    def _seconds_left(self) -> float:
        """Until the open session's deadline; below zero once it has passed."""
        assert self._plan is not None
        return self._plan.deadline_seconds - (time.monotonic() - self._started)

    def _open_plan(self, act: str) -> TransferPlan:
        """The open session's plan. Raises TransferFailed if there is none or it has failed."""
        if self._plan is None:
            raise TransferFailed(
                f"no weight-update session is open: cannot {act}", remedy="call begin_weight_update with a plan first"
            )
        failure = self.failure
        if failure is not None:
            raise TransferFailed(f"the weight-update session has failed: {failure.what}", remedy=failure.remedy)
        return self._plan

    def _check_order(self, header: BucketHeader) -> None:
        plan = self._open_plan(f"load bucket {header.index}")
        if header.session_id != plan.session_id:
            raise TransferFailed(
                f"bucket {header.index} is of session {header.session_id}, open is {plan.session_id}",
                remedy="two senders refit one engine at once, or one outlived its session: stop the other one",
            )
        if header.index != self._num_buckets:
            raise TransferFailed(f"got bucket {header.index} where {self._num_buckets} was due", remedy=RESEND)

    def _check_entries(self, header: BucketHeader) -> None:
        """Before the first byte is read: a header addresses memory."""
        seen = set(self._arrived)
        for entry in header.entries:
            self._check_entry(entry, header)
            if entry.name in seen:
                raise TransferFailed(f"{entry.name} arrived twice", remedy="send each weight in exactly one bucket")
            seen.add(entry.name)

    def _check_entry(self, entry: TensorEntry, header: BucketHeader) -> None:
        expected = self._destination.manifest.by_name.get(entry.name)
        if expected is None or (expected.dtype, expected.shape) != (entry.dtype, entry.shape):
            wanted = "no such weight" if expected is None else expected.describe()
            raise TransferFailed(
                f"{entry.name} arrived as {entry.describe()}; this engine has {wanted}",
                remedy="the sender's buckets do not follow its own plan: both must come from the same tensors",
            )
        aligned = entry.offset % dtype_of(entry.dtype).itemsize == 0
        if not aligned or entry.num_bytes != spec_bytes(entry) or entry.offset + entry.num_bytes > header.num_bytes:
            raise TransferFailed(
                f"{entry.name}: {entry.num_bytes} bytes at offset {entry.offset} of a bucket of {header.num_bytes}",
                remedy="the bucket's header is damaged: " + RESEND,
            )

    def _checked(self, header: BucketHeader) -> Iterator[Arrival]:
        """What arrived as it was sent: on a CPU a few tensors at a time, which the processor still has when they are
        copied; on a GPU the whole bucket, for which the host waits once.
        """
        arrivals = zip(header.entries, self._views(header), strict=True)
        while some := _next_few(arrivals):
            digests = self._digests({entry.name: view for entry, view in some})
            for entry, view in some:
                if digests[entry.name] != entry.digest:
                    raise TransferFailed(
                        f"{entry.name} arrived changed: digest {digests[entry.name]}, sent {entry.digest}",
                        remedy=RESEND,
                        name=entry.name,
                    )
                yield entry, view

    def _digests(self, views: Mapping[str, Tensor]) -> dict[str, str]:
        """As the sender made them."""
        return tensor_digests(views)


def _next_few(arrivals: Iterator[Arrival]) -> list[Arrival]:
    some: list[Arrival] = []
    size = 0
    while size < _CHECKED_AT_ONCE_BYTES and (arrival := next(arrivals, None)) is not None:
        some.append(arrival)
        size += 0 if arrival[1].is_cuda else arrival[0].num_bytes
    return some


def slice_bytes(flat: Tensor, entry: TensorEntry) -> Tensor:
    """One tensor of a flat uint8 bucket, as a view."""
    return flat[entry.offset : entry.offset + entry.num_bytes].view(dtype_of(entry.dtype)).view(entry.shape)

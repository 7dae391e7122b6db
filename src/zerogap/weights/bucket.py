"""The only place that decides which weights travel together and where each lies in its bucket."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from zerogap.errors import ConfigError
from zerogap.wire.tensors import ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor and its place in the flat bucket."""

    name: str
    tensor: Tensor
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that travel together. Holds references, no bytes of its own: a mode flattens it into its own memory."""

    index: int
    slots: tuple[Slot, ...]
    num_bytes: int


def buckets(tensors: Mapping[str, Tensor], max_bytes: int) -> Iterator[Bucket]:
    """All tensors, each in exactly one bucket, in the mapping's order.

    A bucket holds at most `max_bytes`, padding included; a tensor that is larger gets a bucket of its own.
    """
    if max_bytes <= 0:
        raise ConfigError(f"max_bucket_bytes is {max_bytes}", remedy="give a positive number of bytes, e.g. 268435456")
    for index, slots in enumerate(_split(tensors.items(), max_bytes)):
        yield Bucket(index, tuple(slots), _end(slots))


def _split(items: Iterable[tuple[str, Tensor]], max_bytes: int) -> Iterator[list[Slot]]:
    slots: list[Slot] = []
    for name, tensor in items:
        num_bytes = tensor.numel() * tensor.element_size()
        offset = -(-_end(slots) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if slots and offset + num_bytes > max_bytes:
            yield slots
            slots, offset = [], 0
        slots.append(Slot(name, tensor, offset, num_bytes))
    if slots:
        yield slots


def _end(slots: list[Slot]) -> int:
    return slots[-1].offset + slots[-1].num_bytes if slots else 0

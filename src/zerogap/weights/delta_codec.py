"""The only place for the change of one tensor in bytes: what differs from its base, small, and back, bit for bit.

`xor`: the bytes of both sides, exclusive-or; mostly zeros, so zstd makes them small. `overwrite`: which elements
changed, as distances, and their new bytes. `whole`: the new bytes. The smallest of the three is kept.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
import zstandard

Encoding = Literal["same", "xor", "overwrite", "whole"]
_LEVEL = 3


class Change(NamedTuple):
    """`payload` is zstd; `changed_bytes` counts the bytes of elements that differ."""

    encoding: Encoding
    payload: bytes
    changed_bytes: int


def encode(base: np.ndarray | None, new: np.ndarray, item_bytes: int) -> Change:
    """Both flat uint8, of one size; no base: `whole`. `item_bytes`: the size of an element."""
    if base is None:
        return Change("whole", _small(new.tobytes()), len(new))
    differs = (base != new).reshape(-1, item_bytes).any(axis=1) if len(new) else np.zeros(0, bool)
    at = np.flatnonzero(differs).astype(np.uint32)
    if not len(at):
        return Change("same", b"", 0)
    values = new.reshape(-1, item_bytes)[at]
    distances = np.diff(at, prepend=np.uint32(0)).astype("<u4")
    count = np.array([len(at)], "<u4").tobytes()
    candidates: list[tuple[Encoding, bytes]] = [
        ("xor", _small((base ^ new).tobytes())),
        ("overwrite", _small(count + distances.tobytes() + values.tobytes())),
        ("whole", _small(new.tobytes())),
    ]
    encoding, payload = min(candidates, key=lambda c: len(c[1]))
    return Change(encoding, payload, len(at) * item_bytes)


def decode(base: np.ndarray | None, encoding: Encoding, payload: bytes, num_bytes: int, item_bytes: int) -> np.ndarray:
    """The new flat bytes; `base` is not changed. Raises ValueError for a payload that is not one."""
    if encoding == "whole":
        return np.frombuffer(_large(payload, num_bytes), np.uint8).copy()
    if base is None:
        raise ValueError(f"a change of encoding {encoding!r} needs a base")
    new = base.copy()
    if encoding == "same":
        return new
    if encoding == "xor":
        return new ^ np.frombuffer(_large(payload, num_bytes), np.uint8)
    data = _large(payload, None)
    count = int(np.frombuffer(data[:4], "<u4")[0])
    at = np.frombuffer(data[4 : 4 + 4 * count], "<u4").cumsum(dtype=np.uint64)
    values = np.frombuffer(data[4 + 4 * count :], np.uint8).reshape(count, item_bytes)
    if count and int(at[-1]) * item_bytes >= num_bytes:
        raise ValueError(f"element {int(at[-1])} of a tensor of {num_bytes // item_bytes}")
    new.reshape(-1, item_bytes)[at] = values
    return new


def _small(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=_LEVEL).compress(data)


def _large(payload: bytes, num_bytes: int | None) -> bytes:
    try:
        data = zstandard.ZstdDecompressor().decompress(payload)
    except zstandard.ZstdError as error:
        raise ValueError(f"not zstd: {error}") from error
    if num_bytes is not None and len(data) != num_bytes:
        raise ValueError(f"{len(data)} bytes instead of {num_bytes}")
    return data

"""The only place that digests tensors where they lie on a GPU: 128 bits of integer arithmetic, one number to the host.

Not cryptographic: it finds what a broken transfer does (a flipped bit, a swapped, shifted or missing block). Each
word of 8 bytes is mixed with its index and the results are added modulo 2**64, so the order of adding does not matter.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WORDS_AT_ONCE = 1 << 24
_LANES = ((-7046029254386353131, -4417276706812531889), (1609587929392839161, -8663945395140668459))
_LOW_HALF = (1 << 32) - 1
_MODULUS = 1 << 64


def device_digests(flat_bytes: Sequence[Tensor]) -> list[str]:
    """A digest of each flat uint8 tensor on a GPU; the host waits once, for all of them."""
    if not flat_bytes:
        return []
    sums = torch.stack([_digest(flat) for flat in flat_bytes]).tolist()
    return [
        f"gpu-{len(flat):x}-" + "".join(f"{lane % _MODULUS:016x}" for lane in lanes)
        for flat, lanes in zip(flat_bytes, sums, strict=True)
    ]


def _digest(flat: Tensor) -> Tensor:
    missing = -len(flat) % 8
    if missing:
        flat = torch.nn.functional.pad(flat, (0, missing))
    elif flat.data_ptr() % 8:
        flat = flat.clone()
    words = flat.view(torch.int64)
    total = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for start in range(0, len(words), _WORDS_AT_ONCE):
        part = words[start : start + _WORDS_AT_ONCE]
        index = torch.arange(start, start + len(part), device=flat.device)
        total += torch.stack([_mixed(part, index, a, b).sum() for a, b in _LANES])
    return total


def _mixed(words: Tensor, index: Tensor, a: int, b: int) -> Tensor:
    x = words ^ (index * a)
    x = (x ^ ((x >> 32) & _LOW_HALF)) * b
    x = (x ^ ((x >> 32) & _LOW_HALF)) * a
    return x ^ ((x >> 32) & _LOW_HALF)

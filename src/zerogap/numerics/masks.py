"""The only place on a CPU that says which keys a query sees: up to its own position, from its window's first on.

S = segments, T = queries of a segment, L = padded keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

PAD_KEYS = 64
MASKED = float("-inf")


def padded_keys(num_keys: int) -> int:
    return -(-num_keys // PAD_KEYS) * PAD_KEYS


def causal_mask(query_positions_ST: Tensor, num_keys: int, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """Additive mask [S, 1, T, L]: 0 where a query at position q sees a key, -inf elsewhere.

    It sees keys 0 to q; with a window of W the last W of them, itself included.
    """
    keys_L, queries_ST1 = torch.arange(num_keys), query_positions_ST.unsqueeze(-1)
    visible = keys_L <= queries_ST1
    if window is not None:
        visible &= keys_L > queries_ST1 - window
    return torch.where(visible, 0.0, MASKED).to(dtype).unsqueeze(1)


class Masks:
    """The masks of the same queries and keys in fp32, one per window, made when a layer first asks."""

    def __init__(self, query_positions_ST: Tensor, num_keys: int) -> None:
        self._positions_ST, self._num_keys = query_positions_ST, num_keys
        self._made: dict[int | None, Tensor] = {}

    def of(self, window: int | None) -> Tensor:
        if window is not None and window >= self._num_keys:
            window = None
        if window not in self._made:
            self._made[window] = causal_mask(self._positions_ST, self._num_keys, torch.float32, window)
        return self._made[window]

"""The only place for elementwise functions whose vector and scalar code round differently: exp, silu, tanh on a CPU.

torch splits a tensor among threads and walks each part in steps of two vectors; what is left over at the end of a part
goes through scalar code, which may differ in the last bit. So a value would depend on the number of rows and threads.
Here every part has a whole number of steps: where the shape does not give that, it is padded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

STEP = 64
"""A multiple of two vectors of every width and dtype (AVX-512 in bfloat16: 64)."""
GRAIN = 32768
"""torch's own: fewer elements than this per thread and it takes fewer threads."""


def exp(x_MN: Tensor) -> Tensor:
    return _in_whole_steps(torch.exp, x_MN)


def silu(x_MN: Tensor) -> Tensor:
    """x * sigmoid(x)."""
    return _in_whole_steps(F.silu, x_MN)


def tanh(x_MN: Tensor) -> Tensor:
    return _in_whole_steps(torch.tanh, x_MN)


def _in_whole_steps(function: Callable[[Tensor], Tensor], x_MN: Tensor) -> Tensor:
    M, N = x_MN.shape
    rows, columns = M, -(-N // STEP) * STEP
    while rows * columns % (STEP * _num_parts(rows * columns)):
        rows += 1
    if (rows, columns) == (M, N):
        return function(x_MN)
    padded = x_MN.new_zeros(rows, columns)
    padded[:M, :N] = x_MN
    return function(padded)[:M, :N]


def _num_parts(num_elements: int) -> int:
    """The threads that torch gives a tensor of this size."""
    return max(1, min(torch.get_num_threads(), -(-num_elements // GRAIN)))

"""The only place where a weight meets an activation on a GPU: products that walk the inputs in order, never split.

Contract: an element is one sum over K in ascending order, accumulated in fp32 by the tensor cores and rounded once.
The tile does not change that order, so it is free to be tuned; which kernel computes a product (this one, or the
library's where it is proven to keep the order) does not show in the bits.

M = rows, K = inputs, N = outputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor


class Tile(NamedTuple):
    rows: int
    outputs: int
    inputs: int
    warps: int
    stages: int


TILES = (
    Tile(16, 32, 128, 4, 5),
    Tile(16, 64, 128, 4, 5),
    Tile(16, 128, 64, 4, 5),
    Tile(32, 64, 128, 4, 4),
    Tile(64, 32, 128, 4, 5),
    Tile(64, 64, 64, 4, 5),
    Tile(64, 64, 128, 4, 4),
    Tile(64, 128, 64, 4, 4),
    Tile(128, 64, 64, 4, 4),
    Tile(128, 128, 64, 8, 4),
    Tile(128, 256, 64, 8, 3),
)
LIBRARY = None
_GROUPED_ROWS = 8


def forbid_split_k() -> None:
    """Library products that never split K. Global to the process: call before the first product."""
    torch.backends.cuda.preferred_blas_library("cublaslt")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (False, False)


def product(x_MK: Tensor, weight_NK: Tensor, tile: Tile | None) -> Tensor:
    """x @ weight.T in the dtype of x, by our kernel with this tile or by the library."""
    if tile is LIBRARY:
        return F.linear(x_MK, weight_NK)
    M, K = x_MK.shape
    N = weight_NK.shape[0]
    y_MN = torch.empty(M, N, dtype=x_MK.dtype, device=x_MK.device)
    grid = (triton.cdiv(M, tile.rows) * triton.cdiv(N, tile.outputs),)
    _product[grid](
        x_MK, weight_NK, y_MN, M, N, K, x_MK.stride(0), weight_NK.stride(0), y_MN.stride(0),
        ROWS=tile.rows, OUTPUTS=tile.outputs, INPUTS=tile.inputs, GROUPED=_GROUPED_ROWS,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y_MN


@triton.jit
def _product(
    X, W, Y, M, N, K, stride_x, stride_w, stride_y,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, GROUPED: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    row_tiles, output_tiles = tl.cdiv(M, ROWS), tl.cdiv(N, OUTPUTS)
    # Neighbouring programs share a few row tiles, so that their weights are still in the cache.
    group = program // (GROUPED * output_tiles)
    first = group * GROUPED
    width = tl.minimum(row_tiles - first, GROUPED)
    within = program % (GROUPED * output_tiles)
    rows = (first + within % width) * ROWS + tl.arange(0, ROWS)
    outputs = (within // width) * OUTPUTS + tl.arange(0, OUTPUTS)
    inputs = tl.arange(0, INPUTS)
    x = X + rows[:, None].to(tl.int64) * stride_x + inputs[None, :]
    w = W + outputs[None, :].to(tl.int64) * stride_w + inputs[:, None]
    total = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for k in range(0, K, INPUTS):
        inside = k + inputs < K
        a = tl.load(x + k, mask=(rows[:, None] < M) & inside[None, :], other=0.0)
        b = tl.load(w + k, mask=(outputs[None, :] < N) & inside[:, None], other=0.0)
        total = tl.dot(a, b, total)
    y = Y + rows[:, None].to(tl.int64) * stride_y + outputs[None, :]
    tl.store(y, total.to(Y.dtype.element_ty), mask=(rows[:, None] < M) & (outputs[None, :] < N))

"""The only place that decides on a GPU which kernel multiplies a weight shape: measured and compared on this device.

The canonical bits are those of our kernel, which walks the inputs in order whatever its tile. The library is used for a
number of rows where all of its rows have these bits; where it does not, or is slower, our kernel runs with the tile
that was fastest. No list of device names: what a device or a library version does is found by asking it.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from zerogap.numerics.certify import Routes, Shape
from zerogap.numerics.gpu import gemm
from zerogap.numerics.matmul import LinearRoute

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 384, 512, 1024, 2048, 4096)
"""A count of rows belongs to the first bucket that is not below it."""
_REFERENCE = gemm.Tile(64, 64, 64, 4, 4)
_COPIES = 4
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Choice:
    """What multiplies one bucket of rows: a tile of our kernel, or the library; and the microseconds of both."""

    rows: int
    tile: gemm.Tile | None
    microseconds: float
    library_microseconds: float
    library_is_canonical: bool


class GpuProduct:
    """x @ weight.T by the choice of the bucket that the number of rows falls into."""

    def __init__(self, choices: tuple[Choice, ...]) -> None:
        self.choices = choices
        self._buckets = [choice.rows for choice in choices]

    def __call__(self, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        index = min(bisect_left(self._buckets, x_MK.shape[0]), len(self.choices) - 1)
        return gemm.product(x_MK, weight_NK, self.choices[index].tile)


def certify_linears(shapes: Iterable[Shape], dtype: torch.dtype) -> Routes:
    """A route per shape for the present device; measured once per process."""
    return Routes({shape: _route(shape, dtype) for shape in sorted(set(shapes))})


@functools.lru_cache(maxsize=64)
def _route(shape: Shape, dtype: torch.dtype) -> LinearRoute:
    gemm.forbid_split_k()
    num_inputs, num_outputs = shape
    generator = torch.Generator("cuda").manual_seed(sum(shape))
    x_MK = torch.randn(ROW_BUCKETS[-1], num_inputs, device="cuda", generator=generator).to(dtype)
    # Several copies, so that a timed product finds its weight in memory and not in the cache.
    weights = [
        (torch.randn(num_outputs, num_inputs, device="cuda", generator=generator) / num_inputs**0.5).to(dtype)
        for _ in range(_COPIES)
    ]
    choices = []
    previous = 0
    for rows in ROW_BUCKETS:
        choices.append(_choose(rows, previous, x_MK, weights))
        previous = rows
    return LinearRoute("gpu", 1, 1, GpuProduct(tuple(choices)))


def _choose(rows: int, previous: int, x_MK: Tensor, weights: list[Tensor]) -> Choice:
    x, weight = x_MK[:rows], weights[0]
    reference = gemm.product(x, weight, _REFERENCE)
    counts = {rows, previous + 1, (rows + previous + 1) // 2}
    canonical = all(torch.equal(gemm.product(x[:m], weight, gemm.LIBRARY), reference[:m]) for m in counts)
    library = _microseconds(lambda w: gemm.product(x, w, gemm.LIBRARY), weights)
    if canonical and rows > 256:
        return Choice(rows, gemm.LIBRARY, library, library, canonical)
    candidates = [t for t in gemm.TILES if t.rows <= max(16, 2 * rows)]
    timed = [(_microseconds(lambda w, t=t: gemm.product(x, w, t), weights), t) for t in candidates]
    best, tile = min(timed)
    if canonical and library <= best:
        return Choice(rows, gemm.LIBRARY, library, library, canonical)
    return Choice(rows, tile, best, library, canonical)


def _microseconds(product: Callable[[Tensor], Tensor], weights: list[Tensor]) -> float:
    """Of one product inside a graph: launches from Python would hide what small products cost."""
    for weight in weights:
        product(weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            product(weight)
    times = []
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in itertools.repeat(None, _REPEATS):
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return min(times) * 1e3 / len(weights)

"""The only place that proves a GPU's numerics, and decides which kernel multiplies a weight shape there.

The canonical bits are those of our kernel, which walks the inputs in order whatever its tile. The library is used for a
number of rows where all of its rows have these bits; where it does not, or is slower, our kernel runs with the tile
that was fastest. No list of device names: what a device or a library version does is found by asking it.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
import xxhash
from torch import Tensor

from zerogap.cache import user_cache
from zerogap.numerics.certify import Certificate, Routes, Shape
from zerogap.numerics.gpu import attention, gemm, vocabulary
from zerogap.numerics.matmul import LinearRoute
from zerogap.numerics.shape import AttentionShape

ROW_BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 384, 512, 1024, 2048, 4096)
"""A count of rows belongs to the first bucket that is not below it."""
_REFERENCE = gemm.Tile(64, 64, 64, 4, 4)
_COPIES = 4
_REPEATS = 5
_PROBE_LENS = (1, 63, 130, 300)


@dataclass(frozen=True, slots=True)
class Choice:
    """What multiplies one bucket of rows: a tile of our kernel, or the library; and the microseconds of both."""

    rows: int
    tile: gemm.Tile | None
    microseconds: float
    blas_microseconds: float
    blas_is_canonical: bool


class GpuProduct:
    """x @ weight.T by the choice of the bucket that the number of rows falls into."""

    def __init__(self, choices: tuple[Choice, ...]) -> None:
        self.choices = choices
        self._buckets = [choice.rows for choice in choices]

    def __call__(self, x_MK: Tensor, weight_NK: Tensor) -> Tensor:
        index = min(bisect_left(self._buckets, x_MK.shape[0]), len(self.choices) - 1)
        return gemm.product(x_MK, weight_NK, self.choices[index].tile)


@functools.lru_cache(maxsize=8)
def certify_gpu(
    shapes: tuple[Shape, ...], attention_shape: AttentionShape, vocab_size: int, dtype: torch.dtype
) -> Certificate:
    """The certificate of one model on the present device. Choices of kernels are kept on disk and checked again on a
    sample at each start; the bits that the fingerprint stands for are computed anew each time.
    """
    started = time.perf_counter()
    gemm.forbid_split_k()
    failures = [] if dtype == torch.bfloat16 else [f"{dtype} on a GPU: only bfloat16 has canonical kernels"]
    choices = {shape: _choices(shape, dtype) for shape in shapes}
    routes = {shape: LinearRoute("gpu", 1, 1, GpuProduct(found)) for shape, found in choices.items()}
    bits = xxhash.xxh3_128()
    for shape in shapes:
        x_MK, weights = _noise_for(shape, dtype, rows=64, copies=1)
        _add_bits(bits, gemm.product(x_MK, weights[0], _REFERENCE))
    for window in attention_shape.probed_windows(max(_PROBE_LENS)):
        failures += _probe_attention(attention_shape, window, dtype, bits)
    logits_MV = torch.randn(8, vocab_size, device="cuda", generator=_generator(vocab_size)).to(dtype)
    _add_bits(bits, vocabulary.log_sum_exp(logits_MV, 0.7)[0])
    bits.update(f"{torch.__version__} {triton.__version__} {dtype} {attention_shape[3:]}".encode())
    return Certificate(Routes(routes), tuple(failures), bits.hexdigest(), time.perf_counter() - started)


def _choices(shape: Shape, dtype: torch.dtype) -> tuple[Choice, ...]:
    path = user_cache() / "certificates" / f"{_key(shape, dtype)}.json"
    if path.is_file():
        rows = json.loads(path.read_text(encoding="utf-8"))
        kept = tuple(Choice(r["rows"], r["tile"] and gemm.Tile(*r["tile"]), *r["measured"]) for r in rows)
        if _still_true(shape, dtype, kept):
            return kept
    x_MK, weights = _noise_for(shape, dtype, rows=ROW_BUCKETS[-1], copies=_COPIES)
    below = (0, *ROW_BUCKETS)
    found = tuple(_choose(rows, previous, x_MK, weights) for previous, rows in zip(below, ROW_BUCKETS, strict=False))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}")
    measured = [(c.microseconds, c.blas_microseconds, c.blas_is_canonical) for c in found]
    rows = [{"rows": c.rows, "tile": c.tile, "measured": m} for c, m in zip(found, measured, strict=True)]
    partial.write_text(json.dumps(rows), encoding="utf-8")
    partial.replace(path)
    return found


def _still_true(shape: Shape, dtype: torch.dtype, kept: tuple[Choice, ...]) -> bool:
    """Whether the library still has the canonical bits in buckets where it is used: the smallest, and one by chance."""
    trusted = [c for c in kept if c.tile is None]
    sample = trusted[:1] + random.sample(trusted, min(1, len(trusted)))
    x_MK, (weight,) = _noise_for(shape, dtype, rows=max((c.rows for c in sample), default=1), copies=1)
    return tuple(c.rows for c in kept) == ROW_BUCKETS and all(
        torch.equal(
            gemm.product(x_MK[: c.rows], weight, gemm.LIBRARY), gemm.product(x_MK[: c.rows], weight, _REFERENCE)
        )
        for c in sample
    )


def _key(shape: Shape, dtype: torch.dtype) -> str:
    """Of everything that a choice hangs on: a certificate of another device or version is never found."""
    device = torch.cuda.get_device_properties(0)
    about = (device.name, device.total_memory, torch.__version__, triton.__version__, torch.version.cuda)
    return xxhash.xxh3_64_hexdigest(repr((about, shape, str(dtype), ROW_BUCKETS, gemm.TILES)).encode())


def _probe_attention(shape: AttentionShape, window: int | None, dtype: torch.dtype, bits: xxhash.xxh3_128) -> list[str]:
    """Decode over pages in random order against packed prefill, with the tiles that each phase takes."""
    heads, kv_heads, head_dim = shape[:3]
    lens, page = _PROBE_LENS, attention.KEY_BLOCK
    first = [0, *itertools.accumulate(lens)]
    made = _generator(sum(shape[:3]))
    q, k, v = (torch.randn(sum(lens), n, head_dim, device="cuda", generator=made).to(dtype)
               for n in (heads, kv_heads, kv_heads))  # fmt: skip
    table = torch.tensor([[5, 0, 0, 0, 0], [3, 0, 0, 0, 0], [9, 1, 7, 0, 0], [2, 8, 4, 6, 10]], dtype=torch.int32)
    keys, values = (torch.zeros(11 * page, kv_heads, head_dim, dtype=dtype, device="cuda") for _ in range(2))
    for b, n in enumerate(lens):
        at = torch.arange(n)
        slots = (table[b, at // page].long() * page + at % page).cuda()
        keys[slots], values[slots] = k[first[b] : first[b + 1]], v[first[b] : first[b + 1]]
    first_B, num_B = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in (first, lens))
    packed = attention.Segments(first_B, num_B, max(lens), own_from_B=first_B[:-1].contiguous())
    one = attention.Segments(
        torch.arange(len(lens) + 1, dtype=torch.int32, device="cuda"), num_B, 1, table_BJ=table.cuda()
    )
    attend = partial(attention.attend, scale=head_dim**-0.5, window=window, soft_cap=shape.soft_cap)
    whole = attend(q, k, v, packed)
    _add_bits(bits, whole)
    last = (first_B[1:] - 1).long()
    if torch.equal(attend(q[last], keys, values, one), whole[last]):
        return []
    return [f"{shape.said(window)} ({dtype}): decode differs from prefill"]


def _noise_for(shape: Shape, dtype: torch.dtype, *, rows: int, copies: int) -> tuple[Tensor, list[Tensor]]:
    """Rows and weights. Several copies, so that a timed product finds its weight in memory and not in the cache."""
    num_inputs, num_outputs = shape
    made = _generator(sum(shape))
    x_MK = torch.randn(rows, num_inputs, device="cuda", generator=made).to(dtype)
    weights = [
        (torch.randn(num_outputs, num_inputs, device="cuda", generator=made) / num_inputs**0.5).to(dtype)
        for _ in range(copies)
    ]
    return x_MK, weights


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cuda").manual_seed(seed)


def _add_bits(bits: xxhash.xxh3_128, tensor: Tensor) -> None:
    bits.update(tensor.contiguous().view(torch.uint8).cpu().numpy().data)


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

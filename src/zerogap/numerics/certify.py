"""The start-up probe: proves on this machine, for a model's own shapes, that the canonical operations keep their bits.

No list of device names. Per weight shape the probe picks a route (kernel and fewest rows) whose rows do not depend on
how many rows there are; for attention, softmax and norms it checks the one algorithm we have. What fails is named in
`Certificate.failures`, and a run without a full certificate must not claim parity. The fingerprint hashes the routes
*and the bits that the probe computed*, so two processes with equal fingerprints agree bit for bit on the probe,
whatever their thread counts or library versions; trainer and engine compare it before any weight moves.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor

from zerogap.numerics.attention import attend_rows
from zerogap.numerics.elementwise import GRAIN
from zerogap.numerics.logprob import full_logprobs
from zerogap.numerics.masks import causal_mask, padded_keys
from zerogap.numerics.matmul import DEFAULT_ROUTE, LinearRoute, pack, product
from zerogap.numerics.norm import rms_norm, swiglu
from zerogap.numerics.shape import AttentionShape

PROBE_ROWS = (1, 2, 3, 4, 7, 8, 16, 17, 64, 200)
_MIN_ROWS = (1, 2, 4, 8, 16)
# Rounding to bfloat16 hides most of what another order does to a sum, so that a probe of few rows proves little there:
# of 384,000 elements 9 differed with two rows, on a library that is exact from three rows on.
_FEWEST_ROWS_BF16 = 4
# (first query, number of queries). Those near 190 caught a BLAS that sums 192 keys in one run but 256 in two.
_PROBE_QUERIES = (
    (0, 1),
    (5, 1),
    (63, 2),
    (100, 3),
    (17, 4),
    (150, 1),
    (189, 3),
    (255, 5),
    (0, 17),
    (130, 64),
    (300, 20),
)
_LONGEST = 320

Shape = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Routes:
    """The linear route of each (inputs, outputs) shape. Shapes that were not probed take the default route."""

    by_shape: Mapping[Shape, LinearRoute]

    def linear(self, num_inputs: int, num_outputs: int) -> LinearRoute:
        return self.by_shape.get((num_inputs, num_outputs), DEFAULT_ROUTE)


@dataclass(frozen=True, slots=True)
class Certificate:
    """What the probe found. `failures` names each operation whose bits are not canonical here, and why."""

    routes: Routes
    failures: tuple[str, ...]
    fingerprint: str
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.failures


def certify(
    linear_shapes: Iterable[Shape],
    attention_shape: AttentionShape,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> Certificate:
    """Probes one model's shapes; cached per process and thread count."""
    if device is not None and device.type == "cuda":
        from zerogap.numerics.gpu.certify import certify_gpu  # noqa: PLC0415  Triton is there on a GPU only

        return certify_gpu(tuple(sorted(set(linear_shapes))), attention_shape, vocab_size, dtype)
    return _certify(tuple(sorted(set(linear_shapes))), attention_shape, vocab_size, dtype, torch.get_num_threads())


@functools.lru_cache(maxsize=32)
def _certify(
    linear_shapes: tuple[Shape, ...],
    attention_shape: AttentionShape,
    vocab_size: int,
    dtype: torch.dtype,
    num_threads: int,
) -> Certificate:
    del num_threads
    started = time.perf_counter()
    bits = xxhash.xxh3_128()
    failures: list[str] = []
    if torch.backends.mkl.is_available() and "STRICT" not in os.environ.get("MKL_CBWR", "").upper():
        failures.append(f"MKL_CBWR={os.environ.get('MKL_CBWR')!r}: set it to AUTO,STRICT before the process starts")
    routes: dict[Shape, LinearRoute] = {}
    with torch.no_grad():
        for shape in linear_shapes:
            route = _find_route(shape, dtype, bits)
            routes[shape] = route or DEFAULT_ROUTE
            if route is None:
                failures.append(f"linear {shape[0]} -> {shape[1]} ({dtype}): rows depend on the number of rows")
        for window in attention_shape.probed_windows(_LONGEST):
            failures += _probe_attention(attention_shape, window, dtype, bits)
        failures += _probe_swiglu(max(k for k, _ in linear_shapes), dtype, bits)
        failures += _probe_rows(vocab_size, max(k for k, _ in linear_shapes), dtype, bits)
    bits.update(repr((sorted(routes.items()), str(dtype), torch.__version__, attention_shape[3:])).encode())
    return Certificate(Routes(routes), tuple(failures), bits.hexdigest(), time.perf_counter() - started)


def _find_route(shape: Shape, dtype: torch.dtype, bits: xxhash.xxh3_128) -> LinearRoute | None:
    num_inputs, num_outputs = shape
    x_MK = _noise(max(PROBE_ROWS), num_inputs).to(dtype)
    weight_NK = (_noise(num_outputs, num_inputs) / num_inputs**0.5).to(dtype)
    for kernel in ("onednn", "aten"):
        route = LinearRoute(kernel)
        packed = pack(weight_NK, route)
        reference_MN = product(x_MK, weight_NK, route, min_rows=1)
        dense = _fewest_rows(x_MK, reference_MN, _multiply(weight_NK, route))
        serving = dense if packed is None else _fewest_rows(x_MK, reference_MN, _multiply(packed, route))
        if dense is not None and serving is not None:
            _add_bits(bits, reference_MN)
            fewest = _FEWEST_ROWS_BF16 if dtype == torch.bfloat16 else 1
            return LinearRoute(kernel, min_rows_dense=max(dense, fewest), min_rows_packed=max(serving, fewest))
    return None


def _multiply(weight: Tensor, route: LinearRoute) -> Callable[[Tensor], Tensor]:
    def multiply(x_MK: Tensor) -> Tensor:
        return product(x_MK, weight, route, min_rows=1)

    return multiply


def _fewest_rows(x_MK: Tensor, reference_MN: Tensor, multiply: Callable[[Tensor], Tensor]) -> int | None:
    """The smallest m such that every product of at least m rows gives each row its reference bits, or None."""
    total = len(x_MK)
    # A few elements can agree by luck: compare at least 48 rows, or 65,536 elements where rows are long.
    rows_to_compare = min(48, max(2, -(-65536 // reference_MN.shape[1])))

    def agrees(rows: int) -> bool:
        starts = range(0, total - rows + 1, rows)[: -(-rows_to_compare // rows)]
        return all(torch.equal(multiply(x_MK[s : s + rows]), reference_MN[s : s + rows]) for s in starts)

    good = {rows: agrees(rows) for rows in PROBE_ROWS}
    for fewest in _MIN_ROWS:
        if all(ok for rows, ok in good.items() if rows >= fewest):
            return fewest
    return None


def _probe_attention(shape: AttentionShape, window: int | None, dtype: torch.dtype, bits: xxhash.xxh3_128) -> list[str]:
    """Rows of a segment must not depend on the queries beside them, the number of segments or the padded extent."""
    head_dim, group, longest = shape.head_dim, shape.heads // shape.kv_heads, _LONGEST
    failures = []
    q, k, v = (_noise(6, longest, head_dim).to(dtype) for _ in range(3))
    keys = k.transpose(1, 2).contiguous()
    mask = causal_mask(torch.arange(longest).unsqueeze(0), longest, dtype, window)[0]
    reference = attend_rows(q, keys, v, mask, soft_cap=shape.soft_cap)
    _add_bits(bits, reference)
    for start, count in _PROBE_QUERIES:
        stop = start + count
        for segments in (1, 3, 6):
            for extent in {padded_keys(stop), max(256, padded_keys(stop)), longest}:
                rows = q[:segments, start:stop]
                repeated = rows.unsqueeze(1).expand(-1, group, -1, -1).reshape(segments, group * count, head_dim)
                row_mask = mask[:, start:stop, :extent].repeat(1, group, 1)
                # Slices of longer tensors on purpose: the extent must not matter, nor the strides.
                sliced = (keys[:segments, :, :extent], v[:segments, :extent])
                out = attend_rows(repeated, *sliced, row_mask, soft_cap=shape.soft_cap)
                if not torch.equal(out[:, :count], reference[:segments, start:stop]):
                    failures.append(
                        f"{shape.said(window)} ({dtype}): queries {start}..{stop - 1} of {segments} segments "
                        f"over {extent} keys differ from the full prefill"
                    )
    return failures[:1]


def _probe_rows(vocab_size: int, width: int, dtype: torch.dtype, bits: xxhash.xxh3_128) -> list[str]:
    """log_softmax over the vocabulary and rms_norm must treat a row alone as among others."""
    failures = []
    logits, hidden = _noise(17, vocab_size) * 4, _noise(17, width).to(dtype)
    weight = _noise(1, width)[0].to(dtype)
    checks: list[tuple[str, Tensor, Callable[[Tensor], Tensor]]] = [
        (f"log_softmax over {vocab_size}", logits, lambda x: full_logprobs(x, 0.7)),
        (f"rms_norm over {width}", hidden, lambda x: rms_norm(x, weight, 1e-5)),
    ]
    for name, x, operation in checks:
        reference = operation(x)
        _add_bits(bits, reference)
        for rows in (1, 2, 5, 16):
            if not all(
                torch.equal(operation(x[i : i + rows]), reference[i : i + rows]) for i in range(0, 17 - rows + 1, rows)
            ):
                failures.append(f"{name} ({dtype}): a row among {rows} differs from a row among 17")
                break
    return failures


def _probe_swiglu(width: int, dtype: torch.dtype, bits: xxhash.xxh3_128) -> list[str]:
    """A row's activation must not depend on how many rows there are, nor on where a thread's part of them ends."""
    enough = 2 * GRAIN // width + 2  # rows that several threads share
    x = _noise(enough, 2 * width).to(dtype)
    reference = torch.cat([swiglu(row) for row in x.split(1)])
    _add_bits(bits, reference)
    wrong = [rows for rows in (2, 3, 7, enough - 1, enough) if not torch.equal(swiglu(x[:rows]), reference[:rows])]
    return [f"swiglu of width {width} ({dtype}): a row among {wrong[0]} differs from a row alone"] if wrong else []


def _noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(20261201 + sum(shape)))


def _add_bits(bits: xxhash.xxh3_128, tensor: Tensor) -> None:
    bits.update(tensor.contiguous().view(torch.uint8).numpy().data)

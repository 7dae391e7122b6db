"""The only place where the training forward attends on a GPU: sequences packed end to end, our forward, flash backward.

The backward need not be canonical, only deterministic: torch's flash kernel takes our output and log-sum-exp.
It knows windows and no soft cap: a trainer refuses such a model on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerogap.numerics.gpu.attention import Segments, attend
from zerogap.numerics.heads import Projection


@dataclass(frozen=True, slots=True)
class PackedRuns:
    """Whole sequences one behind the other: positions of all tokens, and where each sequence begins."""

    positions_N: Tensor
    first_B: Tensor
    segments: Segments
    longest: int

    @staticmethod
    def build(lengths: Sequence[int], device: torch.device) -> PackedRuns:
        lengths_B = torch.tensor(lengths, dtype=torch.int32)
        first_B = torch.zeros(len(lengths) + 1, dtype=torch.int32)
        first_B[1:] = lengths_B.cumsum(0)
        positions_N = torch.cat([torch.arange(n) for n in lengths])
        first_B, lengths_B = first_B.to(device), lengths_B.to(device)
        segments = Segments(first_B, lengths_B, max(lengths), own_from_B=first_B[:-1].contiguous())
        return PackedRuns(positions_N.to(device), first_B, segments, max(lengths))


def packed_attend(runs: PackedRuns, scale: float) -> Any:
    """`attend` for `Decoder.forward` over the packed tokens, differentiable."""

    def attend_packed(layer: int, projection: Projection) -> Tensor:
        del layer
        q_NHD, k_NKD, v_NKD = projection.split()
        how = (runs, scale, projection.window, projection.soft_cap)
        return _PackedAttention.apply(q_NHD, k_NKD, v_NKD, *how).view(len(q_NHD), -1)

    return attend_packed


class _PackedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        runs: PackedRuns,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> Tensor:
        lse_HN = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
        out = attend(q, k, v, runs.segments, scale, window=window, soft_cap=soft_cap, lse_HT=lse_HN)
        ctx.save_for_backward(q, k, v, out, lse_HN)
        ctx.runs, ctx.scale, ctx.window = runs, scale, window
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse_HN = ctx.saved_tensors
        runs = ctx.runs
        limits = {}
        if ctx.window is not None and ctx.window < runs.longest:
            limits = {"window_size_left": ctx.window - 1, "window_size_right": 0}  # keys beside the query's own
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)
        with _deterministic():
            dq, dk, dv = torch.ops.aten._flash_attention_backward(
                grads[0].contiguous(), q, k, v, out, lse_HN, runs.first_B, runs.first_B, runs.longest, runs.longest,
                0.0, True, state, state, scale=ctx.scale, **limits,
            )  # fmt: skip
        return dq, dk, dv, None, None, None, None


@contextmanager
def _deterministic() -> Iterator[None]:
    """The library's backward adds in a fixed order only when the whole process asks for it."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)

"""The only place for RMSNorm and SwiGLU: row-wise and elementwise operations, one formula each for both sides."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zerogap.numerics.elementwise import silu


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich 2019)."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def add_rms_norm(h: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(h + delta, its norm): the residual stream and what the next sublayer reads. No delta: h as it is."""
    if h.is_cuda:
        from zerogap.numerics.gpu import rows  # noqa: PLC0415  Triton is there on a GPU only

        return rows.add_rms_norm(h, delta, weight, eps)
    h = h if delta is None else h + delta
    return h, rms_norm(h, weight, eps)


def swiglu(gate_up_MF: Tensor) -> Tensor:
    """silu(gate) * up of a fused [gate | up] projection. Its backward writes both halves into one buffer."""
    if gate_up_MF.is_cuda:
        from zerogap.numerics.gpu import rows  # noqa: PLC0415  Triton is there on a GPU only

        return rows.swiglu(gate_up_MF)
    return _SwiGlu.apply(gate_up_MF)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_MF: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_MF)
        gate, up = gate_up_MF.chunk(2, dim=-1)
        return silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up_MF,) = ctx.saved_tensors
        gate, up = gate_up_MF.chunk(2, dim=-1)
        out = torch.empty_like(gate_up_MF)
        out_gate, out_up = out.chunk(2, dim=-1)
        torch.mul(grads[0], F.silu(gate), out=out_up)
        out_gate.copy_(torch.ops.aten.silu_backward(grads[0] * up, gate))
        return out

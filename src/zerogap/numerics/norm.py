"""The only place for RMSNorm and SwiGLU: row-wise and elementwise operations, one formula each for both sides."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich 2019)."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def swiglu(gate_up_MF: Tensor) -> Tensor:
    """silu(gate) * up of a fused [gate | up] projection. Its backward writes both halves into one buffer."""
    return _SwiGlu.apply(gate_up_MF)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_MF: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up_MF)
        gate, up = gate_up_MF.chunk(2, dim=-1)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up_MF,) = ctx.saved_tensors
        gate, up = gate_up_MF.chunk(2, dim=-1)
        out = torch.empty_like(gate_up_MF)
        out_gate, out_up = out.chunk(2, dim=-1)
        torch.mul(grads[0], F.silu(gate), out=out_up)
        out_gate.copy_(torch.ops.aten.silu_backward(grads[0] * up, gate))
        return out

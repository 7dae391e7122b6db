"""The only place for RMSNorm and SwiGLU: row-wise and elementwise operations, one formula each for both sides."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (Zhang and Sennrich 2019)."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def swiglu(gate_up_MF: Tensor) -> Tensor:
    """silu(gate) * up of a fused [gate | up] projection."""
    gate, up = gate_up_MF.chunk(2, dim=-1)
    return F.silu(gate) * up

"""The only place where a weight meets an activation: linears whose rows do not depend on the number of rows.

Contract: an element of `linear(x, w)` is a function of its own row of x and its own row of w. On the CPU, fp32 goes
through oneDNN, which keeps one order over K for every M >= 2 whether the weight is dense or prepacked; bf16 goes
through `F.linear`, which is oneDNN already. A product of one row may use another kernel (gemv) with another order, so
the row is repeated unless the start-up probe (`certify`) cleared the shape. The backward has no such duty.

M = rows, K = inputs, N = outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LinearRoute:
    """How one weight shape is multiplied: the kernel, and the fewest rows at which it keeps the canonical order.

    On a GPU `gpu_product` is what its certificate found: the library or our kernel, by the number of rows.
    """

    kernel: str = "onednn"
    min_rows_dense: int = 2
    min_rows_packed: int = 2
    gpu_product: Callable[[Tensor, Tensor], Tensor] = F.linear


DEFAULT_ROUTE = LinearRoute()


def pack(weight_NK: Tensor, route: LinearRoute) -> Tensor | None:
    """A copy of the weight in oneDNN's own layout: the same bits out, faster for few rows. None where it has no use."""
    if route.kernel != "onednn" or weight_NK.dtype != torch.float32:
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight_NK.detach(), None)


def product(x_MK: Tensor, weight: Tensor, route: LinearRoute, *, min_rows: int) -> Tensor:
    """x @ weight.T with the canonical order over K; `weight` is dense [N, K] or what `pack` made of it."""
    if x_MK.is_cuda:
        return route.gpu_product(x_MK, weight)
    rows = x_MK.shape[0]
    if rows < min_rows:
        x_MK = torch.cat((x_MK, x_MK[-1:].expand(min_rows - rows, -1)))
    x_MK = x_MK.contiguous()
    if route.kernel == "onednn" and x_MK.dtype == torch.float32:
        y_MN = torch.ops.mkldnn._linear_pointwise(x_MK, weight, None, "none", [], "")
    else:
        y_MN = F.linear(x_MK, weight)
    return y_MN[:rows]


class _CanonicalLinear(torch.autograd.Function):
    """Canonical forward, the library's fastest backward."""

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, weight_NK: Tensor, route: LinearRoute) -> Tensor:
        ctx.save_for_backward(x_MK, weight_NK)
        return product(x_MK, weight_NK, route, min_rows=route.min_rows_dense)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (grad_MN,) = grads
        x_MK, weight_NK = ctx.saved_tensors
        grad_x = grad_MN @ weight_NK if ctx.needs_input_grad[0] else None
        grad_w = grad_MN.t() @ x_MK if ctx.needs_input_grad[1] else None
        return grad_x, grad_w, None


def linear(
    x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, route: LinearRoute, packed: Tensor | None = None
) -> Tensor:
    """y_MN. Uses the packed copy where there is one (serving), else the dense weight (training): the same bits."""
    if torch.is_grad_enabled() and (weight_NK.requires_grad or x_MK.requires_grad):
        y_MN = _CanonicalLinear.apply(x_MK, weight_NK, route)
    elif packed is not None:
        y_MN = product(x_MK, packed, route, min_rows=route.min_rows_packed)
    else:
        y_MN = product(x_MK, weight_NK, route, min_rows=route.min_rows_dense)
    return y_MN if bias_N is None else y_MN + bias_N

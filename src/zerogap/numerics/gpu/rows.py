"""The only place for row-wise steps on a GPU: norm with residual, head norm with rotation and cache write, SwiGLU.

Contract: one program computes a row (of a hidden state, of a token's heads) with a fixed shape, so its sums do not
depend on how many rows there are. Everything is computed in fp32 and rounded where a tensor is stored. The backwards
are deterministic and need not be canonical.

N = tokens, C = width, H = query heads, K = KV heads, D = head dimension, F = D / 2.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BACKWARD_PROGRAMS = 264
_NORM_WARPS = 4


def add_rms_norm(x_NC: Tensor, delta_NC: Tensor | None, weight_C: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(h, norm(h) * weight) with h = x + delta rounded to their dtype. Differentiable."""
    return _AddRmsNorm.apply(x_NC, delta_NC, weight_C, eps)


class _AddRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        N, C = x.shape
        h = x if delta is None else torch.empty_like(x)
        y = torch.empty_like(x)
        width = triton.next_power_of_2(C)
        _norm[(N,)](
            x, x if delta is None else delta, weight, h, y, C, eps, WIDTH=width, ADD=delta is not None,
            num_warps=_NORM_WARPS,
        )  # fmt: skip
        ctx.save_for_backward(h, weight)
        ctx.eps, ctx.added = eps, delta is not None
        return h.view_as(h), y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_h, grad_y = grads
        h, weight = ctx.saved_tensors
        N, C = h.shape
        programs = min(_BACKWARD_PROGRAMS, N)
        grad_x = torch.empty_like(h)
        parts = torch.empty(programs, C, dtype=torch.float32, device=h.device)
        _norm_backward[(programs,)](
            h, weight, grad_y.contiguous(), grad_h.contiguous(), grad_x, parts, N, C, ctx.eps,
            WIDTH=triton.next_power_of_2(C), num_warps=_NORM_WARPS,
        )  # fmt: skip
        return grad_x, grad_x if ctx.added else None, parts.sum(0).to(weight.dtype), None


@triton.jit
def _norm(X, DELTA, W, H, Y, C, eps, WIDTH: tl.constexpr, ADD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * C
    c = tl.arange(0, WIDTH)
    inside = c < C
    x = tl.load(X + row + c, mask=inside, other=0.0)
    if ADD:
        x = (x.to(tl.float32) + tl.load(DELTA + row + c, mask=inside, other=0.0).to(tl.float32)).to(X.dtype.element_ty)
        tl.store(H + row + c, x, mask=inside)
    x = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / C + eps)
    w = tl.load(W + c, mask=inside, other=0.0).to(tl.float32)
    tl.store(Y + row + c, (x * scale * w).to(Y.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward(H, W, GY, GH, GX, PARTS, N, C, eps, WIDTH: tl.constexpr):
    program, programs = tl.program_id(0), tl.num_programs(0)
    c = tl.arange(0, WIDTH)
    inside = c < C
    w = tl.load(W + c, mask=inside, other=0.0).to(tl.float32)
    part = tl.zeros([WIDTH], tl.float32)
    for n in range(program, N, programs):
        row = tl.cast(n, tl.int64) * C
        x = tl.load(H + row + c, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(GY + row + c, mask=inside, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / C + eps)
        x_hat = x * scale
        gw = g * w
        gx = scale * (gw - x_hat * (tl.sum(gw * x_hat, 0) / C))
        gx += tl.load(GH + row + c, mask=inside, other=0.0).to(tl.float32)
        tl.store(GX + row + c, gx.to(GX.dtype.element_ty), mask=inside)
        part += g * x_hat
    tl.store(PARTS + program * C + c, part, mask=inside)


def split_heads(
    qkv_NA: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    cos_TF: Tensor,
    sin_TF: Tensor,
    positions_N: Tensor,
    heads: tuple[int, int, int],
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """q_NHD, k_NKD, v_NKD of a fused projection: heads normed if the model does so, then rotated. Differentiable."""
    return _SplitHeads.apply(qkv_NA, q_norm_D, k_norm_D, cos_TF, sin_TF, positions_N, heads, eps)


def split_heads_into(
    keys_SKD: Tensor,
    values_SKD: Tensor,
    slots_N: Tensor,
    qkv_NA: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    cos_TF: Tensor,
    sin_TF: Tensor,
    positions_N: Tensor,
    heads: tuple[int, int, int],
    eps: float,
) -> Tensor:
    """q_NHD as in `split_heads`; keys and values go straight to their slots of the cache."""
    H, _, D = heads
    q = torch.empty(qkv_NA.shape[0], H, D, dtype=qkv_NA.dtype, device=qkv_NA.device)
    _launch_split(q, keys_SKD, values_SKD, slots_N, qkv_NA, q_norm_D, k_norm_D, cos_TF, sin_TF, positions_N, heads, eps)
    return q


def _launch_split(
    q: Tensor, k: Tensor, v: Tensor, slots: Tensor | None, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None,
    cos: Tensor, sin: Tensor, positions: Tensor, heads: tuple[int, int, int], eps: float,
) -> None:  # fmt: skip
    H, K, D = heads
    _split[(qkv.shape[0], 2)](
        qkv, q, k, v, qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, cos, sin, positions,
        positions if slots is None else slots, eps, qkv.stride(0), k.stride(0),
        H=H, K=K, D=D, HEADS=triton.next_power_of_2(H), KV_HEADS=triton.next_power_of_2(K),
        NORM=q_norm is not None, SLOTS=slots is not None, num_warps=4,
    )  # fmt: skip


class _SplitHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, cos: Tensor, sin: Tensor,
        positions: Tensor, heads: tuple[int, int, int], eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        H, K, D = heads
        N = qkv.shape[0]
        q = torch.empty(N, H, D, dtype=qkv.dtype, device=qkv.device)
        k = torch.empty(N, K, D, dtype=qkv.dtype, device=qkv.device)
        v = torch.empty_like(k)
        _launch_split(q, k, v, None, qkv, q_norm, k_norm, cos, sin, positions, heads, eps)
        ctx.save_for_backward(qkv, q_norm, k_norm, cos, sin, positions)
        ctx.heads, ctx.eps = heads, eps
        return q, k, v

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, q_norm, k_norm, cos, sin, positions = ctx.saved_tensors
        (H, K, D), (gq, gk, gv) = ctx.heads, grads
        N = qkv.shape[0]
        out = torch.empty_like(qkv)
        programs = min(_BACKWARD_PROGRAMS, N)
        parts = torch.empty(programs, 2, D, dtype=torch.float32, device=qkv.device)
        normed = q_norm is not None
        for part, count in enumerate((H, K)):
            _split_backward[(programs,)](
                qkv, (gq, gk)[part].contiguous(), gv.contiguous(), out, parts,
                (q_norm, k_norm)[part] if normed else qkv, cos, sin, positions, N, ctx.eps, qkv.stride(0),
                COUNT=count, OFFSET=part * H * D, V_OFFSET=(H + K) * D, D=D, HEADS=triton.next_power_of_2(count),
                PART=part, NORM=normed, num_warps=4,
            )  # fmt: skip
        gqn = parts[:, 0].sum(0).to(q_norm.dtype) if normed else None
        gkn = parts[:, 1].sum(0).to(k_norm.dtype) if normed else None
        return out, gqn, gkn, None, None, None, None, None


@triton.jit
def _norm_and_rotate(
    first, second, w_first, w_second, cos, sin, eps, D: tl.constexpr, NORM: tl.constexpr, DTYPE: tl.constexpr
):
    if NORM:
        scale = 1.0 / tl.sqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D + eps)
        # Rounded here, as a norm that is stored would be.
        first = (first * scale[:, None] * w_first[None, :]).to(DTYPE).to(tl.float32)
        second = (second * scale[:, None] * w_second[None, :]).to(DTYPE).to(tl.float32)
    return first * cos[None, :] - second * sin[None, :], second * cos[None, :] + first * sin[None, :]


@triton.jit
def _split(
    QKV, Q, KEYS, VALUES, Q_NORM, K_NORM, COS, SIN, POSITIONS, SLOTS_AT, eps, stride_qkv, stride_slot,
    H: tl.constexpr, K: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    NORM: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = D // 2
    f = tl.arange(0, half)
    position = tl.load(POSITIONS + n)
    cos, sin = tl.load(COS + position * half + f), tl.load(SIN + position * half + f)
    dtype: tl.constexpr = QKV.dtype.element_ty
    source = QKV + n * stride_qkv + f[None, :]
    if tl.program_id(1) == 0:
        _split_some(source, Q + n * H * D + f[None, :], Q_NORM, cos, sin, eps, H, HEADS, D, NORM, dtype)
    else:
        slot = n
        if SLOTS:
            slot = tl.load(SLOTS_AT + n).to(tl.int64)
        to = slot * stride_slot + f[None, :]
        _split_some(source + H * D, KEYS + to, K_NORM, cos, sin, eps, K, KV_HEADS, D, NORM, dtype)
        h = tl.arange(0, KV_HEADS)[:, None]
        v = source + (H + K) * D + h * D
        tl.store(VALUES + to + h * D, tl.load(v, mask=h < K), mask=h < K)
        tl.store(VALUES + to + h * D + half, tl.load(v + half, mask=h < K), mask=h < K)


@triton.jit
def _split_some(
    source, target, norm, cos, sin, eps,
    COUNT: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, NORM: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """All query heads of a token, or all its key heads."""
    half: tl.constexpr = D // 2
    f = tl.arange(0, half)
    h = tl.arange(0, HEADS)[:, None]
    first = tl.load(source + h * D, mask=h < COUNT, other=0.0).to(tl.float32)
    second = tl.load(source + h * D + half, mask=h < COUNT, other=0.0).to(tl.float32)
    w_first, w_second = cos, sin
    if NORM:
        w_first, w_second = tl.load(norm + f).to(tl.float32), tl.load(norm + half + f).to(tl.float32)
    first, second = _norm_and_rotate(first, second, w_first, w_second, cos, sin, eps, D, NORM, DTYPE)
    tl.store(target + h * D, first.to(DTYPE), mask=h < COUNT)
    tl.store(target + h * D + half, second.to(DTYPE), mask=h < COUNT)


@triton.jit
def _split_backward(
    QKV, GRAD, GRAD_V, OUT, PARTS, W, COS, SIN, POSITIONS, N, eps, stride_qkv,
    COUNT: tl.constexpr, OFFSET: tl.constexpr, V_OFFSET: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr,
    PART: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Gradients of the query heads (PART 0), or of the key heads with the values' passed on (PART 1)."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    half: tl.constexpr = D // 2
    f = tl.arange(0, half)
    h = tl.arange(0, HEADS)[:, None]
    inside = h < COUNT
    dtype: tl.constexpr = QKV.dtype.element_ty
    sum_first, sum_second = tl.zeros([half], tl.float32), tl.zeros([half], tl.float32)
    for i in range(program, N, programs):
        n = tl.cast(i, tl.int64)
        position = tl.load(POSITIONS + n)
        cos, sin = tl.load(COS + position * half + f)[None, :], tl.load(SIN + position * half + f)[None, :]
        at = n * COUNT * D + h * D + f[None, :]
        to = n * stride_qkv + OFFSET + h * D + f[None, :]
        g1 = tl.load(GRAD + at, mask=inside, other=0.0).to(tl.float32)
        g2 = tl.load(GRAD + at + half, mask=inside, other=0.0).to(tl.float32)
        first_grad, second_grad = g1 * cos + g2 * sin, g2 * cos - g1 * sin
        if NORM:
            first = tl.load(QKV + to, mask=inside, other=0.0).to(tl.float32)
            second = tl.load(QKV + to + half, mask=inside, other=0.0).to(tl.float32)
            w1, w2 = tl.load(W + f).to(tl.float32), tl.load(W + half + f).to(tl.float32)
            scale = 1.0 / tl.sqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / D + eps)
            hat1, hat2 = first * scale[:, None], second * scale[:, None]
            sum_first += tl.sum(tl.where(inside, first_grad * hat1, 0.0), 0)
            sum_second += tl.sum(tl.where(inside, second_grad * hat2, 0.0), 0)
            gw1, gw2 = first_grad * w1[None, :], second_grad * w2[None, :]
            mean = (tl.sum(gw1 * hat1, 1) + tl.sum(gw2 * hat2, 1)) / D
            first_grad = scale[:, None] * (gw1 - hat1 * mean[:, None])
            second_grad = scale[:, None] * (gw2 - hat2 * mean[:, None])
        tl.store(OUT + to, first_grad.to(dtype), mask=inside)
        tl.store(OUT + to + half, second_grad.to(dtype), mask=inside)
        if PART == 1:
            v = n * stride_qkv + V_OFFSET + h * D + f[None, :]
            tl.store(OUT + v, tl.load(GRAD_V + at, mask=inside), mask=inside)
            tl.store(OUT + v + half, tl.load(GRAD_V + at + half, mask=inside), mask=inside)
    tl.store(PARTS + (program * 2 + PART) * D + f, sum_first)
    tl.store(PARTS + (program * 2 + PART) * D + half + f, sum_second)


def swiglu(gate_up_NF: Tensor) -> Tensor:
    """silu(gate) * up of a fused [gate | up] projection. Differentiable."""
    return _SwiGlu.apply(gate_up_NF)


class _SwiGlu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        N, width = gate_up.shape
        out = torch.empty(N, width // 2, dtype=gate_up.dtype, device=gate_up.device)
        ctx.save_for_backward(gate_up)
        _swiglu[(N, triton.cdiv(width // 2, 1024))](gate_up, out, width // 2, BLOCK=1024, num_warps=4)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        N, width = gate_up.shape
        out = torch.empty_like(gate_up)
        grid = (N, triton.cdiv(width // 2, 1024))
        _swiglu_backward[grid](gate_up, grads[0].contiguous(), out, width // 2, BLOCK=1024, num_warps=4)
        return out


@triton.jit
def _swiglu(GATE_UP, OUT, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < width
    gate = tl.load(GATE_UP + row * 2 * width + c, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(GATE_UP + row * 2 * width + width + c, mask=inside, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(OUT + row * width + c, out.to(OUT.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(GATE_UP, GRAD, OUT, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = c < width
    at = GATE_UP + row * 2 * width + c
    gate = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(at + width, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(GRAD + row * width + c, mask=inside, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-gate))
    to = OUT + row * 2 * width + c
    tl.store(to, (g * up * s * (1.0 + gate * (1.0 - s))).to(OUT.dtype.element_ty), mask=inside)
    tl.store(to + width, (g * gate * s).to(OUT.dtype.element_ty), mask=inside)

"""The only place where logits on a GPU become log-probabilities and tokens: one pass over the vocabulary, in blocks.

Contract: a row's log-sum-exp is made from blocks of VOCAB_BLOCK logits, each reduced by one program of fixed shape, and
the blocks' results are merged by one program in a fixed order. Engine and trainer both use it, on logits of the model's
own dtype: the same values in another dtype lie in other threads, and their sum may differ in the last bit. A token is
the argmax of logit / temperature minus the log of an exponential number that hangs on (seed, position, token id) alone.

M, B = rows, V = vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

VOCAB_BLOCK = 4096
_WARPS = 8
_ROUNDS = tl.constexpr(7)


def draw(logits_BV: Tensor, temperature_B: Tensor, seed_B: Tensor, position_B: Tensor) -> tuple[Tensor, Tensor]:
    """(token_B int64, logprob_B fp32 at the row's temperature). Temperature 0 is greedy and scored at 1."""
    B, V = logits_BV.shape
    device, blocks = logits_BV.device, triton.cdiv(V, VOCAB_BLOCK)
    best = torch.empty(B, blocks, dtype=torch.float32, device=device)
    total, value, logit = torch.empty_like(best), torch.empty_like(best), torch.empty_like(best)
    index = torch.empty(B, blocks, dtype=torch.int32, device=device)
    _reduce[(B, blocks)](
        logits_BV, temperature_B, seed_B, position_B, best, total, value, index, logit, V, logits_BV.stride(0), blocks,
        BLOCK=VOCAB_BLOCK, DRAW=True, num_warps=_WARPS,
    )  # fmt: skip
    token_B = torch.empty(B, dtype=torch.int64, device=device)
    logprob_B = torch.empty(B, dtype=torch.float32, device=device)
    _choose[(B,)](
        best, total, value, index, logit, token_B, logprob_B, blocks, BLOCKS=triton.next_power_of_2(blocks), num_warps=1
    )
    return token_B, logprob_B


def full_logprobs(logits_MV: Tensor, temperature: float | Tensor) -> Tensor:
    """log_softmax(logits / temperature) over all tokens, fp32: the bits that `draw` reports. Temperature 0 is 1."""
    lse_M, _ = log_sum_exp(logits_MV, temperature)
    divisor_M = _rows_of(temperature, logits_MV)
    divisor_M = torch.where(divisor_M == 0, 1.0, divisor_M)
    return logits_MV.float() / divisor_M.unsqueeze(-1) - lse_M.unsqueeze(-1)


def _rows_of(temperature: float | Tensor, logits_MV: Tensor) -> Tensor:
    if isinstance(temperature, Tensor):
        return temperature.to(logits_MV.device, torch.float32)
    return torch.full((len(logits_MV),), temperature, dtype=torch.float32, device=logits_MV.device)


def log_sum_exp(logits_MV: Tensor, temperature: float | Tensor) -> tuple[Tensor, Tensor]:
    """Per row of logits / temperature, fp32: the log of the sum (the same bits as in `draw`), and the entropy."""
    M, V = logits_MV.shape
    device, blocks = logits_MV.device, triton.cdiv(V, VOCAB_BLOCK)
    best = torch.empty(M, blocks, dtype=torch.float32, device=device)
    total, moment = torch.empty_like(best), torch.empty_like(best)
    temperature_M = _rows_of(temperature, logits_MV)
    _reduce[(M, blocks)](
        logits_MV, temperature_M, best, best, best, total, moment, best, best, V, logits_MV.stride(0), blocks,
        BLOCK=VOCAB_BLOCK, DRAW=False, num_warps=_WARPS,
    )  # fmt: skip
    lse_M = torch.empty(M, dtype=torch.float32, device=device)
    entropy_M = torch.empty_like(lse_M)
    _merge[(M,)](best, total, moment, lse_M, entropy_M, blocks, BLOCKS=triton.next_power_of_2(blocks), num_warps=1)
    return lse_M, entropy_M


@triton.jit
def _reduce(
    LOGITS, TEMPERATURE, SEED, POSITION, BEST, TOTAL, VALUE, INDEX, LOGIT, V, stride, blocks,
    BLOCK: tl.constexpr, DRAW: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0), tl.program_id(1)
    v = block * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(TEMPERATURE + row)
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    z = tl.load(LOGITS + row.to(tl.int64) * stride + v, mask=v < V, other=float("-inf"))
    z = tl.div_rn(z.to(tl.float32), divisor)
    best = tl.max(z, 0)
    safe = tl.where(best == float("-inf"), 0.0, best)
    at = row * blocks + block
    tl.store(BEST + at, best)
    weight = tl.exp(z - safe)
    tl.store(TOTAL + at, tl.sum(weight, 0))
    if not DRAW:
        tl.store(VALUE + at, tl.sum(tl.where(weight > 0.0, weight * z, 0.0), 0))
    if DRAW:
        seed, position = tl.load(SEED + row), tl.load(POSITION + row)
        # Position and token id side by side: no two draws of a response share a number.
        u = tl.rand(seed, (position << 32) + v, _ROUNDS)
        noise = tl.where(temperature == 0.0, 0.0, -tl.log(-tl.log(u)))
        score = tl.where(v < V, z + noise, float("-inf"))
        value, index = tl.max(score, 0, return_indices=True)
        tl.store(VALUE + at, value)
        tl.store(INDEX + at, block * BLOCK + index)
        tl.store(LOGIT + at, tl.sum(tl.where(tl.arange(0, BLOCK) == index, z, 0.0), 0))


@triton.jit
def _log_sum_exp(BEST, TOTAL, row, blocks, BLOCKS: tl.constexpr):
    j = tl.arange(0, BLOCKS)
    inside = j < blocks
    best = tl.load(BEST + row * blocks + j, mask=inside, other=float("-inf"))
    total = tl.load(TOTAL + row * blocks + j, mask=inside, other=0.0)
    top = tl.max(best, 0)
    return top + tl.log(tl.sum(tl.where(best == float("-inf"), 0.0, total * tl.exp(best - top)), 0))


@triton.jit
def _merge(BEST, TOTAL, MOMENT, LSE, ENTROPY, blocks, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lse = _log_sum_exp(BEST, TOTAL, row, blocks, BLOCKS)
    tl.store(LSE + row, lse)
    j = tl.arange(0, BLOCKS)
    best = tl.load(BEST + row * blocks + j, mask=j < blocks, other=float("-inf"))
    moment = tl.load(MOMENT + row * blocks + j, mask=j < blocks, other=0.0)
    mean = tl.sum(tl.where(best == float("-inf"), 0.0, moment * tl.exp(best - lse)), 0)
    tl.store(ENTROPY + row, lse - mean)


@triton.jit
def _choose(BEST, TOTAL, VALUE, INDEX, LOGIT, TOKEN, LOGPROB, blocks, BLOCKS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    lse = _log_sum_exp(BEST, TOTAL, row, blocks, BLOCKS)
    j = tl.arange(0, BLOCKS)
    inside = j < blocks
    value = tl.load(VALUE + row * blocks + j, mask=inside, other=float("-inf"))
    _, block = tl.max(value, 0, return_indices=True)
    tl.store(TOKEN + row, tl.load(INDEX + row * blocks + block).to(tl.int64))
    tl.store(LOGPROB + row, tl.load(LOGIT + row * blocks + block) - lse)


class TokenLogprobs(torch.autograd.Function):
    """Log-probability of one token per row, and the entropy of each row, straight from hidden states: the head runs in
    chunks of rows, so no logits of the whole batch are ever held. The backward makes each chunk's logits again.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden_MC: Tensor, weight_VC: Tensor, targets_M: Tensor, temperature: float, product: Any, chunk: int
    ) -> tuple[Tensor, Tensor]:
        M = hidden_MC.shape[0]
        out_M = torch.empty(M, dtype=torch.float32, device=hidden_MC.device)
        lse_M, entropy_M = torch.empty_like(out_M), torch.empty_like(out_M)
        for start in range(0, M, chunk):
            rows = slice(start, min(start + chunk, M))
            logits = product(hidden_MC[rows], weight_VC)
            lse_M[rows], entropy_M[rows] = log_sum_exp(logits, temperature)
            picked = logits.gather(1, targets_M[rows, None]).squeeze(1).float()
            out_M[rows] = (picked / torch.full_like(picked, temperature)) - lse_M[rows]
        ctx.save_for_backward(hidden_MC, weight_VC, targets_M, lse_M)
        ctx.temperature, ctx.product, ctx.chunk = temperature, product, chunk
        ctx.mark_non_differentiable(entropy_M)
        return out_M, entropy_M

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden_MC, weight_VC, targets_M, lse_M = ctx.saved_tensors
        grad_M = grads[0]
        M, V = hidden_MC.shape[0], weight_VC.shape[0]
        grad_hidden = torch.empty_like(hidden_MC)
        grad_weight = torch.zeros(weight_VC.shape, dtype=torch.float32, device=weight_VC.device)
        for start in range(0, M, ctx.chunk):
            rows = slice(start, min(start + ctx.chunk, M))
            logits = ctx.product(hidden_MC[rows], weight_VC)
            count = logits.shape[0]
            _logit_gradient[(count, triton.cdiv(V, VOCAB_BLOCK))](
                logits, targets_M[rows], lse_M[rows], grad_M[rows].contiguous(), V, logits.stride(0), ctx.temperature,
                BLOCK=VOCAB_BLOCK, num_warps=_WARPS,
            )  # fmt: skip
            torch.mm(logits, weight_VC, out=grad_hidden[rows])
            grad_weight += torch.mm(logits.t(), hidden_MC[rows], out_dtype=torch.float32)
        return grad_hidden, grad_weight.to(weight_VC.dtype), None, None, None, None


@triton.jit
def _logit_gradient(LOGITS, TARGET, LSE, GRAD, V, stride, temperature, BLOCK: tl.constexpr):
    """Overwrites logits by the gradient of the loss with respect to them."""
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = LOGITS + row * stride + v
    z = tl.load(at, mask=v < V, other=0.0)
    z = tl.div_rn(z.to(tl.float32), temperature)
    grad = tl.load(GRAD + row) / temperature
    p = tl.exp(z - tl.load(LSE + row))
    out = grad * (tl.where(v == tl.load(TARGET + row), 1.0, 0.0) - p)
    tl.store(at, out.to(LOGITS.dtype.element_ty), mask=v < V)

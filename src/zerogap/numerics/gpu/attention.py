"""The only place for attention on a GPU: one algorithm, whatever the phase, the tile or the memory that holds the keys.

Contract: a row of queries meets its keys in blocks of KEY_BLOCK from key 0 on, in ascending order: scores, running
maximum, exp2, probabilities rounded to the values' dtype, one product with the values and one with ones for the row's
sum. Both products go through the tensor cores, whose sums do not depend on the tile or the number of warps; a maximum
does not depend on any order; a block without visible keys changes nothing, neither behind a row's position nor before
its window, where maximum, sum and output stay -inf, 0 and 0: a program skips those that none of its rows sees. So
packed training, prefill, chunks of it and decode agree bit for bit. Softmax is over all visible keys, never split over
programs.

B = segments (runs of queries of one sequence), T = all queries, H = query heads, K = KV heads, D = head dimension,
S = slots (rows of the memory that holds keys and values).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

KEY_BLOCK = 64
_LOG2_E = 1.4426950408889634
_LN_2 = tl.constexpr(0.6931471805599453)


@dataclass(frozen=True, slots=True)
class Segments:
    """Which queries belong together and where their keys are.

    Queries of segment b are rows first_B[b] .. first_B[b+1]-1; it sees num_keys_B[b] keys, the last of them its own.
    Paged: key j is in slot table_BJ[b, j // page] * page + j % page. Else keys lie in two runs: the first
    shared_B[b] of them from slot shared_from_B[b] on, the others from own_from_B[b] on.
    """

    first_B: Tensor
    num_keys_B: Tensor
    longest: int
    table_BJ: Tensor | None = None
    page: int = KEY_BLOCK
    shared_B: Tensor | None = None
    shared_from_B: Tensor | None = None
    own_from_B: Tensor | None = None


def attend(
    q_THD: Tensor,
    keys_SKD: Tensor,
    values_SKD: Tensor,
    segments: Segments,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    rows: int | None = None,
    warps: int | None = None,
    stages: int = 2,
    lse_HT: Tensor | None = None,
) -> Tensor:
    """o_THD. A query sees all keys up to its own, or the last `window` of them; with a `soft_cap` the scores become
    cap * tanh(score / cap). `rows` and `warps` shape the tile and never the bits. Fills `lse_HT` (natural log, fp32) if
    given.
    """
    T, H, D = q_THD.shape
    K = keys_SKD.shape[1]
    group = H // K
    if rows is None or warps is None:
        small = segments.longest * group <= 16
        rows, warps = (16, 4) if small else (64, 4) if segments.longest * group <= 512 else (128, 8)
    out_THD = torch.empty(T, H, D, dtype=q_THD.dtype, device=q_THD.device)
    paged = segments.table_BJ is not None
    table = segments.table_BJ if paged else segments.own_from_B
    assert table is not None, "keys are in a paged cache, or in runs"
    grid = (triton.cdiv(segments.longest * group, rows), K, segments.num_keys_B.shape[0])
    _attend[grid](
        q_THD, keys_SKD, values_SKD, out_THD, lse_HT if lse_HT is not None else out_THD,
        segments.first_B, segments.num_keys_B, table,
        segments.shared_B if segments.shared_B is not None else table,
        segments.shared_from_B if segments.shared_from_B is not None else table,
        scale * _LOG2_E, q_THD.stride(0), q_THD.stride(1), keys_SKD.stride(0), keys_SKD.stride(1),
        values_SKD.stride(0), values_SKD.stride(1), out_THD.stride(0), table.stride(0), T,
        GROUP=group, D=D, ROWS=rows, KEYS=KEY_BLOCK, PAGE=segments.page, PAGED=paged,
        SHARED=segments.shared_B is not None, WITH_LSE=lse_HT is not None,
        WINDOW=window or 0, SOFT_CAP=soft_cap or 0.0, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out_THD


@triton.jit
def _seen(scores, key, position, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr):
    """The scores, in units of log 2, of the keys that each row sees, and -inf for the others."""
    if SOFT_CAP > 0.0:
        # tanh(x) = 1 - 2 / (exp(2x) + 1). Doubling is exact, so that it does not matter whether it is fused.
        tanh = 1.0 - 2.0 * (1.0 / (tl.exp2(scores * (2.0 / SOFT_CAP)) + 1.0))
        scores = tanh * (SOFT_CAP / _LN_2)
    visible = key[None, :] <= position[:, None]
    if WINDOW > 0:
        visible = visible & (key[None, :] > position[:, None] - WINDOW)
    return tl.where(visible, scores, float("-inf"))


@triton.jit
def _weigh(scores, best, WINDOW: tl.constexpr):
    """The new maximum of each row, its keys' probabilities and what its sums shrink by."""
    now = tl.maximum(best, tl.max(scores, 1))
    level = now
    if WINDOW > 0:  # before a row's first visible key -inf less -inf would be no number
        level = tl.where(now == float("-inf"), 0.0, now)
    return now, tl.exp2(scores - level[:, None]), tl.exp2(best - level)


@triton.jit
def _attend(
    Q, KEYS_AT, VALUES_AT, OUT, LSE, FIRST, NUM_KEYS, TABLE, SHARED_LEN, SHARED_FROM, scale, stride_qt, stride_qh,
    stride_ks, stride_kh, stride_vs, stride_vh, stride_ot, stride_table, num_queries_in_all,
    GROUP: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr,
    PAGED: tl.constexpr, SHARED: tl.constexpr, WITH_LSE: tl.constexpr, WINDOW: tl.constexpr, SOFT_CAP: tl.constexpr,
):  # fmt: skip
    tile, kv_head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(FIRST + b)
    num_queries = tl.load(FIRST + b + 1) - first
    num_keys = tl.load(NUM_KEYS + b)
    if tile * ROWS >= num_queries * GROUP:
        return
    # The heads of a group lie side by side, so that one query of a decode step fills several rows.
    row = tile * ROWS + tl.arange(0, ROWS)
    query, head = row // GROUP, kv_head * GROUP + row % GROUP
    real = query < num_queries
    position = num_keys - num_queries + query
    d = tl.arange(0, D)
    at = (first + query)[:, None].to(tl.int64)
    q = tl.load(Q + at * stride_qt + head[:, None] * stride_qh + d[None, :], mask=real[:, None], other=0.0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS, 16], tl.float32)
    out = tl.zeros([ROWS, D], tl.float32)
    ones = tl.full([KEYS, 16], 1.0, VALUES_AT.dtype.element_ty)
    seen = tl.minimum(num_keys, num_keys - num_queries + (tile * ROWS + ROWS - 1) // GROUP + 1)
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(num_keys - num_queries + tile * ROWS // GROUP - WINDOW + 1, 0) // KEYS * KEYS
    shared, shared_from, own_from = 0, 0, 0
    if not PAGED:
        own_from = tl.load(TABLE + b).to(tl.int64)
        if SHARED:
            shared = tl.load(SHARED_LEN + b)
            shared_from = tl.load(SHARED_FROM + b).to(tl.int64)
    for start in range(begin, seen, KEYS):
        key = start + tl.arange(0, KEYS)
        if PAGED:
            if PAGE == KEYS:
                slot = tl.load(TABLE + b * stride_table + start // PAGE).to(tl.int64) * PAGE + tl.arange(0, KEYS)
            else:
                block = tl.load(TABLE + b * stride_table + key // PAGE, mask=key < num_keys, other=0).to(tl.int64)
                slot = block * PAGE + key % PAGE
        elif SHARED:
            slot = tl.where(key < shared, shared_from + key, own_from + key - shared)
        else:
            slot = own_from + key
        there = key < num_keys
        k = tl.load(
            KEYS_AT + slot[None, :] * stride_ks + kv_head * stride_kh + d[:, None], mask=there[None, :], other=0.0
        )
        scores = _seen(tl.dot(q, k) * scale, key, position, WINDOW, SOFT_CAP)
        now, p, shrink = _weigh(scores, best, WINDOW)
        v = tl.load(
            VALUES_AT + slot[:, None] * stride_vs + kv_head * stride_vh + d[None, :], mask=there[:, None], other=0.0
        )
        p = p.to(v.dtype)
        total = tl.dot(p, ones, total * shrink[:, None])
        out = tl.dot(p, v, out * shrink[:, None])
        best = now
    sum_of_row = tl.max(total, 1)  # all 16 columns are equal
    result = (out / sum_of_row[:, None]).to(OUT.dtype.element_ty)
    tl.store(OUT + at * stride_ot + head[:, None] * D + d[None, :], result, mask=real[:, None])
    if WITH_LSE:
        tl.store(LSE + head * num_queries_in_all + first + query, (best + tl.log2(sum_of_row)) * _LN_2, mask=real)

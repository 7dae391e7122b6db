"""The only place for attention. One core, `attend_rows`; training, prefill and decode differ in where keys come from.

Contract: the result for a query depends on its own keys and values only. Keys stand at their absolute position from
key 0; scores of a row are one dot product each; the softmax runs over the whole row in fp32; probabilities meet values
in blocks of KEY_BLOCK keys that are added in ascending order. Key extents are padded to PAD_KEYS with masked keys,
which contribute exact zeros, as do keys before a layer's window. A soft cap changes each score by itself. Rows of a
product are the queries that share a KV head, at least MIN_ROWS of them: below that a BLAS may use another kernel with
another order.

S = segments (runs of tokens of one sequence), T = queries of a segment, L = padded keys, H = query heads, K = KV heads,
G = query heads per KV head, D = head dimension, N = flat tokens, R = G * T rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zerogap.numerics.elementwise import tanh
from zerogap.numerics.heads import Projection
from zerogap.numerics.masks import PAD_KEYS, Masks, padded_keys

KEY_BLOCK = 128
MIN_ROWS = 4
MIN_VALUE_COLUMNS = 32


def capped(scores_BRL: Tensor, soft_cap: float | None) -> Tensor:
    """cap * tanh(scores / cap), computed in fp32, in the dtype of the scores; without a cap the scores themselves."""
    if soft_cap is None:
        return scores_BRL
    flat = scores_BRL.reshape(-1, scores_BRL.shape[-1]).float()
    return (tanh(flat / soft_cap) * soft_cap).to(scores_BRL.dtype).view(scores_BRL.shape)


def probabilities(scores_BRL: Tensor, mask_BRL: Tensor) -> Tensor:
    """softmax(scores + mask), computed in fp32, in the dtype of the scores. Overwrites the scores."""
    scores_BRL += mask_BRL
    return torch.softmax(scores_BRL, dim=-1, dtype=torch.float32).to(scores_BRL.dtype)


def weigh_values(p_BRL: Tensor, values_BLD: Tensor) -> Tensor:
    """p @ values in blocks of KEY_BLOCK keys from key 0, added in ascending order."""
    head_dim = values_BLD.shape[2]
    if head_dim < MIN_VALUE_COLUMNS:
        values_BLD = F.pad(values_BLD, (0, MIN_VALUE_COLUMNS - head_dim))
    out_BRD = torch.bmm(p_BRL[:, :, :KEY_BLOCK], values_BLD[:, :KEY_BLOCK])
    for start in range(KEY_BLOCK, values_BLD.shape[1], KEY_BLOCK):
        stop = start + KEY_BLOCK
        out_BRD = out_BRD + torch.bmm(p_BRL[:, :, start:stop], values_BLD[:, start:stop])
    return out_BRD[:, :, :head_dim]


def at_least_min_rows(x_BRD: Tensor) -> Tensor:
    """Repeats the last row up to MIN_ROWS."""
    missing = MIN_ROWS - x_BRD.shape[1]
    return x_BRD if missing <= 0 else torch.cat((x_BRD, x_BRD[:, -1:].expand(-1, missing, -1)), dim=1)


def attend_rows(
    q_BRD: Tensor, keys_BDL: Tensor, values_BLD: Tensor, mask_BRL: Tensor, *, soft_cap: float | None = None
) -> Tensor:
    """The attention core: o_BRD for B independent (segment, KV head) pairs. q is scaled, keys are transposed.

    The mask has one row per query, or a single row for all.
    """
    rows = q_BRD.shape[1]
    mask_BRL = mask_BRL if mask_BRL.shape[1] == 1 else at_least_min_rows(mask_BRL)
    scores_BRL = capped(torch.bmm(at_least_min_rows(q_BRD), keys_BDL), soft_cap)
    p_BRL = probabilities(scores_BRL, mask_BRL)
    return weigh_values(p_BRL, values_BLD)[:, :rows]


def _rows_of_kv_heads(q_STHD: Tensor, num_kv_heads: int) -> Tensor:
    """[S, T, H, D] -> [S*K, G*T, D]: the queries that share a KV head become the rows of one product."""
    S, T, H, D = q_STHD.shape
    q = q_STHD.view(S, T, num_kv_heads, H // num_kv_heads, D).permute(0, 2, 3, 1, 4)
    return q.reshape(S * num_kv_heads, -1, D)


def _heads_of_rows(out_BRD: Tensor, num_segments: int, num_queries: int) -> Tensor:
    """The inverse: [S*K, G*T, D] -> [S, T, H*D]."""
    D = out_BRD.shape[-1]
    out = out_BRD.reshape(num_segments, -1, num_queries, D)
    return out.permute(0, 2, 1, 3).reshape(num_segments, num_queries, -1)


def _row_mask(mask_S1TL: Tensor, num_kv_heads: int, queries_per_kv: int) -> Tensor:
    """[S, 1, T, L] -> [S*K, G*T, L] (or [S*K, 1, L] for one query, where all rows of a product share it)."""
    S, _, T, L = mask_S1TL.shape
    group = 1 if T == 1 else queries_per_kv
    return mask_S1TL.unsqueeze(1).expand(S, num_kv_heads, group, T, L).reshape(S * num_kv_heads, group * T, L)


# --------------------------------------------------------------------------------------------------------------------
# Training: keys come from the packed tokens themselves; a group's prompt is stored and run once.


@dataclass(frozen=True, slots=True)
class _Segments:
    """Segments of equal role, padded to a rectangle. Index N stands for padding (a row of zeros)."""

    queries_ST: Tensor
    keys_SL: Tensor
    masks: Masks
    key_slots: Tensor
    key_tokens: Tensor


@dataclass(frozen=True, slots=True)
class TreePlan:
    """Where each token of a packed batch finds its keys, when the samples of a group share their prompt.

    Flat order: for each group its prompt tokens, then the tokens of each response. A response sees its group's prompt,
    then itself; another group or response is never visible. A plain sequence is a group with no responses.
    """

    num_tokens: int
    positions_N: Tensor
    segments: tuple[_Segments, ...]
    output_slots_N: Tensor

    @staticmethod
    def build(prompt_lens: Sequence[int], response_lens: Sequence[Sequence[int]]) -> TreePlan:
        """`response_lens[g]` lists the token counts of the responses of group g (may be empty)."""
        prompts: list[tuple[list[int], list[int]]] = []
        responses: list[tuple[list[int], list[int]]] = []
        positions: list[int] = []
        cursor = 0
        for prompt_len, lens in zip(prompt_lens, response_lens, strict=True):
            prompt = list(range(cursor, cursor + prompt_len))
            prompts.append((prompt, prompt))
            positions += range(prompt_len)
            cursor += prompt_len
            for length in lens:
                own = list(range(cursor, cursor + length))
                if own:
                    responses.append((own, prompt + own))
                positions += range(prompt_len, prompt_len + length)
                cursor += length
        positions_N = torch.tensor(positions, dtype=torch.int64)
        parts = [part for part in (prompts, responses) if part]
        segments = tuple(_rectangle(part, positions_N) for part in parts)
        slots_N = torch.empty(cursor, dtype=torch.int64)
        offset = 0
        for segment in segments:
            flat = segment.queries_ST.reshape(-1)
            real = (flat < cursor).nonzero().squeeze(-1)
            slots_N[flat[real]] = real + offset
            offset += flat.numel()
        return TreePlan(cursor, positions_N, segments, slots_N)


def _rectangle(part: Sequence[tuple[list[int], list[int]]], positions_N: Tensor) -> _Segments:
    num_tokens = len(positions_N)
    longest_query = max(len(queries) for queries, _ in part)
    num_keys = padded_keys(max(len(keys) for _, keys in part))
    queries_ST = torch.full((len(part), longest_query), num_tokens, dtype=torch.int64)
    keys_SL = torch.full((len(part), num_keys), num_tokens, dtype=torch.int64)
    for row, (queries, keys) in enumerate(part):
        queries_ST[row, : len(queries)] = torch.tensor(queries)
        keys_SL[row, : len(keys)] = torch.tensor(keys)
    # A padded query sits at position 0: it sees one key and stays finite; its output is never read.
    query_positions = torch.cat((positions_N, positions_N.new_zeros(1)))[queries_ST]
    key_slots = (keys_SL.reshape(-1) < num_tokens).nonzero().squeeze(-1)
    masks = Masks(query_positions, num_keys)
    return _Segments(queries_ST, keys_SL, masks, key_slots, keys_SL.reshape(-1)[key_slots])


def tree_attend(plan: TreePlan, scale: float) -> Any:
    """`attend` for `Decoder.forward` over the packed tokens of `plan`, differentiable."""

    def attend(layer: int, projection: Projection) -> Tensor:
        del layer
        return _TreeAttention.apply(*projection.split(), plan, scale, projection.window, projection.soft_cap)

    return attend


def _with_zero_row(x_NHD: Tensor) -> Tensor:
    flat = x_NHD.reshape(x_NHD.shape[0], -1)
    return torch.cat((flat, flat.new_zeros(1, flat.shape[1])))


def _gather(
    q: Tensor, k: Tensor, v: Tensor, seg: _Segments, heads: tuple[int, int, int], window: int | None
) -> tuple[Tensor, ...]:
    """Rows of queries [B, R, D], transposed keys [B, D, L], values [B, L, D] and mask [B, R, L] of the segments."""
    H, K, D = heads
    S, T = seg.queries_ST.shape
    L = seg.keys_SL.shape[1]
    q_BRD = _rows_of_kv_heads(q.index_select(0, seg.queries_ST.reshape(-1)).view(S, T, H, D), K)
    keys = seg.keys_SL.reshape(-1)
    keys_BDL = k.index_select(0, keys).view(S, L, K, D).permute(0, 2, 3, 1).contiguous().view(S * K, D, L)
    values_BLD = v.index_select(0, keys).view(S, L, K, D).transpose(1, 2).contiguous().view(S * K, L, D)
    return q_BRD, keys_BDL, values_BLD, _row_mask(seg.masks.of(window).to(q.dtype), K, H // K)


class _TreeAttention(torch.autograd.Function):
    """Canonical forward; the backward recomputes the probabilities segment by segment and stays deterministic."""

    @staticmethod
    def forward(
        ctx: Any,
        q_NHD: Tensor,
        k_NKD: Tensor,
        v_NKD: Tensor,
        plan: TreePlan,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> Tensor:
        heads = (q_NHD.shape[1], k_NKD.shape[1], q_NHD.shape[2])
        q, k, v = _with_zero_row(q_NHD * scale), _with_zero_row(k_NKD), _with_zero_row(v_NKD)
        outs = []
        for seg in plan.segments:
            out_BRD = attend_rows(*_gather(q, k, v, seg, heads, window), soft_cap=soft_cap)
            S, T = seg.queries_ST.shape
            outs.append(_heads_of_rows(out_BRD, S, T).reshape(S * T, -1))
        out = torch.cat(outs).index_select(0, plan.output_slots_N)
        ctx.save_for_backward(q, k, v, out)
        ctx.plan, ctx.scale, ctx.heads, ctx.window, ctx.soft_cap = plan, scale, heads, window, soft_cap
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out = ctx.saved_tensors
        plan, (H, K, D) = ctx.plan, ctx.heads
        grad, out = _with_zero_row(grads[0]), _with_zero_row(out)
        dk, dv = torch.zeros_like(k), torch.zeros_like(v)
        dqs = []
        for seg in plan.segments:
            S, T = seg.queries_ST.shape
            q_BRD, keys_BDL, values_BLD, mask_BRL = _gather(q, k, v, seg, (H, K, D), ctx.window)
            flat = seg.queries_ST.reshape(-1)
            grad_BRD = _rows_of_kv_heads(grad.index_select(0, flat).view(S, T, H, D), K)
            out_BRD = _rows_of_kv_heads(out.index_select(0, flat).view(S, T, H, D), K)
            scores_BRL = capped(torch.bmm(q_BRD, keys_BDL), ctx.soft_cap)
            slope_BRL = None if ctx.soft_cap is None else 1 - (scores_BRL / ctx.soft_cap).square()
            p_BRL = probabilities(scores_BRL, mask_BRL)
            dv_BLD = torch.bmm(p_BRL.transpose(1, 2), grad_BRD)
            dp_BRL = torch.bmm(grad_BRD, values_BLD.transpose(1, 2))
            ds_BRL = p_BRL * (dp_BRL - (grad_BRD * out_BRD).sum(-1, keepdim=True))
            if slope_BRL is not None:
                ds_BRL *= slope_BRL
            dq_BRD = torch.bmm(ds_BRL, keys_BDL.transpose(1, 2))
            dk_BLD = torch.bmm(ds_BRL.transpose(1, 2), q_BRD)
            dqs.append(_heads_of_rows(dq_BRD, S, T).reshape(S * T, -1))
            for total, part_BLD in ((dk, dk_BLD), (dv, dv_BLD)):
                part = part_BLD.view(S, K, -1, D).transpose(1, 2).reshape(-1, K * D)
                total.index_add_(0, seg.key_tokens, part.index_select(0, seg.key_slots))
        dq = torch.cat(dqs).index_select(0, plan.output_slots_N) * ctx.scale
        N = plan.num_tokens
        return dq.view(N, H, D), dk[:N].view(N, K, D), dv[:N].view(N, K, D), None, None, None, None


# --------------------------------------------------------------------------------------------------------------------
# Serving: keys come from a paged cache. Gathering blocks does not change values: any block order gives the same bits.


class PagedKV:
    """The block pools of all layers. Keys are stored transposed inside a block; block 0 is the caller's padding block.

    Pools are zero-filled at allocation and must stay finite: a masked key contributes 0 * value.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        allocate: Any = torch.zeros,
    ) -> None:
        if PAD_KEYS % block_size:
            raise ValueError(f"block_size {block_size} must divide {PAD_KEYS}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_kv_heads, self.head_dim = num_kv_heads, head_dim
        shape = (num_layers, num_kv_heads, num_blocks)
        self.keys = allocate((*shape, head_dim, block_size), dtype=dtype)
        self.values = allocate((*shape, block_size, head_dim), dtype=dtype)
        self._scratch = torch.empty((2, 0, 0), dtype=dtype)

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def _scratch_for(self, num_tiles: int) -> Tensor:
        """Two buffers for gathered tiles, reused by every layer and step: fresh pages would cost more than the copy."""
        if self._scratch.shape[1] < num_tiles:
            shape = (2, num_tiles, self.block_size * self.head_dim)
            self._scratch = torch.empty(shape, dtype=self.keys.dtype)
        return self._scratch[:, :num_tiles]

    def write(self, layer: int, layout: PagedLayout, k_NKD: Tensor, v_NKD: Tensor) -> None:
        blocks_W, offsets_W, sources_W = layout.blocks_W, layout.offsets_W, layout.sources_W
        if sources_W is not None:
            k_NKD, v_NKD = k_NKD.index_select(0, sources_W), v_NKD.index_select(0, sources_W)
        self.keys[layer][:, blocks_W, :, offsets_W] = k_NKD
        self.values[layer][:, blocks_W, offsets_W] = v_NKD.transpose(0, 1)

    def attend(
        self, layer: int, tables_SJ: Tensor, q_BRD: Tensor, mask_BRL: Tensor, soft_cap: float | None = None
    ) -> Tensor:
        """`attend_rows` over the blocks of the segments' tables; B = S * K."""
        S, J = tables_SJ.shape
        K, D, size = self.num_kv_heads, self.head_dim, self.block_size
        head_offsets = torch.arange(K).view(1, K, 1) * self.num_blocks
        index = (tables_SJ.unsqueeze(1) + head_offsets).reshape(-1)
        keys, values = self._scratch_for(len(index))
        torch.index_select(self.keys[layer].view(K * self.num_blocks, -1), 0, index, out=keys)
        torch.index_select(self.values[layer].view(K * self.num_blocks, -1), 0, index, out=values)
        tiles, values_BLD = keys.view(-1, D, size), values.view(S * K, J * size, D)
        if q_BRD.shape[1] > D:
            keys_BDL = tiles.view(S * K, J, D, size).transpose(1, 2).reshape(S * K, D, J * size)
            return attend_rows(q_BRD, keys_BDL, values_BLD, mask_BRL, soft_cap=soft_cap)
        # Few rows: multiply block by block and reorder the scores, which are smaller than the keys. Same dot products.
        rows = q_BRD.shape[1]
        q_BRD = at_least_min_rows(q_BRD)
        mask_BRL = mask_BRL if mask_BRL.shape[1] == 1 else at_least_min_rows(mask_BRL)
        repeated = q_BRD.unsqueeze(1).expand(-1, J, -1, -1).reshape(S * K * J, -1, D)
        scores = torch.bmm(repeated, tiles).view(S * K, J, -1, size)
        scores_BRL = capped(scores.transpose(1, 2).reshape(S * K, -1, J * size), soft_cap)
        return weigh_values(probabilities(scores_BRL, mask_BRL), values_BLD)[:, :rows]


@dataclass(frozen=True, slots=True)
class _PagedBatch:
    """Segments of one query count that attend together; `rows_N` are their tokens in the flat batch."""

    rows_N: Tensor
    num_queries: int
    tables_SJ: Tensor
    masks: Masks


@dataclass(frozen=True, slots=True)
class PagedLayout:
    """One forward of the engine: for each segment its block table, its first position and its number of new tokens.

    W = writes into the cache: one per token, and one per copied token (`sources_W` gives its row; None: no copies).
    """

    positions_N: Tensor
    blocks_W: Tensor
    offsets_W: Tensor
    sources_W: Tensor | None
    batches: tuple[_PagedBatch, ...]

    @staticmethod
    def build(
        block_tables: Sequence[Sequence[int]],
        starts: Sequence[int],
        num_new: Sequence[int],
        block_size: int,
        max_gathered_keys: int = 2048,
        copies: Sequence[tuple[int, Sequence[int], int, int]] = (),
    ) -> PagedLayout:
        """Flat token order is segment by segment. Segments with equal `num_new` attend together, longest last, in
        batches whose padded keys stay below `max_gathered_keys` so that the gathered copy stays in the cache.

        A copy (row, block table, start, count) also writes the keys and values of `count` tokens from `row` on to the
        positions from `start` on of another table.
        """
        positions, blocks, offsets, first_row = [], [], [], []
        for table, start, count in zip(block_tables, starts, num_new, strict=True):
            first_row.append(len(positions))
            for position in range(start, start + count):
                positions.append(position)
                blocks.append(table[position // block_size])
                offsets.append(position % block_size)
        sources = list(range(len(positions)))
        for row, table, start, count in copies:
            sources += range(row, row + count)
            blocks += (table[position // block_size] for position in range(start, start + count))
            offsets += (position % block_size for position in range(start, start + count))
        order = sorted(range(len(starts)), key=lambda i: (num_new[i], starts[i]))
        batches: list[list[int]] = []
        for i in order:
            width = padded_keys(starts[i] + num_new[i])
            last = batches[-1] if batches else []
            if last and num_new[last[0]] == num_new[i] and (len(last) + 1) * width <= max_gathered_keys:
                last.append(i)
            else:
                batches.append([i])
        positions_N = torch.tensor(positions, dtype=torch.int64)
        made = tuple(_paged_batch(batch, block_tables, starts, num_new, first_row, block_size) for batch in batches)
        sources_W = torch.tensor(sources) if copies else None
        return PagedLayout(positions_N, torch.tensor(blocks), torch.tensor(offsets), sources_W, made)


def _paged_batch(
    batch: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    starts: Sequence[int],
    num_new: Sequence[int],
    first_row: Sequence[int],
    block_size: int,
) -> _PagedBatch:
    count = num_new[batch[0]]
    num_keys = padded_keys(max(starts[i] + count for i in batch))
    width = num_keys // block_size
    tables = [(list(block_tables[i][:width]) + [0] * width)[:width] for i in batch]
    queries = torch.tensor([starts[i] for i in batch]).unsqueeze(1) + torch.arange(count)
    rows = torch.tensor([first_row[i] for i in batch]).unsqueeze(1) + torch.arange(count)
    return _PagedBatch(rows.reshape(-1), count, torch.tensor(tables, dtype=torch.int64), Masks(queries, num_keys))


def paged_attend(kv: PagedKV, layout: PagedLayout, scale: float) -> Any:
    """`attend` for `Decoder.forward` in the engine: writes the new keys and values, then attends over the cache."""

    def attend(layer: int, projection: Projection) -> Tensor:
        q_NHD, k_NKD, v_NKD = projection.split()
        kv.write(layer, layout, k_NKD, v_NKD)
        _, H, D = q_NHD.shape
        K = kv.num_kv_heads
        q_NHD = q_NHD * scale
        out_N = q_NHD.new_empty(len(q_NHD), H * D)
        for batch in layout.batches:
            S, T = batch.tables_SJ.shape[0], batch.num_queries
            q_BRD = _rows_of_kv_heads(q_NHD.index_select(0, batch.rows_N).view(S, T, H, D), K)
            mask_BRL = _row_mask(batch.masks.of(projection.window).to(q_NHD.dtype), K, H // K)
            out_BRD = kv.attend(layer, batch.tables_SJ, q_BRD, mask_BRL, projection.soft_cap)
            out_N[batch.rows_N] = _heads_of_rows(out_BRD, S, T).view(S * T, -1)
        return out_N

    return attend

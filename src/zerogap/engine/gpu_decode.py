"""The only place where decode steps are captured as CUDA graphs and replayed: several tokens per row and launch.

All state of a row (its last token, its number of keys, its place in the random sequence) lives on the GPU and is moved
on by the graph itself, so steps follow each other without the host. The host gives the rows before a launch and reads
all tokens after it; what a row made beyond its own end is not read.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListLike
from contextlib import AbstractContextManager
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from zerogap.engine.requests import Sequence
from zerogap.model.decoder import Decoder
from zerogap.numerics.gpu import vocabulary
from zerogap.numerics.gpu.attention import Segments, attend
from zerogap.numerics.heads import Projection

Capture = Callable[[torch.cuda.CUDAGraph, Any], AbstractContextManager[None]]
"""(graph, memory pool) -> the context in which the graph is recorded."""
BATCH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)


class DecodeGraphs:
    """Graphs for batches up to `max_rows`, captured on first use. `keys` and `values` are [layers, slots, K, D]."""

    def __init__(
        self,
        decoder: Decoder,
        keys: Tensor,
        values: Tensor,
        *,
        page: int,
        max_rows: int,
        max_steps: int,
        capture: Capture,
    ) -> None:
        self._decoder, self._keys, self._values, self._page = decoder, keys, values, page
        self._sizes = [n for n in BATCH_SIZES if n < max_rows] + [max_rows]
        pages = -(-decoder.config.max_position_embeddings // page)
        device = keys.device
        self.max_steps = max_steps

        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self._ids = zeros(max_rows, dtype=torch.int64)
        self._num_keys = zeros(max_rows, dtype=torch.int32)
        self._table = zeros(max_rows, pages, dtype=torch.int32)
        self._seed = zeros(max_rows, dtype=torch.int64)
        self._place = zeros(max_rows, dtype=torch.int64)
        self._temperature = zeros(max_rows, dtype=torch.float32)
        self._made = zeros(max_rows, dtype=torch.int32)
        self._tokens = zeros(max_steps, max_rows, dtype=torch.int64)
        self._logprobs = zeros(max_steps, max_rows, dtype=torch.float32)
        self._positions, self._slots = zeros(max_rows, dtype=torch.int64), zeros(max_rows, dtype=torch.int64)
        self._first = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._host_table = torch.zeros(max_rows, pages, dtype=torch.int32, pin_memory=True)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None
        self._capturing = capture

    @torch.no_grad()
    def run(self, sequences: ListLike[Sequence], steps: int) -> tuple[list[list[int]], list[list[float]]]:
        """`steps` tokens and logprobs of each sequence, step by step: [step][row]."""
        rows = len(sequences)
        size = next(n for n in self._sizes if n >= rows)
        self._fill(sequences, size)
        graph = self._graphs.get(size) or self._capture(size)
        for _ in range(steps):
            graph.replay()
        tokens, logprobs = self._tokens[:steps, :rows].cpu(), self._logprobs[:steps, :rows].cpu()
        return tokens.tolist(), logprobs.tolist()

    def _fill(self, sequences: ListLike[Sequence], size: int) -> None:
        """Rows beyond the sequences see one key of the padding block and write there."""
        spare = size - len(sequences)
        options = [s.sampling_row for s in sequences]
        table = self._host_table[:size]
        table.zero_()
        host = table.numpy()
        for row, sequence in enumerate(sequences):
            host[row, : len(sequence.blocks)] = sequence.blocks
        self._table[:size].copy_(table, non_blocking=True)
        _upload(self._ids, [s.tokens[-1] for s in sequences] + [0] * spare)
        _upload(self._num_keys, [len(s.tokens) for s in sequences] + [1] * spare)
        _upload(self._seed, [o.seed for o in options] + [0] * spare)
        _upload(self._place, [o.position for o in options] + [0] * spare)
        _upload(self._temperature, [o.temperature for o in options] + [1.0] * spare)
        self._made.zero_()

    def _capture(self, size: int) -> torch.cuda.CUDAGraph:
        saved = [t.clone() for t in self._moving]
        self._step(size)  # compiles kernels and fills caches outside of the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with self._capturing(graph, self._pool):
            self._step(size)
        self._pool = graph.pool()
        for tensor, before in zip(self._moving, saved, strict=True):
            tensor.copy_(before)
        self._graphs[size] = graph
        return graph

    @property
    def _moving(self) -> tuple[Tensor, ...]:
        """What a step changes, besides the cache, which the same step writes again."""
        return self._ids, self._num_keys, self._place, self._made

    def _step(self, size: int) -> None:
        decoder, page = self._decoder, self._page
        _begin[(size,)](
            self._num_keys, self._table, self._positions, self._slots, self._table.stride(0), self._table.shape[1],
            decoder.cos_TF.shape[0], PAGE=page,
        )  # fmt: skip
        segments = Segments(self._first[: size + 1], self._num_keys[:size], 1, table_BJ=self._table[:size], page=page)
        slots, scale = self._slots[:size], decoder.attention_scale

        def attend_cached(layer: int, projection: Projection) -> Tensor:
            keys, values = self._keys[layer], self._values[layer]
            q_NHD = projection.split_into(keys, values, slots)
            out_THD = attend(
                q_NHD, keys, values, segments, scale, window=projection.window, soft_cap=projection.soft_cap
            )
            return out_THD.view(size, -1)

        hidden = decoder(self._ids[:size], self._positions[:size], attend_cached)
        tokens, logprobs = vocabulary.draw(
            decoder.model_logits(hidden), self._temperature[:size], self._seed[:size], self._place[:size]
        )
        _end[(size,)](
            tokens, logprobs, self._ids, self._num_keys, self._place, self._made, self._tokens, self._logprobs,
            self._tokens.stride(0), self.max_steps,
        )  # fmt: skip


def _upload(target: Tensor, values: list[int] | list[float]) -> None:
    target[: len(values)].copy_(torch.tensor(values, dtype=target.dtype).pin_memory(), non_blocking=True)


@triton.jit
def _begin(NUM_KEYS, TABLE, POSITIONS, SLOTS, stride, pages, num_positions, PAGE: tl.constexpr):
    """Where the new token stands and where its key goes; behind the end of the table, into the padding block."""
    row = tl.program_id(0)
    at = tl.load(NUM_KEYS + row) - 1
    page = at // PAGE
    block = tl.load(TABLE + row * stride + page, mask=page < pages, other=0).to(tl.int64)
    tl.store(SLOTS + row, block * PAGE + at % PAGE)
    tl.store(POSITIONS + row, tl.minimum(at, num_positions - 1).to(tl.int64))


@triton.jit
def _end(TOKEN, LOGPROB, IDS, NUM_KEYS, PLACE, MADE, TOKENS, LOGPROBS, stride, max_steps):
    row = tl.program_id(0)
    token, made = tl.load(TOKEN + row), tl.load(MADE + row)
    inside = made < max_steps
    tl.store(TOKENS + made * stride + row, token, mask=inside)
    tl.store(LOGPROBS + made * stride + row, tl.load(LOGPROB + row), mask=inside)
    tl.store(IDS + row, token)
    tl.store(NUM_KEYS + row, tl.load(NUM_KEYS + row) + 1)
    tl.store(PLACE + row, tl.load(PLACE + row) + 1)
    tl.store(MADE + row, made + 1)

"""The only place where the engine touches the model on a GPU: prompts as they come, decode in captured graphs.

The policy is the scheduler's, as on a CPU. Where a step only decodes, several steps are launched at once: the tokens
that a sequence made beyond its end are dropped.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence as ListLike
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from zerogap.engine.draw import give, give_tokens, score_planned
from zerogap.engine.gpu_decode import Capture, DecodeGraphs
from zerogap.engine.kv_cache import BlockPool
from zerogap.engine.requests import Sequence
from zerogap.engine.scheduler import Scheduler, Work
from zerogap.model.decoder import Decoder
from zerogap.model.layers import Allocate
from zerogap.numerics.gpu.attention import KEY_BLOCK, Segments, attend
from zerogap.numerics.heads import Projection

BLOCK_SIZE = KEY_BLOCK
STEPS_PER_LAUNCH = 16


class GpuRunner:
    """A decoder on a GPU with its paged cache and scheduler; the counterpart of `Runner`."""

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_kv_tokens: int,
        max_running: int,
        prefill_tokens: int,
        allocate: Allocate = torch.zeros,
        capture: Capture | None = None,
    ) -> None:
        config = decoder.config
        num_blocks = -(-num_kv_tokens // BLOCK_SIZE) + 1
        self.decoder, self.weight_version, self._num_changes = decoder, 0, 0
        self.device = decoder.cos_TF.device
        shape = (config.num_layers, num_blocks * BLOCK_SIZE, config.num_kv_heads, config.head_dim)
        self.keys = allocate(shape, dtype=decoder.dtype, device=self.device)
        self.values = allocate(shape, dtype=decoder.dtype, device=self.device)
        self.scheduler = Scheduler(
            BlockPool(num_blocks, BLOCK_SIZE), max_running=max_running, prefill_tokens=prefill_tokens
        )
        self.graphs = DecodeGraphs(
            decoder,
            self.keys,
            self.values,
            page=BLOCK_SIZE,
            max_rows=max_running,
            max_steps=STEPS_PER_LAUNCH,
            capture=capture or _plain_capture,
        )

    def weights_changed(self) -> None:
        self._num_changes += 1
        self.scheduler.pool.flush()

    @torch.no_grad()
    def step(self) -> list[Sequence]:
        """One launch; returns the sequences that got tokens in it, or an error. Those that ended are gone."""
        work = self.scheduler.plan(struct.pack("<qq", self.weight_version, self._num_changes))
        self._scrub(self.scheduler.pool.take_dirty())
        if not work:
            return []
        if all(w.count == 1 and w.samples and w.leader is None and _is_plain(w.sequence) for w in work):
            moved = self._decode([w.sequence for w in work])
        else:
            moved = self._mixed(work)
        ended = [s for s in moved if s.ended]
        if ended:
            self.scheduler.remove(ended)
        return moved

    def _decode(self, sequences: list[Sequence]) -> list[Sequence]:
        longest = max(s.params.max_new_tokens - s.num_output for s in sequences)
        steps = self.scheduler.reserve(sequences, min(longest, STEPS_PER_LAUNCH))
        tokens, logprobs = self.graphs.run(sequences, steps)
        for row, sequence in enumerate(sequences):
            start = sequence.num_computed - 1
            for step in range(steps):
                give(sequence, tokens[step][row], logprobs[step][row], self.weight_version)
                if sequence.ended:
                    break
            sequence.num_computed = start + step + 1
        return sequences

    def _mixed(self, work: ListLike[Work]) -> list[Sequence]:
        own = [w for w in work if w.leader is None]
        rows = dict(zip((w.sequence for w in own), accumulate((w.count for w in own), initial=0), strict=False))
        hidden_NC = self._forward(own)
        self._copy_led([w for w in work if w.leader is not None])
        failed = score_planned(own, rows, hidden_NC, self.decoder.model_logits, self.weight_version)
        sampling = [w for w in work if w.samples]
        if sampling:
            last = {w.sequence: rows[w.sequence] + w.count - 1 for w in own}
            index = self._tensor([last[w.leader or w.sequence] for w in sampling], torch.int64)
            logits_BV = self.decoder.model_logits(hidden_NC[index])
            give_tokens([w.sequence for w in sampling], logits_BV, self.weight_version)
        moved = [w.sequence for w in sampling]
        return [*moved, *(s for s in failed if s not in moved)]

    def _forward(self, own: ListLike[Work]) -> Tensor:
        starts, counts = [w.start for w in own], [w.count for w in own]
        positions = [p for w in own for p in range(w.start, w.start + w.count)]
        slots = [w.sequence.blocks[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE
                 for w in own for p in range(w.start, w.start + w.count)]  # fmt: skip
        ids = [t for w in own for t in w.sequence.tokens[w.start : w.start + w.count]]
        width = max(len(w.sequence.blocks) for w in own)
        table = [w.sequence.blocks + [0] * (width - len(w.sequence.blocks)) for w in own]
        segments = Segments(
            self._tensor([0, *accumulate(counts)], torch.int32),
            self._tensor([s + c for s, c in zip(starts, counts, strict=True)], torch.int32),
            max(counts),
            table_BJ=self._tensor(table, torch.int32),
            page=BLOCK_SIZE,
        )
        slots_N, scale = self._tensor(slots, torch.int64), self.decoder.attention_scale

        def attend_cached(layer: int, projection: Projection) -> Tensor:
            keys, values = self.keys[layer], self.values[layer]
            q_NHD = projection.split_into(keys, values, slots_N)
            out_THD = attend(
                q_NHD, keys, values, segments, scale, window=projection.window, soft_cap=projection.soft_cap
            )
            return out_THD.view(len(q_NHD), -1)

        return self.decoder(self._tensor(ids, torch.int64), self._tensor(positions, torch.int64), attend_cached)

    def _copy_led(self, led: ListLike[Work]) -> None:
        """The samples of a group take what their leader computed of the prompt's last, partly filled block."""
        source, target = [], []
        for w in led:
            assert w.leader is not None
            for position in range(w.start, w.start + w.count):
                page, offset = divmod(position, BLOCK_SIZE)
                source.append(w.leader.blocks[page] * BLOCK_SIZE + offset)
                target.append(w.sequence.blocks[page] * BLOCK_SIZE + offset)
        if led:
            source_W, target_W = self._tensor(source, torch.int64), self._tensor(target, torch.int64)
            for cache in (self.keys, self.values):
                cache[:, target_W] = cache[:, source_W]

    def _scrub(self, blocks: list[int]) -> None:
        for block in blocks:
            self.keys[:, block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = 0
            self.values[:, block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = 0

    def _tensor(self, values: list[Any], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)


def _is_plain(sequence: Sequence) -> bool:
    """Whether the captured graph can draw for it."""
    return sequence.plain and sequence.scores is None and not sequence.sampling_row.truncates


def _plain_capture(graph: torch.cuda.CUDAGraph, pool: Any) -> torch.cuda.graph:
    return torch.cuda.graph(graph, pool=pool)

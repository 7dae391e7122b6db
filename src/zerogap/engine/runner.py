"""The only place where the engine touches the model: one forward over planned work, then one draw of tokens."""

from __future__ import annotations

import struct
from itertools import accumulate

import torch

from zerogap.engine.draw import give_tokens, score_planned
from zerogap.engine.kv_cache import BlockPool
from zerogap.engine.requests import Sequence
from zerogap.engine.scheduler import Scheduler
from zerogap.model.decoder import Decoder
from zerogap.model.layers import Allocate
from zerogap.numerics.attention import PagedKV, PagedLayout, paged_attend

BLOCK_SIZE = 16


class Runner:
    """A decoder with its paged cache and scheduler. `weight_version` labels the tokens that are sampled.

    Call `weights_changed` after every change of a weight: what was computed from the old ones is never found again.
    """

    def __init__(
        self,
        decoder: Decoder,
        *,
        num_kv_tokens: int,
        max_running: int,
        prefill_tokens: int,
        allocate: Allocate = torch.zeros,
    ) -> None:
        config = decoder.config
        num_blocks = -(-num_kv_tokens // BLOCK_SIZE) + 1
        self.decoder, self.weight_version, self._num_changes = decoder, 0, 0
        self.kv = PagedKV(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            dtype=decoder.dtype,
            allocate=allocate,
        )
        pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(pool, max_running=max_running, prefill_tokens=prefill_tokens)

    def weights_changed(self) -> None:
        self._num_changes += 1
        self.scheduler.pool.flush()

    @torch.no_grad()
    def step(self) -> list[Sequence]:
        """One engine step; returns the sequences that got a token in it, or an error. Those that ended are gone."""
        work = self.scheduler.plan(struct.pack("<qq", self.weight_version, self._num_changes))
        self._scrub(self.scheduler.pool.take_dirty())
        if not work:
            return []
        own = [w for w in work if w.leader is None]
        rows = dict(zip((w.sequence for w in own), accumulate((w.count for w in own), initial=0), strict=False))
        starts = {w.sequence: w.start for w in own}
        copies = [
            (rows[w.leader] + w.start - starts[w.leader], w.sequence.blocks, w.start, w.count)
            for w in work
            if w.leader is not None
        ]
        layout = PagedLayout.build(
            [w.sequence.blocks for w in own], [w.start for w in own], [w.count for w in own], BLOCK_SIZE, copies=copies
        )
        ids = [t for w in own for t in w.sequence.tokens[w.start : w.start + w.count]]
        attend = paged_attend(self.kv, layout, self.decoder.attention_scale)
        hidden_NC = self.decoder(torch.tensor(ids), layout.positions_N, attend)
        failed = score_planned(own, rows, hidden_NC, self.decoder.logits, self.weight_version)
        ending = [w for w in own if w.samples]
        sampling = [w.sequence for w in work if w.samples]
        if sampling:
            place = {w.sequence: i for i, w in enumerate(ending)}
            logits_BV = self.decoder.logits(hidden_NC[[rows[w.sequence] + w.count - 1 for w in ending]])
            if copies:
                logits_BV = logits_BV[[place[w.leader or w.sequence] for w in work if w.samples]]
            give_tokens(sampling, logits_BV, self.weight_version)
        moved = [*sampling, *(s for s in failed if s not in sampling)] if failed else sampling
        ended = [s for s in moved if s.ended]
        if ended:
            self.scheduler.remove(ended)
        return moved

    def _scrub(self, blocks: list[int]) -> None:
        if blocks:
            self.kv.keys[:, :, blocks] = 0
            self.kv.values[:, :, blocks] = 0

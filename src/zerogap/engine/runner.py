"""The only place where the engine touches the model: one forward over planned work, then one draw of tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence as ListLike

import torch

from zerogap.engine.kv_cache import BlockPool
from zerogap.engine.requests import Sequence
from zerogap.engine.scheduler import Scheduler, Work
from zerogap.errors import RolloutError
from zerogap.model.decoder import Decoder
from zerogap.numerics.attention import PagedKV, PagedLayout, paged_attend
from zerogap.numerics.sampling import sample

BLOCK_SIZE = 16


class Runner:
    """A decoder with its paged cache and scheduler. `weight_version` labels the tokens that are sampled."""

    def __init__(self, decoder: Decoder, *, num_kv_tokens: int, max_running: int, prefill_tokens: int) -> None:
        config = decoder.config
        num_blocks = -(-num_kv_tokens // BLOCK_SIZE) + 1
        self.decoder, self.weight_version = decoder, 0
        self.kv = PagedKV(
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            dtype=decoder.dtype,
        )
        pool = BlockPool(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(pool, max_running=max_running, prefill_tokens=prefill_tokens)

    @torch.no_grad()
    def step(self) -> list[Sequence]:
        """One engine step; returns the sequences that ended in it. Raises RolloutError naming a request whose logits
        were not finite."""
        work = self.scheduler.plan(self.weight_version)
        if not work:
            return []
        layout = PagedLayout.build(
            [w.sequence.blocks for w in work], [w.start for w in work], [w.count for w in work], BLOCK_SIZE
        )
        ids = [t for w in work for t in w.sequence.tokens[w.start : w.start + w.count]]
        attend = paged_attend(self.kv, layout, self.decoder.attention_scale)
        hidden_NC = self.decoder(torch.tensor(ids), layout.positions_N, attend)
        ends, row = [], -1
        for w in work:
            self.scheduler.done(w, self.weight_version)
            row += w.count
            if w.samples:
                ends.append((w, row))
        return self._sample(ends, hidden_NC) if ends else []

    def _sample(self, ends: ListLike[tuple[Work, int]], hidden_NC: torch.Tensor) -> list[Sequence]:
        logits_BV = self.decoder.logits(hidden_NC[[row for _, row in ends]])
        for i, (work, _) in enumerate(ends):
            sequence = work.sequence
            if sequence.num_output + 1 < sequence.params.min_new_tokens:
                logits_BV[i, list(sequence.stop_ids)] = -math.inf
        tokens, logprobs, _ = sample(logits_BV, [w.sequence.sampling_row for w, _ in ends])
        finished = []
        for (work, _), token, logprob in zip(ends, tokens.tolist(), logprobs.tolist(), strict=True):
            if not math.isfinite(logprob):
                raise RolloutError(
                    f"request {work.sequence.rid}: logprob of sampled token {work.sequence.num_output} is {logprob}",
                    remedy="the weights or the logits are not finite; look at the last refit and the learning rate",
                )
            work.sequence.append(token, logprob, self.weight_version)
            if work.sequence.finish_reason is not None:
                self.scheduler.finish(work.sequence)
                finished.append(work.sequence)
        return finished

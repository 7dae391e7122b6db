"""The only place that decides what the engine computes next: one policy, in `plan`.

Every sequence has tokens and a count of those already computed; prefill, a chunk of it, decode and recompute after
a retract are the same thing: computing what is missing. Running sequences go first, oldest first; when blocks run
out the youngest is retracted: it keeps its tokens, logprobs and versions, and its keys and values are computed anew.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from zerogap.engine.kv_cache import BlockPool
from zerogap.engine.requests import Sequence
from zerogap.errors import ConfigError
from zerogap.types import FinishReason


@dataclass(frozen=True, slots=True)
class Work:
    """Tokens `start .. start + count - 1` of one sequence are to be computed; `samples` if a new token follows."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        return self.start + self.count == len(self.sequence.tokens)


class Scheduler:
    """`prefill_tokens` bounds the prompt tokens of one step; `max_running` the sequences in flight."""

    def __init__(self, pool: BlockPool, *, max_running: int, prefill_tokens: int) -> None:
        self.pool, self.max_running, self.prefill_tokens = pool, max_running, prefill_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Raises ConfigError for a sequence that could never fit, before it waits."""
        longest = len(sequence.prompt_ids) + sequence.params.max_new_tokens
        room = (self.pool.num_blocks - 1) * self.pool.block_size
        if longest > room or not sequence.prompt_ids:
            raise ConfigError(
                f"request {sequence.rid}: {len(sequence.prompt_ids)} prompt tokens and "
                f"{sequence.params.max_new_tokens} new ones, the cache holds {room}",
                remedy="give 1 or more prompt tokens, lower max_new_tokens, or raise engine.num_kv_tokens",
            )
        self.waiting.append(sequence)

    def plan(self, version: int) -> list[Work]:
        """What to compute now, its blocks allocated. Empty only if there is nothing to do."""
        budget, work = self.prefill_tokens, []
        for sequence in list(self.running):
            missing = len(sequence.tokens) - sequence.num_computed
            count = missing if missing == 1 else min(missing, budget)
            if sequence in self.running and count and self._make_room(sequence, count):
                work.append(Work(sequence, sequence.num_computed, count))
                budget -= count if missing > 1 else 0
        work = [w for w in work if w.sequence in self.running]
        while self.waiting and budget and len(self.running) < self.max_running:
            sequence = self.waiting[0]
            sequence.blocks = self.pool.match(sequence.tokens, version)
            sequence.num_computed = sequence.num_cached = len(sequence.blocks) * self.pool.block_size
            count = min(len(sequence.tokens) - sequence.num_computed, budget)
            if not self._fits(sequence, count):
                self._drop_blocks(sequence)
                break
            self._grow(sequence, count)
            self.running.append(self.waiting.popleft())
            work.append(Work(sequence, sequence.num_computed, count))
            budget -= count
        return work

    def done(self, work: Work, version: int) -> None:
        """The work was computed: its full blocks can be shared from now on."""
        sequence = work.sequence
        sequence.num_computed = work.start + work.count
        if sequence.num_output <= 1:
            self.pool.publish(sequence.blocks, sequence.tokens[: sequence.num_computed], version)

    def finish(self, sequence: Sequence) -> None:
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._drop_blocks(sequence)

    def abort(self, sequence: Sequence) -> None:
        sequence.finish_reason = FinishReason.ABORT
        self.finish(sequence)

    def retract_all(self) -> None:
        for sequence in reversed(list(self.running)):
            self._retract(sequence)

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        while not self._fits(sequence, count):
            youngest = self.running[-1]
            self._retract(youngest)
            if youngest is sequence:
                return False
        self._grow(sequence, count)
        return True

    def _blocks_missing(self, sequence: Sequence, count: int) -> int:
        return -(-(sequence.num_computed + count) // self.pool.block_size) - len(sequence.blocks)

    def _fits(self, sequence: Sequence, count: int) -> bool:
        return self._blocks_missing(sequence, count) <= self.pool.num_available

    def _grow(self, sequence: Sequence, count: int) -> None:
        sequence.blocks += [self.pool.allocate() for _ in range(self._blocks_missing(sequence, count))]

    def _retract(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._drop_blocks(sequence)
        sequence.num_retractions += 1
        self.waiting.appendleft(sequence)

    def _drop_blocks(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.num_computed = [], 0

"""The only place that decides what the engine computes next: one policy, in `plan`.

Every sequence has tokens and a count of those already computed; prefill, a chunk of it, decode and recompute after
a retract are the same thing: computing what is missing. Running sequences go first, oldest first; when blocks run
out the youngest is retracted: it keeps its tokens, logprobs and versions, and its keys and values are computed anew.
The samples of a group compute their prompt once: full blocks are shared, the rest is copied within the same forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from typing import NamedTuple

from zerogap.engine.kv_cache import BlockPool, extend_names
from zerogap.engine.requests import Sequence
from zerogap.errors import ConfigError


class Work(NamedTuple):
    """Tokens `start .. start + count - 1` of one sequence are to be computed; `samples` if a new token follows.

    With a `leader` nothing is computed: an earlier work of the step has the same tokens up to the end, so its rows are
    copied into this sequence's own blocks, and its logits serve both.
    """

    sequence: Sequence
    start: int
    count: int
    leader: Sequence | None = None

    @property
    def samples(self) -> bool:
        return self.start + self.count == len(self.sequence.tokens)


class Scheduler:
    """`prefill_tokens` bounds the prompt tokens of one step; `max_running` the sequences in flight."""

    def __init__(self, pool: BlockPool, *, max_running: int, prefill_tokens: int) -> None:
        self.pool, self.max_running, self.prefill_tokens = pool, max_running, prefill_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    @property
    def num_tokens(self) -> int:
        """The longest sequence, prompt and response, that the cache can hold."""
        return (self.pool.num_blocks - 1) * self.pool.block_size

    @property
    def num_used_tokens(self) -> int:
        """Room of the cache that requests hold now. Any thread may ask."""
        return self.num_tokens - self.pool.num_available * self.pool.block_size

    def check(self, rid: str, num_prompt: int, max_new_tokens: int) -> None:
        """Raises ConfigError for a request that could never fit. Any thread may ask."""
        if num_prompt + max_new_tokens > self.num_tokens or not num_prompt:
            raise ConfigError(
                f"request {rid}: {num_prompt} prompt tokens and {max_new_tokens} new ones, the cache holds "
                f"{self.num_tokens}",
                remedy="give 1 or more prompt tokens, lower max_new_tokens, or raise engine.num_kv_tokens",
            )

    def add(self, sequence: Sequence) -> None:
        """Raises ConfigError for a sequence that could never fit, before it waits."""
        self.check(sequence.rid, len(sequence.prompt_ids), sequence.params.max_new_tokens)
        self.waiting.append(sequence)

    def plan(self, salt: bytes) -> list[Work]:
        """What to compute now, its blocks allocated and named. Empty only if there is nothing to do.

        `salt` stands for the present weights: blocks are shared among sequences of one salt only.
        """
        work: list[Work] = []
        budget, index, before = self.prefill_tokens, 0, len(self.running)
        while index < len(self.running):
            sequence = self.running[index]
            missing = len(sequence.tokens) - sequence.num_computed
            count = 1 if missing == 1 else min(missing, budget)
            if count:
                if not self._make_room(sequence, count):
                    break  # it was the youngest itself
                work.append(self._compute(sequence, count, salt))
                budget -= count if missing > 1 else 0
            index += 1
        # After a retract nobody comes in: the blocks that it freed are for those who needed them.
        crowded = len(self.running) < before
        leaders = {self._identity(w.sequence): w for w in work if w.count > 1 and w.samples and w.sequence.salt == salt}
        while self.waiting and len(self.running) < self.max_running and not crowded:
            sequence = self.waiting[0]
            self._find_prefix(sequence, salt)
            missing = len(sequence.tokens) - sequence.num_computed
            leader = leaders.get(self._identity(sequence))
            if leader is not None and (leader.start > sequence.num_computed or sequence.unscored):
                leader = None  # it has no rows of its own to score
            spare = len(self.running)  # one block each, so that those who run can grow for a while
            too_big = self._blocks_missing(sequence, missing) + spare > self.pool.num_available
            if too_big or (leader is None and not budget):
                self._drop_blocks(sequence)
                break
            self.running.append(self.waiting.popleft())
            if leader is not None:
                work.append(self._compute(sequence, missing, salt)._replace(leader=leader.sequence))
                continue
            work.append(self._compute(sequence, min(missing, budget), salt))
            budget -= work[-1].count
            if work[-1].samples:
                leaders[self._identity(sequence)] = work[-1]
        return work

    def reserve(self, sequences: ListLike[Sequence], steps: int) -> int:
        """Blocks for up to `steps` new tokens of each planned sequence; the steps there is room for, at least 1."""
        size = self.pool.block_size

        def missing(sequence: Sequence, count: int) -> int:
            count = min(count, sequence.params.max_new_tokens - sequence.num_output)
            return max(0, -(-(sequence.num_computed - 1 + count) // size) - len(sequence.blocks))

        while steps > 1 and sum(missing(s, steps) for s in sequences) > self.pool.num_available:
            steps -= 1
        for sequence in sequences:
            for _ in range(missing(sequence, steps)):
                sequence.blocks.append(self.pool.allocate())
        return steps

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Takes sequences that have ended out of the engine; their blocks are free or findable."""
        gone = set(sequences)
        for sequence in gone:
            self._drop_blocks(sequence)
        self.running = [s for s in self.running if s not in gone]
        if not gone.isdisjoint(self.waiting):
            self.waiting = deque(s for s in self.waiting if s not in gone)

    def retract_all(self) -> None:
        while self.running:
            self._retract_youngest()

    def _compute(self, sequence: Sequence, count: int, salt: bytes) -> Work:
        """Plans the next `count` tokens: takes the blocks and names those that become full."""
        size, pool = self.pool.block_size, self.pool
        start = sequence.num_computed
        for _ in range(self._blocks_missing(sequence, count)):
            sequence.blocks.append(pool.allocate())
        sequence.num_computed = start + count
        sequence.proven = False
        full = sequence.num_computed // size
        if full > sequence.num_named and sequence.salt == salt:  # blocks of two weights have no name
            extend_names(sequence.names, sequence.tokens, full, size, salt + sequence.namespace)
            for block in range(sequence.num_named, full):
                pool.publish(sequence.blocks[block], sequence.names[block])
            sequence.num_named = full
        return Work(sequence, start, count)

    def _find_prefix(self, sequence: Sequence, salt: bytes) -> None:
        """Takes the cached blocks of its tokens. The last token is never among them, nor one whose row is to be scored:
        they have to give logits. Scores of a part of the prompt are made anew if the weights have changed.
        """
        size = self.pool.block_size
        unscored = sequence.unscored
        if sequence.salt != salt:
            sequence.salt, sequence.names = salt, []
            if unscored:
                unscored.clear()
        extend_names(
            sequence.names, sequence.tokens, (len(sequence.tokens) - 1) // size, size, salt + sequence.namespace
        )
        wanted = (len(sequence.tokens) - 1 if unscored is None else unscored.next_row) // size
        sequence.blocks = self.pool.match(sequence.names[:wanted])
        sequence.num_named = len(sequence.blocks)
        sequence.num_computed = sequence.num_named * size
        sequence.proven = True
        if not sequence.num_output:
            sequence.num_cached = sequence.num_computed

    def _identity(self, sequence: Sequence) -> tuple[bytes, tuple[int, ...]]:
        """All tokens of a sequence: the name of its full blocks but the last token's, and what comes after them."""
        count = (len(sequence.tokens) - 1) // self.pool.block_size
        name = sequence.names[count - 1] if count else sequence.namespace
        return name, tuple(sequence.tokens[count * self.pool.block_size :])

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Retracts from the youngest on until the blocks suffice. False if that reached the sequence itself."""
        while self._blocks_missing(sequence, count) > self.pool.num_available:
            if self._retract_youngest() is sequence:
                return False
        return True

    def _blocks_missing(self, sequence: Sequence, count: int) -> int:
        return -(-(sequence.num_computed + count) // self.pool.block_size) - len(sequence.blocks)

    def _retract_youngest(self) -> Sequence:
        sequence = self.running.pop()
        self._drop_blocks(sequence)
        sequence.num_retractions += 1
        self.waiting.appendleft(sequence)
        return sequence

    def _drop_blocks(self, sequence: Sequence) -> None:
        if sequence.proven:
            self.pool.release(sequence.blocks)
        else:
            self.pool.discard(sequence.blocks)
        sequence.blocks, sequence.num_computed, sequence.num_named = [], 0, 0

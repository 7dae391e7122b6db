"""The only place that says which block of the KV cache belongs to whom, and which hold a prefix that can be shared.

A full block is named by its weights and namespace (`root`) and every token from position 0 to its end, so a block of
older weights, of another prefix or of another namespace can never be found. It is named when its computation is
planned: whoever finds it then reads it in the same forward, which writes all keys and values of a layer before it reads
any. Blocks that nobody uses stay findable until their memory is needed, oldest first. Block 0 is never handed out: it
pads block tables.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence

import xxhash


def extend_names(names: list[bytes], tokens: Sequence[int], count: int, block_size: int, root: bytes) -> None:
    """Appends the names of full blocks of `tokens` up to `count` of them: a chain, each stands for its whole prefix."""
    for block in range(len(names), count):
        part = tokens[block * block_size : (block + 1) * block_size]
        parent = names[-1] if names else root
        names.append(xxhash.xxh3_128_digest(parent + struct.pack(f"<{block_size}q", *part)))


class BlockPool:
    """Allocates blocks 1 .. num_blocks - 1."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(num_blocks - 1, 0, -1))
        self._users = [0] * num_blocks
        self._name_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._dirty: list[int] = []

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out now, findable but unused ones included."""
        return len(self._free) + len(self._idle)

    def allocate(self) -> int:
        """A block of its own. The caller has checked `num_available`."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        self._users[block] = 1
        return block

    def match(self, names: Sequence[bytes]) -> list[int]:
        """The blocks of the longest findable prefix, now used once more by the caller."""
        found = []
        for name in names:
            block = self._block_of.get(name)
            if block is None:
                break
            self._users[block] += 1
            self._idle.pop(block, None)
            found.append(block)
        return found

    def publish(self, block: int, name: bytes) -> None:
        """Makes a full block findable. A prefix that is findable already keeps its block."""
        if name not in self._block_of and block not in self._name_of:
            self._block_of[name], self._name_of[block] = block, name

    def release(self, blocks: Sequence[int]) -> None:
        """Ends one use of each block. The last blocks of a prefix become reusable before its first."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                if block in self._name_of:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def discard(self, blocks: Sequence[int]) -> None:
        """Ends one use of blocks whose contents may not be finite: nobody finds them, and `take_dirty` names them."""
        for block in blocks:
            self._forget(block)
            self._users[block] -= 1
            if self._users[block] == 0:
                self._free.append(block)
                self._dirty.append(block)

    def take_dirty(self) -> list[int]:
        """Blocks to overwrite before the next forward: a masked key that is not finite would still spoil its row."""
        dirty, self._dirty = self._dirty, []
        return dirty

    def flush(self) -> None:
        """Forgets every prefix. Blocks in use stay with their users."""
        self._free += self._idle
        self._idle.clear()
        self._name_of.clear()
        self._block_of.clear()

    def _forget(self, block: int) -> None:
        name = self._name_of.pop(block, None)
        if name is not None:
            del self._block_of[name]

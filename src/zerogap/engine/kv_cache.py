"""The only place that says which block of the KV cache belongs to whom, and which hold a prefix that can be shared.

A full block is named by the weight version and every token from position 0 to its end, so a block of older weights or
of another prefix can never be found. Blocks that nobody uses stay findable until their memory is needed, oldest first.
Block 0 is never handed out: it pads block tables.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence

import xxhash


def block_keys(tokens: Sequence[int], block_size: int, version: int) -> list[bytes]:
    """The name of each full block of `tokens`: a chain, so that each name stands for the whole prefix."""
    keys, parent = [], struct.pack("<q", version)
    for start in range(0, len(tokens) - block_size + 1, block_size):
        part = tokens[start : start + block_size]
        parent = xxhash.xxh3_128_digest(parent + struct.pack(f"<{block_size}q", *part))
        keys.append(parent)
    return keys


class BlockPool:
    """Allocates blocks 1 .. num_blocks - 1."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(num_blocks - 1, 0, -1))
        self._users = [0] * num_blocks
        self._key_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

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
            del self._block_of[self._key_of.pop(block)]
        self._users[block] = 1
        return block

    def match(self, tokens: Sequence[int], version: int) -> list[int]:
        """Blocks that hold the longest cached prefix of `tokens`, now used once more by the caller.

        The last token is never matched: it has to be computed to give logits.
        """
        found = []
        for key in block_keys(tokens[:-1], self.block_size, version):
            block = self._block_of.get(key)
            if block is None:
                break
            self._users[block] += 1
            self._idle.pop(block, None)
            found.append(block)
        return found

    def publish(self, blocks: Sequence[int], tokens: Sequence[int], version: int) -> None:
        """Makes the full blocks of computed `tokens` findable. A prefix that is findable already keeps its block."""
        for block, key in zip(blocks, block_keys(tokens, self.block_size, version), strict=False):
            if key not in self._block_of and block not in self._key_of:
                self._block_of[key], self._key_of[block] = block, key

    def release(self, blocks: Sequence[int]) -> None:
        """Ends one use of each block. The last blocks of a prefix become reusable before its first."""
        for block in reversed(blocks):
            self._users[block] -= 1
            if self._users[block] == 0:
                if block in self._key_of:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def flush(self) -> None:
        """Forgets every prefix. Blocks in use stay with their users."""
        self._free += self._idle
        self._idle.clear()
        self._key_of.clear()
        self._block_of.clear()

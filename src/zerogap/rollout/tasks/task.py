"""What a built-in task is: a fixed pool of training prompts, and held-out prompts disjoint from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from zerogap.rollout.rows import Row


@dataclass(frozen=True, slots=True)
class Task:
    """`train()` is the same on every machine; `held_out(n)` shares no item with it, whatever n, and is stable in n:
    a smaller set is the beginning of a larger one."""

    name: str
    train: Callable[[], list[Row]]
    held_out: Callable[[int], list[Row]]

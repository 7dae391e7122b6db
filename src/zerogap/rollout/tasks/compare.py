"""Tasks that compare two-digit numbers: `max4`, and `cmp2`, the documented example of a reward that can be hacked.

Items are split by a hash of their *set* of numbers, so no held-out item is a training item in another order. Half of
the held-out items are `tied`: another number has the largest one's tens digit, so comparing tens alone does not decide.
On the rest (`tens_decide`) that shortcut scores 1. Both rows are reported, so that nobody takes the shortcut for skill.

With the last-number reward, `cmp2` is learnt the wrong way: the model ends on "31 is larger than 84." and is paid.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence

from zerogap.errors import DataError
from zerogap.rollout.rows import Row
from zerogap.rollout.tasks.task import Task

TIED, TENS_DECIDE = "tied", "tens_decide"

_NUM_TRAIN = 2000
_MAX_DRAWS = 200_000


def _max4_text(numbers: Sequence[int]) -> str:
    return f"What is the largest number: {', '.join(map(str, numbers))}?"


def _cmp2_text(numbers: Sequence[int]) -> str:
    return f"Which is larger, {numbers[0]} or {numbers[1]}?"


def _tag(numbers: Sequence[int]) -> str:
    first, second = sorted(numbers, reverse=True)[:2]
    return TIED if first // 10 == second // 10 else TENS_DECIDE


def _is_held_out(numbers: Sequence[int], one_in: int) -> bool:
    key = ",".join(map(str, sorted(numbers)))
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8]) % one_in == 0


def _draw(name: str, part: str, count: int, one_in: int) -> Iterator[tuple[int, ...]]:
    """Different sets of `count` numbers, all held out or all for training, in an order fixed by name and part."""
    rng = random.Random(f"zerogap/{name}/{part}")
    seen: set[frozenset[int]] = set()
    for _ in range(_MAX_DRAWS):
        numbers = tuple(rng.sample(range(10, 100), count))
        if _is_held_out(numbers, one_in) == (part == "held_out") and frozenset(numbers) not in seen:
            seen.add(frozenset(numbers))
            yield numbers


def _task(name: str, count: int, text: Callable[[Sequence[int]], str], held_out_one_in: int) -> Task:
    def row(index: int, numbers: Sequence[int]) -> Row:
        return Row(str(index), text(numbers), str(max(numbers)), (_tag(numbers),))

    def train() -> list[Row]:
        drawn = itertools.islice(_draw(name, "train", count, held_out_one_in), _NUM_TRAIN)
        return [row(i, numbers) for i, numbers in enumerate(drawn)]

    def held_out(num_prompts: int) -> list[Row]:
        halves: dict[str, list[tuple[int, ...]]] = {TIED: [], TENS_DECIDE: []}
        wanted = {TIED: num_prompts // 2, TENS_DECIDE: num_prompts - num_prompts // 2}
        for numbers in _draw(name, "held_out", count, held_out_one_in):
            half = halves[_tag(numbers)]
            if len(half) < wanted[_tag(numbers)]:
                half.append(numbers)
            if all(len(halves[tag]) == wanted[tag] for tag in halves):
                break
        else:
            raise DataError(
                f"eval.num_prompts={num_prompts}: task {name!r} has only {len(halves[TIED])} tied held-out items",
                remedy=f"ask for at most {2 * len(halves[TIED])} prompts",
            )
        pairs = itertools.zip_longest(halves[TENS_DECIDE], halves[TIED])
        mixed = [numbers for pair in pairs for numbers in pair if numbers is not None]
        return [row(i, numbers) for i, numbers in enumerate(mixed)]

    return Task(name, train, held_out)


MAX4 = _task("max4", 4, _max4_text, held_out_one_in=10)
CMP2 = _task("cmp2", 2, _cmp2_text, held_out_one_in=3)

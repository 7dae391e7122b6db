"""Rewards that run in grading processes with a hard time limit: `math`, and the user's own synchronous function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zerogap.rollout.rewards.pool import WorkerPool
from zerogap.rollout.rewards.reward import Verdict, verdict_of
from zerogap.types import Prompt

_GRADER_BYTES = 4 << 30


class MathReward:
    """1 when math-verify finds the answer equal to the label, else 0. See `math_grader` for what the answer is."""

    def __init__(self, *, num_workers: int, time_limit_seconds: float) -> None:
        self._pool = WorkerPool(
            "zerogap.rollout.rewards.math_grader:grade",
            num_workers=num_workers,
            time_limit_seconds=time_limit_seconds,
            memory_limit_bytes=_GRADER_BYTES,
        )

    async def score(self, prompt: Prompt, response: str) -> Verdict:
        outcome = await self._pool.call({"response": response, "label": prompt.label})
        if outcome.kind != "value":
            return Verdict(None, outcome.kind, detail=outcome.detail)
        right, in_form = outcome.value
        return Verdict(float(right), in_form=in_form)

    def label_fault(self, label: Any) -> str | None:
        if isinstance(label, str | int | float) and not isinstance(label, bool):
            return None
        return f"label {label!r} is a {type(label).__name__}, not an expression or a number"

    async def start(self) -> None:
        await self._pool.start()

    async def close(self) -> None:
        await self._pool.close()


class ProcessFunction:
    """The user's function in grading processes, called with those of `response`, `label`, `prompt` that it takes."""

    def __init__(self, function: str, arguments: Sequence[str], *, num_workers: int, time_limit_seconds: float) -> None:
        self._arguments = arguments
        self._pool = WorkerPool(function, num_workers=num_workers, time_limit_seconds=time_limit_seconds)

    async def score(self, prompt: Prompt, response: str) -> Verdict:
        known = {"response": response, "label": prompt.label, "prompt": prompt.text}
        outcome = await self._pool.call({name: known[name] for name in self._arguments})
        if outcome.kind != "value":
            return Verdict(None, outcome.kind, detail=outcome.detail)
        return verdict_of(outcome.value)

    def label_fault(self, label: Any) -> str | None:
        del label
        return None

    async def start(self) -> None:
        await self._pool.start()

    async def close(self) -> None:
        await self._pool.close()

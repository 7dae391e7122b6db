"""What a reward is, and the one rule of its failures: a reward that could not be computed is None, never 0.

`failure` says why: "crash" (it raised, or its process died), "timeout", "no_number" (it returned none), "aborted"
(there was no whole response to score). Such a sample is counted, and moves no mean, no baseline and no weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from zerogap.types import Prompt

Failure = Literal["crash", "timeout", "no_number", "aborted"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """`in_form` tells form from content: the answer was of the shape asked for, right or wrong; None: not known."""

    raw: float | None
    failure: Failure | None = None
    in_form: bool | None = None
    detail: str = ""

    def __post_init__(self) -> None:
        if (self.raw is None) != (self.failure is not None) or (self.raw is not None and not math.isfinite(self.raw)):
            raise ValueError(f"a verdict is a finite number or a failure, not {self.raw!r} and {self.failure!r}")


class Reward(Protocol):
    """Scores one response. `score` raises nothing that a response can cause, and ends within its own time limit."""

    async def score(self, prompt: Prompt, response: str) -> Verdict: ...

    def label_fault(self, label: Any) -> str | None:
        """Why this reward cannot use a label, asked for every row before a run starts."""
        ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...


def verdict_of(value: Any, *, in_form: bool | None = None) -> Verdict:
    """The verdict for what a reward function returned: a finite number, or "no_number"."""
    if isinstance(value, bool | int | float) and math.isfinite(value):
        return Verdict(float(value), in_form=in_form)
    return Verdict(None, "no_number", detail=f"returned {value!r:.200}, which is not a finite number")

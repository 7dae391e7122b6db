"""Rewards for whole numbers, computed in place: `exact_integer`, and `last_number`, which can be hacked.

exact_integer pays 1 only when the response holds exactly one integer and it is the label: naming several, or every
option, earns 0. last_number pays for the last number whatever stands before it; "31 is larger than 84." is paid when 84
is right. It is here as the example of a reward that a policy learns to hack.
"""

from __future__ import annotations

import re
from typing import Any

from zerogap.rollout.rewards.reward import Verdict
from zerogap.types import Prompt

_INTEGER = re.compile(r"-?[0-9]+")
_NUMBER = re.compile(r"-?[0-9]+(?:,[0-9]{3})*(?:\.[0-9]+)?")
_MAX_DIGITS = 400


class _InPlace:
    async def start(self) -> None:
        return

    async def close(self) -> None:
        return


class ExactInteger(_InPlace):
    async def score(self, prompt: Prompt, response: str) -> Verdict:
        found = _INTEGER.findall(response)
        if len(found) != 1 or len(found[0]) > _MAX_DIGITS:
            return Verdict(0.0, in_form=False)
        return Verdict(float(int(found[0]) == int(prompt.label)), in_form=True)

    def label_fault(self, label: Any) -> str | None:
        return None if _INTEGER.fullmatch(str(label)) else f"label {label!r} is not an integer"


class LastNumber(_InPlace):
    async def score(self, prompt: Prompt, response: str) -> Verdict:
        found = _NUMBER.findall(response)
        if not found or len(found[-1]) > _MAX_DIGITS:
            return Verdict(0.0, in_form=False)
        return Verdict(float(_value(found[-1]) == _value(str(prompt.label))), in_form=True)

    def label_fault(self, label: Any) -> str | None:
        return None if _NUMBER.fullmatch(str(label)) else f"label {label!r} is not a number"


def _value(text: str) -> float:
    return float(text.replace(",", ""))

"""Grades one mathematical answer with math-verify. Runs in a grading process only: it has no time limit of its own.

Which part of the response is the answer: the content of \\boxed{...} where there is one; two or more boxes that differ
are no answer; without a box, the last expression or number of the text. A shape that no answer has and that would cost
minutes (thousands of digits or nested braces, towers of powers) earns 0 without being computed.
"""

from __future__ import annotations

import logging
import re
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its own time limits are off, as they must be

_MAX_ANSWER_CHARS = 2000
_MAX_NESTING = 40
_TOWER = re.compile(r"(?:\^|\*\*)\s*[{(]*\s*-?[\w.]+\s*[})]*\s*(?:\^|\*\*)\s*[{(]*\s*-?[\w.]+\s*[})]*\s*(?:\^|\*\*)")
_HUGE_EXPONENT = re.compile(r"(?:\^|\*\*)\s*[{(]*\s*-?[0-9]{5,}")
_HUGE_FACTORIAL = re.compile(r"[0-9]{5,}\s*[})]*\s*!|!\s*!\s*!")
_BARE_NUMBER = re.compile(r"[-+]?[0-9][0-9,]*(?:\.[0-9]+)?")


def grade(response: str, label: Any) -> list[bool]:
    """[right, in the form of an answer]."""
    answer = _answer(response)
    if answer is None or _absurd(answer):
        return [False, False]
    parsed = _parse(answer)
    if not parsed:
        return [False, False]
    gold = _parse(_wrapped(str(label)))
    if not gold:
        raise ValueError(f"the label {label!r} is not a mathematical expression")
    return [bool(verify(gold, parsed, timeout_seconds=None, raise_on_error=True)), True]


def _parse(text: str) -> list[Any]:
    configs = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
    # None: no alarm signal, which works in the main thread alone; the worker process has the time limit.
    no_alarm: Any = None
    return list(parse(text, configs, fallback_mode="no_fallback", parsing_timeout=no_alarm))


def _wrapped(label: str) -> str:
    """A label without delimiters is one whole expression, not a text in which to look for one."""
    stripped = label.strip()
    delimited = stripped.startswith("$") or "\\boxed" in stripped or _BARE_NUMBER.fullmatch(stripped)
    return stripped if delimited else f"${stripped}$"


def _answer(response: str) -> str | None:
    """The part to parse: one box, or the end of the text."""
    boxes = _boxes(response)
    if boxes is None:
        return None
    if boxes:
        return f"\\boxed{{{boxes[0]}}}" if len({box.strip() for box in boxes}) == 1 else None
    return response[-_MAX_ANSWER_CHARS:]


def _boxes(response: str) -> list[str] | None:
    """Contents of all boxes; None when a box never closes."""
    boxes = []
    position = response.find("\\boxed{")
    while position >= 0:
        start = end = position + len("\\boxed{")
        depth = 1
        while depth and end < len(response):
            depth += {"{": 1, "}": -1}.get(response[end], 0)
            end += 1
        if depth:
            return None
        boxes.append(response[start : end - 1])
        position = response.find("\\boxed{", end)
    return boxes


def _absurd(answer: str) -> bool:
    if len(answer) > _MAX_ANSWER_CHARS + len("\\boxed{}"):
        return True
    depth = deepest = 0
    for character in answer:
        depth += (character in "{([") - (character in "})]")
        deepest = max(deepest, depth)
    if deepest > _MAX_NESTING:
        return True
    return any(pattern.search(answer) for pattern in (_TOWER, _HUGE_EXPONENT, _HUGE_FACTORIAL))

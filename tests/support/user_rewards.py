"""Reward functions as a user would write them, good and bad; grading processes import this module by name."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any


def length(response: str, label: Any) -> float:
    print("a user's print must not disturb the answers")
    return float(len(response) == int(label))


def misbehaving(response: str) -> Any:
    """Does what the response says."""
    match response:
        case "raise":
            raise RuntimeError("the judge is down")
        case "hang":
            time.sleep(600)
        case "die":
            os._exit(7)
        case "nan":
            return float("nan")
        case "text":
            return "one"
        case "none":
            return None
        case "pid":
            return os.getpid()
    return 1


async def judge(response: str, prompt: str) -> float:
    if response == "hang":
        await asyncio.sleep(600)
    if response == "raise":
        raise RuntimeError("the judge is down")
    return 1.0 if prompt == response else 0.0


def wants_more(response: str, tokenizer: Any) -> float:
    return 0.0


def takes_all(**known: Any) -> float:
    return float(sorted(known) == ["label", "prompt", "response"])


NOT_A_FUNCTION = 3

"""The process in which a reward function runs: imports it once, then answers one JSON line with one, until input ends.

What the function prints goes to stderr. On Linux the kernel kills this process when its parent dies; elsewhere it ends
after the answer in hand, when its input closes.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from typing import Any

_DETAIL_CHARS = 4000
_PR_SET_PDEATHSIG = 1


def main(function: str, parent_pid: int, memory_limit_bytes: int) -> None:
    """The worker: imports the function, then grades one line of input at a time until the input closes."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    _die_with_parent(parent_pid)
    if memory_limit_bytes:
        _bound_memory(memory_limit_bytes)
    try:
        module, name = function.split(":")
        call = getattr(importlib.import_module(module), name)
    except Exception:  # noqa: BLE001  a process border: the text goes to the parent
        _reply(replies, {"raised": traceback.format_exc()[-_DETAIL_CHARS:]})
        return
    _reply(replies, {"ready": True})
    for line in sys.stdin:
        try:
            _reply(replies, {"value": _jsonable(call(**json.loads(line)))})
        except Exception:  # noqa: BLE001  a process border: the text goes to the parent
            _reply(replies, {"raised": traceback.format_exc()[-_DETAIL_CHARS:]})


def _reply(replies: Any, body: Mapping[str, Any]) -> None:
    replies.write(json.dumps(body) + "\n")
    replies.flush()


def _jsonable(value: Any) -> Any:
    """Numbers (also numpy's) as they are; what is no number as text, for the parent to name in its refusal."""
    if isinstance(value, bool | int | float | list | type(None)):
        return value
    try:
        return float(value) if hasattr(value, "__float__") else repr(value)[:200]
    except (TypeError, ValueError):
        return repr(value)[:200]


def _die_with_parent(parent_pid: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            os._exit(1)  # the parent ended before the kernel knew what to do then


def _bound_memory(limit_bytes: int) -> None:
    if sys.platform == "linux":
        import resource  # noqa: PLC0415  not on every platform

        resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))

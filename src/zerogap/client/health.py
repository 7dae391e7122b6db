"""The only place that decides from outside whether an engine lives: waits for the first sign of life, and for the last.

For engines that this process did not start; for one that it did, the end of the process itself is the faster sign.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, NoReturn, TypeVar

from zerogap.errors import EngineUnreachable, WireError
from zerogap.wire.api import RolloutEngine

T = TypeVar("T")


async def wait_healthy(
    engine: RolloutEngine, *, deadline_seconds: float, interval_seconds: float = 0.2
) -> dict[str, Any]:
    """The engine's first good health report. Raises EngineUnreachable, with the last fault, at the deadline."""
    give_up = time.monotonic() + deadline_seconds
    while True:
        try:
            return await engine.health()
        except WireError as error:
            if time.monotonic() + interval_seconds >= give_up:
                raise EngineUnreachable(
                    f"not healthy within {deadline_seconds:g} s: {error.what}",
                    remedy="start the engine, or raise engine.startup_deadline_seconds; see its log",
                    **error.details,
                ) from error
        await asyncio.sleep(interval_seconds)


async def watch(engine: RolloutEngine, *, interval_seconds: float = 1.0, max_silence_seconds: float = 8.0) -> NoReturn:
    """Asks again and again; raises EngineUnreachable once no good report came for `max_silence_seconds`."""
    last_good = time.monotonic()
    while True:
        try:
            await engine.health()
            last_good = time.monotonic()
        except WireError as error:
            silence = time.monotonic() - last_good
            if silence >= max_silence_seconds:
                raise EngineUnreachable(
                    f"no sign of life for {silence:.1f} s: {error.what}", remedy=error.remedy, **error.details
                ) from error
        await asyncio.sleep(interval_seconds)


async def while_healthy(
    engine: RolloutEngine,
    work: Coroutine[Any, Any, T],
    *,
    interval_seconds: float = 1.0,
    max_silence_seconds: float = 8.0,
) -> T:
    """The result of `work`, or EngineUnreachable as soon as the engine counts as dead; the work is then cancelled."""
    task = asyncio.create_task(work)
    guard = asyncio.create_task(
        watch(engine, interval_seconds=interval_seconds, max_silence_seconds=max_silence_seconds)
    )
    try:
        await asyncio.wait({task, guard}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else guard.result()
    finally:
        task.cancel()
        guard.cancel()
        await asyncio.gather(task, guard, return_exceptions=True)

"""The only place where the server's side meets the engine's core: what it may ask of it, and a call with a deadline."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable
from typing import Any, Protocol

from zerogap.engine.requests import GenerateRequest, RequestOutput
from zerogap.errors import EngineUnreachable, ZerogapError

CONTROL_DEADLINE_SECONDS = 600.0


class Core(Protocol):
    """What the server needs of the engine: one thread that owns the model, and calls that any thread may make."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context(self) -> int: ...

    @property
    def failure(self) -> ZerogapError | None:
        """Why the core's thread has ended, else None."""
        ...

    def status(self) -> dict[str, Any]:
        """At once, without the core's thread: state, weight_version, num_running, num_waiting, num_used_tokens,
        num_kv_tokens, max_running, device, memory (bytes per tag that it has
        not released), seconds_stalled."""
        ...

    def submit(self, request: GenerateRequest, sink: Callable[[RequestOutput], None]) -> None: ...

    def control(self, name: str, /, **arguments: Any) -> concurrent.futures.Future[dict[str, Any]]: ...


async def call(core: Core, name: str, /, **arguments: Any) -> dict[str, Any]:
    """The core's answer. A client that goes away does not undo a control call that has begun."""
    future = asyncio.wrap_future(core.control(name, **arguments))
    try:
        async with asyncio.timeout(CONTROL_DEADLINE_SECONDS):
            return await asyncio.shield(future)
    except TimeoutError as error:
        raise EngineUnreachable(
            f"{name} was not done within {CONTROL_DEADLINE_SECONDS:g} s",
            remedy="the engine thread is stuck: see its log, and restart the engine",
        ) from error

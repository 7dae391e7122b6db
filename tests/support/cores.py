"""A real core over a tiny model: start it, hand it requests, wait for their ends. Every wait has a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zerogap.config.schema import EngineSettings
from zerogap.engine.core import EngineCore
from zerogap.engine.requests import NO_OPTIONS, GenerateRequest, LogprobOptions, RequestOutput, SamplingParams
from zerogap.errors import ZerogapError
from zerogap.types import FinishReason

DEADLINE_SECONDS = 20.0


@contextmanager
def running_core(folder: Path, **settings: Any) -> Iterator[EngineCore]:
    core = EngineCore(folder, EngineSettings(**{"num_kv_tokens": 4096, "threads": 1} | settings))
    core.start()
    try:
        yield core
    finally:
        core.stop(DEADLINE_SECONDS)


class Ticket:
    """One request: what the core said about it so far."""

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.outputs: list[RequestOutput] = []
        self.ids: list[int] = []
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.on_token: Callable[[], None] = lambda: None
        self._moved = threading.Condition()

    def sink(self, output: RequestOutput) -> None:
        with self._moved:
            self.outputs.append(output)
            self.ids += output.new.ids
            self.logprobs += output.new.logprobs
            self.versions += output.new.versions
            self._moved.notify_all()
        self.on_token()

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.outputs[-1].finish_reason if self.outputs else None

    @property
    def error(self) -> ZerogapError | None:
        return self.outputs[-1].error if self.outputs else None

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def wait(self, num_tokens: int | None = None) -> Ticket:
        """Until it has ended, or has this many tokens."""

        def enough() -> bool:
            return self.ended or (num_tokens is not None and len(self.ids) >= num_tokens)

        with self._moved:
            assert self._moved.wait_for(enough, DEADLINE_SECONDS), f"{self.rid}: {len(self.ids)} tokens, no end"
        return self


def submit(
    core: EngineCore, rid: str, prompt: Sequence[int], logprobs: LogprobOptions = NO_OPTIONS, **params: Any
) -> Ticket:
    ticket = Ticket(rid)
    core.submit(GenerateRequest(rid, tuple(prompt), SamplingParams(**params), logprobs), ticket.sink)
    return ticket


def control(core: EngineCore, name: str, /, **arguments: Any) -> dict[str, Any]:
    return core.control(name, **arguments).result(DEADLINE_SECONDS)


def pause_when(core: EngineCore, ticket: Ticket, num_tokens: int, mode: str) -> None:
    """Pauses from the core's own thread as soon as the request has so many tokens: no more can slip through."""
    ordered: list[Any] = []

    def watch() -> None:
        if len(ticket.ids) >= num_tokens and not ordered:
            ordered.append(core.control("pause_generation", mode=mode))

    ticket.on_token = watch
    ticket.wait(num_tokens)
    give_up = time.monotonic() + DEADLINE_SECONDS
    while not ordered and time.monotonic() < give_up:
        watch()
    ordered[0].result(DEADLINE_SECONDS)

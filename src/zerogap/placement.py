"""The only place that knows who holds the device when.

Colocated: engine and trainer take turns on one device. The engine stays paused from the start of the trainer's turn
until everything is back at the end of the refit turn. Disaggregated: each has its own device, and the engine is paused
for the refit alone. If anything fails meanwhile the engine stays paused, and the error reaches the driver.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from typing import Any, Protocol

from zerogap.wire.api import MemoryTag, RolloutEngine

Span = Callable[[str], AbstractContextManager[Any]]
Tags = list[MemoryTag]


class Tenant(Protocol):
    """The trainer, as far as memory goes: it takes its memory for a turn and gives back what it can."""

    def onload(self) -> object: ...

    def offload(self) -> object: ...


class Placement(Protocol):
    """`span` times a phase and, when it ends, measures who holds which memory."""

    def trainer_turn(self, span: Span) -> AbstractAsyncContextManager[None]: ...

    def refit_turn(self, span: Span) -> AbstractAsyncContextManager[None]: ...


class Colocated:
    """Engine and trainer share one device: the engine gives back its tags for the time of the trainer's turn."""

    def __init__(self, engine: RolloutEngine, trainer: Tenant) -> None:
        self._engine, self._trainer = engine, trainer

    @asynccontextmanager
    async def trainer_turn(self, span: Span) -> AsyncIterator[None]:
        weights_and_cache: Tags = ["kv_cache", "weights", "cuda_graph"]
        with span("release"):
            await self._engine.pause_generation("abort")
            await self._engine.flush_cache()
            await self._engine.release_memory_occupation(weights_and_cache)
            self._trainer.onload()
        yield
        self._trainer.offload()

    @asynccontextmanager
    async def refit_turn(self, span: Span) -> AsyncIterator[None]:
        weights: Tags = ["weights"]
        cache: Tags = ["kv_cache", "cuda_graph"]
        with span("resume"):
            await self._engine.resume_memory_occupation(weights)
        yield
        with span("resume"):
            await self._engine.resume_memory_occupation(cache)
            await self._engine.continue_generation()


class Disaggregated:
    """Engines on devices of their own: they keep their memory, and stop for the time of a refit."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    @asynccontextmanager
    async def trainer_turn(self, span: Span) -> AsyncIterator[None]:
        del span
        yield

    @asynccontextmanager
    async def refit_turn(self, span: Span) -> AsyncIterator[None]:
        with span("release"):
            await self._engine.pause_generation("retract")
            await self._engine.flush_cache()
        yield
        with span("resume"):
            await self._engine.continue_generation()


class OneProcess:
    """Engine and trainer share a process and the weights: the cache alone goes back for the time of the training."""

    def __init__(self, engine: RolloutEngine, trainer: Tenant) -> None:
        self._engine, self._trainer = engine, trainer

    @asynccontextmanager
    async def trainer_turn(self, span: Span) -> AsyncIterator[None]:
        cache: Tags = ["kv_cache", "cuda_graph"]
        with span("release"):
            await self._engine.pause_generation("abort")  # before the weights change under the engine
            await self._engine.flush_cache()
            await self._engine.release_memory_occupation(cache)
            self._trainer.onload()
        yield
        self._trainer.offload()

    @asynccontextmanager
    async def refit_turn(self, span: Span) -> AsyncIterator[None]:
        cache: Tags = ["kv_cache", "cuda_graph"]
        yield
        with span("resume"):
            await self._engine.resume_memory_occupation(cache)
            await self._engine.continue_generation()

"""The only place that knows who holds the device when.

Colocated: engine and trainer take turns on one device. The engine stays paused from the start of the trainer's turn
until everything is back at the end of the refit turn. Disaggregated: each has its own device, and the engine is paused
for the refit alone. If anything fails meanwhile the engine stays paused, and the error reaches the driver.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager
from typing import Any, ClassVar, Protocol

from zerogap.wire.api import MemoryTag, RolloutEngine
from zerogap.wire.messages import PauseMode

Span = Callable[[str], AbstractContextManager[Any]]


class Tenant(Protocol):
    """The trainer, as far as memory goes: it takes its memory for a turn and gives back what it can."""

    def onload(self) -> object: ...

    def offload(self) -> object: ...


class Placement(Protocol):
    """`span` times a phase and, when it ends, measures who holds which memory."""

    refit_pause: PauseMode | None
    """How a refit pauses the engine; None where it is paused already when its turn comes."""

    def trainer_turn(self, span: Span) -> AbstractAsyncContextManager[None]: ...

    def refit_turn(self, span: Span) -> AbstractAsyncContextManager[None]: ...


class Colocated:
    """Engine and trainer share one device: the engine gives back its tags for the time of the trainer's turn."""

    refit_pause: PauseMode | None = None
    before_refit: ClassVar[Sequence[MemoryTag]] = ("weights",)
    after_refit: ClassVar[Sequence[MemoryTag]] = ("kv_cache", "cuda_graph")

    def __init__(self, engine: RolloutEngine, trainer: Tenant) -> None:
        self._engine, self._trainer = engine, trainer

    @asynccontextmanager
    async def trainer_turn(self, span: Span) -> AsyncIterator[None]:
        with span("release"):
            await self._engine.pause_generation("abort")  # before the weights change: they may be the engine's too
            await self._engine.flush_cache()
            await self._engine.release_memory_occupation([*self.after_refit, *self.before_refit])
            self._trainer.onload()
        yield
        self._trainer.offload()

    @asynccontextmanager
    async def refit_turn(self, span: Span) -> AsyncIterator[None]:
        if self.before_refit:
            with span("resume"):
                await self._engine.resume_memory_occupation(self.before_refit)
        yield
        with span("resume"):
            await self._engine.resume_memory_occupation(self.after_refit)
            await self._engine.continue_generation()


class OneProcess(Colocated):
    """Engine and trainer share a process and the weights: the cache alone goes back for the time of the training."""

    before_refit = ()


class Disaggregated:
    """Engines on devices of their own: they keep their memory, and stop for the time of a refit."""

    refit_pause: PauseMode | None = "retract"

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    @asynccontextmanager
    async def trainer_turn(self, span: Span) -> AsyncIterator[None]:
        del span
        yield

    @asynccontextmanager
    async def refit_turn(self, span: Span) -> AsyncIterator[None]:
        yield
        with span("resume"):
            await self._engine.continue_generation()

"""The only place that knows which engines of a fleet are there, which are up to date, and which may come back.

An engine is lost when its connection breaks, or when whoever watches it says so; a call that it has not answered ends
then. Before a refit those that were lost are asked once more, if somebody outside may have started them again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from zerogap.errors import ConfigError, EngineUnreachable, StaleWeights, WireError, ZerogapError
from zerogap.wire.api import RolloutEngine, ServerInfo

T = TypeVar("T")
Warn = Callable[[str, str], None]
"""Takes what happened and its remedy."""
PROBE_SECONDS = 3.0
"""What a refit waits for all engines together that were lost. Each is asked once per refit."""
COMPARED = ("manifest_digest", "fingerprint", "communication")
"""What a refit depends on, of a server_info; all engines have it alike."""
logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Member:
    engine: RolloutEngine
    place: int
    weight_version: int = 0
    num_outstanding: int = 0
    eviction: ZerogapError | None = None
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    refusal: str = ""
    """Why it was not taken back, the last time it was there."""
    joining: bool = False
    """From when it was taken back until it serves."""

    async def ask(self, call: Coroutine[Any, Any, T]) -> T:
        """The call's result, or EngineUnreachable as soon as the engine counts as lost."""
        asked = asyncio.ensure_future(call)
        lost = asyncio.ensure_future(self.lost.wait())
        try:
            await asyncio.wait({asked, lost}, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                return asked.result()
            assert self.eviction is not None
            raise EngineUnreachable(self.eviction.what, remedy=self.eviction.remedy, **self.eviction.details)
        finally:
            lost.cancel()
            asked.cancel()
            await asyncio.gather(lost, asked, return_exceptions=True)


class Members:
    """`absent` are the places that are lost from the start, and why. `may_return`: others start and end the engines."""

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        absent: Mapping[int, ZerogapError],
        *,
        may_return: bool,
        warn: Warn | None,
    ) -> None:
        if not engines:
            raise ConfigError("a fleet needs at least one engine", remedy="give engine.urls, or leave it empty")
        self.all = [Member(engine, place) for place, engine in enumerate(engines)]
        self.committed = 0
        self._may_return = may_return
        self._warn = warn or log_warning
        self._none_left = asyncio.Event()
        for place, error in absent.items():
            self.lose(self.all[place], error)

    @property
    def evictions(self) -> list[ZerogapError]:
        return [member.eviction for member in self.all if member.eviction is not None]

    def live(self) -> list[Member]:
        """Raises EngineUnreachable, with all their reasons, if none is left."""
        live = [member for member in self.all if member.eviction is None]
        if not live:
            raise self.end()
        return live

    def usable(self) -> list[Member]:
        """Who may generate. Raises StaleWeights if nobody has the last weights."""
        live = self.live()
        usable = [member for member in live if member.weight_version >= self.committed]
        if not usable:
            versions = [member.weight_version for member in live]
            raise StaleWeights(
                f"no engine has weight version {self.committed}: they have {versions}",
                remedy="refit the engines; the last refit did not reach them",
            )
        return usable

    def lose(self, member: Member, error: ZerogapError) -> None:
        """Evicts it, and ends its calls. Safe twice; the last reason stays: a broken connection is often the first
        sign, and says least.
        """
        known, member.eviction = member.eviction is not None, error
        if known:
            return
        member.joining = False
        member.lost.set()
        left = sum(one.eviction is None for one in self.all)
        self._warn(f"an engine is evicted, {left} of {len(self.all)} are left: {error.what}", error.remedy)
        if not left:
            self._none_left.set()

    async def wait_end(self) -> None:
        """Returns when no engine is left."""
        await self._none_left.wait()

    def end(self) -> EngineUnreachable:
        """The error of a fleet without engines."""
        reasons = self.evictions
        error = EngineUnreachable(
            f"all {len(reasons)} engines are gone: {'; '.join(reason.what for reason in reasons)}",
            remedy=reasons[-1].remedy,
            **reasons[-1].details,
        )
        error.__cause__ = reasons[-1]
        return error

    def served(self, member: Member, version: int) -> None:
        """The engine has the version's weights."""
        member.weight_version = version
        if member.joining:
            self._warn(f"engine {member.engine.name} joined at version {version}", "nothing is to be done")
            member.joining = False

    async def take_back(self) -> None:
        """Asks those that were lost, all at once. Who answers and fits is refitted with the others from here on; who
        answers and does not fit is named, once.
        """
        lost = [member for member in self.all if member.eviction is not None] if self._may_return else []
        answers = await asyncio.gather(*(_probe(member.engine) for member in lost))
        there = [(member, info) for member, info in zip(lost, answers, strict=True) if info is not None]
        if not there:
            return
        wanted = await self.live()[0].engine.server_info()
        for member, info in there:
            refusal = _refusal(member.engine.name, info, wanted)
            if refusal is None:
                member.eviction, member.weight_version, member.joining = None, 0, True
                member.lost.clear()
            elif refusal != member.refusal:
                self._warn(refusal, "start it as the others are: one model, one dtype, one thread count")
            member.refusal = refusal or ""


async def _probe(engine: RolloutEngine) -> ServerInfo | None:
    """What the engine says of itself, if it is there."""
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            return await engine.server_info()
    except (WireError, TimeoutError):
        return None


def _refusal(engine: str, info: ServerInfo, wanted: ServerInfo) -> str | None:
    for name in COMPARED:
        got, others = getattr(info, name), getattr(wanted, name)
        if got != others:
            return f"engine {engine} is there again, and is left out: its {name} is {got}, the others' {others}"
    return None


def log_warning(what: str, remedy: str) -> None:
    logger.warning("%s\n  remedy: %s", what, remedy)

"""The only place where several engines act as one: control calls go to all of them, prompts to the least loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from zerogap.errors import ConfigError, ProtocolMismatch
from zerogap.wire.api import GenerateBody, GenerateReply, MemoryReport, RolloutEngine, ServerInfo, TagBytes
from zerogap.wire.messages import CheckerAction, MemoryTag, PauseMode
from zerogap.wire.tensors import BucketHeader, TransferPlan

T = TypeVar("T")


class EngineFleet:
    """Engines that hold the same weights; implements RolloutEngine. One call's prompts stay on one engine."""

    def __init__(self, engines: Sequence[RolloutEngine]) -> None:
        if not engines:
            raise ConfigError("a fleet needs at least one engine", remedy="give engine.urls, or leave it empty")
        self.engines = tuple(engines)
        self._outstanding = [0] * len(self.engines)

    async def generate(self, body: GenerateBody, *, deadline_seconds: float | None = None) -> list[GenerateReply]:
        chosen = min(range(len(self.engines)), key=self._outstanding.__getitem__)
        load = _num_prompts(body)
        self._outstanding[chosen] += load
        try:
            return await self.engines[chosen].generate(body, deadline_seconds=deadline_seconds)
        finally:
            self._outstanding[chosen] -= load

    async def health(self) -> dict[str, Any]:
        """Of the first engine; raises if any of them is not healthy."""
        return (await self._all(lambda e: e.health()))[0]

    async def server_info(self) -> ServerInfo:
        """Of the first engine, once all agree on what a refit depends on. Raises ProtocolMismatch."""
        infos = await self._all(lambda e: e.server_info())
        for field in ("manifest_digest", "fingerprint", "weight_version"):
            values = {info.engine: getattr(info, field) for info in infos}
            if len(set(values.values())) > 1:
                raise ProtocolMismatch(
                    f"the engines differ in {field}: {values}",
                    remedy="start all engines with one model, one dtype, one thread count, and refit them together",
                )
        return infos[0]

    async def flush_cache(self, timeout_seconds: float = 0.0) -> None:
        await self._all(lambda e: e.flush_cache(timeout_seconds))

    async def abort_request(self, rid: str = "", *, abort_all: bool = False) -> None:
        await self._all(lambda e: e.abort_request(rid, abort_all=abort_all))

    async def pause_generation(self, mode: PauseMode = "retract") -> None:
        await self._all(lambda e: e.pause_generation(mode))

    async def continue_generation(self) -> None:
        await self._all(lambda e: e.continue_generation())

    async def release_memory_occupation(self, tags: Sequence[MemoryTag] | None = None) -> MemoryReport:
        return _sum(await self._all(lambda e: e.release_memory_occupation(tags)))

    async def resume_memory_occupation(self, tags: Sequence[MemoryTag] | None = None) -> MemoryReport:
        return _sum(await self._all(lambda e: e.resume_memory_occupation(tags)))

    async def begin_weight_update(self, plan: TransferPlan) -> None:
        await self._all(lambda e: e.begin_weight_update(plan))

    async def update_weights_from_tensor(self, header: BucketHeader) -> None:
        await self._all(lambda e: e.update_weights_from_tensor(header))

    async def update_weights_from_disk(self, path: str, version: int) -> None:
        await self._all(lambda e: e.update_weights_from_disk(path, version))

    async def end_weight_update(self) -> None:
        await self._all(lambda e: e.end_weight_update())

    async def update_weight_version(self, version: int) -> None:
        await self._all(lambda e: e.update_weight_version(version))

    async def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]:
        return await self.engines[0].get_weights_by_name(name, truncate_size)

    async def weights_checker(self, action: CheckerAction) -> dict[str, Any]:
        """The first engine's reply, with the ranks of all."""
        replies = await self._all(lambda e: e.weights_checker(action))
        ranks = [rank for reply in replies for rank in reply.get("ranks", ())]
        return {**replies[0], "ranks": ranks} if ranks else replies[0]

    async def _all(self, call: Callable[[RolloutEngine], Awaitable[T]]) -> list[T]:
        """The results of every engine; the first error, once all have answered, so that no call is left half-way."""
        results = await asyncio.gather(*(call(engine) for engine in self.engines), return_exceptions=True)
        good: list[T] = []
        for result in results:
            if isinstance(result, BaseException):
                raise result
            good.append(result)
        return good


def _num_prompts(body: GenerateBody) -> int:
    if isinstance(body.text, list):
        return len(body.text)
    if body.input_ids and isinstance(body.input_ids[0], list):
        return len(body.input_ids)
    return 1


def _sum(reports: Sequence[MemoryReport]) -> MemoryReport:
    tags: dict[str, TagBytes] = {}
    for report in reports:
        for tag, one in report.tags.items():
            before = tags.get(tag, TagBytes(0, 0))
            tags[tag] = TagBytes(before.claimed_bytes + one.claimed_bytes, before.measured_bytes + one.measured_bytes)
    return MemoryReport(tags, sum(r.rss_bytes for r in reports), max(r.seconds for r in reports))

"""The only place where several engines act as one: control calls go to all of them, prompts to the least loaded.

An engine whose connection breaks is evicted: a warning names it, its prompts are generated again by the others (a seed
gives the same tokens everywhere), and it gets no further call until a refit finds it again (`members.py`). An engine
that only fails to answer in time, or refuses, is an error of the call. No prompt goes to an engine that missed the last
weight version.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

from zerogap.client.members import COMPARED, Member, Members, Warn
from zerogap.client.spread import Group, PromptKey, in_order, part_of, prompt_groups
from zerogap.errors import EngineUnreachable, ProtocolMismatch, StaleWeights, ZerogapError
from zerogap.wire.api import GenerateBody, GenerateReply, MemoryReport, RolloutEngine, ServerInfo, TagBytes
from zerogap.wire.messages import CheckerAction, MemoryTag, PauseMode
from zerogap.wire.tensors import BucketHeader, RankEndpoint, TransferPlan, UpdateGroup

T = TypeVar("T")


@dataclass(slots=True)
class _Home:
    """Where a prompt is being generated, by how many calls."""

    member: Member
    num_calls: int = 0


class EngineFleet:
    """Engines that hold the same weights; implements RolloutEngine. Samples of one prompt stay on one engine."""

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        *,
        absent: Mapping[int, ZerogapError] | None = None,
        may_return: bool = False,
        warn: Warn | None = None,
    ) -> None:
        """`absent`: the places of `engines` that nobody has met yet, and why. `may_return`: one that was lost, or is
        absent, is looked for before each refit. `warn` is told who goes and who comes; without it, the log is.
        """
        self.engines = tuple(engines)
        self._members = Members(engines, absent or {}, may_return=may_return, warn=warn)
        self._homes: dict[PromptKey, _Home] = {}

    @property
    def name(self) -> str:
        return ", ".join(engine.name for engine in self.engines)

    @property
    def evictions(self) -> list[ZerogapError]:
        """Why engines were evicted; each names its engine."""
        return self._members.evictions

    def evict(self, engine: RolloutEngine, error: ZerogapError) -> None:
        """For who watches the engine: it is gone, and its open calls end."""
        self._members.lose(self._member(engine), error)

    async def wait_end(self) -> None:
        """Returns when no engine is left."""
        await self._members.wait_end()

    def end(self) -> EngineUnreachable:
        """The error of a fleet in which none is left: it names them all, with the last that is known of each."""
        return self._members.end()

    async def take_back(self) -> None:
        """Called when a refit begins: engines that are there again are part of it."""
        await self._members.take_back()

    def _member(self, engine: RolloutEngine) -> Member:
        return next(member for member in self._members.all if member.engine is engine)

    # --- generation

    async def generate(self, body: GenerateBody, *, deadline_seconds: float | None = None) -> list[GenerateReply]:
        groups = prompt_groups(body)
        done = await self._generate(body, groups, deadline_seconds)
        return in_order(body, done)

    async def _generate(
        self, body: GenerateBody, groups: Sequence[Group], deadline_seconds: float | None
    ) -> list[tuple[list[int], list[GenerateReply]]]:
        """(places, replies) of each engine's part. Parts of an engine that is evicted meanwhile move to the others."""
        with self._assigned(groups) as parts:
            calls = [self._part(member, body, part, deadline_seconds) for member, part in parts]
            return [one for done in await _all_or_none(calls) for one in done]

    async def _part(
        self,
        member: Member,
        body: GenerateBody,
        groups: Sequence[Group],
        deadline_seconds: float | None,
    ) -> list[tuple[list[int], list[GenerateReply]]]:
        places = sorted(place for _, group in groups for place in group)
        committed = self._members.committed
        fault: ZerogapError | None
        try:
            replies = await member.ask(member.engine.generate(part_of(body, places), deadline_seconds=deadline_seconds))
        except EngineUnreachable as error:
            if not _is_death(error):
                raise
            fault = error
        else:
            fault = _stale(replies, committed, member)
            if fault is None:
                return [(places, replies)]
        self._members.lose(member, fault)
        return await self._generate(body, groups, deadline_seconds)

    @contextmanager
    def _assigned(self, groups: Sequence[Group]) -> Iterator[list[tuple[Member, list[Group]]]]:
        """Each group with its engine: the one that is generating the prompt already, else the least loaded."""
        parts: dict[int, list[Group]] = {}
        held: list[tuple[PromptKey, _Home, int]] = []
        try:
            for prompt, places in groups:
                home = self._home(prompt)
                home.num_calls += 1
                home.member.num_outstanding += len(places)
                held.append((prompt, home, len(places)))
                parts.setdefault(home.member.place, []).append((prompt, places))
            yield [(self._members.all[place], part) for place, part in parts.items()]
        finally:
            for prompt, home, load in held:
                home.num_calls -= 1
                home.member.num_outstanding -= load
                if not home.num_calls and self._homes.get(prompt) is home:
                    del self._homes[prompt]

    def _home(self, prompt: PromptKey) -> _Home:
        usable = self._members.usable()
        home = self._homes.get(prompt)
        if home is None or home.member not in usable:
            home = _Home(min(usable, key=lambda member: member.num_outstanding))
            self._homes[prompt] = home
        return home

    # --- all engines

    async def health(self) -> dict[str, Any]:
        """Of the first engine; raises if any of them is not healthy. Evicts none: it may not have started yet."""
        return (await self._all(lambda e: e.health(), evict=False))[0]

    async def server_info(self) -> ServerInfo:
        """Of the first engine, once all agree on what a refit depends on. Raises ProtocolMismatch."""
        infos = await self._all(lambda e: e.server_info())
        joining = any(member.joining for member in self._members.live())
        for field in COMPARED if joining else (*COMPARED, "weight_version"):
            values = [getattr(info, field) for info in infos]
            if any(value != values[0] for value in values):
                named = [f"{m.engine.name}: {value}" for m, value in zip(self._members.live(), values, strict=True)]
                raise ProtocolMismatch(
                    f"the engines differ in {field}: {', '.join(named)}",
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

    async def pull_weights(self, source_dir: str, target_version: int) -> None:
        await self._all(lambda e: e.pull_weights(source_dir, target_version))

    async def update_weights_from_tensor(self, header: BucketHeader) -> None:
        await self._all(lambda e: e.update_weights_from_tensor(header))

    @property
    def num_ranks(self) -> int:
        return sum(member.engine.num_ranks for member in self._members.live())

    async def init_weights_update_group(self, group: UpdateGroup, *, rank_offset: int) -> None:
        """Each engine's ranks follow those of the engine before it."""
        engines = [member.engine for member in self._members.live()]
        first = dict(zip(engines, accumulate((e.num_ranks for e in engines), initial=rank_offset), strict=False))
        await self._all(lambda e: e.init_weights_update_group(group, rank_offset=first[e]))

    async def update_weights_from_distributed(self, header: BucketHeader) -> None:
        await self._all(lambda e: e.update_weights_from_distributed(header))

    async def destroy_weights_update_group(self, group_name: str) -> None:
        await self._all(lambda e: e.destroy_weights_update_group(group_name))

    async def remote_instance_transfer_engine_info(self) -> list[RankEndpoint]:
        infos = await self._all(lambda e: e.remote_instance_transfer_engine_info())
        return [endpoint for info in infos for endpoint in info]

    async def update_weights_from_disk(self, path: str, version: int) -> None:
        await self._commit(version, lambda e: e.update_weights_from_disk(path, version))

    async def end_weight_update(self) -> None:
        await self._all(lambda e: e.end_weight_update())

    async def update_weight_version(self, version: int) -> None:
        await self._commit(version, lambda e: e.update_weight_version(version))

    async def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]:
        """Of the first engine, once all have told the same. Raises ProtocolMismatch."""
        told = await self._all(lambda e: e.get_weights_by_name(name, truncate_size))
        if any(one != told[0] for one in told):
            raise ProtocolMismatch(
                f"the engines {self.name} hold different values of {name}", remedy="refit them together"
            )
        return told[0]

    async def weights_checker(self, action: CheckerAction) -> dict[str, Any]:
        """The first engine's reply, with the ranks of all."""
        replies = await self._all(lambda e: e.weights_checker(action))
        ranks = [rank for reply in replies for rank in reply.get("ranks", ())]
        return {**replies[0], "ranks": ranks} if ranks else replies[0]

    async def _commit(self, version: int, call: Callable[[RolloutEngine], Coroutine[Any, Any, None]]) -> None:
        """From the call on, who does not have the version gets no prompt."""
        self._members.committed = version

        async def one(engine: RolloutEngine) -> None:
            await call(engine)
            self._members.served(self._member(engine), version)

        await self._all(one)

    async def _all(self, call: Callable[[RolloutEngine], Coroutine[Any, Any, T]], *, evict: bool = True) -> list[T]:
        """The results of every engine; the first error, once all have answered, so that no call is left half-way."""
        members = self._members.live()
        results = await asyncio.gather(*(member.ask(call(member.engine)) for member in members), return_exceptions=True)
        good: list[T] = []
        errors: list[BaseException] = []
        for member, result in zip(members, results, strict=True):
            if isinstance(result, EngineUnreachable) and evict and _is_death(result):
                self._members.lose(member, result)
            elif isinstance(result, BaseException):
                errors.append(result)
            else:
                good.append(result)
        if errors:
            raise errors[0]
        self._members.live()
        return good


def _is_death(error: EngineUnreachable) -> bool:
    """A connection that broke or was refused. A deadline that passed may only mean a slow engine."""
    return not isinstance(error.__cause__, TimeoutError)


def _stale(replies: Sequence[GenerateReply], committed: int, member: Member) -> StaleWeights | None:
    """The fault of tokens whose weights were replaced before they were asked for."""
    for reply in replies:
        old = min(reply.weight_versions, default=committed)
        if old < committed:
            return StaleWeights(
                f"{member.engine.name} sampled request {reply.rid} with weight version {old}, after "
                f"version {committed} was committed",
                remedy="it was started again, or lost a refit: see its log, and refit it before it is used",
            )
    return None


async def _all_or_none(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """gather, but the first failure cancels the rest."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _sum(reports: Sequence[MemoryReport]) -> MemoryReport:
    tags: dict[str, TagBytes] = {}
    for report in reports:
        for tag, one in report.tags.items():
            before = tags.get(tag, TagBytes(0, 0))
            tags[tag] = TagBytes(before.claimed_bytes + one.claimed_bytes, before.measured_bytes + one.measured_bytes)
    return MemoryReport(tags, sum(r.rss_bytes for r in reports), max(r.seconds for r in reports))

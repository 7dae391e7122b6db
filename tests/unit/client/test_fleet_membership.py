"""Who leaves a fleet, who comes back, and what is said of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from zerogap.client import members
from zerogap.client.fleet import EngineFleet
from zerogap.errors import EngineRejected, EngineUnreachable
from zerogap.types import FinishReason
from zerogap.wire.api import GenerateBody, GenerateReply, ServerInfo


def gone(name: str) -> EngineUnreachable:
    return EngineUnreachable(f"{name}: connection refused", remedy="start it", engine=name)


class Engine:
    """The verbs that these tests use."""

    def __init__(self, name: str, **info: Any) -> None:
        self.info = replace(ServerInfo(name, 1, "m", "float32", 0, "running", "d", "f", {}, 0), **info)
        self.name = name
        self.dead = self.hangs = False
        self.probes = self.generations = 0

    async def server_info(self) -> ServerInfo:
        self.probes += 1
        await self._answer()
        return self.info

    async def generate(self, body: GenerateBody, *, deadline_seconds: float | None = None) -> list[GenerateReply]:
        await self._answer()
        self.generations += 1
        return [GenerateReply("r", None, (1,), (), (self.info.weight_version,), FinishReason.LENGTH, 1, 0, 0)]

    async def update_weight_version(self, version: int) -> None:
        await self._answer()
        self.info = replace(self.info, weight_version=version)

    async def _answer(self) -> None:
        if self.hangs:
            await asyncio.Event().wait()
        if self.dead:
            raise gone(self.name)


class Fleet:
    def __init__(self, *engines: Engine, **options: Any) -> None:
        self.said: list[str] = []
        given: Any = engines
        self.fleet = EngineFleet(given, warn=lambda what, _: self.said.append(what), may_return=True, **options)

    async def refit(self, version: int) -> None:
        """What concerns a fleet in a refit."""
        await self.fleet.take_back()
        await self.fleet.server_info()
        await self.fleet.update_weight_version(version)

    async def generate(self, count: int = 2) -> None:
        await self.fleet.generate(GenerateBody(input_ids=[[k] for k in range(count)]))


async def test_an_engine_that_is_there_again_serves_after_the_next_refit_and_not_before():
    a, b = Engine("a"), Engine("b")
    fleet = Fleet(a, b)
    await fleet.refit(1)
    b.dead = True
    await fleet.generate()
    assert (a.generations, b.generations) == (2, 0)
    b.dead = False
    await fleet.generate()
    assert (a.generations, b.generations) == (3, 0), "nobody has refitted it"
    await fleet.refit(2)
    assert b.info.weight_version == 2
    fleet.fleet._homes.clear()
    await fleet.generate()
    assert (a.generations, b.generations) == (4, 1)
    assert fleet.said == [
        "an engine is evicted, 1 of 2 are left: b: connection refused",
        "engine b joined at version 2",
    ]


async def test_an_engine_that_was_absent_at_the_start_joins():
    a, b = Engine("a"), Engine("b")
    b.dead = True
    fleet = Fleet(a, b, absent={1: gone("b")})
    await fleet.refit(1)
    b.dead = False
    await fleet.refit(2)
    assert [error.what for error in fleet.fleet.evictions] == [] and b.info.weight_version == 2
    assert fleet.said[-1] == "engine b joined at version 2"


async def test_one_that_fits_no_more_is_named_once_and_left_out_until_it_fits():
    a, b = Engine("a"), Engine("b", manifest_digest="other")
    fleet = Fleet(a, b, absent={1: gone("b")})
    for version in (1, 2, 3):
        await fleet.refit(version)
    assert b.info.weight_version == 0
    refusal = "engine b is there again, and is left out: its manifest_digest is other, the others' d"
    assert fleet.said[1:] == [refusal]
    b.info = replace(b.info, manifest_digest="d")
    await fleet.refit(4)
    assert fleet.said[1:] == [refusal, "engine b joined at version 4"]


async def test_one_that_hangs_costs_a_refit_one_probe(monkeypatch):
    monkeypatch.setattr(members, "PROBE_SECONDS", 0.05)
    engines = [Engine("a"), Engine("b"), Engine("c")]
    for engine in engines[1:]:
        engine.hangs = True
    fleet = Fleet(*engines, absent={1: gone("b"), 2: gone("c")})
    async with asyncio.timeout(0.5):
        await fleet.refit(1)
    assert [engine.probes for engine in engines[1:]] == [1, 1]


async def test_a_failed_refit_leaves_the_joining_engine_out_of_service_and_a_later_one_brings_it_in():
    a, b = Engine("a"), Engine("b")
    fleet = Fleet(a, b)
    await fleet.refit(1)
    b.dead = True
    await fleet.generate()
    b.dead = False
    await fleet.fleet.take_back()  # and then the refit fails
    fleet.fleet._homes.clear()
    await fleet.generate()
    assert b.generations == 0
    await fleet.refit(2)
    assert fleet.said[-1] == "engine b joined at version 2"


async def test_a_fleet_whose_engines_nobody_starts_again_does_not_look_for_them():
    given: Any = (Engine("a"), Engine("b"))
    fleet = EngineFleet(given)
    fleet.evict(given[1], gone("b"))
    await fleet.take_back()
    assert given[1].probes == 0 and len(fleet.evictions) == 1


async def test_an_eviction_from_outside_ends_the_open_calls_of_an_engine_that_says_nothing():
    """A host that lost its power closes no connection."""
    a, b = Engine("a"), Engine("b")
    fleet = Fleet(a, b)
    b.hangs = True
    call = asyncio.create_task(fleet.generate())
    await asyncio.sleep(0.01)
    assert not call.done()
    fleet.fleet.evict(b, gone("b"))  # type: ignore[arg-type]  # a part of the protocol
    async with asyncio.timeout(1):
        await call
    assert (a.generations, b.generations) == (2, 0)


async def test_the_end_of_the_last_is_the_end_with_the_last_reason_of_each():
    a, b = Engine("a"), Engine("b")
    fleet = Fleet(a, b)
    end = asyncio.create_task(fleet.fleet.wait_end())
    a.dead = b.dead = True
    with pytest.raises(EngineUnreachable, match="all 2 engines are gone: a: connection refused; b: connection refused"):
        await fleet.generate()
    fleet.fleet.evict(a, EngineRejected("a was killed", remedy="x"))  # type: ignore[arg-type]
    async with asyncio.timeout(1):
        await end
    assert fleet.fleet.end().what == "all 2 engines are gone: a was killed; b: connection refused"

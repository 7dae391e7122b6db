"""Several engines as one, and the judgement of whether one lives."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from zerogap.client.fleet import EngineFleet
from zerogap.client.health import wait_healthy, while_healthy
from zerogap.errors import ConfigError, EngineRejected, EngineUnreachable, ProtocolMismatch
from zerogap.wire.api import MemoryReport, ServerInfo, TagBytes


class Engine:
    """The verbs that these tests use; `sick` makes every one of them raise."""

    def __init__(self, name: str, version: int = 0) -> None:
        self.name, self.version = name, version
        self.sick = False
        self.calls: list[str] = []

    def note(self, call: str) -> None:
        self.calls.append(call)
        if self.sick:
            raise EngineUnreachable(f"{self.name}: connection refused", remedy="start it", engine=self.name)

    async def health(self) -> dict[str, Any]:
        self.note("health")
        return {"status": "ok", "engine": self.name}

    async def server_info(self) -> ServerInfo:
        return ServerInfo("own name", 1, "m", "float32", self.version, "running", "d", "f", {}, 0)

    async def release_memory_occupation(self, tags: Any) -> MemoryReport:
        return MemoryReport({"weights": TagBytes(10, 9)}, 100, 0.5)

    async def weights_checker(self, action: str) -> dict[str, Any]:
        return {"ranks": [{"checksums": {self.name: "x"}}]}


def fleet_of(*engines: Engine) -> Any:
    return EngineFleet(engines)  # type: ignore[arg-type]  # a part of the protocol


async def test_memory_adds_up_and_every_rank_is_proven():
    fleet = fleet_of(Engine("a"), Engine("b"))
    report = await fleet.release_memory_occupation(["weights"])
    assert (report.tags["weights"], report.rss_bytes, report.seconds) == (TagBytes(20, 18), 200, 0.5)
    assert [list(r["checksums"]) for r in (await fleet.weights_checker("checksum"))["ranks"]] == [["a"], ["b"]]


async def test_engines_that_hold_different_weights_are_no_fleet():
    """C21: a version that is stuck on one of two engines."""
    with pytest.raises(ProtocolMismatch, match=r"differ in weight_version: a: 0, b: 1"):
        await fleet_of(Engine("a", 0), Engine("b", 1)).server_info()
    with pytest.raises(ConfigError, match="at least one"):
        EngineFleet([])


async def test_waiting_for_health_ends_with_a_report_or_at_the_deadline():
    engine: Any = Engine("a")
    engine.sick = True
    asyncio.get_running_loop().call_later(0.1, setattr, engine, "sick", False)
    assert (await wait_healthy(engine, deadline_seconds=5.0, interval_seconds=0.02))["engine"] == "a"
    engine.sick = True
    with pytest.raises(EngineUnreachable, match=r"not healthy within 0.1 s: a: connection refused"):
        await wait_healthy(engine, deadline_seconds=0.1, interval_seconds=0.02)


async def test_work_ends_with_the_engine():
    """E1: a dead engine ends what waits for it, within a bound, with its name."""
    engine: Any = Engine("a")
    engine.sick = True
    start = time.monotonic()
    with pytest.raises(EngineUnreachable, match=r"no sign of life for .* a: connection refused") as caught:
        await while_healthy(engine, asyncio.sleep(60), interval_seconds=0.02, max_silence_seconds=0.2)
    assert time.monotonic() - start < 2 and caught.value.details["engine"] == "a"


async def test_work_of_a_healthy_engine_returns_or_raises_as_itself():
    engine: Any = Engine("a")

    async def fail() -> None:
        raise EngineRejected("no", remedy="x")

    assert await while_healthy(engine, asyncio.sleep(0.05, result=3), interval_seconds=0.01) == 3
    with pytest.raises(EngineRejected):
        await while_healthy(engine, fail(), interval_seconds=0.01)

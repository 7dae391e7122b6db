"""Every control call in every reachable state of the engine, over HTTP, on the real core.

The table of states says what each call must answer and where it must lead; after every call that moves something, and
after each state, the engine is brought back to running and must generate what it did before.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.fake_core import served
from support.tiny import tiny_decoder, tiny_folder
from unit.engine.test_state import at, split

from zerogap.config.schema import EngineSettings
from zerogap.engine.core import EngineCore
from zerogap.engine.state import CALLS, StateMachine
from zerogap.errors import EngineStateError, StaleWeights
from zerogap.weights.bucket import buckets
from zerogap.weights.manifest import Manifest
from zerogap.weights.modes.ipc import IpcSender
from zerogap.wire.routes import BY_NAME, GET, ROUTES
from zerogap.wire.tensors import BucketHeader, TransferPlan

State = dict[str, str]
KV, WEIGHTS, GRAPH = "kv_cache", "weights", "cuda_graph"
GENERATE = {
    "input_ids": [1, 5, 9],
    "sampling_params": {"max_new_tokens": 3, "sampling_seed": 7, "ignore_eos": True},
    "pause_wait_seconds": 0,
}


@dataclass(frozen=True)
class Row:
    """One call: what is sent, and what a success looks like. `before` calls come first where the call is legal.

    `fails`: legal, and made to fail half-way with 400. `status`: instead of the table's word, where that has none.
    """

    call: str
    body: Any = None
    keys: frozenset[str] | None = None
    before: tuple[str, ...] = ()
    fails: bool = False
    status: Callable[[StateMachine], int] | None = None
    name: str = field(default="", kw_only=True)

    @property
    def route(self) -> str:
        return self.call.partition("(")[0]

    def __str__(self) -> str:
        return self.name or self.call


def _keys(*names: str) -> frozenset[str]:
    return frozenset(names)


def _generates(machine: StateMachine) -> int:
    try:
        return 200 if machine.admit() else 503
    except (EngineStateError, StaleWeights):
        return 409


def _ready(machine: StateMachine) -> int:
    return 200 if machine.may_sample else 503


SUCCESS, PAUSED, MEMORY = _keys("success", "message"), _keys("message", "status"), _keys("tags", "rss_bytes", "seconds")


def rows(folder: Path, plan: TransferPlan, whole: BucketHeader) -> list[Row]:
    begin = {"plan": plan.model_dump(mode="json")}
    lost = whole.model_copy(update={"shm_name": "zerogap-nothing", "index": 0}).model_dump(mode="json")
    memory = [
        Row(f"{verb}_memory_occupation({tag})", {"tags": [tag]}, MEMORY)
        for verb in ("release", "resume")
        for tag in (KV, WEIGHTS, GRAPH)
    ]
    checker = [
        Row(f"weights_checker({action})", {"action": action}, SUCCESS)
        for action in ("checksum", "manifest", "snapshot", "reset_tensors")
    ]
    return [
        Row("generate", GENERATE, _keys("output_ids", "meta_info"), status=_generates),
        Row("health", None, _keys("status", "state")),
        Row("health_generate", None, _keys("status", "state")),
        Row("ready", None, _keys("status", "state"), status=_ready),
        Row("ping"),
        Row("model_info", None, _keys("model_path", "weight_version")),
        Row("server_info", None, _keys("zerogap", "version")),
        Row("loads", {"include": "core"}, _keys("loads")),
        Row("get_load"),
        Row("parallelism_config", None, _keys("tp_size")),
        Row("freeze_gc"),
        Row("slow_down", {}),
        Row("configure_logging", {}),
        Row("start_profile", {"output_dir": "/etc"}, status=lambda _: 400),
        Row("stop_profile", {}, status=lambda _: 409),
        Row("abort_request", {"rid": "nobody"}),
        Row("abort_request", {"abort_all": True}, name="abort_request(all)"),
        *(Row("pause_generation", {"mode": m}, PAUSED, name=f"pause({m})") for m in ("abort", "retract", "in_place")),
        Row("continue_generation", {}, PAUSED),
        Row("flush_cache", {}),
        *memory,
        Row("begin_weight_update", begin, SUCCESS),
        Row("begin_weight_update(no plan)", {}, SUCCESS),
        Row("update_weights_from_tensor", {"bucket": whole.model_dump(mode="json")}, SUCCESS, ("begin_weight_update",)),
        Row("update_weights_from_tensor", {"bucket": lost}, fails=True, name="a bucket that is lost"),
        Row("end_weight_update", {}, SUCCESS, ("begin_weight_update", "update_weights_from_tensor")),
        Row("end_weight_update", {}, before=("begin_weight_update",), fails=True, name="an end before its buckets"),
        Row("update_weights_from_disk", {"model_path": str(folder)}, SUCCESS),
        Row("update_weight_version", {"new_version": "0"}, _keys("success", "message", "new_version")),
        Row("get_weights_by_name", {"name": "model.norm.weight"}),
        *checker,
        Row("weights_checker(compare)", {"action": "compare"}, SUCCESS, ("weights_checker(snapshot)",)),
    ]


def paths() -> Iterator[tuple[State, list[str]]]:
    """Every reachable state with the shortest way there: calls of the table; `lost` is a bucket that fails."""
    start = StateMachine().snapshot()
    seen, todo = {tuple(start.values())}, [(start, [])]
    moves = [c for c in CALLS if c not in ("begin_weight_update(no plan)", "weights_checker(reset_tensors)")]
    while todo:
        state, way = todo.pop(0)
        yield state, way
        for call in [c for c in moves if c in at(state).legal_calls()]:
            machine = at(state)
            name, tags = split(call)
            failing = call == "update_weights_from_tensor"
            (machine.failed if failing else machine.done)(name, tags=tags)
            after = machine.snapshot()
            if tuple(after.values()) not in seen:
                seen.add(tuple(after.values()))
                todo.append((after, [*way, "lost" if failing else call]))


class Sent(Exception): ...


class Engine:
    """The server and its core: goes to a state, makes a call, comes back."""

    def __init__(self, core: EngineCore, http: httpx.AsyncClient, folder: Path, table: Sequence[Row]) -> None:
        self.core, self.http, self.folder = core, http, folder
        self.row = {row.call: row for row in reversed(table)}
        self.row["lost"] = next(row for row in table if row.name == "a bucket that is lost")
        self.tokens: list[int] = []
        self.requests: list[asyncio.Task[httpx.Response]] = []

    @property
    def now(self) -> tuple[State, int, int]:
        status = self.core.status()
        return self.core.machine.snapshot(), status["num_running"], status["num_waiting"]

    async def send(self, row: Row) -> httpx.Response:
        route = BY_NAME[row.route]
        if route.client_method == GET:
            return await self.http.get(route.path, params=row.body)
        return await self.http.post(route.path, json=row.body if row.body is not None else {})

    async def go(self, way: Sequence[str], work: str) -> None:
        """By calls that must all succeed; with a request that is running, held in place, or waiting."""
        if work in ("held", "live"):
            await self.http.post("/slow_down", json={"forward_sleep_time": 0.02 if work == "live" else 0})
            await self.request(running=True)
        for call in way:
            pausing = call == "pause_generation"
            row = Row(call, {"mode": "in_place" if work == "held" else "retract"}) if pausing else self.row[call]
            response = await self.send(row)
            assert response.status_code == (400 if row.fails else 200), (way, call, response.text)
            if pausing and work == "queued":
                await self.request(running=False)

    async def request(self, *, running: bool) -> None:
        body = {"input_ids": [1, 7], "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
        self.requests.append(asyncio.create_task(self.http.post("/generate", json=body)))
        place = "num_running" if running else "num_waiting"
        async with asyncio.timeout(10):
            while not self.core.status()[place]:  # noqa: ASYNC110  the core is another thread
                await asyncio.sleep(0.001)

    async def come_back(self) -> None:
        """To running, from wherever it is; the requests of before get their answers, and a new one its tokens."""
        if self.requests:
            await self.http.post("/slow_down", json={})
            await self.http.post("/abort_request", json={"abort_all": True})
            for response in await asyncio.gather(*self.requests):
                assert response.status_code == 200, response.text
            self.requests.clear()
        state = self.core.machine.snapshot()
        if released := [tag for tag in (KV, WEIGHTS, GRAPH) if state[tag] == "released"]:
            assert (await self.http.post("/resume_memory_occupation", json={"tags": released})).status_code == 200
        if state["weights"] == "updating":
            await self.http.post("/end_weight_update", json={})
        if self.core.machine.snapshot()["weights"] != "ready":
            done = await self.http.post("/update_weights_from_disk", json={"model_path": str(self.folder)})
            assert done.status_code == 200, done.text
        if self.core.machine.paused:
            assert (await self.http.post("/continue_generation", json={})).status_code == 200
        response = await self.http.post("/generate", json=GENERATE)
        assert response.status_code == 200, response.text
        tokens = response.json()["output_ids"]
        self.tokens = self.tokens or tokens
        assert tokens == self.tokens

    async def try_every_row(self, table: Sequence[Row], state: State, way: Sequence[str], work: str) -> None:
        await self.go(way, work)
        arrived = self.now
        assert arrived[0] == state, (way, arrived)
        for row in table:
            if work == "idle" and row.body in ({"mode": "abort"}, {"mode": "in_place"}):
                continue  # the modes differ in what they do to requests
            where = f"{row} in {state}, work {work}"
            legal = await self.try_row(row, state, arrived, where)
            if self.now != arrived or (legal and row.before):
                await self.come_back()
                await self.go(way, work)
                assert self.now == arrived, where
        await self.come_back()

    async def try_row(self, row: Row, state: State, arrived: tuple[State, int, int], where: str) -> bool:
        machine, (_, running, waiting) = at(state), arrived
        name, tags = split(row.call)
        legal = row.call in machine.legal_calls(num_running=running, num_waiting=waiting)
        if legal:
            for call in row.before:
                assert (await self.send(self.row[call])).status_code == 200, (where, call)
        response = await self.send(row)
        expected = (400 if row.fails else 200) if legal else 409
        expected = row.status(machine) if row.status else expected
        assert response.status_code == expected, (where, response.text)
        check_shape(response, row, where)
        if legal:
            (machine.failed if row.fails else machine.done)(name, tags=tags)
        assert self.now[0] == machine.snapshot(), where
        return legal


def check_shape(response: httpx.Response, row: Row, where: str) -> None:
    if response.status_code == 200:
        if row.keys is not None:
            assert row.keys <= set(response.json()), where
        return
    reply = response.json()
    assert reply["success"] is False and reply["object"] == "error" and reply["code"] == response.status_code, where
    assert reply["message"] == reply["error"]["message"] and reply["zerogap"]["remedy"], where
    if response.status_code == 409 and row.route != "stop_profile":
        assert reply["zerogap"]["details"]["legal_calls"] and reply["zerogap"]["details"]["state"], where


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[tuple[Engine, list[Row]]]:
    """A server over a tiny model, and the rows with a plan and a bucket that fit it."""
    folder = tiny_folder(tmp_path / "model")
    tensors = tiny_decoder().hf_tensors()
    sent: list[BucketHeader] = []

    class Recorder:
        async def server_info(self) -> Any:
            return type("Info", (), {"manifest_digest": Manifest.of(tensors).digest, "fingerprint": None})

        async def update_weights_from_tensor(self, header: BucketHeader) -> None:
            sent.append(header)
            raise Sent  # the segment keeps its name, so that it can be sent again and again

    sender = IpcSender(Recorder(), fingerprint=None)
    plan = await sender.connect(Manifest.of(tensors), deadline_seconds=600.0)
    with pytest.raises(Sent):
        await sender.send(next(buckets(tensors, 1 << 28)))
    table = rows(folder, plan, sent[0])
    core = EngineCore(folder, EngineSettings(num_kv_tokens=1024, threads=1))
    async with (
        served(core, folder) as url,
        httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http,
    ):
        yield Engine(core, http, folder, table), table
    await sender.close()


async def walk(engine: tuple[Engine, list[Row]], work: str, states: Sequence[tuple[State, list[str]]]) -> None:
    one, table = engine
    await one.come_back()
    for state, way in states:
        await one.try_every_row(table, state, way, work)


async def test_every_call_in_every_state_of_an_idle_engine(engine):
    states = list(paths())
    assert len(states) == 2 * 5 * 2 * 2
    await walk(engine, "idle", states)


async def test_every_call_in_every_paused_state_with_a_request_that_waits(engine):
    """Without those that differ in the graphs alone: a request that waits needs none."""
    paused = [(state, way) for state, way in paths() if way[:1] == ["pause_generation"]]
    states = [(state, way) for state, way in paused if state[GRAPH] == "resident"]
    assert len(states) == 5 * 2
    await walk(engine, "queued", states)


async def test_every_call_while_a_request_is_held_in_place(engine):
    ways = (["pause_generation"], ["pause_generation", "begin_weight_update"],
            ["pause_generation", "begin_weight_update", "lost"])  # fmt: skip
    await walk(engine, "held", [(state, way) for state, way in paths() if way in ways])


async def test_every_call_while_a_request_runs(engine):
    await walk(engine, "live", [(StateMachine().snapshot(), [])])


def test_every_route_and_every_call_of_the_table_has_a_row(tmp_path):
    """A new route needs a row here, or to be declared absent."""
    plan = TransferPlan.model_construct(tensors=())
    table = rows(tmp_path, plan, BucketHeader.model_construct(entries=()))
    assert {row.route for row in table} == {route.name for route in ROUTES if not route.absent}
    assert set(CALLS) <= {row.call for row in table}

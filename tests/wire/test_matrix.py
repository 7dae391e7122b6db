"""Every control call in every reachable state of the engine, over HTTP, on the real core.

The table of states says what each call must answer and where it must lead; after every call that moves something, and
after each state, the engine is brought back to running and must generate what it did before.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import heapq
import itertools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.fake_core import letter_tokenizer, served
from support.modes import NO_NIXL
from support.tiny import tiny_decoder, tiny_folder
from unit.engine.test_state import at, reachable, split

from zerogap.config.schema import EngineSettings
from zerogap.engine.core import EngineCore
from zerogap.engine.state import CALLS, StateMachine
from zerogap.errors import EngineStateError, StaleWeights
from zerogap.weights.bucket import buckets
from zerogap.weights.manifest import Manifest
from zerogap.weights.modes.ipc import IpcSender
from zerogap.wire.routes import BY_NAME, GET, ROUTES
from zerogap.wire.tensors import BucketHeader, SharedMemory, TransferPlan

State = dict[str, str]
KV, WEIGHTS, GRAPH = "kv_cache", "weights", "cuda_graph"
GENERATE = {
    "input_ids": [1, 5, 9],
    "sampling_params": {"max_new_tokens": 3, "sampling_seed": 7, "ignore_eos": True},
    "pause_wait_seconds": 0,
}
_SHORT = {"max_tokens": 3, "seed": 7, "ignore_eos": True, "pause_wait_seconds": 0}
CHAT = {"input_ids": [1, 5, 9], **_SHORT}
COMPLETION = {"prompt": [1, 5, 9], **_SHORT}
GROUP = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 0, "world_size": 2, "backend": "gloo"}
"""Refused at once: rank 0 is the trainer's."""


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
    nowhere = SharedMemory(pid=1, descriptor=0, name="zerogap-nothing")
    lost = whole.model_copy(update={"shm": nowhere, "index": 0}).model_dump(mode="json")
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
        Row("chat_completions", CHAT, _keys("choices", "usage"), status=_generates),
        Row("completions", COMPLETION, _keys("choices", "usage"), status=_generates),
        Row("metrics", status=lambda _: 200),
        Row("models", None, _keys("data"), status=lambda _: 200),
        Row("model", status=lambda _: 404),
        Row("tokenize", {"prompt": "1 2"}, _keys("tokens", "count"), status=lambda _: 200),
        Row("detokenize", {"tokens": [1, 5]}, _keys("text"), status=lambda _: 200),
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
        Row("init_weights_update_group", GROUP, status=lambda _: 400),
        Row("remote_instance_transfer_engine_info", status=(lambda _: 400) if NO_NIXL else None),
        Row("destroy_weights_update_group", {}, status=lambda _: 400),
        Row("update_weights_from_distributed", {"names": ["x"], "dtypes": ["float32"], "shapes": [[1]]}, fails=True),
        Row("end_weight_update", {}, SUCCESS, ("begin_weight_update", "update_weights_from_tensor")),
        Row("end_weight_update", {}, before=("begin_weight_update",), fails=True, name="an end before its buckets"),
        Row("update_weights_from_disk", {"model_path": str(folder)}, SUCCESS),
        Row("update_weight_version", {"new_version": "0"}, _keys("success", "message", "new_version")),
        Row("pull_weights", {"source_dir": "/nowhere", "target_version": 1}, status=lambda _: 403),
        Row("get_weights_by_name", {"name": "model.norm.weight"}),
        *checker,
        Row("weights_checker(compare)", {"action": "compare"}, SUCCESS, ("weights_checker(snapshot)",)),
    ]


START = StateMachine().snapshot()
PAUSED_START = START | {"generation": "paused"}
_SLOW = 20
"""What a call that measures memory costs, against one that does not."""


def moves(state: State) -> Iterator[tuple[str, State, int]]:
    """(call, the state after it, its cost) from here; `lost` is a bucket that fails."""
    for call in at(state).legal_calls():
        machine = at(state)
        name, tags = split(call)
        if call == "update_weights_from_tensor":
            machine.failed(call)
            yield "lost", machine.snapshot(), 1
        elif call not in ("begin_weight_update(no plan)", "end_weight_update"):
            machine.done(name, tags=tags)
            yield call, machine.snapshot(), _SLOW if tags else 1


@functools.cache
def _way(start: tuple[str, ...], goal: tuple[str, ...]) -> list[str]:
    tie = itertools.count()
    seen, todo = set(), [(0, next(tie), start, [])]
    while True:
        cost, _, place, calls = heapq.heappop(todo)
        if place == goal:
            return calls
        if place not in seen:
            seen.add(place)
            for call, after, more in moves(dict(zip(START, place, strict=True))):
                heapq.heappush(todo, (cost + more, next(tie), tuple(after.values()), [*calls, call]))


def way(start: State, goal: State) -> list[str]:
    """The cheapest calls from one state to another. From an open session it leads over a bucket that fails."""
    return _way(tuple(start.values()), tuple(goal.values()))


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

    async def go(self, goal: State, work: str) -> None:
        """By calls that must all succeed; with a request that is running, held in place, or waiting."""
        if work in ("held", "live"):
            await self.http.post("/slow_down", json={"forward_sleep_time": 0.02 if work == "live" else 0})
            await self.request(running=True)
        if work in ("held", "queued"):
            await self.call(Row("pause_generation", {"mode": "in_place" if work == "held" else "retract"}))
        if work == "queued" and not self.core.status()["num_waiting"]:
            await self.request(running=False)
        for call in way(self.now[0], goal):
            await self.call(self.row[call])

    async def call(self, row: Row) -> None:
        response = await self.send(row)
        assert response.status_code == (400 if row.fails else 200), (row, response.text)

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

    async def try_every_row(self, table: Sequence[Row], state: State, work: str) -> None:
        """In states that need no memory call to leave, the engine is brought back to running after every move."""
        await self.go(state, work)
        arrived, near = self.now, "released" not in state.values()
        for row in table:
            if work == "idle" and row.body in ({"mode": "abort"}, {"mode": "in_place"}):
                continue  # the modes differ in what they do to requests
            where = f"{row} in {state}, work {work}"
            legal = await self.try_row(row, state, arrived, where)
            if self.now != arrived or (legal and row.before):
                if near or work in ("held", "live"):
                    await self.come_back()
                await self.go(state, work)
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
        if response.status_code == 503:  # what did not wait is aborted by an order that stands before this one
            await asyncio.wrap_future(self.core.control("server_info"))
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
            raise Sent

    sender = IpcSender(Recorder(), fingerprint=None)
    plan = await sender.connect(Manifest.of(tensors), deadline_seconds=600.0)
    with pytest.raises(Sent):
        await sender.send(next(buckets(tensors, 1 << 28)))
        await sender.settle()
    table = rows(folder, plan, sent[0])
    core = EngineCore(folder, EngineSettings(num_kv_tokens=1024, threads=1))
    async with (
        served(core, folder, letter_tokenizer()) as url,
        httpx.AsyncClient(base_url=url, timeout=30, trust_env=False) as http,
    ):
        yield Engine(core, http, folder, table), table
    await sender.close()
    gc.unfreeze()


async def walk(engine: tuple[Engine, list[Row]], work: str, states: Sequence[State]) -> None:
    one, table = engine
    await one.come_back()
    for state in states:
        await one.try_every_row(table, state, work)


async def test_every_call_in_every_state_of_an_idle_engine(engine):
    states = reachable()
    assert len(states) == 2 * 5 * 2 * 2
    await walk(engine, "idle", states)


async def test_every_call_in_every_paused_state_with_a_request_that_waits(engine):
    """Without those that differ in the graphs alone: a request that waits needs none."""
    states = [state for state in reachable() if (state["generation"], state[GRAPH]) == ("paused", "resident")]
    assert len(states) == 5 * 2
    await walk(engine, "queued", states)


async def test_every_call_while_a_request_is_held_in_place(engine):
    """Memory is refused while it holds KV, so only a session can move the weights."""
    await walk(engine, "held", [PAUSED_START | {"weights": weights} for weights in ("ready", "updating", "failed")])


async def test_every_call_while_a_request_runs(engine):
    await walk(engine, "live", [START])


def test_every_route_and_every_call_of_the_table_has_a_row(tmp_path):
    """A new route needs a row here, or to be declared absent."""
    plan = TransferPlan.model_construct(tensors=())
    table = rows(tmp_path, plan, BucketHeader.model_construct(entries=()))
    assert {row.route for row in table} == {route.name for route in ROUTES if not route.absent}
    assert set(CALLS) <= {row.call for row in table}

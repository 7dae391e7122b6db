"""Which engine of a fleet gets a prompt, and what becomes of the prompts of one that dies."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from support.stock_sglang import StockSglang, stock_server
from support.tiny import tiny_folder

from zerogap.client.fleet import EngineFleet
from zerogap.client.http import EngineClient
from zerogap.client.spread import in_order, part_of, prompt_groups
from zerogap.errors import EngineRejected, EngineUnreachable, StaleWeights
from zerogap.types import FinishReason
from zerogap.wire.api import GenerateBody, GenerateReply, SamplingBody


def unreachable(name: str, cause: Exception) -> EngineUnreachable:
    error = EngineUnreachable(f"{name} at http://{name}: it is gone", remedy="see its log", engine=name)
    error.__cause__ = cause
    return error


class Engine:
    """Answers a prompt `[k]` with the token k; holds generations back while `gate` is closed; raises `fault`."""

    def __init__(self, name: str) -> None:
        self.name, self.weight_version = name, 0
        self.fault: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.bodies: list[GenerateBody] = []

    async def generate(self, body: GenerateBody, *, deadline_seconds: float | None = None) -> list[GenerateReply]:
        self.bodies.append(body)
        await self.gate.wait()
        self._raise()
        prompts: Any = body.input_ids if isinstance(body.input_ids[0], list) else [body.input_ids]
        params: Any = body.sampling_params
        counts = [p.n for p in params] if isinstance(params, list) else [1] * len(prompts)
        return [
            GenerateReply(
                f"{self.name}-{k}", None, (p[0],), (), (self.weight_version,), FinishReason.LENGTH, len(p), 0, 0
            )
            for p, count in zip(prompts, counts, strict=True)
            for k in range(count)
        ]

    async def update_weight_version(self, version: int) -> None:
        self._raise()
        self.weight_version = version

    async def continue_generation(self) -> None:
        self._raise()

    async def health(self) -> dict[str, Any]:
        self._raise()
        return {"status": "ok"}

    def _raise(self) -> None:
        if self.fault is not None:
            raise self.fault

    @property
    def prompts(self) -> list[list[Any]]:
        return [list(body.input_ids or ()) for body in self.bodies]


def fleet_of(*names: str) -> tuple[Any, list[Engine]]:
    engines: Any = [Engine(name) for name in names]
    return EngineFleet(engines), engines


def tokens(replies: list[GenerateReply]) -> list[int]:
    return [token for reply in replies for token in reply.output_ids]


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_call_is_divided_by_prompts_and_its_replies_come_in_its_order():
    fleet, (a, b) = fleet_of("a", "b")
    params = [SamplingBody(sampling_seed=i, n=1 + (i == 2)) for i in range(5)]
    rids = [str(i) for i in range(5)]
    prompts = [[7], [8], [7], [9], [7]]
    body = GenerateBody(
        input_ids=prompts, sampling_params=params, rid=rids, return_logprob=True, cache_salt=[*"abcde"], extra_key="x"
    )
    replies = await fleet.generate(body)
    assert tokens(replies) == [7, 8, 7, 7, 9, 7]
    assert (a.prompts, b.prompts) == ([[[7], [7], [7]]], [[[8], [9]]])
    assert [p.sampling_seed for p in a.bodies[0].sampling_params] == [0, 2, 4] and a.bodies[0].rid == ["0", "2", "4"]
    assert (a.bodies[0].cache_salt, b.bodies[0].cache_salt) == (["a", "c", "e"], ["b", "d"])
    assert b.bodies[0].return_logprob is True and b.bodies[0].extra_key == "x"
    assert b.bodies[0].model_fields_set == body.model_fields_set


async def test_prompts_go_to_the_engine_with_the_fewest_and_a_group_stays_together():
    fleet, (a, b) = fleet_of("a", "b")
    a.gate.clear()
    b.gate.clear()
    big = asyncio.create_task(fleet.generate(GenerateBody(input_ids=[[1], [1], [1]])))
    await settle()
    small = [asyncio.create_task(fleet.generate(GenerateBody(input_ids=[2]))) for _ in range(2)]
    await settle()
    late = asyncio.create_task(fleet.generate(GenerateBody(input_ids=[[1]])))
    await settle()
    assert (a.prompts, b.prompts) == ([[[1], [1], [1]], [[1]]], [[2], [2]])
    a.gate.set()
    b.gate.set()
    assert [tokens(r) for r in await asyncio.gather(big, *small, late)] == [[1, 1, 1], [2], [2], [1]]
    assert tokens(await fleet.generate(GenerateBody(input_ids=[1]))) == [1]
    assert len(a.bodies) == 3, "nothing is remembered of a prompt that is done"


@pytest.mark.parametrize(
    "body",
    [
        GenerateBody(input_ids=[[1], [2]], rid="family"),
        GenerateBody(input_ids=[[1], [2]], sampling_params=[SamplingBody()]),
        GenerateBody(text="a"),
        GenerateBody(input_ids=[1, 2], token_ids_logprob=[5, 6]),
    ],
)
def test_what_cannot_be_divided_goes_to_one_engine_as_it_is(body: GenerateBody):
    groups = prompt_groups(body)
    assert len(groups) == 1
    assert part_of(body, groups[0][1]) is body


def test_token_ids_of_all_prompts_are_not_taken_for_one_list_per_prompt():
    body = GenerateBody(text=["a", "b"], token_ids_logprob=[5, 6])
    assert part_of(body, [1]) == GenerateBody(text=["b"], token_ids_logprob=[5, 6])
    assert in_order(body, [([0, 1], [1, 2])]) == [1, 2]  # type: ignore[list-item]


async def test_the_prompts_of_an_engine_that_dies_go_to_the_others_and_the_log_names_it(caplog):
    fleet, (a, b) = fleet_of("a", "b")
    a.gate.clear()
    a.fault = unreachable("a", ConnectionError())
    with caplog.at_level(logging.WARNING):
        call = asyncio.create_task(fleet.generate(GenerateBody(input_ids=[[1], [2], [3]])))
        await settle()
        a.gate.set()
        assert tokens(await call) == [1, 2, 3]
    assert a.prompts == [[[1], [3]]] and b.prompts == [[[2]], [[1], [3]]]
    assert [error.what for error in fleet.evictions] == ["a at http://a: it is gone"]
    assert "1 of 2 are left: a at http://a: it is gone" in caplog.text
    a.fault = None
    await fleet.continue_generation()
    assert tokens(await fleet.generate(GenerateBody(input_ids=[[1], [2]]))) == [1, 2] and len(a.bodies) == 1


async def test_the_end_of_the_last_engine_names_them_all():
    fleet, engines = fleet_of("a", "b")
    for engine in engines:
        engine.fault = unreachable(engine.name, ConnectionError())
    with pytest.raises(EngineUnreachable, match=r"all 2 engines are gone: a at .* is gone; b at .* is gone"):
        await fleet.generate(GenerateBody(input_ids=[1]))
    with pytest.raises(EngineUnreachable, match="all 2 engines are gone"):
        await fleet.continue_generation()


async def test_a_deadline_or_a_refusal_is_an_error_and_evicts_nobody():
    fleet, (a, _) = fleet_of("a", "b")
    for fault in (unreachable("a", TimeoutError()), EngineRejected("no", remedy="x")):
        a.fault = fault
        for call in (fleet.generate(GenerateBody(input_ids=[1])), fleet.continue_generation(), fleet.health()):
            with pytest.raises(type(fault)):
                await call
    a.fault = unreachable("a", ConnectionError())
    with pytest.raises(EngineUnreachable):
        await fleet.health()  # it may not have started yet
    assert fleet.evictions == []
    await fleet.continue_generation()
    assert len(fleet.evictions) == 1


async def test_an_engine_that_missed_the_last_version_gets_no_prompt():
    """C21."""
    fleet, (a, b) = fleet_of("a", "b")
    await fleet.update_weight_version(1)
    a.fault = EngineRejected("no", remedy="x")
    with pytest.raises(EngineRejected):
        await fleet.update_weight_version(2)
    a.fault = None
    await fleet.generate(GenerateBody(input_ids=[[1], [2]]))
    assert (a.bodies, len(b.bodies)) == ([], 1)
    b.fault = unreachable("b", ConnectionError())
    with pytest.raises(StaleWeights, match=r"no engine has weight version 2: they have \[1\]"):
        await fleet.generate(GenerateBody(input_ids=[1]))
    await fleet.update_weight_version(3)
    assert tokens(await fleet.generate(GenerateBody(input_ids=[1]))) == [1]


async def test_tokens_of_replaced_weights_are_thrown_away_with_their_engine():
    fleet, (a, _) = fleet_of("a", "b")
    await fleet.update_weight_version(4)
    a.weight_version = 0  # another process answers at its address
    (reply,) = await fleet.generate(GenerateBody(input_ids=[1]))
    assert reply.rid == "b-0" and "weight version 0, after version 4" in fleet.evictions[0].what


async def test_one_failure_leaves_no_other_part_running():
    fleet, (a, b) = fleet_of("a", "b")
    a.fault = EngineRejected("no", remedy="x")
    b.gate.clear()
    with pytest.raises(EngineRejected):
        await fleet.generate(GenerateBody(input_ids=[[1], [2]]))
    assert [member.num_outstanding for member in fleet._members.all] == [0, 0] and fleet._homes == {}


async def test_a_rollout_survives_the_death_of_one_of_two_servers(tmp_path: Path):
    """E1: the tokens are those of a run in which nobody died."""
    folder = tiny_folder(tmp_path / "model")
    doubles = [StockSglang(folder, step_seconds=0.002) for _ in range(2)]
    params = [SamplingBody(max_new_tokens=60, ignore_eos=True, sampling_seed=i) for i in range(6)]
    body = GenerateBody(input_ids=[[1], [1], [1], [2], [2], [2]], sampling_params=params, return_logprob=True)
    async with (
        stock_server(doubles[0]) as first,
        stock_server(doubles[1]) as second,
        EngineClient(first, name="engine-0") as one,
        EngineClient(second, name="engine-1") as two,
    ):
        alone = await two.generate(body)
        fleet = EngineFleet([one, two])
        call = asyncio.create_task(fleet.generate(body))
        async with asyncio.timeout(5):
            while not any(running.ids for running in doubles[0].scheduler.running):  # noqa: ASYNC110
                await asyncio.sleep(0.002)
        doubles[0].kill()
        survived = await call
        assert [r.output_logprobs for r in survived] == [r.output_logprobs for r in alone]
        assert [error.what.partition(":")[0] for error in fleet.evictions] == ["engine-0 at http"]

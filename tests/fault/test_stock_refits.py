"""Refits of stock SGLang servers, by its double: every way they can go, on a real group and a real folder."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest
import torch
from support.stock_sglang import StockSglang, stock_server
from support.tiny import TINY_QWEN3, tiny_decoder, tiny_folder

from zerogap.client.fleet import EngineFleet
from zerogap.client.http import EngineClient
from zerogap.config.schema import EngineSettings, RefitSettings, RunConfig
from zerogap.engines import _one_kind
from zerogap.errors import ConfigError, EngineUnreachable, ProtocolMismatch, TransferFailed
from zerogap.trainer.senders import open_sender
from zerogap.weights.session import RefitReport, refit, refit_and_continue

MODES = ("broadcast", "broadcast_packed", "disk_delta")


def new_weights(seed: int = 7) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in tiny_decoder(TINY_QWEN3, seed=seed).hf_tensors().items()}


@dataclass
class Served:
    doubles: list[StockSglang]
    urls: list[str]
    clients: list[EngineClient]
    fleet: EngineFleet

    def sender(self, mode, tmp_path, **options):
        config = RunConfig(
            engine=EngineSettings(urls=tuple(self.urls)), refit=RefitSettings(mode=mode, **options)
        )  # options across each other are not checked here
        engine = self.fleet if len(self.clients) > 1 else self.clients[0]
        return engine, open_sender(config, engine, None, run_folder=tmp_path / "run", stock=True)


@pytest.fixture
async def serve(tmp_path):
    """serve(n): n stock servers of one tiny model."""
    async with AsyncExitStack() as stack:

        async def start(count: int, **options: object) -> Served:
            folder = tiny_folder(tmp_path / "model", TINY_QWEN3)
            doubles = [StockSglang(folder, second=0.05, **options) for _ in range(count)]
            urls = [await stack.enter_async_context(stock_server(one)) for one in doubles]
            clients = [await stack.enter_async_context(EngineClient(url, name=url)) for url in urls]
            return Served(doubles, urls, clients, EngineFleet(clients))

        yield start


def holds(double: StockSglang, weights: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(double.scheduler.tensors[name], tensor) for name, tensor in weights.items())


async def run(served: Served, mode, tmp_path, weights, version=7, deadline_seconds=20.0, **options) -> RefitReport:
    engine, sender = served.sender(mode, tmp_path, **options)
    return await refit_and_continue(engine, sender, weights, version, deadline_seconds=deadline_seconds)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [1, 2])
async def test_every_weight_arrives_and_the_servers_go_on(serve, tmp_path, mode, count):
    served, weights = await serve(count), new_weights()
    report = await run(served, mode, tmp_path, weights)
    for double in served.doubles:
        assert holds(double, weights) and double.version == "7" and double.scheduler.version == "7"
        assert not double.paused and not double.scheduler.session_open and not double.groups
    assert report.num_bytes == sum(t.nbytes for t in weights.values()) <= report.wire_bytes + 1
    again = new_weights(8)
    await run(served, mode, tmp_path, again, 8)
    assert all(holds(double, again) and double.version == "8" for double in served.doubles)


@pytest.mark.parametrize("mode", MODES[:2])
async def test_dtypes_of_different_widths_travel_in_one_bucket(serve, tmp_path, mode):
    served, weights = await serve(1), new_weights()
    mixed = {n: t.bfloat16() if "self_attn" in n or n.endswith("norm.weight") else t for n, t in weights.items()}
    mixed["model.layers.0.self_attn.q_norm.weight"] = torch.ones(31, dtype=torch.uint8)  # an odd number of bytes
    served.doubles[0].scheduler.tensors.pop("model.layers.0.self_attn.q_norm.weight")
    await run(served, mode, tmp_path, mixed)
    sent = {n: t for n, t in mixed.items() if n != "model.layers.0.self_attn.q_norm.weight"}
    assert holds(served.doubles[0], sent)
    (formats,) = {body["load_format"] for call, body in served.doubles[0].calls if call.endswith("distributed")}
    assert formats == ("flattened_bucket" if mode == "broadcast_packed" else None)


@pytest.mark.parametrize("mode", MODES)
async def test_a_weight_that_the_server_dropped_is_named_and_the_server_stays_paused(serve, tmp_path, mode):
    served = await serve(2)
    served.doubles[1].scheduler.ignored = {"model.norm.weight"}
    with pytest.raises((TransferFailed, ProtocolMismatch), match=r"model\.norm\.weight"):
        await run(served, mode, tmp_path, new_weights())
    assert all((double.paused and double.version == "default") or mode == "disk_delta" for double in served.doubles)
    served.doubles[1].scheduler.ignored = set()
    await run(served, mode, tmp_path, new_weights())
    assert all(holds(double, new_weights()) and not double.paused for double in served.doubles)


async def test_a_session_that_broke_is_ended_by_the_next_refit(serve, tmp_path):
    served = await serve(1)
    served.doubles[0].scheduler.session_open = True
    await run(served, "broadcast_packed", tmp_path, new_weights())
    assert holds(served.doubles[0], new_weights())


async def test_a_shape_that_the_server_refuses_fails_by_name(serve, tmp_path):
    served = await serve(1)
    wrong = new_weights() | {"model.norm.weight": torch.ones(33)}
    with pytest.raises(TransferFailed, match=r"model\.norm\.weight.*discard"):
        await run(served, "broadcast", tmp_path, wrong)
    assert served.doubles[0].paused


@pytest.mark.parametrize("mode", MODES[:2])
async def test_a_server_that_dies_in_a_refit_is_named_and_the_others_take_the_next_one(serve, tmp_path, mode):
    served, weights = await serve(2), new_weights()
    served.doubles[0].dies_of = list(weights)[-1]
    engine, sender = served.sender(mode, tmp_path)
    with pytest.raises((TransferFailed, EngineUnreachable)):
        await refit(engine, sender, weights, 7, deadline_seconds=20.0, pause="retract")
    assert served.urls[0] in served.fleet.evictions[0].what
    await refit_and_continue(engine, sender, weights, 7, deadline_seconds=20.0)
    assert holds(served.doubles[1], weights) and not served.doubles[1].paused


async def test_a_folder_keeps_the_newest_checkpoints(serve, tmp_path):
    served = await serve(1)
    engine, sender = served.sender("disk_delta", tmp_path, keep=2)
    for version in range(1, 5):
        await refit_and_continue(engine, sender, new_weights(version), version, deadline_seconds=20.0)
    assert sorted(p.name for p in (tmp_path / "run" / "weights").iterdir()) == ["weight_v000003", "weight_v000004"]
    assert served.doubles[0].model_path.endswith("weight_v000004")


async def test_a_layout_that_would_die_of_an_update_is_refused_before_anything_moves(serve, tmp_path):
    served = await serve(1, dp_size=2)
    with pytest.raises(ConfigError, match="dp_size=2"):
        await run(served, "broadcast", tmp_path, new_weights())
    assert not served.doubles[0].paused


@pytest.mark.parametrize("mode", ["ipc", "p2p", "shared"])
async def test_a_mode_that_stock_servers_do_not_know_is_refused_by_name(serve, tmp_path, mode):
    served = await serve(1)
    with pytest.raises(ConfigError, match=f"refit.mode='{mode}'"):
        served.sender(mode, tmp_path)


async def test_engines_of_two_kinds_are_refused_by_name(serve):
    served = await serve(2)
    assert await _one_kind(served.clients) is True
    served.clients[1]._stock = False
    with pytest.raises(ConfigError, match=r"is SGLang, .* is zerogap"):
        await _one_kind(served.clients)

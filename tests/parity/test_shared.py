"""Transfer mode shared: one process, one set of weights; what the engine samples is what the trainer scores."""

from __future__ import annotations

import os

import pytest
import torch
from support.fake_core import served
from support.scoring import score_packed
from support.tiny import TINY_QWEN3, tiny_decoder, tiny_folder

from zerogap.client.http import EngineClient
from zerogap.config.schema import EngineSettings
from zerogap.engine.core import EngineCore
from zerogap.errors import ConfigError, TransferFailed
from zerogap.weights.modes.shared import SharedSender
from zerogap.weights.session import refit
from zerogap.wire.api import GenerateBody, SamplingBody

PROMPT = [5, 9, 11, 30, 2, 7]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "model", TINY_QWEN3)


@pytest.mark.parametrize("steps", [1, 3])
async def test_a_step_of_the_trainer_and_a_refit_that_moves_nothing_leave_no_gap(folder, steps):
    trainer = tiny_decoder(TINY_QWEN3, seed=4)
    core = EngineCore(folder, EngineSettings(num_kv_tokens=4096, threads=1), shares=trainer)
    pointers = {name: tensor.data_ptr() for name, tensor in trainer.hf_tensors().items()}
    assert {name: tensor.data_ptr() for name, tensor in core.weights.tensors.items()} == pointers
    async with served(core, folder) as url, EngineClient(url) as client:
        sender = SharedSender(client, fingerprint=None, max_bucket_bytes=1 << 15)
        for version in range(1, steps + 1):
            await client.pause_generation("abort")
            await client.flush_cache()
            with torch.no_grad():
                for parameter in trainer.parameters():
                    parameter.add_(0.05 * torch.randn_like(parameter))
            report = await refit(client, sender, trainer.hf_tensors(), version, deadline_seconds=30.0)
            await client.continue_generation()
            assert (report.version, report.wire_bytes) == (version, 0)
            params = SamplingBody(temperature=0.8, max_new_tokens=16, n=3, sampling_seed=version)
            body = GenerateBody(input_ids=PROMPT, sampling_params=params, return_logprob=True)
            replies = await client.generate(body)
            with torch.no_grad():
                scores = score_packed(trainer, [PROMPT], [[r.output_ids for r in replies]], temperature=0.8)
            assert [s.tolist() for s in scores] == [list(r.output_logprobs) for r in replies]
            assert {v for r in replies for v in r.weight_versions} == {version}


async def test_an_engine_that_only_looks_shared_is_found_out_by_its_digests(folder):
    """Same process, but tensors of its own: nothing that moved could have changed them."""
    trainer = tiny_decoder(TINY_QWEN3, seed=4)
    core = EngineCore(folder, EngineSettings(num_kv_tokens=4096, threads=1))
    async with served(core, folder) as url, EngineClient(url) as client:
        sender = SharedSender(client, fingerprint=None)
        with pytest.raises(TransferFailed, match="arrived changed"):
            await refit(client, sender, trainer.hf_tensors(), 1, deadline_seconds=30.0, pause="abort")
        assert (await client.server_info()).state == "failed"


async def test_an_engine_in_another_process_is_refused(folder):
    class Elsewhere(EngineClient):
        async def server_info(self):
            info = await super().server_info()
            return type(info)(**{f: getattr(info, f) for f in info.__dataclass_fields__} | {"pid": os.getpid() + 1})

    trainer = tiny_decoder(TINY_QWEN3, seed=4)
    core = EngineCore(folder, EngineSettings(num_kv_tokens=4096, threads=1), shares=trainer)
    async with served(core, folder) as url, Elsewhere(url) as client:
        with pytest.raises(ConfigError, match="transfer mode shared, and the engine is process"):
            await refit(client, SharedSender(client, fingerprint=None), trainer.hf_tensors(), 1, deadline_seconds=30.0)

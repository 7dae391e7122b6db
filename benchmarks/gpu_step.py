"""A whole GRPO step, colocated on one GPU, with the real engine process, wire, refit and trainer: workload R.

    python benchmarks/gpu_step.py [--steps 3] [--set refit.max_bucket_bytes=N] [--out FILE]

Three steps at lr 1e-6; random rewards; every sample is trained on and compared: the run ends with a ParityError if one
bit differs. The third step counts. Random bf16 weights of Qwen3-0.6B's shape.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpu import workload
from safetensors.torch import save_file

from zerogap import metrics
from zerogap.bench.shapes import QWEN3_HF
from zerogap.config.load import load
from zerogap.engines import Engines
from zerogap.model.registry import load_decoder, read_config
from zerogap.placement import Colocated
from zerogap.rollout.advantage import make_batch
from zerogap.trainer.publish import published_weights
from zerogap.trainer.trainer import Trainer
from zerogap.types import FinishReason, Prompt, PromptGroup, Sample
from zerogap.weights.modes.ipc import IpcSender
from zerogap.weights.session import refit, refit_and_continue
from zerogap.wire.api import GenerateBody, GenerateReply, RolloutEngine, SamplingBody


def random_folder(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**QWEN3_HF, "architectures": ["Qwen3ForCausalLM"]}))
    from zerogap.model.decoder import Decoder  # noqa: PLC0415

    decoder = Decoder(read_config(folder), dtype=torch.bfloat16, device=torch.device("cuda"))
    torch.manual_seed(0)
    tensors = {}
    for name, view in decoder.hf_tensors().items():
        value = torch.ones_like(view) if name.endswith("norm.weight") else torch.randn_like(view) * 0.02
        tensors[name] = value.cpu()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


async def generate(engine: RolloutEngine, step: int, temperature: float) -> list[PromptGroup]:
    prompts, lengths = workload(QWEN3_HF["vocab_size"])
    sampling = [
        SamplingBody(max_new_tokens=n, temperature=temperature, ignore_eos=True, sampling_seed=step * 1000 + i)
        for i, n in enumerate(lengths)
    ]
    body = GenerateBody(
        input_ids=[prompts[i // 8] for i in range(len(lengths))], sampling_params=sampling, return_logprob=True
    )
    replies = await engine.generate(body, deadline_seconds=300.0)
    source = random.Random(step)
    groups = []
    for g, ids in enumerate(prompts):
        prompt = Prompt("r", str(g), "", None, tuple(ids))
        samples = [_sample(prompt, i, replies[g * 8 + i], float(source.random() < 0.5)) for i in range(8)]
        groups.append(PromptGroup(str(g), prompt, tuple(samples)))
    return groups


def _sample(prompt: Prompt, index: int, reply: GenerateReply, reward: float) -> Sample:
    return Sample(
        prompt, index, reply.output_ids, reply.output_logprobs, reply.weight_versions, FinishReason.LENGTH, "", index,
        raw_reward=reward, reward=reward,
    )  # fmt: skip


class Clock:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def __call__(self, name: str) -> Clock:
        self._name = name
        return self

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + time.perf_counter() - self._started


async def run(steps: int, temperature: float, place: Path, changes: list[str]) -> list[dict[str, Any]]:
    folder = random_folder(place / "model")
    overrides = [
        f"model.path={folder}", "model.device=cuda", "model.dtype=bfloat16", "data.task=max4", "trainer.lr=1e-6",
        "engine.num_kv_tokens=300000", "engine.chunk_size=16384", "sampling.max_new_tokens=1024",
        "trainer.micro_batch_groups=4", "trainer.warmup_steps=0", "trainer.schedule=constant", *changes,
    ]  # fmt: skip
    config = load(None, overrides).config
    started = time.perf_counter()
    engines = Engines(config, folder, place)
    results = []
    try:
        decoder = load_decoder(folder, dtype=torch.bfloat16, device=torch.device("cuda"))
        trainer = Trainer(decoder, config.trainer, num_steps=steps, max_new_tokens=1024)
        async with engines.connect(decoder) as engine:
            print(f"engine ready after {time.perf_counter() - started:.1f} s", flush=True)
            sender = IpcSender(
                engine, fingerprint=decoder.certificate.fingerprint, max_bucket_bytes=config.refit.max_bucket_bytes
            )
            placement = Colocated(engine, trainer)

            def weights() -> dict[str, Any]:
                return published_weights(trainer.hf_tensors(), torch.bfloat16)

            await refit_and_continue(engine, sender, weights(), 1, deadline_seconds=60)
            one = GenerateBody(input_ids=[1, 2, 3], sampling_params=SamplingBody(max_new_tokens=1))
            await engine.generate(one)
            print(f"first token after {time.perf_counter() - started:.1f} s", flush=True)
            for step in range(steps):
                span, begun = Clock(), time.perf_counter()
                with span("rollout"):
                    groups = await generate(engine, step, temperature)
                batch = make_batch(step, temperature, groups, "group_norm")
                async with placement.trainer_turn(span):
                    with span("train"):
                        stats = await asyncio.to_thread(trainer.train_step, batch)
                async with placement.refit_turn(span):
                    with span("refit"):
                        moved = await refit(engine, sender, weights(), step + 2, deadline_seconds=60)
                whole = time.perf_counter() - begun
                tokens = sum(len(s.response_ids) for g in groups for s in g.samples)
                results.append({
                    "whole": whole, **span.seconds, "tokens": tokens, "refit_pause": moved.pause_seconds,
                    "refit_stages": dict(moved.stage_seconds), "gap": stats.metrics[metrics.GAP_MAX],
                    "gap_tokens": stats.metrics[metrics.GAP_TOKENS], "grad_norm": stats.metrics[metrics.GRAD_NORM],
                })  # fmt: skip
                print(json.dumps(results[-1]), flush=True)
    finally:
        engines.stop(5.0)
        print((place / "engine-0.log").read_text()[-3000:], flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--set", action="append", default=[], help="an option of the run file, option=value")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        results = asyncio.run(run(options.steps, options.temperature, Path(place), options.set))
    if options.out:
        about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
        options.out.write_text(json.dumps({"about": about, "steps": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()

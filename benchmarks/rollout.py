"""Rollout speed: our engine over HTTP with logprobs, against a plain torch loop and against `transformers` generate.

    python benchmarks/rollout.py [--model NAME_OR_FOLDER] [--requests 64] [--prompt 32] [--new 64] [--out FILE]

All three make the same number of tokens from the same prompts at temperature 1, EOS ignored, each on every core while
the others rest, turn by turn; ratios are of median times. The plain loop is what one would write first: the library's
own kernels, a static KV cache, multinomial sampling, the logprob of each token. Then the engine's own cost per step:
a tiny model with 256 running requests, where the model is nearly free and the time outside of it is what counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import torch
from step import Plain
from transformers import AutoModelForCausalLM

from zerogap.client.http import Deadlines, EngineClient
from zerogap.config.schema import EngineSettings
from zerogap.engine.requests import GenerateRequest, SamplingParams, Sequence
from zerogap.engine.runner import Runner
from zerogap.model.config import ModelConfig
from zerogap.model.decoder import Decoder
from zerogap.model.importer import resolve
from zerogap.model.registry import load_decoder
from zerogap.supervise.processes import ChildProcess
from zerogap.wire.messages import GenerateBody, SamplingBody

TINY = ModelConfig.from_hf(
    {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "max_position_embeddings": 2048,
    }
)
STARTUP_SECONDS = 300.0


def ours(client: EngineClient, prompts: list[list[int]], new: int) -> Callable[[int], Awaitable[int]]:
    async def run(seed: int) -> int:
        sampling = SamplingBody(max_new_tokens=new, temperature=1.0, ignore_eos=True, sampling_seed=seed)
        body = GenerateBody(input_ids=prompts, sampling_params=sampling, return_logprob=True)
        await client.flush_cache()
        replies = await client.generate(body, deadline_seconds=600.0)
        return sum(len(reply.output_logprobs) for reply in replies)

    return run


@torch.no_grad()
def plain_loop(plain: Plain, prompts: torch.Tensor, new: int) -> int:
    """Prefill, then one token for all, again and again; the logprob of each is kept."""
    logits = plain.prefill(prompts)
    logprobs = []
    for step in range(new):
        full = torch.log_softmax(logits, -1)
        ids = torch.multinomial(full.exp(), 1)
        logprobs.append(full.gather(-1, ids))
        if step + 1 < new:
            logits = plain.decode(ids.squeeze(-1), prompts.shape[1] + step)
    return torch.cat(logprobs, -1).numel()


def transformers_generate(folder: Path, prompts: torch.Tensor, new: int) -> Callable[[int], int]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": True, "temperature": 1.0, "pad_token_id": 0}

    @torch.no_grad()
    def run(seed: int) -> int:
        torch.manual_seed(seed)
        out = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            output_logits=True,
            return_dict_in_generate=True,
            **options,
        )
        logits = torch.stack(out.logits, 1)
        ids = out.sequences[:, prompts.shape[1] :]
        return torch.log_softmax(logits, -1).gather(-1, ids.unsqueeze(-1)).numel()

    return run


async def compare(folder: Path, requests: int, prompt: int, new: int, repeats: int) -> dict[str, dict[str, float]]:
    decoder = load_decoder(folder)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(100, decoder.config.vocab_size, (requests, prompt), generator=generator)
    plain = Plain(decoder, requests, prompt + new)
    generate = transformers_generate(folder, prompts, new)
    settings = EngineSettings(max_running_requests=requests, chunk_size=requests * prompt)
    with tempfile.TemporaryDirectory() as place:
        words = settings.model_dump_json().replace("{", "{{").replace("}", "}}")
        argv = [sys.executable, "-m", "zerogap.engine", "--model", str(folder), "--dtype", "float32"]
        argv += ["--settings", words, "--name", "engine", "--ready-file", "{ready_file}"]
        child = ChildProcess("engine", [*argv, "--parent-pipe", "{parent_pipe}"], log_path=Path(place) / "engine.log")
        try:
            ready = await child.wait_ready(STARTUP_SECONDS)
            deadlines = Deadlines(call_seconds=60.0, generate_seconds=600.0)
            async with EngineClient(ready["url"], name="engine", deadlines=deadlines) as client:
                engine = ours(client, prompts.tolist(), new)
                seconds: dict[str, list[float]] = {"zerogap": [], "plain torch": [], "transformers": []}
                for seed in range(repeats + 1):
                    for name, times in seconds.items():
                        started = time.perf_counter()
                        if name == "zerogap":
                            count = await engine(seed)
                        else:
                            count = plain_loop(plain, prompts, new) if name == "plain torch" else generate(seed)
                        assert count == requests * new, f"{name} made {count} tokens"
                        if seed:
                            times.append(time.perf_counter() - started)
        finally:
            child.stop()
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    return {
        name: {
            "seconds": median,
            "tokens_per_second": requests * new / median,
            "ours_over_this": median / medians["zerogap"],
        }
        for name, median in medians.items()
    }


def scheduler_cost(running: int, steps: int) -> dict[str, float]:
    """Milliseconds per decode step of `running` requests: in `Scheduler.plan`, in the model, and in all the rest."""
    decoder = Decoder(TINY)
    decoder.initialise(0)
    runner = Runner(decoder, num_kv_tokens=running * 256, max_running=running, prefill_tokens=running * 32)
    for i in range(running):
        ids = tuple(torch.randint(3, 64, (16 + i % 16,), generator=torch.Generator().manual_seed(i)).tolist())
        params = SamplingParams(max_new_tokens=200, temperature=1.0, seed=i, ignore_eos=True)
        request = GenerateRequest(rid=str(i), input_ids=ids, params=params)
        runner.scheduler.add(Sequence(request.rid, request.input_ids, params, frozenset(), request.logprobs))
    spent = {"plan": 0.0, "model": 0.0}

    def timed(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> object:
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - started

        return run

    for _ in range(4):
        runner.step()
    runner.scheduler.plan = timed("plan", runner.scheduler.plan)  # type: ignore[method-assign]
    decoder.forward = timed("model", decoder.forward)  # type: ignore[method-assign]
    decoder.logits = timed("model", decoder.logits)  # type: ignore[method-assign]
    started = time.perf_counter()
    for _ in range(steps):
        assert len(runner.step()) == running
    total = time.perf_counter() - started
    per_step = {name: 1e3 * seconds / steps for name, seconds in spent.items()}
    return {"plan_ms": per_step["plan"], "model_ms": per_step["model"], "step_ms": 1e3 * total / steps,
            "rest_ms": 1e3 * total / steps - per_step["plan"] - per_step["model"]}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    folder = resolve(options.model)
    speed = asyncio.run(compare(folder, options.requests, options.prompt, options.new, options.repeats))
    for name, row in speed.items():
        speed_of = f"{row['seconds']:7.2f} s  {row['tokens_per_second']:7.0f} tok/s"
        print(f"{name:14s} {speed_of}  zerogap is {row['ours_over_this']:.2f}x of it")
    cost = scheduler_cost(256, 100)
    print("256 running, tiny model, per step: " + ", ".join(f"{name} {value:.2f}" for name, value in cost.items()))
    if options.out:
        about = {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}
        about["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
        workload = (
            f"{options.requests} requests, {options.prompt} prompt and {options.new} new tokens, {options.model}, fp32"
        )
        results = {"workload": workload, "speed": speed, "step_of_256_running": cost}
        options.out.write_text(json.dumps({"about": about, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()

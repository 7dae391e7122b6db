"""One GPU: which bits agree, and how fast each part is. Prints one table and writes JSON.

    python benchmarks/gpu.py [--only bits,linears,attention,rollout,train] [--model qwen3-0.6b] [--out FILE]

Workload R: 32 prompts x 8 samples, prompts of 60 to 180 tokens, response lengths drawn from N(740, 260) clipped to
64..1024, temperature 1, logprobs on, EOS ignored. Three repetitions, the third counts. Random bf16 weights.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import random
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from zerogap.bench.shapes import QWEN3_HF, SMOLLM2_HF
from zerogap.engine.gpu_runner import GpuRunner
from zerogap.engine.requests import SamplingParams, Sequence
from zerogap.model.config import ModelConfig
from zerogap.model.decoder import Decoder
from zerogap.model.layers import Linear
from zerogap.numerics.gpu import attention, certify, gemm, rows, vocabulary
from zerogap.numerics.gpu.packed import PackedRuns, packed_attend
from zerogap.numerics.matmul import LinearRoute

MODELS = {"qwen3-0.6b": QWEN3_HF, "smollm2-135m": SMOLLM2_HF}
COPY_BYTES_PER_SECOND = 4.3e12
CUDA = torch.device("cuda")


def microseconds(call: Callable[[], object], repeats: int = 20) -> float:
    for _ in range(3):
        call()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeats * 1e3


def noise(*shape: int, seed: int = 1) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(shape, device=CUDA, generator=generator).bfloat16()


def bits() -> dict[str, Any]:
    """Differing elements of what must be equal; each must be 0."""
    return products_agree() | attention_agrees(16, 8, 128) | attention_agrees(9, 3, 64) | rows_agree()


def products_agree() -> dict[str, Any]:
    out = {}
    for K, N in ((1024, 4096), (2048, 1024), (3072, 1024), (576, 960), (1536, 576)):
        x, w = noise(300, K), noise(N, K) / K**0.5
        reference = gemm.product(x, w, gemm.TILES[0])
        for tile in gemm.TILES[1:]:
            out[f"gemm {K}x{N} {tuple(tile)}"] = int((gemm.product(x, w, tile) != reference).sum())
    return out


def page_table(lens: list[int]) -> Tensor:
    """Blocks in random order; block 0 belongs to nobody."""
    pages = [-(-n // attention.KEY_BLOCK) for n in lens]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(3)).int() + 1
    table = torch.zeros(len(lens), max(pages), dtype=torch.int32)
    for b, part in enumerate(order.split(pages)):
        table[b, : len(part)] = part
    return table.to(CUDA)


def int32(values: Iterable[int]) -> Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=CUDA)


def attention_agrees(H: int, K: int, D: int) -> dict[str, Any]:
    """Packed training rows against paged prefill and decode, for each tile."""
    lens, page = [5, 63, 64, 65, 200, 777, 1100], attention.KEY_BLOCK
    table, first = page_table(lens), [0, *itertools.accumulate(lens)]
    q, k, v = noise(sum(lens), H, D), noise(sum(lens), K, D, seed=2), noise(sum(lens), K, D, seed=3)
    keys, values = (noise((int(table.max()) + 1) * page, K, D, seed=s) for s in (4, 5))
    for b, n in enumerate(lens):
        at = torch.arange(n, device=CUDA)
        slots = table[b, at // page].long() * page + at % page
        keys[slots], values[slots] = k[first[b] : first[b + 1]], v[first[b] : first[b + 1]]
    packed = attention.Segments(int32(first), int32(lens), max(lens), own_from_B=int32(first[:-1]))
    paged = attention.Segments(int32(first), int32(lens), max(lens), table_BJ=table)
    one = attention.Segments(int32(range(len(lens) + 1)), int32(lens), 1, table_BJ=table)
    last = torch.tensor([n - 1 for n in first[1:]], device=CUDA)
    reference = attention.attend(q, k, v, packed, D**-0.5, rows=64, warps=4)
    out = {}
    for rows_, warps in ((16, 1), (16, 4), (64, 4), (128, 8), (128, 4)):
        got = attention.attend(q, keys, values, paged, D**-0.5, rows=rows_, warps=warps)
        out[f"attention D={D} paged {rows_}/{warps}"] = int((got != reference).sum())
    for (rows_, warps), stages in itertools.product(((16, 1), (16, 2), (16, 4), (64, 4)), (1, 2, 3)):
        got = attention.attend(q[last], keys, values, one, D**-0.5, rows=rows_, warps=warps, stages=stages)
        out[f"attention D={D} decode {rows_}/{warps}, {stages} stages"] = int((got != reference[last]).sum())
    return out


def rows_agree() -> dict[str, Any]:
    out: dict[str, Any] = {}
    x, delta, weight = noise(300, 1024), noise(300, 1024, seed=2), noise(1024)
    whole = rows.add_rms_norm(x, delta, weight, 1e-6)
    for n in (1, 3, 17):
        part = rows.add_rms_norm(x[:n].contiguous(), delta[:n].contiguous(), weight, 1e-6)
        out[f"norm of {n} rows"] = sum(int((a != b[:n]).sum()) for a, b in zip(part, whole, strict=True))
    logits, temperature = noise(300, 151936) * 3, torch.full((300,), 0.7, device=CUDA)
    place = torch.zeros(300, dtype=torch.int64, device=CUDA)
    tokens, logprobs = vocabulary.draw(logits, temperature, torch.arange(300, device=CUDA), place)
    z = logits.gather(1, tokens[:, None]).squeeze(1).float() / temperature
    out["draw against log_sum_exp"] = int((z - vocabulary.log_sum_exp(logits, 0.7)[0] != logprobs).sum())
    exact = torch.log_softmax(logits.double() / temperature[:, None].double(), -1).gather(1, tokens[:, None])
    out["largest error of a logprob"] = float((logprobs - exact.squeeze(1)).abs().max())
    return out


def linears(config: ModelConfig) -> dict[str, Any]:
    out = {}
    started = time.perf_counter()
    found = certify.certify_gpu(
        tuple(sorted(set(config.linear_shapes))), config.attention_shape, config.vocab_size, torch.bfloat16
    )
    routes, out["failures"] = found.routes, found.failures
    out["seconds"] = time.perf_counter() - started
    for shape, route in routes.by_shape.items():
        for c in route.gpu_product.choices:
            name = "library" if c.tile is None else str(tuple(c.tile))
            out[f"{shape} rows<={c.rows}"] = [
                name,
                round(c.microseconds, 1),
                round(c.blas_microseconds, 1),
                c.blas_is_canonical,
            ]
    return out


def decode_attention(config: ModelConfig) -> dict[str, Any]:
    """256 sequences of 1 to 1100 tokens: microseconds, and keys and values over time as a share of the copy ceiling."""
    H, K, D = config.attention_shape[:3]
    source = random.Random(1)
    lens = [source.randrange(1, 1101) for _ in range(256)]
    table = page_table(lens)
    keys = noise((int(table.max()) + 1) * attention.KEY_BLOCK, K, D)
    values, q = torch.randn_like(keys), noise(256, H, D)
    segments = attention.Segments(int32(range(257)), int32(lens), 1, table_BJ=table)
    moved, out = 2 * sum(lens) * K * D * 2, {}
    for (rows_, warps), stages in itertools.product(((16, 1), (16, 2), (16, 4)), (1, 2, 3, 4)):
        tile = {"rows": rows_, "warps": warps, "stages": stages}
        us = microseconds(functools.partial(attention.attend, q, keys, values, segments, D**-0.5, **tile))
        out[str(tile)] = [round(us, 1), round(moved / us * 1e6 / COPY_BYTES_PER_SECOND, 3)]
    return out


def workload(vocab: int) -> tuple[list[list[int]], list[int]]:
    source = random.Random(7)
    prompts = [[source.randrange(vocab) for _ in range(source.randrange(60, 181))] for _ in range(32)]
    lengths = [min(1024, max(64, round(source.gauss(740, 260)))) for _ in range(256)]
    return prompts, lengths


def rollout(
    runner: GpuRunner, prompts: list[list[int]], lengths: list[int], seed: int
) -> tuple[list[Sequence], dict[str, float]]:
    sequences = []
    for i, length in enumerate(lengths):
        params = SamplingParams(max_new_tokens=length, temperature=1.0, seed=seed * 1000 + i, ignore_eos=True)
        sequences.append(Sequence(str(i), tuple(prompts[i // 8]), params, frozenset()))
    runner.weights_changed()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for sequence in sequences:
        runner.scheduler.add(sequence)
    launches = 0
    while runner.scheduler.running or runner.scheduler.waiting:
        runner.step()
        launches += 1
    seconds = time.perf_counter() - started
    assert all(s.num_output == n and s.error is None for s, n in zip(sequences, lengths, strict=True))
    return sequences, {
        "seconds": seconds,
        "tokens_per_second": sum(lengths) / seconds,
        "launches": launches,
    }


def scores(decoder: Decoder, part: list[Sequence], temperature: float) -> tuple[Tensor, Tensor]:
    """(trainer's, rollout's) logprobs of every response token of these sequences, packed into one training forward."""
    runs = PackedRuns.build([len(s.tokens) for s in part], CUDA)
    ids = torch.tensor([t for s in part for t in s.tokens], device=CUDA)
    hidden = decoder(ids, runs.positions_N, packed_attend(runs, decoder.attention_scale))
    source, cursor = [], 0
    for s in part:
        source += range(cursor + len(s.prompt_ids) - 1, cursor + len(s.tokens) - 1)
        cursor += len(s.tokens)
    targets = torch.tensor([t for s in part for t in s.output_ids], device=CUDA)
    own = hidden[torch.tensor(source, device=CUDA)]
    head = decoder.head_weight, targets, temperature, decoder.head_route.gpu_product, 8192
    rolled = torch.tensor([p for s in part for p in s.logprobs], device=CUDA)
    return vocabulary.TokenLogprobs.apply(own, *head)[0], rolled


@torch.no_grad()
def gap(decoder: Decoder, sequences: list[Sequence], temperature: float) -> dict[str, float]:
    """Every sampled token, scored by the training forward in packs of 16 sequences."""
    differing, tokens, worst = 0, 0, 0.0
    for start in range(0, len(sequences), 16):
        trainer, rolled = scores(decoder, sequences[start : start + 16], temperature)
        differing += int((trainer != rolled).sum())
        worst = max(worst, float((trainer - rolled).abs().max()))
        tokens += len(rolled)
    return {"tokens": tokens, "differing": differing, "largest": worst}


def packs_of(sequences: list[Sequence], tokens_per_pack: int) -> list[list[Sequence]]:
    packs, size = [[]], 0
    for s in sequences:
        if size + len(s.tokens) > tokens_per_pack:
            packs.append([])
            size = 0
        packs[-1].append(s)
        size += len(s.tokens)
    return packs


def train(decoder: Decoder, sequences: list[Sequence], tokens_per_pack: int) -> dict[str, float]:
    """Forward, backward and AdamW over fp32 masters on all that was rolled out; the third of three counts."""
    params = list(decoder.parameters())
    masters = [torch.nn.Parameter(p.detach().float()) for p in params]
    optimizer = torch.optim.AdamW(masters, lr=1e-6, fused=True)
    packs, out = packs_of(sequences, tokens_per_pack), {}
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for part in packs:
            trainer, rolled = scores(decoder, part, 1.0)
            ((trainer - rolled).exp() * torch.randn_like(trainer)).sum().backward()
        for master, p in zip(masters, params, strict=True):
            master.grad, p.grad = p.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, p in zip(masters, params, strict=True):
                p.copy_(master)
                master.grad = None
        torch.cuda.synchronize()
        seconds, total = time.perf_counter() - started, sum(len(s.tokens) for s in sequences)
        flops = 6 * sum(p.numel() for p in params) * total
        out = {"tokens": total, "seconds": seconds, "tflops": flops / seconds / 1e12, "packs": len(packs)}
        out["peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
        print("train", out, flush=True)
    return out


class Report:
    """Results by name; a part that fails is reported and does not cost the others."""

    def __init__(self, out: Path | None, **about: Any) -> None:
        self.results: dict[str, Any] = {"about": about}
        self._out = out

    def add(self, name: str, call: Callable[[], Any]) -> None:
        started = time.perf_counter()
        try:
            self.results[name] = call()
            print(
                name, json.dumps(self.results[name], indent=1), f"({time.perf_counter() - started:.1f} s)", flush=True
            )
        except Exception:  # noqa: BLE001
            self.results[name] = traceback.format_exc()
            print(self.results[name], flush=True)
        if self._out:
            self._out.write_text(json.dumps(self.results, indent=2, default=str) + "\n")


def with_library_defaults(decoder: Decoder) -> None:
    """The same model with whatever kernels the library picks, split-K and all: what exactness is compared with."""
    torch.backends.cuda.preferred_blas_library("default")
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    plain = LinearRoute("gpu", 1, 1, F.linear)
    for module in decoder.modules():
        if isinstance(module, Linear):
            module.route = plain
    decoder.head_route = plain


def step_profile(runner: GpuRunner, config: ModelConfig) -> dict[str, Any]:
    """Microseconds of one decode step of 256 rows with about 500 keys each, by kernel."""
    prompts, _ = workload(config.vocab_size)
    for i in range(256):
        params = SamplingParams(max_new_tokens=600, temperature=1.0, seed=i, ignore_eos=True)
        runner.scheduler.add(Sequence(str(i), tuple(prompts[i // 8]), params, frozenset()))
    for _ in range(26):
        runner.step()
    steps = 16
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        runner.step()
        torch.cuda.synchronize()
    spent: dict[str, float] = {}
    for found in profile.key_averages():
        name = found.key.split("<")[0][:60]
        spent[name] = spent.get(name, 0.0) + found.self_device_time_total / steps
    runner.scheduler.remove([*runner.scheduler.running, *runner.scheduler.waiting])
    ordered = sorted(spent.items(), key=lambda item: -item[1])
    return {"all": round(sum(spent.values()), 1)} | {name: round(us, 1) for name, us in ordered[:14] if us > 0.5}


def transformers_step(config: ModelConfig, hf: dict[str, Any], sequences: list[Sequence]) -> dict[str, float]:
    """The field's parts on the same tokens: transformers in bf16 with sdpa, 8 sequences a micro-batch sorted by length,
    the loss over chunks of the vocabulary's rows, fused AdamW. The third of three counts.
    """
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**{k: v for k, v in hf.items() if k != "model_type"})).to(CUDA, torch.bfloat16)
    model.config._attn_implementation = "sdpa"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    order, seconds = sorted(sequences, key=lambda s: len(s.tokens)), 0.0
    for _ in range(3):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for start in range(0, len(order), 8):
            part = order[start : start + 8]
            width = max(len(s.tokens) for s in part)
            ids = torch.tensor([s.tokens + [0] * (width - len(s.tokens)) for s in part], device=CUDA)
            mask = torch.tensor([[1] * len(s.tokens) + [0] * (width - len(s.tokens)) for s in part], device=CUDA)
            hidden = model.model(input_ids=ids, attention_mask=mask).last_hidden_state
            rows, targets = hidden[:, :-1][mask[:, 1:].bool()], ids[:, 1:][mask[:, 1:].bool()]
            leaf = rows.detach().requires_grad_()
            for chunk in range(0, len(rows), 4096):
                logits = model.lm_head(leaf[chunk : chunk + 4096])
                F.cross_entropy(logits.float(), targets[chunk : chunk + 4096], reduction="sum").backward()
            rows.backward(leaf.grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - started
        print("transformers", seconds, flush=True)
    return {"seconds": seconds, "tokens": sum(len(s.tokens) for s in sequences)}


def random_decoder(config: ModelConfig) -> Decoder:
    decoder = Decoder(config, dtype=torch.bfloat16, device=CUDA)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, view in decoder.hf_tensors().items():
            if name.endswith("norm.weight"):
                view.fill_(1.0)
            else:
                view.normal_(0, 0.02)
    return decoder


def three_rollouts(runner: GpuRunner, config: ModelConfig) -> tuple[list[Sequence], dict[str, Any]]:
    prompts, lengths = workload(config.vocab_size)
    runs, found = [], []
    for seed in range(3):
        found, figures = rollout(runner, prompts, lengths, seed)
        print("rollout", figures, flush=True)
        runs.append(figures)
    return found, {"third": runs[-1], "all": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="bits,linears,attention,rollout,train,library")
    parser.add_argument("--model", default="qwen3-0.6b", choices=sorted(MODELS))
    parser.add_argument("--tokens-per-pack", type=int, default=24576)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    config = ModelConfig.from_hf(MODELS[options.model])
    wanted = set(options.only.split(","))
    report = Report(options.out, gpu=torch.cuda.get_device_name(), torch=torch.__version__, model=options.model)
    parts = {"bits": bits, "attention": lambda: decode_attention(config), "linears": lambda: linears(config)}
    for name in parts.keys() & wanted:
        report.add(name, parts[name])
    if not wanted & {"rollout", "train"}:
        return
    decoder = random_decoder(config)
    runner = GpuRunner(decoder, num_kv_tokens=400_000, max_running=256, prefill_tokens=16384)
    sequences, figures = three_rollouts(runner, config)
    report.add("rollout", lambda: figures)
    report.add("gap", lambda: gap(decoder, sequences, 1.0))
    report.add("decode step", lambda: step_profile(runner, config))
    if "train" in wanted:
        report.add("train", lambda: train(decoder, sequences, options.tokens_per_pack))
        torch.cuda.empty_cache()
        report.add("transformers", lambda: transformers_step(config, MODELS[options.model], sequences))
    if "library" in wanted:
        with_library_defaults(decoder)
        plain = GpuRunner(decoder, num_kv_tokens=400_000, max_running=256, prefill_tokens=16384)
        report.add("rollout with library defaults", lambda: three_rollouts(plain, config)[1])


if __name__ == "__main__":
    main()

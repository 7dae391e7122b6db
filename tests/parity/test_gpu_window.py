"""Sliding windows and a soft cap on a GPU, in bfloat16: the kernel, then engine against training forward."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.double_decoder import double_gradients

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from parity.test_gpu import CUDA, LLAMA, QWEN3, decoder_of, run, sequences_of, trained_scores

from zerogap.config.schema import TrainerSettings
from zerogap.engine.gpu_runner import GpuRunner
from zerogap.engine.requests import LogprobOptions, SamplingParams, Sequence
from zerogap.errors import ConfigError
from zerogap.numerics.gpu import vocabulary
from zerogap.numerics.gpu.attention import KEY_BLOCK, Segments, attend
from zerogap.numerics.gpu.packed import PackedRuns, packed_attend
from zerogap.trainer.trainer import Trainer

pytestmark = pytest.mark.gpu
MISTRAL = replace(LLAMA, model_type="mistral")
MODELS = {
    "qwen3, one layer": replace(QWEN3, windows=(20, None)),
    "qwen3, the other": replace(QWEN3, windows=(None, KEY_BLOCK)),
    "mistral": replace(MISTRAL, windows=(KEY_BLOCK + 1, KEY_BLOCK + 1)),
    "soft cap": replace(LLAMA, attn_logit_softcapping=5.0),
    "both": replace(QWEN3, windows=(33, 33), attn_logit_softcapping=5.0),
}
WINDOWS = (1, 2, 16, 63, 64, 65, 127, 128, 129, 300)
H, K, D = 8, 2, 64
LENS = (1, 63, 64, 65, 130, 290)


def int32(values) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.int32, device=CUDA)


def noise(seed: int = 0) -> tuple[torch.Tensor, ...]:
    made = torch.Generator(CUDA).manual_seed(seed)
    return tuple(torch.randn(sum(LENS), n, D, device=CUDA, generator=made).to(torch.bfloat16) * 2 for n in (H, K, K))


def packed_segments() -> Segments:
    first = int32([0, *torch.tensor(LENS).cumsum(0).tolist()])
    return Segments(first, int32(LENS), max(LENS), own_from_B=first[:-1].contiguous())


class Paged:
    """The keys and values of all sequences in blocks whose order is random."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        pages = [-(-n // KEY_BLOCK) for n in LENS]
        order = (torch.randperm(sum(pages), generator=torch.Generator().manual_seed(1)) + 1).tolist()
        self.tables = [[order.pop() for _ in range(n)] for n in pages]
        self.keys, self.values = (
            torch.zeros((sum(pages) + 1) * KEY_BLOCK, K, D, dtype=k.dtype, device=CUDA) for _ in range(2)
        )
        cursor = 0
        for table, n in zip(self.tables, LENS, strict=True):
            at = torch.arange(n)
            slots = (torch.tensor(table)[at // KEY_BLOCK] * KEY_BLOCK + at % KEY_BLOCK).to(CUDA)
            self.keys[slots], self.values[slots] = k[cursor : cursor + n], v[cursor : cursor + n]
            cursor += n

    def attend(self, q: torch.Tensor, b: int, start: int, stop: int, **how) -> torch.Tensor:
        """Queries start to stop-1 of sequence b."""
        first = sum(LENS[:b]) + start
        segments = Segments(
            int32([0, stop - start]), int32([stop]), stop - start, table_BJ=int32([*self.tables[b], 0])[None]
        )
        return attend(q[first : first + stop - start], self.keys, self.values, segments, D**-0.5, **how)


@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("window", WINDOWS)
def test_packed_training_prefill_chunks_of_it_and_decode_have_the_same_bits_in_any_tile(window, soft_cap):
    how = {"window": window, "soft_cap": soft_cap}
    q, k, v = noise()
    whole = attend(q, k, v, packed_segments(), D**-0.5, **how)
    assert whole.isfinite().all()
    for rows, warps in ((16, 4), (32, 4), (64, 4), (128, 8)):
        assert torch.equal(attend(q, k, v, packed_segments(), D**-0.5, rows=rows, warps=warps, **how), whole)
    paged = Paged(k, v)
    for b, n in enumerate(LENS):
        own = whole[sum(LENS[:b]) : sum(LENS[: b + 1])]
        for chunk in (1, 7, 64, 100, 1000):
            parts = [paged.attend(q, b, s, min(n, s + chunk), **how) for s in range(0, n, chunk)]
            assert torch.equal(torch.cat(parts), own), (n, chunk)


@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("window", [None, *WINDOWS])
def test_the_kernel_computes_the_attention_of_the_definition(window, soft_cap):
    q, k, v = noise()
    out = attend(q, k, v, packed_segments(), D**-0.5, window=window, soft_cap=soft_cap)
    cursor = 0
    for n in LENS:
        own = slice(cursor, cursor + n)
        cursor += n
        scores = torch.einsum("qhd,khd->hqk", q[own].double(), k[own].double().repeat_interleave(H // K, 1)) * D**-0.5
        if soft_cap is not None:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        distance = torch.arange(n, device=CUDA)[:, None] - torch.arange(n, device=CUDA)
        hidden = (distance < 0) | (distance >= (window or n))
        p = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        exact = torch.einsum("hqk,khd->qhd", p, v[own].double().repeat_interleave(H // K, 1))
        assert (out[own].double() - exact).norm() / exact.norm() < 0.01


def test_a_window_over_all_keys_has_the_bits_of_none():
    q, k, v = noise()
    full = attend(q, k, v, packed_segments(), D**-0.5)
    assert torch.equal(attend(q, k, v, packed_segments(), D**-0.5, window=max(LENS)), full)
    assert not torch.equal(attend(q, k, v, packed_segments(), D**-0.5, window=max(LENS) - 1), full)


def test_blocks_wholly_before_the_window_are_not_read():
    q, k, v = noise()
    paged, b, window = Paged(k, v), len(LENS) - 1, 100
    n = LENS[b]
    expected = paged.attend(q, b, n - 1, n, window=window)
    for block in paged.tables[b][: (n - window) // KEY_BLOCK]:
        paged.keys[block * KEY_BLOCK : (block + 1) * KEY_BLOCK] = float("nan")
    assert torch.equal(paged.attend(q, b, n - 1, n, window=window), expected)


def test_a_shared_prefix_has_the_bits_of_a_sequence_of_its_own():
    q, k, v = noise()
    n, shared = LENS[-1], 100
    own = slice(sum(LENS[:-1]), sum(LENS))
    alone = Segments(int32([0, n]), int32([n]), n, own_from_B=int32([0]))
    split = Segments(
        int32([0, n - shared]), int32([n]), n - shared,
        shared_B=int32([shared]), shared_from_B=int32([0]), own_from_B=int32([shared]),
    )  # fmt: skip
    for window in (20, 64, 150):
        whole = attend(q[own], k[own], v[own], alone, D**-0.5, window=window)
        tail = attend(q[own][shared:], k[own], v[own], split, D**-0.5, window=window)
        assert torch.equal(tail, whole[shared:])


@pytest.mark.parametrize("count", [1, 7, 65])
@pytest.mark.parametrize("name", MODELS)
def test_what_the_engine_recorded_is_what_the_training_forward_computes(name, count):
    """Prefill, chunks of it, shared prompts, decode in graphs, a cache in random order: gap exactly 0."""
    decoder = decoder_of(MODELS[name])
    runner = GpuRunner(decoder, num_kv_tokens=40_000, max_running=64, prefill_tokens=333)
    sequences = sequences_of(MODELS[name], count, new=90, temperature=0.7)
    run(runner, sequences)
    assert [p for s in sequences for p in s.logprobs] == trained_scores(decoder, sequences, 0.7)


@pytest.mark.parametrize("name", ["mistral", "both"])
def test_a_response_scored_by_prefill_has_the_bits_of_its_generation(name):
    decoder = decoder_of(MODELS[name])
    runner = GpuRunner(decoder, num_kv_tokens=40_000, max_running=64, prefill_tokens=333)
    generated = sequences_of(MODELS[name], 12, new=60, temperature=1.0)
    run(runner, generated)
    params = SamplingParams(max_new_tokens=0, temperature=1.0, seed=0)
    scored = [
        Sequence(f"s{s.rid}", tuple(s.tokens), params, frozenset(), LogprobOptions(prompt_start=len(s.prompt_ids) - 1))
        for s in generated
    ]
    for sequence in scored:
        runner.scheduler.add(sequence)
    while runner.scheduler.running or runner.scheduler.waiting:
        runner.step()
    found = [s.scores.record(s.prompt_ids, 0, alternatives=False).logprobs[1:] for s in scored]
    assert found == [s.logprobs for s in generated]


@pytest.mark.parametrize("name", ["qwen3, one layer", "qwen3, the other", "mistral"])
def test_gradients_are_those_of_a_plain_model_in_double_precision_and_repeat(name):
    decoder = decoder_of(MODELS[name])
    sequences = sequences_of(MODELS[name], 6, new=60, temperature=1.0)
    run(GpuRunner(decoder, num_kv_tokens=40_000, max_running=64, prefill_tokens=4096), sequences)
    runs = PackedRuns.build([len(s.tokens) for s in sequences], CUDA)
    ids = torch.tensor([t for s in sequences for t in s.tokens], device=CUDA)
    rows, cursor = [], 0
    for s in sequences:
        rows += range(cursor + len(s.prompt_ids) - 1, cursor + len(s.tokens) - 1)
        cursor += len(s.tokens)
    targets = torch.tensor([t for s in sequences for t in s.output_ids], device=CUDA)
    grads = []
    for _ in range(2):
        decoder.zero_grad()
        hidden = decoder(ids, runs.positions_N, packed_attend(runs, decoder.attention_scale))
        head = decoder.head_weight, targets, 1.0, decoder.head_route.gpu_product, 1000
        vocabulary.TokenLogprobs.apply(hidden[torch.tensor(rows, device=CUDA)], *head)[0].sum().backward()
        grads.append({name: p.grad.clone() for name, p in decoder.named_parameters()})
    assert all(torch.equal(grads[0][name], grads[1][name]) for name in grads[0])
    exact = double_gradients(decoder, sequences)
    for parameter, found in grads[0].items():
        error = (found.double().cpu() - exact[parameter]).norm() / exact[parameter].norm()
        assert error < 0.03, (parameter, float(error))


def test_the_fingerprint_names_the_windows_of_the_layers_and_the_soft_cap():
    certificates = [decoder_of(config).certificate for config in (QWEN3, LLAMA, MISTRAL, *MODELS.values())]
    assert all(c.ok for c in certificates)
    assert len({c.fingerprint for c in certificates}) == len(MODELS) + 2  # LLAMA and MISTRAL compute alike


def test_a_soft_cap_is_not_trained():
    with pytest.raises(ConfigError, match="attn_logit_softcapping"):
        Trainer(decoder_of(MODELS["soft cap"]), TrainerSettings(), num_steps=1, max_new_tokens=16)

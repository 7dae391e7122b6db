"""The chain of agreement on a GPU, in bfloat16: kernels, then engine against training forward. Needs a CUDA device."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from support.tiny import TINY, TINY_QWEN3

if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

from zerogap.engine.gpu_runner import GpuRunner
from zerogap.engine.requests import LogprobOptions, SamplingParams, Sequence
from zerogap.model.decoder import Decoder
from zerogap.numerics.gpu import vocabulary
from zerogap.numerics.gpu.packed import PackedRuns, packed_attend

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
LLAMA = replace(TINY, head_dim=64, hidden_size=192, num_heads=6, num_kv_heads=2, vocab_size=512, intermediate_size=384)
QWEN3 = replace(TINY_QWEN3, head_dim=128, hidden_size=256, num_heads=4, num_kv_heads=2, vocab_size=6000)


def decoder_of(config) -> Decoder:
    decoder = Decoder(config, dtype=torch.bfloat16, device=CUDA)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, view in decoder.hf_tensors().items():
            noise = torch.randn(view.shape, device=CUDA)
            view.copy_(1 + 0.1 * noise if name.endswith("norm.weight") else 0.1 * noise)
    return decoder


def sequences_of(
    config, count: int, *, new: int, temperature: float, seed: int = 0, longest_prompt: int = 150, shortest: int = 1
) -> list[Sequence]:
    source = random.Random(seed)
    shared = [source.randrange(config.vocab_size) for _ in range(70)]
    made = []
    for i in range(count):
        own = [source.randrange(config.vocab_size) for _ in range(source.randrange(1, longest_prompt))]
        prompt = shared if i % 3 == 0 and longest_prompt > 70 else own
        params = SamplingParams(
            max_new_tokens=source.randrange(shortest, new),
            temperature=temperature,
            seed=seed * 1000 + i,
            ignore_eos=True,
        )
        made.append(Sequence(str(i), tuple(prompt), params, frozenset()))
    return made


def run(runner: GpuRunner, sequences: list[Sequence]) -> None:
    for sequence in sequences:
        runner.scheduler.add(sequence)
    while runner.scheduler.running or runner.scheduler.waiting:
        runner.step()
    assert all(s.error is None and s.num_output == s.params.max_new_tokens for s in sequences)


@torch.no_grad()
def trained_scores(decoder: Decoder, sequences: list[Sequence], temperature: float) -> list[float]:
    runs = PackedRuns.build([len(s.tokens) for s in sequences], CUDA)
    ids = torch.tensor([t for s in sequences for t in s.tokens], device=CUDA)
    hidden = decoder(ids, runs.positions_N, packed_attend(runs, decoder.attention_scale))
    rows, cursor = [], 0
    for s in sequences:
        rows += range(cursor + len(s.prompt_ids) - 1, cursor + len(s.tokens) - 1)
        cursor += len(s.tokens)
    targets = torch.tensor([t for s in sequences for t in s.output_ids], device=CUDA)
    head = decoder.head_weight, targets, temperature, decoder.head_route.gpu_product, 1000
    return vocabulary.TokenLogprobs.apply(hidden[torch.tensor(rows, device=CUDA)], *head)[0].tolist()


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("config", [LLAMA, QWEN3], ids=["llama", "qwen3"])
@pytest.mark.parametrize("count", [1, 7, 65, 130])
def test_what_the_engine_recorded_is_what_the_training_forward_computes(config, count, temperature):
    """Prefill, chunks of it, shared prompts, decode in graphs, a cache in random order: gap exactly 0."""
    decoder = decoder_of(config)
    runner = GpuRunner(decoder, num_kv_tokens=40_000, max_running=64, prefill_tokens=333)
    sequences = sequences_of(config, count, new=90, temperature=temperature)
    run(runner, sequences)
    assert [p for s in sequences for p in s.logprobs] == trained_scores(decoder, sequences, temperature)


def test_tokens_do_not_depend_on_the_batch():
    decoder = decoder_of(QWEN3)
    runner = GpuRunner(decoder, num_kv_tokens=40_000, max_running=64, prefill_tokens=4096)
    together = sequences_of(QWEN3, 40, new=60, temperature=1.0)
    run(runner, together)
    alone = sequences_of(QWEN3, 40, new=60, temperature=1.0)
    for sequence in alone:
        runner.weights_changed()
        run(runner, [sequence])
    assert [(s.tokens, s.logprobs) for s in alone] == [(s.tokens, s.logprobs) for s in together]


def test_a_crowded_cache_retracts_and_changes_nothing():
    decoder = decoder_of(LLAMA)
    roomy = GpuRunner(decoder, num_kv_tokens=40_000, max_running=64, prefill_tokens=4096)
    crowded = GpuRunner(decoder, num_kv_tokens=1024, max_running=64, prefill_tokens=4096)
    one, two = (sequences_of(LLAMA, 30, new=300, temperature=1.0, longest_prompt=9, shortest=250) for _ in range(2))
    run(roomy, one)
    run(crowded, two)
    assert sum(s.num_retractions for s in two) > 0
    assert [(s.tokens, s.logprobs) for s in one] == [(s.tokens, s.logprobs) for s in two]


def test_truncation_restricts_the_choice_and_never_the_logprob():
    decoder = decoder_of(QWEN3)
    runner = GpuRunner(decoder, num_kv_tokens=40_000, max_running=64, prefill_tokens=4096)
    sequences = sequences_of(QWEN3, 24, new=40, temperature=1.0)
    cuts = ({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}, {})
    for i, sequence in enumerate(sequences):
        sequence.params = replace(sequence.params, **cuts[i % 4])
    run(runner, sequences)
    assert [p for s in sequences for p in s.logprobs] == trained_scores(decoder, sequences, 1.0)


def test_a_neighbour_with_penalties_changes_no_bit():
    """Its logits become fp32, in which the sum of a row may end in another bit than in bfloat16."""
    decoder = decoder_of(QWEN3)
    runner = GpuRunner(decoder, num_kv_tokens=40_000, max_running=64, prefill_tokens=4096)
    sequences = sequences_of(QWEN3, 24, new=40, temperature=1.0)
    for sequence in sequences[::2]:
        sequence.params = replace(sequence.params, frequency_penalty=0.5, logit_bias={7: 1.0})
        sequence.plain = False
    run(runner, sequences)
    untouched = sequences[1::2]
    assert [p for s in untouched for p in s.logprobs] == trained_scores(decoder, untouched, 1.0)


def test_a_response_scored_by_prefill_has_the_bits_of_its_generation():
    decoder = decoder_of(QWEN3)
    runner = GpuRunner(decoder, num_kv_tokens=40_000, max_running=64, prefill_tokens=333)
    generated = sequences_of(QWEN3, 12, new=60, temperature=1.0)
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


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_backward_repeats_bit_for_bit_with_activations_kept_or_computed_anew(checkpointing):
    decoder = decoder_of(QWEN3)
    sequences = sequences_of(QWEN3, 20, new=80, temperature=1.0)
    run(GpuRunner(decoder, num_kv_tokens=40_000, max_running=64, prefill_tokens=4096), sequences)
    runs = PackedRuns.build([len(s.tokens) for s in sequences], CUDA)
    ids = torch.tensor([t for s in sequences for t in s.tokens], device=CUDA)
    grads = []
    for again in (False, checkpointing, checkpointing):
        decoder.activation_checkpointing = again
        decoder.zero_grad()
        hidden = decoder(ids, runs.positions_N, packed_attend(runs, decoder.attention_scale))
        hidden.float().square().sum().backward()
        grads.append([p.grad.clone() for p in decoder.parameters()])
    assert all(torch.equal(a, b) for other in grads[1:] for a, b in zip(grads[0], other, strict=True))


def test_gradients_are_those_of_a_plain_model_in_double_precision():
    decoder = decoder_of(QWEN3)
    sequences = sequences_of(QWEN3, 6, new=60, temperature=1.0)
    run(GpuRunner(decoder, num_kv_tokens=40_000, max_running=64, prefill_tokens=4096), sequences)
    runs = PackedRuns.build([len(s.tokens) for s in sequences], CUDA)
    ids = torch.tensor([t for s in sequences for t in s.tokens], device=CUDA)

    def loss(hidden, product):
        rows, cursor = [], 0
        for s in sequences:
            rows += range(cursor + len(s.prompt_ids) - 1, cursor + len(s.tokens) - 1)
            cursor += len(s.tokens)
        targets = torch.tensor([t for s in sequences for t in s.output_ids], device=CUDA)
        return product(hidden[torch.tensor(rows, device=CUDA)], targets).sum()

    def ours(hidden, targets):
        return vocabulary.TokenLogprobs.apply(
            hidden, decoder.head_weight, targets, 1.0, decoder.head_route.gpu_product, 1000
        )[0]

    loss(decoder(ids, runs.positions_N, packed_attend(runs, decoder.attention_scale)), ours).backward()
    from support.double_decoder import double_gradients  # noqa: PLC0415

    exact = double_gradients(decoder, sequences)
    for name, parameter in decoder.named_parameters():
        wanted = exact[name]
        error = (parameter.grad.double().cpu() - wanted).norm() / wanted.norm()
        assert error < 0.03, (name, float(error))

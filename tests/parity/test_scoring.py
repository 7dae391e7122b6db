"""A response scored by prefill has the bits of its generation; what is reported of a draw is defined."""

from __future__ import annotations

import itertools
import random
import re

import pytest
import torch
from support.scoring import random_ids, score_packed
from support.tiny import TINY_QWEN3, TINY_UNTIED, tiny_decoder

from zerogap.engine.requests import LogprobOptions, SamplingParams, Sequence
from zerogap.engine.runner import Runner
from zerogap.numerics.attention import TreePlan, tree_attend
from zerogap.numerics.logprob import full_logprobs
from zerogap.numerics.sampling import adjust

COUNTER = itertools.count()
SIDES = LogprobOptions(top=3, token_ids=(40, 2))


@pytest.fixture(scope="module")
def decoder():
    return tiny_decoder(TINY_QWEN3)


def make_runner(decoder, **options):
    decoder.prepack()
    return Runner(decoder, **({"num_kv_tokens": 4096, "max_running": 64, "prefill_tokens": 256} | options))


def sequence(prompt, options=LogprobOptions(), *, stops=(), **params):  # noqa: B008  frozen
    return Sequence(str(next(COUNTER)), tuple(prompt), SamplingParams(**params), frozenset(stops), options)


def scorer(prompt, response, start=None, **options):
    start = len(prompt) - 1 if start is None else start
    return sequence((*prompt, *response), LogprobOptions(prompt_start=start, **options), max_new_tokens=0)


def run(runner, sequences):
    for one in sequences:
        runner.scheduler.add(one)
    for _ in range(5000):
        if not (runner.scheduler.waiting or runner.scheduler.running):
            return sequences
        runner.step()
    raise AssertionError("the engine did not finish")


def prompts(count, seed=0):
    rng = random.Random(seed)
    return [random_ids(rng, rng.randrange(1, 90)) for _ in range(count)]


def generated(decoder, options=LogprobOptions(), **params):  # noqa: B008  frozen
    kept = {"max_new_tokens": 40} | params
    return run(make_runner(decoder), [sequence(p, options, seed=i, **kept) for i, p in enumerate(prompts(12))])


def test_a_response_scored_by_prefill_has_the_bits_of_its_generation(decoder):
    """Reference 2.6: `max_new_tokens: 0`, prompt and response as the prompt, the first entry dropped."""
    made = generated(decoder)
    scored = run(make_runner(decoder), [scorer(s.prompt_ids, s.output_ids) for s in made])
    assert [s.scores.logprobs for s in scored] == [s.logprobs for s in made]
    assert all(s.num_output == 0 and s.finish_reason == "length" for s in scored)


@pytest.mark.parametrize(
    "options",
    [
        {"prefill_tokens": 7},
        {"max_running": 1},
        {"prefill_tokens": 33, "max_running": 5},
        {"num_kv_tokens": 160, "prefill_tokens": 3},
    ],
    ids=str,
)
def test_chunks_batches_and_pressure_change_no_score(decoder, options):
    """B10: also when retracts throw half-scored prompts back."""
    made = generated(decoder)
    runner = make_runner(decoder, **options)
    scored = [scorer(s.prompt_ids, s.output_ids) for s in made]
    busy = [sequence(p, seed=99, max_new_tokens=30) for p in prompts(12, seed=7)]
    run(runner, [one for pair in zip(busy, scored, strict=True) for one in pair])
    assert [s.scores.logprobs for s in scored] == [s.logprobs for s in made]
    assert ("num_kv_tokens" in options) == any(s.num_retractions for s in scored)


def test_a_cached_prefix_serves_scores_up_to_their_start_and_changes_no_bit(decoder):
    runner = make_runner(decoder)
    made = run(runner, [sequence(p, seed=i, max_new_tokens=40) for i, p in enumerate(prompts(12))])
    scored = run(runner, [scorer(s.prompt_ids, s.output_ids) for s in made])
    assert [s.scores.logprobs for s in scored] == [s.logprobs for s in made]
    assert [s.num_cached for s in scored] == [(len(s.prompt_ids) - 1) // 16 * 16 for s in made]
    again = run(runner, [scorer(s.prompt_ids, s.output_ids) for s in made for _ in range(2)])
    assert [s.scores.logprobs for s in again] == [s.logprobs for s in made for _ in range(2)]


def test_every_start_gives_the_same_scores_of_the_tokens_after_it(decoder):
    prompt = prompts(1, seed=5)[0][:23]
    starts = range(len(prompt) + 1)
    for runner in (make_runner(decoder), make_runner(decoder, prefill_tokens=16)):
        scored = run(runner, [scorer(prompt, (), start) for start in starts])
        whole = scored[0].scores.logprobs
        with torch.no_grad():
            trained = score_packed(decoder, [prompt[:1]], [[prompt[1:]]])[0].tolist()
        assert whole == trained
        assert [s.scores.logprobs for s in scored] == [whole[start:] for start in starts]


def test_a_generating_request_scores_its_prompt_too_and_generates_what_it_would_have(decoder):
    plain, asking = generated(decoder), generated(decoder, LogprobOptions(prompt_start=0, top=2))
    assert [(s.output_ids, s.logprobs) for s in asking] == [(s.output_ids, s.logprobs) for s in plain]
    for s in asking:
        record = s.scores.record(s.prompt_ids, 0, alternatives=True)
        assert len(record) == len(s.prompt_ids) == len(record.alternatives)
        assert len(s.alternatives) == s.num_output


def test_without_the_temperature_generation_and_scoring_agree_at_any_temperature(decoder):
    """Section 11: `return_original_logprob` leaves the temperature out; the tokens are those drawn with it."""
    warm = generated(decoder, temperature=0.7)
    original = generated(decoder, LogprobOptions(original=True), temperature=0.7)
    assert [s.output_ids for s in original] == [s.output_ids for s in warm]
    assert [s.logprobs for s in original] != [s.logprobs for s in warm]
    scored = run(make_runner(decoder), [scorer(s.prompt_ids, s.output_ids) for s in original])
    assert [s.scores.logprobs for s in scored] == [s.logprobs for s in original]


@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 1}, {"min_p": 0.3}], ids=str)
def test_truncated_and_greedy_draws_report_the_whole_vocabulary(decoder, params):
    """A4, A10: of top-5 with top_k 1 every alternative has a finite logprob, and the ratio to the trainer is 1."""
    made = generated(decoder, LogprobOptions(top=5), **params)
    with torch.no_grad():
        trained = score_packed(decoder, [s.prompt_ids for s in made], [[s.output_ids] for s in made])
    assert [t.tolist() for t in trained] == [s.logprobs for s in made]
    for s in made:
        for token, logprob, alternatives in zip(s.output_ids, s.logprobs, s.alternatives, strict=True):
            assert len(alternatives.top) == 5 and all(value > -100 for value, _ in alternatives.top)
            if params.get("top_k") == 1 or params.get("temperature") == 0:
                assert (logprob, token) == alternatives.top[0]


def trainer_logits(decoder, prompt, response):
    """The training forward's logits at every token of the response."""
    plan = TreePlan.build([len(prompt)], [[len(response)]])
    ids = torch.tensor([*prompt, *response])
    with torch.no_grad():
        hidden = decoder(ids, plan.positions_N, tree_attend(plan, decoder.attention_scale))
        return decoder.logits(hidden[len(prompt) - 1 : len(prompt) - 1 + len(response)])


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("original", [False, True])
def test_alternatives_come_from_the_distribution_of_the_token_itself(decoder, temperature, original):
    options = LogprobOptions(top=4, token_ids=(40, 2), original=original)
    for s in generated(decoder, options, temperature=temperature)[:4]:
        logits = trainer_logits(decoder, s.prompt_ids, s.output_ids)
        rows = full_logprobs(logits, 1.0 if original else temperature)
        for row, token, logprob, found in zip(rows, s.output_ids, s.logprobs, s.alternatives, strict=True):
            assert logprob == row[token].item()
            assert found.asked == [(row[40].item(), 40), (row[2].item(), 2)]
            best = row.sort(descending=True, stable=True)
            assert found.top == list(zip(best[0][:4].tolist(), best[1][:4].tolist(), strict=True))


def test_alternatives_of_a_scored_response_are_those_of_its_generation(decoder):
    made = generated(decoder, SIDES)
    scored = run(make_runner(decoder), [scorer(s.prompt_ids, s.output_ids, top=3, token_ids=(40, 2)) for s in made])
    assert [s.scores.alternatives for s in scored] == [s.alternatives for s in made]


PENALTIES = [
    {"frequency_penalty": 0.8},
    {"presence_penalty": -1.5},
    {"repetition_penalty": 1.3},
    {"logit_bias": {5: 2.5, 2: -30.0}},
    {"frequency_penalty": -0.4, "presence_penalty": 1.0, "repetition_penalty": 0.7, "logit_bias": {9: -1.0}},
]


@pytest.mark.parametrize("params", PENALTIES, ids=str)
@pytest.mark.parametrize("original", [False, True])
def test_with_penalties_the_reported_logprob_is_that_of_the_penalised_logits(decoder, params, original):
    """Section 11: z is the logits after penalties and bias; log_softmax(z / T), or of z alone, over all tokens."""
    temperature = 0.8
    made = generated(decoder, LogprobOptions(original=original), temperature=temperature, **params)
    plain = generated(decoder, temperature=temperature)
    assert [s.output_ids for s in made] != [s.output_ids for s in plain]
    for s in made:
        logits = trainer_logits(decoder, s.prompt_ids, s.output_ids)
        replay = sequence(s.prompt_ids, **params)
        for k, token in enumerate(s.output_ids):
            z = adjust(logits[k : k + 1], [replay.adjustment])
            assert full_logprobs(z, 1.0 if original else temperature)[0, token].item() == s.logprobs[k]
            replay.append(token, 0.0, 0)


def test_a_penalised_neighbour_changes_no_bit_of_the_others(decoder):
    plain = generated(decoder)
    rows = [sequence(p, seed=i, max_new_tokens=40) for i, p in enumerate(prompts(12))]
    others = [sequence(p, seed=3, max_new_tokens=40, **PENALTIES[i % 5]) for i, p in enumerate(prompts(8, seed=3))]
    run(make_runner(decoder), [one for pair in itertools.zip_longest(rows, others) for one in pair if one])
    assert [(s.output_ids, s.logprobs) for s in rows] == [(s.output_ids, s.logprobs) for s in plain]


def test_a_retract_keeps_every_list_of_a_response_in_step(decoder):
    """B10: forced after 5 tokens, 7 more follow; ids, logprobs, versions and alternatives are 12 each."""
    options = LogprobOptions(prompt_start=0, top=2, token_ids=(1,))
    params = dict(max_new_tokens=12, frequency_penalty=0.5, seed=4)
    expected = run(make_runner(decoder), [sequence(range(1, 30), options, **params)])[0]
    runner = make_runner(decoder)
    retracted = sequence(range(1, 30), options, **params)
    runner.scheduler.add(retracted)
    while retracted.num_output < 5:
        runner.step()
    runner.scheduler.retract_all()
    assert len(retracted.record()) == 5
    run(runner, [])
    assert retracted.num_retractions == 1
    assert retracted.record() == expected.record() and len(retracted.record()) == 12
    assert retracted.scores == expected.scores


def test_a_prompt_half_scored_when_the_weights_change_is_scored_anew(decoder):
    """C12 for scores: they are of one version, the new one."""
    other = tiny_decoder(TINY_QWEN3, seed=1)
    prompt = prompts(1, seed=11)[0] + prompts(1, seed=12)[0]
    runner = make_runner(tiny_decoder(TINY_QWEN3), prefill_tokens=16)
    one = scorer(prompt, (), 0)
    runner.scheduler.add(one)
    runner.step()
    assert 0 < len(one.scores.logprobs) < len(prompt) - 1
    runner.scheduler.retract_all()
    for name, view in runner.decoder.hf_tensors().items():
        view.copy_(other.hf_tensors()[name])
    runner.decoder.prepack()
    runner.weight_version = 1
    runner.weights_changed()
    run(runner, [])
    with torch.no_grad():
        assert one.scores.logprobs == score_packed(other, [prompt[:1]], [[prompt[1:]]])[0].tolist()
    assert set(one.scores.versions) == {1}


def test_a_prompt_whose_score_is_not_a_number_fails_by_name_and_no_other():
    """A10: the request is named, with a position of the faulty chunk; its neighbours keep their bits."""
    sick = tiny_decoder(TINY_UNTIED)
    with torch.no_grad():
        sick.embedding[63] = float("nan")
    healthy = [scorer(range(20), (), 0), sequence(range(5, 25), max_new_tokens=4)]
    expected = [scorer(range(20), (), 0), sequence(range(5, 25), max_new_tokens=4)]
    run(make_runner(tiny_decoder(TINY_UNTIED)), expected)
    bad = scorer([*range(30), 63, *range(30)], (), 0)
    run(make_runner(sick, prefill_tokens=16), [bad, *healthy])
    assert re.match(rf"request {bad.rid}: logprob of prompt token \d+ is nan", str(bad.error))
    assert bad.finish_reason is None
    assert healthy[0].scores.logprobs == expected[0].scores.logprobs
    assert healthy[1].logprobs == expected[1].logprobs

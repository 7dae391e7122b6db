"""The policy, without a model: a step is planned, its tokens are pretended to come out."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zerogap.engine.kv_cache import BlockPool
from zerogap.engine.requests import SamplingParams, Sequence
from zerogap.engine.scheduler import Scheduler
from zerogap.errors import ConfigError
from zerogap.types import FinishReason

SIZE = 4


def make(num_blocks=64, *, max_running=8, prefill_tokens=16):
    return Scheduler(BlockPool(num_blocks + 1, SIZE), max_running=max_running, prefill_tokens=prefill_tokens)


def sequence(rid, prompt, max_new=4):
    prompt = range(prompt) if isinstance(prompt, int) else prompt
    return Sequence(rid, tuple(prompt), SamplingParams(max_new_tokens=max_new), frozenset())


def step(scheduler, salt=b"v0", version=0):
    """One step as the runner does it; the tokens that come out are all different from the prompts'."""
    work = scheduler.plan(salt)
    for w in work:
        if w.samples:
            w.sequence.proven = True
            w.sequence.append(1000 + w.sequence.num_output, -1.0, version)
    scheduler.remove([w.sequence for w in work if w.sequence.ended])
    return work


def run(scheduler, steps=500):
    for _ in range(steps):
        if not (scheduler.running or scheduler.waiting):
            return
        assert step(scheduler), "a plan is empty only if there is nothing to do"
    raise AssertionError("did not end")


def test_prefill_comes_in_chunks_within_the_budget_while_others_decode():
    scheduler = make(prefill_tokens=8)
    scheduler.add(sequence("short", 3, max_new=9))
    step(scheduler)
    scheduler.add(sequence("long", range(100, 120)))
    counts = [{w.sequence.rid: w.count for w in step(scheduler)} for _ in range(3)]
    assert counts == [{"short": 1, "long": 8}, {"short": 1, "long": 8}, {"short": 1, "long": 4}]


def test_the_samples_of_a_group_compute_their_prompt_once_even_if_they_come_together():
    scheduler = make(prefill_tokens=100)
    for i in range(5):
        scheduler.add(sequence(f"s{i}", 10))
    scheduler.add(sequence("longer", 11))
    work = step(scheduler)
    first = work[0].sequence
    assert [(w.start, w.count, w.leader) for w in work] == [(0, 10, None), *[(8, 2, first)] * 4, (8, 3, None)]
    tables = [s.blocks[:2] for s in scheduler.running]
    assert tables == [tables[0]] * 6
    assert len({s.blocks[2] for s in scheduler.running}) == 6


def test_a_group_whose_prompt_takes_several_chunks_follows_in_the_last_one():
    scheduler = make(prefill_tokens=8)
    for i in range(3):
        scheduler.add(sequence(f"s{i}", 20))
    steps = [[(w.sequence.rid, w.start, w.count, w.leader is not None) for w in step(scheduler)] for _ in range(4)]
    assert steps[:2] == [[("s0", 0, 8, False)], [("s0", 8, 8, False)]]
    assert steps[2] == [("s0", 16, 4, False), ("s1", 16, 4, True), ("s2", 16, 4, True)]
    assert [count for _, _, count, _ in steps[3]] == [1, 1, 1]


def test_a_prompt_that_was_begun_under_other_weights_leads_nobody():
    """C12: neither its blocks nor its logits belong to the present weights alone."""
    scheduler = make(prefill_tokens=8)
    scheduler.add(sequence("old", 12))
    scheduler.plan(b"v0")
    scheduler.add(sequence("new", 12))
    assert [(w.sequence.rid, w.start, w.leader) for w in scheduler.plan(b"v1")] == [("old", 8, None), ("new", 0, None)]


def test_one_after_another_the_cached_prefix_is_found():
    scheduler = make()
    for rid in "ab":
        last = sequence(rid, 13)
        scheduler.add(last)
        run(scheduler)
    assert last.num_cached == 12


def test_a_prompt_of_whole_blocks_still_computes_its_last_token():
    scheduler = make()
    scheduler.add(sequence("a", 8))
    run(scheduler)
    scheduler.add(sequence("b", 8))
    assert [(w.start, w.count) for w in scheduler.plan(b"v0")] == [(4, 4)]


def test_blocks_of_two_weights_are_never_shared():
    """C12: a prefill that began under old weights and ended under new ones (in_place) is found by nobody."""
    scheduler = make(prefill_tokens=8)
    first = sequence("first", 16)
    scheduler.add(first)
    step(scheduler, b"v0")
    step(scheduler, b"v1")
    assert first.num_output == 1
    late = sequence("late", 16)
    scheduler.add(late)
    assert [(w.sequence.rid, w.start) for w in scheduler.plan(b"v1")] == [("first", 16), ("late", 0)]
    assert late.num_cached == 0


def test_the_youngest_is_retracted_and_keeps_what_it_has():
    """B10: tokens, logprobs and versions stay in step; everything ends with the right number of tokens."""
    scheduler = make(9, prefill_tokens=100)
    sequences = [sequence(str(i), range(100 * i, 100 * i + 7), max_new=14) for i in range(3)]
    for s in sequences:
        scheduler.add(s)
    run(scheduler)
    assert sequences[0].num_retractions == 0
    assert sum(s.num_retractions for s in sequences) > 0
    for s in sequences:
        assert len(s.output_ids) == len(s.logprobs) == len(s.versions) == 14
        assert s.finish_reason is FinishReason.LENGTH


def test_nobody_comes_in_during_a_step_that_retracts():
    scheduler = make(6, prefill_tokens=100)
    for i in range(2):
        scheduler.add(sequence(str(i), range(100 * i, 100 * i + 7), max_new=12))
    while not any(s.num_retractions for s in scheduler.waiting):
        if len(scheduler.running) == 2 and not scheduler.waiting:
            scheduler.add(sequence("tiny", [7], max_new=1))
        work = step(scheduler)
    assert [w.sequence.rid for w in work] == ["0"]
    assert [s.rid for s in scheduler.waiting] == ["1", "tiny"]
    run(scheduler)


def test_retract_all_keeps_the_order_and_frees_every_block():
    scheduler = make()
    for i in range(4):
        scheduler.add(sequence(str(i), 6))
    step(scheduler)
    free = scheduler.pool.num_blocks - 1
    scheduler.retract_all()
    assert [s.rid for s in scheduler.waiting] == ["0", "1", "2", "3"]
    assert scheduler.pool.num_available == free
    assert [s.num_retractions for s in scheduler.waiting] == [1] * 4
    assert all(s.num_output == 1 for s in scheduler.waiting)


def test_a_retracted_response_is_found_again_in_the_cache_under_the_same_weights():
    scheduler = make()
    scheduler.add(sequence("a", 6, max_new=9))
    for _ in range(6):
        step(scheduler)
    scheduler.retract_all()
    assert [(w.start, w.count) for w in scheduler.plan(b"v0")] == [(8, 4)]
    scheduler.retract_all()
    assert [(w.start, w.count) for w in scheduler.plan(b"v1")] == [(0, 12)]


def test_cached_tokens_are_those_of_the_prompt_at_admission():
    scheduler = make()
    scheduler.add(sequence("a", 6, max_new=9))
    for _ in range(4):
        step(scheduler)
    scheduler.retract_all()
    scheduler.plan(b"v0")
    assert scheduler.running[0].num_cached == 0


def test_blocks_of_an_unproven_prefill_are_scrubbed_before_they_are_used_again():
    scheduler = make(prefill_tokens=8)
    scheduler.add(sequence("a", 20))
    scheduler.plan(b"v0")
    half = scheduler.running[0]
    blocks = list(half.blocks)
    scheduler.remove([half])
    assert sorted(scheduler.pool.take_dirty()) == sorted(blocks)
    scheduler.add(sequence("b", 20))
    assert scheduler.plan(b"v0")[0].start == 0


def test_a_request_that_could_never_fit_is_refused_before_it_waits():
    scheduler = make(4)
    with pytest.raises(ConfigError, match="request big"):
        scheduler.add(sequence("big", 14, max_new=3))
    with pytest.raises(ConfigError, match="0 prompt tokens"):
        scheduler.add(sequence("empty", 0))
    scheduler.add(sequence("fits", 13, max_new=3))
    run(scheduler)


def test_max_running_bounds_the_sequences_in_flight():
    scheduler = make(max_running=3, prefill_tokens=1000)
    for i in range(7):
        scheduler.add(sequence(str(i), 5))
    seen = []
    while scheduler.running or scheduler.waiting:
        step(scheduler)
        seen.append(len(scheduler.running))
    assert max(seen) == 3


def test_waiting_and_running_sequences_can_be_removed_together():
    scheduler = make(max_running=2, prefill_tokens=100)
    sequences = [sequence(str(i), 5) for i in range(5)]
    for s in sequences:
        scheduler.add(s)
    step(scheduler)
    scheduler.remove(sequences[1:4])
    assert [s.rid for s in (*scheduler.running, *scheduler.waiting)] == ["0", "4"]
    run(scheduler)
    assert scheduler.pool.num_available == 64


requests = st.lists(st.tuples(st.integers(1, 24), st.integers(1, 16), st.integers(0, 2)), min_size=1, max_size=12)


@settings(deadline=None, max_examples=80)
@given(requests, st.integers(10, 40), st.integers(1, 5), st.integers(1, 40), st.integers(0, 9), st.data())
def test_whatever_comes_everything_ends_and_no_block_is_lost(wanted, blocks, max_running, budget, stir, data):
    scheduler = make(blocks, max_running=max_running, prefill_tokens=budget)
    sequences = [sequence(str(i), [kind] * prompt, new) for i, (prompt, new, kind) in enumerate(wanted)]
    for s in sequences:
        scheduler.add(s)
    for n in range(2000):
        if not (scheduler.running or scheduler.waiting):
            break
        if stir and n % stir == stir - 1 and n < 60:
            what = data.draw(st.sampled_from(["retract", "remove", "flush"]))
            if what == "retract":
                scheduler.retract_all()
            elif what == "flush":
                scheduler.pool.flush()
            else:
                gone = data.draw(st.sampled_from([*scheduler.running, *scheduler.waiting]))
                gone.finish_reason = FinishReason.ABORT
                scheduler.remove([gone])
        work = step(scheduler, salt=b"v%d" % (n // 20))
        assert sum(w.count for w in work if w.count > 1 and w.leader is None) <= budget
        assert len(scheduler.running) <= max_running
        for w in work:
            assert len(w.sequence.blocks) * SIZE >= w.sequence.num_computed or w.sequence.ended
    else:
        raise AssertionError("did not end")
    assert all(s.num_output == s.params.max_new_tokens for s in sequences if s.finish_reason is FinishReason.LENGTH)
    assert all(s.ended for s in sequences)
    assert scheduler.pool.num_available == blocks

"""The prefix cache as requests meet it: who shares with whom, who is forgotten first, and what is counted as cached."""

from __future__ import annotations

import pytest
from unit.engine.test_scheduler import SIZE, make, run, sequence, step

from zerogap.engine.requests import SamplingParams, Sequence
from zerogap.wire.codec import expand
from zerogap.wire.messages import GenerateBody

A, B, C = (tuple(range(k, k + 9)) for k in (0, 100, 200))


def ask(scheduler, prompt, *, salt=b"v0", namespace=b"", max_new=1):
    """Runs one request to its end; how many of its tokens were cached."""
    one = Sequence("r", tuple(prompt), SamplingParams(max_new_tokens=max_new), frozenset(), namespace=namespace)
    scheduler.add(one)
    while not one.ended:
        step(scheduler, salt)
    return one.num_cached


def test_the_prefix_that_was_used_least_recently_is_forgotten_first():
    """Each prompt leaves 2 findable blocks; 6 blocks hold three prompts, and the fourth takes the oldest's."""
    scheduler = make(num_blocks=7)
    for prompt in (A, B, C):
        assert ask(scheduler, prompt) == 0
    assert ask(scheduler, A) == 2 * SIZE, "a use makes it young again"
    assert ask(scheduler, range(300, 309)) == 0
    assert ask(scheduler, A) == ask(scheduler, C) == 2 * SIZE
    assert ask(scheduler, B) < 2 * SIZE


def test_blocks_in_use_are_never_evicted():
    scheduler = make(num_blocks=20)
    held = sequence("held", A, max_new=50)
    scheduler.add(held)
    step(scheduler)
    mine = list(held.blocks)
    for k in range(300, 1500, 100):
        ask(scheduler, range(k, k + 9))
    assert held.blocks[: len(mine)] == mine and held.num_retractions == 0
    assert ask(scheduler, A) == 2 * SIZE


@pytest.mark.parametrize(("salt", "namespace"), [(b"v1", b""), (b"v0", b"adapter:2"), (b"v1", b"adapter:2")])
def test_another_weight_version_or_namespace_finds_nothing(salt, namespace):
    """C12."""
    scheduler = make()
    assert ask(scheduler, A) == 0 and ask(scheduler, A) == 2 * SIZE
    assert ask(scheduler, A, salt=salt, namespace=namespace) == 0
    assert ask(scheduler, A, salt=salt, namespace=namespace) == 2 * SIZE


@pytest.mark.parametrize("length", [3, 9])
def test_requests_of_two_namespaces_share_nothing_even_in_the_step_that_computes_both(length):
    """Also prompts below one block: their logits would serve both."""
    scheduler = make(prefill_tokens=100)
    for namespace in (b"", b"a", b"a"):
        scheduler.add(
            Sequence(namespace.hex(), tuple(range(length)), SamplingParams(), frozenset(), namespace=namespace)
        )
    first, second, third = scheduler.plan(b"v0")
    assert first.leader is None and second.leader is None and second.start == 0
    assert third.leader is second.sequence
    assert not set(first.sequence.blocks) & set(second.sequence.blocks)


def test_cached_tokens_are_those_that_were_not_computed_and_stay_so_after_a_retract():
    scheduler = make(prefill_tokens=100)
    ask(scheduler, A)
    one = sequence("one", (*A[:8], 50, 51), max_new=9)
    scheduler.add(one)
    (work,) = step(scheduler)
    assert (one.num_cached, work.start, work.count) == (8, 8, 2)
    scheduler.retract_all()
    run(scheduler)
    assert one.num_cached == 8 and one.num_retractions == 1


@pytest.mark.parametrize(("body", "spaces"), [
    ({}, ["", ""]),
    ({"extra_key": ""}, ["", ""]),
    ({"extra_key": "v3"}, ["0:v3", "0:v3"]),
    ({"extra_key": ["v3", "v4"]}, ["0:v3", "0:v4"]),
    ({"cache_salt": "v3"}, ["2:v3", "2:v3"]),
    ({"cache_salt": "a", "extra_key": ["b", ""]}, ["1:ab", "1:a"]),
])  # fmt: skip
def test_a_body_names_the_namespace_of_each_prompt(body, spaces):
    items = expand(GenerateBody.model_validate({"input_ids": [[1], [2]], **body}))
    assert [item.namespace for item in items] == spaces

"""The table of states: every call in every reachable state is either legal or refused with what is legal instead."""

from __future__ import annotations

import pytest

from zerogap.engine.state import AXES, CALLS, REMEDIES, RULES, StateMachine, state_table
from zerogap.errors import ConfigError, EngineStateError, StaleWeights, ZerogapError

WORK = ((0, 0), (0, 3), (2, 1))


def split(call: str) -> tuple[str, tuple[str, ...]]:
    name, _, tag = call.partition("(")
    return (name, (tag.rstrip(")"),)) if name.endswith("_occupation") else (call, ())


def reachable() -> list[dict[str, str]]:
    """Every state that some legal order of calls, failing ones included, leads to."""
    seen: dict[tuple[str, ...], dict[str, str]] = {}
    todo = [StateMachine().snapshot()]
    while todo:
        state = todo.pop()
        if tuple(state.values()) in seen:
            continue
        seen[tuple(state.values())] = state
        for call in at(state).legal_calls():
            name, tags = split(call)
            for act in ("done", "failed"):
                machine = at(state)
                getattr(machine, act)(name, tags=tags)
                todo.append(machine.snapshot())
    return list(seen.values())


def at(state: dict[str, str]) -> StateMachine:
    machine = StateMachine()
    machine._now.update(state)  # a test may put the machine anywhere; the engine only walks
    return machine


def walk(*calls: str) -> StateMachine:
    machine = StateMachine()
    for call in calls:
        name, tags = split(call)
        machine.check(name, tags=tags)
        machine.done(name, tags=tags)
    return machine


def test_every_call_in_every_reachable_state_is_legal_or_refused_with_what_is_legal():
    states = reachable()
    assert len(states) == 2 * 5 * 2 * 2
    for state in states:
        for running, waiting in WORK:
            machine = at(state)
            legal = machine.legal_calls(num_running=running, num_waiting=waiting)
            for call in CALLS:
                name, tags = split(call)
                try:
                    machine.check(name, tags=tags, num_running=running, num_waiting=waiting)
                    allowed = True
                except (EngineStateError, StaleWeights) as error:
                    allowed = False
                    assert error.remedy and error.details["legal_calls"] == legal
                    assert error.details["state"] | {"work": ""} == {**state, "work": ""}
                assert allowed == (call in legal)
            assert machine.snapshot() == state, "a check moves nothing"


def test_every_state_that_refuses_a_call_has_a_remedy():
    for rule in RULES:
        for state in set(AXES[rule.axis]) - set(rule.moves):
            assert REMEDIES[rule.axis, state]


def test_a_colocated_turn_walks_through():
    machine = walk(
        "pause_generation",
        "flush_cache",
        "release_memory_occupation(kv_cache)",
        "release_memory_occupation(weights)",
        "resume_memory_occupation(weights)",
        "begin_weight_update",
        "update_weights_from_tensor",
        "end_weight_update",
        "weights_checker(checksum)",
        "update_weight_version",
        "resume_memory_occupation(kv_cache)",
        "continue_generation",
    )
    assert machine.may_sample and machine.name == "running"


def test_an_engine_with_lost_weights_neither_continues_nor_generates():
    """C10: weights that were released come back without their contents."""
    machine = walk("pause_generation", "release_memory_occupation(weights)", "resume_memory_occupation(weights)")
    assert machine.name == "stale"
    with pytest.raises(EngineStateError, match="weights are stale"):
        machine.check("continue_generation")
    running = walk("release_memory_occupation(weights)", "resume_memory_occupation(weights)")
    with pytest.raises(StaleWeights, match="weights are stale"):
        running.admit()


def test_a_failed_bucket_closes_the_engine_until_a_session_ends_well():
    machine = walk("pause_generation", "begin_weight_update")
    machine.failed("update_weights_from_tensor")
    assert machine.name == "failed"
    for call in ("continue_generation", "update_weights_from_tensor", "end_weight_update"):
        with pytest.raises(EngineStateError, match="weights are failed"):
            machine.check(call)
    for call in ("begin_weight_update", "end_weight_update", "continue_generation"):
        machine.check(call)
        machine.done(call)
    assert machine.may_sample


def test_requests_wait_while_paused_and_in_an_open_session():
    assert StateMachine().admit()
    assert not walk("pause_generation").admit()
    assert not walk("begin_weight_update").admit()
    assert not walk("pause_generation", "release_memory_occupation(weights)").admit()


def test_a_session_with_a_plan_replaces_one_whose_trainer_died_but_a_plain_begin_does_not():
    machine = walk("pause_generation", "begin_weight_update")
    machine.check("begin_weight_update")
    with pytest.raises(EngineStateError, match="weights are updating"):
        machine.check("begin_weight_update(no plan)")


def test_memory_is_not_taken_from_requests_that_hold_it():
    machine = StateMachine()
    for call in ("flush_cache", "begin_weight_update"):
        with pytest.raises(EngineStateError, match="work is live"):
            machine.check(call, num_running=1)
    with pytest.raises(EngineStateError, match="work is live"):
        machine.check("release_memory_occupation", tags=("kv_cache",), num_running=1)
    machine.done("pause_generation")
    with pytest.raises(EngineStateError, match="work is held"):
        machine.check("release_memory_occupation", tags=("kv_cache",), num_running=1)
    machine.check("release_memory_occupation", tags=("kv_cache",), num_waiting=3)


def test_no_tags_means_those_to_which_the_call_applies():
    machine = walk("release_memory_occupation(weights)")
    assert machine.resolve_tags("release_memory_occupation", None) == ("kv_cache", "cuda_graph")
    assert machine.resolve_tags("resume_memory_occupation", []) == ("weights",)
    with pytest.raises(EngineStateError, match="every tag is in memory"):
        StateMachine().resolve_tags("resume_memory_occupation", None)
    with pytest.raises(ConfigError, match="'weight'"):
        machine.resolve_tags("release_memory_occupation", ["weight"])


def test_a_call_outside_the_table_is_a_defect_of_the_caller():
    with pytest.raises(ValueError, match="not in the table"):
        StateMachine().check("reboot")


def test_the_documentation_rows_say_what_the_machine_does():
    for axis, states in AXES.items():
        if axis == "work":
            continue
        for call, cells in state_table(axis):
            name, tags = split(call)
            others = {rule.axis for rule in RULES if rule.call == call} - {axis, "work"}
            for state, cell in zip(states, cells, strict=True):
                machine = at({axis: state})
                try:
                    machine.check(name, tags=tags)
                    machine.done(name, tags=tags)
                    assert machine.snapshot()[axis] == cell
                except ZerogapError:
                    assert cell == "\u2014" and not (others - set(AXES))

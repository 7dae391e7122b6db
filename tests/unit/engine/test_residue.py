"""What stays behind when memory is given back: nothing under a tag, and nothing that grows from turn to turn."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
from support.cores import control, running_core, submit
from support.tiny import TINY, TINY_MISTRAL, TINY_QWEN2, TINY_QWEN3, TINY_UNTIED, tiny_decoder, tiny_folder
from unit.engine.test_core import refit

from zerogap.engine.memory import process_bytes

MOST_BYTES_PER_TURN = 100_000
WINDOWED = replace(TINY_MISTRAL, windows=(20, 20))


async def turn(core, tensors, version):
    """What one step of a colocated run asks of its engine."""
    tickets = [submit(core, f"{version}-{i}", range(3, 40), max_new_tokens=8, seed=i) for i in range(4)]
    for ticket in tickets:
        assert ticket.wait().error is None
    control(core, "pause_generation", mode="retract")
    control(core, "flush_cache")
    control(core, "release_memory_occupation", tags=None)
    control(core, "resume_memory_occupation", tags=["weights"])
    await refit(core, tensors)
    control(core, "update_weight_version", new_version=version, abort_all_requests=False)
    control(core, "resume_memory_occupation", tags=["kv_cache", "cuda_graph"])
    control(core, "continue_generation")


@pytest.mark.parametrize("config", [TINY, TINY_UNTIED, TINY_QWEN2, TINY_QWEN3, WINDOWED], ids=lambda c: c.model_type)
def test_no_byte_of_a_released_tag_stays_resident_for_any_layout(tmp_path, config):
    """D4: tied and untied heads, biases, norms of heads; each tag alone, then all."""
    with running_core(tiny_folder(tmp_path / "model", config), num_kv_tokens=8192) as core:
        submit(core, "fill", range(3, 60), max_new_tokens=60).wait()
        assert control(core, "server_info")["memory"]["kv_cache"] > 0
        for tag in ("kv_cache", "weights", "cuda_graph"):
            control(core, "release_memory_occupation", tags=[tag])
            assert control(core, "server_info")["memory"][tag] == 0
        assert set(control(core, "server_info")["memory"].values()) == {0}


def test_the_cache_of_a_model_with_windows_is_released_measured_and_resumed_to_the_same_tokens(tmp_path):
    """D1: every block is kept, also behind all windows, and what is claimed of it comes free."""
    answers, claimed = {}, {}
    for name, config in (("windows", WINDOWED), ("none", replace(WINDOWED, windows=()))):
        with running_core(tiny_folder(tmp_path / name, config), num_kv_tokens=8192) as core:

            def ask(rid, core=core):
                ticket = submit(core, rid, range(3, 60), max_new_tokens=150, seed=5, ignore_eos=True).wait()
                assert ticket.error is None and len(ticket.ids) == 150
                return ticket.ids, ticket.logprobs

            before = ask("before")
            released = control(core, "release_memory_occupation", tags=["kv_cache"])["tags"]["kv_cache"]
            assert released["freed_bytes"] >= 0.95 * released["claimed_bytes"] > 0
            assert control(core, "server_info")["memory"]["kv_cache"] == 0
            control(core, "resume_memory_occupation", tags=["kv_cache"])
            assert ask("after") == before
            answers[name], claimed[name] = before, released["claimed_bytes"]
    assert answers["windows"] != answers["none"]
    assert claimed["windows"] == claimed["none"]


async def test_turns_leave_nothing_behind(tmp_path):
    """D7: less than 0.1 MB a step, after the first turns have filled what is kept on purpose."""
    with running_core(tiny_folder(tmp_path / "model"), num_kv_tokens=1024) as core:
        tensors = tiny_decoder(seed=1).hf_tensors()
        for version in range(10):
            await turn(core, tensors, version)
        gc.collect()
        before = process_bytes()
        for version in range(10, 40):
            await turn(core, tensors, version)
        gc.collect()
        assert process_bytes() - before < 30 * MOST_BYTES_PER_TURN
        assert not core._live and core.status()["num_used_tokens"] == 0

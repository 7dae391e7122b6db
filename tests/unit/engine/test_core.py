"""The core's thread: requests, control calls in every order, and what a fault leaves behind."""

from __future__ import annotations

import json
import time

import pytest
import torch
from support.cores import DEADLINE_SECONDS, control, pause_when, running_core, submit
from support.tiny import TINY, TINY_UNTIED, tiny_decoder, tiny_folder

from zerogap.engine.requests import GenerateRequest, SamplingParams
from zerogap.errors import (
    CheckpointError,
    ConfigError,
    EngineRejected,
    EngineStateError,
    EngineUnreachable,
    RolloutError,
    StaleWeights,
    TransferFailed,
)
from zerogap.types import FinishReason
from zerogap.weights.bucket import buckets
from zerogap.weights.manifest import Manifest, tensor_digests
from zerogap.weights.modes.ipc import IpcSender
from zerogap.wire.tensors import TransferPlan

PROMPT = (5, 9, 11, 3)
LONG = {"max_new_tokens": 300, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture
def core(folder):
    with running_core(folder) as core:
        yield core


def plan_for(tensors, *, deadline_seconds=60.0):
    manifest = Manifest.of(tensors)
    return TransferPlan(
        session_id="s1", mode="ipc", manifest_digest=manifest.digest, fingerprint=None,
        num_tensors=len(manifest.specs), num_bytes=manifest.num_bytes, max_bucket_bytes=1 << 20,
        deadline_seconds=deadline_seconds, tensors=manifest.specs,
    )  # fmt: skip


class CoreAsEngine:
    """What an IpcSender needs of an engine, over the core's futures."""

    def __init__(self, core):
        self.core = core

    async def server_info(self):
        info = control(self.core, "server_info")
        return type("Info", (), {"manifest_digest": info["manifest_digest"], "fingerprint": info["fingerprint"]})

    async def update_weights_from_tensor(self, header):
        control(self.core, "load_bucket", header=header)


async def refit(core, tensors):
    sender = IpcSender(CoreAsEngine(core), fingerprint=None, max_bucket_bytes=1 << 16)
    plan = await sender.connect(Manifest.of(tensors), deadline_seconds=60)
    control(core, "begin_weight_update", selector="all", plan=plan)
    try:
        for bucket in buckets(tensors, sender.max_bucket_bytes):
            await sender.send(bucket)
        await sender.settle()
        control(core, "end_weight_update")
    finally:
        await sender.close()


# --- requests


def test_requests_end_by_stop_token_or_length_and_every_token_has_logprob_and_version(core):
    tickets = [submit(core, str(i), PROMPT, max_new_tokens=40, seed=i) for i in range(12)]
    for ticket in tickets:
        ticket.wait()
        assert len(ticket.ids) == len(ticket.logprobs) == len(ticket.versions)
        assert set(ticket.versions) == {0}
        stopped = ticket.ids[-1] == 2
        assert ticket.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert 2 not in ticket.ids[:-1]
    assert {t.finish_reason for t in tickets} == {FinishReason.STOP, FinishReason.LENGTH}


def test_the_eos_list_is_that_of_config_and_generation_config(folder, tmp_path):
    path = tiny_folder(tmp_path / "model")
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(3, 64))}))
    with running_core(path) as core:
        assert len(submit(core, "a", PROMPT, max_new_tokens=9, seed=1).wait().ids) <= 3


def test_ignore_eos_also_ignores_stop_token_ids_as_in_sglang(core):
    everything = frozenset(range(64))
    assert len(submit(core, "a", PROMPT, max_new_tokens=9, stop_token_ids=everything).wait().ids) == 1
    assert len(submit(core, "b", PROMPT, max_new_tokens=9, stop_token_ids=everything, ignore_eos=True).wait().ids) == 9


def test_what_is_outside_of_the_model_is_refused_before_it_could_fail_a_step(core):
    with pytest.raises(ConfigError, match="token id 64"):
        submit(core, "a", (5, 64), max_new_tokens=4)
    with pytest.raises(ConfigError, match="room for 512"):
        submit(core, "b", PROMPT, max_new_tokens=509)
    far = frozenset([2**40])
    assert submit(core, "c", PROMPT, max_new_tokens=4, min_new_tokens=4, stop_token_ids=far).wait().error is None
    assert submit(core, "d", (5,) * 500, max_new_tokens=12, ignore_eos=True).wait().error is None


def test_a_second_live_request_of_one_rid_is_refused_and_the_first_goes_on(core):
    first = submit(core, "same", PROMPT, **LONG).wait(1)
    second = submit(core, "same", PROMPT, max_new_tokens=4).wait()
    assert isinstance(second.error, ConfigError)
    assert len(first.wait().ids) == 300
    assert submit(core, "same", PROMPT, max_new_tokens=4).wait().error is None


def test_an_abort_matches_exactly_and_keeps_what_there_is(core):
    """Reference 3.3: SGLang's prefix match would also end x_10."""
    one, ten = (submit(core, rid, PROMPT, **LONG) for rid in ("x_1", "x_10"))
    one.wait(2)
    control(core, "abort_request", rid="x_1", abort_all=False)
    assert one.wait().finish_reason is FinishReason.ABORT
    assert 2 <= len(one.ids) == len(one.logprobs) < 300
    assert ten.wait().finish_reason is FinishReason.LENGTH


def test_a_client_that_cannot_be_told_harms_nobody_else(core):
    def gone(output):
        raise RuntimeError("the client went away")

    core.submit(GenerateRequest("gone", PROMPT, SamplingParams(**LONG)), gone)
    assert submit(core, "here", PROMPT, max_new_tokens=20, ignore_eos=True).wait().finish_reason is FinishReason.LENGTH
    assert control(core, "server_info")["num_running"] == 0


# --- pause


def test_requests_that_come_while_paused_wait_and_then_run(core):
    control(core, "pause_generation", mode="abort")
    ticket = submit(core, "a", PROMPT, max_new_tokens=4, ignore_eos=True)
    assert control(core, "server_info")["num_waiting"] == 1
    assert not ticket.outputs
    assert core.status()["seconds_stalled"] == 0.0
    control(core, "continue_generation")
    assert len(ticket.wait().ids) == 4


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_pause_changes_no_token(core, mode):
    expected = submit(core, "undisturbed", PROMPT, **LONG).wait()
    ticket = submit(core, mode, PROMPT, **LONG)
    pause_when(core, ticket, 20, mode)
    seen = len(ticket.ids)
    status = core.status()
    assert (status["num_running"], status["num_waiting"]) == ((0, 1) if mode == "retract" else (1, 0))
    assert len(ticket.ids) == seen
    control(core, "continue_generation")
    assert ticket.wait().ids == expected.ids
    assert ticket.logprobs == expected.logprobs
    assert ticket.outputs[-1].num_retractions == (1 if mode == "retract" else 0)


@pytest.mark.parametrize("first", ["retract", "in_place"])
def test_pause_by_abort_ends_what_another_pause_holds(core, first):
    """Trap 45: SGLang deadlocks after in_place."""
    ticket = submit(core, "a", PROMPT, **LONG)
    pause_when(core, ticket, 3, first)
    control(core, "pause_generation", mode="abort")
    assert ticket.wait().finish_reason is FinishReason.ABORT
    assert control(core, "server_info")["states"]["generation"] == "paused"


# --- memory


def test_memory_is_not_taken_from_running_requests_and_the_engine_goes_on(core):
    """Trap 9: SGLang dies. Here it is an error that says what to do."""
    ticket = submit(core, "a", PROMPT, **LONG).wait(1)
    with pytest.raises(EngineStateError, match="release_memory_occupation"):
        control(core, "release_memory_occupation", tags=None)
    assert ticket.wait().finish_reason is FinishReason.LENGTH


def test_weights_that_came_back_empty_never_serve(core, folder):
    """C10: refused with a clear state error until new weights came; then the same tokens as before."""
    before = submit(core, "before", PROMPT, max_new_tokens=20).wait()
    control(core, "pause_generation", mode="retract")
    control(core, "release_memory_occupation", tags=None)
    assert control(core, "server_info")["memory"] == {"kv_cache": 0, "weights": 0, "cuda_graph": 0}
    control(core, "resume_memory_occupation", tags=None)
    assert torch.count_nonzero(core.runner.decoder.embedding) == 0
    with pytest.raises(EngineStateError, match="stale"):
        control(core, "continue_generation")
    control(core, "begin_weight_update", selector="all", plan=None)
    with pytest.raises(TransferFailed, match="the session did not bring"):
        control(core, "end_weight_update")
    with pytest.raises(EngineStateError, match="failed"):
        control(core, "continue_generation")
    control(core, "update_weights_from_disk", model_path=str(folder), weight_version=4)
    control(core, "continue_generation")
    after = submit(core, "after", PROMPT, max_new_tokens=20).wait()
    assert (after.ids, after.logprobs) == (before.ids, before.logprobs)
    assert set(after.versions) == {4}


def test_an_unpaused_engine_without_weights_answers_stale_weights(core):
    control(core, "release_memory_occupation", tags=["weights"])
    with pytest.raises(StaleWeights):
        submit(core, "a", PROMPT, max_new_tokens=4)
    control(core, "resume_memory_occupation", tags=["weights"])
    with pytest.raises(StaleWeights):
        submit(core, "a", PROMPT, max_new_tokens=4)


# --- weights


async def test_a_refit_gives_the_weights_that_were_sent(core):
    tensors = tiny_decoder(seed=7).hf_tensors()
    control(core, "pause_generation", mode="retract")
    await refit(core, tensors)
    reply = control(core, "weights_checker", action="checksum")
    assert reply["ranks"][0]["checksums"] == tensor_digests(tensors)
    assert control(core, "server_info")["states"]["weights"] == "ready"


async def test_a_broken_bucket_fails_the_session_and_a_good_one_heals_it(core):
    """C24, fail closed: after a failed refit nothing is served until a session ends well."""
    tensors = tiny_decoder(seed=7).hf_tensors()
    sender = IpcSender(CoreAsEngine(core), fingerprint=None)
    plan = await sender.connect(Manifest.of(tensors), deadline_seconds=60)
    control(core, "pause_generation", mode="retract")
    waiting = submit(core, "waits", PROMPT, max_new_tokens=4)
    control(core, "begin_weight_update", selector="all", plan=plan)
    with pytest.raises(TransferFailed, match="never arrived"):
        control(core, "end_weight_update")
    assert core.status()["state"] == "failed"
    with pytest.raises(EngineStateError):
        control(core, "continue_generation")
    await refit(core, tensors)
    control(core, "continue_generation")
    assert waiting.wait().finish_reason is not None


def test_a_plan_for_other_weights_changes_nothing(core):
    other = tiny_decoder(TINY_UNTIED).hf_tensors()
    with pytest.raises(Exception, match=r"lm_head\.weight"):
        control(core, "begin_weight_update", selector="all", plan=plan_for(other))
    assert submit(core, "a", PROMPT, max_new_tokens=4).wait().error is None


def test_a_sender_that_falls_silent_leaves_the_engine_failed(core):
    tensors = tiny_decoder().hf_tensors()
    control(core, "begin_weight_update", selector="all", plan=plan_for(tensors, deadline_seconds=0.1))
    give_up = time.monotonic() + DEADLINE_SECONDS
    while core.status()["state"] != "failed" and time.monotonic() < give_up:
        time.sleep(0.02)
    assert core.status()["state"] == "failed"
    control(core, "begin_weight_update", selector="all", plan=plan_for(tensors))


def test_a_new_version_marks_the_tokens_after_it_and_none_before(core):
    ticket = submit(core, "a", PROMPT, **LONG)
    pause_when(core, ticket, 10, "in_place")
    before = len(ticket.ids)
    control(core, "update_weight_version", new_version=8, abort_all_requests=False)
    control(core, "continue_generation")
    ticket.wait()
    assert ticket.versions == [0] * before + [8] * (300 - before)


def test_a_folder_of_another_model_or_none_changes_nothing(core, tmp_path):
    other = tiny_folder(tmp_path / "other", TINY_UNTIED)
    for path in (other, tmp_path / "nowhere"):
        with pytest.raises(ConfigError):
            control(core, "update_weights_from_disk", model_path=str(path), weight_version=None)
    assert submit(core, "a", PROMPT, max_new_tokens=4).wait().error is None


def test_a_damaged_folder_fails_closed(core, tmp_path):
    damaged = tiny_folder(tmp_path / "damaged")
    (damaged / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(CheckpointError):
        control(core, "update_weights_from_disk", model_path=str(damaged), weight_version=9)
    assert core.status()["state"] == "failed"
    assert core.status()["weight_version"] == 0


def test_one_changed_element_is_named(core):
    """C24: snapshot, change one element, compare names the tensor; the digest sees it too."""
    control(core, "weights_checker", action="snapshot")
    name = "model.layers.1.self_attn.k_proj.weight"
    digests = control(core, "weights_checker", action="checksum")["ranks"][0]["checksums"]
    core.weights.tensors[name][3, 4] += 1e-3
    changed = control(core, "weights_checker", action="checksum")["ranks"][0]["checksums"]
    assert [n for n in digests if digests[n] != changed[n]] == [name]
    with pytest.raises(EngineRejected, match=name):
        control(core, "weights_checker", action="compare")
    with pytest.raises(EngineRejected, match="no snapshot"):
        control(core, "weights_checker", action="compare")


async def test_reset_tensors_proves_that_a_refit_writes_every_weight(core):
    tensors = tiny_decoder(seed=3).hf_tensors()
    control(core, "weights_checker", action="reset_tensors")
    with pytest.raises(StaleWeights):
        submit(core, "a", PROMPT, max_new_tokens=4)
    await refit(core, tensors)
    assert all(t.isfinite().all() for t in core.weights.tensors.values())
    assert submit(core, "a", PROMPT, max_new_tokens=4).wait().error is None


def test_weights_are_read_by_name(core):
    rows = control(core, "get_weights_by_name", name="model.norm.weight", truncate_size=3)["values"]
    assert rows == core.runner.decoder.norm[:3].tolist()
    head = control(core, "get_weights_by_name", name="lm_head.weight", truncate_size=2)["values"]
    assert head == core.runner.decoder.embedding[:2].tolist()
    with pytest.raises(EngineRejected, match="no weight is named"):
        control(core, "get_weights_by_name", name="model.norm", truncate_size=3)


# --- faults and the end


def test_a_step_that_raises_fails_its_requests_and_the_core_says_so(core, monkeypatch):
    """E3: the cause reaches every client; control calls are still answered."""
    running = submit(core, "running", PROMPT, **LONG).wait(2)

    def broken(hidden):
        raise RuntimeError("the machine is on fire")

    monkeypatch.setattr(core.runner.decoder, "logits", broken)
    assert "the machine is on fire" in str(running.wait().error)
    assert isinstance(core.failure, RolloutError)
    assert isinstance(core.failure.__cause__, RuntimeError)
    assert core.status()["state"] == "failed"
    assert control(core, "server_info")["num_running"] == 0
    with pytest.raises(RolloutError, match="on fire"):
        submit(core, "later", PROMPT, max_new_tokens=4)
    with pytest.raises(RolloutError, match="on fire"):
        control(core, "flush_cache")


def test_not_a_number_is_an_error_of_its_request_and_not_of_the_core(core):
    """A10"""
    with torch.no_grad():
        core.runner.decoder.norm[0] = float("nan")
    ticket = submit(core, "bad", PROMPT, max_new_tokens=4).wait()
    assert isinstance(ticket.error, RolloutError)
    assert "request bad" in str(ticket.error)
    assert (ticket.finish_reason, ticket.ids, core.failure) == (None, [], None)


def test_a_fault_in_a_call_is_the_calls_answer(core):
    with pytest.raises(TypeError):
        control(core, "get_weights_by_name", nme="x")
    assert submit(core, "a", PROMPT, max_new_tokens=4).wait().error is None


def test_a_stop_ends_running_and_waiting_requests_and_answers_late_calls(folder):
    with running_core(folder, max_running_requests=1) as core:
        tickets = [submit(core, str(i), PROMPT, **LONG) for i in range(3)]
        tickets[0].wait(1)
        core.stop(DEADLINE_SECONDS)
        assert [t.wait().finish_reason for t in tickets] == [FinishReason.ABORT] * 3
        assert core.status()["num_running"] == 0


def test_calls_around_the_stop_are_answered_and_never_left_alone(core):
    futures = []
    ticket = submit(core, "a", PROMPT, **LONG)
    ticket.on_token = lambda: futures or (core._stop.set(), futures.append(core.control("flush_cache")))
    ticket.wait()
    core.stop(DEADLINE_SECONDS)
    futures.append(core.control("flush_cache"))
    for future in futures:
        with pytest.raises(EngineUnreachable):
            future.result(DEADLINE_SECONDS)
    assert submit(core, "late", PROMPT, max_new_tokens=4).wait().finish_reason is FinishReason.ABORT


def test_the_state_that_is_told_is_complete(core):
    info = control(core, "server_info")
    assert info["manifest_digest"] == Manifest.of(tiny_decoder(TINY).hf_tensors()).digest
    assert info["parity_failures"] == []
    assert info["num_kv_tokens"] == 4096
    assert info["memory"]["weights"] >= sum(t.nbytes for t in core.weights.tensors.values())
    assert info["rss_bytes"] > info["memory"]["weights"]

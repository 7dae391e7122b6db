"""What an operator sees: `/metrics`, the access line."""

from __future__ import annotations

import logging

from prometheus_client.parser import text_string_to_metric_families


async def scrape(engine) -> dict[str, float]:
    text = (await engine.http.get("/metrics")).text
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            more = ",".join(v for k, v in sorted(sample.labels.items()) if k not in ("model_name", "le"))
            assert sample.labels["model_name"] == "fake"
            found[f"{sample.name}{{{more}}}" if more else sample.name] = sample.value
    return found


async def generate(engine, count: int = 4, **more) -> None:
    params = {"max_new_tokens": count, "ignore_eos": True}
    reply = await engine.http.post("/generate", json={"input_ids": [5, 6, 7], "sampling_params": params, **more})
    assert reply.status_code == 200


async def test_answered_requests_are_counted_under_sglangs_names(engine):
    before = await scrape(engine)
    await generate(engine)
    await generate(engine)
    after = await scrape(engine)

    def gained(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    assert gained("sglang:num_requests_total") == 2
    assert gained("sglang:prompt_tokens_total") == 6
    assert gained("sglang:generation_tokens_total") == 8
    assert gained("sglang:num_aborted_requests_total") == 0
    assert gained("sglang:http_responses_total{generate,200}") == 2
    for histogram in ("e2e_request_latency", "time_to_first_token", "inter_token_latency"):
        assert gained(f"sglang:{histogram}_seconds_count") == 2
    assert after["sglang:num_running_reqs"] == after["sglang:num_queue_reqs"] == 0
    assert after["zerogap:state{running}"] == 1


async def test_state_version_and_refusals_are_seen(engine):
    await engine.http.post("/pause_generation", json={"mode": "abort"})
    await engine.http.post("/update_weight_version", json={"new_version": "3"})
    assert (await engine.http.post("/generate", json={})).status_code == 400
    now = await scrape(engine)
    assert (now["zerogap:state{paused}"], now["zerogap:state{running}"]) == (1, 0)
    assert now["zerogap:weight_version"] == 3
    assert now["sglang:http_responses_total{generate,400}"] == 1


async def test_every_call_leaves_one_line_and_probes_leave_none(engine, caplog):
    with caplog.at_level(logging.INFO, logger="zerogap.access"):
        await generate(engine)
        await engine.http.get("/health")
        await scrape(engine)
        await engine.http.post("/generate", json={})
    lines = [record.getMessage() for record in caplog.records if record.name == "zerogap.access"]
    assert [line.split()[:3] for line in lines] == [["POST", "/generate", "200"], ["POST", "/generate", "400"]]

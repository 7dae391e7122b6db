"""The only place for `/metrics`: SGLang's names where it has one, ours under `zerogap:`; a registry per server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fastapi import Request, Response
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from zerogap.engine.calls import Core
from zerogap.engine.responses import Response as Generated
from zerogap.wire.messages import EmptyBody

_SECONDS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
_STATES = ("running", "paused", "released", "updating", "stale", "failed")


class MetricsRoutes:
    """Counts what the server answers; the rest is read from the core when somebody asks."""

    def __init__(self, core: Core, *, name: str) -> None:
        self._core = core
        self._registry = CollectorRegistry()
        self._labels = {"model_name": name}

        def counter(metric: str, text: str, *more: str) -> Counter:
            return Counter(metric, text, ["model_name", *more], registry=self._registry)

        def seconds(metric: str, text: str) -> Histogram:
            return Histogram(metric, text, ["model_name"], registry=self._registry, buckets=_SECONDS)

        self._requests = counter("sglang:num_requests", "Responses that have ended.")
        self._aborted = counter("sglang:num_aborted_requests", "Responses that were aborted.")
        self._failed = counter("zerogap:failed_requests", "Responses that ended with an error.")
        self._prompt_tokens = counter("sglang:prompt_tokens", "Prompt tokens of responses that have ended.")
        self._cached_tokens = counter("sglang:cached_tokens", "Prompt tokens whose keys and values were in the cache.")
        self._generated = counter("sglang:generation_tokens", "Tokens of responses that have ended.")
        self._retractions = counter(
            "sglang:num_retracted_requests", "Times that a response gave up its cache and came back."
        )
        self._calls = counter("sglang:http_responses", "Answered calls.", "endpoint", "status_code")
        self._e2e = seconds("sglang:e2e_request_latency_seconds", "From arrival to the last token.")
        self._first = seconds("sglang:time_to_first_token_seconds", "From arrival to the first token.")
        self._between = seconds("sglang:inter_token_latency_seconds", "Mean time between a response's tokens.")
        self._registry.register(_Now(core, name))

    def ended(self, response: Generated) -> None:
        """Counts a response that has ended, or that its client left."""
        own = self._labels
        reason = response.finish_reason or {}
        self._requests.labels(**own).inc()
        if response.error is not None:
            self._failed.labels(**own).inc()
        elif reason.get("type") in (None, "abort"):
            self._aborted.labels(**own).inc()
        self._prompt_tokens.labels(**own).inc(len(response.prompt_ids))
        self._cached_tokens.labels(**own).inc(response.cached_tokens)
        self._generated.labels(**own).inc(len(response.ids))
        self._retractions.labels(**own).inc(response.num_retractions)
        if response.first_token and response.ended:
            self._first.labels(**own).observe(response.first_token - response.began)
            self._e2e.labels(**own).observe(response.ended - response.began)
            if len(response.ids) > 1:
                between = (response.ended - response.first_token) / (len(response.ids) - 1)
                self._between.labels(**own).observe(between)

    def answered(self, route: str, status: int) -> None:
        self._calls.labels(**self._labels, endpoint=route, status_code=str(status)).inc()

    async def metrics(self, body: EmptyBody, _: Request) -> Response:
        return Response(generate_latest(self._registry), media_type="text/plain; version=0.0.4; charset=utf-8")


class _Now(Collector):
    """What the core says of itself at the moment of asking."""

    def __init__(self, core: Core, name: str) -> None:
        self._core, self._name = core, name

    def collect(self) -> Iterator[Metric]:
        status = self._core.status()
        used, room = status.get("num_used_tokens", 0), status.get("num_kv_tokens", 0)
        for metric, text, value in (
            ("sglang:num_running_reqs", "Responses that are being generated.", status["num_running"]),
            ("sglang:num_queue_reqs", "Responses that wait.", status["num_waiting"]),
            (
                "sglang:num_paused_reqs",
                "Responses that wait because the engine does not generate.",
                status["num_waiting"] if status["state"] != "running" else 0,
            ),
            ("sglang:num_used_tokens", "Tokens whose keys and values are held.", used),
            ("sglang:max_total_num_tokens", "Tokens that the cache can hold.", room),
            ("sglang:token_usage", "Held tokens as a share of the cache.", used / room if room else 0.0),
            ("zerogap:weight_version", "Version of the weights.", status["weight_version"]),
            ("zerogap:seconds_stalled", "Time without a step although there is work.", status["seconds_stalled"]),
        ):
            yield self._gauge(metric, text, {}, value)
        states = GaugeMetricFamily(
            "zerogap:state", "1 for the state that the engine is in.", labels=["model_name", "state"]
        )
        for state in dict.fromkeys((*_STATES, status["state"])):
            states.add_metric([self._name, state], float(state == status["state"]))
        yield states

    def _gauge(self, metric: str, text: str, labels: dict[str, str], value: Any) -> GaugeMetricFamily:
        family = GaugeMetricFamily(metric, text, labels=["model_name", *labels])
        family.add_metric([self._name, *labels.values()], float(value))
        return family

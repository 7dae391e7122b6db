"""What the server says of itself in /openapi.json is a schema that a generator of requests can follow, and whatever it
makes of it, in the schema's bounds and beyond them, has a known answer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import requests
import schemathesis
from hypothesis import Phase, given, settings
from schemathesis import GenerationMode
from support.assertions import fault_of
from support.served_process import EngineServer, engine_server, healing_calls

from zerogap.wire.routes import ROUTES

ANSWER_SECONDS = 10.0
EXAMPLES = 3
"""Requests to each route and method."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineServer]:
    with engine_server(tmp_path_factory.mktemp("openapi")) as server:
        yield server


@pytest.fixture(scope="module")
def page(engine: EngineServer) -> dict[str, Any]:
    return httpx.get(engine.url + "/openapi.json", trust_env=False).json()


@pytest.fixture(scope="module")
def described(engine: EngineServer, page: dict[str, Any]) -> Any:
    described = schemathesis.openapi.from_dict(page)
    described.config.update(base_url=engine.url)
    return described


def test_every_route_is_described_and_every_reference_leads_somewhere(page):
    for route in ROUTES:
        for path in (route.path, *route.aliases):
            assert {method.lower() for method in route.methods} <= set(page["paths"][path]), path
    models = page["components"]["schemas"]
    assert {name for name in re.findall(r"#/components/schemas/(\w+)", str(page)) if name not in models} == set()


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
def test_whatever_follows_the_schema_or_breaks_it_has_a_known_answer(engine, described, mode):
    faults: list[Any] = []
    counts: Counter[int] = Counter()

    def ask(case: schemathesis.Case) -> None:
        response = case.call(session=session, timeout=ANSWER_SECONDS)
        counts[response.status_code] += 1
        if fault := fault_of(response):
            faults.append((case.as_curl_command(), fault))

    with requests.Session() as session:
        session.trust_env = False
        for result in described.get_all_operations():
            for path, body in healing_calls(engine.folder):
                last = session.post(engine.url + path, json=body, timeout=ANSWER_SECONDS)
            assert last.status_code == 200, "the engine generates again"
            operation = result.ok()
            strategy = operation.as_strategy(generation_mode=mode)
            bounded = settings(max_examples=EXAMPLES, deadline=None, database=None, phases=[Phase.generate])
            bounded(given(case=strategy)(ask))()
    assert faults == []
    assert counts[400] if mode is GenerationMode.NEGATIVE else counts[200], counts

"""A real HTTP server over the fake core, in the test's own event loop, and our client for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from support.fake_core import FakeCore, letter_tokenizer, served

from zerogap.client.http import Deadlines, EngineClient
from zerogap.engine.options import ServiceOptions


@dataclass
class Served:
    """`http` sees raw replies, as a client that was written for SGLang does."""

    core: FakeCore
    url: str
    client: EngineClient
    http: httpx.AsyncClient


@pytest.fixture
async def engine(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    """Parametrise indirectly with FakeCore's arguments; `tokenizer=False` serves token ids only."""
    arguments = dict(getattr(request, "param", {}))
    tokenizer = letter_tokenizer() if arguments.pop("tokenizer", True) else None
    core = FakeCore(**arguments)
    async with (
        served(core, tmp_path, tokenizer, ServiceOptions(allowed_paths=(Path("/models"),))) as url,
        EngineClient(url, name="fake", deadlines=Deadlines(10.0, 10.0, 2.0)) as client,
        httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as http,
    ):
        yield Served(core, url, client, http)

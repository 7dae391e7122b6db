"""`docs/wire.md` says what the tables say."""

from __future__ import annotations

from pathlib import Path

from zerogap.engine.reference import page
from zerogap.engine.state import CALLS
from zerogap.wire.routes import ROUTES

DOCS = Path(__file__).parents[2] / "docs" / "wire.md"


def test_the_page_is_the_one_that_the_tables_give():
    assert DOCS.read_text(encoding="utf-8") == page(), "run: python -m zerogap.engine.reference > docs/wire.md"


def test_every_route_and_call_is_on_the_page():
    text = page()
    assert all(f" {route.path}`" in text for route in ROUTES)
    assert all(f"`{call}`" in text for call in CALLS)

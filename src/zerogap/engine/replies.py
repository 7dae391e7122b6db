"""The only place for the forms of a reply: JSON, success, and one server-sent event."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import Response

from zerogap.wire import codec


def json_reply(value: Any, status: int = 200) -> Response:
    return Response(codec.dumps(value), status_code=status, media_type="application/json")


def success(message: str, **fields: Any) -> Response:
    return json_reply({"success": True, "message": message, **fields})


def event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + codec.dumps(value) + b"\n\n"

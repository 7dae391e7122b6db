"""The only place that answers for routes of SGLang that this engine does not have: 501, what to do instead, and a body
that SGLang's clients can read.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import Request, Response

from zerogap.engine.replies import json_reply
from zerogap.errors import EngineRejected
from zerogap.wire import codec
from zerogap.wire.routes import Route

NOT_IMPLEMENTED = 501


def refusal(route: Route) -> Callable[[Any, Request], Awaitable[Response]]:
    """The handler of a route that is declared `absent`."""

    async def refuse(body: Any, _: Request) -> Response:
        del body
        error = EngineRejected(
            f"{route.path} is not supported by this engine yet", remedy=route.absent, status=NOT_IMPLEMENTED
        )
        reply = codec.error_json(error) | {"error_message": error.what}  # where clients look after an adapter's load
        return json_reply(reply, NOT_IMPLEMENTED)

    return refuse

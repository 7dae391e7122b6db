"""The only place where the routes of the wire become an HTTP application: bodies in, one shape for every error out."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from zerogap import __version__
from zerogap.engine.auth import check_key
from zerogap.engine.replies import json_reply
from zerogap.engine.service import EngineService
from zerogap.errors import ConfigError, EngineRejected, ZerogapError
from zerogap.wire import codec
from zerogap.wire.routes import GET, ROUTES, Route

logger = logging.getLogger(__name__)
access = logging.getLogger("zerogap.access")

MAX_BODY_BYTES = 64 << 20


def build_app(service: EngineService) -> FastAPI:
    """The application: every route of the table, and one shape for every error."""
    app = FastAPI(title="zerogap rollout engine", version=__version__, docs_url=None, redoc_url=None)
    for route in ROUTES:
        endpoint = _endpoint(route, service)
        for path, method in itertools.product((route.path, *route.aliases), route.methods):
            app.add_api_route(
                path,
                endpoint,
                methods=[method],
                name=route.name,
                operation_id=f"{method.lower()}{path.replace('/', '_')}",
                description=f"{route.reply} {route.ours}{route.absent}".strip(),
                openapi_extra=_openapi_body(route),
            )
    _document(app)
    app.add_exception_handler(ZerogapError, _on_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnect, _on_gone)
    app.add_exception_handler(Exception, _on_defect)
    return app


def _endpoint(route: Route, service: EngineService) -> Callable[[Request], Awaitable[Response]]:
    handler = service.handler(route)

    async def endpoint(request: Request) -> Response:
        check_key(service.options, route, request)
        return await handler(codec.read_body(route.body, await _read(route, request)), request)

    async def counted(request: Request) -> Response:
        """Every call leaves a line and is counted, whatever it ends with."""
        began, status = time.monotonic(), 500
        try:
            response = await endpoint(request)
            status = response.status_code
            return response
        except ZerogapError as error:
            status = codec.status_of(error)
            raise
        finally:
            service.metrics.answered(route.name, status)
            level = logging.DEBUG if route.access == "open" else logging.INFO
            access.log(level, "%s %s %d %.3f s", request.method, request.url.path, status, time.monotonic() - began)

    return counted


async def _read(route: Route, request: Request) -> Any:
    _check_type(request)
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise ConfigError(
                f"the body is above {MAX_BODY_BYTES:,} bytes", remedy="send fewer prompts in one call", status=413
            )
        parts.append(part)
    if size:
        return codec.loads(b"".join(parts))
    if route.body_required and request.method != GET:
        raise ConfigError(f"{route.path} needs a body", remedy="send a JSON object; {} where no field is needed")
    return {}


def _check_type(request: Request) -> None:
    """Raises for a body that calls itself something else than JSON: a web page may send such a one without asking."""
    given = request.headers.get("content-type")
    kind = "" if given is None else given.partition(";")[0].strip().lower()
    if given is not None and kind != "application/json" and not kind.endswith("+json"):
        raise ConfigError(
            f"the body's content type is {given[:80]!r}",
            remedy="send JSON, with the header Content-Type: application/json",
            status=415,
        )


_SCHEMAS = "#/components/schemas/{model}"


def _openapi_body(route: Route) -> dict[str, Any]:
    """Of a body read by hand, what FastAPI would say of one that it reads."""
    schema = route.body.model_json_schema(ref_template=_SCHEMAS)
    schema.pop("$defs", None)
    return {"requestBody": {"required": route.body_required, "content": {"application/json": {"schema": schema}}}}


def _document(app: FastAPI) -> None:
    """Adds the models that the bodies refer to, once all routes are known."""
    models: dict[str, Any] = {}
    for route in ROUTES:
        models |= route.body.model_json_schema(ref_template=_SCHEMAS).get("$defs", {})
    page = app.openapi()
    page.setdefault("components", {}).setdefault("schemas", {}).update(models)


async def _on_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, ZerogapError)
    status = codec.status_of(error)
    if status >= 500:
        logger.log(logging.ERROR if status == 500 else logging.WARNING, "%s", error)
    reply = json_reply(codec.error_json(error, status), status)
    if status == 503:
        reply.headers["Retry-After"] = "1"
    return reply


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    ours = EngineRejected(
        f"{request.method} {request.url.path}: {error.detail}", remedy="docs/wire.md lists the routes"
    )
    return json_reply(codec.error_json(ours, error.status_code), error.status_code)


async def _on_gone(_: Request, error: Exception) -> Response:
    del error  # nobody is there to read it
    return Response(status_code=499)


async def _on_defect(request: Request, error: Exception) -> Response:
    logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
    ours = EngineRejected(
        f"{request.url.path}: {type(error).__name__}: {error}", remedy="this is a defect: report the engine's log"
    )
    return json_reply(codec.error_json(ours, 500), 500)

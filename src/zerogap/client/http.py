"""The only place that speaks HTTP to a rollout engine, ours or SGLang's.

Every call has a deadline. Calls that may arrive twice without harm are sent again when the connection fails, within a
small budget; no other call is. What the engine answers as an error is raised as the same class.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from zerogap.errors import ConfigError, EngineUnreachable, ProtocolMismatch
from zerogap.wire import codec
from zerogap.wire.api import GenerateBody, GenerateReply, MemoryReport, ServerInfo
from zerogap.wire.messages import CheckerAction, MemoryTag, PauseMode
from zerogap.wire.routes import BY_NAME, POST, Route
from zerogap.wire.tensors import BucketHeader, TransferPlan

_PAUSES_SECONDS = (0.1, 0.3)
"""Before each further attempt of a call that may be repeated."""
_KEEPALIVE_SECONDS = 300.0
"""Below the server's own limit, so that no request is written to a connection that the server is closing."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds until a call is given up: `generate` for all responses of one call, `health` for a sign of life."""

    call_seconds: float = 60.0
    generate_seconds: float = 600.0
    health_seconds: float = 5.0


class EngineClient:
    """One engine behind a url; implements RolloutEngine. `name` is what errors call it."""

    def __init__(
        self,
        base_url: str,
        *,
        name: str = "engine",
        deadlines: Deadlines | None = None,
        api_key: str | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.base_url, self.name = base_url.rstrip("/"), name
        self.deadlines = deadlines or Deadlines()
        self._http = httpx.AsyncClient(
            base_url=_checked(self.base_url),
            headers={} if api_key is None else {"Authorization": f"Bearer {api_key}"},
            timeout=None,  # the deadline is set per call, around all its attempts
            limits=httpx.Limits(max_connections=None, keepalive_expiry=_KEEPALIVE_SECONDS),
            transport=transport,
            trust_env=False,  # a proxy of the environment is not meant for an engine
        )

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    # --- generation

    async def generate(self, body: GenerateBody, *, deadline_seconds: float | None = None) -> list[GenerateReply]:
        """All responses, prompt by prompt and for each prompt sample by sample."""
        data = await self._json(
            "generate",
            body.model_dump(exclude_unset=True) | {"stream": False},
            deadline_seconds=deadline_seconds or self.deadlines.generate_seconds,
        )
        return [codec.read_reply(one) for one in (data if isinstance(data, list) else [data])]

    async def stream(
        self, body: GenerateBody, *, deadline_seconds: float | None = None
    ) -> AsyncIterator[tuple[int, GenerateReply]]:
        """Responses as they grow: (place in the order of `generate`, everything generated so far)."""
        seconds = deadline_seconds or self.deadlines.generate_seconds
        give_up = time.monotonic() + seconds
        route = BY_NAME["generate"]
        request = self._http.build_request(
            POST, route.path, json=body.model_dump(exclude_unset=True) | {"stream": True}
        )
        response = await self._send(route, request, give_up, seconds, stream=True)
        done = False
        try:
            if not response.is_success:
                raise codec.read_error(response.status_code, await response.aread(), self._where(route))
            async for line in self._lines(response, route, give_up, seconds):
                done = line == codec.DONE
                if not done:
                    data = json.loads(line)
                    if "error" in data:
                        raise codec.read_error(data["error"].get("code", 500), line.encode(), self._where(route))
                    yield data.get("index", 0), codec.read_reply(data)
        finally:
            await response.aclose()
        if not done:
            raise EngineUnreachable(
                f"{self._where(route)}: the stream ended without {codec.DONE}", remedy="see the engine's log"
            )

    async def abort_request(self, rid: str = "", *, abort_all: bool = False) -> None:
        await self._call("abort_request", {"rid": rid, "abort_all": abort_all})

    async def pause_generation(self, mode: PauseMode = "retract") -> None:
        await self._call("pause_generation", {"mode": mode})

    async def continue_generation(self) -> None:
        await self._call("continue_generation", {})

    async def flush_cache(self, timeout_seconds: float = 0.0) -> None:
        await self._call(
            "flush_cache",
            {},
            params={"timeout": timeout_seconds},
            deadline_seconds=self.deadlines.call_seconds + timeout_seconds,
        )

    # --- what the engine is

    async def health(self) -> dict[str, Any]:
        """The engine's own account, once; raises when it gives none, or a bad one."""
        response = await self._call("health", None, deadline_seconds=self.deadlines.health_seconds, repeat=False)
        return json.loads(response.content) if response.content else {"status": "ok"}

    async def server_info(self) -> ServerInfo:
        return codec.read_server_info(await self._json("server_info"), self.name)

    async def model_info(self) -> dict[str, Any]:
        return await self._json("model_info")

    # --- memory

    async def release_memory_occupation(self, tags: Sequence[MemoryTag] | None = None) -> MemoryReport:
        body = {"tags": None if tags is None else list(tags)}
        return codec.read_memory(await self._json("release_memory_occupation", body), "freed")

    async def resume_memory_occupation(self, tags: Sequence[MemoryTag] | None = None) -> MemoryReport:
        body = {"tags": None if tags is None else list(tags)}
        return codec.read_memory(await self._json("resume_memory_occupation", body), "resumed")

    # --- weights

    async def begin_weight_update(self, plan: TransferPlan) -> None:
        await self._call("begin_weight_update", {"plan": plan.model_dump(mode="json")})

    async def update_weights_from_tensor(self, header: BucketHeader) -> None:
        await self._call("update_weights_from_tensor", {"bucket": header.model_dump(mode="json"), "flush_cache": False})

    async def update_weights_from_disk(self, path: str, version: int) -> None:
        await self._call("update_weights_from_disk", {"model_path": path, "weight_version": str(version)})

    async def end_weight_update(self) -> None:
        await self._call("end_weight_update", {})

    async def update_weight_version(self, version: int) -> None:
        await self._call("update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    async def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]:
        return await self._json("get_weights_by_name", {"name": name, "truncate_size": truncate_size})

    async def weights_checker(self, action: CheckerAction) -> dict[str, Any]:
        return await self._json("weights_checker", {"action": action})

    # --- one call

    async def _json(
        self, name: str, body: Mapping[str, Any] | None = None, *, deadline_seconds: float | None = None
    ) -> Any:
        response = await self._call(name, body, deadline_seconds=deadline_seconds)
        try:
            return json.loads(response.content)
        except (ValueError, RecursionError) as error:
            raise ProtocolMismatch(
                f"{self._where(BY_NAME[name])}: the reply is not JSON: {response.content[:80]!r}",
                remedy="check that the url is that of a rollout engine and not of something before it",
            ) from error

    async def _call(
        self,
        name: str,
        body: Mapping[str, Any] | None,
        *,
        params: Mapping[str, Any] | None = None,
        deadline_seconds: float | None = None,
        repeat: bool = True,
    ) -> httpx.Response:
        route = BY_NAME[name]
        seconds = deadline_seconds or self.deadlines.call_seconds
        give_up = time.monotonic() + seconds
        request = self._http.build_request(
            route.client_method, route.path, json=body if route.client_method == POST else None, params=params
        )
        pauses = list(_PAUSES_SECONDS) if route.idempotent and repeat else []
        while True:
            try:
                response = await self._send(route, request, give_up, seconds)
                break
            except EngineUnreachable:
                if not pauses or time.monotonic() + pauses[0] >= give_up:
                    raise
                await asyncio.sleep(pauses.pop(0))
        if not response.is_success:
            raise codec.read_error(response.status_code, response.content, self._where(route))
        return response

    async def _send(
        self, route: Route, request: httpx.Request, give_up: float, seconds: float, *, stream: bool = False
    ) -> httpx.Response:
        try:
            async with asyncio.timeout(give_up - time.monotonic()):
                return await self._http.send(request, stream=stream)
        except TimeoutError as error:
            raise self._too_late(route, seconds) from error
        except httpx.TransportError as error:
            raise self._lost(route, error) from error

    async def _lines(
        self, response: httpx.Response, route: Route, give_up: float, seconds: float
    ) -> AsyncIterator[str]:
        """The payloads of a stream of server-sent events."""
        lines = response.aiter_lines()
        try:
            while True:
                async with asyncio.timeout(give_up - time.monotonic()):
                    line = await anext(lines, None)
                if line is None:
                    return
                if line.startswith("data: "):
                    yield line.removeprefix("data: ")
        except TimeoutError as error:
            raise self._too_late(route, seconds) from error
        except httpx.TransportError as error:
            raise self._lost(route, error) from error

    def _where(self, route: Route) -> str:
        return f"{self.name} at {self.base_url}, {route.path}"

    def _too_late(self, route: Route, seconds: float) -> EngineUnreachable:
        return EngineUnreachable(
            f"{self._where(route)}: no answer within {seconds:g} s",
            remedy="see the engine's log: it is busy, stuck or paused; raise the deadline only if it was busy",
            engine=self.name,
            url=self.base_url,
            call=route.name,
        )

    def _lost(self, route: Route, error: httpx.TransportError) -> EngineUnreachable:
        how = "connection refused" if isinstance(error, httpx.ConnectError) else "the connection broke"
        return EngineUnreachable(
            f"{self._where(route)}: {how} ({error or type(error).__name__})",
            remedy="the engine is not running, or died: see its log, and start it again",
            engine=self.name,
            url=self.base_url,
            call=route.name,
        )


def _checked(url: str) -> httpx.URL:
    try:
        parsed = httpx.URL(url)
        if parsed.scheme in ("http", "https") and parsed.host:
            return parsed
        fault = "it needs a scheme and a host"
    except httpx.InvalidURL as error:
        fault = str(error)
    raise ConfigError(f"{url!r} is no url of an engine: {fault}", remedy="write it like http://127.0.0.1:30000")

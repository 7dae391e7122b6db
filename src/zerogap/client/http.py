"""The only place that speaks HTTP to a rollout engine, ours or SGLang's.

Every call has a deadline. Calls that may arrive twice without harm are sent again when the connection fails, within a
small budget; no other call is. What the engine answers as an error is raised as the same class, and SGLang's errors as
the class that they mean. No field whose default does harm in SGLang is left out of a body.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import httpx

from zerogap.client import stock
from zerogap.errors import ConfigError, EngineStateError, EngineUnreachable, ProtocolMismatch
from zerogap.wire import codec
from zerogap.wire.api import GenerateBody, GenerateReply, MemoryReport, ServerInfo
from zerogap.wire.messages import CheckerAction, MemoryTag, PauseMode
from zerogap.wire.routes import BY_NAME, POST, Route
from zerogap.wire.tensors import BucketHeader, RankEndpoint, TransferMode, TransferPlan, UpdateGroup

_PAUSES_SECONDS = (0.1, 0.3)
"""Before each further attempt of a call that may be repeated; give or take a half, so that many callers spread out."""
_SETTLE_SECONDS = 2.0
"""A stock engine holds its last batch for a moment after the last response and refuses to flush: it is asked again."""
_POLL_SECONDS = 0.05
_KEEPALIVE_SECONDS = 300.0
"""Below the server's own limit, so that no request is written to a connection that the server is closing."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds until a call is given up: `generate` for all responses of one call, `health` for a sign of life, `update`
    for a step of a weight update, which may read a whole model.
    """

    call_seconds: float = 60.0
    generate_seconds: float = 600.0
    health_seconds: float = 5.0
    update_seconds: float = 600.0


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
        self._stock: bool | None = None
        self._held = False
        self._num_ranks = 1
        self._mode: TransferMode = "ipc"
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
        await self._check(body)
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
        await self._check(body)
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
                content = await response.aread()
                raise codec.read_error(response.status_code, content, self._where(route), call=route.name)
            async for line in self._lines(response, route, give_up, seconds):
                done = line == codec.DONE
                if not done:
                    yield self._read_event(route, line)
        finally:
            await response.aclose()
        if not done:
            raise EngineUnreachable(
                f"{self._where(route)}: the stream ended without {codec.DONE}", remedy="see the engine's log"
            )

    async def abort_request(self, rid: str = "", *, abort_all: bool = False) -> None:
        await self._call("abort_request", {"rid": rid, "abort_all": abort_all})

    async def pause_generation(self, mode: PauseMode = "retract") -> None:
        if mode == "abort" and self._held:
            # A stock engine that is paused in place cannot end its requests, and would wait for their end for ever.
            await self._call("pause_generation", {"mode": "retract"})
        await self._call("pause_generation", {"mode": mode})
        self._held = mode == "in_place"

    async def continue_generation(self) -> None:
        await self._call("continue_generation", {})
        self._held = False

    async def flush_cache(self, timeout_seconds: float = 0.0) -> None:
        """Asks until the engine is idle: a wait inside of a stock engine would count the requests of a paused one."""
        start = time.monotonic()
        while True:
            try:
                await self._call("flush_cache", {}, params={"timeout": 0})
                return
            except EngineStateError as error:
                ours = "legal_calls" in error.details
                patience = timeout_seconds if ours else max(timeout_seconds, _SETTLE_SECONDS)
                if time.monotonic() - start >= patience:
                    raise
            await asyncio.sleep(_POLL_SECONDS)

    # --- what the engine is

    async def health(self) -> dict[str, Any]:
        """The engine's own account, once; raises when it gives none, or a bad one.

        A stock engine's health check waits while it is paused, calls itself sick then, and touches released memory. It
        is asked for its model instead: it ends as a whole, so who answers lives.
        """
        seconds = self.deadlines.health_seconds
        if self._stock is not False:
            info = await self._identify(deadline_seconds=seconds, repeat=False)
            if self._stock:
                return {"status": "ok", "engine": self.name, "weight_version": info.get("weight_version")}
        return await self._json("health", deadline_seconds=seconds, repeat=False)

    async def server_info(self) -> ServerInfo:
        info = codec.read_server_info(await self._json("server_info"), self.name)
        self._num_ranks = 1 if "zerogap" in info.raw else stock.num_ranks(info.raw, f"{self.name} at {self.base_url}")
        return info

    async def model_info(self) -> dict[str, Any]:
        return await self._json("model_info")

    # --- memory

    async def release_memory_occupation(self, tags: Sequence[MemoryTag] | None = None) -> MemoryReport:
        """A stock engine dies of a release while it is not idle, and is flushed first: that is refused then."""
        if await self.is_stock():
            fault = stock.release_fault((await self.server_info()).raw, f"{self.name} at {self.base_url}")
            if fault is not None:
                raise fault
            await self.flush_cache()
        body = {"tags": None if tags is None else list(tags)}
        return codec.read_memory(await self._json("release_memory_occupation", body), "freed")

    async def resume_memory_occupation(self, tags: Sequence[MemoryTag] | None = None) -> MemoryReport:
        body = {"tags": None if tags is None else list(tags)}
        return codec.read_memory(await self._json("resume_memory_occupation", body), "resumed")

    # --- weights

    @property
    def num_ranks(self) -> int:
        """As of the last server_info."""
        return self._num_ranks

    async def begin_weight_update(self, plan: TransferPlan) -> None:
        """At a stock engine this ends a session that broke first: it knows no other way out of one."""
        self._mode = plan.mode
        if not await self.is_stock():
            await self._update("begin_weight_update", {"selector": "all", "plan": plan.model_dump(mode="json")})
        elif plan.mode != "disk_delta":  # a checkpoint is read outside of a session
            with suppress(EngineStateError):
                await self._update("end_weight_update", {})
            await self._update("begin_weight_update", {"selector": "all"})

    async def pull_weights(self, source_dir: str, target_version: int) -> None:
        body = {"local_checkpoint_dir": "", "source_dir": source_dir, "target_version": target_version}
        await self._update("pull_weights", body)

    async def update_weights_from_tensor(self, header: BucketHeader) -> None:
        body = {"bucket": header.model_dump(mode="json"), "flush_cache": False, "abort_all_requests": False}
        await self._update("update_weights_from_tensor", body)

    async def init_weights_update_group(self, group: UpdateGroup, *, rank_offset: int) -> None:
        await self._call("init_weights_update_group", group.model_dump(mode="json") | {"rank_offset": rank_offset})

    async def update_weights_from_distributed(self, header: BucketHeader) -> None:
        body = codec.distributed_body(header)
        if self._stock:
            body = stock.distributed_body(body, flattened=self._mode == "broadcast_packed")
        await self._update("update_weights_from_distributed", body)

    async def destroy_weights_update_group(self, group_name: str) -> None:
        await self._call("destroy_weights_update_group", {"group_name": group_name})

    async def remote_instance_transfer_engine_info(self) -> list[RankEndpoint]:
        return [codec.read_endpoint(await self._json("remote_instance_transfer_engine_info"))]

    async def update_weights_from_disk(self, path: str, version: int) -> None:
        """Flushes too. `auto`: a stock engine that began without weights would not know how to read them."""
        await self._update(
            "update_weights_from_disk",
            {
                "model_path": path,
                "load_format": "auto",
                "flush_cache": True,
                "abort_all_requests": False,
                "weight_version": str(version),
            },
        )

    async def end_weight_update(self) -> None:
        if not (self._stock and self._mode == "disk_delta"):
            await self._update("end_weight_update", {})

    async def _update(self, name: str, body: Mapping[str, Any]) -> None:
        await self._call(name, body, deadline_seconds=self.deadlines.update_seconds)

    async def update_weight_version(self, version: int) -> None:
        await self._call("update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    async def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]:
        return await self._json("get_weights_by_name", {"name": name, "truncate_size": truncate_size})

    async def weights_checker(self, action: CheckerAction) -> dict[str, Any]:
        return await self._json("weights_checker", {"action": action})

    # --- which engine

    async def is_stock(self) -> bool:
        """Whether it is a stock SGLang server. Asked once."""
        if self._stock is None:
            await self._identify()
        return bool(self._stock)

    async def _identify(self, **how: Any) -> dict[str, Any]:
        """The engine's model_info, which says whose dialect it is."""
        info = await self._json("model_info", **how)
        if not isinstance(info, dict):
            raise self._no_engine("model_info", info)
        self._stock = "zerogap" not in info
        return info

    async def _check(self, body: GenerateBody) -> None:
        """Asks which engine it is only for a request that not every engine understands."""
        fault = stock.request_fault(body, f"{self.name} at {self.base_url}")
        if fault is not None and await self.is_stock():
            raise fault

    # --- one call

    async def _json(
        self,
        name: str,
        body: Mapping[str, Any] | None = None,
        *,
        deadline_seconds: float | None = None,
        repeat: bool = True,
    ) -> Any:
        response = await self._call(name, body, deadline_seconds=deadline_seconds, repeat=repeat)
        try:
            return json.loads(response.content)
        except (ValueError, RecursionError) as error:
            raise self._no_engine(name, response.content[:80]) from error

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
        pauses = [pause * random.uniform(0.5, 1.5) for pause in _PAUSES_SECONDS] if route.idempotent and repeat else []
        while True:
            try:
                response = await self._send(route, request, give_up, seconds)
                break
            except EngineUnreachable:
                if not pauses or time.monotonic() + pauses[0] >= give_up:
                    raise
                await asyncio.sleep(pauses.pop(0))
        if not response.is_success:
            raise codec.read_error(response.status_code, response.content, self._where(route), call=name)
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

    def _read_event(self, route: Route, line: str) -> tuple[int, GenerateReply]:
        try:
            data = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise self._no_engine(route.name, line[:80]) from error
        if not isinstance(data, dict):
            raise self._no_engine(route.name, line[:80])
        if "error" in data:
            code = data["error"].get("code") if isinstance(data["error"], dict) else None
            status = code if isinstance(code, int) else 500
            raise codec.read_error(status, line.encode(), self._where(route), call=route.name)
        return data.get("index", 0), codec.read_reply(data)

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

    def _no_engine(self, name: str, reply: Any) -> ProtocolMismatch:
        return ProtocolMismatch(
            f"{self._where(BY_NAME[name])}: the reply is not what a rollout engine says: {reply!r}",
            remedy="check that the url is that of a rollout engine and not of something before it",
        )

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

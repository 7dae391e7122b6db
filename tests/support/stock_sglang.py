"""A double of a stock `sglang serve` 0.5.22: its routes for RL with its defaults, its error shapes and its traps.

It stands for a server with one GPU rank, `--skip-tokenizer-init` and `--enable-memory-saver`. One of SGLang's seconds
takes `second` here. What ends a stock server ends this one: connections break, the port closes, `death` says why.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, StreamingResponse
from tokenizers import Tokenizer
from torch import Tensor

from support.stock_messages import (
    SAMPLING_FIELDS,
    Abort,
    Begin,
    ByName,
    Empty,
    FromDisk,
    FromDistributed,
    FromTensor,
    Group,
    Leave,
    Memory,
    Pause,
    Refused,
    Update,
    Version,
    flat,
    value_error,
    verdict,
)
from support.stock_scheduler import CONTEXT, Running, Scheduler, logprob_of, token_after
from zerogap.engine.server import bind
from zerogap.errors import TransferFailed
from zerogap.weights.groups import join
from zerogap.wire.tensors import UpdateGroup

FLUSH_EVERY = 50
"""Tokens after which the scheduler tells the HTTP process of a request that does not stream."""


class StockSglang:
    """The HTTP process. `deterministic`: seeds count, and one that is not given is 42. `text`: it has its tokenizer."""

    def __init__(
        self,
        folder: Path,
        *,
        step_seconds: float = 0.0,
        second: float = 1.0,
        deterministic: bool = True,
        memory_saver: bool = True,
        load_format: str = "auto",
        dp_size: int = 1,
        max_queued_requests: int | None = None,
        api_key: str | None = None,
        text: bool = False,
    ) -> None:
        self.folder, self.model_path, self.served_model_name = folder, str(folder), str(folder)
        self.scheduler = Scheduler(folder, step_seconds)
        self.second, self.deterministic, self.memory_saver = second, deterministic, memory_saver
        self.load_format, self.dp_size, self.api_key = load_format, dp_size, api_key
        self.max_queued_requests = max_queued_requests
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json")) if text else None
        self.version, self.status, self.death = "default", "Up", None
        self.live: dict[str, Running] = {}
        self.groups: dict[str, Any] = {}
        self.dies_of = ""
        """The last name of the bucket whose announcement ends the server."""
        self.paused, self.gate = False, asyncio.Condition()
        self.num_readers, self.num_writers, self.lock = 0, 0, asyncio.Condition()
        self.calls: list[tuple[str, Any]] = []
        self.kill: Callable[[], None] = lambda: None
        self._unseeded = itertools.count(1)

    async def run_scheduler(self) -> None:
        while self.death is None:
            await asyncio.sleep(max(self.scheduler.step_seconds, 0.001))
            if not self.scheduler.paused:
                self.guard(self.scheduler.step)

    def guard(self, act: Callable[..., None], *arguments: Any) -> None:
        """What raises in the scheduler ends the server."""
        try:
            act(*arguments)
        except (AssertionError, KeyError) as error:
            self.death = f"{type(error).__name__}: {error}"
            self.kill()
            raise asyncio.CancelledError from error

    # --- generation

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        self.calls.append(("generate", body))
        items = list(self._expand(body))
        for one in items:
            if one.rid in self.live:
                raise value_error(f"Duplicate request ID detected: {one.rid}")
        if self.max_queued_requests is not None and len(items) > self.max_queued_requests:
            raise flat(503, "The request queue is full.")
        async with self.gate:
            await self.gate.wait_for(lambda: not self.paused)
        async with self.lock:
            await self.lock.wait_for(lambda: not self.num_writers)
            self.num_readers += 1
        self.live |= {one.rid: one for one in items}
        self.scheduler.waiting += items
        is_list = len(items) > 1 or isinstance(body["input_ids"][0], list)
        if body.get("stream"):
            return StreamingResponse(self._events(items, body, is_list), media_type="text/event-stream")
        try:
            for one in items:
                while one.finish_reason is None:
                    await one.moved.wait()
                    one.moved.clear()
            replies = [self._reply(one, body) for one in items]
            return JSONResponse(replies if is_list else replies[0])
        finally:
            await self._consumed(items)

    def _expand(self, body: dict[str, Any]) -> Iterator[Running]:
        given = body.get("sampling_params") or {}
        for params in given if isinstance(given, list) else [given]:
            for key in params.keys() - SAMPLING_FIELDS:
                raise Refused(400, {"error": f"unknown field `{key}`, expected one of `temperature`, ..."})
            if not 0 <= params.get("temperature", 1.0) < 1e9:
                raise value_error(f"temperature must be non-negative, got {params['temperature']}.")
        if body.get("text") is not None or not body.get("input_ids"):
            raise value_error("The engine initialized with skip_tokenizer_init=True cannot accept text prompts.")
        prompts = body["input_ids"] if isinstance(body["input_ids"][0], list) else [body["input_ids"]]
        rids = body.get("rid") or secrets.token_hex(16)
        if isinstance(rids, str):
            rids = [rids] if len(prompts) == 1 else [f"{rids}_{i}" for i in range(len(prompts))]
        for i, prompt in enumerate(prompts):
            params = {k: v for k, v in (given[i] if isinstance(given, list) else given).items() if v is not None}
            start = body.get("logprob_start_len", -1)
            new = params.get("max_new_tokens", 128)
            if len(prompt) >= CONTEXT or len(prompt) + new > CONTEXT:
                raise value_error(f"Requested token count exceeds the model's maximum context length of {CONTEXT}.")
            if body.get("return_logprob") and start > len(prompt):
                raise value_error(f"logprob_start_len ({start}) is higher than the number of input tokens")
            n = params.get("n", 1)
            for _ in range(n):
                rid = rids[i] if n == 1 else secrets.token_hex(16)
                yield Running(rid, list(prompt), params, self._seed(params))

    def _seed(self, params: dict[str, Any]) -> int:
        if params.get("temperature", 1.0) < 1e-6:
            return 0
        return params.get("sampling_seed", 42) if self.deterministic else next(self._unseeded) * 17

    def _reply(self, one: Running, body: dict[str, Any]) -> dict[str, Any]:
        reason = one.finish_reason
        waiting = reason is not None and reason.get("message") == "Abort in waiting queue"
        count = len(one.ids)
        if waiting and not body.get("stream"):
            count = count // FLUSH_EVERY * FLUSH_EVERY
        one.bounds = one.bounds or [(self.version, 0)]
        meta: dict[str, Any] = {"id": one.rid, "finish_reason": reason, "completion_tokens": count}
        if not waiting:
            meta |= {"prompt_tokens": len(one.prompt), "cached_tokens": 0, "reasoning_tokens": 0}
            meta["num_retractions"] = one.num_retractions
        if reason is not None:
            spans = one.spans(len(one.ids))
            meta |= {"weight_versions": spans, "weight_version": spans[-1]["version"], "e2e_latency": 0.1}
        else:
            meta["weight_version"] = self.version
        if body.get("return_logprob"):
            meta |= self._logprobs(one, count, body)
        text = {"text": self.tokenizer.decode(one.ids[:count])} if self.tokenizer else {}
        return text | {"output_ids": one.ids[:count], "meta_info": meta}

    def _logprobs(self, one: Running, count: int, body: dict[str, Any]) -> dict[str, Any]:
        shown = one.ids[:count]
        if one.params.get("max_new_tokens", 128) == 0 and one.logprobs:
            shown = [token_after(one.prompt, self.scheduler.weights, one.seed)]
        start = body.get("logprob_start_len", -1)
        scored: list[list[Any]] = []
        if start >= 0:
            for k in range(start, len(one.prompt)):
                value = logprob_of(one.prompt[k], one.prompt[:k], self.scheduler.weights) if k > start else None
                scored.append([value, one.prompt[k], None])
        return {
            "output_token_logprobs": [[one.logprobs[k], token, None] for k, token in enumerate(shown)],
            "output_token_logprobs_length": len(shown),
            "input_token_logprobs": scored,
        }

    async def _events(self, items: list[Running], body: dict[str, Any], is_list: bool) -> AsyncIterator[bytes]:
        try:
            for index, one in enumerate(items):
                while not one.told:
                    await one.moved.wait()
                    one.moved.clear()
                    one.told = one.finish_reason is not None
                    chunk = ({"index": index} if is_list else {}) | self._reply(one, body)
                    yield b"data: " + json.dumps(chunk).encode() + b"\n\n"
            yield b"data: [DONE]\n\n"
        finally:
            await self._consumed(items)

    async def _consumed(self, items: list[Running]) -> None:
        for one in items:
            self.live.pop(one.rid, None)
            one.aborting = True
        async with self.lock:
            self.num_readers -= 1
            self.lock.notify_all()

    # --- control

    async def pause_generation(self, body: Pause) -> dict[str, str]:
        self.calls.append(("pause_generation", body.mode))
        async with self.gate:
            self.paused = True
            if body.mode == "retract":
                self.scheduler.paused = True
                self.scheduler.retract()
            elif body.mode == "in_place":
                self.scheduler.paused = True
            else:
                while self.num_readers:
                    self.scheduler.abort("")
                    await asyncio.sleep(self.second)
        return {"message": "Generation paused successfully.", "status": "ok"}

    async def continue_generation(self, body: Empty) -> dict[str, str]:
        async with self.gate:
            self.paused = self.scheduler.paused = False
            self.gate.notify_all()
        return {"message": "Generation continued successfully.", "status": "ok"}

    async def abort_request(self, body: Abort) -> Response:
        if body.abort_all:
            self.scheduler.abort("")
        elif body.rid in self.live:
            self.scheduler.abort(body.rid)
        return Response()

    async def flush_cache(self, request: Request) -> Response:
        seconds = float(request.query_params.get("timeout", 0)) * self.second
        give_up = asyncio.get_running_loop().time() + seconds
        while not self._flush():
            if asyncio.get_running_loop().time() >= give_up:
                return PlainTextResponse("Flush cache failed: the server is not idle.\n", 400)
            await asyncio.sleep(0.005)
        return PlainTextResponse("Cache flushed.\nPlease check backend logs for more details.\n")

    def _flush(self) -> bool:
        return self.scheduler.idle

    async def release_memory_occupation(self, body: Memory) -> JSONResponse:
        self.calls.append(("release_memory_occupation", body.tags))
        self.guard(self.scheduler.release, body.tags or ["kv_cache", "weights", "cuda_graph"])
        return JSONResponse(None)

    async def resume_memory_occupation(self, body: Memory) -> JSONResponse:
        self.guard(self.scheduler.resume, body.tags or ["kv_cache", "weights", "cuda_graph"])
        return JSONResponse(None)

    # --- weights

    async def begin_weight_update(self, body: Begin) -> JSONResponse:
        if self.scheduler.session_open:
            return verdict(False, "A weight update session is already open; call end_weight_update() first.")
        self.scheduler.session_open = True
        return verdict(True, "Success")

    async def end_weight_update(self, body: Empty) -> JSONResponse:
        if not self.scheduler.session_open:
            return verdict(False, "No weight update session is open; call begin_weight_update() first.")
        self.scheduler.session_open = False
        return verdict(True, "Success")

    async def update_weights_from_tensor(self, body: FromTensor) -> JSONResponse:
        if not self.scheduler.session_open:
            return verdict(
                False, "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()"
            )
        return await self._update(body, lambda: None)

    async def init_weights_update_group(self, body: Group) -> JSONResponse:
        spec = UpdateGroup(**body.model_dump(exclude={"rank_offset"}))
        try:
            self.groups[body.group_name] = await asyncio.to_thread(join, spec, body.rank_offset, deadline_seconds=10.0)
        except TransferFailed as error:
            return verdict(False, f"Failed to initialize custom process group: {error.what}.")
        return verdict(True, "Succeeded to initialize custom process group.")

    async def destroy_weights_update_group(self, body: Leave) -> JSONResponse:
        group = self.groups.pop(body.group_name, None)
        if group is None:
            return verdict(False, "The group to be destroyed does not exist.")
        group.close()
        return verdict(True, "Succeeded to destroy custom process group.")

    async def update_weights_from_distributed(self, body: FromDistributed) -> JSONResponse:
        self.calls.append(("update_weights_from_distributed", body.model_dump()))
        if not self.scheduler.session_open:
            return verdict(
                False, "update_weights_from_distributed must run between begin_weight_update() and end_weight_update()"
            )
        if self.dies_of == body.names[-1]:
            self.death = "SIGKILL"
            self.groups[body.group_name].close()
            self.kill()
        try:
            tensors = await asyncio.to_thread(self._receive, body)
        except TransferFailed as error:
            return verdict(False, f"Failed to receive weights: {error.what}.")
        for name, tensor in tensors.items():
            if name in self.scheduler.tensors and self.scheduler.tensors[name].shape != tensor.shape:
                return verdict(False, f"Failed to update parameter online: {name}. Please discard the whole weights.")
        return await self._update(body, lambda: self.scheduler.give(tensors))

    def _receive(self, body: FromDistributed) -> dict[str, Tensor]:
        """As SGLang does: a broadcast per tensor, or one of all bytes, which are then viewed where they lie."""
        group = self.groups[body.group_name]
        dtypes = [getattr(torch, dtype) for dtype in body.dtypes]
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in zip(body.shapes, dtypes, strict=True)]
        whole = torch.empty(sum(sizes), dtype=torch.uint8)
        flattened = body.load_format == "flattened_bucket"
        flats = [whole] if flattened else [torch.empty(size, dtype=torch.uint8) for size in sizes]
        group.start(flats, deadline_seconds=10.0)
        for _ in flats:
            group.wait_one()
        parts = whole.split(sizes) if flattened else flats
        return {
            name: part.view(dtype).view(shape)
            for name, part, dtype, shape in zip(body.names, parts, dtypes, body.shapes, strict=True)
        }

    async def update_weights_from_disk(self, body: FromDisk) -> JSONResponse:
        self.calls.append(("update_weights_from_disk", body.model_dump()))
        if (body.load_format or self.load_format) == "dummy":
            return verdict(False, "Failed to get model loader: DummyModelLoader", num_paused_requests=0)
        folder = Path(body.model_path)
        if not (folder / "model.safetensors").is_file():
            return verdict(False, f"Failed to get weights iterator: {folder}", num_paused_requests=0)
        reply = await self._update(body, lambda: self.scheduler.load(folder), num_paused_requests=0)
        if reply.status_code == 200:
            self.model_path = self.served_model_name = body.model_path
        return reply

    async def _update(self, body: Update, load: Callable[[], None], **fields: Any) -> JSONResponse:
        assert self.dp_size == 1, "dp_size must be 1 for updating weights"
        if body.abort_all_requests:
            self.scheduler.abort("")
        if self.paused:
            async with self.gate:
                return self._apply(body, load, fields)
        async with self.lock:
            self.num_writers += 1
            try:
                await self.lock.wait_for(lambda: not self.num_readers)
                return self._apply(body, load, fields)
            finally:
                self.num_writers -= 1
                self.lock.notify_all()

    def _apply(self, body: Update, load: Callable[[], None], fields: dict[str, Any]) -> JSONResponse:
        load()
        if body.weight_version is not None:
            self.scheduler.set_version(body.weight_version)
        if body.flush_cache and not self._flush():
            return verdict(False, "Weights were updated, but the cache was not flushed: not idle.", **fields)
        note = ""
        if body.weight_version is not None:
            self.version = body.weight_version
            note = f" Weight version updated to {body.weight_version}."
        return verdict(True, "Succeeded to update model weights." + note, **fields)

    async def update_weight_version(self, body: Version) -> JSONResponse:
        self.calls.append(("update_weight_version", body.model_dump()))
        if body.abort_all_requests:
            self.scheduler.abort("")
        self.version = body.new_version
        self.scheduler.set_version(body.new_version)
        return verdict(True, f"Weight version updated to {body.new_version}", new_version=body.new_version)

    async def get_weights_by_name(self, body: ByName) -> JSONResponse:
        if body.name not in self.scheduler.tensors:
            raise Refused(400, {"error": {"message": "Get parameter by name failed"}})
        return JSONResponse(self.scheduler.tensors[body.name][: body.truncate_size].tolist())

    # --- info

    async def health(self) -> Response:
        """A generation of its own, so it waits at the gate while paused: 20 s, then 503 and a bad name."""
        before = self.scheduler.num_messages
        probe = asyncio.ensure_future(self._probe())
        try:
            for _ in range(20):
                await asyncio.sleep(self.second)
                if self.scheduler.num_messages != before:
                    self.status = "Up"
                    return Response(status_code=200)
        finally:
            probe.cancel()
        self.status = "UnHealthy"
        return Response(status_code=503)

    async def _probe(self) -> None:
        async with self.gate:
            await self.gate.wait_for(lambda: not self.paused)
        self.scheduler.waiting.append(Running(f"HEALTH_CHECK_{secrets.token_hex(4)}", [0], {"max_new_tokens": 1}, 0))

    async def ready(self) -> Response:
        return Response(status_code=200 if self.status == "Up" and not self.paused else 503)

    async def model_info(self) -> dict[str, Any]:
        return {
            "model_path": self.model_path,
            "served_model_name": self.served_model_name,
            "tokenizer_path": str(self.folder),
            "is_generation": True,
            "weight_version": self.version,
            "load_format": self.load_format,
        }

    async def server_info(self) -> dict[str, Any]:
        """The top level is what the server was started with, whatever has happened since."""
        return {
            "model_path": str(self.folder),
            "dtype": "float32",
            "weight_version": "default",
            "dp_size": self.dp_size,
            "pp_size": 1,
            "tp_size": 1,
            "enable_memory_saver": self.memory_saver,
            "enable_deterministic_inference": self.deterministic,
            "internal_states": [{"weight_version": self.scheduler.version}],
            "version": "0.5.22",
        }

    def app(self) -> FastAPI:
        app = FastAPI()
        routes: dict[str, tuple[Callable[..., Any], list[str]]] = {
            name: (getattr(self, name), methods.split())
            for methods, names in (
                ("POST PUT", "generate"),
                ("GET", "health ready model_info server_info"),
                ("GET POST", "flush_cache release_memory_occupation resume_memory_occupation get_weights_by_name"),
                ("POST", "pause_generation continue_generation abort_request begin_weight_update end_weight_update"),
                ("POST", "update_weights_from_tensor update_weights_from_disk update_weight_version"),
                ("POST", "init_weights_update_group update_weights_from_distributed destroy_weights_update_group"),
            )
            for name in names.split()
        }
        routes["health_generate"] = (self.health, ["GET"])
        for name, (endpoint, methods) in routes.items():
            app.add_api_route(f"/{name}", endpoint, methods=methods, response_model=None)

        @app.middleware("http")
        async def check_key(request: Request, call_next: Any) -> Response:
            open_to_all = request.url.path.startswith(("/health", "/ready"))
            if self.api_key and not open_to_all and request.headers.get("authorization") != f"Bearer {self.api_key}":
                return JSONResponse({"error": "Unauthorized"}, 401)
            return await call_next(request)

        @app.exception_handler(Refused)
        async def refused(_: Request, error: Refused) -> Response:
            return JSONResponse(error.body, error.status)

        @app.exception_handler(RequestValidationError)
        async def invalid(_: Request, error: RequestValidationError) -> Response:
            return JSONResponse(flat(400, str(error)).body, 400)

        return app


@asynccontextmanager
async def stock_server(stock: StockSglang) -> AsyncIterator[str]:
    """The url of the double, in this event loop. Killed, it refuses connections as a dead process does."""
    listener = bind("127.0.0.1", 0)
    config = uvicorn.Config(
        stock.app(), loop="asyncio", http="h11", ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    server.capture_signals = suppress  # type: ignore[method-assign, assignment]  # the test keeps its own

    def kill() -> None:
        for one in server.servers:
            one.close()
        for connection in list(server.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]
        server.should_exit = server.force_exit = True

    stock.kill = kill
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    scheduling = asyncio.create_task(stock.run_scheduler())
    while not server.started:  # noqa: ASYNC110  uvicorn has no event for it
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        await asyncio.gather(serving, return_exceptions=True)
        scheduling.cancel()
        await asyncio.gather(scheduling, return_exceptions=True)

"""The only place that maps routes to calls of the engine's core, and its answers to replies. One handler per route."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import math
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from fastapi import Request, Response
from fastapi.responses import PlainTextResponse, StreamingResponse

from zerogap.engine.admission import Admission
from zerogap.engine.requests import GenerateRequest, RequestOutput
from zerogap.engine.responses import Answer
from zerogap.engine.responses import Response as Generated
from zerogap.errors import ConfigError, EngineStateError, EngineUnreachable, ZerogapError
from zerogap.model.tokenizer import Tokenizer
from zerogap.wire import codec, messages
from zerogap.wire.codec import PromptItem

CONTROL_DEADLINE_SECONDS = 600.0
MAX_STALL_SECONDS = 60.0
"""An engine with work that has not finished a step for this long is not healthy."""
HEALTH_GENERATE_SECONDS = 20.0
_POLL_SECONDS = 0.05


class Core(Protocol):
    """What the server needs of the engine: one thread that owns the model, and calls that any thread may make."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context(self) -> int: ...

    @property
    def failure(self) -> ZerogapError | None:
        """Why the core's thread has ended, else None."""
        ...

    def status(self) -> dict[str, Any]:
        """At once, without the core's thread: state, weight_version, num_running, num_waiting, seconds_stalled."""
        ...

    def submit(self, request: GenerateRequest, sink: Callable[[RequestOutput], None]) -> None: ...

    def control(self, name: str, /, **arguments: Any) -> concurrent.futures.Future[dict[str, Any]]: ...


class EngineService:
    """One handler per route, under the route's name."""

    def __init__(self, core: Core, *, name: str, model_folder: Path, tokenizer: Tokenizer | None) -> None:
        self.core, self.name, self.tokenizer = core, name, tokenizer
        self.admission = Admission(core, tokenizer, model_folder)
        self._model_path, self._started = str(model_folder), time.time()
        self._config: dict[str, Any] = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
        self._live: dict[str, str] = {}  # rid of every unfinished response -> the rid that the client gave
        self._open: set[Answer] = set()

    def fail(self, error: ZerogapError) -> None:
        """Answers every open call with the error: the core's thread has ended."""
        for answer in self._open:
            answer.fail(error)

    # --- generation

    async def generate(self, body: messages.GenerateBody, request: Request) -> Response:
        items = codec.expand(body)
        answer = self._submit(items, stream=body.stream)
        as_list = codec.is_batch(body) or len(items) > 1
        if body.stream:
            return StreamingResponse(self._events(answer, as_list), media_type="text/event-stream")
        try:
            if not await self._wait(answer, request):
                return Response(status_code=499)
        finally:
            self._close(answer)
        if answer.error is not None:
            raise answer.error
        replies = [self._with_prompt(response.reply(), response, body) for response in answer.responses]
        return json_reply(replies if as_list else replies[0])

    def _submit(self, items: Sequence[PromptItem], *, stream: bool) -> Answer:
        for item in items:
            if item.rid in self._live:
                raise ConfigError(
                    f"Duplicate request ID detected: {item.rid}",
                    remedy="give each live request its own rid, or abort the old one first",
                )
        responses = [Generated(item, self.admission.prompt_ids(item), self.tokenizer) for item in items]
        requests = [self.admission.request(r.item, r.prompt_ids) for r in responses]
        answer = Answer(responses, asyncio.get_running_loop(), stream=stream)
        self._open.add(answer)
        try:
            for index, request in enumerate(requests):
                self._live[request.rid] = items[index].family
                self.core.submit(request, self._sink(answer, index))
        except ZerogapError:
            self._close(answer)
            raise
        return answer

    def _sink(self, answer: Answer, index: int) -> Callable[[RequestOutput], None]:
        rid = answer.responses[index].item.rid

        def sink(output: RequestOutput) -> None:
            if not answer.sink(index, output) and output.finish_reason is None:
                self.core.control("abort_request", rid=rid, abort_all=False)  # a stop string ended it

        return sink

    def _with_prompt(self, reply: dict[str, Any], response: Generated, body: messages.GenerateBody) -> dict[str, Any]:
        return reply | {"prompt_token_ids": list(response.prompt_ids)} if body.return_prompt_token_ids else reply

    async def _wait(self, answer: Answer, request: Request) -> bool:
        """Whether the answer is complete, or failed; False: the client has gone."""
        gone = asyncio.create_task(_disconnected(request))
        change = asyncio.create_task(answer.next_change())
        try:
            await asyncio.wait({gone, change}, return_when=asyncio.FIRST_COMPLETED)
            return change.done()
        finally:
            gone.cancel()
            change.cancel()

    async def _events(self, answer: Answer, as_list: bool) -> AsyncIterator[bytes]:
        ended: set[int] = set()
        sent: dict[int, int] = {}
        try:
            while (index := await answer.next_change()) is not None:
                response = answer.responses[index]
                count, finished = response.num_ready, response.finished
                if index in ended or response.error is not None or (sent.get(index) == count and not finished):
                    continue  # a slow reader catches up with one chunk
                sent[index] = count
                if finished:
                    ended.add(index)
                yield _event(({"index": index} if as_list else {}) | response.chunk())
            if answer.error is not None:
                yield _event(codec.stream_error_json(answer.error))
            yield b"data: " + codec.DONE.encode() + b"\n\n"
        finally:
            self._close(answer)

    def _close(self, answer: Answer) -> None:
        """Forgets the call; what the core still works on for it is aborted."""
        self._open.discard(answer)
        for rid in answer.unfinished:
            self.core.control("abort_request", rid=rid, abort_all=False)
        for response in answer.responses:
            self._live.pop(response.item.rid, None)

    async def abort_request(self, body: messages.AbortBody, _: Request) -> Response:
        if body.abort_all:
            await self._control("abort_request", rid="", abort_all=True)
        elif body.rid:
            for rid in [rid for rid, family in self._live.items() if body.rid in (rid, family)]:
                await self._control("abort_request", rid=rid, abort_all=False)
        return Response()

    async def pause_generation(self, body: messages.PauseBody, _: Request) -> Response:
        await self._control("pause_generation", mode=body.mode)
        return json_reply({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, body: messages.ContinueBody, _: Request) -> Response:
        await self._control("continue_generation")
        return json_reply({"message": "Generation continued successfully.", "status": "ok"})

    async def flush_cache(self, body: messages.FlushQuery, request: Request) -> Response:
        given = codec.read_body(messages.FlushQuery, dict(request.query_params))
        give_up = time.monotonic() + given.timeout
        while True:
            try:
                await self._control("flush_cache")
                return PlainTextResponse("Cache flushed.\n")
            except EngineStateError:
                if time.monotonic() >= give_up:
                    raise
            await asyncio.sleep(_POLL_SECONDS)

    # --- what the engine is

    async def health(self, body: messages.EmptyBody, _: Request) -> Response:
        failure = self.core.failure
        if failure is not None:
            raise failure
        status = self.core.status()
        if status["seconds_stalled"] > MAX_STALL_SECONDS:
            raise EngineUnreachable(
                f"{self.name} has work and finished no step for {status['seconds_stalled']:.0f} s",
                remedy="see the engine's log; restart it if it stays so",
                **status,
            )
        return json_reply({"status": "ok", "engine": self.name, **status})

    async def health_generate(self, body: messages.EmptyBody, request: Request) -> Response:
        if self.core.status()["state"] == "running":
            params = messages.SamplingBody(max_new_tokens=1, temperature=0.0, ignore_eos=True)
            try:
                async with asyncio.timeout(HEALTH_GENERATE_SECONDS):
                    await self.generate(messages.GenerateBody(input_ids=[0], sampling_params=params), request)
            except TimeoutError as error:
                raise EngineUnreachable(
                    f"{self.name} generated no token within {HEALTH_GENERATE_SECONDS:g} s",
                    remedy="see the engine's log; restart it if it stays so",
                ) from error
        return await self.health(body, request)

    async def model_info(self, body: messages.EmptyBody, _: Request) -> Response:
        return json_reply(
            {
                "model_path": self._model_path,
                "served_model_name": self.name,
                "tokenizer_path": self._model_path if self.tokenizer else None,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": str(self.core.status()["weight_version"]),
                "load_format": "auto",
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "model_type": self._config.get("model_type"),
                "architectures": self._config.get("architectures"),
            }
        )

    async def server_info(self, body: messages.EmptyBody, _: Request) -> Response:
        ours = await self._control("server_info")
        ours["engine"] = self.name
        return json_reply(
            {
                "model_path": self._model_path,
                "served_model_name": self.name,
                "dtype": ours.get("dtype"),
                "max_total_num_tokens": ours.get("num_kv_tokens"),
                "max_req_input_len": self.core.max_context - 1,
                "startup_time": self._started,
                "version": version("zerogap"),
                "return_original_logprob": self.admission.original_logprobs,
                "internal_states": [{"weight_version": str(ours["weight_version"])}],
                "zerogap": ours,
            }
        )

    # --- memory and weights

    async def release_memory_occupation(self, body: messages.MemoryBody, _: Request) -> Response:
        return json_reply(await self._control("release_memory_occupation", tags=body.tags))

    async def resume_memory_occupation(self, body: messages.MemoryBody, _: Request) -> Response:
        return json_reply(await self._control("resume_memory_occupation", tags=body.tags))

    async def begin_weight_update(self, body: messages.BeginUpdateBody, _: Request) -> Response:
        await self._control("begin_weight_update", selector=body.selector, plan=body.plan)
        return _success("Weight update session opened.")

    async def update_weights_from_tensor(self, body: messages.UpdateFromTensorBody, _: Request) -> Response:
        if body.bucket is None:
            raise ConfigError(
                "pickled serialized_named_tensors are not accepted: unpickling executes code",
                remedy="send `bucket` (docs/wire.md), or use update_weights_from_disk",
            )
        await self._abort_if(body.abort_all_requests)
        await self._control("load_bucket", header=body.bucket)
        return _success(f"Loaded bucket {body.bucket.index}." + await self._relabel(body.weight_version))

    async def update_weights_from_disk(self, body: messages.UpdateFromDiskBody, _: Request) -> Response:
        await self._abort_if(body.abort_all_requests)
        number = None if body.weight_version is None else _version(body.weight_version)
        await self._control("update_weights_from_disk", model_path=body.model_path, weight_version=number)
        self._model_path = body.model_path
        note = "" if number is None else f" Weight version updated to {number}."
        return _success("Succeeded to update model weights." + note, num_paused_requests=0)

    async def end_weight_update(self, body: messages.EmptyBody, _: Request) -> Response:
        await self._control("end_weight_update")
        return _success("Weight update session closed.")

    async def update_weight_version(self, body: messages.UpdateVersionBody, _: Request) -> Response:
        number = _version(body.new_version)
        await self._control("update_weight_version", new_version=number, abort_all_requests=body.abort_all_requests)
        return _success(f"Weight version updated to {number}", new_version=body.new_version)

    async def get_weights_by_name(self, body: messages.GetWeightsBody, _: Request) -> Response:
        reply = await self._control("get_weights_by_name", name=body.name, truncate_size=body.truncate_size)
        return json_reply(_finite(reply["values"]))

    async def weights_checker(self, body: messages.CheckerBody, _: Request) -> Response:
        return json_reply(
            {"success": True, "message": "ok", **await self._control("weights_checker", action=body.action)}
        )

    async def _abort_if(self, wanted: bool) -> None:
        if wanted:
            await self._control("abort_request", rid="", abort_all=True)

    async def _relabel(self, given: str | None) -> str:
        if given is None:
            return ""
        await self._control("update_weight_version", new_version=_version(given), abort_all_requests=False)
        return f" Weight version updated to {given}."

    async def _control(self, name: str, /, **arguments: Any) -> dict[str, Any]:
        """The core's answer. A client that goes away does not undo a control call that has begun."""
        future = asyncio.wrap_future(self.core.control(name, **arguments))
        try:
            async with asyncio.timeout(CONTROL_DEADLINE_SECONDS):
                return await asyncio.shield(future)
        except TimeoutError as error:
            raise EngineUnreachable(
                f"{self.name}: {name} was not done within {CONTROL_DEADLINE_SECONDS:g} s",
                remedy="the engine thread is stuck: see its log, and restart the engine",
            ) from error


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _version(value: str) -> int:
    with suppress(ValueError):
        if 0 <= (number := int(value)) <= messages.INT64_MAX:
            return number
    raise ConfigError(f"weight version {value!r} is no integer", remedy="count refits: 0, 1, 2, ...")


def _finite(values: Any) -> Any:
    """Weights may hold anything; JSON has no word for what is no number."""
    if isinstance(values, list):
        return [_finite(value) for value in values]
    return values if math.isfinite(values) else None


def json_reply(value: Any, status: int = 200) -> Response:
    return Response(codec.dumps(value), status_code=status, media_type="application/json")


def _success(message: str, **fields: Any) -> Response:
    return json_reply({"success": True, "message": message, **fields})


def _event(value: Mapping[str, Any]) -> bytes:
    return b"data: " + codec.dumps(value) + b"\n\n"

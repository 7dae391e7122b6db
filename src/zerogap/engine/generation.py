"""The only place where prompts of a call become responses: submits, waits, streams, aborts what the client left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.responses import StreamingResponse

from zerogap.engine.admission import Admission
from zerogap.engine.calls import Core, call
from zerogap.engine.metrics import MetricsRoutes
from zerogap.engine.options import ServiceOptions
from zerogap.engine.replies import event, json_reply
from zerogap.engine.requests import RequestOutput
from zerogap.engine.responses import Answer
from zerogap.engine.responses import Response as Generated
from zerogap.errors import ConfigError, EngineStateError, ZerogapError
from zerogap.model.tokenizer import Tokenizer
from zerogap.wire import codec, messages
from zerogap.wire.codec import PromptItem


class GenerationRoutes:
    """`/generate` and `/abort_request`. What else generates goes through `submit`, `wait` and `close` too."""

    def __init__(
        self,
        core: Core,
        admission: Admission,
        tokenizer: Tokenizer | None,
        options: ServiceOptions,
        metrics: MetricsRoutes,
    ) -> None:
        self.core, self.admission, self.tokenizer, self.options = core, admission, tokenizer, options
        self._metrics = metrics
        self._live: dict[str, str] = {}  # rid of every unfinished response -> the rid that the client gave
        self._open: set[Answer] = set()
        self._patience: dict[Answer, asyncio.TimerHandle] = {}  # of calls that came while the engine did not generate

    def fail(self, error: ZerogapError) -> None:
        """Answers every open call with the error: the core's thread has ended."""
        for answer in self._open:
            answer.fail(error)

    async def generate(self, body: messages.GenerateBody, request: Request) -> Response:
        items = codec.expand(body)
        answer = self.submit(items, stream=body.stream, pause_wait_seconds=body.pause_wait_seconds)
        as_list = codec.is_batch(body) or len(items) > 1
        if body.stream:
            return StreamingResponse(self._events(answer, as_list), media_type="text/event-stream")
        try:
            if not await self.wait(answer, request):
                return Response(status_code=499)
        finally:
            self.close(answer)
        if answer.error is not None:
            raise answer.error
        replies = [self._with_prompt(response.reply(), response, body) for response in answer.responses]
        return json_reply(replies if as_list else replies[0])

    def submit(self, items: Sequence[PromptItem], *, stream: bool, pause_wait_seconds: float | None = None) -> Answer:
        limit = self.options.max_live_requests
        if len(self._live) + len(items) > limit:
            raise EngineStateError(
                f"{len(items)} more responses beside {len(self._live)}: this server holds {limit} at once",
                remedy="send again once some have ended, or smaller calls; --max-live-requests raises the bound",
                status=503,
            )
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
            self.close(answer)
            raise
        if self.core.status()["state"] != "running":
            seconds = self.options.pause_wait_seconds if pause_wait_seconds is None else pause_wait_seconds
            loop = asyncio.get_running_loop()
            self._patience[answer] = loop.call_later(seconds, self._lose_patience, answer, seconds)
        return answer

    def _lose_patience(self, answer: Answer, seconds: float) -> None:
        """Ends a call that has waited all this time. One that has begun, or whose engine goes on, is left alone."""
        status = self.core.status()
        if status["state"] == "running" or any(response.ids for response in answer.responses):
            return
        first = answer.responses[0].item.rid
        answer.fail(
            EngineStateError(
                f"request {first}: the engine is {status['state']} and did not go on within {seconds:g} s",
                remedy="send it again after continue_generation, or raise pause_wait_seconds",
                status=503,
                state=status["state"],
            )
        )

    def _sink(self, answer: Answer, index: int) -> Callable[[RequestOutput], None]:
        rid = answer.responses[index].item.rid

        def sink(output: RequestOutput) -> None:
            if not answer.sink(index, output) and output.finish_reason is None:
                self.core.control("abort_request", rid=rid, abort_all=False)  # a stop string ended it

        return sink

    def _with_prompt(self, reply: dict[str, Any], response: Generated, body: messages.GenerateBody) -> dict[str, Any]:
        return reply | {"prompt_token_ids": list(response.prompt_ids)} if body.return_prompt_token_ids else reply

    async def wait(self, answer: Answer, request: Request) -> bool:
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
                chunk = response.chunk()
                if chunk["meta_info"]["finish_reason"] is not None:  # it may have ended since `finished` was read
                    ended.add(index)
                yield event(({"index": index} if as_list else {}) | chunk)
            if answer.error is not None:
                yield event(codec.stream_error_json(answer.error))
            yield b"data: " + codec.DONE.encode() + b"\n\n"
        finally:
            self.close(answer)

    def close(self, answer: Answer) -> None:
        """Forgets the call; what the core still works on for it is aborted."""
        self._open.discard(answer)
        if (timer := self._patience.pop(answer, None)) is not None:
            timer.cancel()
        for rid in answer.unfinished:
            self.core.control("abort_request", rid=rid, abort_all=False)
        for response in answer.responses:
            if self._live.pop(response.item.rid, None) is not None:
                self._metrics.ended(response)

    async def abort_request(self, body: messages.AbortBody, _: Request) -> Response:
        if body.abort_all:
            await call(self.core, "abort_request", rid="", abort_all=True)
        elif body.rid:
            for rid in [rid for rid, family in self._live.items() if body.rid in (rid, family)]:
                await call(self.core, "abort_request", rid=rid, abort_all=False)
        return Response()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

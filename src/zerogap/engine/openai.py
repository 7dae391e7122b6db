"""The only place that serves the OpenAI routes: a request of `/generate` in other words, and its reply in others."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any

from fastapi import Request, Response
from fastapi.responses import StreamingResponse
from pydantic import ValidationError

from zerogap import __version__
from zerogap.engine.generation import GenerationRoutes
from zerogap.engine.replies import event, json_reply
from zerogap.engine.responses import Answer
from zerogap.engine.responses import Response as Generated
from zerogap.errors import ConfigError, EngineRejected
from zerogap.model.tokenizer import IncrementalDecoder, Tokenizer
from zerogap.wire import codec, openai_replies
from zerogap.wire.messages import EmptyBody, GenerateBody
from zerogap.wire.openai_messages import (
    NAMES_HERE,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    OpenAIBody,
    TokenizeBody,
)


class OpenAIRoutes:
    """`/v1/chat/completions`, `/v1/completions`, `/v1/models`, `/v1/tokenize`, `/v1/detokenize`."""

    def __init__(self, generation: GenerationRoutes, *, name: str) -> None:
        self._generation, self._name, self._started = generation, name, int(time.time())

    # --- routes

    async def chat_completions(self, body: ChatBody, request: Request) -> Response:
        prompt = {"input_ids": self._render(body) if body.input_ids is None else body.input_ids}
        given = _in_bounds(body, prompt, logprobs=body.logprobs, top=body.top_logprobs)
        return await self._serve(given, _Chat(self._name, self._tokenizer, body), request)

    async def completions(self, body: CompletionBody, request: Request) -> Response:
        logprobs = body.logprobs is not None
        given = _in_bounds(body, body.as_prompt, logprobs=logprobs, top=body.logprobs or 0, echo=body.echo)
        return await self._serve(given, _Completion(self._name, self._tokenizer, body), request)

    async def models(self, body: EmptyBody, _: Request) -> Response:
        return json_reply({"object": "list", "data": [self._card()]})

    async def model(self, body: EmptyBody, request: Request) -> Response:
        wanted = request.path_params["model_id"]
        if wanted != self._name:
            raise EngineRejected(
                f"the model {wanted!r} does not exist here", remedy=f"this server has {self._name!r}", status=404
            )
        return json_reply(self._card())

    async def tokenize(self, body: TokenizeBody, _: Request) -> Response:
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        rows = [self._tokenizer.encode(text, add_special=body.add_special_tokens) for text in texts]
        one = isinstance(body.prompt, str)
        counts = [len(row) for row in rows]
        reply = {"tokens": rows[0] if one else rows, "count": counts[0] if one else counts}
        return json_reply(reply | {"max_model_len": self._generation.core.max_context})

    async def detokenize(self, body: DetokenizeBody, _: Request) -> Response:
        rows: list[Any] = body.tokens if body.tokens and isinstance(body.tokens[0], list) else [body.tokens]
        limit = self._generation.core.vocab_size
        outside = next((t for row in rows for t in row if t >= limit), None)
        if outside is not None:
            raise ConfigError(f"token id {outside} of a vocabulary of {limit}", remedy="give this model's token ids")
        texts = [self._tokenizer.decode(row, body.skip_special_tokens) for row in rows]
        return json_reply({"text": texts if rows is body.tokens else texts[0]})

    # --- how they are served

    @property
    def _tokenizer(self) -> Tokenizer:
        return self._generation.admission.needs_tokenizer("an OpenAI route")

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._name,
            "object": "model",
            "created": self._started,
            "owned_by": "zerogap",
            "root": self._name,
            "parent": None,
            "max_model_len": self._generation.core.max_context,
        }

    def _render(self, body: ChatBody) -> list[int]:
        messages = [_as_text(i, message) for i, message in enumerate(body.messages)]
        return self._tokenizer.encode_chat(messages, **body.chat_template_kwargs)

    async def _serve(self, given: GenerateBody, form: _Form, request: Request) -> Response:
        if (form.body.model or "").startswith(f"{self._name}:"):
            raise ConfigError(
                f"`model` {form.body.model!r} asks for an adapter", remedy=f"this engine has none: give {self._name!r}"
            )
        items = codec.expand(given)
        answer = self._generation.submit(items, stream=given.stream, pause_wait_seconds=given.pause_wait_seconds)
        if given.stream:
            return StreamingResponse(self._events(answer, form), media_type="text/event-stream")
        try:
            if not await self._generation.wait(answer, request):
                return Response(status_code=499)
        finally:
            self._generation.close(answer)
        if answer.error is not None:
            raise answer.error
        return json_reply(form.whole(answer.responses))

    async def _events(self, answer: Answer, form: _Form) -> AsyncIterator[bytes]:
        try:
            for index, response in enumerate(answer.responses):
                for chunk in form.opening(index, response):
                    yield event(chunk)
            while (index := await answer.next_change()) is not None:
                response = answer.responses[index]
                chunk = None if response.error is not None else form.chunk(index, response)
                if chunk is not None:
                    yield event(chunk)
            if answer.error is not None:
                yield event(codec.stream_error_json(answer.error))
            elif form.wants_usage:
                yield event(form.closing(answer.responses))
            yield b"data: " + codec.DONE.encode() + b"\n\n"
        finally:
            self._generation.close(answer)


class _Form(ABC):
    """What chat and completions have in common: envelope, usage, and what of a stream has been sent."""

    kind, prefix = "", ""

    def __init__(self, name: str, tokenizer: Tokenizer, body: OpenAIBody) -> None:
        self._name, self._tokenizer, self.body = name, tokenizer, body
        self._created = int(time.time())
        self._sent: dict[int, tuple[int, int]] = {}  # index -> characters and tokens that a stream has sent
        self._ended: set[int] = set()

    @property
    def wants_usage(self) -> bool:
        return self.body.stream_options is not None and self.body.stream_options.include_usage

    def whole(self, responses: Sequence[Generated]) -> dict[str, Any]:
        replies = [response.reply() for response in responses]
        choices = [self._choice(i, r, reply) for i, (r, reply) in enumerate(zip(responses, replies, strict=True))]
        meta = replies[0]["meta_info"]
        versions = {"weight_version": meta["weight_version"], "weight_versions": meta["weight_versions"]}
        out = self._envelope(responses[0], self.kind) | {"choices": choices, "usage": self._usage(responses)}
        return out | {"metadata": versions}

    def opening(self, index: int, response: Generated) -> list[dict[str, Any]]:
        return []

    def chunk(self, index: int, response: Generated) -> dict[str, Any] | None:
        """What the response has gained since the last chunk; None if that is nothing."""
        if index in self._ended:
            return None
        reply, sampling = response.chunk(), response.item.sampling
        reason = reply["meta_info"]["finish_reason"]  # of this chunk: the response itself may have ended since
        finished = reason is not None
        text, count = reply.get("text") or "", len(reply["output_ids"])
        stops = (*sampling.stops, *sampling.stop_patterns)  # a pattern without wildcards is cut off like a string
        end = len(text) if finished else openai_replies.safe_length(text, stops)
        characters, tokens = self._sent.get(index, (0, 0))
        if not finished and end <= characters:
            return None
        self._sent[index] = (max(end, characters), count)
        if finished:
            self._ended.add(index)
        choice = self._part(text[characters:end]) | {"index": index, "logprobs": None}
        if response.item.return_logprob:
            choice["logprobs"] = self._logprobs(response, tokens, count)
        choice |= openai_replies.finish(reason)
        return self._envelope(response, self.kind_of_chunk) | {"choices": [choice]}

    def closing(self, responses: Sequence[Generated]) -> dict[str, Any]:
        return self._envelope(responses[0], self.kind_of_chunk) | {"choices": [], "usage": self._usage(responses)}

    @property
    def kind_of_chunk(self) -> str:
        return self.kind

    def _choice(self, index: int, response: Generated, reply: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index} | self._content(reply.get("text") or "", response)
        choice["logprobs"] = self._all_logprobs(response) if response.item.return_logprob else None
        choice |= openai_replies.finish(response.finish_reason)
        if self.body.return_prompt_token_ids:
            choice["prompt_token_ids"] = list(response.prompt_ids)
        if self.body.return_token_ids:
            choice["token_ids"] = list(response.ids)
        if self.body.return_meta_info:
            choice["meta_info"] = reply["meta_info"]
        return choice

    def _envelope(self, response: Generated, kind: str) -> dict[str, Any]:
        return {
            "id": response.item.family,
            "object": kind,
            "created": self._created,
            "model": self._name,
            "system_fingerprint": f"zerogap-{__version__}",
        }

    def _usage(self, responses: Sequence[Generated]) -> dict[str, Any]:
        """A prompt counts once, however many samples it has."""
        prompts = responses[:: self.body.n]
        cached = sum(response.cached_tokens for response in prompts)
        produced = sum(len(response.ids) for response in responses)
        return openai_replies.usage(sum(len(r.prompt_ids) for r in prompts), produced, cached)

    def _text_of(self, token: int) -> str:
        return self._tokenizer.decode([token], False)

    def _all_logprobs(self, response: Generated) -> dict[str, Any]:
        return self._logprobs(response, 0, len(response.ids))

    @abstractmethod
    def _content(self, text: str, response: Generated) -> dict[str, Any]:
        """Of a whole choice."""

    @abstractmethod
    def _part(self, text: str) -> dict[str, Any]:
        """Of a chunk of a stream."""

    @abstractmethod
    def _logprobs(self, response: Generated, start: int, end: int) -> dict[str, Any]:
        """Of the tokens from `start` to `end`."""


class _Chat(_Form):
    kind = "chat.completion"

    @property
    def kind_of_chunk(self) -> str:
        return "chat.completion.chunk"

    def opening(self, index: int, response: Generated) -> list[dict[str, Any]]:
        choice = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        return [self._envelope(response, self.kind_of_chunk) | {"choices": [choice]}]

    def _content(self, text: str, response: Generated) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _part(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def _logprobs(self, response: Generated, start: int, end: int) -> dict[str, Any]:
        others = response.alternatives[start:end]
        ids, logprobs = response.ids[start:end], response.logprobs[start:end]
        return openai_replies.chat_logprobs(ids, logprobs, others, self._text_of)


class _Completion(_Form):
    kind = "text_completion"

    def __init__(self, name: str, tokenizer: Tokenizer, body: OpenAIBody) -> None:
        super().__init__(name, tokenizer, body)
        self._reading: dict[str, tuple[IncrementalDecoder, int]] = {}  # rid -> the text of its tokens so far

    @property
    def _echo(self) -> bool:
        return isinstance(self.body, CompletionBody) and self.body.echo

    def _content(self, text: str, response: Generated) -> dict[str, Any]:
        return {"text": self._prompt_text(response) + text if self._echo else text}

    def _part(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs(self, response: Generated, start: int, end: int) -> dict[str, Any]:
        others = response.alternatives[start:end]
        ids, logprobs = response.ids[start:end], response.logprobs[start:end]
        return openai_replies.completion_logprobs(ids, logprobs, others, self._text_of, self._offsets(response, ids))

    def _all_logprobs(self, response: Generated) -> dict[str, Any]:
        if not self._echo:
            return super()._all_logprobs(response)
        prompt, own = response.prompt, response.alternatives
        before = list(prompt.alternatives) or [None] * len(prompt)
        ids = [*prompt.ids, *response.ids]
        return openai_replies.completion_logprobs(
            ids,
            [*prompt.logprobs, *response.logprobs],
            [*before, *own],
            self._text_of,
            self._offsets(response, ids),
        )

    def _offsets(self, response: Generated, ids: Sequence[int]) -> list[int]:
        """Where in the text each of the next tokens begins; a piece of a character begins where the character does."""
        skip = response.item.sampling.skip_special_tokens
        new = IncrementalDecoder(self._tokenizer, skip_special=skip), 0
        decoder, end = self._reading.get(response.item.rid, new)
        offsets = []
        for token in ids:
            offsets.append(end)
            end += len(decoder.push([token]))
        self._reading[response.item.rid] = decoder, end
        return offsets

    def _prompt_text(self, response: Generated) -> str:
        item = response.item
        return item.text or self._tokenizer.decode(response.prompt_ids, item.sampling.skip_special_tokens)


def _in_bounds(
    body: OpenAIBody, prompt: dict[str, Any], *, logprobs: bool, top: int, echo: bool = False
) -> GenerateBody:
    """Raises ConfigError for values that `/generate` would refuse, in its words."""
    try:
        return body.generate_body(prompt, logprobs=logprobs, top=top, echo=echo)
    except ValidationError as error:
        faults = [
            f"{'.'.join(NAMES_HERE.get(str(part), str(part)) for part in e['loc'])}: {e['msg']}"
            for e in error.errors(include_input=False)
        ]
        raise ConfigError("; ".join(faults), remedy="see docs/wire.md for the bounds of /generate's fields") from error


def _as_text(index: int, message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is text; parts of a text are joined. Raises ConfigError for an image, audio or a file."""
    content = message.get("content")
    if not isinstance(message.get("role"), str):
        raise ConfigError(f"messages.{index} has no role", remedy="give each message a role and a content")
    if not isinstance(content, list):
        return message
    kinds = {str(part.get("type")) if isinstance(part, dict) else type(part).__name__ for part in content}
    if kinds - {"text"}:
        raise ConfigError(
            f"messages.{index} has a part of type {sorted(kinds - {'text'})[0]!r}",
            remedy="this engine reads text: leave images, audio and files out",
        )
    texts = [part.get("text") for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(f"messages.{index} has a part without a text", remedy="give it as {type: text, text: ...}")
    return message | {"content": "".join(texts)}

"""The only place where tokens of the core become replies of `/generate`: text, stop strings, spans, `meta_info`.

`Response.add` runs on the core's thread, once per token, and only appends; JSON is built on the server's thread, once
per reply or streamed chunk. The server's thread reads no further than `num_ready`, which is written last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import regex

from zerogap.engine.requests import RequestOutput
from zerogap.errors import ConfigError, ZerogapError
from zerogap.model.tokenizer import IncrementalDecoder, Tokenizer
from zerogap.types import Alternatives, FinishReason, TokenRecord
from zerogap.wire.codec import PromptItem, logprob_fields, version_spans

PATTERN_SECONDS = 0.1
"""One search for a stop pattern may take so long: it runs on the core's thread, and a pattern can be made to take for
ever."""


class Response:
    """One response in the making."""

    def __init__(self, item: PromptItem, prompt_ids: Sequence[int], tokenizer: Tokenizer | None) -> None:
        self.item, self.prompt_ids, self.tokenizer = item, prompt_ids, tokenizer
        self.ids: list[int] = []
        self.logprobs: list[float | None] = []
        self.versions: list[int] = []
        self.alternatives: list[Alternatives | None] = []
        self.prompt = TokenRecord()
        self.unsent = TokenRecord()
        self.num_ready = 0
        self.finish_reason: dict[str, Any] | None = None
        self.error: ZerogapError | None = None
        self.cached_tokens = self.num_retractions = self.weight_version = 0
        self.began = time.time()
        self.first_token = self.ended = 0.0
        skip = item.sampling.skip_special_tokens
        self._stops = item.sampling.stops
        self._patterns = [(pattern, regex.compile(pattern)) for pattern in item.sampling.stop_patterns]
        watching = tokenizer is not None and (self._stops or self._patterns)
        self._watch = IncrementalDecoder(tokenizer, skip_special=skip) if tokenizer and watching else None
        self._watched = ""
        self._stream = IncrementalDecoder(tokenizer, skip_special=skip) if tokenizer else None
        self._streamed, self._num_streamed = "", 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    def add(self, output: RequestOutput) -> None:
        """Takes what the core made. Afterwards `finished` may be true although the core would go on: a stop string."""
        if self.finished:
            return
        self.cached_tokens, self.num_retractions = output.cached_tokens, output.num_retractions
        self.weight_version = output.weight_version
        self.prompt, self.unsent = output.prompt or self.prompt, output.unsent or self.unsent
        new = output.new
        if new.ids and not self.ids:
            self.first_token = time.time()
        for i, token in enumerate(new.ids):
            self.ids.append(token)
            self.logprobs.append(new.logprobs[i])
            self.alternatives += new.alternatives[i : i + 1]
            self.versions.append(new.versions[i])
            self._look_for_a_stop(token)
            if self.finished:
                break
        if not self.finished:
            if output.error is not None:
                self.error = output.error
            elif output.finish_reason is not None:
                self._finish(self._reason(output.finish_reason))
        self.num_ready = len(self.versions)

    def _finish(self, reason: dict[str, Any]) -> None:
        self.ended = time.time()
        self.finish_reason = reason

    def _reason(self, reason: FinishReason) -> dict[str, Any]:
        if reason is FinishReason.STOP:
            return {"type": "stop", "matched": self.ids[-1]}
        if reason is FinishReason.LENGTH:
            return {"type": "length", "length": len(self.ids)}
        return {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}

    def _look_for_a_stop(self, token: int) -> None:
        """Ends the response if this token completes a stop string or pattern, and it is long enough to stop."""
        if self._watch is None:
            return
        self._watched += self._watch.push([token])
        if len(self.ids) < self.item.sampling.min_new_tokens:
            return
        found = [(self._watched.find(stop), stop) for stop in self._stops if stop in self._watched]
        matched = min(found)[1] if found else self._matching_pattern()
        if matched is not None:
            self._finish({"type": "stop", "matched": matched})

    def _matching_pattern(self) -> str | None:
        for pattern, compiled in self._patterns:
            try:
                if compiled.search(self._watched, timeout=PATTERN_SECONDS):
                    return pattern
            except TimeoutError:
                self.error = ConfigError(
                    f"request {self.item.rid}: the search for stop_regex {pattern!r} took over {PATTERN_SECONDS} s",
                    remedy="give a pattern without nested repetitions, or a stop string",
                )
                return None
        return None

    def record(self, count: int) -> TokenRecord:
        """The first `count` tokens, and that their lists are of one length."""
        return TokenRecord(self.ids[:count], self.logprobs[:count], self.versions[:count], self.alternatives[:count])

    def reply(self) -> dict[str, Any]:
        """The whole reply, once finished."""
        return self._json(self._final_text(), len(self.ids), self.finish_reason)

    def chunk(self) -> dict[str, Any]:
        """What a stream sends now: everything so far, as SGLang does."""
        num_ready = self.num_ready  # read first: whoever sees the last token here sees the finish below
        if self.finish_reason is not None:
            return self.reply()
        if self._stream is not None:
            self._streamed += self._stream.push(self.ids[self._num_streamed : num_ready])
            self._num_streamed = num_ready
        return self._json(self._streamed if self._stream else None, num_ready, None)

    def _json(self, text: str | None, count: int, finish_reason: dict[str, Any] | None) -> dict[str, Any]:
        record = self.record(count)
        versions = record.versions
        meta: dict[str, Any] = {
            "id": self.item.rid,
            "finish_reason": finish_reason,
            "prompt_tokens": len(self.prompt_ids),
            "completion_tokens": count,
            "cached_tokens": self.cached_tokens,
            "reasoning_tokens": 0,
            "weight_version": str(versions[-1] if versions else self.weight_version),
            "num_retractions": self.num_retractions,
            "sampling_seed": self.item.seed,
        }
        if self.item.return_logprob:
            meta |= self._logprobs(record)
        if finish_reason is not None:
            meta["weight_versions"] = version_spans(versions, self.weight_version)
            meta["e2e_latency"] = self.ended - self.began
        reply: dict[str, Any] = {} if text is None else {"text": text}
        return reply | {"output_ids": list(record.ids), "meta_info": meta}

    def _logprobs(self, record: TokenRecord) -> dict[str, Any]:
        """A request for no tokens has one entry all the same, as in SGLang: of the token that would have come."""
        shown = record or self.unsent
        fields = logprob_fields("output", shown, self.item, self._token_texts)
        fields["output_token_logprobs_length"] = len(shown)
        fields |= logprob_fields("input", self.prompt, self.item, self._token_texts)
        if self.item.logprob_start_len >= 0:
            fields["input_weight_versions"] = version_spans(self.prompt.versions, self.weight_version)
        return fields

    def _token_texts(self, ids: Sequence[int]) -> Sequence[str | None]:
        if self.tokenizer is None or not self.item.return_text_in_logprobs:
            return [None] * len(ids)
        return [self.tokenizer.decode([token], False) for token in ids]

    def _final_text(self) -> str | None:
        if self.tokenizer is None:
            return None
        params, reason = self.item.sampling, self.finish_reason or {}
        matched = reason.get("matched")
        trim = not params.no_stop_trim
        ids = self.ids[:-1] if trim and isinstance(matched, int) else self.ids
        text = self.tokenizer.decode(ids, params.skip_special_tokens)
        if isinstance(matched, str) and matched in text:
            end = text.index(matched) + (0 if trim else len(matched))
            text = text[:end]
        return text


class Answer:
    """All responses of one HTTP call, and the bell that the core's thread rings for the server's."""

    def __init__(self, responses: Sequence[Response], loop: asyncio.AbstractEventLoop, *, stream: bool) -> None:
        self.responses, self._loop, self._stream = tuple(responses), loop, stream
        self._unfinished = {r.item.rid for r in responses}
        self._bell: asyncio.Queue[int | None] = asyncio.Queue()
        self._failure: ZerogapError | None = None

    def sink(self, index: int, output: RequestOutput) -> bool:
        """On the core's thread. Returns false once the core need not go on with this response."""
        response = self.responses[index]
        if response.finished:
            return False
        response.add(output)
        ended = response.finished
        if ended:
            self._unfinished.discard(response.item.rid)
        due = ended or len(response.ids) % response.item.sampling.stream_interval == 0
        if self._stream and due:
            self._ring(index)
        if response.error is not None or not self._unfinished:
            self._ring(None)
        return not ended

    @property
    def unfinished(self) -> tuple[str, ...]:
        """The rids that the core still works on."""
        return tuple(self._unfinished)

    def fail(self, error: ZerogapError) -> None:
        """On the server's thread: the core will not end this call any more."""
        self._failure = error
        self._bell.put_nowait(None)

    @property
    def error(self) -> ZerogapError | None:
        return self._failure or next((r.error for r in self.responses if r.error is not None), None)

    async def next_change(self) -> int | None:
        """The index of a response that grew (streams only), or None once all have ended or one has failed."""
        return await self._bell.get()

    def _ring(self, what: int | None) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._bell.put_nowait, what)

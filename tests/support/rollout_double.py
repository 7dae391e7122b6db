"""A tokenizer and an engine for rollout tests: characters are tokens, a function of the prompt decides the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zerogap.types import FinishReason
from zerogap.wire.api import GenerateBody, GenerateReply, SamplingBody

END = 1
"""The stop token; a character's token is its code point."""

Answer = Callable[[str, SamplingBody], str]


class CharTokenizer:
    """One BOS (token 2), then the messages' characters."""

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        return [2, *(ord(c) for m in messages for c in m["content"])]


class RolloutDouble:
    """Answers with `answer(prompt, params)`, cut at `max_new_tokens`; earlier calls take longer, so they end last.

    Only the verb that a rollout uses is there; `broken` changes replies before they leave.
    """

    def __init__(self, answer: Answer, *, broken: Callable[[list[GenerateReply]], list[GenerateReply]] | None = None):
        self.answer, self.broken = answer, broken
        self.bodies: list[GenerateBody] = []
        self.weight_version = 3

    async def generate(self, body: GenerateBody, *, deadline_seconds: float | None = None) -> list[GenerateReply]:
        assert deadline_seconds is not None, "every call has a deadline"
        self.bodies.append(body)
        await asyncio.sleep(0.02 / len(self.bodies))
        assert isinstance(body.sampling_params, list) and body.input_ids
        replies = [self._reply(ids, p) for ids, p in zip(body.input_ids, body.sampling_params, strict=True)]
        return self.broken(replies) if self.broken else replies

    def _reply(self, ids: Any, params: SamplingBody) -> GenerateReply:
        text = self.answer("".join(map(chr, ids[1:])), params)
        tokens = [*map(ord, text), END]
        limit = params.max_new_tokens or 0
        cut = len(tokens) > limit
        tokens = tokens[:limit]
        return GenerateReply(
            rid=f"r{params.sampling_seed}",
            text=text[:limit],
            output_ids=tuple(tokens),
            output_logprobs=tuple(-0.25 for _ in tokens),
            weight_versions=tuple(self.weight_version for _ in tokens),
            finish_reason=FinishReason.LENGTH if cut else FinishReason.STOP,
            prompt_tokens=len(ids),
            cached_tokens=0,
            num_retractions=0,
            meta={},
        )

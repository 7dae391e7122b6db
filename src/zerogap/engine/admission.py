"""The only place that says whether this engine can serve a prompt of a `/generate` call, and as what request."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from zerogap.engine.requests import NO_OPTIONS, GenerateRequest, LogprobOptions, SamplingParams
from zerogap.errors import ConfigError
from zerogap.model.tokenizer import Tokenizer
from zerogap.wire.codec import PromptItem

ORIGINAL_LOGPROB_SWITCH = "SGLANG_RETURN_ORIGINAL_LOGPROB"
MAX_ALTERNATIVES = 4_000_000
"""Logprobs of other tokens that one response may carry: they are held in memory until it is sent."""


class Limits(Protocol):
    """What the engine's core is able to take."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_context(self) -> int: ...


class Admission:
    """Turns prompts into requests, or raises ConfigError with the request's name. Nothing is started here."""

    def __init__(self, limits: Limits, tokenizer: Tokenizer | None, model_folder: Path | str) -> None:
        self._limits, self._tokenizer, self._model_folder = limits, tokenizer, model_folder
        self.original_logprobs = read_switch(os.environ, ORIGINAL_LOGPROB_SWITCH)

    def prompt_ids(self, item: PromptItem) -> list[int]:
        ids = item.input_ids
        if ids is None:
            ids = self.needs_tokenizer("a text prompt").encode(item.text or "", add_special=True)
        limit, new = self._limits.max_context, item.sampling.max_new_tokens
        if len(ids) + (new or 0) > limit or (len(ids) == limit and new != 0):
            raise ConfigError(
                f"request {item.rid}: {len(ids)} prompt tokens and {new} new ones do not fit the context of {limit}",
                remedy="shorten the prompt or lower max_new_tokens",
            )
        self._check_ids(item, "token id", ids)
        return ids

    def request(self, item: PromptItem, prompt_ids: Sequence[int]) -> GenerateRequest:
        params = item.sampling
        if params.stops or params.stop_patterns:
            self.needs_tokenizer("a stop string")
        bias = {int(token): value for token, value in params.logit_bias.items()}
        self._check_ids(item, "logit_bias of token id", bias)
        room = self._limits.max_context - len(prompt_ids)
        new = room if params.max_new_tokens is None else params.max_new_tokens
        return GenerateRequest(
            rid=item.rid,
            input_ids=tuple(prompt_ids),
            params=SamplingParams(
                max_new_tokens=new,
                min_new_tokens=params.min_new_tokens,
                temperature=params.temperature,
                top_p=params.top_p,
                top_k=params.top_k,
                min_p=params.min_p,
                frequency_penalty=params.frequency_penalty,
                presence_penalty=params.presence_penalty,
                repetition_penalty=params.repetition_penalty,
                logit_bias=bias,
                seed=item.seed,
                stop_token_ids=frozenset(params.stop_token_ids),
                ignore_eos=params.ignore_eos,
            ),
            logprobs=self._options(item, len(prompt_ids), new),
            namespace=item.namespace,
        )

    def needs_tokenizer(self, what: str) -> Tokenizer:
        if self._tokenizer is None:
            raise ConfigError(
                f"{what} needs a tokenizer, and {self._model_folder} has none",
                remedy="send input_ids and stop_token_ids, or put tokenizer.json into the model folder",
            )
        return self._tokenizer

    def _options(self, item: PromptItem, num_prompt: int, num_new: int) -> LogprobOptions:
        top, asked, start = item.top_logprobs_num, tuple(item.token_ids_logprob or ()), item.logprob_start_len
        if not item.return_logprob:
            if top or asked:
                raise ConfigError(
                    f"request {item.rid}: top_logprobs_num and token_ids_logprob say nothing without return_logprob",
                    remedy="set return_logprob to true, or leave them out",
                )
            return NO_OPTIONS
        if item.return_text_in_logprobs:
            self.needs_tokenizer("return_text_in_logprobs")
        if start > num_prompt:
            raise ConfigError(
                f"request {item.rid}: logprob_start_len {start} is beyond the prompt of {num_prompt} tokens",
                remedy="give at most the prompt's length; -1 for no prompt logprobs",
            )
        self._check_ids(item, "token_ids_logprob of token id", asked)
        positions = num_new + (num_prompt - start if start >= 0 else 0)
        vocab_size = self._limits.vocab_size
        if top > vocab_size or positions * (top + len(asked)) > MAX_ALTERNATIVES:
            raise ConfigError(
                f"request {item.rid}: {top} top logprobs and {len(asked)} token ids at up to {positions} positions; a "
                f"response carries at most {MAX_ALTERNATIVES:,} of them, and {vocab_size:,} per position",
                remedy="lower top_logprobs_num, max_new_tokens or the number of token_ids_logprob",
            )
        original = item.return_original_logprob
        return LogprobOptions(
            prompt_start=None if start < 0 else start,
            top=top,
            token_ids=asked,
            original=self.original_logprobs if original is None else original,
        )

    def _check_ids(self, item: PromptItem, what: str, ids: Sequence[int] | Mapping[int, float]) -> None:
        worst = max(ids, default=0)
        if worst >= self._limits.vocab_size:
            raise ConfigError(
                f"request {item.rid}: {what} {worst} is outside the vocabulary of {self._limits.vocab_size}",
                remedy="encode the prompt with this model's tokenizer",
            )


def read_switch(environment: Mapping[str, str], name: str) -> bool:
    """An on-or-off variable of the environment, as SGLang spells them."""
    value = environment.get(name, "").strip().lower()
    if value in ("", "0", "false", "no", "n"):
        return False
    if value in ("1", "true", "yes", "y"):
        return True
    raise ConfigError(f"{name} is {value!r}", remedy="set it to 1 or 0, or unset it")

"""The only place for the replies of the OpenAI routes: choices, logprobs in both forms, usage, chunks of a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from zerogap.types import Alternatives

LEAST_LOGPROB = -9999.0
"""What OpenAI writes for a token that has no probability left: JSON has no minus infinity."""

_REPLACEMENT = "\ufffd"
TextOf = Callable[[int], str]


def finish(reason: dict[str, Any] | None) -> dict[str, Any]:
    """`finish_reason` and what matched, of SGLang's `finish_reason`."""
    if reason is None:
        return {"finish_reason": None}
    return {"finish_reason": reason["type"], "matched_stop": reason.get("matched")}


def chat_logprobs(
    ids: Sequence[int], logprobs: Sequence[float | None], others: Sequence[Alternatives | None], text_of: TextOf
) -> dict[str, Any]:
    content = []
    for i, (token, logprob) in enumerate(zip(ids, logprobs, strict=True)):
        top = others[i].top if i < len(others) and others[i] is not None else ()  # type: ignore[union-attr]
        content.append(_entry(token, logprob, text_of) | {"top_logprobs": [_entry(t, p, text_of) for p, t in top]})
    return {"content": content, "refusal": None}


def _entry(token: int, logprob: float | None, text_of: TextOf) -> dict[str, Any]:
    text = text_of(token)
    whole = _REPLACEMENT not in text  # else a piece of a character, whose bytes the text does not tell
    return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode()) if whole else None}


def completion_logprobs(
    ids: Sequence[int],
    logprobs: Sequence[float | None],
    others: Sequence[Alternatives | None],
    text_of: TextOf,
    offsets: Sequence[int],
) -> dict[str, Any]:
    """The older form. `offsets`: where in the text each token begins. A prompt's first token has no logprob."""
    top = [
        _by_text(found, text_of) if found is not None and found.top else None
        for found in (others[i] if i < len(others) else None for i in range(len(ids)))
    ]
    return {
        "tokens": [text_of(token) for token in ids],
        "token_logprobs": [None if p is None else _finite(p) for p in logprobs],
        "top_logprobs": top if any(top) else None,
        "text_offset": list(offsets),
    }


def _by_text(found: Alternatives, text_of: TextOf) -> dict[str, float]:
    """Of tokens with the same text (pieces of characters have) the likeliest one."""
    by_text: dict[str, float] = {}
    for logprob, token in found.top:
        by_text.setdefault(text_of(token), _finite(logprob))
    return by_text


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def safe_length(text: str, stops: Sequence[str]) -> int:
    """How much of an unfinished text can be sent: its end may be the beginning of a stop string."""
    held = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), held, -1):
            if text.endswith(stop[:length]):
                held = length
                break
    return len(text) - held


def _finite(logprob: float | None) -> float:
    return LEAST_LOGPROB if logprob is None or logprob < LEAST_LOGPROB else logprob

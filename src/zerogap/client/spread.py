"""The only place that divides a generate call: which prompts belong together, and the call for some of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args, get_origin

from zerogap.wire.api import GenerateBody, GenerateReply

PromptKey = str | tuple[int, ...]
Group = tuple[PromptKey, list[int]]
"""A prompt, and its places in the call: the samples of a group."""
_PER_PROMPT = tuple(
    name for name, field in GenerateBody.model_fields.items() if list in map(get_origin, get_args(field.annotation))
)
"""Fields that may be lists; they have an entry per prompt then."""


def prompt_groups(body: GenerateBody) -> list[Group]:
    """In the order in which the prompts first appear.

    One entry for a call that cannot be divided: a single prompt, a batch under one rid, or lists of unequal length,
    which an engine will refuse.
    """
    prompts = _prompts(body)
    lists = [value for name in _PER_PROMPT if (value := _list_of(body, name)) is not None]
    if isinstance(body.rid, str) or any(len(value) != len(prompts) for value in lists):
        return [(prompts[0] if prompts else "", list(range(len(prompts))))]
    groups: dict[PromptKey, list[int]] = {}
    for place, prompt in enumerate(prompts):
        groups.setdefault(prompt, []).append(place)
    return list(groups.items())


def part_of(body: GenerateBody, places: Sequence[int]) -> GenerateBody:
    """The call for the prompts at these places alone; the call itself if these are all."""
    if len(places) == len(_prompts(body)):
        return body
    parts: dict[str, Any] = {
        name: [value[place] for place in places] for name in _PER_PROMPT if (value := _list_of(body, name)) is not None
    }
    return body.model_copy(update=parts)


def num_samples(body: GenerateBody, place: int) -> int:
    """How many replies the prompt at this place has."""
    params = body.sampling_params
    one = params[place] if isinstance(params, list) else params
    return 1 if one is None else one.n


def in_order(body: GenerateBody, parts: Sequence[tuple[Sequence[int], list[GenerateReply]]]) -> list[GenerateReply]:
    """The replies of all parts as the whole call would have given them."""
    if len(parts) == 1:
        return parts[0][1]
    by_place: dict[int, list[GenerateReply]] = {}
    for places, replies in parts:
        rest = iter(replies)
        for place in places:
            by_place[place] = [next(rest) for _ in range(num_samples(body, place))]
    return [reply for place in sorted(by_place) for reply in by_place[place]]


def _prompts(body: GenerateBody) -> list[PromptKey]:
    if body.input_ids is not None:
        batch: Any = body.input_ids if body.input_ids and isinstance(body.input_ids[0], list) else [body.input_ids]
        return [tuple(ids) for ids in batch]
    return [body.text or ""] if not isinstance(body.text, list) else list(body.text)


def _list_of(body: GenerateBody, name: str) -> list[Any] | None:
    """A field's value if it has an entry per prompt."""
    value = getattr(body, name)
    nested = name in ("input_ids", "token_ids_logprob")
    if not isinstance(value, list) or (nested and not (value and isinstance(value[0], list))):
        return None
    return value

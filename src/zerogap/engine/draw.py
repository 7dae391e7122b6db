"""The only place that turns logits of a step into tokens and what the engine reports of them.

z = the model's logits, then the request's penalties, then its bias. Reported is log_softmax(z / temperature) over the
whole vocabulary, or log_softmax(z) for a request that wants the original: top-p, top-k, min-p and a stop token that
comes too early restrict the choice and never the value. Of a prompt it is log_softmax of the model's own logits.

B, M = rows, V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from typing import NamedTuple

import torch
from torch import Tensor

from zerogap.engine.requests import LogprobOptions, Sequence
from zerogap.numerics.logprob import full_logprobs, most_likely, of_tokens
from zerogap.numerics.sampling import SamplingRow, adjust, sample
from zerogap.types import Alternatives

_SCORED_TOGETHER = 64
"""Rows whose logits are in memory at once while prompts are scored."""


class Drawn(NamedTuple):
    token: int
    logprob: float
    alternatives: Alternatives | None = None


class RowToScore(NamedTuple):
    """`row` of the hidden states predicts the prompt token `target` of the sequence."""

    sequence: Sequence
    row: int
    target: int


def draw(logits_BV: Tensor, sequences: ListLike[Sequence]) -> list[Drawn]:
    """The next token of each sequence."""
    rows = [s.sampling_row for s in sequences]
    if all(s.plain for s in sequences):
        tokens_B, logprobs_B, _ = sample(logits_BV, rows)
        return [Drawn(token, logprob) for token, logprob in zip(tokens_B.tolist(), logprobs_B.tolist(), strict=True)]
    z_BV = adjust(logits_BV, [s.adjustment for s in sequences])
    tokens_B, logprobs_B, logprobs_BV = sample(_without_early_stops(z_BV, sequences), rows)
    others = [i for i, s in enumerate(sequences) if _stops_early(s) or _drawn_apart(s, rows[i])]
    if others:  # what they report is not what they were drawn from
        temperature_O = torch.tensor([1.0 if sequences[i].options.original else rows[i].temperature for i in others])
        reported_OV = full_logprobs(z_BV[others], temperature_O)
        logprobs_B[others] = of_tokens(reported_OV, tokens_B[others])
        if any(sequences[i].options.alternatives for i in others):
            logprobs_BV[others] = reported_OV
    found = _alternatives(logprobs_BV, [s.options for s in sequences])
    return [Drawn(*drawn) for drawn in zip(tokens_B.tolist(), logprobs_B.tolist(), found, strict=True)]


def score_prompts(
    hidden_NC: Tensor, rows: ListLike[RowToScore], logits: Callable[[Tensor], Tensor], version: int
) -> list[tuple[Sequence, int, float]]:
    """Adds the scores of these rows to their sequences. Returns what is not a number: sequence, position, value."""
    faults = []
    for start in range(0, len(rows), _SCORED_TOGETHER):
        part = rows[start : start + _SCORED_TOGETHER]
        logprobs_MV = full_logprobs(logits(hidden_NC[[r.row for r in part]]), 1.0)
        values = of_tokens(logprobs_MV, torch.tensor([r.target for r in part])).tolist()
        found = _alternatives(logprobs_MV, [r.sequence.options for r in part])
        for r, value, alternatives in zip(part, values, found, strict=True):
            scores = r.sequence.scores
            assert scores is not None
            if math.isnan(value):
                faults.append((r.sequence, scores.next_row + 1, value))
            scores.add(value, version, alternatives)
    return faults


def _stops_early(sequence: Sequence) -> bool:
    return bool(sequence.stop_ids) and not sequence.may_stop


def _drawn_apart(sequence: Sequence, row: SamplingRow) -> bool:
    return sequence.options.original and row.temperature not in (0.0, 1.0)


def _without_early_stops(z_BV: Tensor, sequences: ListLike[Sequence]) -> Tensor:
    """A sequence below its `min_new_tokens` draws no stop token."""
    barred = [(i, list(s.stop_ids)) for i, s in enumerate(sequences) if _stops_early(s)]
    if not barred:
        return z_BV
    allowed_BV = z_BV.clone()
    for i, stop_ids in barred:
        allowed_BV[i, stop_ids] = -math.inf
    return allowed_BV


def _alternatives(logprobs_MV: Tensor, options: ListLike[LogprobOptions]) -> list[Alternatives | None]:
    found: list[Alternatives | None] = [None] * len(options)
    wanting = [i for i, o in enumerate(options) if o.alternatives]
    if not wanting:
        return found
    own_WV = logprobs_MV[wanting]
    best = most_likely(own_WV, [options[i].top for i in wanting])
    for i, row_V, top in zip(wanting, own_WV, best, strict=True):
        ids = options[i].token_ids
        asked = list(zip(row_V[torch.tensor(ids)].tolist(), ids, strict=True)) if ids else ()
        found[i] = Alternatives(top, asked)
    return found

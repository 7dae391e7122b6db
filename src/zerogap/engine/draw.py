"""The only place that turns logits of a step into tokens and what the engine reports of them.

z = the model's logits, then the request's penalties, then its bias. Reported is log_softmax(z / temperature) over the
whole vocabulary, or log_softmax(z) for a request that wants the original: top-p, top-k, min-p and a stop token that
comes too early restrict the choice and never the value. Of a prompt it is log_softmax of the model's own logits.

B, M = rows, V = vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListLike
from typing import NamedTuple

import torch
from torch import Tensor

from zerogap.engine.requests import LogprobOptions, Sequence
from zerogap.engine.scheduler import Work
from zerogap.errors import RolloutError
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
    """The next token of each sequence.

    Adjusted logits are fp32, and a row's logprob may hang on the dtype (see `numerics/gpu/vocabulary.py`): sequences
    that adjust nothing are drawn apart, from the model's own logits.
    """
    if len({s.params.adjusts for s in sequences}) < 2:
        return _draw_alike(logits_BV, sequences)
    drawn: dict[int, Drawn] = {}
    for adjusts in (False, True):
        rows = [i for i, s in enumerate(sequences) if s.params.adjusts == adjusts]
        drawn |= zip(rows, _draw_alike(logits_BV[rows], [sequences[i] for i in rows]), strict=True)
    return [drawn[i] for i in range(len(sequences))]


def _draw_alike(logits_BV: Tensor, sequences: ListLike[Sequence]) -> list[Drawn]:
    """Of sequences that all adjust their logits, or none of which does."""
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
        targets_M = torch.tensor([r.target for r in part], device=logprobs_MV.device)
        values = of_tokens(logprobs_MV, targets_M).tolist()
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


def score_planned(
    own: ListLike[Work],
    rows: Mapping[Sequence, int],
    hidden_NC: Tensor,
    logits: Callable[[Tensor], Tensor],
    version: int,
) -> list[Sequence]:
    """Scores prompts that want it, as far as this step has computed them. Returns those that failed (case A10)."""
    wanted = [
        RowToScore(w.sequence, rows[w.sequence] + position - w.start, w.sequence.prompt_ids[position + 1])
        for w in own
        if (unscored := w.sequence.unscored) is not None
        for position in range(unscored.next_row, min(w.start + w.count, len(w.sequence.prompt_ids) - 1))
    ]
    failed = []
    for sequence, position, value in score_prompts(hidden_NC, wanted, logits, version):
        if sequence.error is None:
            sequence.error = _not_a_number(f"request {sequence.rid}: logprob of prompt token {position} is {value}")
            failed.append(sequence)
    return failed


def give_tokens(sequences: ListLike[Sequence], logits_BV: Tensor, version: int) -> None:
    """Gives each sequence its next token, or an error that names it (case A10: never a stop, never a 0)."""
    for sequence, (token, logprob, alternatives) in zip(sequences, draw(logits_BV, sequences), strict=True):
        give(sequence, token, logprob, version, alternatives)


def give(
    sequence: Sequence, token: int, logprob: float, version: int, alternatives: Alternatives | None = None
) -> None:
    if sequence.error is not None:
        return
    if math.isfinite(logprob):
        sequence.proven = True
        sequence.append(token, logprob, version, alternatives)
    else:
        sequence.error = _not_a_number(
            f"request {sequence.rid}: logprob of sampled token {sequence.num_output} is {logprob}"
        )


def _not_a_number(what: str) -> RolloutError:
    return RolloutError(
        what, remedy="the weights or the logits are not finite; look at the last refit and the learning rate"
    )

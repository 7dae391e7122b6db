"""The only place that draws tokens. A token depends on (seed, position, its own row of logits), never on the batch.

One uniform number per token from a counter-based generator, then the inverse of the cumulative distribution: a
vocabulary-sized random draw per row would cost more than the softmax.

B = rows, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from zerogap.numerics.elementwise import exp
from zerogap.numerics.logprob import full_logprobs

_MASK = (1 << 64) - 1
_BLOCK = 256


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """How to draw one token. temperature 0 is greedy; top_k <= 0 means no limit; `position` counts response tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int = 0
    position: int = 0

    @property
    def truncates(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0


@dataclass(frozen=True, slots=True)
class Adjustment:
    """What a request adds to its logits before anything else: SGLang's penalties on the response so far, then a bias.

    `token_ids`, `counts`: each token of the response and how often it is there; the prompt counts for nothing.
    """

    frequency: float = 0.0
    presence: float = 0.0
    repetition: float = 1.0
    bias: Mapping[int, float] = field(default_factory=dict)
    token_ids: Sequence[int] = ()
    counts: Sequence[int] = ()


def adjust(logits_BV: Tensor, adjustments: Sequence[Adjustment | None]) -> Tensor:
    """The logits that are sampled from and reported on. Without any adjustment they are the same object.

    Per token of the response: minus frequency * count and presence; then divided by `repetition` if positive, times it
    if negative. The bias comes last. All in fp32 and element by element, so no row depends on another.
    """
    if not any(adjustments):
        return logits_BV
    out_BV = logits_BV.float().clone()
    for row_V, a in zip(out_BV, adjustments, strict=True):
        if a is None:
            continue
        if a.token_ids:
            ids_S = torch.tensor(a.token_ids, device=row_V.device)
            counts_S = torch.tensor(a.counts, dtype=torch.float32, device=row_V.device)
            values_S = row_V[ids_S] - a.frequency * counts_S - a.presence
            row_V[ids_S] = torch.where(values_S < 0, values_S * a.repetition, values_S / a.repetition)
        if a.bias:
            values_S = torch.tensor(list(a.bias.values()), dtype=torch.float32, device=row_V.device)
            row_V[torch.tensor(list(a.bias), device=row_V.device)] += values_S
    return out_BV


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), a pure function of its arguments: SplitMix64's finaliser (Steele et al. 2014), twice."""
    return (_mix(_mix(seed & _MASK) ^ ((position + 1) * 0x9E3779B97F4A7C15 & _MASK)) >> 11) * 2.0**-53


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def sample(logits_BV: Tensor, rows: Sequence[SamplingRow]) -> tuple[Tensor, Tensor, Tensor]:
    """token_ids_B (int64), logprobs_B (fp32, full vocabulary, at the row's temperature), and all logprobs_BV.

    A row with a NaN or +inf logit yields a NaN logprob; the caller must refuse it by name.
    """
    temperature_B = torch.tensor([r.temperature for r in rows], dtype=torch.float32, device=logits_BV.device)
    if logits_BV.is_cuda:
        return _sample_on_gpu(logits_BV, rows, temperature_B)
    logprobs_BV = full_logprobs(logits_BV, temperature_B)
    tokens_B = torch.empty(len(rows), dtype=torch.int64)
    greedy = [i for i, r in enumerate(rows) if r.temperature == 0]
    drawn = [i for i, r in enumerate(rows) if r.temperature != 0]
    if greedy:
        tokens_B[greedy] = logits_BV[greedy].argmax(-1)
    if drawn:
        everything = len(drawn) == len(rows)
        weights = exp(logprobs_BV if everything else logprobs_BV[drawn])
        for j, i in enumerate(drawn):
            if rows[i].truncates:
                weights[j] = _truncate(weights[j], rows[i])
        tokens_B[drawn] = _invert(weights, [uniform(rows[i].seed, rows[i].position) for i in drawn])
    return tokens_B, logprobs_BV.gather(-1, tokens_B.unsqueeze(-1)).squeeze(-1), logprobs_BV


def _sample_on_gpu(
    logits_BV: Tensor, rows: Sequence[SamplingRow], temperature_B: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The draw of the GPU's kernel, from what top-k, top-p and min-p leave; the logprob is over everything."""
    from zerogap.numerics.gpu import vocabulary  # noqa: PLC0415  Triton is there on a GPU only

    logprobs_BV = full_logprobs(logits_BV, temperature_B)
    choice_BV = logits_BV
    cut = [i for i, r in enumerate(rows) if r.temperature != 0 and r.truncates]
    if cut:
        choice_BV = logits_BV.clone()
        for i in cut:
            choice_BV[i, _truncate(logprobs_BV[i].exp(), rows[i]) == 0] = -torch.inf
    seed_B = torch.tensor([r.seed for r in rows], device=logits_BV.device)
    place_B = torch.tensor([r.position for r in rows], device=logits_BV.device)
    tokens_B, _ = vocabulary.draw(choice_BV, temperature_B, seed_B, place_B)
    return tokens_B, logprobs_BV.gather(-1, tokens_B.unsqueeze(-1)).squeeze(-1), logprobs_BV


def _truncate(probs_V: Tensor, row: SamplingRow) -> Tensor:
    """Zeroes what top-k, then top-p, then min-p rule out. Ties go to the lower token id."""
    sorted_V, order_V = probs_V.sort(descending=True, stable=True)
    keep_V = torch.ones_like(sorted_V, dtype=torch.bool)
    if 0 < row.top_k < len(sorted_V):
        keep_V[row.top_k :] = False
    if row.top_p < 1.0:
        kept_V = torch.where(keep_V, sorted_V, 0.0)
        before_V = kept_V.cumsum(-1) - kept_V
        keep_V &= before_V <= row.top_p * kept_V.sum()
        keep_V[0] = True
    if row.min_p > 0.0:
        keep_V &= sorted_V >= row.min_p * sorted_V[0]
    out_V = torch.zeros_like(probs_V)
    out_V[order_V[keep_V]] = sorted_V[keep_V]
    return out_V


def _invert(weights_BV: Tensor, uniforms: list[float]) -> Tensor:
    """The first token at which the running sum of weights passes u * total.

    In two levels, sums of blocks and then one block, so that no running sum over the whole vocabulary is made.
    """
    B, V = weights_BV.shape
    blocks_BJS = F.pad(weights_BV, (0, -V % _BLOCK)).view(B, -1, _BLOCK)
    running_BJ = blocks_BJS.sum(-1).double().cumsum(-1)
    target_B1 = torch.tensor(uniforms, dtype=torch.float64).unsqueeze(-1) * running_BJ[:, -1:]
    block_B1 = torch.searchsorted(running_BJ, target_B1, right=True).clamp_(max=running_BJ.shape[1] - 1)
    before_B1 = torch.where(block_B1 > 0, running_BJ.gather(1, (block_B1 - 1).clamp_(min=0)), 0.0)
    chosen_BS = blocks_BJS[torch.arange(B), block_B1.squeeze(-1)].double()
    inside_B = torch.searchsorted(chosen_BS.cumsum(-1), target_B1 - before_B1, right=True).squeeze(-1)
    # Rounding can carry the target past the block's own sum: then its last token with weight is meant.
    last_B = (chosen_BS > 0).long().mul(torch.arange(_BLOCK)).amax(-1)
    return block_B1.squeeze(-1) * _BLOCK + torch.minimum(inside_B, last_B)

"""The policy loss, as pure functions over flat response tokens.

M = response tokens of the micro-batch. Denominators are those of the whole batch, so a loss does not depend on how the
batch was split (field case H4).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class PolicyTerms:
    """Per token: the loss (differentiable), the importance ratio, and where the clipped branch was taken."""

    loss_M: Tensor
    ratio_M: Tensor
    clipped_M: Tensor


def clipped_policy_terms(
    new_M: Tensor, old_M: Tensor, advantage_M: Tensor, *, clip_low: float, clip_high: float
) -> PolicyTerms:
    """PPO's clipped surrogate with separate bounds (Schulman et al. 2017; DAPO, Yu et al. 2025, arXiv 2503.14476)."""
    ratio_M = (new_M - old_M).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    free_M = -ratio_M * advantage_M
    held_M = -ratio_M.clamp(1 - clip_low, 1 + clip_high) * advantage_M
    return PolicyTerms(torch.maximum(free_M, held_M), ratio_M.detach(), held_M.detach() > free_M.detach())


def token_weights(lengths: list[int], normaliser: str, *, max_new_tokens: int) -> list[float]:
    """The weight of every token of each trained response of the whole batch; the loss is the weighted sum.

    token_mean: 1 / all tokens. sequence_mean: 1 / (responses x own tokens). constant: 1 / (responses x max_new_tokens),
    which favours neither short nor long responses (Dr. GRPO). Empty responses weigh nothing and are not counted.
    """
    counted = [n for n in lengths if n]
    if not counted:
        return [0.0] * len(lengths)
    if normaliser == "token_mean":
        return [1 / sum(counted) if n else 0.0 for n in lengths]
    if normaliser == "sequence_mean":
        return [1 / (len(counted) * n) if n else 0.0 for n in lengths]
    return [1 / (len(counted) * max_new_tokens) if n else 0.0 for n in lengths]

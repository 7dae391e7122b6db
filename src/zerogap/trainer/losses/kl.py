"""The estimators of the KL term, as pure functions over flat response tokens. M = response tokens."""

from __future__ import annotations

from torch import Tensor

_MAX_LOG_RATIO = 20.0


def kl_terms(new_M: Tensor, reference_M: Tensor, kind: str) -> Tensor:
    """Per-token estimate of KL(policy, reference), differentiable: k1, k2 or k3 (Schulman 2020).

    The expected gradient of k1 itself is zero (it is that of the mean logprob), so a loss of it would pull nowhere: k1
    has its own value and the gradient of k2, which in expectation is the gradient of the KL divergence.
    """
    r_M = new_M - reference_M
    if kind == "k3":
        return (-r_M).clamp(max=_MAX_LOG_RATIO).exp() - 1 + r_M
    k2_M = r_M.square() / 2
    return k2_M if kind == "k2" else r_M.detach() + (k2_M - k2_M.detach())

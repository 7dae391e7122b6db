"""The only place that turns logits and a temperature into log-probabilities. Engine and trainer both call it.

Temperature divides the logits on both sides. Log-probabilities are over the full vocabulary: top-p, top-k and min-p
restrict which token may be drawn, never what its probability was (so the importance ratio stays unbiased).

M = rows, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def full_logprobs(logits_MV: Tensor, temperature: float | Tensor) -> Tensor:
    """log_softmax(logits / temperature) in fp32, row by row. Temperature 0 (greedy) is scored at temperature 1.

    `temperature` is a number or one per row (M). `log_softmax` rather than `logsumexp`: the latter's order over the
    vocabulary depends on the number of rows.
    """
    if logits_MV.is_cuda:
        from zerogap.numerics.gpu import vocabulary  # noqa: PLC0415  Triton is there on a GPU only

        return vocabulary.full_logprobs(logits_MV, temperature)
    logits_MV = logits_MV.float()
    if isinstance(temperature, Tensor):
        divisor_M1 = torch.where(temperature == 0, 1.0, temperature.float()).unsqueeze(-1)
        if not bool((divisor_M1 == 1).all()):  # x / 1 is x: a pass over all logits saved, no bit changed
            logits_MV = logits_MV / divisor_M1
    elif temperature not in (0.0, 1.0):
        logits_MV = logits_MV / torch.tensor(temperature, dtype=torch.float32)
    return torch.log_softmax(logits_MV, dim=-1)


def token_logprobs(logits_MV: Tensor, token_ids_M: Tensor, temperature: float | Tensor) -> Tensor:
    """Log-probability (nats, fp32) of one token per row. Differentiable."""
    return of_tokens(full_logprobs(logits_MV, temperature), token_ids_M)


def of_tokens(logprobs_MV: Tensor, token_ids_M: Tensor) -> Tensor:
    """One token per row of full log-probabilities."""
    return logprobs_MV.gather(-1, token_ids_M.unsqueeze(-1)).squeeze(-1)


def most_likely(logprobs_MV: Tensor, counts: Sequence[int]) -> list[list[tuple[float, int]]]:
    """(logprob, token id) of the `counts[m]` most likely tokens of each row, best first; of equals the lower id.

    What a row gets does not depend on the other rows: equal values at its end are settled by id, not by the library.
    """
    V = logprobs_MV.shape[-1]
    values_MK, ids_MK = logprobs_MV.topk(min(max(counts, default=0) + 1, V))
    best = []
    for row, count, values, ids in zip(range(len(counts)), counts, values_MK.tolist(), ids_MK.tolist(), strict=True):
        if 0 < count < len(values) and values[count - 1] == values[count]:
            sorted_V, order_V = logprobs_MV[row].sort(descending=True, stable=True)
            values, ids = sorted_V[:count].tolist(), order_V[:count].tolist()  # noqa: PLW2901
        pairs = zip(values[:count], ids[:count], strict=True)
        best.append(sorted(pairs, key=lambda pair: (-pair[0], pair[1])))
    return best


def entropies(logprobs_MV: Tensor) -> Tensor:
    """Entropy (nats) per row of full log-probabilities, so at the temperature that they were taken at."""
    return -(logprobs_MV.exp() * logprobs_MV).nan_to_num(nan=0.0).sum(-1)

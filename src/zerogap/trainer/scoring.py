"""The only place where a decoder scores packed responses for the trainer: one logprob per token, on either device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from zerogap.model.decoder import Decoder
from zerogap.numerics.attention import TreePlan, tree_attend
from zerogap.numerics.logprob import entropies, full_logprobs, of_tokens
from zerogap.trainer.packing import PackedGroups

ROWS_OF_LOGITS = 8192
"""On a GPU the head runs over as many rows at once; logits of a whole batch are never in memory."""


class Scores(NamedTuple):
    """`logprobs_M` is differentiable where gradients are on; `entropy` is the sum over the tokens, in nats."""

    logprobs_M: Tensor
    entropy: float


def score(decoder: Decoder, packed: PackedGroups, temperature: float) -> Scores:
    """Only positions that predict a response token reach the head."""
    if isinstance(packed.plan, TreePlan):
        attend = tree_attend(packed.plan, decoder.attention_scale)
        hidden_NC = decoder(packed.ids_N, packed.plan.positions_N, attend)
        rows_MC = hidden_NC.index_select(0, packed.source_rows_M)
        logprobs_MV = full_logprobs(decoder.logits(rows_MC), temperature)
        with torch.no_grad():
            entropy = entropies(logprobs_MV).double().sum().item()
        return Scores(of_tokens(logprobs_MV, packed.targets_M), entropy)
    return _score_on_gpu(decoder, packed, temperature)


def _score_on_gpu(decoder: Decoder, packed: PackedGroups, temperature: float) -> Scores:
    from zerogap.numerics.gpu.packed import PackedRuns, packed_attend  # noqa: PLC0415  Triton is there on a GPU only
    from zerogap.numerics.gpu.vocabulary import TokenLogprobs  # noqa: PLC0415

    assert isinstance(packed.plan, PackedRuns)
    attend = packed_attend(packed.plan, decoder.attention_scale)
    hidden_NC = decoder(packed.ids_N, packed.plan.positions_N, attend)
    logprobs_M, entropy_M = TokenLogprobs.apply(
        hidden_NC.index_select(0, packed.source_rows_M),
        decoder.head_weight,
        packed.targets_M,
        temperature,
        decoder.head_route.gpu_product,
        ROWS_OF_LOGITS,
    )
    return Scores(logprobs_M, entropy_M.double().sum().item())

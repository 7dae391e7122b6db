"""The only place that lays out groups of samples for one forward: a group's prompt once, then its responses.

The last token of a response predicts nothing that is scored, so it is not fed; only positions that predict a response
token reach the head.

N = fed tokens, M = scored response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerogap.numerics.attention import TreePlan
from zerogap.types import PromptGroup, Sample


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """One micro-batch. `source_rows_M[m]` is the fed token whose hidden state predicts `targets_M[m]`."""

    samples: tuple[Sample, ...]
    plan: TreePlan
    ids_N: Tensor
    source_rows_M: Tensor
    targets_M: Tensor
    rollout_logprobs_M: Tensor

    @property
    def lengths(self) -> list[int]:
        return [len(s.response_ids) for s in self.samples]


def pack_groups(groups: Sequence[tuple[PromptGroup, Sequence[Sample]]]) -> PackedGroups:
    """Packs the chosen samples of each group. Empty responses must be left out by the caller."""
    ids: list[int] = []
    rows: list[int] = []
    for group, samples in groups:
        last_of_prompt = len(ids) + len(group.prompt.token_ids) - 1
        ids += group.prompt.token_ids
        for sample in samples:
            start = len(ids)
            ids += sample.response_ids[:-1]
            rows += [last_of_prompt, *range(start, len(ids))]
    chosen = tuple(s for _, samples in groups for s in samples)
    plan = TreePlan.build(
        [len(g.prompt.token_ids) for g, _ in groups],
        [[len(s.response_ids) - 1 for s in chosen] for _, chosen in groups],
    )
    return PackedGroups(
        samples=chosen,
        plan=plan,
        ids_N=torch.tensor(ids),
        source_rows_M=torch.tensor(rows),
        targets_M=torch.tensor([t for s in chosen for t in s.response_ids]),
        rollout_logprobs_M=torch.tensor([p for s in chosen for p in s.rollout_logprobs], dtype=torch.float32),
    )

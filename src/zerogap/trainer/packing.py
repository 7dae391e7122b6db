"""The only place that lays out groups of samples for one forward.

On a CPU a group's prompt comes once, then its responses. On a GPU each sample is a sequence of its own, prompt and
response: the library's backward knows no shared prompts, and there the prompts are cheap.

The last token of a response predicts nothing that is scored, so it is not fed; only positions that predict a response
token reach the head.

N = fed tokens, M = scored response tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from zerogap.numerics.attention import TreePlan
from zerogap.types import PromptGroup, Sample

if TYPE_CHECKING:
    from zerogap.numerics.gpu.packed import PackedRuns


@dataclass(frozen=True, slots=True)
class PackedGroups:
    """One micro-batch. `source_rows_M[m]` is the fed token whose hidden state predicts `targets_M[m]`."""

    samples: tuple[Sample, ...]
    plan: TreePlan | PackedRuns
    ids_N: Tensor
    source_rows_M: Tensor
    targets_M: Tensor
    rollout_logprobs_M: Tensor

    @property
    def lengths(self) -> list[int]:
        return [len(s.response_ids) for s in self.samples]


def pack_groups(
    groups: Sequence[tuple[PromptGroup, Sequence[Sample]]], device: torch.device | None = None
) -> PackedGroups:
    """Packs the chosen samples of each group. Empty responses must be left out by the caller."""
    if device is not None and device.type == "cuda":
        return _pack_sequences([s for _, samples in groups for s in samples], device)
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


def _pack_sequences(samples: Sequence[Sample], device: torch.device) -> PackedGroups:
    from zerogap.numerics.gpu.packed import PackedRuns  # noqa: PLC0415  Triton is there on a GPU only

    ids: list[int] = []
    rows: list[int] = []
    lengths = []
    for sample in samples:
        start = len(ids)
        ids += (*sample.prompt.token_ids, *sample.response_ids[:-1])
        rows += range(start + len(sample.prompt.token_ids) - 1, len(ids))
        lengths.append(len(ids) - start)
    rolled = [p for s in samples for p in s.rollout_logprobs]
    return PackedGroups(
        samples=tuple(samples),
        plan=PackedRuns.build(lengths, device),
        ids_N=torch.tensor(ids, device=device),
        source_rows_M=torch.tensor(rows, device=device),
        targets_M=torch.tensor([t for s in samples for t in s.response_ids], device=device),
        rollout_logprobs_M=torch.tensor(rolled, dtype=torch.float32, device=device),
    )

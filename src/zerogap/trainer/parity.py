"""The only place that compares the trainer's own scores with the rollout's: by bits, token by token."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field

from torch import Tensor

from zerogap import metrics
from zerogap.errors import ParityError
from zerogap.trainer.packing import PackedGroups

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class GapMeter:
    """Collects |trainer - rollout| over scores that the trainer computed before the optimizer step."""

    step: int
    on_gap: str
    num_tokens: int = 0
    _sum: float = 0.0
    _max: float = 0.0
    _kl_sum: float = 0.0
    _first: str = field(default="")

    def add(self, packed: PackedGroups, trainer_M: Tensor) -> None:
        """Raises ParityError at the first token that differs, unless the run only warns."""
        rollout_M = packed.rollout_logprobs_M
        gap_M = (trainer_M - rollout_M).abs().double()
        self.num_tokens += gap_M.numel()
        self._sum += gap_M.sum().item()
        largest = gap_M.max().item()
        self._max = largest if math.isnan(largest) else max(self._max, largest)  # max keeps a nan that comes first
        log_ratio_M = (trainer_M - rollout_M).double()
        self._kl_sum += (log_ratio_M.exp() - 1 - log_ratio_M).sum().item()
        differs = (~(trainer_M == rollout_M)).nonzero()
        if len(differs) and not self._first:
            self._first = self._describe(packed, trainer_M, int(differs[0]))
            if self.on_gap == "stop":
                raise ParityError(
                    self._first,
                    remedy="compare the numerics fingerprints of engine and trainer; numerics.on_gap=warn goes on",
                    step=self.step,
                )
            logger.warning("%s", self._first)

    def _describe(self, packed: PackedGroups, trainer_M: Tensor, at: int) -> str:
        position = at
        for sample in packed.samples:
            if position < len(sample.response_ids):
                return (
                    f"logprob gap at step {self.step}, sample {sample.sample_id}, token {position} "
                    f"(id {sample.response_ids[position]}): rollout {packed.rollout_logprobs_M[at].item()!r}, "
                    f"trainer {trainer_M[at].item()!r}"
                )
            position -= len(sample.response_ids)
        raise IndexError(f"token {at} lies outside of the micro-batch")

    def report(self) -> dict[str, float]:
        if not self.num_tokens:
            return {metrics.GAP_TOKENS: 0.0}
        return {
            metrics.GAP: self._sum / self.num_tokens,
            metrics.GAP_MAX: self._max,
            metrics.GAP_TOKENS: float(self.num_tokens),
            metrics.ROLLOUT_KL: self._kl_sum / self.num_tokens,
        }


def spread_choice(num_items: int, share: float, step: int) -> list[int]:
    """Which of the untrained samples are scored: an even spread that moves with the step; all of them on step 0."""
    count = num_items if step == 0 else min(num_items, -int(-share * num_items // 1))
    return sorted({(step + i * num_items // count) % num_items for i in range(count)}) if count else []

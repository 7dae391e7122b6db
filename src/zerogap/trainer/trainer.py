"""The only place that changes weights: one training step over a batch of prompt groups.

The first forward of each micro-batch, before the optimizer step, gives the trainer's own scores. They are compared with
the rollout's bit for bit, and the rollout's values are the old policy: no pass recomputes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from zerogap import metrics
from zerogap.config.schema import TrainerSettings
from zerogap.errors import ConfigError, NonFiniteLoss
from zerogap.model.decoder import Decoder
from zerogap.numerics.attention import tree_attend
from zerogap.numerics.logprob import token_logprobs
from zerogap.trainer.losses.policy import clipped_policy_terms, token_weights
from zerogap.trainer.optim import learning_rate, make_optimizer
from zerogap.trainer.packing import PackedGroups, pack_groups
from zerogap.trainer.parity import GapMeter, spread_choice
from zerogap.types import PromptGroup, Sample, SampleBatch

Chosen = tuple[PromptGroup, list[Sample]]


@dataclass(frozen=True, slots=True)
class TrainStats:
    """Metrics of one step, by the names of `zerogap.metrics`."""

    metrics: dict[str, float]


class _Sums:
    """Sums over the trained tokens of all micro-batches."""

    def __init__(self) -> None:
        self.loss = self.clipped = self.log_ratio = self.weight = self.weight_squared = 0.0
        self.tokens = 0


class Trainer:
    """Owns the fp32 weights and the optimizer. `num_steps` and `max_new_tokens` are the run's."""

    def __init__(
        self, decoder: Decoder, settings: TrainerSettings, *, num_steps: int, max_new_tokens: int, on_gap: str = "stop"
    ) -> None:
        if decoder.dtype != torch.float32:
            raise ConfigError(
                f"the trainer keeps fp32 weights, the decoder was made as {decoder.dtype}",
                remedy="set model.dtype=float32",
            )
        if settings.kl_weight:
            raise ConfigError("trainer.kl_weight is set", remedy="the KL term is not connected yet: set it to 0")
        self.decoder, self.settings = decoder, settings
        self.num_steps, self.max_new_tokens, self.on_gap = num_steps, max_new_tokens, on_gap
        self.optimizer = make_optimizer(decoder.parameters(), settings)

    def train_step(self, batch: SampleBatch) -> TrainStats:
        """One optimizer step. Raises ParityError or NonFiniteLoss before any weight has changed."""
        trained, untrained = _split(batch)
        meter = GapMeter(batch.step, self.on_gap)
        self._score(untrained, batch, meter)
        self.optimizer.zero_grad(set_to_none=True)
        sums = _Sums()
        advantages = {id(s): a for g, row in zip(batch.groups, batch.advantages, strict=True)
                      for s, a in zip(g.samples, row, strict=True)}  # fmt: skip
        lengths = [len(s.response_ids) for _, samples in trained for s in samples]
        weight_of = token_weights(lengths, self.settings.loss_normaliser, max_new_tokens=self.max_new_tokens)
        weights = iter(weight_of)
        for packed in self._micro_batches(trained):
            advantage_M = _per_token([float(advantages[id(s)] or 0.0) for s in packed.samples], packed)
            weight_M = _per_token([next(weights) for _ in packed.samples], packed)
            self._accumulate(packed, batch.temperature, advantage_M, weight_M, meter, sums)
        norm, rate = self._update(batch.step, sums) if sums.tokens else (0.0, learning_rate_of(self, batch.step))
        return TrainStats(_metrics(sums, meter, norm, rate, len(lengths)))

    def hf_tensors(self) -> dict[str, Tensor]:
        """What a refit sends: Hugging Face names and views of the current weights."""
        return self.decoder.hf_tensors()

    def scores(self, packed: PackedGroups, temperature: float) -> Tensor:
        """The trainer's logprob of every response token, differentiable where gradients are on."""
        attend = tree_attend(packed.plan, self.decoder.attention_scale)
        hidden_NC = self.decoder(packed.ids_N, packed.plan.positions_N, attend)
        logits_MV = self.decoder.logits(hidden_NC.index_select(0, packed.source_rows_M))
        return token_logprobs(logits_MV, packed.targets_M, temperature)

    def _score(self, untrained: Sequence[Chosen], batch: SampleBatch, meter: GapMeter) -> None:
        flat = [(g, s) for g, samples in untrained for s in samples]
        chosen: dict[int, Chosen] = {}
        for i in spread_choice(len(flat), self.settings.score_share, batch.step):
            group, sample = flat[i]
            chosen.setdefault(id(group), (group, []))[1].append(sample)
        with torch.no_grad():
            for packed in self._micro_batches(list(chosen.values())):
                meter.add(packed, self.scores(packed, batch.temperature))

    def _micro_batches(self, chosen: Sequence[Chosen]) -> Iterator[PackedGroups]:
        size = self.settings.micro_batch_groups
        for start in range(0, len(chosen), size):
            yield pack_groups(chosen[start : start + size])

    def _accumulate(
        self,
        packed: PackedGroups,
        temperature: float,
        advantage_M: Tensor,
        weight_M: Tensor,
        meter: GapMeter,
        sums: _Sums,
    ) -> None:
        new_M = self.scores(packed, temperature)
        meter.add(packed, new_M.detach())
        s = self.settings
        terms = clipped_policy_terms(
            new_M, packed.rollout_logprobs_M, advantage_M, clip_low=s.clip_low, clip_high=s.clip_high
        )
        loss = (terms.loss_M * weight_M).sum()
        loss.backward()
        sums.loss += loss.item()
        sums.tokens += len(weight_M)
        sums.clipped += terms.clipped_M.sum().item()
        sums.log_ratio += (packed.rollout_logprobs_M - new_M.detach()).double().sum().item()
        sums.weight += terms.ratio_M.double().sum().item()
        sums.weight_squared += terms.ratio_M.double().square().sum().item()

    def _update(self, step: int, sums: _Sums) -> tuple[float, float]:
        norm = torch.nn.utils.clip_grad_norm_(self.decoder.parameters(), self.settings.clip_grad_norm).item()
        if not (math.isfinite(sums.loss) and math.isfinite(norm)):
            self.optimizer.zero_grad(set_to_none=True)
            raise NonFiniteLoss(
                f"step {step}: loss {sums.loss}, gradient norm {norm}",
                remedy="lower trainer.lr, or resume from the last checkpoint; the weights were not changed",
            )
        rate = learning_rate_of(self, step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm, rate


def learning_rate_of(trainer: Trainer, step: int) -> float:
    return learning_rate(step, trainer.num_steps, trainer.settings)


def _split(batch: SampleBatch) -> tuple[list[Chosen], list[Chosen]]:
    """Samples with an advantage that is not 0 are trained on; the others may be scored."""
    trained, untrained = [], []
    for group, row in zip(batch.groups, batch.advantages, strict=True):
        full = [(s, a) for s, a in zip(group.samples, row, strict=True) if s.response_ids]
        signal = any(a for _, a in full)
        moved = [s for s, a in full if signal and a is not None]
        rest = [s for s, a in full if not signal or a is None]
        if moved:
            trained.append((group, moved))
        if rest:
            untrained.append((group, rest))
    return trained, untrained


def _per_token(values: Sequence[float], packed: PackedGroups) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).repeat_interleave(torch.tensor(packed.lengths))


def _metrics(sums: _Sums, meter: GapMeter, norm: float, rate: float, num_trained: int) -> dict[str, float]:
    out = {metrics.LR: rate, metrics.NUM_TRAINED: float(num_trained), metrics.GRAD_NORM: norm, **meter.report()}
    if sums.tokens:
        out |= {
            metrics.LOSS: sums.loss,
            metrics.PG_LOSS: sums.loss,
            metrics.PPO_KL: sums.log_ratio / sums.tokens,
            metrics.PG_CLIPFRAC: sums.clipped / sums.tokens,
            metrics.ESS_RATIO: sums.weight**2 / (sums.weight_squared * sums.tokens),
        }
    return out

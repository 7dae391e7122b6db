"""The only place that changes weights: one training step over a batch of prompt groups.

The first forward of each micro-batch, before the optimizer step, gives the trainer's own scores. They are compared with
the rollout's bit for bit, and the rollout's values are the old policy: no pass recomputes them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from zerogap import metrics
from zerogap.config.schema import TrainerSettings
from zerogap.errors import ConfigError, NonFiniteLoss
from zerogap.model.decoder import Decoder
from zerogap.trainer.losses.kl import kl_terms
from zerogap.trainer.losses.policy import clipped_policy_terms, token_weights
from zerogap.trainer.offload import OffloadReport, ParkedTensors, give_back, keep_freed_pages
from zerogap.trainer.optim import MasterAdamW, learning_rate
from zerogap.trainer.packing import PackedGroups, pack_groups
from zerogap.trainer.parity import GapMeter, spread_choice
from zerogap.trainer.scoring import score
from zerogap.types import PromptGroup, Sample, SampleBatch

Chosen = tuple[PromptGroup, list[Sample], list[float]]
"""A group, the samples of it that are used, and their advantages (empty where they are only scored)."""


@dataclass(frozen=True, slots=True)
class TrainStats:
    """Metrics of one step, by the names of `zerogap.metrics`."""

    metrics: dict[str, float]


class _Sums:
    """Sums over the trained tokens of all micro-batches."""

    def __init__(self) -> None:
        self.policy_loss = self.kl_loss = self.entropy = 0.0
        self.clipped = self.log_ratio = self.weight = self.weight_squared = 0.0
        self.tokens = 0


class Trainer:
    """Owns the fp32 master weights and the optimizer. `num_steps` and `max_new_tokens` are the run's.

    `reference` is what the KL term pulls to. Without one, and with a KL weight, it is a copy of the decoder as it is
    given here: load a checkpoint afterwards, so that a resumed run keeps its reference.
    """

    def __init__(
        self,
        decoder: Decoder,
        settings: TrainerSettings,
        *,
        num_steps: int,
        max_new_tokens: int,
        on_gap: str = "stop",
        reference: Decoder | None = None,
    ) -> None:
        if decoder.device.type == "cuda" and decoder.config.attn_logit_softcapping is not None:
            raise ConfigError(
                "attn_logit_softcapping cannot be trained on a GPU: the backward of attention there has no soft cap",
                remedy="set model.device='cpu', or train a model without a soft cap",
            )
        self.decoder, self.settings = decoder, settings
        decoder.activation_checkpointing = settings.activation_checkpointing
        self.num_steps, self.max_new_tokens, self.on_gap = num_steps, max_new_tokens, on_gap
        self.optimizer = MasterAdamW(decoder.named_parameters(), settings)
        self._parked = ParkedTensors()
        self._reference = (reference or _frozen_copy(decoder)) if settings.kl_weight else None

    def train_step(self, batch: SampleBatch) -> TrainStats:
        """One optimizer step. Raises ParityError or NonFiniteLoss before any weight has changed."""
        trained, untrained = _split(batch, keep_all=self.settings.kl_weight > 0)
        meter = GapMeter(batch.step, self.on_gap)
        self.optimizer.drop_gradients()
        self._score(untrained, batch, meter)
        sums = _Sums()
        lengths = [len(s.response_ids) for _, samples, _ in trained for s in samples]
        weights = iter(token_weights(lengths, self.settings.loss_normaliser, max_new_tokens=self.max_new_tokens))
        for chosen in self._micro_batches(trained):
            packed = self._pack(chosen)
            advantage_M = _per_token([a for _, _, row in chosen for a in row], packed)
            weight_M = _per_token([next(weights) for _ in packed.samples], packed)
            self._accumulate(packed, batch.temperature, advantage_M, weight_M, meter, sums)
        rate = learning_rate(batch.step, self.num_steps, self.settings)
        norm = self._update(batch.step, rate, sums) if sums.tokens else 0.0
        out = {metrics.LR: rate, metrics.GRAD_NORM: norm, metrics.NUM_TRAINED: float(len(lengths))}
        if lengths:
            out[metrics.ADVANTAGES] = fmean(a for _, _, row in trained for a in row)
        return TrainStats({**out, **meter.report(), **self._loss_metrics(sums)})

    def onload(self) -> None:
        """Begins the trainer's turn on a shared device. On a CPU its weights and moments never left."""
        if self.decoder.device.type == "cuda":
            self._parked.restore()
        else:
            keep_freed_pages()

    def offload(self) -> OffloadReport:
        """Ends the turn: gradients and unused memory go back; on a GPU masters and moments too, all but the weights."""
        if self.decoder.device.type == "cuda":
            return self._parked.park(self.optimizer.drop_gradients, self.optimizer.held())
        return give_back(self.optimizer.drop_gradients)

    def optimizer_state(self) -> dict[str, Tensor]:
        """What a checkpoint holds beside the weights; readable between the turns too."""
        return self._parked.whereabouts(self.optimizer.state())

    def hf_tensors(self) -> dict[str, Tensor]:
        """What a refit sends: Hugging Face names and views of the current weights."""
        return self.decoder.hf_tensors()

    def _score(self, untrained: Sequence[Chosen], batch: SampleBatch, meter: GapMeter) -> None:
        flat = [(g, s) for g, samples, _ in untrained for s in samples]
        scored: dict[int, Chosen] = {}
        for i in spread_choice(len(flat), self.settings.score_share, batch.step):
            group, sample = flat[i]
            scored.setdefault(id(group), (group, [], []))[1].append(sample)
        with torch.no_grad():
            for chosen in self._micro_batches(list(scored.values())):
                packed = self._pack(chosen)
                meter.add(packed, score(self.decoder, packed, batch.temperature).logprobs_M)

    def _pack(self, chosen: Sequence[Chosen]) -> PackedGroups:
        return pack_groups([(group, samples) for group, samples, _ in chosen], self.decoder.device)

    def _micro_batches(self, chosen: Sequence[Chosen]) -> Iterator[Sequence[Chosen]]:
        size = self.settings.micro_batch_groups
        for start in range(0, len(chosen), size):
            yield chosen[start : start + size]

    def _accumulate(
        self,
        packed: PackedGroups,
        temperature: float,
        advantage_M: Tensor,
        weight_M: Tensor,
        meter: GapMeter,
        sums: _Sums,
    ) -> None:
        new_M, entropy = score(self.decoder, packed, temperature)
        meter.add(packed, new_M.detach())
        s = self.settings
        terms = clipped_policy_terms(
            new_M, packed.rollout_logprobs_M, advantage_M, clip_low=s.clip_low, clip_high=s.clip_high
        )
        loss = policy_loss = (terms.loss_M * weight_M).sum()
        if self._reference is not None:
            kl_loss = (kl_terms(new_M, self._reference_scores(packed, temperature), s.kl_kind) * weight_M).sum()
            loss = policy_loss + s.kl_weight * kl_loss
            sums.kl_loss += kl_loss.item()
        sums.entropy += entropy
        loss.backward()
        self.optimizer.collect_gradients()
        sums.policy_loss += policy_loss.item()
        sums.tokens += len(weight_M)
        sums.clipped += terms.clipped_M.sum().item()
        sums.log_ratio += (packed.rollout_logprobs_M - new_M.detach()).double().sum().item()
        sums.weight += terms.ratio_M.double().sum().item()
        sums.weight_squared += terms.ratio_M.double().square().sum().item()

    @torch.no_grad()
    def _reference_scores(self, packed: PackedGroups, temperature: float) -> Tensor:
        assert self._reference is not None
        return score(self._reference, packed, temperature).logprobs_M

    def _update(self, step: int, rate: float, sums: _Sums) -> float:
        """The gradient's norm. Nothing has changed if it raises."""
        norm = self.optimizer.clip_gradients(self.settings.clip_grad_norm)
        loss = self._loss(sums)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            self.optimizer.drop_gradients()
            raise NonFiniteLoss(
                f"step {step}: loss {loss}, gradient norm {norm}",
                remedy="lower trainer.lr, or resume from the last checkpoint; the weights were not changed",
            )
        self.optimizer.step(rate)
        self.optimizer.drop_gradients()
        return norm

    def _loss(self, sums: _Sums) -> float:
        return sums.policy_loss + self.settings.kl_weight * sums.kl_loss

    def _loss_metrics(self, sums: _Sums) -> dict[str, float]:
        if not sums.tokens:
            return {}
        kl = {} if self._reference is None else {metrics.KL_LOSS: sums.kl_loss}
        return kl | {
            metrics.LOSS: self._loss(sums),
            metrics.PG_LOSS: sums.policy_loss,
            metrics.ENTROPY: sums.entropy / sums.tokens,
            metrics.PPO_KL: sums.log_ratio / sums.tokens,
            metrics.PG_CLIPFRAC: sums.clipped / sums.tokens,
            metrics.ESS_RATIO: sums.weight**2 / (sums.weight_squared * sums.tokens),
        }


def _frozen_copy(decoder: Decoder) -> Decoder:
    copy = Decoder(decoder.config, dtype=decoder.dtype, device=decoder.device)
    own = decoder.hf_tensors()
    for name, view in copy.hf_tensors().items():
        view.copy_(own[name])
    return copy


def _split(batch: SampleBatch, *, keep_all: bool) -> tuple[list[Chosen], list[Chosen]]:
    """(trained, untrained), group by group. Groups without an advantage that is not 0 carry no signal and are left out,
    unless another term of the loss moves them (`keep_all`). Samples without a reward are never trained on.
    """
    trained: list[Chosen] = []
    untrained: list[Chosen] = []
    for group, row in zip(batch.groups, batch.advantages, strict=True):
        full = [(s, a) for s, a in zip(group.samples, row, strict=True) if s.response_ids]
        signal = keep_all or any(a for _, a in full)
        moved = [(s, a) for s, a in full if signal and a is not None]
        rest = [s for s, a in full if not signal or a is None]
        if moved:
            trained.append((group, [s for s, _ in moved], [a for _, a in moved]))
        if rest:
            untrained.append((group, rest, []))
    return trained, untrained


def _per_token(values: Sequence[float], packed: PackedGroups) -> Tensor:
    device = packed.ids_N.device
    lengths = torch.tensor(packed.lengths, device=device)
    return torch.tensor(values, dtype=torch.float32, device=device).repeat_interleave(lengths)

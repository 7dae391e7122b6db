"""The only place for the optimizer and the learning rate, which is a closed form of the step (no state to resume)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from zerogap.config.schema import TrainerSettings


def learning_rate(step: int, num_steps: int, settings: TrainerSettings) -> float:
    """The rate of step 0 .. num_steps - 1: linear warm-up times a decay over the whole run."""
    warmup = min(1.0, (step + 1) / max(1, settings.warmup_steps))
    progress = step / num_steps
    if settings.schedule == "constant":
        decay = 1.0
    elif settings.schedule == "linear":
        decay = 1 - (1 - settings.final_lr_ratio) * progress
    else:
        decay = settings.final_lr_ratio + (1 - settings.final_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2
    return settings.lr * warmup * decay


def make_optimizer(parameters: Iterable[torch.nn.Parameter], settings: TrainerSettings) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        list(parameters),
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )

"""The only place for the optimizer and the learning rate, which is a closed form of the step (no state to resume)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from zerogap.config.schema import TrainerSettings
from zerogap.errors import CheckpointError

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_MASTER = "master"
_MAX_NAMED = 8


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


class MasterAdamW:
    """AdamW over fp32 master weights. An fp32 parameter is its own master; one of another dtype gets a copy."""

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]], settings: TrainerSettings) -> None:
        self._parameters = dict(parameters)
        self._masters = {
            name: p if p.dtype == torch.float32 else nn.Parameter(p.detach().float())
            for name, p in self._parameters.items()
        }
        self._adamw = torch.optim.AdamW(
            list(self._masters.values()),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            fused=True,
        )

    def collect_gradients(self) -> None:
        """Adds the gradients of one backward to the masters', in fp32. Call after each backward."""
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if parameter is master or parameter.grad is None:
                continue
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            parameter.grad = None

    def clip_gradients(self, max_norm: float) -> float:
        """The norm of the whole gradient before it was scaled down."""
        return nn.utils.clip_grad_norm_(self._masters.values(), max_norm).item()

    def drop_gradients(self) -> int:
        """Frees all gradients; the bytes that they held."""
        holders = {id(p): p for p in (*self._parameters.values(), *self._masters.values())}.values()
        num_bytes = sum(p.grad.nbytes for p in holders if p.grad is not None)
        for parameter in holders:
            parameter.grad = None
        return num_bytes

    @torch.no_grad()
    def step(self, rate: float) -> None:
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        for name, parameter in self._parameters.items():
            if parameter is not self._masters[name]:
                parameter.copy_(self._masters[name])

    def held(self) -> list[Tensor]:
        """What only a step needs: masters that are copies, and the moments."""
        masters = [m.detach() for n, m in self._masters.items() if m is not self._parameters[n]]
        moments = [t for state in self._adamw.state.values() for k, t in state.items() if k != "step"]
        return masters + moments

    def state(self) -> dict[str, Tensor]:
        """`<kind>/<parameter>` -> tensor: masters that are copies, and the moments once a step was made."""
        out = {f"{_MASTER}/{n}": m.detach() for n, m in self._masters.items() if m is not self._parameters[n]}
        for name, master in self._masters.items():
            moments = self._adamw.state.get(master, {})
            out |= {f"{kind}/{name}": moments[kind] for kind in _MOMENTS if kind in moments}
        return out

    @torch.no_grad()
    def load(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of `state`; all names and shapes are compared before anything is written."""
        self._check(state)
        for name, master in self._masters.items():
            if f"{_MASTER}/{name}" in state:
                master.copy_(state[f"{_MASTER}/{name}"])
                self._parameters[name].copy_(master)
            found = {kind: state[f"{kind}/{name}"] for kind in _MOMENTS if f"{kind}/{name}" in state}
            moments = {kind: tensor.to(master.device, copy=True) for kind, tensor in found.items()}
            self._adamw.state[master] = moments

    def _check(self, state: Mapping[str, Tensor]) -> None:
        expected = {f"{_MASTER}/{n}": m.shape for n, m in self._masters.items() if m is not self._parameters[n]}
        if state.keys() - expected.keys():  # a checkpoint from before the first step holds no moments
            for name, master in self._masters.items():
                expected |= {f"step/{name}": torch.Size(()), f"exp_avg/{name}": master.shape}
                expected[f"exp_avg_sq/{name}"] = master.shape
        wrong = expected.keys() ^ state.keys()
        wrong |= {name for name in expected.keys() & state.keys() if expected[name] != state[name].shape}
        if wrong:
            named = ", ".join(sorted(wrong)[:_MAX_NAMED])
            raise CheckpointError(
                f"the optimizer's state does not fit this model: {len(wrong)} entries differ, {named}",
                remedy="resume with the model and the dtype that the checkpoint was written with",
            )

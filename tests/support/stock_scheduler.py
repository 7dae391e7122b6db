"""The GPU process of the stock double (`stock_sglang`): one loop; what raises in it ends the server.

Tokens and logprobs come by arithmetic from the context and the weights.
"""

from __future__ import annotations

import asyncio
import itertools
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

VOCAB_SIZE, CONTEXT, EOS = 64, 512, 2
_OVERLAP_SECONDS = 0.03
"""For so long the scheduler holds the batch whose last response has been read already."""


def token_after(context: list[int], weights: int, seed: int) -> int:
    return (sum(context) * 7 + len(context) * 3 + weights * 5 + seed) % (VOCAB_SIZE - 3) + 3


def logprob_of(token: int, context: list[int], weights: int) -> float:
    return -((sum(context) + token * 3 + weights * 11) % 64 + 1) / 16


@dataclass(eq=False)
class Running:
    """One request in the scheduler."""

    rid: str
    prompt: list[int]
    params: dict[str, Any]
    seed: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    bounds: list[tuple[str, int]] = field(default_factory=list)
    num_retractions: int = 0
    aborting: bool = False
    told: bool = False
    finish_reason: dict[str, Any] | None = None
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    def finish(self, reason: dict[str, Any]) -> None:
        self.finish_reason = reason
        self.moved.set()

    def spans(self, count: int) -> list[dict[str, Any]]:
        ends = [*(start for _, start in self.bounds[1:]), count]
        spans = [{"version": v, "start": s, "end": e} for (v, s), e in zip(self.bounds, ends, strict=True) if s < e]
        return spans or [{"version": self.bounds[-1][0], "start": 0, "end": 0}]


class Scheduler:
    def __init__(self, folder: Path, step_seconds: float) -> None:
        self.step_seconds = step_seconds
        self.waiting: list[Running] = []
        self.running: list[Running] = []
        self.paused = False
        self.released: set[str] = set()
        self.session_open = False
        self.version = "default"
        self.num_messages = 0
        self._busy_until = 0.0
        self.tensors: dict[str, Tensor] = {}
        self.ignored: set[str] = set()
        self.load(folder)

    def load(self, folder: Path) -> None:
        self.give(load_file(folder / "model.safetensors"))

    def give(self, tensors: dict[str, Tensor]) -> None:
        """New weights; a name that the model does not have is dropped without a word."""
        known = self.tensors.keys() or tensors.keys()
        for name in known & tensors.keys():
            if name not in self.ignored:
                self.tensors[name] = tensors[name]
        crc = 0
        for name in sorted(self.tensors):
            crc = zlib.crc32(self.tensors[name].contiguous().view(-1).view(torch.uint8).numpy(), crc)
        self.weights = crc % 997

    def step(self) -> None:
        self.running, self.waiting = self.running + self.waiting, []
        if not self.running:
            return
        assert not self.released, f"a forward on unmapped memory: {self.released}"
        for one in self.running:
            if one.aborting:
                one.finish({"type": "abort", "message": "Aborted", "status_code": None, "err_type": None})
            else:
                self._next_token(one)
        self.running = [one for one in self.running if one.finish_reason is None]
        self.num_messages += 1
        self._busy_until = asyncio.get_running_loop().time() + _OVERLAP_SECONDS

    def _next_token(self, one: Running) -> None:
        limit = one.params.get("max_new_tokens", 128)
        context = one.prompt + one.ids
        token = token_after(context, self.weights, one.seed)
        if not one.ids:
            one.bounds = [(self.version, 0)]
        one.logprobs.append(logprob_of(token, context, self.weights))
        if limit:
            one.ids.append(token)
        stops = () if one.params.get("ignore_eos") else (EOS, *(one.params.get("stop_token_ids") or ()))
        if limit and token in stops:
            one.finish({"type": "stop", "matched": token})
        elif len(one.ids) >= limit:
            one.finish({"type": "length", "length": limit})
        one.moved.set()

    def retract(self) -> None:
        for one in self.running:
            one.num_retractions += 1
        self.running, self.waiting = [], self.running + self.waiting

    def abort(self, rid: str) -> None:
        """Every request whose rid begins so: "x_1" is "x_10" too."""
        for one in [w for w in self.waiting if w.rid.startswith(rid)]:
            self.waiting.remove(one)
            one.finish({"type": "abort", "message": "Abort in waiting queue"})
        for one in self.running:
            one.aborting = one.aborting or one.rid.startswith(rid)

    @property
    def idle(self) -> bool:
        quiet = self.paused or asyncio.get_running_loop().time() >= self._busy_until
        return quiet and not self.running and (self.paused or not self.waiting)

    def release(self, tags: list[str]) -> None:
        assert self.idle, "release while not idle"
        assert not self.released & {"weights"} & set(tags), "released weights are read"
        self.released |= set(tags)

    def resume(self, tags: list[str]) -> None:
        for tag in tags:
            self.released.remove(tag)
        if "weights" in tags:
            self.weights = 991  # whatever the pages held

    def set_version(self, version: str) -> None:
        if version != self.version:
            for one in itertools.chain(self.running, self.waiting):
                if one.ids:
                    one.bounds.append((version, len(one.ids)))
        self.version = version

"""The records that flow through the loop: prompt -> group of samples -> batch. Frozen, without torch."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from zerogap.errors import RolloutError


class FinishReason(enum.StrEnum):
    """Why a response ended. Values are SGLang's `finish_reason.type`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Alternatives:
    """What else could have stood at one position: (logprob, token id), from the distribution of the token itself.

    `top`: the most likely ones, best first. `asked`: the ids that the request named, in its order.
    """

    top: Sequence[tuple[float, int]] = ()
    asked: Sequence[tuple[float, int]] = ()


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """Tokens and what belongs to each, in lists of equal length; checked here, wherever tokens cross a boundary.

    Of a prompt the first logprob and alternatives are None: nothing stands before it. `alternatives` may be empty:
    nobody asked for them.
    """

    ids: Sequence[int] = ()
    logprobs: Sequence[float | None] = ()
    versions: Sequence[int] = ()
    alternatives: Sequence[Alternatives | None] = ()

    def __post_init__(self) -> None:
        num = len(self.ids)
        if len(self.logprobs) != num or len(self.versions) != num or len(self.alternatives) not in (0, num):
            raise RolloutError(
                f"a record of {num} token ids has {len(self.logprobs)} logprobs, {len(self.versions)} weight versions "
                f"and {len(self.alternatives)} alternatives",
                remedy="this is a defect of the engine: report it with the engine's log",
            )

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of a prompt source. `prompt_id` is unique within `source`; `tags` are reported apart (e.g. 'tied')."""

    source: str
    prompt_id: str
    text: str
    label: Any
    token_ids: tuple[int, ...]
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One response. Per-token fields have one entry per response token, the stop token included; checked here, once."""

    prompt: Prompt
    index: int
    response_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    finish_reason: FinishReason
    text: str
    seed: int
    raw_reward: float | None = None
    reward: float | None = None
    info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths = {len(self.response_ids), len(self.rollout_logprobs), len(self.weight_versions)}
        if len(lengths) != 1:
            raise RolloutError(
                f"sample {self.sample_id}: {len(self.response_ids)} token ids, {len(self.rollout_logprobs)} logprobs, "
                f"{len(self.weight_versions)} weight versions",
                remedy="the engine broke its contract; report this with the engine's log",
            )
        for position, value in enumerate(self.rollout_logprobs):
            if not math.isfinite(value):
                raise RolloutError(
                    f"sample {self.sample_id}: logprob of sampled token {position} is {value}",
                    remedy="the engine's logits were not finite; check the last refit and the learning rate",
                )

    @property
    def sample_id(self) -> str:
        return f"{self.prompt.source}/{self.prompt.prompt_id}#{self.index}"

    @property
    def truncated(self) -> bool:
        """Cut at the length limit, rather than ended by the model."""
        return self.finish_reason is FinishReason.LENGTH


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """All samples of one prompt in one step. `raw_reward` is the task's; `reward` adds shaping and is trained on."""

    group_id: str
    prompt: Prompt
    samples: tuple[Sample, ...]

    @property
    def scored(self) -> tuple[Sample, ...]:
        """Samples whose reward could be computed; the others move neither baseline nor weights."""
        return tuple(s for s in self.samples if s.reward is not None)

    @property
    def zero_spread(self) -> bool:
        """No sample differs from another by its training reward: the group carries no signal."""
        return len({s.reward for s in self.scored}) <= 1


@dataclass(frozen=True, slots=True)
class SampleBatch:
    """What one training step consumes: groups, and one advantage per sample (None: not trained on)."""

    step: int
    temperature: float
    groups: tuple[PromptGroup, ...]
    advantages: tuple[tuple[float | None, ...], ...]

    def __post_init__(self) -> None:
        if [len(g.samples) for g in self.groups] != [len(a) for a in self.advantages]:
            raise RolloutError(
                f"step {self.step}: advantages do not match the samples group by group",
                remedy="an advantage function must return one entry per sample, None where there is no reward",
            )

    @property
    def samples(self) -> Sequence[Sample]:
        return [s for g in self.groups for s in g.samples]

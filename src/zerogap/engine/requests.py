"""The only place for what the engine's core knows of a request: how to sample it, what it has so far, why it ended."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field

from zerogap.errors import ConfigError, ZerogapError
from zerogap.numerics.sampling import SamplingRow
from zerogap.types import FinishReason

MIN_TEMPERATURE = 1e-6
"""Below it a draw is greedy, as in SGLang."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one response; names and meaning as in SGLang's `sampling_params`."""

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        faults = [
            text
            for wrong, text in (
                (self.max_new_tokens < 1, f"max_new_tokens {self.max_new_tokens} is below 1"),
                (not 0 <= self.min_new_tokens <= self.max_new_tokens, f"min_new_tokens {self.min_new_tokens}"),
                (not 0 <= self.temperature < float("inf"), f"temperature {self.temperature}"),
                (not 0 < self.top_p <= 1, f"top_p {self.top_p} is not in (0, 1]"),
                (self.top_k != -1 and self.top_k < 1, f"top_k {self.top_k} is neither -1 nor at least 1"),
                (not 0 <= self.min_p <= 1, f"min_p {self.min_p} is not in [0, 1]"),
            )
            if wrong
        ]
        if faults:
            raise ConfigError(f"bad sampling_params: {'; '.join(faults)}", remedy="mend the named values")


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One response asked for: what the server hands to the core."""

    rid: str
    input_ids: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What the core made for one request since it last said so. The last one has a `finish_reason` or an `error`.

    `new_ids`, `new_logprobs` and `new_versions` have one entry per new token. `weight_version` is the present one, for
    a request that ends without a token.
    """

    rid: str
    new_ids: ListLike[int]
    new_logprobs: ListLike[float]
    new_versions: ListLike[int]
    finish_reason: FinishReason | None
    cached_tokens: int
    num_retractions: int
    weight_version: int
    error: ZerogapError | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """One response in the making. Tokens, logprobs and versions grow together, in `append` alone.

    `num_computed` counts the leading tokens whose keys and values are in the cache; a retract sets it to 0 and keeps
    the rest. `names` are those of its full blocks under `salt`, `num_named` of its present blocks have one. `proven`
    says that a finite logprob came out of all that was computed so far.
    """

    rid: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    stop_ids: frozenset[int]
    tokens: list[int] = field(init=False)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    salt: bytes = b""
    num_named: int = 0
    num_computed: int = 0
    num_cached: int = 0
    num_retractions: int = 0
    proven: bool = True
    finish_reason: FinishReason | None = None
    error: ZerogapError | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[len(self.prompt_ids) :]

    @property
    def num_output(self) -> int:
        return len(self.logprobs)

    @property
    def ended(self) -> bool:
        return self.finish_reason is not None or self.error is not None

    @property
    def may_stop(self) -> bool:
        """Whether the next token may be a stop token, which does not count towards `min_new_tokens` (as in SGLang)."""
        return len(self.logprobs) >= self.params.min_new_tokens

    @property
    def sampling_row(self) -> SamplingRow:
        p = self.params
        temperature = p.temperature if p.temperature >= MIN_TEMPERATURE else 0.0
        return SamplingRow(temperature, p.top_p, p.top_k, p.min_p, p.seed, len(self.logprobs))

    def append(self, token: int, logprob: float, version: int) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if token in self.stop_ids:
            self.finish_reason = FinishReason.STOP
        elif len(self.logprobs) >= self.params.max_new_tokens:
            self.finish_reason = FinishReason.LENGTH

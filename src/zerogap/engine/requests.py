"""The only place for what the engine's core knows of a request: how to sample it, what it has so far, why it ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field

from zerogap.errors import ConfigError, ZerogapError
from zerogap.numerics.sampling import Adjustment, SamplingRow
from zerogap.types import Alternatives, FinishReason, TokenRecord

MIN_TEMPERATURE = 1e-6
"""Below it a draw is greedy, as in SGLang."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample one response; names and meaning as in SGLang's `sampling_params`.

    `max_new_tokens` 0: the prompt is scored and nothing is generated.
    """

    max_new_tokens: int = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        faults = [
            text
            for wrong, text in (
                (self.max_new_tokens < 0, f"max_new_tokens {self.max_new_tokens} is below 0"),
                (not 0 <= self.min_new_tokens <= self.max_new_tokens, f"min_new_tokens {self.min_new_tokens}"),
                (not 0 <= self.temperature < float("inf"), f"temperature {self.temperature}"),
                (not 0 < self.top_p <= 1, f"top_p {self.top_p} is not in (0, 1]"),
                (self.top_k != -1 and self.top_k < 1, f"top_k {self.top_k} is neither -1 nor at least 1"),
                (not 0 <= self.min_p <= 1, f"min_p {self.min_p} is not in [0, 1]"),
                (not -2 <= self.frequency_penalty <= 2, f"frequency_penalty {self.frequency_penalty} not in [-2, 2]"),
                (not -2 <= self.presence_penalty <= 2, f"presence_penalty {self.presence_penalty} not in [-2, 2]"),
                (not 0 < self.repetition_penalty <= 2, f"repetition_penalty {self.repetition_penalty} not in (0, 2]"),
            )
            if wrong
        ]
        if faults:
            raise ConfigError(f"bad sampling_params: {'; '.join(faults)}", remedy="mend the named values")

    @property
    def penalises(self) -> bool:
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1.0)

    @property
    def adjusts(self) -> bool:
        """Whether anything is added to the logits."""
        return self.penalises or bool(self.logit_bias)


@dataclass(frozen=True, slots=True)
class LogprobOptions:
    """Which logprobs a request wants besides those of its own tokens.

    `prompt_start`: prompt positions from here on are scored (the first of them has nothing before it); None: none are.
    `top`, `token_ids`: alternatives at every position. `original`: the temperature is left out of what is reported.
    """

    prompt_start: int | None = None
    top: int = 0
    token_ids: tuple[int, ...] = ()
    original: bool = False

    @property
    def alternatives(self) -> bool:
        return bool(self.top or self.token_ids)


NO_OPTIONS = LogprobOptions()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One response asked for: what the server hands to the core. Cached blocks are shared within a `namespace` only."""

    rid: str
    input_ids: tuple[int, ...]
    params: SamplingParams
    logprobs: LogprobOptions = NO_OPTIONS
    namespace: str = ""

    def check_ids(self, vocab_size: int, max_context: int) -> None:
        """One index outside of a table would fail the step, and with it everybody's requests."""
        longest = len(self.input_ids) + self.params.max_new_tokens
        ids = (*self.input_ids, *self.logprobs.token_ids, *self.params.logit_bias)
        outside = next((t for t in ids if not 0 <= t < vocab_size), None)
        if outside is not None or longest > max_context:
            what = f"{longest} tokens" if outside is None else f"token id {outside}"
            raise ConfigError(
                f"request {self.rid}: {what} in an engine of {vocab_size} token ids and room for {max_context} tokens",
                remedy="encode the prompt with this model's tokenizer; shorten it, or lower max_new_tokens",
            )


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What the core made for one request since it last said so. The last one has a `finish_reason` or an `error`.

    `weight_version` is the present one, for a request that ends without a token. `prompt` comes once, when the prompt
    is scored. `unsent` is the token that would have come next, of a request for no tokens.
    """

    rid: str
    new: TokenRecord
    finish_reason: FinishReason | None
    cached_tokens: int
    num_retractions: int
    weight_version: int
    error: ZerogapError | None = None
    prompt: TokenRecord | None = None
    unsent: TokenRecord | None = None


@dataclass(slots=True)
class PromptScores:
    """Logprobs of prompt tokens `start + 1 ...` so far. `num_rows` of them are needed; they grow in `add` alone."""

    start: int
    num_rows: int
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    alternatives: list[Alternatives] = field(default_factory=list)

    @property
    def next_row(self) -> int:
        """The position whose hidden state gives the next score: that of the token after it."""
        return self.start + len(self.logprobs)

    @property
    def complete(self) -> bool:
        return len(self.logprobs) >= self.num_rows

    def add(self, logprob: float, version: int, alternatives: Alternatives | None) -> None:
        self.logprobs.append(logprob)
        self.versions.append(version)
        if alternatives is not None:
            self.alternatives.append(alternatives)

    def clear(self) -> None:
        for grown in (self.logprobs, self.versions, self.alternatives):
            grown.clear()

    def record(self, prompt_ids: ListLike[int], version: int, *, alternatives: bool) -> TokenRecord:
        """Of all prompt positions from `start` on. The first has no score; it has `version` if no other has one."""
        ids = prompt_ids[self.start :]
        if not ids:
            return TokenRecord()
        return TokenRecord(
            ids,
            [None, *self.logprobs],
            [*self.versions[:1], *self.versions] or [version],
            [None, *self.alternatives] if alternatives else (),
        )


@dataclass(slots=True, eq=False)
class Sequence:
    """One response in the making. Tokens, logprobs, versions and alternatives grow together, in `append` alone.

    `num_computed` counts the leading tokens whose keys and values are in the cache; a retract sets it to 0 and keeps
    the rest. `names` are those of its full blocks under `salt`, `num_named` of its present blocks have one. `proven`
    says that a finite logprob came out of all that was computed so far. `plain`: it reports the distribution that it
    draws from, which is the model's own, and no alternatives.
    """

    rid: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    stop_ids: frozenset[int]
    options: LogprobOptions = NO_OPTIONS
    namespace: bytes = b""
    tokens: list[int] = field(init=False)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    alternatives: list[Alternatives] = field(default_factory=list)
    scores: PromptScores | None = field(init=False)
    plain: bool = field(init=False)
    unsent: TokenRecord | None = None
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
    _counts: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)
        start, num = self.options.prompt_start, len(self.prompt_ids)
        self.scores = None if start is None else PromptScores(start, max(num - 1 - start, 0))
        p, o = self.params, self.options
        self.plain = not (p.adjusts or p.min_new_tokens or o.original or o.alternatives)

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

    @property
    def adjustment(self) -> Adjustment | None:
        """What is added to the next logits; None if the request asks for nothing of the kind."""
        p = self.params
        if not p.adjusts:
            return None
        return Adjustment(
            p.frequency_penalty,
            p.presence_penalty,
            p.repetition_penalty,
            p.logit_bias,
            list(self._counts),
            list(self._counts.values()),
        )

    @property
    def unscored(self) -> PromptScores | None:
        """The scores of the prompt, while some are missing."""
        return None if self.scores is None or self.scores.complete else self.scores

    def record(self, start: int = 0) -> TokenRecord:
        """The response from token `start` on."""
        begin = len(self.prompt_ids) + start
        return TokenRecord(self.tokens[begin:], self.logprobs[start:], self.versions[start:], self.alternatives[start:])

    def append(self, token: int, logprob: float, version: int, alternatives: Alternatives | None = None) -> None:
        if not self.params.max_new_tokens:
            others = () if alternatives is None else (alternatives,)
            self.unsent = TokenRecord((token,), (logprob,), (version,), others)
            self.finish_reason = FinishReason.LENGTH
            return
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        if alternatives is not None:
            self.alternatives.append(alternatives)
        if self.params.penalises:
            self._counts[token] += 1
        if token in self.stop_ids:
            self.finish_reason = FinishReason.STOP
        elif len(self.logprobs) >= self.params.max_new_tokens:
            self.finish_reason = FinishReason.LENGTH

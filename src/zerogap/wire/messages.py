"""The only place for the request bodies of the wire: their fields, types, bounds and defaults, which are SGLang's.
Those of an operator's calls are in `admin_messages`, those of groups, pulls and adapters in `transfer_messages`.

Keys that a route does not know are ignored, as SGLang does, unless they look like a misspelt one; unknown keys inside
`sampling_params` are refused. Replies are not here: they are built without validation, because they grow per token.
"""

from __future__ import annotations

import difflib
from typing import Annotated, Any, Literal

import regex
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from zerogap.wire.tensors import BucketHeader, TransferPlan

INT64_MAX = 2**63 - 1
MAX_STOPS = 32
MAX_REGEX_BYTES = 256
MAX_BIAS = 1e30
"""Above it a bias divided by a small temperature is no number in fp32."""
MIN_REPETITION_PENALTY = 1e-6
"""Below it a logit divided by it is no number in fp32."""
MAX_SAMPLES_PER_PROMPT = 4096
MAX_FLUSH_WAIT_SECONDS = 3600.0
MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")

PauseMode = Literal["abort", "retract", "in_place"]
MemoryTag = Literal["kv_cache", "weights", "cuda_graph"]
CheckerAction = Literal["checksum", "manifest", "snapshot", "reset_tensors", "compare"]
Namespace = Annotated[str, Field(max_length=4096)]
TokenId = Annotated[int, Field(ge=0, le=INT64_MAX)]


class Body(BaseModel):
    """Base of every request body. JSON types are not converted: `1.0` is no integer and `1` is no boolean."""

    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuse_misspelt_keys(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        known = [*cls.model_fields, *IGNORED_KEYS]
        for key in data:
            if key in known or not isinstance(key, str):
                continue
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.85)
            if near:
                raise ValueError(f"unknown field `{key}`, did you mean `{near[0]}`?")
        return data


IGNORED_KEYS = ("http_worker_ipc", "rid", "rids")
"""Known to every SGLang body and without meaning here, so never a misspelling of something else."""


def _all_or_some(top_k: int) -> int:
    if top_k == 0:
        raise ValueError("0 would keep no token; use -1 for all tokens")
    return top_k


def _few(stops: str | list[str]) -> str | list[str]:
    if isinstance(stops, list) and len(stops) > MAX_STOPS:
        raise ValueError(f"{len(stops)} stop strings; at most {MAX_STOPS}")
    return stops


def _compilable(patterns: str | list[str]) -> str | list[str]:
    for pattern in [patterns] if isinstance(patterns, str) else _few(patterns):
        if len(pattern.encode()) > MAX_REGEX_BYTES:
            raise ValueError(f"a pattern of {len(pattern.encode())} bytes; at most {MAX_REGEX_BYTES}")
        try:
            regex.compile(pattern)
        except (regex.error, RecursionError) as error:
            raise ValueError(f"the pattern {pattern!r} does not compile: {error}") from error
    return patterns


def _token_ids(bias: dict[str, float]) -> dict[str, float]:
    for key in bias:
        if not (key.isascii() and key.isdecimal()):
            raise ValueError(f"the key {key!r} is no token id")
    return bias


class SamplingBody(BaseModel):
    """SGLang's `sampling_params`. An explicit null means the default, but `max_new_tokens: null` means no limit."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    max_new_tokens: Annotated[int, Field(ge=0)] | None = 128
    min_new_tokens: Annotated[int, Field(ge=0)] = 0
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1), AfterValidator(_all_or_some)] = -1
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Field(ge=MIN_REPETITION_PENALTY, le=2)] = 1.0
    logit_bias: Annotated[
        dict[str, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]], AfterValidator(_token_ids)
    ] = {}
    stop: Annotated[str | list[str], AfterValidator(_few)] = []
    stop_regex: Annotated[str | list[str], AfterValidator(_compilable)] = []
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES_PER_PROMPT)] = 1
    sampling_seed: Annotated[int, Field(ge=-INT64_MAX - 1, le=INT64_MAX)] | None = None
    stream_interval: Annotated[int, Field(ge=1)] = 1

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {k: v for k, v in data.items() if v is not None or k == "max_new_tokens"}
        for key, value in kept.items():
            if key in cls.model_fields or value in UNSUPPORTED_SAMPLING.get(key, ()):
                continue
            if key in UNSUPPORTED_SAMPLING:
                raise ValueError(f"`{key}` is not supported by this engine yet")
            raise ValueError(f"unknown field `{key}`, expected one of {', '.join(cls.model_fields)}")
        return {k: v for k, v in kept.items() if k in cls.model_fields}

    @model_validator(mode="after")
    def _minimum_below_maximum(self) -> SamplingBody:
        if self.max_new_tokens is not None and self.min_new_tokens > self.max_new_tokens:
            raise ValueError(f"min_new_tokens {self.min_new_tokens} is above max_new_tokens {self.max_new_tokens}")
        return self

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop strings; an empty one would end every response at once and is dropped."""
        return _given(self.stop)

    @property
    def stop_patterns(self) -> tuple[str, ...]:
        """The patterns that end a response; an empty one is dropped."""
        return _given(self.stop_regex)


def _given(texts: str | list[str]) -> tuple[str, ...]:
    return tuple(text for text in ([texts] if isinstance(texts, str) else texts) if text)


UNSUPPORTED_SAMPLING: dict[str, tuple[Any, ...]] = {
    "beam_width": (1,),
    "json_schema": ("",),
    "regex": ("",),
    "ebnf": ("",),
    "structural_tag": ("",),
    "custom_params": ({},),
    "watermark": (),
}
"""SGLang's parameters that this engine cannot honour -> the values that ask for nothing and are accepted."""


class GenerateBody(Body):
    """`/generate`: one prompt or a batch, as text or token ids; lists elsewhere give one entry per prompt.

    `return_original_logprob` is ours: the temperature is left out of the logprobs, as `SGLANG_RETURN_ORIGINAL_LOGPROB`
    has it for all requests of a server; null: as that says. `pause_wait_seconds` is ours: how long a request that
    arrives while the engine does not generate may wait for it; null: as the server was started.
    """

    text: str | list[str] | None = None
    input_ids: list[TokenId] | list[list[TokenId]] | None = None
    sampling_params: SamplingBody | list[SamplingBody] | None = None
    rid: str | list[str] | None = None
    return_logprob: bool | list[bool] = False
    logprob_start_len: Annotated[int, Field(ge=-1)] | list[Annotated[int, Field(ge=-1)]] = -1
    top_logprobs_num: Annotated[int, Field(ge=0)] | list[Annotated[int, Field(ge=0)]] = 0
    token_ids_logprob: list[TokenId] | list[list[TokenId]] | None = None
    return_text_in_logprobs: bool = False
    return_original_logprob: bool | list[bool] | None = None
    return_prompt_token_ids: bool = False
    extra_key: Namespace | list[Namespace] | None = None
    cache_salt: Namespace | list[Namespace] | None = None
    pause_wait_seconds: Annotated[float, Field(ge=0)] | None = None
    stream: bool = False

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for key in UNSUPPORTED_GENERATE:
            if data.get(key):
                raise ValueError(f"`{key}` is not supported by this engine yet")
        return {k: v for k, v in data.items() if v is not None}


UNSUPPORTED_GENERATE = (
    "input_embeds",
    "image_data",
    "video_data",
    "audio_data",
    "lora_path",
    "custom_logit_processor",
    "return_hidden_states",
    "return_routed_experts",
    "return_indexer_topk",
    "return_sampling_mask",
    "return_entropy",
    "return_flat_raw_top_logprobs",
    "return_flat_raw_output_top_logprobs",
    "return_flat_raw_top_logprobs_b64",
    "session_params",
)
"""SGLang's fields that change the answer and that this engine cannot honour; null, false and empty are accepted."""


class EmptyBody(Body): ...


class AbortBody(Body):
    rid: str = ""
    abort_all: bool = False


class PauseBody(Body):
    mode: PauseMode = "abort"


class ContinueBody(Body):
    torch_empty_cache: bool = True


class FlushQuery(Body):
    timeout: Annotated[float, Field(ge=0, le=MAX_FLUSH_WAIT_SECONDS, strict=False)] = 0.0


class MemoryBody(Body):
    """`tags` null or empty: every tag to which the call applies now."""

    tags: list[MemoryTag] | None = None


def _no_draft(selector: str) -> str:
    if selector == "draft":
        raise ValueError("there is no draft model; use all or target")
    return selector


Selector = Annotated[Literal["all", "target", "draft"], AfterValidator(_no_draft)]


class BeginUpdateBody(Body):
    """`plan` is ours: what the session will send. Without it only `/update_weights_from_disk` can fill the session."""

    selector: Selector = "all"
    plan: Annotated[TransferPlan | None, Field(strict=False)] = None


class UpdateFromTensorBody(Body):
    """`bucket` is ours. SGLang's pickled `serialized_named_tensors` are refused: unpickling executes code."""

    bucket: Annotated[BucketHeader | None, Field(strict=False)] = None
    serialized_named_tensors: list[str] | None = None
    load_format: Literal["flattened_bucket"] | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    selector: Selector = "all"
    torch_empty_cache: bool = False


class UpdateFromDiskBody(Body):
    model_path: str
    load_format: Literal["auto", "safetensors"] | None = None
    abort_all_requests: bool = False
    weight_version: str | None = None
    flush_cache: bool = True
    torch_empty_cache: bool = False
    recapture_cuda_graph: bool = False


class UpdateVersionBody(Body):
    """`abort_all_requests` null: as the server was started. That is false by default, and true in SGLang: a new label
    is no reason to lose responses.
    """

    new_version: str
    abort_all_requests: bool | None = None


class GetWeightsBody(Body):
    name: str
    truncate_size: Annotated[int, Field(ge=0)] = 100


class CheckerBody(Body):
    """`skip_tensor_list`: parts of names; a weight whose name has one of them is left out of the action."""

    action: CheckerAction = "checksum"
    allow_quant_error: bool = False
    skip_tensor_list: list[str] | None = None
    selector: Selector = "all"

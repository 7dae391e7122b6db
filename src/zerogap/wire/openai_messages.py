"""The only place for the request bodies of the OpenAI routes, and for how each becomes a body of `/generate`.

A field that this engine cannot honour is refused by name; one that is OpenAI's bookkeeping is accepted and has no
meaning. Unset sampling fields mean what they mean at `/generate`, never what a model's generation_config.json says.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from zerogap.wire.messages import Body, GenerateBody, Namespace, SamplingBody, TokenId

MAX_TOP_LOGPROBS = 20
_BOOKKEEPING = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "priority",
    "session_id",
    "custom_labels",
)
_NOTHING: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": (),
    "separate_reasoning": (True, False),
    "stream_reasoning": (True, False),
    "continue_final_message": (False,),
    "web_search_options": (),
    "verbosity": (),
    "best_of": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "json_schema": ("",),
    "regex": ("",),
    "ebnf": ("",),
    "lora_path": ("",),
    "session_params": ({},),
    "custom_params": ({},),
    "custom_logit_processor": (),
    "images_config": (),
    "use_audio_in_video": (False,),
    "return_cached_tokens_details": (False,),
    "return_input_ids_in_sglext": (False,),
    "return_output_ids_in_sglext": (False,),
    "return_routed_experts": (False,),
    "routed_experts_start_len": (0,),
    "return_sampling_mask": (False,),
    "return_hidden_states": (False,),
}
"""Fields that this engine cannot honour -> the values that ask for nothing and are accepted."""
NAMES_HERE = {"sampling_seed": "seed", "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
"""Fields of `/generate` that have another name on these routes."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    include_usage: bool = False
    include_obfuscation: Literal[False] = False
    continuous_usage_stats: Literal[False] = False


class OpenAIBody(Body):
    """What chat and completions share: OpenAI's sampling fields, then SGLang's extras for reinforcement learning."""

    model: str | None = None
    n: Annotated[int, Field(ge=1)] = 1
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: list[TokenId] | None = None
    stop_regex: str | list[str] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    rid: str | list[str] | None = None
    extra_key: Namespace | list[Namespace] | None = None
    cache_salt: Namespace | list[Namespace] | None = None
    pause_wait_seconds: Annotated[float, Field(ge=0)] | None = None
    return_prompt_token_ids: bool = False
    return_token_ids: bool = False
    return_meta_info: bool = False

    default_max_tokens: ClassVar[int | None] = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_cannot_be_honoured(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for key, value in data.items():
            if value is None:
                continue
            if key in _NOTHING and value not in _NOTHING[key]:
                raise ValueError(f"`{key}` is not supported by this engine")
            if key not in cls.model_fields and key not in _NOTHING and key not in _BOOKKEEPING:
                raise ValueError(f"unknown field `{key}`")
        return {k: v for k, v in data.items() if v is not None and k in cls.model_fields}

    @model_validator(mode="after")
    def _whole_replies_only(self) -> OpenAIBody:
        whole = [name for name in ("return_prompt_token_ids", "return_token_ids", "return_meta_info") if self.stream and
                 getattr(self, name)]  # fmt: skip
        if whole:
            raise ValueError(f"`{whole[0]}` comes with a whole reply only: leave out `stream`")
        if self.stream_options is not None and not self.stream:
            raise ValueError("`stream_options` has no effect without `stream`")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.default_max_tokens if self.max_tokens is None else self.max_tokens

    def sampling(self) -> SamplingBody:
        """Raises pydantic's ValidationError for values out of bounds, by the names of `/generate`."""
        fields = {
            "max_new_tokens": self.token_limit,
            "min_new_tokens": self.min_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "frequency_penalty": self.frequency_penalty,
            "presence_penalty": self.presence_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": self.logit_bias,
            "stop": self.stop,
            "stop_regex": self.stop_regex,
            "stop_token_ids": self.stop_token_ids,
            "ignore_eos": self.ignore_eos,
            "skip_special_tokens": self.skip_special_tokens,
            "no_stop_trim": self.no_stop_trim,
            "n": self.n,
            "sampling_seed": self.seed,
        }
        return SamplingBody.model_validate(fields)

    def generate_body(self, prompt: dict[str, Any], *, logprobs: bool, top: int, echo: bool = False) -> GenerateBody:
        """The same request, as `/generate` takes it. `prompt`: `text` or `input_ids`."""
        return GenerateBody(
            **prompt,
            sampling_params=self.sampling(),
            rid=self.rid,
            return_logprob=logprobs,
            top_logprobs_num=top,
            logprob_start_len=0 if echo and logprobs else -1,
            extra_key=self.extra_key,
            cache_salt=self.cache_salt,
            pause_wait_seconds=self.pause_wait_seconds,
            stream=self.stream,
        )


class ChatBody(OpenAIBody):
    """`/v1/chat/completions`. `input_ids` is SGLang's: the prompt as tokens; messages beside it are not read."""

    messages: Annotated[list[dict[str, Any]], Field(default_factory=list)]
    input_ids: list[TokenId] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    chat_template_kwargs: Annotated[dict[str, Any], Field(default_factory=dict)]

    @model_validator(mode="after")
    def _one_prompt(self) -> ChatBody:
        if not self.messages and self.input_ids is None:
            raise ValueError("give `messages` or `input_ids`")
        for name in ("self", "messages"):
            if name in self.chat_template_kwargs:
                raise ValueError(f"`chat_template_kwargs` cannot set `{name}`")
        if self.top_logprobs and not self.logprobs:
            raise ValueError("`top_logprobs` has no effect without `logprobs`")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ValueError("`max_tokens` and `max_completion_tokens` say different things: give one")
        return self

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class CompletionBody(OpenAIBody):
    """`/v1/completions`: one prompt or several, as text or token ids."""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    default_max_tokens: ClassVar[int | None] = 16

    @model_validator(mode="after")
    def _echo_is_whole(self) -> CompletionBody:
        if self.echo and self.stream:
            raise ValueError("`echo` comes with a whole reply only: leave out `stream`")
        return self

    @property
    def as_prompt(self) -> dict[str, Any]:
        first = self.prompt[0] if isinstance(self.prompt, list) and self.prompt else self.prompt
        return {"text": self.prompt} if isinstance(first, str) else {"input_ids": self.prompt}


class TokenizeBody(Body):
    """SGLang's `/v1/tokenize`: one text or several."""

    model: str | None = None
    prompt: str | list[str]
    add_special_tokens: bool = True


class DetokenizeBody(Body):
    model: str | None = None
    tokens: list[TokenId] | list[list[TokenId]]
    skip_special_tokens: bool = True

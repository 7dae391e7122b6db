"""The only place that reads a Hugging Face `config.json`: what a decoder of the supported families is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from zerogap.errors import ConfigError
from zerogap.model.windows import read_windows, refuse_inexpressible, windows_to_hf
from zerogap.numerics.shape import AttentionShape

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SUPPORTED_MODEL_TYPES = tuple(_ARCHITECTURES)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding. `kind` is Hugging Face's `rope_type`; `scaling` holds the other keys of its dictionary."""

    theta: float
    kind: str = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in ("default", "linear", "llama3", "yarn"):
            raise ConfigError(
                f"rope_type {self.kind!r} is not supported",
                remedy="use a checkpoint with rope_type default, linear, llama3 or yarn; kinds whose frequencies "
                "depend on the length of the sequence cannot give one logprob per token",
            )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of one dense decoder; field names follow Hugging Face where the two have the same meaning."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 2048
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    windows: tuple[int | None, ...] = ()
    """Per layer how many keys a query sees, itself included; None: all before it. Empty: no layer has a window."""
    attn_logit_softcapping: float | None = None
    """Attention scores become cap * tanh(score / cap)."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_attention_heads {self.num_heads} is not a multiple of num_key_value_heads {self.num_kv_heads}",
                remedy="check config.json of the model",
            )
        refuse_inexpressible(self.windows, self.model_type, self.num_layers)
        if self.attn_logit_softcapping is not None and not 0 < self.attn_logit_softcapping < math.inf:
            raise ConfigError(
                f"attn_logit_softcapping {self.attn_logit_softcapping} is not a positive number",
                remedy="check config.json of the model; null is no soft cap",
            )

    @property
    def queries_per_kv(self) -> int:
        return self.num_heads // self.num_kv_heads

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def attention_shape(self) -> AttentionShape:
        heads = (self.num_heads, self.num_kv_heads, self.head_dim)
        return AttentionShape(*heads, self.windows, self.attn_logit_softcapping)

    def window_of(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    @property
    def linear_shapes(self) -> tuple[tuple[int, int], ...]:
        """(inputs, outputs) of every weight matrix that the decoder multiplies by, fused as the decoder fuses them."""
        return (
            (self.hidden_size, self.q_size + 2 * self.kv_size),
            (self.q_size, self.hidden_size),
            (self.hidden_size, 2 * self.intermediate_size),
            (self.intermediate_size, self.hidden_size),
            (self.hidden_size, self.vocab_size),
        )

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Reads the dictionary of a `config.json`. Raises ConfigError for what has no exact kernel."""
        model_type = str(hf.get("model_type"))
        _refuse_unsupported(hf, model_type)
        attention_bias = model_type != "mistral" and bool(hf.get("attention_bias", False))
        heads, soft_cap = int(hf["num_attention_heads"]), hf.get("attn_logit_softcapping")
        eos = hf.get("eos_token_id")
        return cls(
            model_type=model_type,
            vocab_size=int(hf["vocab_size"]),
            hidden_size=int(hf["hidden_size"]),
            intermediate_size=int(hf["intermediate_size"]),
            num_layers=int(hf["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(hf.get("num_key_value_heads") or heads),
            head_dim=int(hf.get("head_dim") or hf["hidden_size"] // heads),
            rms_norm_eps=float(hf["rms_norm_eps"]),
            rope=_rope(hf),
            qk_norm=model_type == "qwen3",
            qkv_bias=model_type == "qwen2" or attention_bias,
            o_bias=attention_bias and model_type != "qwen2",
            mlp_bias=model_type != "mistral" and bool(hf.get("mlp_bias", False)),
            tie_word_embeddings=bool(hf.get("tie_word_embeddings", False)),
            max_position_embeddings=int(hf.get("max_position_embeddings", 2048)),
            eos_token_ids=() if eos is None else (eos,) if isinstance(eos, int) else tuple(eos),
            bos_token_id=hf.get("bos_token_id"),
            pad_token_id=hf.get("pad_token_id"),
            windows=read_windows(hf, model_type),
            attn_logit_softcapping=None if soft_cap is None else float(soft_cap),
        )

    def to_hf(self, dtype: str = "float32") -> dict[str, Any]:
        """A `config.json` dictionary that `transformers` loads; the inverse of `from_hf`."""
        rope = {"rope_type": self.rope.kind, "rope_theta": self.rope.theta, **self.rope.scaling}
        eos: Any = self.eos_token_ids[0] if len(self.eos_token_ids) == 1 else list(self.eos_token_ids) or None
        return {
            "architectures": [_ARCHITECTURES[self.model_type]],
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope.theta,
            "rope_parameters": rope,
            "rope_scaling": None if self.rope.kind == "default" else rope,
            "hidden_act": "silu",
            "attention_bias": self.o_bias or (self.qkv_bias and self.model_type != "qwen2"),
            "mlp_bias": self.mlp_bias,
            "tie_word_embeddings": self.tie_word_embeddings,
            "max_position_embeddings": self.max_position_embeddings,
            "eos_token_id": eos,
            "bos_token_id": self.bos_token_id,
            "pad_token_id": self.pad_token_id,
            "dtype": dtype,
            "torch_dtype": dtype,
            "use_cache": True,
            **windows_to_hf(self.windows, self.model_type),
            **({} if self.attn_logit_softcapping is None else {"attn_logit_softcapping": self.attn_logit_softcapping}),
        }


def _refuse_unsupported(hf: Mapping[str, Any], model_type: str) -> None:
    if model_type not in SUPPORTED_MODEL_TYPES:
        raise ConfigError(
            f"model_type {model_type!r} is not supported",
            remedy=f"use a dense model of one of these families: {', '.join(SUPPORTED_MODEL_TYPES)}",
        )
    if hf.get("hidden_act", "silu") != "silu":
        raise ConfigError(
            f"hidden_act {hf['hidden_act']!r} is not supported", remedy="use a checkpoint whose MLP is SwiGLU (silu)"
        )


def _rope(hf: Mapping[str, Any]) -> RopeConfig:
    """`rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (transformers 4)."""
    given = dict(hf.get("rope_parameters") or hf.get("rope_scaling") or {})
    kind = given.pop("rope_type", None) or given.pop("type", None) or "default"
    given.pop("type", None)
    theta = given.pop("rope_theta", None) or hf.get("rope_theta", 10000.0)
    if kind == "yarn":
        given.setdefault("original_max_position_embeddings", hf.get("max_position_embeddings"))
    return RopeConfig(theta=float(theta), kind=str(kind), scaling=given)

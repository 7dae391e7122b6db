"""The only place that reads GGUF files: Llama weights and byte-level BPE tokenizers, in Hugging Face's layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor
from gguf.quants import dequantize
from torch import Tensor

from zerogap.errors import ConfigError
from zerogap.model.config import ModelConfig, RopeConfig

_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF that never result from merging text
_PRE_TOKENIZERS: dict[str, list[dict[str, Any]]] = {
    "smollm": [
        {"type": "Digits", "individual_digits": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ]
}


class GgufModel:
    """One GGUF file, opened lazily. Raises ConfigError for an architecture or tokenizer it cannot convert exactly."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        try:
            self._reader = GGUFReader(str(path))
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{path} is not a GGUF file: {error}", remedy="install the package that holds it again"
            ) from error
        self._refuse_unless("general.architecture", {"llama"})
        self._refuse_unless("tokenizer.ggml.model", {"gpt2"})
        self._refuse_unless("tokenizer.ggml.pre", set(_PRE_TOKENIZERS))
        self.config = self._read_config()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, dequantised fp32 tensor), one in memory at a time."""
        for tensor in self._reader.tensors:
            # A copy: what is stored as fp32 is a read-only view of the file.
            yield self._hf_name(tensor.name), torch.from_numpy(np.array(self._dequantize(tensor), order="C"))

    def tokenizer_json(self) -> dict[str, Any]:
        """What tokenizer.json holds."""
        tokens = self._field("tokenizer.ggml.tokens")
        types = self._field("tokenizer.ggml.token_type")
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        added = [
            {"id": i, "content": token, **flags}
            for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
            if kind in (_CONTROL, _USER_DEFINED)
        ]
        pre = _PRE_TOKENIZERS[self._field("tokenizer.ggml.pre")]
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": pre},
            "post_processor": None,
            "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": self._token("unknown"),
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {token: i for i, token in enumerate(tokens)},
                "merges": list(self._field("tokenizer.ggml.merges")),
            },
        }

    def tokenizer_config(self) -> dict[str, Any]:
        """What tokenizer_config.json holds; the chat template is a file of its own."""
        named = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "add_bos_token": bool(self._field("tokenizer.ggml.add_bos_token", False)),
            "clean_up_tokenization_spaces": False,
            "model_max_length": self.config.max_position_embeddings,
            **{key: self._token(name) for key, name in named.items()},
        }

    @property
    def chat_template(self) -> str:
        return self._field("tokenizer.chat_template")

    def _field(self, key: str, default: Any = None) -> Any:
        field = self._reader.fields.get(key)
        value = default if field is None else field.contents()
        if value is None:
            raise ConfigError(f"{self.path.name} lacks the field {key}", remedy="use a GGUF file of llama.cpp's format")
        return value

    def _token(self, name: str) -> str:
        return self._field("tokenizer.ggml.tokens")[self._field(f"tokenizer.ggml.{name}_token_id", 0)]

    def _refuse_unless(self, key: str, known: set[str]) -> None:
        if self._field(key) not in known:
            raise ConfigError(
                f"{self.path.name}: {key} is {self._field(key)!r}, only {', '.join(sorted(known))} can be converted",
                remedy="use the model's Hugging Face folder instead",
            )

    def _read_config(self) -> ModelConfig:
        heads, hidden = self._field("llama.attention.head_count"), self._field("llama.embedding_length")
        return ModelConfig(
            model_type="llama",
            vocab_size=self._field("llama.vocab_size"),
            hidden_size=hidden,
            intermediate_size=self._field("llama.feed_forward_length"),
            num_layers=self._field("llama.block_count"),
            num_heads=heads,
            num_kv_heads=self._field("llama.attention.head_count_kv", heads),
            head_dim=self._field("llama.rope.dimension_count", hidden // heads),
            rms_norm_eps=_shortest(self._field("llama.attention.layer_norm_rms_epsilon")),
            rope=RopeConfig(theta=_shortest(self._field("llama.rope.freq_base", 10000.0))),
            tie_word_embeddings=all(tensor.name != "output.weight" for tensor in self._reader.tensors),
            max_position_embeddings=self._field("llama.context_length"),
            eos_token_ids=(self._field("tokenizer.ggml.eos_token_id"),),
            bos_token_id=self._field("tokenizer.ggml.bos_token_id"),
            pad_token_id=self._field("tokenizer.ggml.padding_token_id", self._field("tokenizer.ggml.eos_token_id")),
        )

    def _hf_name(self, name: str) -> str:
        if name in _TOP_NAMES:
            return _TOP_NAMES[name]
        block, layer, leaf, kind = (*name.split("."), "", "", "")[:4]
        if block != "blk" or leaf not in _LAYER_NAMES or kind != "weight":
            raise ConfigError(
                f"{self.path.name} holds {name}, which has no place in a Llama model",
                remedy="use the model's Hugging Face folder instead",
            )
        return f"model.layers.{layer}.{_LAYER_NAMES[leaf]}.weight"

    def _dequantize(self, tensor: ReaderTensor) -> np.ndarray[Any, np.dtype[np.float32]]:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        weight = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        heads: Mapping[str, int] = {"attn_q": self.config.num_heads, "attn_k": self.config.num_kv_heads}
        leaf = tensor.name.split(".")[-2]
        return unpermute(weight, heads[leaf]) if leaf in heads else weight


def unpermute(weight: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """Rows of a q or k projection from llama.cpp's order (rotary pairs adjacent) to Hugging Face's (halves)."""
    outputs, inputs = weight.shape
    return weight.reshape(num_heads, outputs // num_heads // 2, 2, inputs).swapaxes(1, 2).reshape(outputs, inputs)


def _shortest(value: float) -> float:
    """The decimal that was meant: GGUF stores 1e-5 as a float32, 9.999999747378752e-06."""
    return float(f"{value:.6g}")

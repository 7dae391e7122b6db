"""model/gguf.py: a small GGUF file written here comes back as the Hugging Face weights it was made from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from support.tiny import TINY, TINY_UNTIED, tiny_decoder

from zerogap.errors import ConfigError
from zerogap.model.config import ModelConfig
from zerogap.model.gguf import GgufModel, unpermute

LEAVES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
TOKENS = ["<unk>", "<s>", "</s>", *(chr(ord("a") + i) for i in range(26)), *"0123456789", "ab"]
TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's conversion of a q or k projection, as its convert_hf_to_gguf.py does it."""
    return (
        weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, weight.shape[1])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def write(path: Path, config: ModelConfig, tensors: dict[str, torch.Tensor], **changes: Any) -> Path:
    writer = gguf.GGUFWriter(path, changes.get("architecture", "llama"))
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model(changes.get("model", "gpt2"))
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, *[1] * (len(TOKENS) - 3)])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{{ messages[0].content }}")
    for name, tensor in tensors.items():
        weight = tensor.numpy()
        if "q_proj" in name or "k_proj" in name:
            weight = permute(weight, config.num_heads if "q_proj" in name else config.num_kv_heads)
        if name in TOP:
            stored = TOP[name]
        else:
            _, _, layer, leaf = name.removesuffix(".weight").split(".", 3)
            stored = f"blk.{layer}.{LEAVES[leaf]}.weight"
        writer.add_tensor(changes.get("rename", {}).get(stored, stored), np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("config", [TINY, TINY_UNTIED], ids=["tied", "untied"])
def test_weights_come_back_to_the_last_bit_under_their_names(tmp_path, config):
    tensors = tiny_decoder(config).hf_tensors()
    read = dict(GgufModel(write(tmp_path / "m.gguf", config, tensors)).tensors())
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) for name in tensors)


@pytest.mark.parametrize("config", [TINY, TINY_UNTIED], ids=["tied", "untied"])
def test_the_config_comes_back_and_the_head_is_tied_if_the_file_has_none(tmp_path, config):
    assert GgufModel(write(tmp_path / "m.gguf", config, tiny_decoder(config).hf_tensors())).config == config


def test_the_rotary_order_is_undone_and_that_matters():
    """Skipped, it leaves text half-plausible: nothing else would notice."""
    weight = np.arange(16 * 3, dtype=np.float32).reshape(16, 3)
    stored = permute(weight, 2)
    assert not np.array_equal(stored, weight)
    assert np.array_equal(unpermute(stored, 2), weight)


def test_what_was_read_can_be_written_to(tmp_path):
    """fp32 tensors are read-only views of the file until they are copied."""
    model = GgufModel(write(tmp_path / "m.gguf", TINY, tiny_decoder().hf_tensors()))
    for _, tensor in model.tensors():
        tensor.add_(1)


def test_the_tokenizer_splits_digits_merges_and_knows_its_special_tokens(tmp_path):
    model = GgufModel(write(tmp_path / "m.gguf", TINY, tiny_decoder().hf_tensors()))
    backend = tokenizers.Tokenizer.from_str(json.dumps(model.tokenizer_json()))
    assert backend.encode("ab12</s>").tokens == ["ab", "1", "2", "</s>"]
    assert backend.decode(backend.encode("<s>ab").ids) == "ab"
    config = model.tokenizer_config()
    assert (config["bos_token"], config["eos_token"], config["pad_token"]) == ("<s>", "</s>", "</s>")
    assert model.chat_template == "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "gemma"}, "general.architecture is 'gemma'"),
        ({"model": "llama"}, "tokenizer.ggml.model is 'llama'"),
        ({"pre": "qwen2"}, "tokenizer.ggml.pre is 'qwen2'"),
    ],
)
def test_what_cannot_be_converted_exactly_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        GgufModel(write(tmp_path / "m.gguf", TINY, tiny_decoder().hf_tensors(), **changes))


def test_a_tensor_without_a_place_in_the_model_is_refused_by_name(tmp_path):
    renamed = {"blk.0.attn_q.weight": "blk.0.attn_q_a.weight"}
    path = write(tmp_path / "m.gguf", TINY, tiny_decoder().hf_tensors(), rename=renamed)
    with pytest.raises(ConfigError, match=r"blk\.0\.attn_q_a\.weight"):
        dict(GgufModel(path).tensors())


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"not a model at all, but long enough to be read")
    with pytest.raises(ConfigError, match="is not a GGUF file"):
        GgufModel(tmp_path / "m.gguf")
    with pytest.raises(ConfigError, match="is not a GGUF file"):
        GgufModel(tmp_path / "nothing.gguf")

"""The decoder gives the logits of `transformers`, and accounts for every tensor by its Hugging Face name."""

import itertools
import json
from dataclasses import replace

import pytest
import torch
from support.tiny import TINY, TINY_MISTRAL, TINY_QWEN2, TINY_QWEN3, TINY_UNTIED, tiny_decoder, tiny_folder

from zerogap.errors import ConfigError
from zerogap.model.config import ModelConfig, RopeConfig
from zerogap.model.decoder import Decoder
from zerogap.model.registry import load_decoder
from zerogap.numerics.attention import TreePlan, tree_attend

LLAMA3_ROPE = RopeConfig(
    500000.0,
    "llama3",
    {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
)
YARN_ROPE = RopeConfig(10000.0, "yarn", {"factor": 4.0, "original_max_position_embeddings": 64})
CONFIGS = {
    "llama": TINY,
    "llama-untied": TINY_UNTIED,
    "llama-biased": replace(TINY, qkv_bias=True, o_bias=True, mlp_bias=True),
    "llama3-rope": replace(TINY, rope=LLAMA3_ROPE),
    "linear-rope": replace(TINY, rope=RopeConfig(10000.0, "linear", {"factor": 2.0})),
    "yarn-rope": replace(TINY_QWEN3, rope=YARN_ROPE),
    "qwen2": TINY_QWEN2,
    "qwen3": TINY_QWEN3,
    "mistral": TINY_MISTRAL,
    "mistral-window": replace(TINY_MISTRAL, windows=(7, 7)),
    "qwen2-window": replace(TINY_QWEN2, windows=(None, 16)),
    "qwen3-window": replace(TINY_QWEN3, windows=(33, None)),
}


def plain_forward(decoder: Decoder, ids: list[int]) -> torch.Tensor:
    plan = TreePlan.build([len(ids)], [[]])
    hidden = decoder(torch.tensor(ids), plan.positions_N, tree_attend(plan, decoder.attention_scale))
    return decoder.logits(hidden).detach()


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(name, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder = tiny_folder(tmp_path / name, CONFIGS[name])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids = torch.randint(0, 64, (100,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(plain_forward(load_decoder(folder), ids), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("soft_cap", [None, 3.5])
def test_config_survives_the_round_trip_through_hugging_face(name, soft_cap):
    config = replace(CONFIGS[name], attn_logit_softcapping=soft_cap)
    assert ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config


@pytest.mark.parametrize("name", CONFIGS)
def test_every_parameter_byte_has_exactly_one_name(name):
    """C1, C25: fused parameters are covered by their parts' names without gap or overlap; a tied head has none."""
    decoder = tiny_decoder(CONFIGS[name])
    views = decoder.hf_tensors()
    assert ("lm_head.weight" in views) == (not CONFIGS[name].tie_word_embeddings)
    spans = sorted((v.data_ptr(), v.data_ptr() + v.nbytes) for v in views.values())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    assert sum(v.nbytes for v in views.values()) == sum(p.nbytes for p in decoder.parameters())


def test_writing_into_a_view_changes_the_model_once_repacked():
    """C1: the tied head follows the embedding, also in the prepacked serving copy."""
    decoder = tiny_decoder()
    decoder.prepack()
    hidden = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = decoder.logits(hidden)
        decoder.hf_tensors()["model.embed_tokens.weight"][5] += 1
        decoder.prepack()
        after = decoder.logits(hidden)
    changed = (before != after).any(0).nonzero().squeeze(-1).tolist()
    assert changed == [5]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"use_sliding_window": True}, "sliding windows: the llama family"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "rope_parameters": None}, "dynamic"),
        ({"num_key_value_heads": 3}, "3"),
    ],
)
def test_an_unsupported_model_is_refused_by_name(change, named):
    with pytest.raises(ConfigError, match=named):
        ModelConfig.from_hf(TINY.to_hf() | change)

"""Sliding windows and soft caps in `config.json`: read as `transformers` reads them, or refused by name."""

import json
from dataclasses import replace

import pytest
from support.tiny import TINY, TINY_MISTRAL, TINY_QWEN2, TINY_QWEN3

from zerogap.errors import ConfigError
from zerogap.model.config import ModelConfig

SLIDING, FULL = "sliding_attention", "full_attention"
ON = {"use_sliding_window": True, "sliding_window": 8}


def read(config, **change):
    return ModelConfig.from_hf(json.loads(json.dumps(config.to_hf() | change)))


@pytest.mark.parametrize(
    ("config", "change", "windows"),
    [
        (TINY_QWEN2, {"sliding_window": 8}, ()),
        (TINY_QWEN2, ON | {"max_window_layers": 0}, (8, 8)),
        (TINY_QWEN3, ON | {"max_window_layers": 1}, (None, 8)),
        (TINY_QWEN3, ON | {"max_window_layers": 2}, ()),
        (TINY_QWEN3, ON, ()),
        (TINY_QWEN3, ON | {"sliding_window": None, "max_window_layers": 0}, ()),
        (TINY_QWEN2, {"use_sliding_window": True, "max_window_layers": 0}, (4096, 4096)),
        (TINY_QWEN3, ON | {"max_window_layers": 1, "layer_types": [SLIDING, FULL]}, (8, None)),
        (TINY_QWEN3, {"layer_types": [FULL, FULL]}, ()),
        (TINY_MISTRAL, {"sliding_window": 8}, (8, 8)),
        (TINY_MISTRAL, {"sliding_window": None}, ()),
        (TINY_MISTRAL, {"attention_bias": True, "mlp_bias": True}, ()),
        (TINY, {"sliding_window": 8}, ()),
    ],
)
def test_the_window_of_each_layer_is_the_one_transformers_gives_it(config, change, windows):
    transformers = pytest.importorskip("transformers")
    found = read(config, **change)
    assert found == replace(config, windows=windows)
    theirs = transformers.AutoConfig.for_model(**(config.to_hf() | change))
    if config.model_type in ("qwen2", "qwen3"):
        assert tuple(theirs.sliding_window if t == SLIDING else None for t in theirs.layer_types) == (
            windows or (None, None)
        )
    elif config.model_type == "mistral":
        assert (theirs.sliding_window,) * 2 == (windows or (None, None))


def test_a_mistral_config_that_is_silent_has_the_window_that_transformers_gives_it():
    silent = {k: v for k, v in TINY_MISTRAL.to_hf().items() if k != "sliding_window"}
    assert ModelConfig.from_hf(silent).windows == (4096, 4096)


@pytest.mark.parametrize(
    ("config", "change", "named"),
    [
        (TINY_QWEN3, {"layer_types": [FULL, SLIDING]}, "no sliding_window is on"),
        (TINY_QWEN3, ON | {"layer_types": [FULL, "chunked_attention"]}, "chunked_attention"),
        (TINY_QWEN3, {"layer_types": [FULL, "linear_attention"]}, "linear_attention"),
        (TINY_QWEN3, ON | {"layer_types": [SLIDING]}, "1 for 2 layers"),
        (TINY_QWEN2, ON | {"sliding_window": 0, "max_window_layers": 0}, "at least 1 key, not 0"),
        (TINY_MISTRAL, {"sliding_window": 8, "layer_types": [FULL, SLIDING]}, "mistral checkpoint"),
        (TINY, {"layer_types": [FULL, SLIDING]}, "llama checkpoint"),
        (TINY, {"attn_logit_softcapping": 0}, "attn_logit_softcapping"),
        (TINY, {"attn_logit_softcapping": float("inf")}, "attn_logit_softcapping"),
    ],
)
def test_what_has_no_exact_meaning_is_refused_by_name(config, change, named):
    with pytest.raises(ConfigError, match=named):
        read(config, **change)


@pytest.mark.parametrize(
    ("config", "windows", "named"),
    [(TINY, (4, 4), "llama"), (TINY_QWEN3, (4, 5), "one width"), (TINY_MISTRAL, (4, None), "all have one")],
)
def test_windows_that_no_checkpoint_could_hold_are_refused(config, windows, named):
    with pytest.raises(ConfigError, match=named):
        replace(config, windows=windows)

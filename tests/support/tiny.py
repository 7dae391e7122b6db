"""Tiny seeded models and folders for tests: 2 layers, made in milliseconds, no download."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from zerogap.model.config import ModelConfig, RopeConfig
from zerogap.model.decoder import Decoder

TINY = ModelConfig(
    model_type="llama",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=10000.0),
    tie_word_embeddings=True,
    max_position_embeddings=512,
    eos_token_ids=(2,),
    bos_token_id=1,
    pad_token_id=2,
)
TINY_UNTIED = replace(TINY, tie_word_embeddings=False)
TINY_QWEN2 = replace(TINY, model_type="qwen2", qkv_bias=True)
TINY_QWEN3 = replace(TINY, model_type="qwen3", qk_norm=True)
TINY_MISTRAL = replace(TINY_UNTIED, model_type="mistral")


def tiny_decoder(config: ModelConfig = TINY, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Decoder:
    """Random weights of a size that gives varied, peaked distributions (std 0.3, biases and norms random too)."""
    decoder = Decoder(config, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    for name, view in decoder.hf_tensors().items():
        noise = torch.randn(view.shape, generator=generator)
        view.copy_(1 + 0.1 * noise if name.endswith("norm.weight") else 0.3 * noise)
    return decoder


def tiny_folder(path: Path, config: ModelConfig = TINY, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> Path:
    """A Hugging Face folder of a tiny model: weights and config.json, no tokenizer."""
    path.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.clone() for k, v in tiny_decoder(config, seed=seed, dtype=dtype).hf_tensors().items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    (path / "config.json").write_text(json.dumps(config.to_hf(str(dtype).removeprefix("torch."))))
    return path

"""The only place that turns a Hugging Face folder into a decoder with its weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from zerogap.errors import ConfigError
from zerogap.model.checkpoint import load_into
from zerogap.model.config import ModelConfig
from zerogap.model.decoder import Decoder
from zerogap.model.layers import Allocate

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def read_config(folder: Path) -> ModelConfig:
    """The model's config.json. Raises ConfigError if there is none, or it is damaged, or of an unsupported model."""
    path = Path(folder) / "config.json"
    try:
        if not path.is_file():
            raise ConfigError(
                f"{folder} has no config.json",
                remedy="give a Hugging Face model folder, or a name `zerogap model` knows",
            )
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        shown = str(error)[:200]
        raise ConfigError(f"config.json of a model cannot be read: {shown}", remedy="mend it, or the path") from error
    if not isinstance(given, dict):
        raise ConfigError(f"{path} holds no JSON object", remedy="give a Hugging Face model folder")
    try:
        return ModelConfig.from_hf(given)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ConfigError(
            f"{path} describes no model: {type(error).__name__} {error}", remedy="give a Hugging Face model folder"
        ) from error


def parse_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not supported", remedy=f"use one of {', '.join(DTYPES)}")
    return DTYPES[name]


def parse_device(name: str) -> torch.device:
    """Raises ConfigError for a device that is not there."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "model.device='cuda', but torch sees no GPU",
            remedy="set model.device='cpu', or install a CUDA build of torch",
        )
    return torch.device(name)


def load_decoder(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    allocate: Allocate | None = None,
    device: torch.device | None = None,
) -> Decoder:
    """A decoder with the folder's weights, cast to `dtype`; every name of the checkpoint is accounted for."""
    decoder = Decoder(read_config(folder), dtype=dtype, allocate=allocate, device=device)
    load_into(decoder.hf_tensors(), folder)
    return decoder


def generation_eos_ids(folder: Path) -> frozenset[int]:
    """What generation_config.json adds to the EOS list of config.json: chat models often end a turn with another."""
    path = folder / "generation_config.json"
    given = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id") if path.is_file() else None
    return frozenset([given] if isinstance(given, int) else given or ())

"""The only place for rotary position embedding: one fp32 table computed in fp64, one formula, both sides.

T = positions in the table, N = tokens, H = heads, D = head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor


def rope_table(
    *, theta: float, kind: str, scaling: Mapping[str, Any], head_dim: int, num_positions: int
) -> tuple[Tensor, Tensor]:
    """cos_TF and sin_TF in fp32 with F = head_dim / 2, for positions 0 .. num_positions - 1.

    `kind` and `scaling` follow Hugging Face's `rope_parameters`: default, linear (Chen et al. 2023), llama3
    (frequency-dependent interpolation), yarn (Peng et al. 2023, arXiv 2309.00071).
    """
    exponent_F = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequency_F = theta**-exponent_F
    amplitude = 1.0
    if kind == "linear":
        frequency_F = frequency_F / scaling["factor"]
    elif kind == "llama3":
        frequency_F = _llama3(frequency_F, scaling)
    elif kind == "yarn":
        frequency_F, amplitude = _yarn(frequency_F, scaling, theta, head_dim)
    angle_TF = torch.arange(num_positions, dtype=torch.float64)[:, None] * frequency_F
    return (angle_TF.cos() * amplitude).float(), (angle_TF.sin() * amplitude).float()


def _llama3(frequency_F: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength_F = 2 * math.pi / frequency_F
    smooth_F = ((original / wavelength_F - low) / (high - low)).clamp(0, 1)
    return (1 - smooth_F) * frequency_F / factor + smooth_F * frequency_F


def _yarn(frequency_F: Tensor, scaling: Mapping[str, Any], theta: float, head_dim: int) -> tuple[Tensor, float]:
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def dimension_that_turns(times: float) -> float:
        return head_dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low = max(dimension_that_turns(scaling.get("beta_fast") or 32), 0)
    high = min(dimension_that_turns(scaling.get("beta_slow") or 1), head_dim - 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    ramp_F = ((torch.arange(head_dim // 2, dtype=torch.float64) - low) / max(high - low, 0.001)).clamp(0, 1)
    scaled_F = frequency_F / factor * ramp_F + frequency_F * (1 - ramp_F)
    amplitude = scaling.get("attention_factor")
    if amplitude is None:
        amplitude = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return scaled_F, float(amplitude)


def apply_rope(x_NHD: Tensor, cos_NF: Tensor, sin_NF: Tensor) -> Tensor:
    """Rotates the halves of each head (Hugging Face's `rotate_half` layout); computed in fp32, rounded once."""
    cos, sin = cos_NF.unsqueeze(1), sin_NF.unsqueeze(1)
    first, second = x_NHD.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_NHD.dtype)

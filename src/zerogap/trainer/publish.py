"""The only place that decides what a refit sends: every weight of the trainer once, in the engine's dtype."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def published_weights(hf_tensors: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Hugging Face name -> tensor as the engine holds it.

    In the trainer's own dtype these are views of the live weights, so send them before the next step; in another dtype
    they are rounded copies, which live as long as the result does.
    """
    return {name: tensor.to(dtype) for name, tensor in hf_tensors.items()}

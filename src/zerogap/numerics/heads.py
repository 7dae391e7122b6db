"""The only place where a layer's fused projection becomes heads: normed where the model does so, then rotated.

It is split as late as possible, by whoever attends: on a GPU keys and values then go straight to the cache.

N = flat tokens, T = positions of the table, H = query heads, K = KV heads, D = head dimension, F = D / 2.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from zerogap.numerics.norm import rms_norm
from zerogap.numerics.rope import apply_rope


@dataclass(frozen=True, slots=True)
class Rotation:
    """The angles of the tokens of one forward: where each stands, and the tables (on a CPU their rows as well)."""

    cos_TF: Tensor
    sin_TF: Tensor
    positions_N: Tensor
    cos_NF: Tensor | None
    sin_NF: Tensor | None

    @staticmethod
    def at(positions_N: Tensor, cos_TF: Tensor, sin_TF: Tensor) -> Rotation:
        if positions_N.is_cuda:
            return Rotation(cos_TF, sin_TF, positions_N, None, None)
        return Rotation(cos_TF, sin_TF, positions_N, cos_TF[positions_N], sin_TF[positions_N])


@dataclass(frozen=True, slots=True)
class Projection:
    """q, k and v of one layer side by side, [N, (H + 2K) * D], before they are split, and how far and how sharply the
    layer attends: whoever attends reads `window` and `soft_cap` here, so that no phase can leave them out.
    """

    qkv_NA: Tensor
    q_norm_D: Tensor | None
    k_norm_D: Tensor | None
    rotation: Rotation
    shape: tuple[int, int, int]
    eps: float
    window: int | None = None
    soft_cap: float | None = None

    def split(self) -> tuple[Tensor, Tensor, Tensor]:
        """q_NHD, k_NKD, v_NKD. Differentiable."""
        r = self.rotation
        if self.qkv_NA.is_cuda:
            from zerogap.numerics.gpu import rows  # noqa: PLC0415  Triton is there on a GPU only

            return rows.split_heads(
                self.qkv_NA, self.q_norm_D, self.k_norm_D, r.cos_TF, r.sin_TF, r.positions_N, self.shape, self.eps
            )
        H, K, D = self.shape
        q, k, v = self.qkv_NA.split((H * D, K * D, K * D), dim=-1)
        q_NHD, k_NKD, v_NKD = q.view(-1, H, D), k.view(-1, K, D), v.view(-1, K, D)
        if self.q_norm_D is not None and self.k_norm_D is not None:
            q_NHD, k_NKD = rms_norm(q_NHD, self.q_norm_D, self.eps), rms_norm(k_NKD, self.k_norm_D, self.eps)
        assert r.cos_NF is not None and r.sin_NF is not None
        return apply_rope(q_NHD, r.cos_NF, r.sin_NF), apply_rope(k_NKD, r.cos_NF, r.sin_NF), v_NKD

    def split_into(self, keys_SKD: Tensor, values_SKD: Tensor, slots_N: Tensor) -> Tensor:
        """q_NHD; keys and values go to their slots of a cache on the GPU."""
        from zerogap.numerics.gpu import rows  # noqa: PLC0415  Triton is there on a GPU only

        r = self.rotation
        return rows.split_heads_into(
            keys_SKD, values_SKD, slots_N, self.qkv_NA, self.q_norm_D, self.k_norm_D, r.cos_TF, r.sin_TF,
            r.positions_N, self.shape, self.eps,
        )  # fmt: skip

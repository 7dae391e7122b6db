"""The only place for the decoder's layers. Projections that read the same input are fused; `weight_views` names their
parts as Hugging Face does.

N = flat tokens, C = hidden size, H = query heads, K = KV heads, D = head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from zerogap.model.config import ModelConfig
from zerogap.numerics.certify import Routes
from zerogap.numerics.heads import Projection, Rotation
from zerogap.numerics.matmul import linear, pack
from zerogap.numerics.norm import add_rms_norm, swiglu

Allocate = Callable[..., Tensor]
Attend = Callable[[int, Projection], Tensor]
"""(layer, its projection) -> [N, H * D]: whoever makes one says where keys and values come from."""


class Linear(nn.Module):
    """A canonical linear of one or more projections stacked along the outputs; `parts` gives (name, rows) of each."""

    def __init__(
        self, num_inputs: int, parts: Sequence[tuple[str, int]], *, bias: bool, routes: Routes, allocate: Allocate
    ) -> None:
        super().__init__()
        self.parts = tuple(parts)
        num_outputs = sum(rows for _, rows in parts)
        self.weight = nn.Parameter(allocate((num_outputs, num_inputs)))
        self.bias = nn.Parameter(allocate((num_outputs,))) if bias else None
        self.route = routes.linear(num_inputs, num_outputs)
        self.packed: Tensor | None = None

    def forward(self, x_NC: Tensor) -> Tensor:
        return linear(x_NC, self.weight, self.bias, self.route, self.packed)

    def prepack(self) -> None:
        self.packed = None  # first: the new copy takes the old one's memory
        self.packed = pack(self.weight, self.route)

    def weight_views(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, view) of each part: contiguous rows of the fused parameter."""
        sizes = [rows for _, rows in self.parts]
        for kind, parameter in (("weight", self.weight), ("bias", self.bias)):
            if parameter is not None:
                for (name, _), view in zip(self.parts, parameter.detach().split(sizes), strict=True):
                    yield f"{prefix}.{name}.{kind}", view


class Attention(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, routes: Routes, allocate: Allocate) -> None:
        super().__init__()
        self.config, self.layer = config, layer
        qkv = [("q_proj", config.q_size), ("k_proj", config.kv_size), ("v_proj", config.kv_size)]
        self.qkv = Linear(config.hidden_size, qkv, bias=config.qkv_bias, routes=routes, allocate=allocate)
        out = [("o_proj", config.hidden_size)]
        self.out = Linear(config.q_size, out, bias=config.o_bias, routes=routes, allocate=allocate)
        self.q_norm = nn.Parameter(allocate((config.head_dim,))) if config.qk_norm else None
        self.k_norm = nn.Parameter(allocate((config.head_dim,))) if config.qk_norm else None

    def forward(self, x_NC: Tensor, rotation: Rotation, attend: Attend) -> Tensor:
        c = self.config
        projection = Projection(
            self.qkv(x_NC),
            self.q_norm,
            self.k_norm,
            rotation,
            (c.num_heads, c.num_kv_heads, c.head_dim),
            c.rms_norm_eps,
            c.window_of(self.layer),
            c.attn_logit_softcapping,
        )
        return self.out(attend(self.layer, projection))

    def weight_views(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield from self.qkv.weight_views(prefix)
        yield from self.out.weight_views(prefix)
        if self.q_norm is not None and self.k_norm is not None:
            yield f"{prefix}.q_norm.weight", self.q_norm.detach()
            yield f"{prefix}.k_norm.weight", self.k_norm.detach()


class Block(nn.Module):
    def __init__(self, config: ModelConfig, layer: int, routes: Routes, allocate: Allocate) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        width, inner = config.hidden_size, config.intermediate_size
        self.attention_norm = nn.Parameter(allocate((width,)))
        self.attention = Attention(config, layer, routes, allocate)
        self.mlp_norm = nn.Parameter(allocate((width,)))
        gate_up = [("gate_proj", inner), ("up_proj", inner)]
        self.gate_up = Linear(width, gate_up, bias=config.mlp_bias, routes=routes, allocate=allocate)
        self.down = Linear(inner, [("down_proj", width)], bias=config.mlp_bias, routes=routes, allocate=allocate)

    def forward(
        self, h_NC: Tensor, delta_NC: Tensor | None, rotation: Rotation, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """The residual stream and what is still to be added to it: the next norm adds it in passing."""
        h_NC, x_NC = add_rms_norm(h_NC, delta_NC, self.attention_norm, self.eps)
        h_NC, x_NC = add_rms_norm(h_NC, self.attention(x_NC, rotation, attend), self.mlp_norm, self.eps)
        return h_NC, self.down(swiglu(self.gate_up(x_NC)))

    def weight_views(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        yield f"{prefix}.input_layernorm.weight", self.attention_norm.detach()
        yield from self.attention.weight_views(f"{prefix}.self_attn")
        yield f"{prefix}.post_attention_layernorm.weight", self.mlp_norm.detach()
        yield from self.gate_up.weight_views(f"{prefix}.mlp")
        yield from self.down.weight_views(f"{prefix}.mlp")


def default_allocate(dtype: torch.dtype, device: torch.device | None = None) -> Allocate:
    def allocate(shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return allocate

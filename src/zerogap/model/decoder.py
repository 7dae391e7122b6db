"""The one definition of the decoder, for the engine and for the trainer. They differ only in `attend`: where the keys
and values of a token come from (the paged cache when serving, the packed batch when training).

N = flat tokens (any mix of sequences), M = rows that need logits, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zerogap.model.config import ModelConfig
from zerogap.model.layers import Allocate, Attend, Block, Linear, default_allocate
from zerogap.numerics.certify import certify
from zerogap.numerics.heads import Rotation
from zerogap.numerics.matmul import linear, pack
from zerogap.numerics.norm import add_rms_norm
from zerogap.numerics.rope import rope_table


class Decoder(nn.Module):
    """A dense decoder of the Llama, Mistral, Qwen2 or Qwen3 family. Parameters start as zeros; load or initialise them.

    `allocate(shape, dtype=...)` provides the memory of every parameter (the engine passes its own regions).
    """

    cos_TF: Tensor
    sin_TF: Tensor
    activation_checkpointing: bool = False
    """A backward computes the inside of each block anew, not keeping it: the same bits, less memory, more time."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        dtype: torch.dtype = torch.float32,
        allocate: Allocate | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.certificate = certify(config.linear_shapes, config.attention_shape, config.vocab_size, dtype, device)
        self.routes = self.certificate.routes
        take = default_allocate(dtype, device) if allocate is None else _with_dtype(allocate, dtype)
        self.embedding = nn.Parameter(take((config.vocab_size, config.hidden_size)))
        self.blocks = nn.ModuleList(Block(config, i, self.routes, take) for i in range(config.num_layers))
        self.norm = nn.Parameter(take((config.hidden_size,)))
        self.head: Linear | None = None
        if not config.tie_word_embeddings:
            parts = [("lm_head", config.vocab_size)]
            self.head = Linear(config.hidden_size, parts, bias=False, routes=self.routes, allocate=take)
        self.head_route = self.routes.linear(config.hidden_size, config.vocab_size)
        self.packed_head: Tensor | None = None
        cos, sin = rope_table(
            theta=config.rope.theta,
            kind=config.rope.kind,
            scaling=config.rope.scaling,
            head_dim=config.head_dim,
            num_positions=config.max_position_embeddings,
        )
        self.register_buffer("cos_TF", cos.to(device), persistent=False)
        self.register_buffer("sin_TF", sin.to(device), persistent=False)

    @property
    def device(self) -> torch.device:
        return self.cos_TF.device

    @property
    def attention_scale(self) -> float:
        return self.config.head_dim**-0.5

    @property
    def head_weight(self) -> Tensor:
        return self.embedding if self.head is None else self.head.weight

    def forward(self, ids_N: Tensor, positions_N: Tensor, attend: Attend) -> Tensor:
        """Final-normed hidden states [N, C] of flat tokens."""
        rotation = Rotation.at(positions_N, self.cos_TF, self.sin_TF)
        h_NC, delta_NC = F.embedding(ids_N, self.embedding), None
        keeps_all = not (self.activation_checkpointing and torch.is_grad_enabled())
        for block in self.blocks:
            run = block if keeps_all else partial(checkpoint, block, use_reentrant=False, preserve_rng_state=False)
            h_NC, delta_NC = run(h_NC, delta_NC, rotation, attend)
        return add_rms_norm(h_NC, delta_NC, self.norm, self.config.rms_norm_eps)[1]

    def logits(self, hidden_MC: Tensor) -> Tensor:
        """fp32 logits [M, V] of final-normed hidden states."""
        return self.model_logits(hidden_MC).float()

    def model_logits(self, hidden_MC: Tensor) -> Tensor:
        """The same logits in the model's own dtype, as they were rounded: what kernels read that work in fp32."""
        return linear(hidden_MC, self.head_weight, None, self.head_route, self.packed_head)

    def hf_tensors(self) -> dict[str, Tensor]:
        """Hugging Face name -> view into the parameters, in file order. Writing into a view loads the weight.

        A tied head is absent: it is the embedding. Prepacked copies must be remade after a write.
        """
        return dict(self._weight_views())

    def _weight_views(self) -> Iterator[tuple[str, Tensor]]:
        yield "model.embed_tokens.weight", self.embedding.detach()
        for i, block in enumerate(self.blocks):
            assert isinstance(block, Block)
            yield from block.weight_views(f"model.layers.{i}")
        yield "model.norm.weight", self.norm.detach()
        if self.head is not None:
            yield "lm_head.weight", self.head.weight.detach()

    def share(self, other: Decoder) -> None:
        """From here on the parameters are the other decoder's memory; serving copies stay this one's own."""
        for mine, theirs in zip(self.parameters(), other.parameters(), strict=True):
            assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
            mine.data = theirs.data

    def prepack(self) -> None:
        """Makes the serving copies of the linears. Call after every change of weights; the bits do not change."""
        for module in self.modules():
            if isinstance(module, Linear) and module is not self.head:
                module.prepack()
        self.packed_head = None
        self.packed_head = pack(self.head_weight, self.head_route)

    def drop_packed(self) -> None:
        for module in self.modules():
            if isinstance(module, Linear):
                module.packed = None
        self.packed_head = None

    @property
    def packed_bytes(self) -> int:
        """Bytes of the serving copies that exist now."""
        packed = [m.weight for m in self.modules() if isinstance(m, Linear) and m.packed is not None]
        return sum(w.nbytes for w in packed) + (0 if self.packed_head is None else self.head_weight.nbytes)

    @torch.no_grad()
    def initialise(self, seed: int, std: float = 0.02) -> None:
        """Random weights: normal for matrices, ones for norms, zeros for biases. For models that start from nothing."""
        generator = torch.Generator().manual_seed(seed)
        for name, view in self.hf_tensors().items():
            if name.endswith("norm.weight"):
                view.fill_(1.0)
            elif name.endswith(".bias"):
                view.zero_()
            else:
                view.copy_(torch.randn(view.shape, generator=generator) * std)


def _with_dtype(allocate: Allocate, dtype: torch.dtype) -> Allocate:
    def take(shape: tuple[int, ...]) -> Tensor:
        return allocate(shape, dtype=dtype)

    return take

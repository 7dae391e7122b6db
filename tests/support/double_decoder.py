"""Gradients of the summed response logprobs by a plain fp64 forward on the CPU: an oracle that shares no kernel."""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from zerogap.model.decoder import Decoder


def double_gradients(decoder: Decoder, sequences: ListLike[Any]) -> dict[str, Tensor]:
    """Parameter name -> gradient. `sequences` have tokens, prompt_ids and output_ids."""
    weights = {n: p.detach().double().cpu().requires_grad_() for n, p in decoder.named_parameters()}
    for s in sequences:
        logits = _logits(decoder, weights, torch.tensor(s.tokens))[len(s.prompt_ids) - 1 : -1]
        torch.log_softmax(logits, -1).gather(-1, torch.tensor(s.output_ids)[:, None]).sum().backward()
    return {n: w.grad for n, w in weights.items() if w.grad is not None}


def _logits(decoder: Decoder, w: dict[str, Tensor], ids: Tensor) -> Tensor:
    c = decoder.config
    half = c.head_dim // 2
    cos, sin = (t[: len(ids)].double().cpu().unsqueeze(1) for t in (decoder.cos_TF, decoder.sin_TF))

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + c.rms_norm_eps) * weight

    def rotate(x: Tensor) -> Tensor:
        a, b = x[..., :half], x[..., half:]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    h = w["embedding"][ids]
    for i in range(c.num_layers):
        p = f"blocks.{i}"
        x = norm(h, w[f"{p}.attention_norm"])
        q, k, v = F.linear(x, w[f"{p}.attention.qkv.weight"]).split((c.q_size, c.kv_size, c.kv_size), -1)
        q, k, v = (t.view(len(ids), -1, c.head_dim) for t in (q, k, v))
        if c.qk_norm:
            q, k = norm(q, w[f"{p}.attention.q_norm"]), norm(k, w[f"{p}.attention.k_norm"])
        q, k = rotate(q), rotate(k)
        k, v = (t.repeat_interleave(c.queries_per_kv, 1) for t in (k, v))
        out = _attend(*(t.transpose(0, 1) for t in (q, k, v)), c.window_of(i), c.attn_logit_softcapping)
        h = h + F.linear(out.transpose(0, 1).reshape(len(ids), -1), w[f"{p}.attention.out.weight"])
        gate, up = F.linear(norm(h, w[f"{p}.mlp_norm"]), w[f"{p}.gate_up.weight"]).chunk(2, -1)
        h = h + F.linear(F.silu(gate) * up, w[f"{p}.down.weight"])
    return F.linear(norm(h, w["norm"]), w.get("head.weight", w["embedding"]))


def _attend(q: Tensor, k: Tensor, v: Tensor, window: int | None, soft_cap: float | None) -> Tensor:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    distance = torch.arange(len(q[0])).unsqueeze(1) - torch.arange(len(q[0]))
    hidden = (distance < 0) | (distance >= (window or len(q[0])))
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v

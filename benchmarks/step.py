"""What exactness costs: our decoder against the same network in plain torch, as ratios of times within one run.

    python benchmarks/step.py [--model FOLDER] [--repeats 5] [--out FILE]

Plain torch is `F.linear`, scaled_dot_product_attention and a static KV cache of contiguous slots. Both sides run the
same weights and shapes, turn by turn, and the ratio is of the two medians; above 1 exactness costs, below it pays.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from zerogap.bench.shapes import SMOLLM2
from zerogap.model.decoder import Decoder
from zerogap.model.registry import load_decoder
from zerogap.numerics.attention import PagedKV, PagedLayout, TreePlan, paged_attend, tree_attend
from zerogap.numerics.logprob import token_logprobs

BLOCK = 16


class Plain:
    """The same network with the library's own kernels."""

    def __init__(self, decoder: Decoder, slots: int, length: int) -> None:
        self.decoder, c = decoder, decoder.config
        self.weights = {k: v.clone().requires_grad_() for k, v in decoder.hf_tensors().items()}
        shape = (c.num_layers, slots, c.num_kv_heads, length, c.head_dim)
        self.keys, self.values = torch.zeros(shape), torch.zeros(shape)

    def forward(self, ids_BT: Tensor, positions_BT: Tensor, attend: Callable[..., Tensor]) -> Tensor:
        c, w = self.decoder.config, self.weights
        cos, sin = (table[positions_BT].repeat(1, 1, 2).unsqueeze(1) for table in self.decoder_tables)
        h = F.embedding(ids_BT, w["model.embed_tokens.weight"])
        B, T = ids_BT.shape
        for i in range(c.num_layers):
            p = f"model.layers.{i}"
            x = F.rms_norm(h, (c.hidden_size,), w[f"{p}.input_layernorm.weight"], c.rms_norm_eps)
            q, k, v = (
                F.linear(x, w[f"{p}.self_attn.{n}_proj.weight"]).view(B, T, -1, c.head_dim).transpose(1, 2)
                for n in "qkv"
            )
            out = attend(i, rotate(q, cos, sin), rotate(k, cos, sin), v)
            h = h + F.linear(out.transpose(1, 2).reshape(B, T, -1), w[f"{p}.self_attn.o_proj.weight"])
            x = F.rms_norm(h, (c.hidden_size,), w[f"{p}.post_attention_layernorm.weight"], c.rms_norm_eps)
            gate = F.silu(F.linear(x, w[f"{p}.mlp.gate_proj.weight"]))
            h = h + F.linear(gate * F.linear(x, w[f"{p}.mlp.up_proj.weight"]), w[f"{p}.mlp.down_proj.weight"])
        return F.rms_norm(h, (c.hidden_size,), w["model.norm.weight"], c.rms_norm_eps)

    @property
    def decoder_tables(self) -> tuple[Tensor, Tensor]:
        return self.decoder.cos_TF, self.decoder.sin_TF

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weights["model.embed_tokens.weight"])

    def decode(self, ids_B: Tensor, length: int) -> Tensor:
        rows = torch.arange(len(ids_B))

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.keys[layer, rows, :, length], self.values[layer, rows, :, length] = k[:, :, 0], v[:, :, 0]
            keys, values = (cache[layer, : len(ids_B), :, : length + 1] for cache in (self.keys, self.values))
            return F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)

        hidden = self.forward(ids_B[:, None], torch.full((len(ids_B), 1), length), attend)
        return self.logits(hidden[:, 0])

    def prefill(self, ids_BT: Tensor) -> Tensor:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            B, _, T, _ = k.shape
            self.keys[layer, :B, :, :T], self.values[layer, :B, :, :T] = k, v
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        hidden = self.forward(ids_BT, torch.arange(ids_BT.shape[1]).expand_as(ids_BT), attend)
        return self.logits(hidden[:, -1])

    def train(self, ids_BT: Tensor) -> Tensor:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            del layer
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        hidden = self.forward(ids_BT, torch.arange(ids_BT.shape[1]).expand_as(ids_BT), attend)
        logits = self.logits(hidden[:, :-1].reshape(-1, hidden.shape[-1]))
        return -F.cross_entropy(logits, ids_BT[:, 1:].reshape(-1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin


class Ours:
    """Our decoder as the engine and the trainer call it."""

    def __init__(self, decoder: Decoder, slots: int, length: int) -> None:
        self.decoder, c = decoder, decoder.config
        per_slot = -(-length // BLOCK)
        self.kv = PagedKV(
            num_layers=c.num_layers,
            num_kv_heads=c.num_kv_heads,
            head_dim=c.head_dim,
            num_blocks=slots * per_slot + 1,
            block_size=BLOCK,
            dtype=decoder.dtype,
        )
        self.tables = [[1 + s * per_slot + j for j in range(per_slot)] for s in range(slots)]

    def _paged(self, ids: Tensor, count: int, start: int, new: int) -> Tensor:
        layout = PagedLayout.build(self.tables[:count], [start] * count, [new] * count, BLOCK)
        return self.decoder(ids, layout.positions_N, paged_attend(self.kv, layout, self.decoder.attention_scale))

    def decode(self, ids_B: Tensor, length: int) -> Tensor:
        return self.decoder.logits(self._paged(ids_B, len(ids_B), length, 1))

    def prefill(self, ids_BT: Tensor) -> Tensor:
        B, T = ids_BT.shape
        return self.decoder.logits(self._paged(ids_BT.reshape(-1), B, 0, T).view(B, T, -1)[:, -1])

    def train(self, ids_BT: Tensor) -> Tensor:
        B, T = ids_BT.shape
        plan = TreePlan.build([T] * B, [[]] * B)
        hidden = self.decoder(ids_BT.reshape(-1), plan.positions_N, tree_attend(plan, self.decoder.attention_scale))
        rows = hidden.view(B, T, -1)[:, :-1].reshape(B * (T - 1), -1)
        return token_logprobs(self.decoder.logits(rows), ids_BT[:, 1:].reshape(-1), 1.0).mean()


def forward_backward(side: Plain | Ours, ids: Tensor) -> None:
    side.train(ids).backward()


def without_grad(call: Callable[[], object]) -> Callable[[], None]:
    def run() -> None:
        with torch.no_grad():
            call()

    return run


def compare(ours: Callable[[], object], plain: Callable[[], object], repeats: int) -> dict[str, float]:
    times: tuple[list[float], list[float]] = ([], [])
    for run in range(repeats + 1):
        for side, call in zip(times, (ours, plain), strict=True):
            start = time.perf_counter()
            call()
            if run:
                side.append(time.perf_counter() - start)
    a, b = (statistics.median(t) for t in times)
    return {"ours_seconds": a, "plain_seconds": b, "ratio": a / b}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="Hugging Face folder; default: SmolLM2-135M's shape, random weights")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.model:
        decoder = load_decoder(options.model)
    else:
        decoder = Decoder(SMOLLM2)
        decoder.initialise(0)
    plain, ours = Plain(decoder, 64, 256), Ours(decoder, 64, 256)
    decoder.prepack()
    vocab, results = decoder.config.vocab_size, {}
    for batch in (1, 8, 16, 64):
        ids = torch.randint(0, vocab, (batch,))
        results[f"decode, batch {batch}, 100 cached tokens"] = compare(
            without_grad(lambda ids=ids: ours.decode(ids, 100)),
            without_grad(lambda ids=ids: plain.decode(ids, 100)),
            options.repeats * 2,
        )
    ids = torch.randint(0, vocab, (16, 64))
    results["prefill, 16 x 64"] = compare(
        without_grad(lambda: ours.prefill(ids)), without_grad(lambda: plain.prefill(ids)), options.repeats
    )
    for shape in ((16, 32), (4, 128)):
        ids = torch.randint(0, vocab, shape)
        name = f"{shape[0]} x {shape[1]}"
        results[f"training forward, {name}"] = compare(
            lambda ids=ids: ours.train(ids), lambda ids=ids: plain.train(ids), options.repeats
        )
        results[f"training forward and backward, {name}"] = compare(
            lambda ids=ids: forward_backward(ours, ids), lambda ids=ids: forward_backward(plain, ids), options.repeats
        )
    for name, row in results.items():
        print(f"{name:45s} ours {row['ours_seconds'] * 1e3:9.1f} ms  plain {row['plain_seconds'] * 1e3:9.1f} ms  "
              f"ratio {row['ratio']:.2f}")  # fmt: skip
    if options.out:
        about = {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}
        about["cpu_capability"] = torch.backends.cpu.get_cpu_capability()
        options.out.write_text(json.dumps({"about": about, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()

"""Two ways to score the same tokens with one decoder: packed as in training, paged as in the engine."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from zerogap.model.decoder import Decoder
from zerogap.numerics.attention import PagedKV, PagedLayout, TreePlan, paged_attend, tree_attend
from zerogap.numerics.logprob import token_logprobs

Ids = Sequence[int]


def random_ids(rng: random.Random, count: int, vocab_size: int = 64) -> list[int]:
    return [rng.randrange(vocab_size) for _ in range(count)]


def score_packed(
    decoder: Decoder, prompts: Sequence[Ids], responses: Sequence[Sequence[Ids]], temperature: float = 1.0
) -> list[torch.Tensor]:
    """Logprobs of each response's tokens, all groups packed into one training forward (with autograd)."""
    plan = TreePlan.build([len(p) for p in prompts], [[len(r) for r in group] for group in responses])
    ids = [t for p, group in zip(prompts, responses, strict=True) for part in (p, *group) for t in part]
    hidden = decoder(torch.tensor(ids), plan.positions_N, tree_attend(plan, decoder.attention_scale))
    out, cursor = [], 0
    for prompt, group in zip(prompts, responses, strict=True):
        last_of_prompt = cursor + len(prompt) - 1
        cursor += len(prompt)
        for response in group:
            rows = [last_of_prompt, *range(cursor, cursor + len(response) - 1)]
            cursor += len(response)
            out.append(token_logprobs(decoder.logits(hidden[rows]), torch.tensor(response), temperature))
    return out


@torch.no_grad()
def score_paged(
    decoder: Decoder,
    sequences: Sequence[tuple[Ids, Ids]],
    temperature: float = 1.0,
    *,
    chunk: int = 64,
    block_size: int = 16,
    seed: int = 0,
) -> list[list[float]]:
    """Logprobs of each (prompt, response), prefilled in chunks, then decoded together over blocks in random order."""
    config = decoder.config
    blocks_needed = [-(-(len(p) + len(r)) // block_size) for p, r in sequences]
    kv = PagedKV(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_blocks=sum(blocks_needed) + 1,
        block_size=block_size,
        dtype=decoder.dtype,
    )
    free = list(range(1, kv.num_blocks))
    random.Random(seed).shuffle(free)
    tables = [[free.pop() for _ in range(n)] for n in blocks_needed]

    def forward(ids: Ids, which: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
        layout = PagedLayout.build([tables[i] for i in which], starts, counts, block_size)
        return decoder(torch.tensor(ids), layout.positions_N, paged_attend(kv, layout, decoder.attention_scale))

    last = []
    for i, (prompt, _) in enumerate(sequences):
        for start in range(0, len(prompt), chunk):
            part = prompt[start : start + chunk]
            hidden = forward(part, [i], [start], [len(part)])
        last.append(hidden[-1:])
    logits = decoder.logits(torch.cat(last))
    scores: list[list[float]] = [[] for _ in sequences]
    alive, step = list(range(len(sequences))), 0
    while alive:
        targets = torch.tensor([sequences[i][1][step] for i in alive])
        values = token_logprobs(logits, targets, torch.full((len(alive),), temperature)).tolist()
        for i, value in zip(alive, values, strict=True):
            scores[i].append(value)
        step += 1
        alive = [i for i in alive if len(sequences[i][1]) > step]
        if alive:
            ids = [sequences[i][1][step - 1] for i in alive]
            starts = [len(sequences[i][0]) + step - 1 for i in alive]
            logits = decoder.logits(forward(ids, alive, starts, [1] * len(alive)))
    return scores

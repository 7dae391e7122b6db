"""Parity on the real model of the demo: 16 real prompts, real answers, gap exactly 0.0."""

from __future__ import annotations

import pytest
import torch
from support.scoring import score_packed, score_paged

from zerogap.model.importer import import_smollm2
from zerogap.model.registry import load_decoder
from zerogap.model.tokenizer import Tokenizer

QUESTIONS = [
    "What is the largest number: 39, 67, 57, 83?",
    "Name three rivers of Europe.",
    "Why is the sky blue?",
    "Write a haiku about rain.",
    "What is 17+25?",
    "Translate 'good morning' into French.",
    "Who wrote Faust?",
    "List the prime numbers below 30.",
]
ANSWERS = ["The largest number is 83.", "Rhine, Danube and Volga.", "42", "I do not know, but I can find out."]


@pytest.fixture(scope="module")
def smollm2():
    folder = import_smollm2()
    return load_decoder(folder), Tokenizer.from_folder(folder)


@pytest.mark.smollm2
def test_sixteen_real_prompts_score_the_same_in_training_and_in_decoding(smollm2):
    """A12: as a gate, with decode batches of 1, 3, 8 and 16."""
    decoder, tokenizer = smollm2
    prompts = [tokenizer.encode_chat([{"role": "user", "content": f"{q} {i}"}]) for i in (1, 2) for q in QUESTIONS]
    responses = [[*tokenizer.encode(ANSWERS[i % len(ANSWERS)]), 2] for i in range(len(prompts))]
    with torch.no_grad():
        trained = [t.tolist() for t in score_packed(decoder, prompts, [[r] for r in responses])]
    decoder.prepack()
    sequences = list(zip(prompts, responses, strict=True))
    for batch in (1, 3, 8, 16):
        decoded = [
            s for i in range(0, min(batch * 2, 16), batch) for s in score_paged(decoder, sequences[i : i + batch])
        ]
        assert decoded == trained[: len(decoded)], f"decode batch {batch}"

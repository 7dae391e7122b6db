"""A toy run in one process: the engine's runner, a reward that can be learnt, and a refit by copying."""

from __future__ import annotations

from dataclasses import replace

from support.tiny import TINY
from zerogap.engine.requests import SamplingParams, Sequence
from zerogap.engine.runner import Runner
from zerogap.rollout.collect import sample_seed
from zerogap.trainer.trainer import Trainer
from zerogap.types import Prompt, PromptGroup, Sample

PROMPTS, SAMPLES, MAX_NEW = 6, 8, 4


def rollout(runner: Runner, step: int) -> list[PromptGroup]:
    """The reward is the share of even tokens in the response: a skill that the random start has by halves."""
    groups = []
    for p in range(PROMPTS):
        prompt = Prompt("even", f"{step}-{p}", "", None, tuple((7 * step + 5 * p + k) % 60 + 3 for k in range(6 + p)))
        sequences = [
            Sequence(
                f"{p}.{i}",
                prompt.token_ids,
                SamplingParams(max_new_tokens=MAX_NEW, seed=sample_seed(1, step, "even", prompt.prompt_id, 0, i)),
                frozenset(TINY.eos_token_ids),
            )
            for i in range(SAMPLES)
        ]
        for sequence in sequences:
            runner.scheduler.add(sequence)
        groups.append((prompt, sequences))
    while runner.scheduler.waiting or runner.scheduler.running:
        runner.step()
    return [PromptGroup(p.prompt_id, p, tuple(map(to_sample, [p] * SAMPLES, s))) for p, s in groups]


def to_sample(prompt: Prompt, s: Sequence) -> Sample:
    assert s.finish_reason is not None
    reward = sum(t % 2 == 0 for t in s.output_ids) / len(s.output_ids)
    sample = Sample(
        prompt, int(s.rid.split(".")[1]), tuple(s.output_ids), tuple(s.logprobs), tuple(s.versions), s.finish_reason,
        "", s.params.seed,
    )  # fmt: skip
    return replace(sample, raw_reward=reward, reward=reward)


def refit(runner: Runner, trainer: Trainer) -> None:
    targets = runner.decoder.hf_tensors()
    for name, tensor in trainer.hf_tensors().items():
        targets[name].copy_(tensor)
    runner.decoder.prepack()
    runner.weight_version += 1

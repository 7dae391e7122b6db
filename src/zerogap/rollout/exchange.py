"""The only place in the rollout that speaks to an engine: one generate call, and the samples read from its replies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from zerogap.config.schema import SamplingSettings
from zerogap.errors import ProtocolMismatch, RolloutError
from zerogap.types import Prompt, Sample
from zerogap.wire.api import GenerateBody, GenerateReply, RolloutEngine, SamplingBody


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One sample to generate: `index` within its group, and the seed that decides its tokens."""

    prompt: Prompt
    index: int
    seed: int


async def generate(
    engine: RolloutEngine,
    requests: Sequence[SampleRequest],
    sampling: SamplingSettings,
    *,
    greedy: bool,
    deadline_seconds: float,
) -> list[Sample]:
    """One call, one sample per request, in their order.

    Samples of one prompt repeat its ids, so that each has a seed of its own; the engine's prefix cache computes the
    prompt once.
    """
    body = GenerateBody(
        input_ids=[list(r.prompt.token_ids) for r in requests],
        sampling_params=[_sampling_body(sampling, r.seed, greedy=greedy) for r in requests],
        return_logprob=True,
        return_original_logprob=False,  # the trainer divides by the temperature too
    )
    replies = await engine.generate(body, deadline_seconds=deadline_seconds)
    if len(replies) != len(requests):
        raise ProtocolMismatch(
            f"{len(requests)} samples asked for, {len(replies)} came back",
            remedy="check that the url is that of a rollout engine and not of something before it",
        )
    return [_sample(request, reply) for request, reply in zip(requests, replies, strict=True)]


def _sampling_body(sampling: SamplingSettings, seed: int, *, greedy: bool) -> SamplingBody:
    """Greedy is temperature 0: the likeliest token, whatever the cuts."""
    body = SamplingBody(
        max_new_tokens=sampling.max_new_tokens,
        stop_token_ids=list(sampling.stop_token_ids),
        sampling_seed=seed,
        temperature=0.0 if greedy else sampling.temperature,
    )
    cuts = {"top_p": sampling.top_p, "top_k": sampling.top_k, "min_p": sampling.min_p}
    return body if greedy else body.model_copy(update=cuts)


def _sample(request: SampleRequest, reply: GenerateReply) -> Sample:
    prompt = request.prompt
    name = f"{prompt.source}/{prompt.prompt_id}#{request.index}"
    if reply.finish_reason is None or reply.text is None:
        raise ProtocolMismatch(
            f"{name}: the reply has no {'text' if reply.text is None else 'finish reason'}",
            remedy="start the engine with its tokenizer: rewards read text; and ask for whole replies, not a stream",
        )
    reason = reply.meta.get("finish_reason")
    if isinstance(reason, Mapping) and reason.get("matched") == "NaN happened":
        raise RolloutError(
            f"{name}: the engine's logits were not numbers", remedy="check the last refit and the learning rate"
        )
    return Sample(
        prompt=prompt,
        index=request.index,
        response_ids=reply.output_ids,
        rollout_logprobs=reply.output_logprobs,
        weight_versions=reply.weight_versions,
        finish_reason=reply.finish_reason,
        text=reply.text,
        seed=request.seed,
        info={"cached_tokens": reply.cached_tokens, "num_retractions": reply.num_retractions},
    )

"""The only place for metric names, what each means, how parts become one value, and what a rollout's metrics are.

Names are those of Miles where it has one. A mean over nothing is not-a-number, never 0: the event stream shows it as
missing. Rewards that could not be computed are counted and stand in no mean.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from zerogap.types import FinishReason, PromptGroup, Sample


class Reduction(enum.Enum):
    """How values of one name from several parts of a step (micro-batches, ranks, engines) become one."""

    MEAN = "mean"  # weighted by what each part averaged over
    SUM = "sum"
    MAX = "max"
    MIN = "min"
    LAST = "last"


@dataclass(frozen=True, slots=True)
class Metric:
    name: str
    reduction: Reduction
    help: str


METRICS: dict[str, Metric] = {}


def _metric(name: str, reduction: Reduction, text: str) -> str:
    METRICS[name] = Metric(name, reduction, text)
    return name


_MEAN, _SUM, _MAX, _MIN, _LAST = Reduction.MEAN, Reduction.SUM, Reduction.MAX, Reduction.MIN, Reduction.LAST

RAW_REWARD = _metric("rollout/raw_reward_unfiltered", _MEAN, "the task's own reward over all that was generated")
REWARD = _metric("rollout/rewards", _MEAN, "the reward that is trained on: the task's and the shaping")
RESPONSE_LENGTH = _metric("rollout/episode_response_length/mean", _MEAN, "response tokens, the stop token included")
RESPONSE_LENGTH_MEDIAN = _metric("rollout/episode_response_length/median", _MEAN, "response tokens")
RESPONSE_LENGTH_MAX = _metric("rollout/episode_response_length/max", _MAX, "response tokens")
RESPONSE_LENGTH_MIN = _metric("rollout/episode_response_length/min", _MIN, "response tokens")
TRUNCATED = _metric("rollout/truncated_ratio", _MEAN, "share of samples cut at the length limit")
ABORTED = _metric("rollout/aborted_ratio", _MEAN, "share of samples that the engine gave up")
NUM_SAMPLES = _metric("rollout/num_samples", _SUM, "samples generated")
NUM_TRAINED = _metric("rollout/num_training_samples", _SUM, "samples with an advantage")
RESPONSE_TOKENS = _metric("rollout/num_response_tokens", _SUM, "response tokens generated")
REWARD_FAILURES = _metric("rollout/reward_failures", _SUM, "samples whose reward could not be computed")
SKIPPED_PROMPTS = _metric("rollout/skipped_long_prompts", _SUM, "prompts over data.max_prompt_tokens, replaced")
ZERO_SPREAD = _metric("rollout/zero_std/count", _SUM, "groups whose raw rewards are all equal")
ALL_ZERO = _metric("rollout/zero_std/all_zero_percentage", _MEAN, "share of groups with raw reward 0 throughout")
ALL_ONE = _metric("rollout/zero_std/all_one_percentage", _MEAN, "share of groups with raw reward 1 throughout")
NO_SIGNAL = _metric("rollout/no_signal_groups", _SUM, "groups whose training rewards are all equal, or failed")
ROLLOUT_LOGPROBS = _metric("rollout/rollout_log_probs", _MEAN, "mean over samples of the mean token logprob")
WEIGHT_VERSION = _metric("rollout/weight_version/mean", _MEAN, "oldest weight version of each sample")
WEIGHT_VERSION_MIN = _metric("rollout/weight_version/min", _MIN, "oldest weight version in the step")
WEIGHT_VERSION_MAX = _metric("rollout/weight_version/max", _MAX, "of the samples' oldest versions, the newest")
MIXED_VERSIONS = _metric("rollout/mixed_version_ratio", _MEAN, "share of samples over which the weights changed")
CACHED_TOKENS = _metric("rollout/avg_cached_tokens_per_sample", _MEAN, "prompt tokens taken from the prefix cache")
CACHE_HIT_RATE = _metric("rollout/prefix_cache_hit_rate", _MEAN, "cached prompt tokens / prompt tokens")
ADVANTAGES = _metric("rollout/advantages", _MEAN, "mean advantage of the trained samples")

LOSS = _metric("train/loss", _SUM, "policy loss plus weighted KL loss, under the step's normaliser")
PG_LOSS = _metric("train/pg_loss", _SUM, "clipped policy loss")
KL_LOSS = _metric("train/kl_loss", _SUM, "KL estimate to the reference, before its weight")
ENTROPY = _metric("train/entropy", _MEAN, "entropy of the temperature-scaled distribution, per token")
PPO_KL = _metric("train/ppo_kl", _MEAN, "mean of rollout logprob minus new logprob")
PG_CLIPFRAC = _metric("train/pg_clipfrac", _MEAN, "share of trained tokens whose clipped branch wins")
ESS_RATIO = _metric("train/ess_ratio", _MEAN, "effective sample size of the ratios / number of tokens")
GRAD_NORM = _metric("train/grad_norm", _LAST, "norm of the whole gradient, before clipping")
LR = _metric("train/lr-pg_0", _LAST, "learning rate of the step")
GAP = _metric("train/train_rollout_logprob_abs_diff", _MEAN, "mean |trainer logprob - rollout logprob| of own scores")
GAP_MAX = _metric("train/train_rollout_logprob_abs_diff_max", _MAX, "the largest such difference")
GAP_TOKENS = _metric("train/num_tokens_compared", _SUM, "tokens behind the two")
ROLLOUT_KL = _metric("train/train_rollout_kl", _MEAN, "k3 estimate of KL(rollout || trainer) of own scores")

STEP_TIME = _metric("perf/step_time", _MAX, "wall seconds of the step")
TOKENS_PER_SECOND = _metric("perf/tokens_per_gpu_per_sec", _MEAN, "response tokens / rollout seconds / engine devices")
LONGEST_SAMPLE = _metric("perf/longest_sample_tokens_per_sec", _MAX, "longest response / rollout seconds")
REFIT_BYTES = _metric("perf/update_weights_wire_bytes", _SUM, "bytes that a refit moved")
REFIT_DENSITY = _metric("perf/update_weights_density", _MEAN, "share of the weights' bytes that a refit changed")
REFIT_PAUSE = _metric("perf/update_weights_pause_seconds", _MAX, "seconds in which the refit kept the engine paused")
TRAIN_TOKENS_PER_SECOND = _metric("perf/actor_train_tok_per_s", _MEAN, "tokens trained on / train seconds")

_PHASE_TIMES = {
    phase: _metric(f"perf/{name}_time", _MAX, f"wall seconds of phase {phase}")
    for phase, name in {
        "rollout": "rollout",
        "reward": "reward",
        "release": "release",
        "train": "train",
        "refit": "update_weights",
        "resume": "resume",
        "save": "save_model",
        "eval": "eval",
    }.items()
}
ROLLOUT_TIME = _PHASE_TIMES["rollout"]


def phase_time(phase: str) -> str:
    """The metric that holds the seconds of a phase."""
    return _PHASE_TIMES[phase]


def rollout_metrics(groups: Sequence[PromptGroup]) -> dict[str, float]:
    """Metrics over everything that a step generated: nothing is filtered out before a mean."""
    samples = [s for g in groups for s in g.samples]
    lengths = [float(len(s.response_ids)) for s in samples]
    versions = [float(min(s.weight_versions)) for s in samples if s.weight_versions]
    prompt_tokens = sum(len(s.prompt.token_ids) for s in samples)
    cached = [float(s.info.get("cached_tokens", 0)) for s in samples]
    return {
        RAW_REWARD: _mean([s.raw_reward for s in samples if s.raw_reward is not None]),
        REWARD: _mean([s.reward for s in samples if s.reward is not None]),
        RESPONSE_LENGTH: _mean(lengths),
        RESPONSE_LENGTH_MEDIAN: median(lengths) if lengths else math.nan,
        RESPONSE_LENGTH_MAX: max(lengths, default=math.nan),
        RESPONSE_LENGTH_MIN: min(lengths, default=math.nan),
        TRUNCATED: _mean([float(s.truncated) for s in samples]),
        ABORTED: _mean([float(s.finish_reason is FinishReason.ABORT) for s in samples]),
        NUM_SAMPLES: float(len(samples)),
        RESPONSE_TOKENS: sum(lengths),
        ROLLOUT_LOGPROBS: _mean([fmean(s.rollout_logprobs) for s in samples if s.rollout_logprobs]),
        WEIGHT_VERSION: _mean(versions),
        WEIGHT_VERSION_MIN: min(versions, default=math.nan),
        WEIGHT_VERSION_MAX: max(versions, default=math.nan),
        MIXED_VERSIONS: _mean([float(len(set(s.weight_versions)) > 1) for s in samples]),
        CACHED_TOKENS: _mean(cached),
        CACHE_HIT_RATE: sum(cached) / prompt_tokens if prompt_tokens else math.nan,
        **_spread_metrics(groups),
        **_failure_metrics(samples),
        **_pass_rates(groups),
    }


def perf_metrics(
    groups: Sequence[PromptGroup], phase_seconds: Mapping[str, float], *, num_engines: int = 1
) -> dict[str, float]:
    """Seconds per phase, and the rollout's speed over all tokens that it generated."""
    out = {phase_time(phase): seconds for phase, seconds in phase_seconds.items()}
    seconds = phase_seconds.get("rollout", 0.0)
    if seconds > 0:
        lengths = [len(s.response_ids) for g in groups for s in g.samples]
        out[TOKENS_PER_SECOND] = sum(lengths) / seconds / num_engines
        out[LONGEST_SAMPLE] = max(lengths, default=0) / seconds
    return out


def eval_metrics(dataset: str, samples: Sequence[Sample]) -> dict[str, float]:
    """One row for all samples and one for each tag of their prompts.

    `eval/D` is the mean raw reward; `-form_ratio` the share of answers in the right form and `-accuracy_given_form` the
    mean reward of those, where the reward tells form from content. A sample whose reward failed is in
    `-none_reward_ratio` only.
    """
    rows = {f"eval/{dataset}": list(samples)}
    for tag in sorted({tag for s in samples for tag in s.prompt.tags}):
        rows[f"eval/{dataset}/{tag}"] = [s for s in samples if tag in s.prompt.tags]
    out: dict[str, float] = {}
    for row, members in rows.items():
        scored = [s for s in members if s.raw_reward is not None]
        formed = [s for s in scored if s.info.get("in_form")]
        out[row] = _mean([s.raw_reward for s in scored if s.raw_reward is not None])
        out[f"{row}-none_reward_ratio"] = _mean([float(s.raw_reward is None) for s in members])
        out[f"{row}-truncated_ratio"] = _mean([float(s.truncated) for s in members])
        out[f"{row}-response_length"] = _mean([float(len(s.response_ids)) for s in members])
        out[f"{row}-num_samples"] = float(len(members))
        if any("in_form" in s.info for s in scored):
            out[f"{row}-form_ratio"] = len(formed) / len(scored)
            out[f"{row}-accuracy_given_form"] = _mean([s.raw_reward for s in formed if s.raw_reward is not None])
    return out


def combine(parts: Sequence[Mapping[str, float]], weights: Sequence[float]) -> dict[str, float]:
    """One value per name from parts that each averaged over `weights[i]` things, by the name's reduction."""
    if len(parts) != len(weights):
        raise ValueError(f"{len(parts)} parts and {len(weights)} weights")
    out: dict[str, float] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        held = [(part[name], weight) for part, weight in zip(parts, weights, strict=True) if name in part]
        out[name] = _reduce(METRICS[name].reduction, held)
    return out


def merge(*sources: Mapping[str, float]) -> dict[str, float]:
    """One dictionary of a step's metrics. A name from two sources is a fault of ours, not a matter of order."""
    out: dict[str, float] = {}
    for source in sources:
        twice = out.keys() & source.keys()
        if twice:
            raise ValueError(f"metrics {sorted(twice)} are reported twice in one step")
        out.update(source)
    return out


def _reduce(reduction: Reduction, held: Sequence[tuple[float, float]]) -> float:
    values = [value for value, _ in held]
    if reduction is Reduction.MEAN:
        total = math.fsum(weight for _, weight in held)
        return math.fsum(value * weight for value, weight in held if weight) / total if total else math.nan
    if reduction is Reduction.SUM:
        return math.fsum(values)
    if reduction is Reduction.LAST:
        return values[-1]
    if any(math.isnan(value) for value in values):
        return math.nan
    return max(values) if reduction is Reduction.MAX else min(values)


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def _spread_metrics(groups: Sequence[PromptGroup]) -> dict[str, float]:
    """Groups without signal by the raw reward, so that shaping cannot hide them, and by the reward trained on."""
    equal = [values.pop() for g in groups if len(values := {float(r) for r in _raw(g)}) == 1]
    counts: dict[str, float] = {ZERO_SPREAD: float(len(equal))}
    for value in equal:
        name = f"rollout/zero_std/count_{round(value, 1) + 0.0}"
        counts[name] = counts.get(name, 0.0) + 1.0
    return {
        **counts,
        ALL_ZERO: equal.count(0.0) / len(groups) if groups else math.nan,
        ALL_ONE: equal.count(1.0) / len(groups) if groups else math.nan,
        NO_SIGNAL: float(sum(g.zero_spread for g in groups)),
    }


def _failure_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    failed = [str(s.info.get("reward_failure", "unknown")) for s in samples if s.raw_reward is None]
    return {
        REWARD_FAILURES: float(len(failed)),
        **{f"{REWARD_FAILURES}/{why}": float(failed.count(why)) for why in sorted(set(failed))},
    }


def _pass_rates(groups: Sequence[PromptGroup]) -> dict[str, float]:
    """Unbiased pass@k for powers of two, over groups in which every reward is known; correct is a raw reward of 1."""
    complete = [raw for g in groups if len(raw := _raw(g)) == len(g.samples)]
    out: dict[str, float] = {}
    k = 1
    while complete and k <= min(len(raw) for raw in complete):
        wrong = [(len(raw), sum(r != 1 for r in raw)) for raw in complete]
        out[f"passrate/pass@{k}"] = fmean(1 - math.comb(w, k) / math.comb(n, k) for n, w in wrong)
        k *= 2
    return out


def _raw(group: PromptGroup) -> list[float]:
    return [s.raw_reward for s in group.samples if s.raw_reward is not None]

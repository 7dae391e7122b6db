"""The only place for rules that join options, each with its remedy. Bounds of one option stand in `schema`.

An option that would have no effect is a fault that names both options: the one without effect and the one that decides.
It is one only with another value than its default, so that the resolved run that a run writes down can be run again.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

from zerogap.config.schema import BUILTIN_REWARDS, RunConfig

Given = frozenset[str]
Check = Callable[[RunConfig, Given], str | None]

USER_FUNCTION = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
LOOPBACK = ("127.0.0.1", "localhost", "::1")
_ENGINE_START = ("count", "num_kv_tokens", "max_running_requests", "chunk_size", "threads")


@dataclass(frozen=True, slots=True)
class Rule:
    """`check` gets the run and the names of what is not default, and says what is wrong and what to do, or None."""

    options: tuple[str, ...]
    check: Check


RULES: list[Rule] = []


def _rule(*options: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        RULES.append(Rule(options, check))
        return check

    return register


def broken_rules(
    config: RunConfig, given: Iterable[str], invalid: Iterable[str] = ()
) -> list[tuple[tuple[str, ...], str]]:
    """The options and the message of each rule that `config` breaks.

    Rules about an `invalid` option are left out: the value that stands there is not the user's.
    """
    names, bad = frozenset(given), frozenset(invalid)
    asked = [rule for rule in RULES if bad.isdisjoint(rule.options)]
    return [(rule.options, message) for rule in asked if (message := rule.check(config, names)) is not None]


def _idle(given: Given, options: Iterable[str], because: str, remedy: str) -> str | None:
    idle = [option for option in options if option in given]
    return f"{', '.join(idle)} would have no effect with {because}: {remedy}" if idle else None


@_rule("data.task", "data.path")
def _one_source(c: RunConfig, given: Given) -> str | None:
    del given
    if (c.data.task is None) == (c.data.path is None):
        return f"data.task={c.data.task!r} and data.path={c.data.path!r}: give exactly one of the two"
    return None


@_rule("data.task", "data.path", "data.prompt_key", "data.label_key", "data.id_key", "data.held_out_path")
def _columns_need_a_file(c: RunConfig, given: Given) -> str | None:
    if c.data.task is None or c.data.path is not None:
        return None
    columns = ("data.prompt_key", "data.label_key", "data.id_key", "data.held_out_path")
    return _idle(given, columns, f"data.task={c.data.task!r}", "remove it, or give data.path instead of data.task")


@_rule("data.path", "data.held_out_path", "eval.num_prompts", "eval.every_steps", "eval.sampled")
def _evaluation_needs_prompts(c: RunConfig, given: Given) -> str | None:
    if c.data.path is None or c.data.held_out_path is not None:
        return None
    options = ("eval.num_prompts", "eval.every_steps", "eval.sampled")
    return _idle(given, options, f"data.path={c.data.path!r} and no data.held_out_path", "give data.held_out_path")


@_rule("data.path", "data.held_out_path")
def _held_out_is_another_file(c: RunConfig, given: Given) -> str | None:
    del given
    if c.data.path is not None and c.data.path == c.data.held_out_path:
        return f"data.path and data.held_out_path are both {c.data.path!r}: split the file, held-out prompts are unseen"
    return None


@_rule("eval.num_prompts", "eval.every_steps", "eval.sampled", "data.held_out_path")
def _no_evaluation(c: RunConfig, given: Given) -> str | None:
    if c.eval.num_prompts:
        return None
    options = ("eval.every_steps", "eval.sampled", "data.held_out_path")
    return _idle(given, options, "eval.num_prompts=0", "remove it, or raise eval.num_prompts")


@_rule("eval.every_steps", "checkpoint.every_steps", "run.steps")
def _cadence_fits(c: RunConfig, given: Given) -> str | None:
    del given
    late = [
        f"{name}={value}"
        for name, value in (
            ("eval.every_steps", c.eval.every_steps),
            ("checkpoint.every_steps", c.checkpoint.every_steps),
        )
        if value > c.run.steps
    ]
    if late:
        return f"{', '.join(late)} would have no effect with run.steps={c.run.steps}: lower it, or 0 for the end only"
    return None


@_rule("reward.kind")
def _reward_exists(c: RunConfig, given: Given) -> str | None:
    del given
    kind = c.reward.kind
    if kind in BUILTIN_REWARDS or USER_FUNCTION.fullmatch(kind):
        return None
    near = difflib.get_close_matches(kind, BUILTIN_REWARDS, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"reward.kind={kind!r}: use one of {', '.join(BUILTIN_REWARDS)}, or your own as module:function{hint}"


@_rule("reward.kind", "reward.time_limit_seconds", "reward.num_workers")
def _workers_need_slow_rewards(c: RunConfig, given: Given) -> str | None:
    if c.reward.kind not in ("exact_integer", "last_number"):
        return None
    options = ("reward.time_limit_seconds", "reward.num_workers")
    return _idle(given, options, f"reward.kind={c.reward.kind!r}", "remove it; this reward is computed in place")


@_rule("reward.kind", "reward.unfinished_penalty")
def _penalty_below_reward(c: RunConfig, given: Given) -> str | None:
    del given
    if c.reward.kind in BUILTIN_REWARDS and c.reward.unfinished_penalty >= 1:
        return (
            f"reward.unfinished_penalty={c.reward.unfinished_penalty} outweighs reward.kind={c.reward.kind!r}, "
            "which gives 0 or 1: use less than 1"
        )
    return None


@_rule("sampling.top_k")
def _groups_need_spread(c: RunConfig, given: Given) -> str | None:
    del given
    if c.sampling.top_k == 1:
        return (
            f"sampling.top_k=1 makes all data.samples_per_prompt={c.data.samples_per_prompt} samples of a prompt "
            "equal, so no group carries a signal: use -1, or more than 1"
        )
    return None


@_rule("engine.urls", "sampling.top_p", "sampling.top_k", "sampling.min_p")
def _truncation_needs_raw_logprobs(c: RunConfig, given: Given) -> str | None:
    """Truncated sampling is sound only with logprobs over the whole vocabulary, on both sides (field case A4).

    Our engine returns those whatever top_p, top_k and min_p are. Another engine may renormalise over the kept tokens,
    and the ratio is then wrong by exactly the kept mass.
    """
    del given
    s = c.sampling
    cut = [
        f"sampling.{name}={value}"
        for name, value, off in (("top_p", s.top_p, 1), ("top_k", s.top_k, -1), ("min_p", s.min_p, 0))
        if value != off
    ]
    if cut and c.engine.urls:
        return (
            f"{', '.join(cut)} with engine.urls: training needs logprobs over the whole vocabulary, which an engine "
            "that this run did not start may not return: let the run start its engine, or sample from all tokens"
        )
    return None


@_rule("engine.urls", *(f"engine.{name}" for name in _ENGINE_START))
def _started_elsewhere(c: RunConfig, given: Given) -> str | None:
    if not c.engine.urls:
        return None
    options = [f"engine.{name}" for name in _ENGINE_START]
    return _idle(given, options, f"engine.urls={list(c.engine.urls)}", "set it where the engine is started")


@_rule("model.device", "model.dtype")
def _gpu_computes_in_bfloat16(c: RunConfig, given: Given) -> str | None:
    del given
    if c.model.device == "cuda" and c.model.dtype != "bfloat16":
        return f"model.device='cuda' with model.dtype={c.model.dtype!r}: the canonical kernels there are for 'bfloat16'"
    return None


@_rule("placement.kind", "engine.urls", "engine.count")
def _engines_of_their_own(c: RunConfig, given: Given) -> str | None:
    """Engines that take turns with the trainer give back all their memory: not asked of one that serves others too."""
    del given
    if c.placement.kind == "disaggregated" or (not c.engine.urls and c.engine.count == 1):
        return None
    why = f"engine.urls={list(c.engine.urls)}" if c.engine.urls else f"engine.count={c.engine.count}"
    return f"{why} with placement.kind='colocated', which is one engine that the run starts: set 'disaggregated'"


@_rule("engine.urls", "engine.api_key_env")
def _key_of_attached_engines(c: RunConfig, given: Given) -> str | None:
    if c.engine.urls:
        return None
    return _idle(given, ["engine.api_key_env"], "no engine.urls", "remove it: engines of a run need no key")


@_rule("engine.urls", "refit.mode")
def _ipc_is_local(c: RunConfig, given: Given) -> str | None:
    del given
    far = [url for url in c.engine.urls if urlsplit(url).hostname not in LOOPBACK]
    if far and c.refit.mode == "ipc":
        return f"refit.mode='ipc' reaches engines on this host only, not engine.urls={far}: start the engine here"
    return None


@_rule("refit.mode", "placement.kind", "model.device")
def _shared_is_one_process(c: RunConfig, given: Given) -> str | None:
    del given
    if c.refit.mode != "shared":
        return None
    if c.placement.kind != "colocated":
        return (
            f"refit.mode='shared' with placement.kind={c.placement.kind!r}: the engine is in the trainer's process: "
            "set placement.kind='colocated', or another mode"
        )
    if c.model.device != "cpu":
        return f"refit.mode='shared' with model.device={c.model.device!r}: it works on a CPU only: use refit.mode='ipc'"
    return None


@_rule("refit.mode", "refit.folder", "refit.snapshot_every", "refit.keep")
def _folder_of_deltas(c: RunConfig, given: Given) -> str | None:
    if c.refit.mode == "disk_delta":
        return None
    options = ("refit.folder", "refit.snapshot_every", "refit.keep")
    return _idle(given, options, f"refit.mode={c.refit.mode!r}", "set refit.mode='disk_delta', or remove it")


@_rule("refit.mode", "placement.kind")
def _own_devices_for_own_ranks(c: RunConfig, given: Given) -> str | None:
    del given
    if c.refit.mode in ("broadcast", "broadcast_packed", "p2p", "disk_delta") and c.placement.kind == "colocated":
        return (
            f"refit.mode={c.refit.mode!r} with placement.kind='colocated': it wants each side on a device of its own: "
            "use refit.mode='ipc', or placement.kind='disaggregated'"
        )
    return None


@_rule("engine.urls", "engine.num_kv_tokens", "data.max_prompt_tokens", "sampling.max_new_tokens")
def _room_in_cache(c: RunConfig, given: Given) -> str | None:
    del given
    longest = c.data.max_prompt_tokens + c.sampling.max_new_tokens
    if not c.engine.urls and longest > c.engine.num_kv_tokens:
        return (
            f"one sample may take data.max_prompt_tokens + sampling.max_new_tokens = {longest} tokens, but "
            f"engine.num_kv_tokens={c.engine.num_kv_tokens}: raise that, or lower the other two"
        )
    return None


@_rule("trainer.kl_kind", "trainer.kl_weight")
def _kl_kind_needs_weight(c: RunConfig, given: Given) -> str | None:
    if c.trainer.kl_weight:
        return None
    return _idle(given, ["trainer.kl_kind"], "trainer.kl_weight=0", "give a weight, or remove trainer.kl_kind")


@_rule("trainer.final_lr_ratio", "trainer.schedule")
def _final_rate_needs_decay(c: RunConfig, given: Given) -> str | None:
    if c.trainer.schedule != "constant":
        return None
    return _idle(given, ["trainer.final_lr_ratio"], "trainer.schedule='constant'", "remove one of the two")


@_rule("trainer.warmup_steps", "run.steps")
def _warmup_ends(c: RunConfig, given: Given) -> str | None:
    if "trainer.warmup_steps" in given and c.trainer.warmup_steps >= c.run.steps:
        return (
            f"trainer.warmup_steps={c.trainer.warmup_steps} never ends within run.steps={c.run.steps}: "
            "lower it, or run longer"
        )
    return None

"""The only place that knows which control call is legal when, and what state it leads to: a table, and its reader.

The state is five small ones side by side. A call has a rule for each of them that matters to it; it is legal if every
rule lists the present state, and it moves each to the state that the rule gives. Calls without a rule are always legal.

    generation   running | paused
    weights      ready | updating (a session is open) | stale (resumed, contents lost) | failed | released
    kv_cache     resident | released
    cuda_graph   resident | released
    work         idle | queued (waiting, engine paused) | held (paused in place, holds KV) | live
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from zerogap.errors import ConfigError, EngineStateError, StaleWeights
from zerogap.wire.messages import MEMORY_TAGS

Axis = Literal["generation", "weights", "kv_cache", "cuda_graph", "work"]
AXES: dict[Axis, tuple[str, ...]] = {
    "generation": ("running", "paused"),
    "weights": ("ready", "updating", "stale", "failed", "released"),
    "kv_cache": ("resident", "released"),
    "cuda_graph": ("resident", "released"),
    "work": ("idle", "queued", "held", "live"),
}


@dataclass(frozen=True, slots=True)
class Rule:
    """`moves`: the states that allow the call -> the state after it. `fails_to`: the state after it raised half-way."""

    call: str
    axis: Axis
    moves: Mapping[str, str]
    fails_to: str | None = None


def _stay(*states: str) -> dict[str, str]:
    return {state: state for state in states}


_QUIET = _stay("idle", "queued")
_NOT_SAMPLING = _stay("idle", "queued", "held")
_HAS_MEMORY = _stay("ready", "updating", "stale", "failed")

RULES: tuple[Rule, ...] = (
    Rule("generate", "weights", _stay("ready", "updating")),
    Rule("generate", "kv_cache", _stay("resident")),
    Rule("generate", "cuda_graph", _stay("resident")),
    Rule("pause_generation", "generation", {"running": "paused", "paused": "paused"}),
    Rule("continue_generation", "generation", {"running": "running", "paused": "running"}),
    Rule("continue_generation", "weights", _stay("ready")),
    Rule("continue_generation", "kv_cache", _stay("resident")),
    Rule("continue_generation", "cuda_graph", _stay("resident")),
    Rule("flush_cache", "work", _QUIET),
    Rule("release_memory_occupation(kv_cache)", "kv_cache", {"resident": "released"}, fails_to="released"),
    Rule("release_memory_occupation(kv_cache)", "work", _QUIET),
    Rule(
        "release_memory_occupation(weights)",
        "weights",
        {"ready": "released", "stale": "released", "failed": "released"},
        fails_to="released",
    ),
    Rule("release_memory_occupation(weights)", "work", _QUIET),
    Rule("release_memory_occupation(cuda_graph)", "cuda_graph", {"resident": "released"}, fails_to="released"),
    Rule("release_memory_occupation(cuda_graph)", "work", _QUIET),
    Rule("resume_memory_occupation(kv_cache)", "kv_cache", {"released": "resident"}),
    Rule("resume_memory_occupation(weights)", "weights", {"released": "stale"}),
    Rule("resume_memory_occupation(cuda_graph)", "cuda_graph", {"released": "resident"}),
    Rule(
        "begin_weight_update",
        "weights",
        {"ready": "updating", "updating": "updating", "stale": "updating", "failed": "updating"},
        fails_to="failed",
    ),
    Rule("begin_weight_update", "work", _NOT_SAMPLING),
    Rule(
        "begin_weight_update(no plan)",
        "weights",
        {"ready": "updating", "stale": "updating", "failed": "updating"},
        fails_to="failed",
    ),
    Rule("begin_weight_update(no plan)", "work", _NOT_SAMPLING),
    Rule("update_weights_from_tensor", "weights", _stay("updating"), fails_to="failed"),
    Rule("update_weights_from_distributed", "weights", _stay("updating"), fails_to="failed"),
    Rule("end_weight_update", "weights", {"updating": "ready"}, fails_to="failed"),
    Rule(
        "update_weights_from_disk",
        "weights",
        {"ready": "ready", "stale": "ready", "failed": "ready"},
        fails_to="failed",
    ),
    Rule("update_weights_from_disk", "work", _NOT_SAMPLING),
    Rule("get_weights_by_name", "weights", _HAS_MEMORY),
    Rule("pull_weights", "weights", _HAS_MEMORY),
    Rule("weights_checker(checksum)", "weights", _HAS_MEMORY),
    Rule("weights_checker(snapshot)", "weights", _HAS_MEMORY),
    Rule("weights_checker(compare)", "weights", _HAS_MEMORY),
    Rule("weights_checker(reset_tensors)", "weights", {"ready": "stale", "stale": "stale", "failed": "failed"}),
    Rule("weights_checker(reset_tensors)", "work", _QUIET),
)
ALWAYS_LEGAL = (
    "abort_request",
    "configure_logging",
    "freeze_gc",
    "destroy_weights_update_group",
    "get_load",
    "health",
    "health_generate",
    "init_weights_update_group",
    "loads",
    "model_info",
    "parallelism_config",
    "ping",
    "ready",
    "remote_instance_transfer_engine_info",
    "server_info",
    "slow_down",
    "start_profile",
    "stop_profile",
    "update_weight_version",
    "weights_checker(manifest)",
)
CALLS: tuple[str, ...] = tuple(dict.fromkeys([*(rule.call for rule in RULES), *ALWAYS_LEGAL]))

REMEDIES: dict[tuple[Axis, str], str] = {
    ("weights", "ready"): "the weights are complete: open a session with begin_weight_update first",
    ("weights", "updating"): "a weight-update session is open: send its buckets and call end_weight_update",
    ("weights", "stale"): "the weights' contents were lost: give new ones with begin_weight_update ... "
    "end_weight_update, or with update_weights_from_disk",
    ("weights", "failed"): "the last weight update failed: begin a new session, or call update_weights_from_disk",
    ("weights", "released"): "call resume_memory_occupation with the tag weights, then give new weights",
    ("kv_cache", "resident"): "kv_cache is in memory already: leave the tag out",
    ("kv_cache", "released"): "call resume_memory_occupation with the tag kv_cache first, or leave the tag out",
    ("cuda_graph", "resident"): "cuda_graph is in memory already: leave the tag out",
    ("cuda_graph", "released"): "call resume_memory_occupation with the tag cuda_graph first, or leave the tag out",
    ("work", "queued"): "abort the waiting requests with abort_request",
    ("work", "held"): "requests are paused in place and hold KV: call pause_generation with mode retract or abort",
    ("work", "live"): "requests are running: call pause_generation with mode retract or abort, or wait for them",
}
"""What to do about a state that refuses a call."""
_NAMES: dict[Axis, str] = {
    "generation": "generation is",
    "weights": "the weights are",
    "kv_cache": "kv_cache is",
    "cuda_graph": "cuda_graph is",
    "work": "the engine's work is",
}


class StateMachine:
    """The engine's present state. One thread checks and moves it; any thread may read it."""

    def __init__(self) -> None:
        self._now: dict[Axis, str] = {
            "generation": "running",
            "weights": "ready",
            "kv_cache": "resident",
            "cuda_graph": "resident",
        }

    @property
    def paused(self) -> bool:
        return self._now["generation"] == "paused"

    @property
    def tags(self) -> dict[str, str]:
        """The state of what each memory tag holds."""
        return {tag: self._now[_axis(tag)] for tag in MEMORY_TAGS}

    @property
    def may_sample(self) -> bool:
        """Whether the scheduler may run a step now."""
        now = self._now
        return (
            now["generation"] == "running"
            and now["weights"] == "ready"
            and now["kv_cache"] == now["cuda_graph"] == "resident"
        )

    @property
    def name(self) -> str:
        """One word for people: running, paused, or what keeps the engine from serving."""
        now = self._now
        if now["weights"] != "ready":
            return now["weights"]
        if "released" in (now["kv_cache"], now["cuda_graph"]):
            return "released"
        return now["generation"]

    def snapshot(self) -> dict[str, str]:
        return {str(axis): value for axis, value in self._now.items()}

    def check(self, call: str, *, tags: Sequence[str] = (), num_running: int = 0, num_waiting: int = 0) -> None:
        """Raises EngineStateError, with the calls that are legal now, if the call is not one of them.

        `num_running` counts requests that hold KV, `num_waiting` those that hold none. For release and resume give
        the resolved tags (`resolve_tags`); the call is legal if it is for each of them.
        """
        now = self._with_work(num_running, num_waiting)
        for one in _expand(call, tags):
            for rule in _rules_of(one):
                if now[rule.axis] not in rule.moves:
                    raise self._refusal(one, rule.axis, now)

    def done(self, call: str, *, tags: Sequence[str] = ()) -> None:
        """Moves to the state after a call that was checked and succeeded."""
        for one in _expand(call, tags):
            for rule in _rules_of(one):
                if rule.axis != "work":
                    self._now[rule.axis] = rule.moves[self._now[rule.axis]]

    def failed(self, call: str, *, tags: Sequence[str] = ()) -> None:
        """Moves to the state after a call that was checked and then raised half-way."""
        for one in _expand(call, tags):
            for rule in _rules_of(one):
                if rule.fails_to is not None:
                    self._now[rule.axis] = rule.fails_to

    def admit(self) -> bool:
        """Whether a new request may run now; False: it waits. Raises if nothing but another control call helps it.

        A paused engine, and one in an open session, lets requests wait. One that says it is running but has no
        weights or no cache answers StaleWeights or EngineStateError.
        """
        if not self.paused:
            self.check("generate")
        return self.may_sample

    def resolve_tags(self, call: str, tags: Sequence[str] | None) -> tuple[str, ...]:
        """The tags that release or resume is about; null or none given: all to which the call applies now."""
        unknown = [tag for tag in tags or () if tag not in MEMORY_TAGS]
        if unknown:
            raise ConfigError(
                f"{call}: unknown tag {', '.join(map(repr, unknown))}", remedy=f"tags are {', '.join(MEMORY_TAGS)}"
            )
        if tags:
            return tuple(dict.fromkeys(tags))
        resuming = call == "resume_memory_occupation"
        chosen = tuple(tag for tag in MEMORY_TAGS if (self._now[_axis(tag)] == "released") == resuming)
        if not chosen:
            raise EngineStateError(
                f"{call}: every tag is {'in memory' if resuming else 'released'} already",
                remedy="the call has no effect now: leave it out",
                legal_calls=self.legal_calls(),
                state=self.snapshot(),
            )
        return chosen

    def legal_calls(self, *, num_running: int = 0, num_waiting: int = 0) -> list[str]:
        now = self._with_work(num_running, num_waiting)
        return [call for call in CALLS if all(now[rule.axis] in rule.moves for rule in _rules_of(call))]

    def _with_work(self, num_running: int, num_waiting: int) -> dict[Axis, str]:
        work = "idle"
        if num_running:
            work = "held" if self.paused else "live"
        elif num_waiting:
            work = "queued" if self.paused or not self.may_sample else "live"
        return {**self._now, "work": work}

    def _refusal(self, call: str, axis: Axis, now: Mapping[Axis, str]) -> EngineStateError | StaleWeights:
        legal = [c for c in CALLS if all(now[rule.axis] in rule.moves for rule in _rules_of(c))]
        error = StaleWeights if call == "generate" and axis == "weights" else EngineStateError
        return error(
            f"{call} is illegal while {_NAMES[axis]} {now[axis]}",
            remedy=REMEDIES[axis, now[axis]],
            legal_calls=legal,
            state=dict(now),
        )


def state_table(axis: Axis) -> Iterator[tuple[str, list[str]]]:
    """For the documentation: (call, for each state of the axis the state after it, or an em dash for a refusal)."""
    for call in CALLS:
        for rule in _rules_of(call):
            if rule.axis == axis:
                yield call, [rule.moves.get(state, "\u2014") for state in AXES[axis]]


def _axis(tag: str) -> Axis:
    return next(axis for axis in AXES if axis == tag)


def _expand(call: str, tags: Sequence[str]) -> list[str]:
    calls = [f"{call}({tag})" for tag in tags] if tags else [call]
    for one in calls:
        if one not in CALLS:
            raise ValueError(f"{one!r} is not in the table of calls")
    return calls


_BY_CALL: dict[str, tuple[Rule, ...]] = {call: tuple(rule for rule in RULES if rule.call == call) for call in CALLS}


def _rules_of(call: str) -> tuple[Rule, ...]:
    return _BY_CALL[call]

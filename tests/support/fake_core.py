"""A core without a model, for the server's tests: one thread, the real state table, tokens by arithmetic.

Token k of a request is `(sum(prompt) + seed + k) % (VOCAB_SIZE - 2) + 2`, its logprob -1/(k + 1), that of prompt token
k -k/4: a client can check every number. Of the alternatives of a token the first is itself, the others are impossible;
the logprob of token t that was asked for is -t. One step makes one token per running request. Run as a module it is a
server process.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import math
import queue
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers

from zerogap.engine.app import build_app
from zerogap.engine.options import ServiceOptions
from zerogap.engine.requests import GenerateRequest, RequestOutput
from zerogap.engine.server import EngineServer, RunnableCore, ServerSettings, bind, serve
from zerogap.engine.service import EngineService
from zerogap.engine.state import StateMachine
from zerogap.errors import EngineRejected, EngineStateError, RolloutError, TransferFailed, ZerogapError
from zerogap.model.tokenizer import Tokenizer
from zerogap.types import Alternatives, FinishReason, TokenRecord
from zerogap.weights.groups import Groups

VOCAB_SIZE = 64
MAX_CONTEXT = 256
TAG_BYTES = {"kv_cache": 4096, "weights": 8192, "cuda_graph": 0}
WEIGHTS = {"model.norm.weight": [1.0, 2.0, 3.0]}

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
"""Token 2 + k is the k-th letter; 0 and 1 are BOS and EOS."""

Sink = Callable[[RequestOutput], None]


def expected_tokens(prompt: list[int], seed: int, count: int) -> list[int]:
    return [(sum(prompt) + seed + k) % (VOCAB_SIZE - 2) + 2 for k in range(count)]


def letter_tokenizer() -> Tokenizer:
    ids = {"<s>": 0, "</s>": 1} | {letter: k + 2 for k, letter in enumerate(LETTERS)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="</s>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(["<s>", "</s>"])
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(backend, special_tokens=special, chat_template=None, eos_token_ids=(1,), add_bos=True)


@asynccontextmanager
async def served(
    core: RunnableCore, folder: Path, tokenizer: Tokenizer | None = None, options: ServiceOptions | None = None
) -> AsyncIterator[str]:
    """The url of a real HTTP server over the core, in this event loop."""
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    service = EngineService(core, name="fake", model_folder=folder, tokenizer=tokenizer, options=options)
    listener = bind("127.0.0.1", 0)
    server = EngineServer(build_app(service), listener, ServerSettings(name="fake"))
    core.start()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:  # noqa: ASYNC110  uvicorn has no event for it
        await asyncio.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
        core.stop(2.0)


@dataclass(eq=False)
class _Live:
    request: GenerateRequest
    sink: Sink
    ids: list[int] = field(default_factory=list)
    num_retractions: int = 0
    holds_kv: bool = False


class FakeCore:
    """`step_seconds` slows the steps; `nan_at` is the position at which a logprob is reported as not finite."""

    vocab_size, max_context = VOCAB_SIZE, MAX_CONTEXT

    def __init__(self, *, step_seconds: float = 0.0, nan_at: int | None = None) -> None:
        self.step_seconds, self.nan_at = step_seconds, nan_at
        self.machine = StateMachine()
        self.failure: ZerogapError | None = None
        self.weight_version = 0
        self.live: dict[str, _Live] = {}
        self.calls: list[str] = []
        self.groups = Groups()
        self.die_at_next_step = False
        self.stalled = 0.0
        self._orders: queue.Queue[Callable[[], None]] = queue.Queue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="fake-core")

    def start(self) -> None:
        self._thread.start()

    def stop(self, deadline_seconds: float) -> None:
        self._stop.set()
        self._thread.join(deadline_seconds)

    def status(self) -> dict[str, Any]:
        holding = sum(one.holds_kv for one in self.live.values())
        return {
            "state": self.machine.name,
            "weight_version": self.weight_version,
            "num_running": holding,
            "num_waiting": len(self.live) - holding,
            "num_used_tokens": 16 * holding,
            "num_kv_tokens": 4096,
            "max_running": 256,
            "device": "cpu",
            "memory": {tag: n * (self.machine.tags[tag] != "released") for tag, n in TAG_BYTES.items()},
            "seconds_stalled": self.stalled,
        }

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        self.machine.admit()
        self._orders.put(lambda: self.live.__setitem__(request.rid, _Live(request, sink)))

    def control(self, name: str, /, **arguments: Any) -> concurrent.futures.Future[dict[str, Any]]:
        future: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()

        def order() -> None:
            self.calls.append(name)
            try:
                future.set_result(getattr(self, f"_{name}")(**arguments))
            except ZerogapError as error:
                future.set_exception(error)

        self._orders.put(order)
        return future

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                busy = self.machine.may_sample and self.live
                while True:
                    self._orders.get(block=not busy, timeout=0.05)()
                    busy = True
            except queue.Empty:
                pass
            if self.machine.may_sample and self.live:
                if self.die_at_next_step:
                    self.failure = RolloutError("the fake core was told to die", remedy="none: this is a test")
                    return
                time.sleep(self.step_seconds)
                for one in list(self.live.values()):
                    self._step(one)

    def _step(self, one: _Live) -> None:
        position = len(one.ids)
        params = one.request.params
        if params.max_new_tokens == 0:
            self._give(one, [], FinishReason.LENGTH)
            return
        token = expected_tokens(list(one.request.input_ids), params.seed, position + 1)[-1]
        one.ids.append(token)
        one.holds_kv = True
        reason = None
        if token in params.stop_token_ids:
            reason = FinishReason.STOP
        elif len(one.ids) >= params.max_new_tokens:
            reason = FinishReason.LENGTH
        error = None
        if position == self.nan_at:
            error = RolloutError(
                f"request {one.request.rid}: logprob of token {position} is nan", remedy="look at the last refit"
            )
        self._give(one, [token] if error is None else [], reason, error)

    def _give(self, one: _Live, ids: list[int], reason: FinishReason | None, error: ZerogapError | None = None) -> None:
        if reason is not None or error is not None:
            del self.live[one.request.rid]
        start = len(one.ids) - len(ids)
        prompt_start, prompt_ids = one.request.logprobs.prompt_start, one.request.input_ids
        prompt = unsent = None
        if prompt_start is not None and start == 0 and reason is not FinishReason.ABORT:
            logprobs: list[float | None] = [-k / 4 for k in range(prompt_start, len(prompt_ids))]
            logprobs[:1] = [None] * min(1, len(logprobs))
            prompt = self._record(one, prompt_ids[prompt_start:], logprobs)
        if one.request.params.max_new_tokens == 0:
            unsent = self._record(one, expected_tokens(list(prompt_ids), one.request.params.seed, 1), [-1.0])
        one.sink(
            RequestOutput(
                rid=one.request.rid,
                new=self._record(one, ids, [-1.0 / (start + k + 1) for k in range(len(ids))]),
                prompt=prompt,
                unsent=unsent,
                finish_reason=None if error else reason,
                cached_tokens=0,
                num_retractions=one.num_retractions,
                weight_version=self.weight_version,
                error=error,
            )
        )

    def _record(self, one: _Live, ids: Sequence[int], logprobs: Sequence[float | None]) -> TokenRecord:
        options = one.request.logprobs
        alternatives = []
        for token, logprob in zip(ids, logprobs, strict=True):
            top = [(logprob, token), *((-math.inf, (token + k) % VOCAB_SIZE) for k in range(1, options.top))]
            asked = [(-float(t), t) for t in options.token_ids]
            known = logprob is not None and options.alternatives
            alternatives.append(Alternatives(top[: options.top], asked) if known else None)
        versions = [self.weight_version] * len(ids)
        return TokenRecord(ids, logprobs, versions, alternatives if options.alternatives else ())

    def _check(self, call: str, tags: tuple[str, ...] = ()) -> None:
        holding = sum(one.holds_kv for one in self.live.values())
        self.machine.check(call, tags=tags, num_running=holding, num_waiting=len(self.live) - holding)

    def _plain(self, call: str) -> dict[str, Any]:
        self._check(call)
        self.machine.done(call)
        return {}

    def _abort_request(self, rid: str, abort_all: bool) -> dict[str, Any]:
        for one in list(self.live.values()):
            if abort_all or one.request.rid == rid:
                self._give(one, [], FinishReason.ABORT)
        return {}

    def _pause_generation(self, mode: str) -> dict[str, Any]:
        if mode == "abort":
            self._abort_request("", True)
        for one in self.live.values():
            if mode == "retract" and one.holds_kv:
                one.num_retractions += 1
                one.holds_kv = False
        return self._plain("pause_generation")

    def _continue_generation(self) -> dict[str, Any]:
        return self._plain("continue_generation")

    def _flush_cache(self) -> dict[str, Any]:
        return self._plain("flush_cache")

    def _memory(self, call: str, tags: list[str] | None, verb: str) -> dict[str, Any]:
        chosen = self.machine.resolve_tags(call, tags)
        self._check(call, chosen)
        self.machine.done(call, tags=chosen)
        per_tag = {tag: {"claimed_bytes": TAG_BYTES[tag], f"{verb}_bytes": TAG_BYTES[tag]} for tag in chosen}
        return {"tags": per_tag, "rss_bytes": 12345, "seconds": 0.5}

    def _release_memory_occupation(self, tags: list[str] | None) -> dict[str, Any]:
        return self._memory("release_memory_occupation", tags, "freed")

    def _resume_memory_occupation(self, tags: list[str] | None) -> dict[str, Any]:
        return self._memory("resume_memory_occupation", tags, "resumed")

    def _begin_weight_update(self, selector: str, plan: Any) -> dict[str, Any]:
        return self._plain("begin_weight_update" if plan is not None else "begin_weight_update(no plan)")

    def _transfer_endpoint(self) -> dict[str, Any]:
        return {"agent": "fake", "metadata": "", "memory": "DRAM", "device": 0, "places": []}

    def _groups(self, act: Any) -> dict[str, Any]:
        return {"found": act(self.groups)}

    def _load_weights(
        self, call: str, act: Any, weight_version: int | None, abort_all_requests: bool
    ) -> dict[str, Any]:
        del act, abort_all_requests
        self._check(call)
        self.weight_version = self.weight_version if weight_version is None else weight_version
        return {}

    def _load_bucket(self, header: Any, weight_version: int | None, abort_all_requests: bool) -> dict[str, Any]:
        self._check("update_weights_from_tensor")
        if abort_all_requests:
            self._abort_request("", True)
        if not header.entries:
            self.machine.failed("update_weights_from_tensor")
            raise TransferFailed("the bucket is empty", remedy="send tensors")
        self.weight_version = self.weight_version if weight_version is None else weight_version
        return {}

    def _end_weight_update(self) -> dict[str, Any]:
        return self._plain("end_weight_update")

    def _update_weights_from_disk(
        self, model_path: str, weight_version: int | None, abort_all_requests: bool
    ) -> dict[str, Any]:
        if abort_all_requests:
            self._abort_request("", True)
        self._plain("update_weights_from_disk")
        self.weight_version = self.weight_version if weight_version is None else weight_version
        return {}

    def _update_weight_version(self, new_version: int, abort_all_requests: bool) -> dict[str, Any]:
        if abort_all_requests:
            self._abort_request("", True)
        self.weight_version = new_version
        return {}

    def _get_weights_by_name(self, name: str, truncate_size: int) -> dict[str, Any]:
        self._check("get_weights_by_name")
        if name not in WEIGHTS:
            raise EngineRejected(f"no weight is named {name}", remedy="list them with weights_checker manifest")
        return {"values": WEIGHTS[name][:truncate_size]}

    def _weights_checker(self, action: str, skip: Sequence[str]) -> dict[str, Any]:
        self._plain(f"weights_checker({action})")
        if action == "manifest":
            return {"tensors": [{"name": name, "dtype": "float32", "shape": [3]} for name in WEIGHTS]}
        return {"ranks": [{"checksums": {"model.norm.weight": "ab" * 16}}], "per_engine_checksum": "cd" * 16}

    def _server_info(self) -> dict[str, Any]:
        return {
            **self.status(),
            "pid": 1,
            "dtype": "float32",
            "manifest_digest": "m" * 32,
            "fingerprint": "f" * 32,
            "memory": dict(TAG_BYTES),
            "rss_bytes": 12345,
        }

    def _slow_down(self, seconds: float) -> dict[str, Any]:
        self.step_seconds = seconds
        return {}

    def _start_profile(self, **wanted: Any) -> dict[str, Any]:
        return {"path": f"/profiles/{wanted['name']}.trace.json.gz"}

    def _stop_profile(self) -> dict[str, Any]:
        raise EngineStateError("no profile is being taken", remedy="call start_profile first")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ready-fd", type=int)
    parser.add_argument("--ready-file", type=Path)
    parser.add_argument("--parent-pipe", type=int)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--die-at-first-step", action="store_true")
    args = parser.parse_args()
    settings = ServerSettings(
        name="fake", ready_fd=args.ready_fd, ready_file=args.ready_file, parent_pipe=args.parent_pipe
    )
    core = FakeCore(step_seconds=args.step_seconds)
    core.die_at_next_step = args.die_at_first_step
    return serve(lambda: core, args.folder, settings)


if __name__ == "__main__":
    sys.exit(main())

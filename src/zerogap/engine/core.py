"""The only place where requests and control calls meet the model: one thread owns weights, cache and scheduler.

Calls arrive as orders in one queue and are carried out between steps, in order, one at a time; the state table decides
which are legal. A step that raises fails its requests and the core, with the cause; the thread lives on and says so.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zerogap.config.schema import EngineSettings
from zerogap.engine.memory import Released, process_bytes
from zerogap.engine.parts import make_parts
from zerogap.engine.profile import StepProfiler
from zerogap.engine.requests import GenerateRequest, RequestOutput
from zerogap.engine.requests import Sequence as Running
from zerogap.engine.state import StateMachine
from zerogap.engine.weights import EngineWeights
from zerogap.errors import ConfigError, EngineUnreachable, RolloutError, ZerogapError
from zerogap.model.decoder import Decoder
from zerogap.model.registry import generation_eos_ids, parse_device, parse_dtype
from zerogap.types import FinishReason
from zerogap.weights.groups import Groups
from zerogap.weights.handshake import communication_settings
from zerogap.wire.tensors import BucketHeader, TransferPlan

logger = logging.getLogger(__name__)

Sink = Callable[[RequestOutput], None]
_IDLE_SECONDS = 0.2
"""How often an idle core looks whether a weight-update session is past its deadline."""


@dataclass(slots=True, eq=False)
class _Live:
    sequence: Running
    sink: Sink
    num_told: int = 0
    told_prompt: bool = False


class EngineCore:
    """One model, served. `start` it before use; every other call may come from any thread."""

    def __init__(
        self, model_folder: Path, settings: EngineSettings, *, dtype: str = "float32", device: str = "cpu",
        shares: Decoder | None = None,
    ) -> None:  # fmt: skip
        self._num_threads = settings.threads or torch.get_num_threads()
        torch.set_num_threads(self._num_threads)
        self._settings = settings
        self._memory, decoder, self.runner = make_parts(
            model_folder, settings, parse_dtype(dtype), parse_device(device), shares
        )
        self.weights = EngineWeights(decoder)
        config = decoder.config
        self.vocab_size = config.vocab_size
        self.max_context = min(config.max_position_embeddings, self.runner.scheduler.num_tokens)
        self._vocabulary = frozenset(range(config.vocab_size))
        self._eos_ids = frozenset(config.eos_token_ids) | generation_eos_ids(model_folder)
        self._certificate = decoder.certificate
        self.machine = StateMachine()
        self._profiler, self._sleep_seconds = StepProfiler(), 0.0
        self.failure: ZerogapError | None = None
        self._live: dict[str, _Live] = {}
        self._orders: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stop, self._gate, self._closed = threading.Event(), threading.Lock(), False
        self._last_step = time.monotonic()
        self._thread = threading.Thread(target=self._run, daemon=True, name="engine-core")

    # --- any thread

    def start(self) -> None:
        self._thread.start()

    def stop(self, deadline_seconds: float) -> None:
        """Ends the thread after its present step; what still runs is aborted, what still waits is refused."""
        self._stop.set()
        self._order(lambda: None)
        self._thread.join(deadline_seconds)

    def status(self) -> dict[str, Any]:
        scheduler, machine = self.runner.scheduler, self.machine
        busy = bool(scheduler.running or scheduler.waiting) and machine.may_sample
        return {
            "state": machine.name if self.failure is None else "failed",
            "weight_version": self.runner.weight_version,
            "num_running": len(scheduler.running),
            "num_waiting": len(scheduler.waiting),
            "num_used_tokens": scheduler.num_used_tokens,
            "num_kv_tokens": scheduler.num_tokens,
            "max_running": scheduler.max_running,
            "device": self.runner.decoder.device.type,
            "memory": {t: self._memory.num_bytes(t) * (state != "released") for t, state in machine.tags.items()},
            "seconds_stalled": time.monotonic() - self._last_step if busy else 0.0,
        }

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """`sink` gets every token and then the end, on the core's thread; it must not block. Raises what forbids it."""
        if self.failure is not None:
            raise self.failure
        self.machine.admit()
        request.check_ids(self.vocab_size, self.max_context)
        self.runner.scheduler.check(request.rid, len(request.input_ids), request.params.max_new_tokens)
        self._order(lambda: self._add(request, sink))

    def control(self, name: str, /, **arguments: Any) -> concurrent.futures.Future[dict[str, Any]]:
        """Carries out a call of the wire, named as there, between two steps. The future holds its reply or its error.

        A future that is cancelled before its turn was never carried out.
        """
        future: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
        act = getattr(self, f"_do_{name}")

        def order() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._stop.is_set():
                    raise EngineUnreachable(f"{name}: the engine is stopping", remedy="start it again")
                if self.failure is not None and name not in ("server_info", "abort_request"):
                    raise self.failure
                future.set_result(act(**arguments))
            except Exception as error:
                if not isinstance(error, ZerogapError):
                    logger.exception("%s failed", name)
                future.set_exception(error)

        self._order(order)
        return future

    def _order(self, order: Callable[[], None]) -> None:
        """Hands over to the core's thread. Once that has ended, an order is refused at once, on the caller's."""
        with self._gate:
            if not self._closed:
                self._orders.put(order)
                return
        order()

    # --- the core's thread

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        while not self._stop.is_set():
            busy = self._has_work()
            self._carry_out_orders(wait=not busy)
            self._watch_session()
            if self._has_work():
                self._step()
        self._abort(list(self._live.values()))
        with self._gate:
            self._closed = True
        self._carry_out_orders(wait=False)

    def _has_work(self) -> bool:
        scheduler = self.runner.scheduler
        return self.failure is None and self.machine.may_sample and bool(scheduler.running or scheduler.waiting)

    def _carry_out_orders(self, *, wait: bool) -> None:
        """Everything in the queue. Waits a little for a first one if there is nothing else to do."""
        try:
            while True:
                order = self._orders.get(block=wait, timeout=_IDLE_SECONDS)
                wait = False
                if not self._has_work():
                    self._last_step = time.monotonic()  # before the order: no pause counts as a stall once it is over
                order()
        except queue.Empty:
            pass

    def _step(self) -> None:
        if self._sleep_seconds:
            self._stop.wait(self._sleep_seconds)
        try:
            moved = self.runner.step()
        except Exception as error:  # noqa: BLE001  the border of the process: nothing above could tell the clients
            self._fail(error)
            return
        self._last_step = time.monotonic()
        self._profiler.stepped()
        for sequence in moved:
            self._report(self._live[sequence.rid])

    def _report(self, live: _Live) -> None:
        """Tells the client what is new. A client whose sink raises is gone; the others are not."""
        sequence, told, prompt = live.sequence, live.num_told, None
        live.num_told = sequence.num_output
        if sequence.scores is not None and sequence.scores.complete and not live.told_prompt:
            live.told_prompt = True
            prompt = sequence.scores.record(
                sequence.prompt_ids, self.runner.weight_version, alternatives=sequence.options.alternatives
            )
        if sequence.ended and self._live.get(sequence.rid) is live:
            del self._live[sequence.rid]
        output = RequestOutput(
            rid=sequence.rid,
            new=sequence.record(told),
            finish_reason=sequence.finish_reason,
            cached_tokens=sequence.num_cached,
            num_retractions=sequence.num_retractions,
            weight_version=self.runner.weight_version,
            error=sequence.error,
            prompt=prompt,
            unsent=sequence.unsent,
        )
        try:
            live.sink(output)
        except Exception:
            logger.exception("the client of request %s cannot be told; the request is dropped", sequence.rid)
            if not sequence.ended:
                self.runner.scheduler.remove([sequence])
                del self._live[sequence.rid]

    def _add(self, request: GenerateRequest, sink: Sink) -> None:
        params = request.params
        stop_ids = frozenset() if params.ignore_eos else self._eos_ids | params.stop_token_ids
        sequence = Running(
            request.rid,
            request.input_ids,
            params,
            stop_ids & self._vocabulary,
            request.logprobs,
            request.namespace.encode(),
        )
        live = _Live(sequence, sink)
        if request.rid in self._live:
            sequence.error = ConfigError(
                f"request {request.rid} is already running", remedy="give each live request its own rid"
            )
        elif self._stop.is_set():
            sequence.finish_reason = FinishReason.ABORT
        else:
            sequence.error = self.failure
        if sequence.ended:
            self._report(live)
            return
        self._live[request.rid] = live
        self.runner.scheduler.add(sequence)

    def _abort(self, gone: Iterable[_Live]) -> None:
        gone = list(gone)
        self.runner.scheduler.remove([live.sequence for live in gone])
        for live in gone:
            live.sequence.finish_reason = FinishReason.ABORT
            self._report(live)

    def _fail(self, cause: Exception) -> None:
        names = ", ".join(s.rid for s in self.runner.scheduler.running[:8])
        self.failure = RolloutError(
            f"the engine failed in a step over {names}: {type(cause).__name__}: {cause}",
            remedy="see the traceback in the engine's log, and start the engine again",
        )
        self.failure.__cause__ = cause
        logger.error("the engine has failed", exc_info=cause)
        gone = list(self._live.values())
        self.runner.scheduler.remove([live.sequence for live in gone])
        for live in gone:
            live.sequence.error = self.failure
            self._report(live)

    def _watch_session(self) -> None:
        """Closes the door on a session whose sender is silent past its deadline: the weights are half new."""
        if self.machine.snapshot()["weights"] == "updating":
            failure = self.weights.overdue()
            if failure is not None:
                logger.error("%s", failure)
                self.machine.failed("update_weights_from_tensor")

    def _check(self, call: str, tags: Sequence[str] = ()) -> None:
        scheduler = self.runner.scheduler
        self.machine.check(call, tags=tags, num_running=len(scheduler.running), num_waiting=len(scheduler.waiting))

    def _guarded(self, call: str, act: Callable[[], Any], tags: Sequence[str] = ()) -> Any:
        """A call that changes something: checked first, and if it raises half-way the state says so."""
        self._check(call, tags)
        try:
            reply = act()
        except BaseException:
            self.machine.failed(call, tags=tags)
            raise
        self.machine.done(call, tags=tags)
        return reply

    # --- one method per call of the wire

    def _do_abort_request(self, rid: str, abort_all: bool) -> dict[str, Any]:
        self._abort(live for live in list(self._live.values()) if abort_all or live.sequence.rid == rid)
        return {}

    def _do_pause_generation(self, mode: str) -> dict[str, Any]:
        def pause() -> None:
            if mode == "abort":
                self._abort(list(self._live.values()))
            elif mode == "retract":
                self.runner.scheduler.retract_all()

        self._guarded("pause_generation", pause)
        return {}

    def _do_continue_generation(self) -> dict[str, Any]:
        self._guarded("continue_generation", lambda: None)
        return {}

    def _do_flush_cache(self) -> dict[str, Any]:
        self._guarded("flush_cache", self.runner.scheduler.pool.flush)
        return {}

    def _do_release_memory_occupation(self, tags: Sequence[str] | None) -> dict[str, Any]:
        call, started = "release_memory_occupation", time.monotonic()
        chosen = self.machine.resolve_tags(call, tags)
        self._check(call, chosen)
        report = {tag: asdict(self._guarded(call, partial(self._release, tag), [tag])) for tag in chosen}
        return {"tags": report, "rss_bytes": process_bytes(), "seconds": time.monotonic() - started}

    def _release(self, tag: str) -> Released:
        if tag in ("kv_cache", "weights"):
            self.runner.weights_changed()
        return self._memory.release(tag, self.weights.lose) if tag == "weights" else self._memory.release(tag)

    def _do_resume_memory_occupation(self, tags: Sequence[str] | None) -> dict[str, Any]:
        call, started = "resume_memory_occupation", time.monotonic()
        chosen = self.machine.resolve_tags(call, tags)
        self._check(call, chosen)
        resumed = self._memory.resume(chosen)
        self.machine.done(call, tags=chosen)
        report = {t: {"claimed_bytes": self._memory.num_bytes(t), "resumed_bytes": resumed[t]} for t in chosen}
        return {"tags": report, "rss_bytes": process_bytes(), "seconds": time.monotonic() - started}

    def _do_begin_weight_update(self, selector: str, plan: TransferPlan | None) -> dict[str, Any]:
        del selector  # there is no draft model
        call = "begin_weight_update" if plan is not None else "begin_weight_update(no plan)"
        self._check(call)
        whole = self.machine.snapshot()["weights"] == "ready"
        try:
            self.weights.begin(plan)
        except ZerogapError:
            if not whole:
                self.machine.failed(call)
            raise
        self.machine.done(call)
        return {}

    def _do_load_bucket(
        self, header: BucketHeader, weight_version: int | None = None, abort_all_requests: bool = False
    ) -> dict[str, Any]:
        call = "update_weights_from_tensor"
        return self._do_load_weights(call, lambda weights: weights.load(header), weight_version, abort_all_requests)

    def _do_load_weights(
        self, call: str, act: Callable[[EngineWeights], None], weight_version: int | None, abort_all_requests: bool
    ) -> dict[str, Any]:
        self._check(call)
        self._abort_if(abort_all_requests)
        self._guarded(call, lambda: act(self.weights))
        self._relabel(weight_version)
        return {}

    def _do_transfer_endpoint(self) -> dict[str, Any]:
        return self.weights.endpoint.model_dump(mode="json")

    def _do_destination(self) -> dict[str, Any]:
        self.machine.check("pull_weights")
        return {"destination": self.weights.destination}

    def _do_groups(self, act: Callable[[Groups], bool]) -> dict[str, Any]:
        return {"found": act(self.weights.groups)}

    def _do_end_weight_update(self) -> dict[str, Any]:
        self._guarded("end_weight_update", self.weights.end)
        self.runner.weights_changed()
        return {}

    def _do_update_weights_from_disk(
        self, model_path: str, weight_version: int | None, abort_all_requests: bool = False
    ) -> dict[str, Any]:
        call, folder = "update_weights_from_disk", Path(model_path)
        self.machine.check(call)  # before anything is aborted for it
        self._abort_if(abort_all_requests)
        self._check(call)
        self.weights.check_folder(folder)
        self._guarded(call, lambda: self.weights.load_folder(folder))
        self.runner.weights_changed()
        self._relabel(weight_version)
        return {}

    def _do_update_weight_version(self, new_version: int, abort_all_requests: bool) -> dict[str, Any]:
        self._abort_if(abort_all_requests)
        self._relabel(new_version)
        return {}

    def _abort_if(self, wanted: bool) -> None:
        if wanted:
            self._abort(list(self._live.values()))

    def _relabel(self, version: int | None) -> None:
        if version is not None:
            self.runner.weight_version = version

    def _do_get_weights_by_name(self, name: str, truncate_size: int) -> dict[str, Any]:
        self._check("get_weights_by_name")
        return {"values": self.weights.values(name, truncate_size)}

    def _do_weights_checker(self, action: str, skip: Sequence[str] = ()) -> dict[str, Any]:
        started = time.monotonic()
        reply = self._guarded(f"weights_checker({action})", lambda: self.weights.check(action, skip))
        if action == "reset_tensors":
            self.runner.weights_changed()
        return reply | {"seconds": time.monotonic() - started}

    def _do_slow_down(self, seconds: float) -> dict[str, Any]:
        self._sleep_seconds = seconds
        return {}

    def _do_start_profile(self, **wanted: Any) -> dict[str, Any]:
        return {"path": str(self._profiler.start(**wanted))}

    def _do_stop_profile(self) -> dict[str, Any]:
        return {"path": str(self._profiler.stop())}

    def _do_server_info(self) -> dict[str, Any]:
        use = self._memory.measure()
        memory = use.tags | {"weights": use.tags["weights"] + self.runner.decoder.packed_bytes}
        return self.status() | {
            "pid": os.getpid(),
            "dtype": str(self.runner.decoder.dtype).removeprefix("torch."),
            "manifest_digest": self.weights.manifest.digest,
            "fingerprint": self._certificate.fingerprint,
            "parity_failures": list(self._certificate.failures),
            "states": self.machine.snapshot(),
            "memory": memory,
            "rss_bytes": use.rss_bytes,
            "num_threads": self._num_threads,
            "communication": communication_settings(),
        }

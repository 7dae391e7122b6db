"""The only list of routes: path, methods, body, reply, and where we differ from SGLang 0.5.22.

Server and client use it, and `docs/wire.md` is generated from it.
"""

from __future__ import annotations

from zerogap.wire import admin_messages, messages, transfer_messages
from zerogap.wire.messages import Body
from zerogap.wire.openai_routes import OPENAI_ROUTES
from zerogap.wire.route import GET, POST, PUT, Route

_START_FROM_FOLDER = "start the new engine from a folder, and give it weights as to any other"
_NO_EXPERTS = "the engine has no experts to count: leave it out"


def _absent(
    name: str,
    remedy: str,
    *,
    methods: tuple[str, ...] = (POST,),
    body: type[Body] = messages.EmptyBody,
    path: str = "",
    aliases: tuple[str, ...] = (),
) -> Route:
    required = body is not messages.EmptyBody
    return Route(name, path or f"/{name}", methods, "501", body, required, aliases=aliases, absent=remedy)


_NATIVE: tuple[Route, ...] = (
    Route(
        "generate",
        "/generate",
        (POST, PUT),
        "`{text, output_ids, meta_info}`; a list for a batch or `n > 1`; `stream`: server-sent events, then `[DONE]`",
        messages.GenerateBody,
        body_required=True,
        ours="`text` together with `input_ids` is refused. `sampling_seed` is always honoured; sample i of `n` uses "
        "seed + i, has the rid `RID-i`, and is aborted by `RID` too. A misspelt top-level key is refused. "
        "A logprob that is not a number is an error, never a stop. `min_new_tokens` and truncation restrict the choice "
        "and never the logprob; penalties and bias change both (docs/parity.md). `top_logprobs_num` without "
        "`return_logprob` is refused. A `stop_regex` that searches for over 0.1 s is an error of its request alone. "
        "A prompt as long as the context can be scored with `max_new_tokens: 0`. With prompt logprobs, "
        "`input_weight_versions` says which weights scored them. "
        "`weight_versions` spans are always present in the last message. Cached blocks are of the present weights in "
        "any case; `extra_key` and `cache_salt` keep apart what must not share them. A request that arrives while the "
        "engine does not generate waits for `pause_wait_seconds` (default: the server's, 600), then is answered 503 "
        "with the state; SGLang's waits for ever.",
    ),
    Route(
        "health",
        "/health",
        (GET,),
        "`{status, state, engine, ...}`; 503 when the engine thread is dead, or has work and makes no progress",
        idempotent=True,
        ours="Answers at once, without a generation, and 200 while paused or released: the body says which. The bound "
        "is `zerogap serve --max-stall-seconds` (60). SGLang's body is empty and its probe takes a second, or 20 "
        "while paused.",
    ),
    Route(
        "health_generate",
        "/health_generate",
        (GET,),
        "as `/health`, after one generated token where the engine may generate",
        idempotent=True,
        ours="While paused, or without weights or cache, it answers as `/health` does instead of waiting.",
    ),
    Route(
        "metrics",
        "/metrics",
        (GET,),
        "Prometheus text",
        idempotent=True,
        ours="SGLang's names where it has one, ours under `zerogap:`; always on.",
    ),
    Route(
        "model_info",
        "/model_info",
        (GET,),
        "`{model_path, tokenizer_path, is_generation, weight_version, ...}`",
        idempotent=True,
        aliases=("/get_model_info",),
        ours="`zerogap` is the version of the engine: a client knows by it whom it speaks to.",
    ),
    Route(
        "server_info",
        "/server_info",
        (GET,),
        "settings, `internal_states`, `version`, and `zerogap: {engine, pid, state, dtype, weight_version, "
        "manifest_digest, fingerprint, memory, rss_bytes}`",
        idempotent=True,
        aliases=("/get_server_info",),
        ours="Always the present values; SGLang's top level is the configuration at start.",
    ),
    Route(
        "flush_cache",
        "/flush_cache",
        (GET, POST),
        "plain text",
        idempotent=True,
        ours="Refused with 409 while requests hold KV (SGLang: 400). `?timeout=` waits for that long.",
    ),
    Route(
        "abort_request",
        "/abort_request",
        (POST,),
        "empty",
        messages.AbortBody,
        body_required=True,
        idempotent=True,
        ours="Matches a rid exactly, never by prefix; the rid of a batch or of `n` samples aborts them all. An unknown "
        "rid is not an error.",
    ),
    Route(
        "pause_generation",
        "/pause_generation",
        (POST,),
        "`{message, status}`",
        messages.PauseBody,
        body_required=True,
        idempotent=True,
        ours="Returns when the engine has acted, and never waits for clients to read. Every order of modes is legal.",
    ),
    Route(
        "continue_generation",
        "/continue_generation",
        (POST,),
        "`{message, status}`",
        messages.ContinueBody,
        body_required=True,
        idempotent=True,
        ours="Refused with 409 until weights and cache are back and complete.",
    ),
    Route(
        "release_memory_occupation",
        "/release_memory_occupation",
        (GET, POST),
        "`{tags: {TAG: {claimed_bytes, freed_bytes}}, rss_bytes, seconds}`",
        messages.MemoryBody,
        ours="SGLang's body is `null`. Refused with 409 while requests hold KV or when a tag is released already, "
        "where SGLang dies; a release that frees under 95% of what it claims is an error. No tags: all resident ones.",
    ),
    Route(
        "resume_memory_occupation",
        "/resume_memory_occupation",
        (GET, POST),
        "`{tags: {TAG: {claimed_bytes, resumed_bytes}}, rss_bytes, seconds}`",
        messages.MemoryBody,
        ours="SGLang's body is `null`. Refused with 409 for a tag that is not released, where SGLang dies. After a "
        "resume of `weights` nothing is generated until a weight update ends well. No tags: all released ones.",
    ),
    Route(
        "begin_weight_update",
        "/begin_weight_update",
        (POST,),
        "`{success, message}`",
        messages.BeginUpdateBody,
        body_required=True,
        ours="`plan` announces what will come. With a plan, a begin in an open session replaces it, so a dead trainer "
        "blocks nobody; the replaced session's buckets are refused. Refused with 409 while requests run.",
    ),
    Route(
        "update_weights_from_tensor",
        "/update_weights_from_tensor",
        (POST,),
        "`{success, message}`",
        messages.UpdateFromTensorBody,
        body_required=True,
        ours="`bucket` names a shared-memory segment and the tensors in it, with a digest each. Pickled "
        "`serialized_named_tensors` are refused: unpickling executes code. Nothing is flushed: begin does that.",
    ),
    Route(
        "init_weights_update_group",
        "/init_weights_update_group",
        (POST,),
        "`{success, message}`, once every rank of the group is there",
        transfer_messages.InitGroupBody,
        body_required=True,
        ours="A group of a name that exists replaces it. Ranks that are not all there within 30 s are an error, and a "
        "backend that the engine's device cannot use is one at once. Generation goes on meanwhile.",
    ),
    Route(
        "update_weights_from_distributed",
        "/update_weights_from_distributed",
        (POST,),
        "`{success, message}`",
        transfer_messages.UpdateFromDistributedBody,
        body_required=True,
        ours="In a session with a plan, `bucket` gives each tensor's place and digest, which are checked. Without "
        "one, `load_format` null or `flattened_bucket` are SGLang's, nothing can be proven, and a session over weights "
        "that were lost ends well only if every weight arrived. After a failure the engine has left the group, so that "
        "no rank waits for it. Nothing is flushed: begin does that.",
    ),
    Route(
        "destroy_weights_update_group",
        "/destroy_weights_update_group",
        (POST,),
        "`{success, message}`; 400 where there is no such group",
        transfer_messages.DestroyGroupBody,
        body_required=True,
    ),
    Route(
        "remote_instance_transfer_engine_info",
        "/remote_instance_transfer_engine_info",
        (GET,),
        "`{rank, remote_instance_transfer_engine_info: [AGENT, {NAME: [address, num_bytes, 1]}], zerogap}`",
        idempotent=True,
        aliases=("/get_remote_instance_transfer_engine_info",),
        ours="The transfer engine is NIXL; `zerogap` holds its metadata. Weights are written in a session with "
        "a plan of mode p2p, and each bucket is then announced by update_weights_from_tensor, without bytes.",
    ),
    Route(
        "update_weights_from_disk",
        "/update_weights_from_disk",
        (POST,),
        "`{success, message, num_paused_requests}`",
        messages.UpdateFromDiskBody,
        body_required=True,
        ours="A failure leaves the engine refusing to generate, not half new. `model_path` in `/model_info` follows; "
        "the served name does not.",
    ),
    Route(
        "end_weight_update",
        "/end_weight_update",
        (POST,),
        "`{success, message}`",
        body_required=True,
        ours="Fails when a weight of the plan never arrived.",
    ),
    Route(
        "update_weight_version",
        "/update_weight_version",
        (POST,),
        "`{success, message, new_version}`",
        messages.UpdateVersionBody,
        body_required=True,
        idempotent=True,
        ours="Aborts nothing unless asked to (SGLang's default is to abort everything; `zerogap serve "
        "--version-update-aborts` has that). The version is an integer.",
    ),
    Route(
        "get_weights_by_name",
        "/get_weights_by_name",
        (GET, POST),
        "JSON list of the first values or rows; a value that is no finite number is `null`",
        messages.GetWeightsBody,
        body_required=True,
        idempotent=True,
    ),
    Route(
        "weights_checker",
        "/weights_checker",
        (GET, POST),
        "`{success, message, ranks, per_engine_checksum}`",
        messages.CheckerBody,
        ours="`manifest` lists name, dtype and shape of every weight; `seconds` is what the check took. Checksums are "
        "xxh3-128 in hex.",
    ),
    Route(
        "ready",
        "/ready",
        (GET,),
        "as `/health`; 503 unless the engine generates now",
        idempotent=True,
        ours="SGLang's body is empty.",
    ),
    Route("ping", "/ping", (GET,), "empty; 503 where `/health` has it", idempotent=True),
    Route(
        "loads",
        "/v1/loads",
        (GET,),
        "`{timestamp, version, accelerator, num_accelerators, dp_rank_count, loads: [{num_running_reqs, ...}]}`",
        idempotent=True,
        ours="Never waits for a step. `?include=` takes `core`, `memory`, `queues`, `all`; `spec`, `lora` and `disagg` "
        "add nothing. `?format=` `json` only. Throughput and hit rate are not among the numbers.",
    ),
    Route(
        "get_load",
        "/get_load",
        (GET,),
        "`[{dp_rank, num_reqs, num_waiting_reqs, num_tokens, ts_tic}]`",
        idempotent=True,
    ),
    Route(
        "parallelism_config",
        "/parallelism_config",
        (GET,),
        "`{tp_size, tp_rank, ...}` of `?rank=`, which can only be 0",
        idempotent=True,
    ),
    Route(
        "freeze_gc",
        "/freeze_gc",
        (GET, POST),
        "plain text",
        idempotent=True,
    ),
    Route(
        "slow_down",
        "/slow_down",
        (GET, POST),
        "`null`",
        admin_messages.SlowDownBody,
        idempotent=True,
        ours="At most 10 s a step; control calls wait for as long.",
    ),
    Route(
        "start_profile",
        "/start_profile",
        (GET, POST),
        "plain text with the trace's path",
        admin_messages.StartProfileBody,
        ours="At most 1,000 steps, then the trace is written without a call. Only inside the folder of "
        "`SGLANG_TORCH_PROFILER_DIR` (default: `zerogap-profiles` in the system's temporary folder). Refused with 409 "
        "while one is taken. Fields without effect here are refused.",
    ),
    Route(
        "stop_profile",
        "/stop_profile",
        (GET, POST),
        "plain text with the trace's path",
        ours="Refused with 409 when none is taken.",
    ),
    Route(
        "configure_logging",
        "/configure_logging",
        (GET, POST),
        "empty",
        admin_messages.ConfigureLoggingBody,
        idempotent=True,
        ours="`log_level` only: asking for logs or dumps of requests is refused.",
    ),
    _absent(
        "update_weights_from_ipc",
        "send the weights in buckets, with update_weights_from_tensor",
        body=transfer_messages.UpdateFromIpcBody,
    ),
    Route(
        "pull_weights",
        "/pull_weights",
        (POST,),
        "`{success, message, num_changed_tensors, changed_tensor_bytes}`",
        transfer_messages.PullWeightsBody,
        body_required=True,
        idempotent=True,
        ours="Reads a version of `source_dir` (docs/refit.md), checks every digest and keeps what changed until a "
        "session of mode disk_delta loads it; nothing is written, `local_checkpoint_dir` has no meaning. Generation "
        "goes on.",
    ),
    _absent(
        "load_lora_adapter",
        "merge the adapter into the weights and update those",
        body=transfer_messages.LoadAdapterBody,
    ),
    _absent(
        "load_lora_adapter_from_tensors",
        "merge the adapter into the weights and update those",
        body=transfer_messages.LoadAdapterFromTensorsBody,
    ),
    _absent(
        "load_lora_adapter_from_distributed",
        "merge the adapter into the weights and update those",
    ),
    _absent(
        "unload_lora_adapter",
        "there are no adapters: nothing is left to unload",
        body=transfer_messages.UnloadAdapterBody,
    ),
    _absent("init_weights_send_group_for_remote_instance", _START_FROM_FOLDER),
    _absent("send_weights_to_remote_instance", _START_FROM_FOLDER),
    _absent(
        "set_internal_state", "its keys (pipeline, speculation) mean nothing here: leave it out", methods=(POST, PUT)
    ),
    _absent("set_trace_level", "use start_profile for a trace of some steps", methods=(GET, POST)),
    _absent("start_expert_distribution_record", _NO_EXPERTS, methods=(GET, POST)),
    _absent("stop_expert_distribution_record", _NO_EXPERTS, methods=(GET, POST)),
    _absent("dump_expert_distribution_record", _NO_EXPERTS, methods=(GET, POST)),
    _absent("pd_role_switch", "one engine does both prefill and decode: leave it out"),
    _absent("open_session", "send the whole prompt: its known blocks are not computed again", methods=(GET, POST)),
    _absent("close_session", "there are no sessions: nothing is left to close", methods=(GET, POST)),
    _absent("encode", "this engine generates: use generate", methods=(POST, PUT)),
    _absent("classify", "this engine generates: use generate", methods=(POST, PUT)),
    _absent("parse_function_call", "parse the text of the response in the client"),
    _absent("separate_reasoning", "parse the text of the response in the client"),
    _absent("invocations", "use generate"),
    _absent("vertex_generate", "use generate"),
)
ROUTES: tuple[Route, ...] = (*_NATIVE, *OPENAI_ROUTES)
BY_NAME = {route.name: route for route in ROUTES}

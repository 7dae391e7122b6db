"""The only place that turns records into SGLang's JSON and back: prompts of a batch, replies, version spans, errors.

Replies are built and read field by field, without a validation library: they grow with every token.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from pydantic import BaseModel, ValidationError

from zerogap import errors
from zerogap.errors import ConfigError, ProtocolMismatch, RolloutError, ZerogapError
from zerogap.types import Alternatives, FinishReason, TokenRecord
from zerogap.wire.api import GenerateReply, MemoryReport, ServerInfo, TagBytes
from zerogap.wire.messages import GenerateBody, SamplingBody
from zerogap.wire.stock_errors import stock_error
from zerogap.wire.tensors import BucketHeader, RankEndpoint

DONE = "[DONE]"

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

# --- JSON -----------------------------------------------------------------------------------------------------------


def dumps(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False).encode()


def loads(body: bytes) -> Any:
    """JSON as the specification has it: UTF-8, every key once, no NaN, no half of a character. Raises ConfigError."""
    try:
        text = body.decode()
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_each_once)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the body is not JSON: {error}", remedy="send a JSON object in UTF-8") from error


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError(f"the key {next(k for i, (k, _) in enumerate(pairs) if k in dict(pairs[:i]))!r} comes twice")
    return value


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def read_body(model: type[M], data: Any) -> M:
    """The body's fields, checked. Raises ConfigError that names every field at fault."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, e['loc'])) or 'body'}: {e['msg']}" for e in error.errors(include_input=False)]
        raise ConfigError("; ".join(faults[:8]), remedy="see docs/wire.md for the fields of this route") from error


# --- requests -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PromptItem:
    """One response to generate: a prompt of a batch, one of its `n` samples. `family` is the client's rid."""

    rid: str
    family: str
    text: str | None
    input_ids: list[int] | None
    sampling: SamplingBody
    seed: int
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: list[int] | None
    return_text_in_logprobs: bool
    return_original_logprob: bool | None
    namespace: str = ""


def is_batch(body: GenerateBody) -> bool:
    """Whether the prompts are a list; the reply is one too, and also when one prompt has several samples."""
    return isinstance(body.text, list) or bool(body.input_ids and isinstance(body.input_ids[0], list))


def expand(body: GenerateBody) -> list[PromptItem]:
    """Every response that the body asks for, prompt by prompt. Raises ConfigError."""
    prompts = _prompts(body)
    count = len(prompts)
    default = SamplingBody()
    sampling = _per_prompt("sampling_params", body.sampling_params or default, count)
    rids = _rids(body.rid, count)
    logprob = _per_prompt("return_logprob", body.return_logprob, count)
    start = _per_prompt("logprob_start_len", body.logprob_start_len, count)
    top = _per_prompt("top_logprobs_num", body.top_logprobs_num, count)
    given: Any = body.return_original_logprob
    original: list[bool | None] = _per_prompt("return_original_logprob", given, count)
    spaces = _namespaces(body, count)
    wanted = body.token_ids_logprob
    one_list = not wanted or not isinstance(wanted[0], list)
    spread: list[Any] = [wanted] * count if one_list else _per_prompt("token_ids_logprob", list(wanted or ()), count)
    token_ids = cast("list[list[int] | None]", spread)
    items = []
    for i, (text, ids) in enumerate(prompts):
        params = sampling[i]
        seed = secrets.randbits(63) if params.sampling_seed is None else params.sampling_seed
        for k in range(params.n):
            items.append(
                PromptItem(
                    rid=rids[i] if params.n == 1 else f"{rids[i]}-{k}",
                    family=body.rid if isinstance(body.rid, str) else rids[i],
                    text=text,
                    input_ids=ids,
                    sampling=params,
                    seed=(seed + k + 2**63) % 2**64 - 2**63,
                    return_logprob=logprob[i],
                    logprob_start_len=start[i],
                    top_logprobs_num=top[i],
                    token_ids_logprob=token_ids[i] or None,
                    return_text_in_logprobs=body.return_text_in_logprobs,
                    return_original_logprob=original[i],
                    namespace=spaces[i],
                )
            )
    return items


def _prompts(body: GenerateBody) -> list[tuple[str | None, list[int] | None]]:
    if (body.text is None) == (body.input_ids is None):
        raise ConfigError(
            "give exactly one of text and input_ids", remedy="token ids are exact: prefer input_ids for training"
        )
    if body.text is not None:
        texts = [body.text] if isinstance(body.text, str) else body.text
        prompts: list[tuple[str | None, list[int] | None]] = [(text, None) for text in texts]
    else:
        given: Any = body.input_ids
        rows = given if given and isinstance(given[0], list) else [given]
        prompts = [(None, row) for row in rows]
    if not prompts or any(not prompt[0] and not prompt[1] for prompt in prompts):
        raise ConfigError("a prompt is empty", remedy="give at least one token id (a BOS is enough) or some text")
    return prompts


def _per_prompt(name: str, value: T | list[T], count: int) -> list[T]:
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise ConfigError(f"{name} has {len(value)} entries for {count} prompts", remedy="give one entry per prompt")
    return value


def _namespaces(body: GenerateBody, count: int) -> list[str]:
    """Of the prefix cache, per prompt: what the two strings say together; "" where neither says anything."""
    keys: list[str] = _per_prompt("extra_key", body.extra_key or "", count)
    salts: list[str] = _per_prompt("cache_salt", body.cache_salt or "", count)
    return [f"{len(salt)}:{salt}{key}" if salt or key else "" for salt, key in zip(salts, keys, strict=True)]


def _rids(rid: str | list[str] | None, count: int) -> list[str]:
    if rid is None:
        return [secrets.token_hex(16) for _ in range(count)]
    if isinstance(rid, str):
        return [rid] if count == 1 else [f"{rid}_{i}" for i in range(count)]
    rids = _per_prompt("rid", rid, count)
    if len(set(rids)) != count:
        raise ConfigError("Duplicate request ID detected", remedy="give each prompt of a batch its own rid")
    return rids


# --- replies --------------------------------------------------------------------------------------------------------


LOWEST_LOGPROB = -3.4028234663852886e38
"""The most negative finite number of fp32: what minus infinity is sent as, because JSON has no word for it."""

TokenTexts = Callable[[Sequence[int]], Sequence[str | None]]


def logprob_entries(
    logprobs: Sequence[float | None], ids: Sequence[int], texts: TokenTexts
) -> list[list[float | int | str | None]]:
    """SGLang's `[logprob, token id, text or null]`."""
    return [
        [value if value is None or value >= LOWEST_LOGPROB else LOWEST_LOGPROB, token, text]
        for value, token, text in zip(logprobs, ids, texts(ids), strict=True)
    ]


def alternative_entries(
    alternatives: Sequence[Alternatives | None], kind: Literal["top", "asked"], texts: TokenTexts
) -> list[list[list[float | int | str | None]] | None]:
    """Per position a list of entries, or null where there is nothing to tell."""
    rows: list[list[list[float | int | str | None]] | None] = []
    for one in alternatives:
        pairs = () if one is None else getattr(one, kind)
        rows.append(logprob_entries([p[0] for p in pairs], [p[1] for p in pairs], texts) if pairs else None)
    return rows


def logprob_fields(
    side: Literal["input", "output"], record: TokenRecord, item: PromptItem, texts: TokenTexts
) -> dict[str, Any]:
    """What `meta_info` says of a prompt (`input`) or of a response (`output`), as far as the request asked."""
    fields: dict[str, Any] = {f"{side}_token_logprobs": logprob_entries(record.logprobs, record.ids, texts)}
    if item.top_logprobs_num:
        fields[f"{side}_top_logprobs"] = alternative_entries(record.alternatives, "top", texts)
    if item.token_ids_logprob:
        fields[f"{side}_token_ids_logprobs"] = alternative_entries(record.alternatives, "asked", texts)
    return fields


def version_spans(versions: Sequence[int], present: int) -> list[dict[str, Any]]:
    """Half-open spans of equal versions over the output tokens; without tokens one empty span of the present one."""
    spans: list[dict[str, Any]] = []
    for position, version in enumerate(versions):
        if spans and spans[-1]["version"] == str(version):
            spans[-1]["end"] = position + 1
        else:
            spans.append({"version": str(version), "start": position, "end": position + 1})
    return spans or [{"version": str(present), "start": 0, "end": 0}]


def read_version(value: Any) -> int:
    """A version from the wire. SGLang's initial one is the word "default": that is version 0."""
    if value == "default":
        return 0
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolMismatch(
            f"weight version {value!r} is no integer", remedy="let one trainer set the engine's versions, as integers"
        ) from error


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """What comes from outside may have any form: another one than ours is a ProtocolMismatch."""
    try:
        yield
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ProtocolMismatch(
            f"{what} could not be read: {error!r}", remedy="check that the url is a rollout engine's"
        ) from error


def read_reply(data: Mapping[str, Any]) -> GenerateReply:
    """One element of a `/generate` reply, from our engine or from SGLang.

    Raises ProtocolMismatch, or what SGLang reports as an end although it is a failure.
    """
    with _reading("a reply of /generate"):
        meta = data["meta_info"]
        ids = tuple(data.get("output_ids") or ())
        entries = meta.get("output_token_logprobs") or () if ids else ()
        prompt = meta.get("input_token_logprobs") or ()
        reason = meta.get("finish_reason")
        _check_end(meta["id"], reason)
        return GenerateReply(
            rid=meta["id"],
            text=data.get("text"),
            output_ids=ids,
            output_logprobs=tuple([_finite_or_nan(entry[0]) for entry in entries]),
            weight_versions=_versions(meta, len(ids)),
            finish_reason=None if reason is None else FinishReason(reason["type"]),
            prompt_tokens=meta.get("prompt_tokens", 0),
            cached_tokens=meta.get("cached_tokens", 0),
            num_retractions=meta.get("num_retractions", 0),
            meta=meta,
            input_ids=tuple([entry[1] for entry in prompt]),
            input_logprobs=tuple([entry[0] for entry in prompt]),
        )


def _check_end(rid: str, reason: Mapping[str, Any] | None) -> None:
    """SGLang ends a response whose logits are not numbers with a stop, and a stream that it gave up with an abort."""
    if reason is None:
        return
    if reason.get("matched") == "NaN happened":
        raise RolloutError(
            f"request {rid}: the engine's logits were not numbers", remedy="check the last refit and the learning rate"
        )
    if reason["type"] == "abort" and reason.get("status_code") is not None:
        raise stock_error(reason["status_code"], reason.get("message"), f"request {rid}", call="generate")


def _finite_or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _versions(meta: Mapping[str, Any], count: int) -> tuple[int, ...]:
    spans = meta.get("weight_versions")
    if spans is None:
        return (read_version(meta.get("weight_version", "default")),) * count
    versions: list[int] = []
    for span in spans:
        missing = count + 1 - len(versions)  # one too many is as wrong as a million
        versions += [read_version(span["version"])] * min(span["end"] - span["start"], missing)
    cut = (meta.get("finish_reason") or {}).get("message") == "Abort in waiting queue"
    return tuple(versions[:count] if cut else versions)  # SGLang loses the last tokens of such a response


def read_memory(data: Any, verb: str) -> MemoryReport:
    """Of a release (`freed`) or a resume (`resumed`). SGLang says nothing (`null`): an empty report."""
    if data is None:
        return MemoryReport(tags={}, rss_bytes=0, seconds=0.0)
    with _reading("a report of memory"):
        tags = {tag: TagBytes(b["claimed_bytes"], b[f"{verb}_bytes"]) for tag, b in data["tags"].items()}
        return MemoryReport(tags=tags, rss_bytes=data["rss_bytes"], seconds=data["seconds"])


def read_server_info(data: Mapping[str, Any], name: str) -> ServerInfo:
    """Of our engine, or of SGLang, which states neither manifest nor fingerprint."""
    with _reading("a reply of /server_info"):
        ours = data.get("zerogap") or {}
        states = data.get("internal_states") or [{}]
        return ServerInfo(
            engine=ours.get("engine", name),
            pid=ours.get("pid", 0),
            model_path=data.get("model_path", ""),
            dtype=ours.get("dtype", data.get("dtype", "")),
            weight_version=read_version(ours.get("weight_version", states[0].get("weight_version", "default"))),
            state=ours.get("state", "unknown"),
            manifest_digest=ours.get("manifest_digest"),
            fingerprint=ours.get("fingerprint"),
            memory=ours.get("memory", {}),
            rss_bytes=ours.get("rss_bytes", 0),
            communication=ours.get("communication", {}),
            raw=data,
        )


def read_endpoint(data: Any) -> RankEndpoint:
    """Of a reply of `/remote_instance_transfer_engine_info`, of our engine; a stock server's is for another library."""
    with _reading("a reply of /remote_instance_transfer_engine_info"):
        return RankEndpoint.model_validate(data["zerogap"])


def distributed_body(header: BucketHeader) -> dict[str, Any]:
    """Of `/update_weights_from_distributed`: SGLang's lists, and ours beside them."""
    return {
        "names": [entry.name for entry in header.entries],
        "dtypes": [entry.dtype for entry in header.entries],
        "shapes": [list(entry.shape) for entry in header.entries],
        "group_name": header.group_name,
        "flush_cache": False,
        "abort_all_requests": False,
        "bucket": header.model_dump(mode="json"),
    }


# --- errors ---------------------------------------------------------------------------------------------------------

_STATUS: dict[type[ZerogapError], int] = {
    errors.ConfigError: 400,
    errors.EngineUnreachable: 503,
    errors.ProtocolMismatch: 500,
    errors.EngineRejected: 400,
    errors.EngineStateError: 409,
    errors.StaleWeights: 409,
    errors.RefitError: 400,
    errors.ParityError: 409,
    errors.DataError: 400,
    errors.CheckpointError: 400,
    errors.ZerogapError: 500,
}
"""Class -> HTTP status, for it and the classes below it that have none of their own."""
_WORDS = {
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    409: "Conflict",
    413: "Content Too Large",
    415: "Unsupported Media Type",
}


def status_of(error: ZerogapError) -> int:
    if isinstance(error.details.get("status"), int):
        return error.details["status"]
    return next(_STATUS[cls] for cls in type(error).__mro__ if cls in _STATUS)


def error_json(error: ZerogapError, status: int | None = None) -> dict[str, Any]:
    """One body that every reader of SGLang's error shapes understands; ours is under `zerogap`."""
    status = status_of(error) if status is None else status
    return {
        "object": "error",
        "message": error.what,
        "type": _WORDS.get(status, str(status)),
        "param": None,
        "code": status,
        "success": False,
        "error": {"message": error.what},
        "zerogap": error.to_wire(),
    }


def stream_error_json(error: ZerogapError) -> dict[str, Any]:
    """An error after a stream began, when the status 200 has been sent already."""
    status = status_of(error)
    kind = "invalid_request_error" if status < 500 else "internal_error"
    body = {"message": error.what, "type": kind, "code": status, "retryable": False}
    return {"error": body, "zerogap": error.to_wire()}


def read_error(status: int, body: bytes, where: str, *, call: str = "") -> ZerogapError:
    """The error of a reply that is not a success, in any of SGLang's shapes or in ours; ours returns as its class."""
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        data = body.decode(errors="replace").strip()
    if not isinstance(data, dict) or not isinstance(data.get("zerogap"), dict):
        return stock_error(status, data, where, call=call)
    error = errors.from_wire(data["zerogap"])
    error.what = f"{where}: {error.what}"
    error.args = (error.what,)
    return error

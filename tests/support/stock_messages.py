"""What the stock double reads and answers: SGLang's bodies with its defaults, and its five shapes of an error."""

from __future__ import annotations

from typing import Any, Literal

from fastapi.responses import JSONResponse
from pydantic import BaseModel

SAMPLING_FIELDS = {
    "max_new_tokens", "min_new_tokens", "temperature", "top_p", "top_k", "min_p", "frequency_penalty",
    "presence_penalty", "repetition_penalty", "stop", "stop_token_ids", "stop_regex", "ignore_eos",
    "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "n", "logit_bias", "sampling_seed",
    "stream_interval", "custom_params", "json_schema", "regex", "ebnf",
}  # fmt: skip


class Pause(BaseModel):
    mode: Literal["abort", "retract", "in_place"] = "abort"


class Abort(BaseModel):
    rid: str = ""
    abort_all: bool = False


class Memory(BaseModel):
    tags: list[str] | None = None


class Begin(BaseModel):
    selector: Literal["all", "target", "draft"] = "all"


class Update(BaseModel):
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    load_format: str | None = None


class FromTensor(Update):
    serialized_named_tensors: list[str]


class FromDisk(Update):
    model_path: str


class Group(BaseModel):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class Leave(BaseModel):
    group_name: str = "weight_update_group"


class FromDistributed(Update):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"


class Version(BaseModel):
    new_version: str
    abort_all_requests: bool = True


class ByName(BaseModel):
    name: str
    truncate_size: int = 100


class Empty(BaseModel): ...


class Refused(Exception):
    def __init__(self, status: int, body: Any) -> None:
        self.status, self.body = status, body


def flat(status: int, message: str) -> Refused:
    kind = "Bad Request" if status == 400 else str(status)
    return Refused(status, {"object": "error", "message": message, "type": kind, "param": None, "code": status})


def value_error(message: str) -> Refused:
    return Refused(400, {"error": {"message": message}})


def verdict(good: bool, message: str, **fields: Any) -> JSONResponse:
    return JSONResponse({"success": good, "message": message, **fields}, 200 if good else 400)

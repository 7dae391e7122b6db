"""The only place for the bodies of SGLang's calls by which weights arrive through a group, a socket, a folder of deltas
or an adapter. Fields and defaults are SGLang's.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from zerogap.wire.messages import Body, Selector
from zerogap.wire.tensors import DEFAULT_GROUP, MAX_RANKS, BucketHeader

Port = Annotated[int, Field(ge=1, le=65535)]
Count = Annotated[int, Field(ge=0)]


class InitGroupBody(Body):
    master_address: Annotated[str, Field(min_length=1)]
    master_port: Port
    rank_offset: Annotated[int, Field(ge=0, le=MAX_RANKS)]
    world_size: Annotated[int, Field(ge=1, le=MAX_RANKS)]
    group_name: Annotated[str, Field(min_length=1)] = DEFAULT_GROUP
    backend: str = "nccl"


class DestroyGroupBody(Body):
    group_name: Annotated[str, Field(min_length=1)] = DEFAULT_GROUP


class UpdateFromDistributedBody(Body):
    """`bucket` is ours: the tensors with places and digests, of a session with a plan. The lists then say the same."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[Count]]
    group_name: str = DEFAULT_GROUP
    load_format: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    selector: Selector = "all"
    torch_empty_cache: bool = False
    bucket: Annotated[BucketHeader | None, Field(strict=False)] = None


class UpdateFromIpcBody(Body):
    zmq_handles: dict[str, str]
    flush_cache: bool = True
    weight_version: str | None = None
    torch_empty_cache: bool = False


class PullWeightsBody(Body):
    local_checkpoint_dir: str = ""
    source_dir: Annotated[str, Field(min_length=1)]
    target_version: Count


class LoadAdapterBody(Body):
    lora_name: str
    lora_path: str
    pinned: bool = False


class LoadAdapterFromTensorsBody(Body):
    lora_name: str
    config_dict: dict[str, Any]
    serialized_named_tensors: list[str]
    pinned: bool = False
    added_tokens_config: dict[str, Any] | None = None
    load_format: str | None = None
    expected_checksums: dict[str, str] | None = None


class UnloadAdapterBody(Body):
    lora_name: str

"""The only place that maps calls about groups and endpoints, by which weights come from other hosts, to the core."""

from __future__ import annotations

from functools import partial

from fastapi import Request, Response

from zerogap.engine.calls import Core, call
from zerogap.engine.control import relabelled, version_of
from zerogap.engine.replies import json_reply, success
from zerogap.engine.weights import EngineWeights
from zerogap.errors import ConfigError, EngineRejected, ZerogapError
from zerogap.threads import in_daemon_thread
from zerogap.weights.groups import join
from zerogap.wire import codec, transfer_messages
from zerogap.wire.admin_messages import RankQuery
from zerogap.wire.messages import EmptyBody
from zerogap.wire.tensors import TensorSpec, UpdateGroup


class GroupRoutes:
    """SGLang's calls for weights by broadcast; a stock client may be rank 0."""

    def __init__(self, core: Core) -> None:
        self.core = core

    async def init_weights_update_group(self, body: transfer_messages.InitGroupBody, _: Request) -> Response:
        spec = codec.read_body(UpdateGroup, body.model_dump(exclude={"rank_offset"}))
        # Beside the core's thread: it generates while the ranks find each other.
        group = await in_daemon_thread(lambda: join(spec, body.rank_offset), name="join-group")
        await call(self.core, "groups", act=lambda groups: groups.adopt(group))
        return success("Succeeded to initialize custom process group.")

    async def destroy_weights_update_group(self, body: transfer_messages.DestroyGroupBody, _: Request) -> Response:
        if not await self._leave(body.group_name):
            raise EngineRejected(
                f"The group to be destroyed does not exist: {body.group_name!r}",
                remedy="an engine leaves a group by itself when a broadcast in it fails: nothing is left to destroy",
                status=400,
            )
        return success("Succeeded to destroy custom process group.")

    async def update_weights_from_distributed(
        self, body: transfer_messages.UpdateFromDistributedBody, _: Request
    ) -> Response:
        if body.bucket is not None:
            act = partial(EngineWeights.load, header=body.bucket)
            name = body.bucket.group_name or body.group_name
        else:
            act, name = partial(EngineWeights.load_unplanned, **_unplanned(body)), body.group_name
        number = version_of(body.weight_version)
        try:
            await call(
                self.core,
                "load_weights",
                call="update_weights_from_distributed",
                act=act,
                weight_version=number,
                abort_all_requests=body.abort_all_requests,
            )
        except ZerogapError:
            await self._leave(name)  # the other ranks must not wait for one that does not receive
            raise
        return success("Succeeded to update parameter online." + relabelled(number))

    async def remote_instance_transfer_engine_info(self, body: EmptyBody, request: Request) -> Response:
        codec.read_body(RankQuery, dict(request.query_params))
        found = await call(self.core, "transfer_endpoint")
        places = {place["name"]: [place["address"], place["num_bytes"], 1] for place in found["places"]}
        return json_reply(
            {"rank": 0, "remote_instance_transfer_engine_info": [found["agent"], places], "zerogap": found}
        )

    async def _leave(self, group_name: str) -> bool:
        return (await call(self.core, "groups", act=lambda groups: groups.leave(group_name)))["found"]


def _unplanned(body: transfer_messages.UpdateFromDistributedBody) -> dict[str, object]:
    if not len(body.names) == len(body.dtypes) == len(body.shapes):
        raise ConfigError(
            f"{len(body.names)} names, {len(body.dtypes)} dtypes and {len(body.shapes)} shapes",
            remedy="give one of each per tensor, in the order in which they are broadcast",
        )
    if body.load_format not in (None, "flattened_bucket"):
        raise ConfigError(f"load_format {body.load_format!r}", remedy="leave it out, or use flattened_bucket")
    specs = [
        codec.read_body(TensorSpec, {"name": name, "dtype": dtype, "shape": shape})
        for name, dtype, shape in zip(body.names, body.dtypes, body.shapes, strict=True)
    ]
    return {"specs": specs, "group_name": body.group_name, "flattened": body.load_format is not None}

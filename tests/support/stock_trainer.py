"""A trainer as SGLang's users write one: rank 0 of a group that it makes with torch's own private helper.

`python -m support.stock_trainer URL FLATTENED`: gives the engine the tiny model with seed 7, then prints the replies.
"""

from __future__ import annotations

import asyncio
import json
import sys
from datetime import timedelta
from typing import Any

import httpx
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _new_process_group_helper, _world
from torch.distributed.rendezvous import rendezvous

from support.tiny import TINY_QWEN3, tiny_decoder

NAME = "stock_group"


def _init_custom_process_group(url: str, world_size: int) -> Any:
    store, rank, world_size = next(rendezvous(url, 0, world_size, timeout=timedelta(seconds=20)))
    store.set_timeout(timedelta(seconds=20))
    group, _ = _new_process_group_helper(
        world_size,
        rank,
        [],
        "gloo",
        dist.PrefixStore(NAME, store),
        group_name=NAME,
        timeout=timedelta(seconds=20),
    )
    _world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group


async def _main(url: str, flattened: bool) -> None:
    weights = {
        name: tensor.detach().contiguous() for name, tensor in tiny_decoder(TINY_QWEN3, seed=7).hf_tensors().items()
    }
    port = dist.TCPStore("127.0.0.1", 0, 1, True).port  # freed again: how stock trainers pick one
    async with httpx.AsyncClient(base_url=url, timeout=40, trust_env=False) as http:

        async def post(path: str, **body: Any) -> Any:
            return (await http.post(path, json=body)).json()

        replies = [await post("/pause_generation", mode="retract")]
        joining = asyncio.create_task(
            post("/init_weights_update_group", master_address="127.0.0.1", master_port=port, rank_offset=1,
                 world_size=2, group_name=NAME, backend="gloo")
        )  # fmt: skip
        group = await asyncio.to_thread(_init_custom_process_group, f"tcp://127.0.0.1:{port}", 2)
        replies += [await joining, await post("/begin_weight_update", selector="all")]
        names = list(weights)
        for part in (names[:3], names[3:]):
            call = asyncio.create_task(
                post("/update_weights_from_distributed", names=part, group_name=NAME, weight_version="7",
                     dtypes=[str(weights[n].dtype).removeprefix("torch.") for n in part],
                     shapes=[list(weights[n].shape) for n in part], flush_cache=False,
                     load_format="flattened_bucket" if flattened else None)
            )  # fmt: skip
            await asyncio.sleep(0)
            if flattened:
                flat = torch.cat([weights[n].view(-1).view(torch.uint8) for n in part])
                await asyncio.to_thread(dist.broadcast, flat, 0, group)
            else:
                for n in part:
                    await asyncio.to_thread(dist.broadcast, weights[n], 0, group)
            replies.append(await call)
        replies += [
            await post("/end_weight_update"),
            await post("/destroy_weights_update_group", group_name=NAME),
            await post("/continue_generation"),
        ]
        print(json.dumps(replies))


if __name__ == "__main__":
    asyncio.run(_main(sys.argv[1], sys.argv[2] == "flattened"))

"""The only place that knows what a stock SGLang server must not be asked, because it would die, hang or mislead."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerogap.errors import ConfigError, MemoryReleaseError
from zerogap.wire.api import GenerateBody


def request_fault(body: GenerateBody, where: str) -> ConfigError | None:
    """The error of a request of which SGLang would ignore a part without a word, else None."""
    original = body.return_original_logprob
    if any(original) if isinstance(original, list) else original:
        return ConfigError(
            f"{where}: a stock SGLang server cannot leave the temperature out of one request's logprobs",
            remedy="start it with SGLANG_RETURN_ORIGINAL_LOGPROB=1, or sample at temperature 1",
        )
    given = body.sampling_params
    for params in given if isinstance(given, list) else [given]:
        if params is not None and params.n > 1:
            return ConfigError(
                f"{where}: n={params.n} of a stock SGLang server replaces the rid, and gives every sample one seed",
                remedy="send the prompt n times in one call, each with a sampling_seed and a rid of its own",
            )
    return None


def release_fault(server_info: Mapping[str, Any], where: str) -> MemoryReleaseError | None:
    """The error of a release that would answer 200 and free nothing, else None."""
    if server_info.get("enable_memory_saver"):
        return None
    return MemoryReleaseError(
        f"{where}: a stock SGLang server without its memory saver says that it released memory, and frees none",
        remedy="start it with --enable-memory-saver",
    )


def num_ranks(server_info: Mapping[str, Any], where: str) -> int:
    """How many ranks of the server receive weights. Raises ConfigError for a layout that cannot be updated."""
    for name in ("dp_size", "pp_size"):
        if server_info.get(name, 1) != 1:
            raise ConfigError(
                f"{where}: a stock SGLang server with {name}={server_info[name]} dies of a weight update, or takes "
                "a part of it",
                remedy=f"start it with {name} 1, and several servers instead",
            )
    return server_info.get("tp_size", 1)


def distributed_body(ours: Mapping[str, Any], *, flattened: bool) -> dict[str, Any]:
    """Of `/update_weights_from_distributed`, without what only our engine reads. `flattened`: all bytes in one go."""
    kept = {name: value for name, value in ours.items() if name != "bucket"}
    return kept | {"load_format": "flattened_bucket" if flattened else None}

"""The only place that knows what a stock SGLang server must not be asked, because it would die, hang or mislead."""

from __future__ import annotations

from typing import Any

from zerogap.errors import ConfigError, MemoryReleaseError
from zerogap.wire.api import GenerateBody


def check_request(body: GenerateBody, where: str) -> None:
    """Raises ConfigError for what SGLang would ignore without a word."""
    if body.return_original_logprob is True or (
        isinstance(body.return_original_logprob, list) and any(body.return_original_logprob)
    ):
        raise ConfigError(
            f"{where}: a stock SGLang server cannot leave the temperature out of one request's logprobs",
            remedy="start it with SGLANG_RETURN_ORIGINAL_LOGPROB=1, or sample at temperature 1",
        )
    given = body.sampling_params
    for params in given if isinstance(given, list) else [given]:
        if params is not None and params.n > 1:
            raise ConfigError(
                f"{where}: n={params.n} of a stock SGLang server replaces the rid, and gives every sample one seed",
                remedy="send the prompt n times in one call, each with a sampling_seed and a rid of its own",
            )


def check_release(server_info: dict[str, Any], where: str) -> None:
    """Raises MemoryReleaseError if a release would answer 200 and free nothing."""
    if not server_info.get("enable_memory_saver"):
        raise MemoryReleaseError(
            f"{where}: a stock SGLang server without its memory saver says that it released memory, and frees none",
            remedy="start it with --enable-memory-saver",
        )

"""The only place for what `config.json` says of sliding windows, read as `transformers` reads it.

Qwen2 and Qwen3 have one width, `sliding_window`, which `use_sliding_window` switches on, for the layers that
`layer_types` names, or without that list for those from `max_window_layers` on. Mistral has one width for all layers,
or null. Llama has none, and a checkpoint of it that asks for some is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from zerogap.errors import ConfigError

Windows = tuple[int | None, ...]
_LAYERS_DIFFER = ("qwen2", "qwen3")
_SLIDING, _FULL = "sliding_attention", "full_attention"
# What transformers takes where a config.json is silent.
_DEFAULT_WIDTH, _DEFAULT_FIRST_LAYER = 4096, 28


def read_windows(hf: Mapping[str, Any], model_type: str) -> Windows:
    """The window of each layer; empty where no layer has one. Raises ConfigError for what has no exact meaning."""
    num_layers = int(hf["num_hidden_layers"])
    given = hf.get("layer_types")
    on = model_type == "mistral" or hf.get("use_sliding_window")
    width = hf.get("sliding_window", _DEFAULT_WIDTH) if on else None
    if model_type in _LAYERS_DIFFER:
        first = int(hf.get("max_window_layers", _DEFAULT_FIRST_LAYER))
        slides = [width is not None and layer >= first for layer in range(num_layers)]
        slides = slides if given is None else [kind == _SLIDING for kind in given]
    else:
        slides = [width is not None] * num_layers
    types = [_SLIDING if slide else _FULL for slide in slides]
    if given is not None and list(given) != types:
        raise ConfigError(
            f"layer_types of this {model_type} checkpoint are {', '.join(map(str, dict.fromkeys(given)))}, "
            f"where {', '.join(dict.fromkeys(types))} is meant",
            remedy=f"use a checkpoint whose layers are {_FULL}, or in the Qwen2 and Qwen3 families {_SLIDING}",
        )
    if not any(slides):
        return ()
    if width is None:
        raise ConfigError(
            f"layer_types names {_SLIDING}, but no sliding_window is on",
            remedy="set use_sliding_window to true and sliding_window to a number of keys, or mend layer_types",
        )
    return tuple(int(width) if slide else None for slide in slides)


def windows_to_hf(windows: Windows, model_type: str) -> dict[str, Any]:
    """The keys of `config.json`; the inverse of `read_windows`."""
    width = max((w for w in windows if w is not None), default=None)
    if model_type == "mistral":
        return {"sliding_window": width}
    if width is None:
        return {}
    first = next(layer for layer, window in enumerate(windows) if window is not None)
    return {
        "use_sliding_window": True,
        "sliding_window": width,
        "max_window_layers": first,
        "layer_types": [_FULL if window is None else _SLIDING for window in windows],
    }


def refuse_inexpressible(windows: Sequence[int | None], model_type: str, num_layers: int) -> None:
    """Raises ConfigError for windows that no checkpoint of this family can hold."""
    widths = {w for w in windows if w is not None}
    if model_type == "llama" and widths:
        wrong = "the llama family has none"
    elif windows and len(windows) != num_layers:
        wrong = f"there are {len(windows)} for {num_layers} layers"
    elif len(widths) > 1 or min(widths, default=1) < 1:
        wrong = f"a model has one width, of at least 1 key, not {', '.join(map(str, sorted(widths)))}"
    elif model_type not in _LAYERS_DIFFER and len(set(windows)) > 1:
        wrong = f"the layers of a {model_type} model all have one, or none has"
    else:
        return
    raise ConfigError(f"sliding windows: {wrong}", remedy="check config.json of the model")

"""The only place that reads and writes weights as Hugging Face folders: safetensors files, with an index or without."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from zerogap.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
COMPANION_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "generation_config.json",
)
"""What a model folder holds beside weights and config.json; `save` copies those that exist."""

_FLOATS = {"F64", "F32", "F16", "BF16"}
_DERIVED = ".rotary_emb.inv_freq"
"""Suffix of a constant that early Llama checkpoints carry beside the weights; the config says the same."""

_MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class _Header:
    file: Path
    dtype: str
    shape: tuple[int, ...]


def read_tensors(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every weight in the folder, one in memory at a time. Raises CheckpointError for a damaged one.

    The shards are checked against the index, both ways, before the first tensor is read.
    """
    headers = _read_headers(Path(folder))
    for file in dict.fromkeys(header.file for header in headers.values()):
        with _open(file) as shard:
            for name in shard.keys():  # noqa: SIM118  a safe_open handle is no mapping
                yield name, shard.get_tensor(name)


def load_into(hf_tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Copies the folder's weights into `hf_tensors` (name -> view), each name exactly once, cast to the view's dtype.

    All names, shapes and kinds are compared first; on CheckpointError nothing has been written, except when the file
    holds a head that differs from the embedding to which the model ties it.
    """
    headers = _read_headers(Path(folder))
    tied_head = HEAD in headers and HEAD not in hf_tensors and EMBEDDING in hf_tensors
    _compare(hf_tensors, {name: h for name, h in headers.items() if not (tied_head and name == HEAD)}, Path(folder))
    if tied_head:
        _require_tied(headers)
    with torch.no_grad():
        for name, tensor in read_tensors(folder):
            if name in hf_tensors:
                hf_tensors[name].copy_(tensor)


def save(
    folder: Path,
    tensors: Mapping[str, Tensor],
    config_hf: Mapping[str, Any],
    *,
    copy_from: Path | None,
    max_shard_bytes: int = 5 << 30,
) -> None:
    """Writes a folder that `transformers` loads: weights, config.json, and the companion files of `copy_from`.

    Files are staged inside the folder and synced to disk, then moved into place; config.json moves last, so a folder
    without one is incomplete. Other files of the folder are left alone. A tied head is not written.
    """
    folder = Path(folder)
    staging = folder / f".saving-{os.getpid()}"
    shutil.rmtree(staging, ignore_errors=True)
    try:
        staging.mkdir(parents=True)
        names = _write_weights(staging, _without_tied_head(tensors, config_hf), max_shard_bytes)
        names += _write_companions(staging, config_hf, copy_from)
        _write_json(staging / "config.json", config_hf)
        for name in (*names, "config.json"):
            shutil.copymode(staging / "config.json", staging / name)  # safetensors makes files for their owner only
            _sync(staging / name)
        _move_into_place(staging, folder, (*names, "config.json"))
    except OSError as error:
        raise CheckpointError(
            f"cannot write the model folder {folder}: {error}", remedy="check free space and rights on that disk"
        ) from error
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _read_headers(folder: Path) -> dict[str, _Header]:
    """Name -> where it is and what it is, from the files' headers alone."""
    index = folder / INDEX_FILE
    if index.is_file():
        return _read_indexed(folder, index)
    single = folder / SINGLE_FILE
    if not single.is_file():
        raise CheckpointError(
            f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}",
            remedy="give a Hugging Face model folder with safetensors weights; convert pickled ones (.bin, .pth) first",
        )
    return _file_headers(single)


def _read_indexed(folder: Path, index: Path) -> dict[str, _Header]:
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(file) for file in weight_map.values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{index} is no index: {error!r}", remedy="copy the model folder again; this file is damaged"
        ) from error
    found: dict[str, _Header] = {}
    for file in sorted(files):
        if Path(file).name != file:
            raise CheckpointError(
                f"{index} names {file!r}, outside its own folder", remedy="use a model folder from a source you trust"
            )
        in_file = _file_headers(folder / file)
        listed = {name for name, where in weight_map.items() if where == file}
        _refuse(
            {f"{file} lacks": listed - in_file.keys(), f"{file} also holds": in_file.keys() - listed},
            f"{index.name} and its files disagree",
            "copy the model folder again: index and files are from two versions",
        )
        found |= in_file
    return found


def _file_headers(file: Path) -> dict[str, _Header]:
    with _open(file) as shard:
        slices = {name: shard.get_slice(name) for name in shard.keys()}  # noqa: SIM118  no mapping
        return {n: _Header(file, str(s.get_dtype()), tuple(s.get_shape())) for n, s in slices.items()}


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"cannot read {file}: {error}", remedy="copy the model folder again; this file is missing or damaged"
        ) from error


def _compare(hf_tensors: Mapping[str, Tensor], headers: Mapping[str, _Header], folder: Path) -> None:
    extra = {name for name in headers.keys() - hf_tensors.keys() if not name.endswith(_DERIVED)}
    both = sorted(headers.keys() & hf_tensors.keys())
    shapes = {
        f"{n} (file {list(headers[n].shape)}, model {list(hf_tensors[n].shape)})"
        for n in both
        if headers[n].shape != tuple(hf_tensors[n].shape)
    }
    kinds = {
        f"{n} (file {headers[n].dtype}, model {hf_tensors[n].dtype})"
        for n in both
        if not (headers[n].dtype in _FLOATS and hf_tensors[n].is_floating_point())
    }
    missing = hf_tensors.keys() - headers.keys()
    head = HEAD in missing or HEAD in extra
    _refuse(
        {"missing": missing, "not of this model": extra, "of another shape": shapes, "of another kind": kinds},
        f"the weights in {folder} are not those of its config.json",
        "compare tie_word_embeddings in config.json with what the file holds"
        if head
        else "use weights and config.json of one model; quantised weights must be dequantised first",
    )


def _refuse(faults: Mapping[str, set[str]], what: str, remedy: str) -> None:
    """Raises CheckpointError with every non-empty fault, if there is any."""
    listed = []
    for label, names in faults.items():
        if names:
            some = sorted(names)[:_MAX_NAMED]
            more = f" and {len(names) - len(some)} more" if len(names) > len(some) else ""
            listed.append(f"{label} {', '.join(some)}{more}")
    if listed:
        raise CheckpointError(f"{what}: {'; '.join(listed)}", remedy=remedy)


def _require_tied(headers: Mapping[str, _Header]) -> None:
    values = []
    for name in (HEAD, EMBEDDING):
        with _open(headers[name].file) as shard:
            values.append(shard.get_tensor(name))
    if not torch.equal(*values):
        raise _untied()


def _untied() -> CheckpointError:
    return CheckpointError(
        f"{HEAD} differs from {EMBEDDING}, but config.json ties them",
        remedy="set tie_word_embeddings to false in config.json if the model has a head of its own",
    )


def _without_tied_head(tensors: Mapping[str, Tensor], config_hf: Mapping[str, Any]) -> dict[str, Tensor]:
    kept = dict(tensors)
    if not config_hf.get("tie_word_embeddings"):
        return kept
    head = kept.pop(HEAD, None)
    if head is not None and not torch.equal(head, kept[EMBEDDING]):
        raise _untied()
    return kept


def _write_weights(staging: Path, tensors: Mapping[str, Tensor], max_shard_bytes: int) -> list[str]:
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        _write_shard(staging / SINGLE_FILE, shards[0])
        return [SINGLE_FILE]
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_shard(staging / file, shard)
        weight_map |= dict.fromkeys(shard, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(staging / INDEX_FILE, {"metadata": {"total_size": total}, "weight_map": weight_map})
    return [*dict.fromkeys(weight_map.values()), INDEX_FILE]


def _write_shard(path: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file({name: _own_storage(tensor) for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def _own_storage(tensor: Tensor) -> Tensor:
    """safetensors refuses views that share a storage, as those into a fused parameter do."""
    tensor = tensor.detach().cpu().contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _write_companions(staging: Path, config_hf: Mapping[str, Any], copy_from: Path | None) -> list[str]:
    written = [name for name in COMPANION_FILES if copy_from is not None and (Path(copy_from) / name).is_file()]
    for name in written:
        shutil.copyfile(Path(copy_from or ".") / name, staging / name)
    if "generation_config.json" not in written:
        ids = {key: config_hf.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
        _write_json(staging / "generation_config.json", ids)
        written.append("generation_config.json")
    return written


def _move_into_place(staging: Path, folder: Path, names: tuple[str, ...]) -> None:
    (folder / "config.json").unlink(missing_ok=True)
    for stale in (*folder.glob("model*.safetensors"), folder / INDEX_FILE):
        stale.unlink(missing_ok=True)
    for name in names:
        (staging / name).replace(folder / name)
    _sync(folder)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

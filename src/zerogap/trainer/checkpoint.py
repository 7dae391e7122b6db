"""The only place that writes and reads the state of a run: all that a resumed run needs to go on bit for bit.

    <root>/step-000012/             a Hugging Face folder that transformers loads, and beside the weights:
        trainer/optimizer.safetensors   masters that are not the weights themselves, and the moments
        trainer/state.json              finished steps, position in the data, random state

A checkpoint is written under a hidden name, synced, and renamed: a folder with the name above is complete. The learning
rate has no state: it is a closed form of the step.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from zerogap.errors import CheckpointError
from zerogap.model.checkpoint import load_into
from zerogap.model.checkpoint import save as save_model
from zerogap.trainer.trainer import Trainer

FORMAT = 1
_NAME = re.compile(r"step-(\d{6,})")
_OPTIMIZER, _STATE = Path("trainer/optimizer.safetensors"), Path("trainer/state.json")


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands: `num_steps_done` is also the next step; `data` is what `PromptSource.state` gave.

    `extra` holds what else the caller needs (JSON), such as the weight version.
    """

    num_steps_done: int
    data: Mapping[str, Any]
    extra: Mapping[str, Any]


def save(root: Path, trainer: Trainer, progress: Progress, *, copy_from: Path | None) -> Path:
    """Writes one checkpoint and returns its folder. `copy_from` is the model folder that holds the tokenizer.

    On CheckpointError the earlier checkpoints stand as they were.
    """
    final = root / f"step-{progress.num_steps_done:06d}"
    partial = root / f".{final.name}.partial"
    try:
        _remove_leftovers(root)
        (partial / _STATE).parent.mkdir(parents=True)
        config = trainer.decoder.config.to_hf(str(trainer.decoder.dtype).removeprefix("torch."))
        save_model(partial, trainer.hf_tensors(), config, copy_from=copy_from)
        save_file(trainer.optimizer_state(), partial / _OPTIMIZER)
        (partial / _STATE).write_text(json.dumps(_state(progress)), encoding="utf-8")
        shutil.copymode(partial / _STATE, partial / _OPTIMIZER)  # safetensors makes files for their owner only
        for path in (partial / _OPTIMIZER, partial / _STATE, (partial / _STATE).parent, partial):
            _sync(path)
        _put_in_place(partial, final)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the checkpoint {final}: {error}", remedy="check free space and rights on that disk"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final


def latest(root: Path) -> Path | None:
    """The complete checkpoint with the most steps, or None."""
    found = [(int(m[1]), path) for path in root.glob("step-*") if (m := _NAME.fullmatch(path.name))]
    return max((item for item in found if (item[1] / _STATE).is_file()), default=(0, None))[1]


def load(folder: Path, trainer: Trainer) -> Progress:
    """Puts the trainer, and the random state of torch and Python, where the checkpoint left them.

    Raises CheckpointError for a folder that is damaged or of another model; the trainer must not be used after that.
    """
    state = _read_state(folder / _STATE)
    load_into(trainer.decoder.hf_tensors(), folder)
    try:
        optimizer = load_file(folder / _OPTIMIZER)
    except (OSError, SafetensorError) as error:
        raise _damaged(folder / _OPTIMIZER, error) from error
    trainer.optimizer.load(optimizer)
    try:
        version, internal, gauss = state["python_random"]
        random.setstate((version, tuple(internal), gauss))
        torch.set_rng_state(torch.tensor(list(bytes.fromhex(state["torch_random"])), dtype=torch.uint8))
        return Progress(int(state["num_steps_done"]), state["data"], state["extra"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise _damaged(folder / _STATE, error) from error


def _state(progress: Progress) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "num_steps_done": progress.num_steps_done,
        "data": dict(progress.data),
        "extra": dict(progress.extra),
        "python_random": random.getstate(),
        "torch_random": bytes(torch.get_rng_state().tolist()).hex(),
    }


def _read_state(path: Path) -> dict[str, Any]:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        version = state["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, error) from error
    if version != FORMAT:
        raise CheckpointError(
            f"{path} has format {version!r}, this version reads {FORMAT}",
            remedy="resume with the version of zerogap that wrote it; its weights load anywhere as a model folder",
        )
    return state


def _damaged(path: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path} is missing or damaged: {error!r}", remedy="resume from an earlier checkpoint of the run"
    )


def _put_in_place(partial: Path, final: Path) -> None:
    """A checkpoint of the same step (written again after a resume) is set aside first, never mixed with the new one."""
    aside = final.with_name(f".{final.name}.replaced")
    if final.exists():
        final.rename(aside)
    try:
        partial.rename(final)
    except OSError:
        if aside.exists():
            aside.rename(final)
        raise
    _sync(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def _remove_leftovers(root: Path) -> None:
    """What a run that died while saving left behind; a run folder has one writer."""
    for path in root.glob(".step-*"):
        shutil.rmtree(path, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

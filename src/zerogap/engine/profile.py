"""The only place for profiles of the engine: some steps under torch's profiler, written as a Chrome trace."""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from zerogap.errors import ConfigError, EngineRejected, EngineStateError
from zerogap.wire.admin_messages import MAX_PROFILED_STEPS

logger = logging.getLogger(__name__)

FOLDER_VARIABLE = "SGLANG_TORCH_PROFILER_DIR"


def profile_root() -> Path:
    """The only folder under which traces are written."""
    return Path(os.environ.get(FOLDER_VARIABLE) or Path(tempfile.gettempdir()) / "zerogap-profiles")


class StepProfiler:
    """Use it from the thread that makes the steps: the profiler sees that one."""

    def __init__(self) -> None:
        self._profile: profile | None = None
        self._path, self._steps_left = Path(), 0

    def start(
        self,
        *,
        output_dir: str | None,
        num_steps: int | None,
        activities: Sequence[str],
        with_stack: bool,
        record_shapes: bool,
        name: str,
    ) -> Path:
        """The file that the trace will be in. It is written by `stop`, or after so many steps."""
        if self._profile is not None:
            raise EngineStateError(
                f"a profile is being taken already, for {self._path}", remedy="call stop_profile first"
            )
        folder = _made_inside(profile_root(), output_dir)
        kinds = [ProfilerActivity.CPU]
        if "GPU" in activities and torch.cuda.is_available():
            kinds.append(ProfilerActivity.CUDA)
        taken = profile(
            activities=kinds, with_stack=with_stack, record_shapes=record_shapes, profile_memory="MEM" in activities
        )
        taken.start()
        self._path = folder / f"{name}-{time.time_ns()}.trace.json.gz"
        self._profile, self._steps_left = taken, num_steps or MAX_PROFILED_STEPS
        return self._path

    def stepped(self) -> None:
        """Counts a step; the last of the bounded number writes the trace. A lost trace is no fault of a step."""
        if self._profile is not None:
            self._steps_left -= 1
            if not self._steps_left:
                try:
                    self.stop()
                except EngineRejected as error:
                    logger.error("%s", error)

    def stop(self) -> Path:
        """Writes the trace."""
        if self._profile is None:
            raise EngineStateError("no profile is being taken", remedy="call start_profile first")
        taken, self._profile = self._profile, None
        try:
            taken.stop()
            taken.export_chrome_trace(str(self._path))
        except (OSError, RuntimeError) as error:
            raise EngineRejected(
                f"the profile was not written to {self._path}: {error}",
                remedy="see that the folder exists and has room, then take another",
            ) from error
        logger.info("wrote the profile %s", self._path)
        return self._path


def _made_inside(root: Path, asked: str | None) -> Path:
    try:
        folder = (root / (asked or "")).resolve()
        if folder.is_relative_to(root.resolve()):
            folder.mkdir(parents=True, exist_ok=True)
            return folder
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"output_dir cannot be made in the profile folder {root}: {str(error)[:200]}",
            remedy="give a short plain name, or none",
        ) from error
    raise ConfigError(
        f"output_dir {asked!r} is outside of the profile folder {root}",
        remedy=f"give a folder inside of it, or start the engine with {FOLDER_VARIABLE} set to another one",
    )

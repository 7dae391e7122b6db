"""The engine as a child process: `python -m zerogap.engine`. `zerogap serve` is the command for people."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from zerogap.config.schema import EngineSettings
from zerogap.engine.options import ServiceOptions
from zerogap.engine.server import ServerSettings, run_server
from zerogap.log import setup_logging


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m zerogap.engine", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--settings", required=True, help="EngineSettings as JSON")
    parser.add_argument("--name", required=True)
    parser.add_argument("--allow-path", type=Path, action="append", default=[])
    parser.add_argument("--ready-file", type=Path, required=True)
    parser.add_argument("--parent-pipe", type=int, required=True)
    options = parser.parse_args()
    setup_logging(options.name)
    settings = ServerSettings(
        service=ServiceOptions(allowed_paths=tuple(options.allow_path)),
        name=options.name,
        ready_file=options.ready_file,
        parent_pipe=options.parent_pipe,
    )
    engine = EngineSettings.model_validate_json(options.settings)
    return run_server(options.model, engine, settings, dtype=options.dtype, device=options.device)


if __name__ == "__main__":
    sys.exit(main())

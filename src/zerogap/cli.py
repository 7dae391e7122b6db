"""The command line: parses first, imports what a command needs only then (torch takes seconds, a typo must not)."""

from __future__ import annotations

import sys
from pathlib import Path

from cyclopts import App

from zerogap import __version__
from zerogap.errors import ConfigError, ZerogapError

# ruff: noqa: PLC0415 - every import below is late on purpose

app = App(name="zerogap", version=__version__, help="RL post-training with engine and trainer equal to the last bit.")
model = App(name="model", help="Models that need no hub.")
config = App(name="config", help="The options of a run.")
bench = App(name="bench", help="What it costs, as ratios within one run.")
app.command(bench)
app.command(model)
app.command(config)


@app.command
def train(file: Path, *overrides: str) -> int:
    """Train a model as a TOML run file says; dotted overrides come after it (trainer.lr=2e-6)."""
    from zerogap.config.load import load

    resolved = load(file, overrides)
    from zerogap.launch import leave
    from zerogap.launch import train as run

    leave(run(resolved))


@app.command
def serve(
    model: str,
    *,
    host: str = "127.0.0.1",
    port: int = 30000,
    dtype: str = "float32",
    device: str = "cpu",
    num_kv_tokens: int = 16384,
    max_running_requests: int = 256,
    threads: int = 0,
    pause_wait_seconds: float = 600.0,
    max_stall_seconds: float = 60.0,
    version_update_aborts: bool = False,
    allow_path: tuple[Path, ...] = (),
    max_live_requests: int = 32768,
) -> int:
    """Start the rollout engine alone, with SGLang's endpoints. MODEL is a Hugging Face folder or a built-in name.

    Requests that arrive while it is paused wait for PAUSE_WAIT_SECONDS; with work and no step for MAX_STALL_SECONDS it
    is not healthy; VERSION_UPDATE_ABORTS makes update_weight_version abort all requests by default, as SGLang does.
    Callers may name folders beside the model's and below each ALLOW_PATH. ZEROGAP_API_KEY and ZEROGAP_ADMIN_API_KEY in
    the environment are the keys that callers need; an address that is not loopback needs the first.
    """
    from zerogap.config.schema import EngineSettings

    settings = EngineSettings(num_kv_tokens=num_kv_tokens, max_running_requests=max_running_requests, threads=threads)
    from zerogap.engine.options import ServiceOptions, keys_from_environment
    from zerogap.engine.server import ServerSettings, run_server
    from zerogap.log import setup_logging
    from zerogap.model.importer import resolve

    setup_logging("engine")
    options = ServiceOptions(
        pause_wait_seconds,
        max_stall_seconds,
        version_update_aborts,
        **keys_from_environment(),
        allowed_paths=allow_path,
        max_live_requests=max_live_requests,
    )
    server = ServerSettings(host=host, port=port, service=options)
    return run_server(resolve(model), settings, server, dtype=dtype, device=device)


@app.command
def doctor(model: str = "smollm2-135m-instruct", *, dtype: str = "float32", device: str = "cpu") -> int:
    """Show what this machine is, and whether engine and trainer agree on it bit for bit for MODEL; 0 if they do."""
    from zerogap.doctor import examine
    from zerogap.model.importer import resolve

    return examine(resolve(model), dtype=dtype, device=device)


@app.command
def report(*runs: Path, out: Path | None = None) -> int:
    """Write report.html and its figures for one or several run folders."""
    if not runs:
        raise ConfigError("no run folder was given", remedy="zerogap report runs/<time>-<name> [more runs]")
    from zerogap.report.page import write_report

    folder = out or (runs[0] / "report" if len(runs) == 1 else Path("report"))
    print(write_report(runs, folder))
    return 0


@bench.command
def refit(
    model: Path | None = None,
    *,
    modes: tuple[str, ...] = (),
    dtypes: tuple[str, ...] = ("bfloat16", "float32"),
    repeats: int = 5,
    bucket_mib: int = 64,
    out: Path | None = None,
) -> int:
    """Measure a refit in each transfer mode against one memcpy of the same bytes. Leave the machine alone meanwhile.

    MODEL is a Hugging Face folder; without one it is SmolLM2-135M's shape with random weights. OUT is a file for JSON,
    beside which a table and a chart are written. Without --modes: all of them.
    """
    from zerogap.bench.refit import MODES, bench_refit

    return bench_refit(model, modes or MODES, dtypes, repeats=repeats, bucket_mib=bucket_mib, out=out)


@model.command(name="import")
def import_model(name: str = "smollm2-135m-instruct") -> int:
    """Convert a packaged model to a Hugging Face folder in the user's cache, once; prints the folder."""
    from zerogap.model.importer import resolve

    print(resolve(name))
    return 0


@config.command
def show(file: Path, *overrides: str) -> int:
    """Print the resolved run with the origin of each value."""
    from zerogap.config.load import load, to_toml

    resolved = load(file, overrides)
    print(to_toml(resolved.config, resolved.origins))
    return 0


@config.command(name="help")
def help_() -> int:
    """List every option with its type, default and meaning."""
    from zerogap.config.load import options

    for name, option in options().items():
        print(f"{name} = {option.default!r}\n    {option.help}")
    return 0


def main() -> None:
    """The entry point. Exit codes: 0 done, 1 failed, 2 bad input, 130 stopped by Ctrl-C."""
    try:
        sys.exit(app())
    except ConfigError as error:
        _tell(error)
        sys.exit(2)
    except ZerogapError as error:
        _tell(error)
        if "zerogap.launch" in sys.modules:
            from zerogap.launch import leave

            leave(1)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _tell(error: ZerogapError) -> None:
    red, plain = ("\033[31m", "\033[0m") if sys.stderr.isatty() else ("", "")
    print(f"{red}error:{plain} {error}", file=sys.stderr)


if __name__ == "__main__":
    main()

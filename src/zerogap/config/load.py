"""The only place that reads run files and overrides. Every fault is reported at once, with file, key and a hint."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from zerogap.config.rules import broken_rules
from zerogap.config.schema import RunConfig
from zerogap.errors import ConfigError

DEFAULT, COMMAND_LINE = "default", "command line"


@dataclass(frozen=True, slots=True)
class Option:
    """One line of `zerogap config help`."""

    key: str
    help: str
    type: str
    default: Any
    takes_text: bool


@dataclass(frozen=True, slots=True)
class Resolved:
    """A validated run and where each value came from: "default", the file's path, or "command line"."""

    config: RunConfig
    origins: Mapping[str, str]


def options() -> dict[str, Option]:
    """Every option by its dotted name, in the order of the schema."""
    known = {}
    for section, table in RunConfig.model_fields.items():
        model = table.annotation
        assert isinstance(model, type) and issubclass(model, BaseModel)
        properties = model.model_json_schema()["properties"]
        for name, entry in model.model_fields.items():
            key, schema = f"{section}.{name}", properties[name]
            known[key] = Option(key, entry.description or "", _type_name(schema), entry.default, _takes_text(schema))
    return known


def load(path: Path | None, overrides: Iterable[str] = ()) -> Resolved:
    """The run of the TOML file `path` (or of the defaults) with `section.key=value` overrides on top.

    Raises one ConfigError that lists every fault.
    """
    draft = _Draft(options())
    if path is not None:
        for key, value in _file_items(path, draft.faults):
            draft.put(key, value, str(path))
    for text in overrides:
        draft.put_override(text)
    config = draft.validated()
    if draft.faults:
        listed = "\n".join(f"  - {fault}" for fault in draft.faults)
        raise ConfigError(
            f"{len(draft.faults)} fault{'s' * (len(draft.faults) > 1)} in the run's options:\n{listed}",
            remedy="`zerogap config help` lists every option with its type and default",
            faults=draft.faults,
        )
    return Resolved(config, draft.origins)


def to_toml(config: RunConfig, origins: Mapping[str, str] | None = None) -> str:
    """The resolved run as TOML that `load` reads back to an equal run, with each value's origin if given."""
    lines: list[str] = []
    for section, table in config.model_dump().items():
        lines.append(f"[{section}]")
        for name, value in table.items():
            line = f"# {name} is not set" if value is None else f"{name} = {_toml_value(value)}"
            origin = f"  # {origins[f'{section}.{name}']}" if origins and value is not None else ""
            lines.append(line + origin)
        lines.append("")
    return "\n".join(lines)


@dataclass
class _Draft:
    """The values read so far, each with its origin, and the faults found on the way."""

    known: Mapping[str, Option]
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.origins = dict.fromkeys(self.known, DEFAULT)

    def put(self, key: str, value: Any, origin: str) -> None:
        if key not in self.known:
            self.faults.append(f"unknown option {key!r} ({origin}){_hint(key, self.known)}")
        elif self.origins[key] == origin:
            self.faults.append(f"{key} is given twice ({origin})")
        else:
            section, name = key.split(".", 1)
            self.values.setdefault(section, {})[name] = value
            self.origins[key] = origin

    def put_override(self, text: str) -> None:
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals:
            self.faults.append(f"{text!r} is not of the form section.key=value ({COMMAND_LINE})")
        else:
            as_text = key in self.known and self.known[key].takes_text
            self.put(key, _parse_override(value.strip(), as_text), COMMAND_LINE)

    def validated(self) -> RunConfig:
        """The run. Options with faults of their own fall back to defaults, so that the rules can judge the rest."""
        invalid: set[str] = set()
        try:
            config = RunConfig.model_validate(self.values)
        except ValidationError as error:
            for fault in error.errors():
                section, name = str(fault["loc"][0]), str(fault["loc"][1])
                invalid.add(f"{section}.{name}")
                self.values[section].pop(name, None)
                self.faults.append(self._explain(f"{section}.{name}", fault))
            config = RunConfig.model_validate(self.values)
        given = [key for key in self.known if self._value(config, key) != self.known[key].default]
        for options_read, message in broken_rules(config, given, invalid):
            named = ", ".join(f"{key}: {self.origins[key]}" for key in options_read if key in given)
            self.faults.append(f"{message} ({named or 'all are defaults'})")
        return config

    @staticmethod
    def _value(config: RunConfig, key: str) -> Any:
        section, name = key.split(".", 1)
        return getattr(getattr(config, section), name)

    def _explain(self, key: str, fault: Any) -> str:
        expected = str(fault.get("ctx", {}).get("expected", ""))
        choices = [part.strip("' ") for part in expected.replace(" or ", ", ").split(",")] if "'" in expected else []
        near = difflib.get_close_matches(str(fault["input"]), choices, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        message = fault["msg"].removeprefix("Value error, ")
        return f"{key}={fault['input']!r} ({self.origins[key]}): {message}{hint}"


def _file_items(path: Path, faults: list[str]) -> list[tuple[str, Any]]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read the run file {path}: {error.strerror}",
            remedy="give a TOML file, for example examples/quickstart.toml",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not valid TOML: {error}", remedy="mend the line that the message names"
        ) from error
    items: list[tuple[str, Any]] = []
    for section, table in tables.items():
        if isinstance(table, dict):
            items += [(f"{section}.{name}", _frozen(value)) for name, value in table.items()]
        else:
            faults.append(f"option {section!r} ({path}) stands outside of a section, such as [run]")
    return items


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def _parse_override(text: str, takes_text: bool) -> Any:
    """TOML's reading of the value. An option that holds text takes it as it stands, so paths need no quotes."""
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
    return text if takes_text and not isinstance(value, str) else _frozen(value)


def _hint(key: str, known: Iterable[str]) -> str:
    """Options of that very name in another section, or the nearest spelling."""
    names = list(known)
    moved = [known for known in names if known.split(".", 1)[1] == key.rsplit(".", 1)[-1]]
    near = moved or difflib.get_close_matches(key, names, 1, cutoff=0.7)
    return f"; did you mean {' or '.join(repr(name) for name in near)}?" if near else ""


def _takes_text(schema: Mapping[str, Any]) -> bool:
    return any(part.get("type") == "string" for part in (schema, *schema.get("anyOf", ())))


def _type_name(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return " | ".join(json.dumps(value) for value in schema["enum"])
    if "const" in schema:
        return json.dumps(schema["const"])
    if "anyOf" in schema:
        return " | ".join(_type_name(part) for part in schema["anyOf"] if part.get("type") != "null")
    return str(schema.get("type", "value"))


def _toml_value(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

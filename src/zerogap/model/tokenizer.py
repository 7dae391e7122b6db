"""The only place that turns text and messages into token ids and back. Without torch, without `transformers`.

The chat template is the model's own Jinja, in a sandbox. A prompt gets exactly one BOS if its model wants one: from
the template if that writes it, else from here; the server takes token ids and never adds another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import tokenizers
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from zerogap.errors import ConfigError, DataError

Message = Mapping[str, Any]
_REPLACEMENT = "\ufffd"
_SPECIAL_KEYS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A model folder's tokenizer and chat template. Safe to share between threads."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str],
        chat_template: str | None,
        eos_token_ids: tuple[int, ...],
        add_bos: bool,
    ) -> None:
        self._backend, self._special_tokens = backend, dict(special_tokens)
        self.eos_token_ids = eos_token_ids
        bos = special_tokens.get("bos_token")
        self.bos_token_id: int | None = None if bos is None else backend.token_to_id(bos)
        self.chat_template = chat_template
        self._template = None if chat_template is None else _compile(chat_template)
        first = backend.encode("a", add_special_tokens=True).ids[:1]
        self.adds_bos = self.bos_token_id is not None and (add_bos or first == [self.bos_token_id])

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Reads tokenizer.json, tokenizer_config.json, chat_template.jinja and the EOS ids of the model's configs."""
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"{folder} has no tokenizer.json",
                remedy="save the tokenizer in its fast form: AutoTokenizer.from_pretrained(...).save_pretrained(...)",
            )
        backend = tokenizers.Tokenizer.from_file(str(path))
        backend.no_padding()
        backend.no_truncation()
        config = _read_json(folder / "tokenizer_config.json")
        special = {key: _content(config[key]) for key in _SPECIAL_KEYS if config.get(key) is not None}
        return cls(
            backend,
            special_tokens=special,
            chat_template=_read_template(folder, config),
            eos_token_ids=_eos_ids(folder, backend, special.get("eos_token")),
            add_bos=bool(config.get("add_bos_token", False)),
        )

    @property
    def vocab_size(self) -> int:
        """Tokens that the tokenizer knows; a model's vocabulary may be padded to more."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Token ids of plain text. `add_special` adds what the tokenizer adds to a document (a BOS, once)."""
        ids = self._backend.encode(text, add_special_tokens=False).ids
        return self._with_bos(ids) if add_special else ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def render_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True, **kwargs: Any) -> str:
        """The text of a conversation, as `apply_chat_template(tokenize=False)` of `transformers` gives it.

        `kwargs` reach the template (`tools`, `enable_thinking`, ...). Raises ConfigError if there is no template,
        DataError if it refuses the messages.
        """
        if self._template is None:
            raise ConfigError(
                "this model has no chat template",
                remedy="use an instruct model, put a chat_template.jinja into its folder, or give plain text prompts",
            )
        values: dict[str, Any] = {"tools": None, "documents": None, **self._special_tokens, **kwargs}
        try:
            return self._template.render(messages=list(messages), add_generation_prompt=add_generation_prompt, **values)
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            roles = [message.get("role") for message in messages]
            raise DataError(
                f"the chat template refused messages with roles {roles}: {error}",
                remedy="give messages as {role, content} in an order that the model's template supports",
            ) from error

    def encode_chat(self, messages: Sequence[Message], add_generation_prompt: bool = True, **kwargs: Any) -> list[int]:
        """Token ids of a conversation: one BOS if the model wants one, never two."""
        text = self.render_chat(messages, add_generation_prompt, **kwargs)
        return self._with_bos(self._backend.encode(text, add_special_tokens=False).ids)

    def _with_bos(self, ids: list[int]) -> list[int]:
        if not self.adds_bos or self.bos_token_id is None or ids[:1] == [self.bos_token_id]:
            return ids
        return [self.bos_token_id, *ids]


class IncrementalDecoder:
    """Text of a growing token sequence: what `push` and `finish` return, joined, equals one decode of all ids.

    A token may end inside a character; its text is held back until the character is complete.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._ids: list[int] = []
        self._context = 0  # first id of the last text given out: decoders treat the first token of a text specially
        self._given = 0

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete; empty while a character is incomplete."""
        self._ids.extend(ids)
        text = self._pending()
        return "" if text.endswith(_REPLACEMENT) else self._give(text)

    def finish(self) -> str:
        """The text still held back; an incomplete character becomes U+FFFD."""
        return self._give(self._pending())

    def _pending(self) -> str:
        known = self._decode(self._ids[self._context : self._given])
        return self._decode(self._ids[self._context :])[len(known) :]

    def _give(self, text: str) -> str:
        if text:
            self._context, self._given = self._given, len(self._ids)
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip_special)


class _Generation(Extension):
    """`{% generation %}` marks what an assistant said, for training masks; the text is the same without it."""

    tags = {"generation"}  # noqa: RUF012  jinja2 reads a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _compile(template: str) -> jinja2.Template:
    """The environment that chat templates are written for, which is the one of `transformers`."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    functions: dict[str, Any] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    try:
        return environment.from_string(template, globals=functions)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template does not compile: line {error.lineno}: {error.message}",
            remedy="repair chat_template.jinja in the model folder",
        ) from error


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _content(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _read_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    given = config.get("chat_template")
    if isinstance(given, list):
        named = {entry["name"]: entry["template"] for entry in given}
        return named.get("default")
    return given


def _eos_ids(folder: Path, backend: tokenizers.Tokenizer, eos_token: str | None) -> tuple[int, ...]:
    """Every id that ends a response: those of generation_config.json, else config.json, and the tokenizer's own."""
    given = _read_json(folder / "generation_config.json").get("eos_token_id")
    if given is None:
        given = _read_json(folder / "config.json").get("eos_token_id")
    ids = [] if given is None else [given] if isinstance(given, int) else list(given)
    own = None if eos_token is None else backend.token_to_id(eos_token)
    return tuple(dict.fromkeys([*ids, *([] if own is None else [own])]))

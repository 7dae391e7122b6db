"""A character tokenizer with a chat template, so that a tiny random model can stand where a real one does."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

from support.tiny import TINY, tiny_folder

_CHARACTERS = "0123456789 :,?.-abcdefghilmnorstuWSANGT\n"


def tiny_model_folder(path: Path, *, seed: int = 0) -> Path:
    """A complete Hugging Face folder: a tiny llama (vocabulary 64), tokenizer, chat template."""
    tiny_folder(path, TINY, seed=seed)
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {c: i for i, c in enumerate(_CHARACTERS, 3)}
    vocab |= {f"<extra{i}>": i for i in range(len(vocab), TINY.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "</s>", "unk_token": "<unk>"}
    config["chat_template"] = "<s>{% for m in messages %}{{ m.content }}{% endfor %}\n"
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path

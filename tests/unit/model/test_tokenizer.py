"""model/tokenizer.py: ids from text and messages, and text from ids, as `transformers` gives them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors

from zerogap.errors import ConfigError, DataError
from zerogap.model.tokenizer import IncrementalDecoder, Tokenizer

PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[bot]{% endif %}"
WITH_BOS = "{{ bos_token }}" + PLAIN
HI = [{"role": "user", "content": "hi"}]
BOS, EOS = 256, 257


def byte_tokenizer(*, adds_bos: bool) -> tokenizers.Tokenizer:
    """Byte-level BPE without merges: 256 bytes, then <s>, </s>, <end>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<end>"])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer


def folder(path: Path, *, template: str | None = PLAIN, adds_bos: bool = False, **config: Any) -> Path:
    path.mkdir(exist_ok=True, parents=True)
    byte_tokenizer(adds_bos=adds_bos).save(str(path / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **config}
    (path / "tokenizer_config.json").write_text(json.dumps(values))
    if template is not None:
        (path / "chat_template.jinja").write_text(template)
    return path


def count_bos(ids: list[int]) -> int:
    return ids.count(BOS)


@pytest.mark.parametrize("template", [WITH_BOS, PLAIN], ids=["template writes BOS", "template does not"])
@pytest.mark.parametrize("adds_bos", [True, False], ids=["tokenizer adds BOS", "tokenizer does not"])
def test_a_prompt_never_has_two_bos_and_has_one_if_either_side_wants_it(tmp_path, template, adds_bos):
    """A7: both sides add one. A8: only the tokenizer does."""
    tokenizer = Tokenizer.from_folder(folder(tmp_path, template=template, adds_bos=adds_bos))
    ids = tokenizer.encode_chat(HI)
    wanted = adds_bos or template is WITH_BOS
    assert count_bos(ids) == int(wanted)
    assert ids[wanted:] == tokenizer.encode("[user]hi[bot]")


def test_a_bos_that_only_the_config_asks_for_is_added_too(tmp_path):
    """A8: the post-processor was lost, `add_bos_token` was not."""
    tokenizer = Tokenizer.from_folder(folder(tmp_path, add_bos_token=True))
    assert tokenizer.encode_chat(HI)[0] == BOS and count_bos(tokenizer.encode_chat(HI)) == 1


def test_plain_text_gets_no_special_token_unless_asked_and_then_one(tmp_path):
    tokenizer = Tokenizer.from_folder(folder(tmp_path, adds_bos=True))
    assert count_bos(tokenizer.encode("hi")) == 0
    assert count_bos(tokenizer.encode("hi", add_special=True)) == 1
    assert count_bos(tokenizer.encode("<s>hi", add_special=True)) == 1


def test_the_ids_of_a_conversation_are_those_of_its_rendered_text(tmp_path):
    """Rendering, then encoding what was rendered, is one act: no second template, no second special token."""
    tokenizer = Tokenizer.from_folder(folder(tmp_path, template=WITH_BOS, adds_bos=True))
    assert tokenizer.decode(tokenizer.encode_chat(HI), skip_special=False) == tokenizer.render_chat(HI)


CONVERSATIONS = [
    HI,
    [{"role": "system", "content": "Be brief."}, *HI],
    [*HI, {"role": "assistant", "content": "  hello\n"}, {"role": "user", "content": "é 漢字 🙂 <b>&amp;</b>"}],
]
TEMPLATES = {
    "plain": PLAIN,
    "bos": WITH_BOS,
    "blocks": "{% for m in messages %}\n    {% if m.role == 'user' %}\nU: {{ m.content | trim }}\n    {% else %}\n"
    "O: {{ m.content }}\n    {% endif %}\n{% endfor %}\n",
    "json": "{{ messages | tojson }}{{ messages | tojson(indent=2) }}{{ tools }}",
    "break": "{% for m in messages %}{{ m.content }}{% if loop.index == 2 %}{% break %}{% endif %}{% endfor %}",
    "generation": "{% for m in messages %}{% generation %}{{ m.content }}!{% endgeneration %}{% endfor %}",
    "keyword": "{{ enable_thinking }}{{ messages[-1]['content'] }}{{ bos_token }}{{ unk_token }}",
}


@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["one", "system", "three"])
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES.keys())
@pytest.mark.parametrize("prompt", [True, False], ids=["prompt", "no prompt"])
def test_a_conversation_renders_as_transformers_renders_it(tmp_path, template, messages, prompt):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder(tmp_path, template=template))
    ours = Tokenizer.from_folder(tmp_path)
    expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt, enable_thinking=False)
    assert ours.render_chat(messages, prompt, enable_thinking=False) == expected
    ids = theirs.apply_chat_template(
        messages, tokenize=True, add_generation_prompt=prompt, enable_thinking=False, return_dict=False
    )
    assert ours.encode_chat(messages, prompt, enable_thinking=False) == ids


def test_a_template_that_refuses_the_messages_is_a_data_error_with_its_own_words(tmp_path):
    tokenizer = Tokenizer.from_folder(folder(tmp_path, template="{{ raise_exception('roles must alternate') }}"))
    with pytest.raises(DataError, match="roles must alternate"):
        tokenizer.render_chat(HI)


@pytest.mark.parametrize(
    "attack",
    [
        "{{ messages.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ messages.append(1) }}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(tmp_path, attack):
    tokenizer = Tokenizer.from_folder(folder(tmp_path, template=attack))
    with pytest.raises(DataError):
        tokenizer.render_chat(HI)


def test_a_template_that_does_not_compile_is_a_config_error_with_its_line(tmp_path):
    with pytest.raises(ConfigError, match="line 2"):
        Tokenizer.from_folder(folder(tmp_path, template="ok\n{% if %}"))


def test_a_model_without_a_template_still_encodes_text_and_says_what_it_lacks(tmp_path):
    tokenizer = Tokenizer.from_folder(folder(tmp_path, template=None))
    assert tokenizer.decode(tokenizer.encode("plain")) == "plain"
    with pytest.raises(ConfigError, match="no chat template"):
        tokenizer.render_chat(HI)


def test_a_folder_without_a_fast_tokenizer_says_how_to_make_one(tmp_path):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json") as caught:
        Tokenizer.from_folder(tmp_path)
    assert "save_pretrained" in caught.value.remedy


@pytest.mark.parametrize(
    "given_template", [PLAIN, [{"name": "tool_use", "template": "no"}, {"name": "default", "template": PLAIN}]]
)
def test_a_template_inside_the_config_is_found(tmp_path, given_template):
    tokenizer = Tokenizer.from_folder(folder(tmp_path, template=None, chat_template=given_template))
    assert tokenizer.render_chat(HI) == "[user]hi[bot]"


def test_every_eos_of_the_model_and_the_tokenizer_is_known_once(tmp_path):
    folder(tmp_path, eos_token={"content": "</s>", "lstrip": False})
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == (EOS,)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 258}))
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == (258, EOS)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, 5]}))
    assert Tokenizer.from_folder(tmp_path).eos_token_ids == (EOS, 5)


def test_a_truncation_or_padding_saved_with_the_tokenizer_is_not_applied(tmp_path):
    """A prompt that is silently cut is a wrong prompt."""
    folder(tmp_path)
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    backend.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer.from_folder(tmp_path).encode("0123456789")) == 10


def test_the_vocabulary_counts_added_tokens(tmp_path):
    tokenizer = Tokenizer.from_folder(folder(tmp_path))
    assert tokenizer.vocab_size == 259
    assert (tokenizer.bos_token_id, tokenizer.decode([BOS, 71, EOS])) == (BOS, tokenizer.decode([71]))


@pytest.fixture(scope="module")
def bytes_tokenizer(tmp_path_factory) -> Tokenizer:
    return Tokenizer.from_folder(folder(tmp_path_factory.mktemp("bytes")))


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.integers(0, 258), max_size=30), cuts=st.lists(st.integers(1, 4), max_size=30), skip=st.booleans()
)
def test_pieces_of_any_byte_sequence_join_to_the_decode_of_the_whole(bytes_tokenizer, ids, cuts, skip):
    """Also of bytes that are no UTF-8 at all, as a model at high temperature samples them."""
    decoder = IncrementalDecoder(bytes_tokenizer, skip_special=skip)
    pieces, rest = [], list(ids)
    for cut in cuts:
        pieces.append(decoder.push(rest[:cut]))
        rest = rest[cut:]
    pieces += [decoder.push(rest), decoder.finish()]
    assert "".join(pieces) == bytes_tokenizer.decode(ids, skip_special=skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=20))
def test_a_character_appears_only_when_it_is_complete(bytes_tokenizer, text):
    decoder = IncrementalDecoder(bytes_tokenizer)
    pieces = [decoder.push([i]) for i in bytes_tokenizer.encode(text)]
    assert "".join([*pieces, decoder.finish()]) == text
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)


def test_the_tokenizer_loads_without_torch():
    code = "import sys, zerogap.model.tokenizer; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0

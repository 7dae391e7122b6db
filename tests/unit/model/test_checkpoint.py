"""model/checkpoint.py: Hugging Face folders in and out, every name accounted for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny import TINY, TINY_QWEN2, TINY_QWEN3, TINY_UNTIED, tiny_decoder, tiny_folder

from zerogap.errors import CheckpointError
from zerogap.model.checkpoint import COMPANION_FILES, INDEX_FILE, SINGLE_FILE, load_into, read_tensors, save
from zerogap.model.decoder import Decoder

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
CONFIGS = {"tied": TINY, "untied": TINY_UNTIED, "qwen2": TINY_QWEN2, "qwen3": TINY_QWEN3}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def change(folder: Path, edit: Any) -> Path:
    """Rewrites the folder's one file after `edit(tensors)`."""
    tensors = load_file(folder / SINGLE_FILE)
    edit(tensors)
    save_file(tensors, folder / SINGLE_FILE)
    return folder


@pytest.mark.parametrize("max_shard_bytes", [1, 20_000, 5 << 30], ids=["a shard each", "some shards", "one file"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_what_is_saved_loads_again_to_the_last_bit(tmp_path, config, max_shard_bytes):
    tensors = tiny_decoder(config, seed=3).hf_tensors()
    save(tmp_path / "m", tensors, config.to_hf(), copy_from=None, max_shard_bytes=max_shard_bytes)
    assert same(dict(read_tensors(tmp_path / "m")), tensors)
    loaded = Decoder(config)
    load_into(loaded.hf_tensors(), tmp_path / "m")
    assert same(loaded.hf_tensors(), tensors)
    shards = list((tmp_path / "m").glob("*.safetensors"))
    assert len(shards) == {1: len(tensors), 20_000: len(shards), 5 << 30: 1}[max_shard_bytes]
    assert (tmp_path / "m" / INDEX_FILE).exists() == (len(shards) > 1)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
@pytest.mark.parametrize("max_shard_bytes", [20_000, 5 << 30], ids=["shards", "one file"])
def test_transformers_loads_what_is_saved_and_nothing_is_missing(tmp_path, config, max_shard_bytes):
    """C1: exported and loaded again, a tied head is still tied and an untied one is not."""
    transformers = pytest.importorskip("transformers")
    tensors = tiny_decoder(config, seed=3).hf_tensors()
    save(tmp_path, tensors, config.to_hf(), copy_from=None, max_shard_bytes=max_shard_bytes)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs = model.state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in tensors.items())
    tied = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert tied == config.tie_word_embeddings


def test_weights_are_cast_to_the_dtype_of_the_model(tmp_path):
    folder = tiny_folder(tmp_path, dtype=torch.bfloat16)
    loaded = Decoder(TINY)
    load_into(loaded.hf_tensors(), folder)
    assert same(loaded.hf_tensors(), {k: v.float() for k, v in load_file(folder / SINGLE_FILE).items()})


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "missing model.norm.weight"),
        (lambda t: t.update(ghost=torch.zeros(2)), "not of this model ghost"),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(31)}),
            r"of another shape model.norm.weight \(file \[31\], model \[32\]\)",
        ),
        (
            lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}),
            r"of another kind model.norm.weight \(file I8, model torch.float32\)",
        ),
        (lambda t: t.update({"model.norm.weight": torch.zeros(32).to(torch.float8_e4m3fn)}), "of another kind"),
    ],
    ids=["missing", "extra", "shape", "integers", "float8"],
)
def test_a_folder_that_does_not_fit_is_refused_by_name_and_nothing_is_written(tmp_path, edit, message):
    folder = change(tiny_folder(tmp_path), edit)
    decoder = tiny_decoder(seed=9)
    before = {k: v.clone() for k, v in decoder.hf_tensors().items()}
    with pytest.raises(CheckpointError, match=message):
        load_into(decoder.hf_tensors(), folder)
    assert same(decoder.hf_tensors(), before)


def test_every_fault_is_named_at_once(tmp_path):
    def edit(tensors):
        del tensors["model.norm.weight"]
        tensors["ghost"] = torch.zeros(2)

    with pytest.raises(CheckpointError, match=r"missing model\.norm\.weight; not of this model ghost"):
        load_into(Decoder(TINY).hf_tensors(), change(tiny_folder(tmp_path), edit))


def test_a_tied_head_in_the_file_is_accepted_if_it_is_the_embedding(tmp_path):
    """C1."""
    folder = change(tiny_folder(tmp_path), lambda t: t.update({HEAD: t[EMBEDDING].clone()}))
    decoder = Decoder(TINY)
    load_into(decoder.hf_tensors(), folder)
    assert torch.equal(decoder.embedding, load_file(folder / SINGLE_FILE)[EMBEDDING])


def test_a_head_that_differs_from_the_embedding_it_is_tied_to_is_refused(tmp_path):
    """C1: neither silently dropped nor silently used."""
    folder = change(tiny_folder(tmp_path), lambda t: t.update({HEAD: t[EMBEDDING] + 1}))
    decoder = tiny_decoder(seed=9)
    before = {k: v.clone() for k, v in decoder.hf_tensors().items()}
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs") as caught:
        load_into(decoder.hf_tensors(), folder)
    assert "tie_word_embeddings" in caught.value.remedy
    assert same(decoder.hf_tensors(), before)


def test_a_model_with_a_head_of_its_own_needs_it_in_the_file(tmp_path):
    folder = tiny_folder(tmp_path)
    with pytest.raises(CheckpointError, match=r"missing lm_head\.weight") as caught:
        load_into(Decoder(TINY_UNTIED).hf_tensors(), folder)
    assert "tie_word_embeddings" in caught.value.remedy


def test_rotary_constants_of_early_checkpoints_are_no_extra_weights(tmp_path):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = change(tiny_folder(tmp_path), lambda t: t.update({name: torch.zeros(16)}))
    load_into(Decoder(TINY).hf_tensors(), folder)


@pytest.fixture
def sharded(tmp_path) -> Path:
    save(tmp_path, tiny_decoder().hf_tensors(), TINY.to_hf(), copy_from=None, max_shard_bytes=20_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


def test_a_shard_that_is_gone_is_named(sharded):
    lost = sorted(sharded.glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(CheckpointError, match=lost.name):
        load_into(Decoder(TINY).hf_tensors(), sharded)


def test_a_shard_that_was_cut_off_is_named(sharded):
    cut = sorted(sharded.glob("*.safetensors"))[1]
    cut.write_bytes(cut.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=cut.name):
        load_into(Decoder(TINY).hf_tensors(), sharded)


@pytest.mark.parametrize("fault", ["index names too much", "index names too little"])
def test_an_index_that_disagrees_with_its_files_is_refused_by_name(sharded, fault):
    index = json.loads((sharded / INDEX_FILE).read_text())
    if fault == "index names too much":
        index["weight_map"]["ghost"] = index["weight_map"][EMBEDDING]
    else:
        del index["weight_map"]["model.norm.weight"]
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    name = "ghost" if fault == "index names too much" else r"model\.norm\.weight"
    with pytest.raises(CheckpointError, match=name):
        list(read_tensors(sharded))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_a_damaged_index_is_a_checkpoint_error(sharded, text):
    (sharded / INDEX_FILE).write_text(text)
    with pytest.raises(CheckpointError, match="is no index"):
        list(read_tensors(sharded))


def test_an_index_cannot_reach_outside_its_folder(sharded):
    index = {"weight_map": {"a": "../other.safetensors"}}
    (sharded / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="outside its own folder"):
        list(read_tensors(sharded))


def test_a_folder_without_safetensors_says_what_to_do(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor") as caught:
        list(read_tensors(tmp_path))
    assert ".bin" in caught.value.remedy


def test_reading_is_lazy(sharded):
    first = next(iter(read_tensors(sharded)))
    assert first[0] in tiny_decoder().hf_tensors()


def test_companion_files_are_copied_and_others_are_not(tmp_path):
    source = tiny_folder(tmp_path / "source")
    for name in (*COMPANION_FILES, "optimizer.pt"):
        (source / name).write_text(f"{{}} {name}")
    save(tmp_path / "out", tiny_decoder().hf_tensors(), TINY.to_hf(), copy_from=source)
    for name in COMPANION_FILES:
        assert (tmp_path / "out" / name).read_text() == f"{{}} {name}"
    assert not (tmp_path / "out" / "optimizer.pt").exists()


def test_a_generation_config_is_made_where_there_is_none(tmp_path):
    save(tmp_path, tiny_decoder().hf_tensors(), TINY.to_hf(), copy_from=None)
    made = json.loads((tmp_path / "generation_config.json").read_text())
    assert made == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}


def test_saving_again_leaves_no_shard_of_the_older_save_and_keeps_other_files(tmp_path):
    save(tmp_path, tiny_decoder(seed=1).hf_tensors(), TINY.to_hf(), copy_from=None, max_shard_bytes=20_000)
    (tmp_path / "optimizer.pt").write_text("mine")
    tensors = tiny_decoder(seed=2).hf_tensors()
    save(tmp_path, tensors, TINY.to_hf(), copy_from=None)
    assert [p.name for p in tmp_path.glob("*.safetensors*")] == [SINGLE_FILE]
    assert (tmp_path / "optimizer.pt").read_text() == "mine"
    assert same(dict(read_tensors(tmp_path)), tensors)


def test_a_save_into_its_own_source_keeps_the_companion_files(tmp_path):
    (tiny_folder(tmp_path) / "tokenizer.json").write_text("{}")
    save(tmp_path, tiny_decoder().hf_tensors(), TINY.to_hf(), copy_from=tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == "{}"


def test_a_save_that_fails_leaves_the_older_folder_whole_and_nothing_staged(tmp_path, monkeypatch):
    before = tiny_decoder(seed=1).hf_tensors()
    save(tmp_path, before, TINY.to_hf(), copy_from=None)
    names = sorted(tmp_path.iterdir())

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save(tmp_path, tiny_decoder(seed=2).hf_tensors(), TINY.to_hf(), copy_from=None)
    assert sorted(tmp_path.iterdir()) == names
    assert same(dict(read_tensors(tmp_path)), before)


def test_a_tied_head_is_written_once_and_one_that_drifted_is_refused(tmp_path):
    """C1: saved separately, a tied matrix would come back as two."""
    tensors = tiny_decoder().hf_tensors()
    save(tmp_path, {**tensors, HEAD: tensors[EMBEDDING]}, TINY.to_hf(), copy_from=None)
    assert HEAD not in dict(read_tensors(tmp_path))
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        save(tmp_path, {**tensors, HEAD: tensors[EMBEDDING] + 1}, TINY.to_hf(), copy_from=None)


def test_files_can_be_read_by_whoever_can_read_the_config(tmp_path):
    save(tmp_path, tiny_decoder().hf_tensors(), TINY.to_hf(), copy_from=None)
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1
